"""Timed lines -> pairs: an arm and the classic brackets of its own repeat, with what telemetry says against them. Pure.

The check that judges a run and the record that shows it pair the lines here, so they cannot pair them differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness import stats
from harness.record.lines import ArmLine, Disturbance

CLASSIC, NULL = "classic", "null"  # names of the brackets, and of classic in an arm's place
SLOTS = ("open", "arm", "close")


@dataclass(frozen=True)
class Pair:
    """One repeat of one arm; rates in tokens/s."""

    repeat: int
    process: int | None  # None: a record older than fresh processes
    lines: tuple[ArmLine, ...]  # brackets and this arm, in order
    opening: float
    running: float
    closing: float

    @property
    def own(self) -> tuple[ArmLine, ...]:
        """The arm's own runs: one in a bracket, two in an ABBA block."""
        return tuple(line for line in self.lines if line.slot == "arm")

    @property
    def delta(self) -> float:
        """How much faster the arm is than its brackets."""
        return stats.paired_delta(self.running, self.opening, self.closing)

    @property
    def null(self) -> float:
        """Closing bracket against opening bracket."""
        return stats.null_delta(self.opening, self.closing)

    @property
    def disturbed(self) -> tuple[Disturbance, ...]:
        """Why this pair does not count: causes of any of its runs, each once."""
        return tuple(dict.fromkeys(found for line in self.lines for found in line.disturbed))


def pairs_of(lines: Sequence[ArmLine], arm: str) -> tuple[Pair, ...]:
    """Every whole repeat of an arm, discarded ones included; `null` gives the null blocks."""
    repeats = sorted({line.repeat for line in lines if line.arm == arm and line.slot == "arm"})
    found = []
    for repeat in repeats:
        rows = tuple(line for line in lines if line.repeat == repeat and (line.slot != "arm" or line.arm == arm))
        rates = [pooled_rate([line for line in rows if line.slot == slot]) for slot in SLOTS]
        opening, running, closing = rates
        if opening is not None and running is not None and closing is not None:
            found.append(Pair(repeat, rows[0].process, rows, opening, running, closing))
    return tuple(found)


def arms_of(lines: Sequence[ArmLine]) -> tuple[str, ...]:
    """Names of the arms in order of appearance, without the null arm."""
    return tuple(dict.fromkeys(line.arm for line in lines if line.slot == "arm" and line.arm != NULL))


def pooled_rate(lines: Sequence[ArmLine]) -> float | None:
    """Decode tokens over decode seconds of several generations; None when there is nothing to divide."""
    tokens = sum(line.tokens - 1 for line in lines)
    seconds = sum(line.decode_s for line in lines)
    return stats.decode_tok_s(tokens + 1, seconds) if tokens > 0 and seconds > 0 else None


def judge_pairs(pairs: Sequence[Pair], null_blocks: Sequence[Pair], smallest_effect: float) -> stats.VerdictResult:
    """The verdict on an arm: disturbed pairs are left out on both sides, disturbed null blocks too."""
    kept = [pair for pair in pairs if not pair.disturbed]
    processes = [pair.process for pair in kept if pair.process is not None]
    judged = stats.judge_deltas(
        [pair.delta for pair in kept],
        [pair.null for pair in kept],
        smallest_effect,
        processes=processes if kept and len(processes) == len(kept) else None,
        null_blocks=[block.delta for block in null_blocks if not block.disturbed],
        discarded=len(pairs) - len(kept),
    )
    return judged


def is_bracketed(lines: Sequence[ArmLine]) -> bool:
    """Whether each repeat ran without a break as open, arms, close: what makes a delta paired."""
    order = {slot: place for place, slot in enumerate(SLOTS)}
    seen: set[int] = set()
    last: tuple[int, int] | None = None
    for line in lines:
        here = (line.repeat, order[line.slot])
        if last is None or last[0] != line.repeat:
            if line.repeat in seen:
                return False
            seen.add(line.repeat)
        elif here < last:
            return False
        last = here
    return True
