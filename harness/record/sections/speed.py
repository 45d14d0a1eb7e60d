"""Throughput and steps: per-repeat rates with the null arm beside the deltas, acceptance, and the cost model."""

from __future__ import annotations

from harness.record.certified import WITHHELD as NO_SPEED
from harness.record.model import ArmFigures, CaseRecord, Record, StepFigures
from harness.record.plot import plot_names
from harness.record.speed import WITHHELD
from harness.record.table import cell, count, factor, ms, percent, percent_range, plural, rate, share, table

STEP_WORDS = {
    "classic": "classic step, padded",
    "classic_unpadded": "classic step, unpadded",
    "verify": "verify",
    "draft": "draft step",
}
PADDING_NOTE = (
    " Here classic and verify run the same padded shape, which is what makes their bytes equal. "
    "The unpadded step shows what that costs classic, since a slow baseline flatters MTP."
)


def throughput(record: Record, stem: str) -> str:
    """Each throughput case: a table per arm, acceptance by position, plots."""
    cases = [case for case in record.of_kind("throughput") if case.arms]
    if not cases:
        return ""
    parts = ["## Throughput"]
    for case in cases:
        parts += [f"### {cell(case.name)}"] if len(cases) > 1 else []
        if record.tokens_identical is False:
            parts.append(f"Rates are {WITHHELD}.")
        parts += [_arm_part(arm) for arm in case.arms]
        parts += [_acceptance_table(case), _cost_table(case)]
        parts += [f"![{alt}](data/{stem}/{name})" for name, alt in plot_names(case)]
    return "\n\n".join(part for part in parts if part)


def _arm_part(arm: ArmFigures) -> str:
    absent = "withheld" if arm.verdict_reason.startswith(NO_SPEED) else "not measured"
    rows = []
    for repeat in arm.repeats:
        acceptance = repeat.acceptance
        rows.append(
            [
                str(repeat.repeat + 1),
                cell(", ".join(repeat.prompts)),
                rate(repeat.open_tok_s, absent),
                rate(repeat.arm_tok_s, absent),
                rate(repeat.close_tok_s, absent),
                percent(repeat.delta, absent),
                percent(repeat.null),
                share(acceptance.acceptance_length if acceptance else None),
                str(repeat.distinct_tokens),
                "yes" if repeat.identical else "**no**",
            ]
        )
    columns = [">Repeat", "Prompt", ">Classic open tok/s", f">{cell(arm.arm)} tok/s", ">Classic close tok/s"]
    columns += [
        f">{cell(arm.arm)} vs classic",
        ">Null close/open",
        ">Tokens per verify",
        ">Distinct tokens",
        "Same text",
    ]
    return f"{table(columns, rows)}\n\n{_verdict(arm)}"


def _verdict(arm: ArmFigures) -> str:
    if not arm.delta:
        return f"{cell(arm.arm)}: **{arm.verdict}**; {cell(arm.verdict_reason)}."
    ranges = f"deltas {percent_range(arm.delta)}, null {percent_range(arm.null)}"
    words = [
        f"{cell(arm.arm)}, block size {arm.block_size}: {ranges}",
        f"verdict **{arm.verdict}** ({cell(arm.verdict_reason)})",
    ]
    if arm.speedup is not None and arm.speedup_geomean is not None:
        words.append(
            f"speed-up {factor(arm.speedup)} with tokens and seconds pooled, "
            f"{factor(arm.speedup_geomean)} as geometric mean of the pairs"
        )
    if arm.n < 6:
        words.append(f"{plural(arm.n, 'pair')}: too few for an interval, the range is all there is")
    return "; ".join(words) + "."


