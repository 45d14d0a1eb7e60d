"""What the scripted rounds of a `rollback` case covered, counted again from their raw lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.record.lines import RollbackLine
from harness.record.model import RollbackFigures
from harness.rollback import Cell, Coverage, Grid, coverage

FREE_TEXT = 3  # missing cells that are named; the rest is a number


def by_grid(lines: Iterable[RollbackLine]) -> dict[Grid, list[RollbackLine]]:
    """Lines by block size and ring."""
    found: dict[Grid, list[RollbackLine]] = {}
    for line in lines:
        found.setdefault(Grid(line.block_size, line.window, line.ring_slots), []).append(line)
    return found


def coverage_of(grid: Grid, lines: Iterable[RollbackLine]) -> Coverage:
    """The cells that generations visited in rounds that were compared."""
    return coverage(grid, ((line.prompt_tokens, line.accepted_per_round[: line.rounds_compared]) for line in lines))


def cell_words(grid: Grid, cell: Cell) -> str:
    """A cell for people."""
    label = next((label for label, length in grid.prompts.items() if length == cell.prompt), str(cell.prompt))
    return f"prompt {label}, {cell.state}, {cell.accepted} accepted"


def rollback_figures(lines: Sequence[RollbackLine]) -> tuple[RollbackFigures, ...]:
    """The figures of each block size."""
    return tuple(_figures(grid, mine) for grid, mine in by_grid(lines).items())


def _figures(grid: Grid, lines: Sequence[RollbackLine]) -> RollbackFigures:
    found = coverage_of(grid, lines)
    first = next((line for line in lines if line.first_difference or not line.identical), None)
    return RollbackFigures(
        block_size=grid.block_size,
        window=grid.window,
        ring_slots=grid.slots,
        runs=len(lines),
        rounds=sum(line.rounds_compared for line in lines),
        cells=found.cells,
        reachable=found.reachable,
        covered=found.covered,
        coverage=found.covered / found.reachable,
        missing=tuple(cell_words(grid, cell) for cell in found.missing),
        unreachable=found.unreachable,
        states=found.states,
        prompts=tuple(dict.fromkeys(line.prompt for line in lines)),
        differing_bytes=sum(line.differing_bytes for line in lines),
        first_difference=difference_words(first) if first else None,
    )


def difference_words(line: RollbackLine) -> str:
    """Which generation differs, and where."""
    accepts = ", ".join(map(str, line.accepted_per_round))
    what = line.first_difference or "tokens"
    return f"prompt {line.prompt} ({line.prompt_tokens} tokens), accepts {accepts}: {what}"


def missing_words(grid: Grid, found: Coverage) -> str:
    """The first cells that no round visited, and how many more."""
    named = "; ".join(cell_words(grid, cell) for cell in found.missing[:FREE_TEXT])
    more = len(found.missing) - FREE_TEXT
    return f"{named} (and {more} more)" if more > 0 else named
