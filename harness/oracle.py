"""The break-even oracle: what each block size would give, from step costs and measured acceptance. Pure.

A round of K rows costs one verify of K rows and K - 1 drafts, and emits 1 + sum of the first K - 1 accepted shares.
Where an arm ran K rows its own acceptance counts. Below the widest arm, the shares of that arm's first positions do:
a draft's acceptance does not depend on how many follow it. Beyond, the last position's conditional acceptance is
carried on, and the point says *extrapolated*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness import stats

Basis = Literal["measured", "positions", "extrapolated"]


@dataclass(frozen=True)
class Costs:
    """Medians in ms: a classic step, a verify by its rows, and the drafting of a whole round by its drafts."""

    classic_step_ms: float
    verify_ms: Mapping[int, float]
    drafting_ms: Mapping[int, float]


@dataclass(frozen=True)
class Point:
    """One block size: what its round costs, what it needs, and what it is predicted to give."""

    block_size: int
    verify_ms: float
    draft_step_ms: float  # mean over the round's drafts
    round_ms: float
    break_even_acceptance: float
    acceptance_rate: float | None = None
    acceptance_length: float | None = None
    basis: Basis | None = None
    predicted_speedup: float | None = None


def length_at(shares_by_arm: Mapping[int, Sequence[float]], block_size: int) -> tuple[float, Basis] | None:
    """Tokens per verify at a block size from `accepted_at` by the arms' block sizes; None without any."""
    usable = {size: shares for size, shares in shares_by_arm.items() if shares}
    if not usable:
        return None
    if block_size in usable:
        return 1 + sum(usable[block_size]), "measured"
    wider = [size for size in usable if size > block_size]
    if wider:
        return 1 + sum(usable[min(wider)][: block_size - 1]), "positions"
    shares = list(usable[max(usable)])
    before = shares[-2] if len(shares) > 1 else 1.0
    carried = shares[-1] / before if before else 0.0
    while len(shares) < block_size - 1:
        shares.append(shares[-1] * carried)
    return 1 + sum(shares), "extrapolated"


def points(costs: Costs, shares_by_arm: Mapping[int, Sequence[float]]) -> tuple[Point, ...]:
    """Every block size of 2 and more whose verify and drafting were measured, in order."""
    found = []
    for size in sorted(costs.verify_ms):
        if size < 2 or size - 1 not in costs.drafting_ms:
            continue
        verify, step = costs.verify_ms[size], costs.drafting_ms[size - 1] / (size - 1)
        needed = stats.break_even_acceptance(costs.classic_step_ms, verify, step, size)
        point = Point(size, verify, step, stats.round_ms(verify, step, size), needed)
        known = length_at(shares_by_arm, size)
        if known is not None:
            length, basis = known
            predicted = stats.predicted_speedup(length, costs.classic_step_ms, verify, step, size)
            rate = (length - 1) / (size - 1)
            point = Point(size, verify, step, point.round_ms, needed, rate, length, basis, predicted)
        found.append(point)
    return tuple(found)


def best_block_size(found: Sequence[Point]) -> int | None:
    """The block size with the largest predicted speed-up; 1, classic decode, where none is above 1; None unknown.

    Extrapolated points do not compete: nothing was accepted there.
    """
    known = [point for point in found if _competes(point)]
    if not known:
        return None
    best = max(known, key=lambda point: (_speedup(point), -point.block_size))
    return best.block_size if _speedup(best) > 1 else 1


def _competes(point: Point) -> bool:
    return point.predicted_speedup is not None and point.basis != "extrapolated"


def _speedup(point: Point) -> float:
    return point.predicted_speedup or 0.0


def advice(found: Sequence[Point]) -> str:
    """The oracle in one sentence, or an empty string."""
    best = best_block_size(found)
    if best is None:
        return ""
    if best > 1:
        point = next(point for point in found if point.block_size == best)
        words = f"best block size {best}, predicted {_speedup(point):.2f}x"
        beyond = max((p for p in found if p.basis == "extrapolated"), key=_speedup, default=None)
        if beyond is not None and _speedup(beyond) > _speedup(point):
            words += f"; {beyond.block_size} would give {_speedup(beyond):.2f}x if acceptance went on as it ends"
        return words
    reachable = [point for point in found if _competes(point)]
    easiest = min(reachable, key=lambda point: point.break_even_acceptance - (point.acceptance_rate or 0.0))
    needed, has = easiest.break_even_acceptance, easiest.acceptance_rate
    size = easiest.block_size
    if needed > 1:
        return f"no block size pays: a round of {size} costs more than {size} classic steps"
    return f"no block size pays: {size} needs an acceptance rate of at least {needed:.2f}, it has {has:.2f}"
