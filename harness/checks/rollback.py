"""`rollback`: after every rollback around a ring's edge the caches hold classic's own bytes.

The child plays scripts that reach every combination of prompt length, state of the ring and accepted drafts. Which of
them were visited is counted here from what the rounds really did, never taken from the child's word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.checks.base import Judgement, inexact_note, not_engaged, of_type
from harness.record.lines import AnyLine, DecisionLine, RollbackLine
from harness.record.rollback import by_grid, coverage_of, difference_words, missing_words
from harness.spec.model import Rollback

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case


def measure(case: Case, context: RunContext) -> None:
    """One job for all block sizes."""
    check = case.check
    assert isinstance(check, Rollback)
    context.job(case, "rollback", stage=check.stage, block_sizes=list(check.block_sizes or ()))


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Every reachable cell of every block size visited, and no byte or token that is not classic's."""
    assert isinstance(case.check, Rollback)
    decisions, runs = of_type(lines, DecisionLine), of_type(lines, RollbackLine)
    note = inexact_note(decisions)
    differing = [line for line in runs if line.first_difference or line.differing_bytes or not line.identical]
    if differing:
        smallest = min(differing, key=lambda line: (line.rounds_compared, line.prompt_tokens))
        text = f"block size {smallest.block_size}, {difference_words(smallest)}"
        return Judgement("fail", f"{len(differing)} of {len(runs)} generations differ, smallest {text}{note}")
    if declined := not_engaged(decisions):
        return Judgement("declined", declined.log_line)
    found = {grid.block_size: (grid, coverage_of(grid, mine)) for grid, mine in by_grid(runs).items()}
    for size in case.check.block_sizes or ():
        if size not in found:
            return Judgement("error", f"block size {size}: no generation was compared")
        grid, seen = found[size]
        if seen.missing:
            what = f"{len(seen.missing)} of {seen.reachable} reachable cells were not visited"
            return Judgement("error", f"block size {size}: {what}: {missing_words(grid, seen)}")
    covered = sum(seen.covered for _, seen in found.values())
    beyond = sum(seen.cells - seen.reachable for _, seen in found.values())
    rounds = sum(line.rounds_compared for line in runs)
    what = f"all {covered} reachable cells equal classic in every byte after {rounds} rounds; {beyond} unreachable"
    return Judgement("pass", what + note)
