"""Times per token of engines beside each other, from raw lines. Pure; the check and the record share it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from harness.kernel_figures import OURS
from harness.record.lines import AnyLine, DecodeLine

MIN_SAMPLES = 8
"""Timed tokens below which a median says little."""


@dataclass(frozen=True)
class DecodeTimes:
    """The decode lines of one case."""

    lines: tuple[DecodeLine, ...]

    def line(self, arm: str, context: int) -> DecodeLine | None:
        """An engine after one context."""
        return next((x for x in self.lines if (x.arm, x.context_tokens) == (arm, context)), None)

    def samples(self, arm: str, context: int) -> int:
        """Timed tokens."""
        line = self.line(arm, context)
        return len(line.seconds) if line is not None else 0

    def ms(self, arm: str, context: int) -> float | None:
        """Median time of a token, ms."""
        line = self.line(arm, context)
        return 1000 * statistics.median(line.seconds) if line is not None and line.seconds else None

    def speedup(self, peer: str, context: int) -> float | None:
        """The peer's time over ours: above 1 ours is faster."""
        ours, its = self.ms(OURS, context), self.ms(peer, context)
        return its / ours if ours and its else None

    def same_tokens(self, peer: str, context: int) -> int | None:
        """How many first tokens of a peer's text are ours; a peer that computes something else has few."""
        ours, its = self.line(OURS, context), self.line(peer, context)
        if ours is None or its is None:
            return None
        pairs = zip(ours.tokens, its.tokens, strict=False)
        return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours.tokens), len(its.tokens)))


def decode_times(lines: Iterable[AnyLine]) -> DecodeTimes:
    """The decode lines among all lines of a case."""
    return DecodeTimes(tuple(line for line in lines if isinstance(line, DecodeLine)))
