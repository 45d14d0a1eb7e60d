"""Kernel figures of one shape in two records: time, share of the stream, cost of more rows, peers. Pure.

A null arm says how far two medians of one run may lie apart; across two runs both spreads count. The stream is the
control: what it moved by, the card moved by, so a time must have moved by more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from harness.record.compare_side import ALL, Row, Side, speed_block
from harness.record.compare_speed import moved
from harness.record.model import CaseRecord, KernelFigures, PeerFigures
from harness.record.spec_view import SMALLEST_EFFECT
from harness.record.table import factor, percent, share

FIGURES = (  # figure, whether more is better
    ("stream_share", True),
    ("m4_over_m1", False),
    ("m8_over_m1", False),
    ("four_over_one", True),
)
NULLS = "both null spreads"


def kernel_rows(a: Side, b: Side, old: CaseRecord, new: CaseRecord) -> Iterator[Row]:
    """Every figure of a shape. A bar that is missed does not spoil its figures; a differing byte does."""
    one, two = old.kernel, new.kernel
    if one is None and two is None:
        return
    draft = Row(old.check, old.name, "speed", ALL, "not comparable", "")
    if block := _block(a, b, old, new):
        yield replace(draft, reason=block)
        return
    assert one is not None
    assert two is not None
    if one.null_spread is None or two.null_spread is None:
        if one == two:
            return
        yield replace(draft, reason=f"no null arm in {'A' if one.null_spread is None else 'B'}")
        return
    nulls = one.null_spread + two.null_spread
    floor = max(nulls, SMALLEST_EFFECT)
    within = NULLS if floor == nulls else "the smallest effect of interest"
    yield from _time(draft, one, two, floor, within)
    for name, higher in FIGURES:
        mine, theirs = getattr(one, name), getattr(two, name)
        if mine is None and theirs is None:
            continue
        row = replace(draft, figure=name, a=factor(mine), b=factor(theirs))
        if name == "stream_share":
            row = replace(row, a=share(mine), b=share(theirs))
        if mine is None or theirs is None:
            yield replace(row, reason=f"not measured in {'A' if mine is None else 'B'}")
            continue
        status, reason = moved(mine, theirs, floor, higher_is_better=higher, within=within)
        yield replace(row, status=status, reason=reason)
    yield from _peers(draft, one, two, floor, within)


def _block(a: Side, b: Side, old: CaseRecord, new: CaseRecord) -> str | None:
    """Why no figure of this shape may be compared."""
    one, two = old.kernel, new.kernel
    for where, kernel in (("A", one), ("B", two)):
        if kernel is None:
            return f"the shape was not reached in {where}"
        if kernel.withheld:
            return f"withheld in {where}: its rows are not exact, or were not compared"
        if not kernel.us:
            return f"nothing was timed in {where}"
    assert one is not None
    assert two is not None
    for name in ("backend", "nbytes", "clock"):
        mine, theirs = getattr(one, name), getattr(two, name)
        if mine != theirs:
            return f"other {name}: {mine} against {theirs}"
    return speed_block(a, b, old, new)


def _time(draft: Row, one: KernelFigures, two: KernelFigures, floor: float, within: str) -> Iterator[Row]:
    """Microseconds at one row, beyond what the card itself moved by."""
    mine, theirs = one.us.get("1"), two.us.get("1")
    if mine is None or theirs is None:
        return
    row = replace(draft, figure="us at M = 1", a=f"{mine:.2f}", b=f"{theirs:.2f}")
    if one.stream_gb_per_s is None or two.stream_gb_per_s is None:
        if mine == theirs:
            yield replace(row, status="same", reason="equal")
        else:
            yield replace(row, reason="no stream in both: a slower card and a slower kernel look alike")
        return
    drift = math.expm1(abs(math.log(two.stream_gb_per_s / one.stream_gb_per_s)))
    within += f" and the stream's own {percent(drift)}"
    status, reason = moved(mine, theirs, floor + drift, higher_is_better=False, within=within)
    yield replace(row, status=status, reason=reason)


def _peers(draft: Row, one: KernelFigures, two: KernelFigures, floor: float, within: str) -> Iterator[Row]:
    mine, theirs = ({peer.peer: peer for peer in kernel.peers} for kernel in (one, two))
    for name in dict.fromkeys((*mine, *theirs)):
        left, right = mine.get(name), theirs.get(name)
        row = replace(draft, figure=f"ratio to {name}")
        rows_left, rows_right = (set(peer.ratio) if peer is not None else set() for peer in (left, right))
        if not (rows_left or rows_right):
            continue  # measured in neither: both pages say why
        if not (rows_left and rows_right):
            where, peer = ("A", left) if not rows_left else ("B", right)
            reason = peer.reason if peer is not None and peer.reason else "it is no peer of this shape there"
            yield replace(row, reason=f"not measured in {where}: {reason}")
            continue
        assert left is not None
        assert right is not None
        yield from _ratios(row, left, right, floor, within)


def _ratios(row: Row, left: PeerFigures, right: PeerFigures, floor: float, within: str) -> Iterator[Row]:
    """Our time over a peer's, by rows; our null arm speaks for a ratio only where both were timed by graph."""
    alike = left.version == right.version
    for rows in left.ratio:
        if rows not in right.ratio:
            continue
        mine, theirs = left.ratio[rows], right.ratio[rows]
        one = replace(row, figure=f"{row.figure} at M = {rows}", a=factor(mine), b=factor(theirs))
        if not alike:
            yield replace(one, reason=f"other version of the peer: {left.version} against {right.version}")
        elif mine != theirs and "host" in (left.clock, right.clock):
            yield replace(one, reason="no interval: timed by the host's clock, of which our null arm says nothing")
        else:
            status, reason = moved(mine, theirs, floor, higher_is_better=False, within=within)
            yield replace(one, status=status, reason=reason)
