"""Throughput and steps: per-repeat rates with the null arm beside the deltas, acceptance, and the cost model."""

from __future__ import annotations

import statistics

from harness.record.certified import WITHHELD as NO_SPEED
from harness.record.certified import with_speed
from harness.record.model import CaseRecord, Record
from harness.record.plot import ORACLE, plot_names
from harness.record.speed import WITHHELD
from harness.record.speed_model import ArmFigures, OracleFigures, StepFigures
from harness.record.table import cell, code, count, factor, ms, percent, percent_range, plural, rate, share, table

STEP_WORDS = {
    "classic": "classic step, padded",
    "classic_unpadded": "classic step, unpadded",
    "verify": "verify",
    "draft": "draft step",
}
BASIS_WORDS = {
    "measured": "this block size",
    "positions": "first drafts of a longer block",
    "extrapolated": "the last draft's acceptance, carried on",
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
        parts += [_arm_part(arm, record.spec_sha256) for arm in case.arms]
        if case.abandoned:
            parts.append(
                f"An earlier start of this case timed {plural(case.abandoned, 'repeat')} and was interrupted; all were "
                "timed anew, and the earlier ones count nowhere."
            )
        parts += [_acceptance_table(case), _cost_table(case)]
        parts += [f"![{alt}](data/{stem}/{name})" for name, alt in plot_names(case) if not name.endswith(ORACLE)]
    return "\n\n".join(part for part in parts if part)


def _arm_part(arm: ArmFigures, spec_sha256: str) -> str:
    absent = "withheld" if arm.verdict_reason.startswith(NO_SPEED) else "not measured"
    several = len(set(arm.processes)) > 1
    rows = []
    for repeat in arm.repeats:
        acceptance = repeat.acceptance
        rows.append(
            [
                str(repeat.repeat + 1),
                *([str((repeat.process or 0) + 1)] if several else []),
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
    columns = [">Repeat", *([">Process"] if several else []), "Prompt"]
    columns += [">Classic open tok/s", f">{cell(arm.arm)} tok/s", ">Classic close tok/s"]
    columns += [
        f">{cell(arm.arm)} vs classic",
        ">Null close/open",
        ">Tokens per verify",
        ">Distinct tokens",
        "Same text",
    ]
    parts = [table(columns, rows)] if rows else []
    parts += [_discards(arm)] if arm.discarded else []
    return "\n\n".join([*parts, _verdict(arm, spec_sha256)])


def _discards(arm: ArmFigures) -> str:
    """Pairs that telemetry took out, decided without their times."""
    rows = [[str(one.repeat + 1), one.cause.replace("_", " "), cell(one.detail)] for one in arm.discarded]
    return table([">Repeat discarded", "Cause", "Telemetry"], rows)


def _verdict(arm: ArmFigures, spec_sha256: str) -> str:
    rule = f"repeats and rule were fixed by the spec, SHA-256 {code(spec_sha256[:12])}" if arm.processes else ""
    if not arm.delta:
        return f"{cell(arm.arm)}: **{arm.verdict}**; {cell(arm.verdict_reason)}{f'; {rule}' if rule else ''}."
    ranges = f"deltas {percent_range(arm.delta)}, null {percent_range((*arm.null, *arm.null_block))}"
    if arm.null_block:
        ranges += f" (null blocks {percent_range(arm.null_block)})"
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
    elif arm.processes:
        words.append(_process_words(arm))
    words += [rule] if rule else []
    return "; ".join(words) + "."


def _process_words(arm: ArmFigures) -> str:
    """Mean delta of each process; one process alone cannot see what differs between processes."""
    means = [
        statistics.fmean(delta for delta, process in zip(arm.delta, arm.processes, strict=True) if process == number)
        for number in sorted(set(arm.processes))
    ]
    if len(means) == 1:
        return "one process: what differs between processes is not in the interval"
    return f"{len(means)} processes with means {', '.join(percent(mean) for mean in means)}"


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
        parts += [_step_table(figures), _floor_table(figures), _model_table(case, figures)]
    parts += [_bar_table(case) for case in record.cases]
    for case in record.cases:
        parts += [_oracle_part(case, figures) for figures in case.oracle]
        parts += [f"![{alt}](data/{stem}/{name})" for name, alt in plot_names(case) if name.endswith(ORACLE)]
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


def _bar_table(case: CaseRecord) -> str:
    words = {True: "met", False: "**missed**", None: "not measured"}
    rows = [
        [cell(bar.what), share(bar.value), f"{'at most' if bar.highest else 'at least'} {bar.limit:g}", words[bar.met]]
        for bar in case.bars
    ]
    return table(["Bar", ">Measured", ">Limit", "Outcome"], rows) if rows else ""


def _floor_table(figures: StepFigures) -> str:
    floor = figures.floor
    if floor is None:
        return ""
    rows = [
        [
            f"{floor.weight_bytes / 1e9:.2f}",
            f"{floor.kv_bytes / 1e9:.3f}",
            count(round(floor.stream_gb_per_s)),
            ms(floor.floor_ms),
            ms(figures.classic_step_ms),
            share(floor.floor_share),
        ]
    ]
    columns = [">Matrices GB", ">Keys and values GB", ">Stream GB/s", ">Byte floor ms", ">Classic step ms"]
    return table([*columns, ">Floor / step"], rows)


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
        *_alone_and_in_runs(arm if not withheld else None, figures),
        ["Speed-up predicted from steps and acceptance", factor(figures.predicted_speedup, absent)],
        ["The same against the unpadded classic step", factor(figures.predicted_speedup_unpadded, absent)],
        ["Speed-up measured", factor(figures.measured_speedup, absent)],
    ]
    return table([f"Cost model at block size {figures.block_size}", ">Value"], rows)


def _alone_and_in_runs(arm: ArmFigures | None, figures: StepFigures) -> list[list[str]]:
    """What a step costs in the timed runs over what it costs alone: above 1 the runs had something that it had not."""
    if arm is None:
        return []
    pairs = (
        ("Classic", arm.classic_step_ms, figures.classic_step_ms),
        ("Verify", arm.verify_ms, figures.verify_ms),
    )
    return [[f"{name} in the timed runs / alone", share(runs / step)] for name, runs, step in pairs if runs and step]


def _break_even(value: float) -> str:
    if value <= 0:
        return f"{value:.2f} (any drafter wins)"
    return f"{value:.2f} (no drafter can win)" if value > 1 else share(value)


def _oracle_part(case: CaseRecord, figures: OracleFigures) -> str:
    """Every block size: what a round costs, what it needs, what it is predicted to give and what was measured."""
    known = with_speed(case.arms)
    withheld = {arm.block_size for arm in case.arms} - {arm.block_size for arm in known}
    rows = []
    for point in figures.points:
        absent = "withheld" if point.block_size in withheld or (withheld and not known) else "not measured"
        rows.append(
            [
                str(point.block_size),
                ms(point.verify_ms),
                ms((point.block_size - 1) * point.draft_step_ms),
                ms(point.round_ms),
                _break_even(point.break_even_acceptance),
                share(point.acceptance_rate, absent),
                cell(BASIS_WORDS.get(point.basis or "", absent)),
                factor(point.predicted_speedup, absent),
                factor(point.measured_speedup, absent),
            ]
        )
    columns = [">Block size", ">Verify ms", ">Drafting ms", ">Round ms", ">Acceptance at break-even", ">Acceptance"]
    columns += ["Taken from", ">Speed-up predicted", ">Speed-up measured"]
    classic = f"a classic step takes {ms(figures.classic_step_ms)} ms"
    if figures.one_row_verify_ms is not None:
        classic += f", a verify of one row {ms(figures.one_row_verify_ms)} ms"
    said = f" Break-even: {cell(figures.advice)}." if figures.advice else ""
    return f"At {figures.context_tokens} tokens of context {classic}.{said}\n\n{table(columns, rows)}"