def _acceptance_table(case: CaseRecord) -> str:
    arms = [(arm, arm.acceptance) for arm in case.arms if arm.acceptance is not None]
    if not arms:
        return ""
    widest = max(len(figures.accepted_at) for _, figures in arms)
    rows = []
    for arm, figures in arms:
        at = [share(value) for value in figures.accepted_at]
        rows.append(
            [
                cell(arm.arm),
                str(arm.block_size),
                count(figures.num_rounds),
                share(figures.acceptance_rate),
                share(figures.acceptance_length),
                share(figures.accepted_per_round),
                *at,
                *["not drafted"] * (widest - len(at)),
                f"{arm.distinct_tokens} of {arm.tokens}",
            ]
        )
    positions = [f">Draft {number}" for number in range(1, widest + 1)]
    columns = [
        "Arm",
        ">Block size",
        ">Rounds",
        ">Accepted / drafted",
        ">Tokens per verify",
        ">Drafts accepted per verify",
    ]
    return table([*columns, *positions, ">Distinct tokens"], rows)


def _cost_table(case: CaseRecord) -> str:
    """Where the time of the timed runs went, per round and per classic token."""
    arms = [arm for arm in case.arms if arm.round_ms is not None]
    rows = []
    for arm in arms:
        known = arm.round_ms is not None and arm.verify_ms is not None and arm.draft_step_ms is not None
        drafting = (arm.block_size - 1) * arm.draft_step_ms if arm.draft_step_ms is not None else None
        rest = (
            arm.round_ms - arm.verify_ms - drafting if known and arm.round_ms and arm.verify_ms and drafting else None
        )
        rows.append(
            [cell(arm.arm), *map(ms, (arm.round_ms, arm.verify_ms, drafting, rest, arm.classic_step_ms, arm.ttft_ms))]
        )
    columns = [">Round ms", ">of it verify", ">of it drafting", ">of it the rest", ">Classic ms per token"]
    return table(["In the timed runs", *columns, ">First token ms"], rows) if rows else ""


def steps(record: Record, stem: str) -> str:
    """What one step costs, and whether that explains the speed-up."""
    found = [(case, figures) for case in record.cases for figures in case.steps]
    if not found:
        return ""
    parts = [
        "## Steps",
        "Single steps, timed apart from the arms; medians."
        + (PADDING_NOTE if any(figures.unpadded_step_ms for _, figures in found) else ""),
    ]
    for case, figures in found:
        parts += [_step_table(figures), _model_table(case, figures)]
    return "\n\n".join(part for part in parts if part)


def _step_table(figures: StepFigures) -> str:
    rows = [
        [
            STEP_WORDS.get(step, cell(step)),
            str(time.rows),
            ms(time.median_ms),
            ms(time.min_ms),
            ms(time.max_ms),
            str(time.n),
        ]
        for step, time in sorted(figures.times.items(), key=lambda item: list(STEP_WORDS).index(item[0]))
    ]
    columns = [
        f"Step at {figures.context_tokens} tokens of context",
        ">Rows",
        ">Median ms",
        ">Min ms",
        ">Max ms",
        ">Samples",
    ]
    return table(columns, rows)


def _model_table(case: CaseRecord, figures: StepFigures) -> str:
    if figures.break_even_acceptance is None:
        return ""
    arm = next((arm for arm in case.arms if arm.block_size == figures.block_size), None)
    withheld = arm is not None and arm.verdict_reason.startswith(NO_SPEED)
    absent = "withheld" if withheld else "not measured"
    measured_rate = arm.acceptance.acceptance_rate if arm and arm.acceptance else None
    rows = [
        ["Acceptance rate at break-even", _break_even(figures.break_even_acceptance)],
        ["Acceptance rate measured", share(measured_rate)],
        ["Speed-up predicted from steps and acceptance", factor(figures.predicted_speedup, absent)],
        ["The same against the unpadded classic step", factor(figures.predicted_speedup_unpadded, absent)],
        ["Speed-up measured", factor(figures.measured_speedup, absent)],
    ]
    return table([f"Cost model at block size {figures.block_size}", ">Value"], rows)


def _break_even(value: float) -> str:
    if value <= 0:
        return f"{value:.2f} (any drafter wins)"
    return f"{value:.2f} (no drafter can win)" if value > 1 else share(value)
