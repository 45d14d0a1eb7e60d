"""Figures of one kernel case from its raw lines, shared by the judge and the record. Pure, standard library alone.

Every figure is a median over repeats; a ratio is that of two medians of the same run. The null spread is how far the
same arm, timed twice in each repeat, was apart from itself: no effect below it is one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.record.lines import KernelLine

OURS, STREAM = "ours", "stream"


@dataclass(frozen=True)
class KernelTimes:
    """The arms of one case by (arm, rows, launches)."""

    lines: tuple[KernelLine, ...]

    def line(self, arm: str, rows: int, launches: int = 1, again: bool = False) -> KernelLine | None:
        """One arm's line; None when it was not timed."""
        key = (arm, rows, launches, again)
        return next((x for x in self.lines if (x.arm, x.rows, x.launches, x.again) == key), None)

    def us(self, arm: str, rows: int, launches: int = 1) -> float | None:
        """Median microseconds of one call."""
        line = self.line(arm, rows, launches)
        return statistics.median(line.us) if line is not None and line.us else None

    def gb_per_s(self, arm: str, rows: int) -> float | None:
        """Bytes that one call must read over its median time, in GB/s."""
        line, us = self.line(arm, rows), self.us(arm, rows)
        return line.nbytes / us / 1e3 if line is not None and us else None

    @property
    def stream(self) -> float | None:
        """The read-only stream's rate in GB/s: the ceiling of this run."""
        return self.gb_per_s(STREAM, 0)

    def stream_share(self, rows: int = 1) -> float | None:
        """Our rate over the stream's."""
        return _ratio(self.gb_per_s(OURS, rows), self.stream)

    def over_one(self, rows: int) -> float | None:
        """Time of a call of `rows` rows over that of one row."""
        return _ratio(self.us(OURS, rows), self.us(OURS, 1))

    @property
    def four_over_one(self) -> float | None:
        """Four one-row launches, each on weights of its own, over one four-row launch."""
        return _ratio(self.us(OURS, 1, launches=4), self.us(OURS, 4))

    def peer_ratio(self, peer: str, rows: int) -> float | None:
        """Our time over a peer's."""
        return _ratio(self.us(OURS, rows), self.us(peer, rows))

    @property
    def nulls(self) -> tuple[float, ...]:
        """The second timing of our first arm over the first, minus 1, for each repeat."""
        again = next((x for x in self.lines if x.again), None)
        first = self.line(again.arm, again.rows, again.launches) if again is not None else None
        if again is None or first is None:
            return ()
        return tuple(b / a - 1 for a, b in zip(first.us, again.us, strict=False) if a > 0)

    @property
    def null_spread(self) -> float | None:
        """How far apart two medians of the same arm may lie."""
        return spread(self.nulls)

    @property
    def rel_error(self) -> float | None:
        """Our largest error against float64."""
        return max((x.rel_error for x in self.lines if x.arm == OURS and x.rel_error is not None), default=None)

    @property
    def timed_rows(self) -> tuple[int, ...]:
        """Numbers of rows that ours was timed at."""
        return tuple(sorted({x.rows for x in self.lines if x.arm == OURS and x.launches == 1 and not x.again}))

    @property
    def peers(self) -> tuple[str, ...]:
        """Peers that were timed, in order."""
        return tuple(dict.fromkeys(x.arm for x in self.lines if x.arm not in (OURS, STREAM)))


def kernel_times(lines: Iterable[object]) -> KernelTimes:
    """The kernel arms among raw lines."""
    return KernelTimes(tuple(line for line in lines if isinstance(line, KernelLine)))


def spread(nulls: Sequence[float]) -> float | None:
    """How far apart two medians of the same arm may lie: the larger of |median null| and 1.5 standard errors of it."""
    if not nulls:
        return None
    middle = statistics.median(nulls)
    if len(nulls) < 2:
        return abs(middle)
    deviation = statistics.median(abs(value - middle) for value in nulls) * 1.4826
    return float(max(abs(middle), 1.5 * 1.2533 * deviation / len(nulls) ** 0.5))


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
