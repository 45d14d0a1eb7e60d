"""Every way in which a round can be rolled back around a ring's edge: cells, scripts that reach them, coverage. Pure.

A cell is a prompt length, what the block of a round meets in the ring, and how many drafts are accepted. The child
plays scripts, the record counts from its raw lines which cells they visited; both use this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

OPEN = "window not full"
FILLING = "window fills"
FULL = "window full, not wrapped"
TO_EDGE = "up to the edge"
UNDONE = "straddles the edge, undone"
KEPT = "straddles the edge, kept"
AT_EDGE = "at the edge"
WRAPPED = "wrapped"
STATES = (OPEN, FILLING, FULL, TO_EDGE, UNDONE, KEPT, AT_EDGE, WRAPPED)
"""What a block meets: the window and the ring's first edge before, at and after the wrap, or an edge that the block
crosses, with the kept rows before it (the rollback goes back over the edge) or across it."""

SHORT_PROMPT = 8


class Cell(NamedTuple):
    """One combination: prompt length in tokens, state, accepted drafts."""

    prompt: int
    state: str
    accepted: int


@dataclass(frozen=True)
class Grid:
    """All cells of one block size over a ring of `slots` that holds a window of `window`."""

    block_size: int
    window: int
    slots: int

    @property
    def budget(self) -> int:
        """Tokens that a script may emit after the first one: enough from window - block size to past the edge."""
        return self.slots - self.window + 2 * self.block_size + 1

    @cached_property
    def prompts(self) -> dict[str, int]:
        """Label -> length: a short prompt, every length around the window, around the edge, and before the second."""
        size, window, slots = self.block_size, self.window, self.slots
        found = {"short": min(SHORT_PROMPT, max(1, window // 2))}
        found |= {f"W{by:+d}" if by else "W": window + by for by in range(-size, size + 1)}
        found |= {"S": slots, "S+1": slots + 1}
        found["2S-2"] = 2 * slots - 2
        seen: dict[int, str] = {}
        for label, length in found.items():
            if length >= 1:
                seen.setdefault(length, label)
        return {label: length for length, label in seen.items()}

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The whole product, unreachable ones included."""
        return tuple(
            Cell(prompt, state, accepted)
            for prompt in self.prompts.values()
            for state in STATES
            for accepted in range(self.block_size)
        )

    def state(self, length: int, accepted: int) -> str:
        """What a block meets that begins with `length` rows held and keeps `accepted` + 1 of its own."""
        if length >= self.slots and length % self.slots == 0:
            return AT_EDGE
        edge = (length // self.slots + 1) * self.slots
        end = length + self.block_size
        if end > edge:
            return KEPT if length + accepted + 1 > edge else UNDONE
        if end == edge:
            return TO_EDGE
        if length >= self.slots:
            return WRAPPED
        if end <= self.window:
            return OPEN
        return FILLING if length < self.window else FULL

    def places(self, cell: Cell) -> Iterator[int]:
        """Lengths from which a round of a script would visit the cell."""
        last = cell.prompt + self.budget - cell.accepted - 1
        return (at for at in range(cell.prompt, last + 1) if self.state(at, cell.accepted) == cell.state)

    def unreachable(self, cell: Cell) -> str | None:
        """Why no script visits the cell, or None."""
        if next(self.places(cell), None) is not None:
            return None
        if cell.state == UNDONE and cell.accepted == self.block_size - 1:
            return "all rows are kept, so none is undone"
        if cell.state == KEPT and cell.accepted == 0:
            return "the one row that is kept lies before the edge"
        if cell.state == FULL and self.window + self.block_size >= self.slots:
            return f"{self.block_size} rows do not fit between the window and the edge"
        if cell.state in (OPEN, FILLING, FULL) and cell.prompt >= self.window:
            return "the prompt is already past it"
        return f"more than {self.budget} tokens away"

    @cached_property
    def reachable(self) -> frozenset[Cell]:
        """The cells that scripts can visit."""
        return frozenset(cell for cell in self.cells if self.unreachable(cell) is None)

    def visited(self, prompt: int, accepted_per_round: Sequence[int]) -> Iterator[Cell]:
        """The cell of each round of a generation."""
        length = prompt
        for accepted in accepted_per_round:
            yield Cell(prompt, self.state(length, accepted), accepted)
            length += accepted + 1

    def scripts(self, prompt: int) -> tuple[tuple[int, ...], ...]:
        """Accepted drafts round by round, a few generations that together visit every reachable cell of a prompt."""
        left = {cell for cell in self.reachable if cell.prompt == prompt}
        found = []
        while left:
            script = self._script(prompt, left)
            left.difference_update(self.visited(prompt, script))
            found.append(script)
        return tuple(found)

    def _script(self, prompt: int, left: set[Cell]) -> tuple[int, ...]:
        """One generation that visits what is left as it comes, in the shortest steps that do."""
        script: list[int] = []
        left, length = set(left), prompt
        while True:
            step = self._next(prompt, length, left)
            if step is None:
                return tuple(script)
            left.discard(Cell(prompt, self.state(length, step), step))
            script.append(step)
            length += step + 1

    def _next(self, prompt: int, length: int, left: set[Cell]) -> int | None:
        """Drafts to accept at `length`: to visit a cell here, or else to come to the next place that has one."""
        for place in range(length, prompt + self.budget):
            for accepted in range(self.block_size):
                fits = place + accepted + 1 <= prompt + self.budget
                if fits and Cell(prompt, self.state(place, accepted), accepted) in left:
                    return accepted if place == length else min(place - length, self.block_size) - 1
        return None


@dataclass(frozen=True)
class Coverage:
    """How many cells of a grid a set of generations visited; `missing` are reachable ones that none did."""

    cells: int
    reachable: int
    covered: int
    missing: tuple[Cell, ...]
    unreachable: dict[str, int]  # why -> cells
    states: dict[str, tuple[int, int]]  # state -> covered, reachable


def coverage(grid: Grid, runs: Iterable[tuple[int, Sequence[int]]]) -> Coverage:
    """Count the cells that generations visited, each given as prompt length and accepted drafts per round."""
    seen = {cell for prompt, accepted in runs for cell in grid.visited(prompt, accepted)} & grid.reachable
    why: dict[str, int] = {}
    for cell in grid.cells:
        if reason := grid.unreachable(cell):
            why[reason] = why.get(reason, 0) + 1
    return Coverage(
        cells=len(grid.cells),
        reachable=len(grid.reachable),
        covered=len(seen),
        missing=tuple(cell for cell in grid.cells if cell in grid.reachable and cell not in seen),
        unreachable=why,
        states={
            state: (sum(c.state == state for c in seen), sum(c.state == state for c in grid.reachable))
            for state in STATES
        },
    )
