"""The first screen: the finding, what was compared, the noise beside it, one hash, the host, what is missing."""

from __future__ import annotations

from collections import Counter

from harness.record.model import Record
from harness.record.sections.common import acceptance_at, data_link, hash10, outcome_words, outputs_of, skipped_cases
from harness.record.sections.kernels import kernel_cases, summary_lines
from harness.record.speed_model import ArmFigures
from harness.record.table import cell, code, count, factor, ms, percent, percent_range, plural, share

REQUESTS = "greedy, one sequence at a time"


def title(record: Record, stem: str) -> str:
    """The heading; it states the finding."""
    return f"# {cell(record.title)}"


def summary(record: Record, stem: str) -> str:
    """Warnings, then one line for each thing a reviewer must see without scrolling."""
    lines = [f"- **{name}.** {text}" for name, text in _lines(record, stem) if text]
    return "\n\n".join([*_warnings(record), "\n".join(lines)])


def _warnings(record: Record) -> list[str]:
    found = []
    if record.contradictions:
        listed = "\n".join(f"> - {cell(problem)}" for problem in record.contradictions)
        found.append(
            f"> **This record contradicts itself**: its raw lines do not bear out what it states.\n>\n{listed}"
        )
    if record.inexact:
        found.append("> **Inexact**: the probe failed and MTP engaged by override; nothing here shows exactness.")
    if origin := next((str(child.target["origin"]) for child in record.children if child.target.get("origin")), ""):
        found.append(
            f"> **{cell(origin.rstrip('.'))}**: shapes and cost are the real model's, text is the nano pair's."
        )
    if seeded := next((str(child.target["seeded"]) for child in record.children if child.target.get("seeded")), ""):
        found.append(
            f"> **{cell(seeded.capitalize())}**: bytes, decisions and step costs are the shapes'; the text means "
            "nothing, so drafts miss and rounds lose. Acceptance and speed-up say nothing of a trained pair."
        )
    if not record.complete:
        done, total = sum(case.finished for case in record.cases), len(record.cases) + len(record.not_run)
        found.append(
            f"> **Partial record**: {done} of {plural(total, 'case')} finished before the run stopped; "
            "`harness run --resume` finishes it."
        )
    return found


def _lines(record: Record, stem: str) -> list[tuple[str, str]]:
    return [
        *(summary_lines(record) if kernel_cases(record) else _pair_lines(record)),
        ("Host", "; ".join(cell(record.host[key]) for key in ("CPU", "GPU", "OS", "Versions") if key in record.host)),
        ("Commit", cell(record.host.get("Commit", ""))),
        ("Reproduce", code(record.command)),
        ("Data", ", ".join(data_link(stem, name) for name in ("record.json", "runs.jsonl", "env.json", "spec.yaml"))),
        ("Left out", _left_out(record)),
    ]


def _pair_lines(record: Record) -> list[tuple[str, str]]:
    """What stands on the first screen of a record of a pair."""
    arms = [arm for case in record.cases for arm in case.arms]
    return [
        ("Answer", _answer(record, arms)),
        ("Compared", _compared(record, arms)),
        ("Noise", _noise(record, arms)),
        ("Exactness", _exactness(record)),
        ("Output", _output(record)),
        ("Acceptance", _acceptance(arms)),
        ("Steps", _steps(record)),
        ("Other engines", _engines(record)),
    ]


def _answer(record: Record, arms: list[ArmFigures]) -> str:
    if record.tokens_identical is False:
        return (
            "MTP does not give classic's text (see Parity or Throughput). A faster wrong text is no result, "
            "so no speed figure stands on this page."
        )
    measured = [arm for arm in arms if arm.delta]
    if not measured:
        return ""
    return " ".join(_arm_answer(arm) for arm in measured)


def _arm_answer(arm: ArmFigures) -> str:
    pooled = f", {factor(arm.speedup)} over all repeats" if arm.speedup is not None else ""
    return (
        f"{cell(arm.arm)} (block size {arm.block_size}): {percent_range(arm.delta)} against its own classic brackets "
        f"in {plural(arm.n, 'paired repeat')}{pooled}. Verdict: **{arm.verdict}**, {cell(arm.verdict_reason)}."
    )


