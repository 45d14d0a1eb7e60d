"""Other engines on the same checkpoint: time per token beside ours, and each one's block against its own chain."""

from __future__ import annotations

from harness.kernel_figures import OURS
from harness.record.model import CaseRecord, DecodeFigures, Record
from harness.record.table import cell, count, factor, ms, share, table

EXPLAINED = (
    "Classic decode of the same checkpoint on the same token ids, each engine in a process of its own, one after "
    "another; host clock from one token to the next, medians. Then a block of rows against the same tokens one at a "
    "time in the same engine, logits as bytes."
)


def engines(record: Record, stem: str) -> str:
    """A table per case, and what each peer is."""
    cases = [case for case in record.of_kind("peer_decode") if case.decode or case.engines]
    if not cases:
        return ""
    parts = ["## Other engines", EXPLAINED]
    for case in cases:
        parts += [f"### {cell(case.name)}"] if len(cases) > 1 else []
        parts += [_table(case), _peers(case)]
    return "\n\n".join(part for part in parts if part)


def _table(case: CaseRecord) -> str:
    if not case.decode:
        return ""
    columns = ["Engine", ">Context", ">ms a token", ">Min ms", ">Max ms", ">Tokens", ">Its time / ours"]
    columns += [">Block ms", ">Block / token"]
    columns += [">Block rows equal to its chain", ">Same greedy token", ">First tokens that are ours"]
    return table(columns, [_row(figures) for figures in case.decode])


def _row(figures: DecodeFigures) -> list[str]:
    ours = figures.arm == OURS
    equal = "not compared" if figures.rows_equal is None else f"{figures.rows_equal} of {figures.rows}"
    return [
        cell(figures.arm),
        count(figures.context_tokens),
        ms(figures.ms_per_token),
        ms(figures.min_ms),
        ms(figures.max_ms),
        str(figures.n),
        "1" if ours else factor(figures.speedup),
        ms(figures.block_ms),
        share(figures.block_over_token),
        equal + ("" if figures.repeatable is not False else " (its chain does not repeat itself)"),
        "not compared" if figures.argmax_equal is None else f"{figures.argmax_equal} of {figures.rows}",
        "all" if ours else f"{figures.same_tokens} of {figures.tokens}",
    ]


def _peers(case: CaseRecord) -> str:
    rows = [
        f"- {cell(engine.peer)}: "
        + (f"not measured, {cell(engine.reason)}" if engine.reason else f"{cell(engine.version)}; {cell(engine.note)}")
        + "."
        for engine in case.engines
    ]
    return "\n".join(rows)
