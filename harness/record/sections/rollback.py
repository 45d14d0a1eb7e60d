"""Scripted rounds around the ring's edge: what was visited, and what cannot be."""

from __future__ import annotations

from harness.record.model import CaseRecord, Record, RollbackFigures
from harness.record.table import cell, count, plural, table

INTRO = (
    "Rounds with a scripted number of accepted drafts, from prompts around the window (W) and the ring's edge (S). "
    "After each rollback every layer's K/V bytes were compared with classic decode's at the same length."
)


def rollback(record: Record, stem: str) -> str:
    """Each `rollback` case: coverage by what a block meets in the ring, and the cells that no script can reach."""
    found = [(case, figures) for case in record.cases for figures in case.rollback]
    if not found:
        return ""
    return "\n\n".join(["## Rollback", INTRO, *(_part(case, figures) for case, figures in found)])


def _part(case: CaseRecord, figures: RollbackFigures) -> str:
    verdict = (
        f"**differs**: {cell(figures.first_difference)}"
        if figures.first_difference
        else f"{count(figures.differing_bytes)} bytes differ"
    )
    words = (
        f"{cell(case.name)}, block size {figures.block_size}, window {count(figures.window)}, "
        f"ring of {count(figures.ring_slots)}: {count(figures.covered)} of {count(figures.reachable)} reachable cells "
        f"visited ({100 * figures.coverage:.1f} %) by {count(figures.rounds)} rounds of "
        f"{plural(figures.runs, 'generation')}; {verdict}."
    )
    rows = [[cell(state), count(done), count(total)] for state, (done, total) in figures.states.items()]
    parts = [words, table(["A block's rows", ">Cells visited", ">Reachable"], rows)]
    if figures.missing:
        parts.append(f"Not visited: {cell('; '.join(figures.missing))}.")
    reasons = [f"- {count(number)} cells: {cell(why)}" for why, number in figures.unreachable.items()]
    if reasons:
        total = count(figures.cells - figures.reachable)
        parts.append(f"Of {count(figures.cells)} cells, {total} cannot be reached:\n\n" + "\n".join(reasons))
    parts.append(f"Prompts: {cell(', '.join(figures.prompts))}.")
    return "\n\n".join(parts)