def _compared(record: Record, arms: list[ArmFigures]) -> str:
    if not arms:
        return ""
    sizes = ", ".join(f"{cell(arm.arm)} with {arm.block_size} rows a verify" for arm in arms)
    tokens = max(arm.tokens for arm in arms)
    return (
        f"{sizes}, against classic decode of the same target, in turns; {REQUESTS}; up to {tokens} "
        "tokens a run. Rates count decode only: the first token belongs to prefill; warm-up is discarded."
    )


def _noise(record: Record, arms: list[ArmFigures]) -> str:
    measured = [arm for arm in arms if arm.null_range is not None]
    if not measured:
        return ""
    nulls = [null for arm in measured for null in (*arm.null, *arm.null_block)]
    effect = percent(max(arm.smallest_effect for arm in measured)).lstrip("+")
    return f"classic against classic (null arm) {percent_range(nulls)}; smallest effect of interest {effect}."


def _exactness(record: Record) -> str:
    """The probe's own log line, and what the stages did."""
    parts = [code(line) for case in record.of_kind("exactness_probe") for line in case.log_lines]
    cells = record.of_kind("attribution")
    if cells:
        words = Counter(outcome_words(case) for case in cells)
        parts.append(
            f"attribution over {plural(len(cells), 'cell')}: {', '.join(f'{n} {w}' for w, n in words.items())}"
        )
    for figures in (figures for case in record.of_kind("rollback") for figures in case.rollback):
        visited = f"{count(figures.covered)} of {count(figures.reachable)} reachable cells"
        parts.append(f"rollback at block size {figures.block_size}: {visited}, {figures.differing_bytes} bytes differ")
    return "; ".join(parts)


def _output(record: Record) -> str:
    if record.tokens_identical is None:
        return "no case compared outputs."
    outputs = outputs_of(record)
    listed = ", ".join(f"{cell(prompt)} {' / '.join(map(hash10, hashes))}" for prompt, hashes in outputs.items())
    if record.tokens_identical:
        return f"one SHA-256 of the token ids per prompt over all arms: {listed}."
    return f"more than one SHA-256 of the token ids for a prompt: {listed}."


def _acceptance(arms: list[ArmFigures]) -> str:
    found = []
    for arm in arms:
        if arm.acceptance is not None:
            found.append(
                f"{cell(arm.arm)} emits {share(arm.acceptance.acceptance_length)} tokens per verify (bonus included), "
                f"by position {acceptance_at(arm.acceptance)}; at least {arm.distinct_tokens} distinct tokens "
                f"in {arm.tokens}"
            )
    return "; ".join(found) + "." if found else ""


def _steps(record: Record) -> str:
    """How near a classic step is to reading memory alone; nothing where the stream was not measured."""
    found: dict[int, str] = {}
    for figures in (figures for case in record.cases for figures in case.steps):
        if figures.floor is not None:
            step, at = ms(figures.classic_step_ms), count(figures.context_tokens)
            rate = count(round(figures.floor.stream_gb_per_s))
            part = f"{share(figures.floor.floor_share)} is its byte floor at {rate} GB/s"
            found[figures.context_tokens] = f"classic {step} ms at {at} tokens of context, of which {part}"
    missed = [bar.what for case in record.cases for bar in case.bars if bar.met is False]
    parts = list(found.values()) + ([f"**bars missed: {cell(', '.join(missed))}**"] if missed else [])
    return "; ".join(parts) + "." if parts else ""


def _engines(record: Record) -> str:
    """What the same checkpoint takes elsewhere."""
    parts = []
    for case in record.cases:
        for engine in case.engines:
            mine = [one for one in case.decode if one.arm == engine.peer and one.speedup is not None]
            took = ", ".join(f"{factor(one.speedup)} ours at {count(one.context_tokens)}" for one in mine)
            equal = f"{sum(one.rows_equal or 0 for one in mine)} of {sum(one.rows for one in mine)}"
            if mine:
                parts.append(f"{cell(engine.peer)} takes {took} tokens, {equal} rows of its blocks equal its chain")
    return "; ".join(parts) + "." if parts else ""


def _left_out(record: Record) -> str:
    parts: list[str] = []
    skipped = skipped_cases(record)
    if skipped:
        parts.append(f"{plural(len(skipped), 'case')} skipped")
    if record.not_run:
        parts.append(f"{plural(len(record.not_run), 'case')} not run")
    if record.tokens_identical is False:
        parts.append("every speed figure, because tokens differ")
    parts = parts or ["no case"]
    return "; ".join(parts) + "; what one run cannot say: [Not covered here](#not-covered-here)."
