"""Figures of one `kernel_throughput` case from its raw lines; all withheld where a byte of a row differs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.kernel_figures import OURS, STREAM, KernelTimes, kernel_times
from harness.record.lines import AnyLine, CheckLine, KernelShapeLine, PeerLine
from harness.record.model import KernelFigures, PeerFigures


def kernel_figures(events: Sequence[AnyLine]) -> KernelFigures | None:
    """The figures of a case; None for one that never came to its shape."""
    shape = next((line for line in events if isinstance(line, KernelShapeLine)), None)
    if shape is None:
        return None
    statements = [line for line in events if isinstance(line, CheckLine)]
    differing = sum(line.differing_bytes or 0 for line in statements)
    exact = bool(statements) and all(line.passed for line in statements) and not differing
    times = kernel_times(events) if exact else KernelTimes(())
    nulls = times.nulls
    return KernelFigures(
        op=shape.op,
        name=shape.name,
        shape=shape.shape,
        bits=_bits(shape.shape),
        nbytes=shape.nbytes,
        copies=shape.copies,
        backend=shape.backend,
        config=shape.config,
        compared=len(statements),
        differing_bytes=differing,
        withheld=not exact,
        clock=next((line.clock for line in times.lines if line.arm == OURS), None),
        us=_by_rows(times, OURS, "us"),
        gb_per_s=_by_rows(times, OURS, "gb_per_s"),
        stream_gb_per_s=times.stream,
        stream_share=times.stream_share(),
        m4_over_m1=times.over_one(4),
        m8_over_m1=times.over_one(8),
        four_over_one=times.four_over_one,
        rel_error=times.rel_error,
        null_range=(min(nulls), max(nulls)) if nulls else None,
        null_spread=times.null_spread,
        peers=tuple(_peer(line, times) for line in events if isinstance(line, PeerLine) and line.peer != STREAM),
    )


def _bits(shape: str) -> int | None:
    """Bits of a code, from `3840x30720-8bit`."""
    tail = shape.rpartition("-")[2].removesuffix("bit")
    return int(tail) if tail.isdigit() else None


def _peer(line: PeerLine, times: KernelTimes) -> PeerFigures:
    mine = [arm for arm in times.lines if arm.arm == line.peer]
    ratios = {str(arm.rows): times.peer_ratio(line.peer, arm.rows) for arm in mine}
    return PeerFigures(
        peer=line.peer,
        reason=line.reason,
        version=line.version,
        note=line.note,
        clock=mine[0].clock if mine else None,
        us=_by_rows(times, line.peer, "us"),
        gb_per_s=_by_rows(times, line.peer, "gb_per_s"),
        ratio={rows: value for rows, value in ratios.items() if value is not None},
        rel_error=max((arm.rel_error for arm in mine if arm.rel_error is not None), default=None),
    )


def _by_rows(times: KernelTimes, arm: str, figure: str) -> dict[str, float]:
    """Rows as text -> a figure of an arm, in order of rows."""
    rows = sorted({x.rows for x in times.lines if x.arm == arm and x.launches == 1 and not x.again})
    found = {str(count): getattr(times, figure)(arm, count) for count in rows}
    return {count: value for count, value in found.items() if value is not None}
