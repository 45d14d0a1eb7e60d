"""What a `kernel_throughput` check is made of: matrix shapes, and the bars that its figures must reach."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from harness.spec.base import Model, Share

KernelOp = Literal["qmv", "attention"]
Backend = Literal["triton", "reference"]
GeometryName = Literal["12b", "31b", "drafter_12b", "drafter_31b", "tiny"]
LayerKind = Literal["sliding", "full"]
Peer = Literal["stream", "tinygemm", "marlin", "humming", "mlx"]
Context = Annotated[int, Field(ge=1, le=131072)]


class RowBars(Model):
    """Highest ratio of our time to a peer's, by number of rows."""

    m1: Share | None = None
    """At one row."""
    m4: Share | None = None
    """At four rows."""
    m8: Share | None = None
    """At eight rows."""

    def at(self, rows: int) -> float | None:
        """The bar for this many rows; None where there is none."""
        return {1: self.m1, 4: self.m4, 8: self.m8}.get(rows)


class PeerBars(Model):
    """Highest ratios of our time to each peer's, both in graphs of the same run."""

    tinygemm: RowBars | None = None
    """Against `torch._weight_int4pack_mm`."""
    marlin: RowBars | None = None
    """Against Marlin."""
    humming: RowBars | None = None
    """Against humming."""
    mlx: RowBars | None = None
    """Against MLX, whose times include its launches."""

    def of(self, peer: str) -> RowBars | None:
        """The bars against one peer."""
        found: RowBars | None = getattr(self, peer, None)
        return found


class Bars(Model):
    """What the figures must reach. A miss smaller than the null arm's spread is unresolved."""

    min_stream_share: Share | None = None
    """Lowest share of the read-only stream's rate at one row."""
    max_m4_over_m1: Share | None = None
    """Highest ratio of the time of four rows to that of one."""
    max_m8_over_m1: Share | None = None
    """Highest ratio of the time of eight rows to that of one."""
    min_four_over_one: Share | None = None
    """Lowest ratio of four one-row launches, each on weights of its own, to one four-row launch."""
    max_rel_error: Share | None = None
    """Highest relative error against float64, before the rounding of the output."""
    max_peer_ratio: PeerBars | None = None
    """Highest ratio of our time to a peer's, by peer and rows."""

    def over(self, other: Bars | None) -> Bars:
        """These bars where they are set, else those of `other`."""
        if other is None:
            return self
        return other.model_copy(update={name: getattr(self, name) for name in self.model_fields_set})


class MatrixShape(Model):
    """A quantized matrix, group size 64."""

    name: Annotated[str, Field(min_length=1)]
    """What it is in the model, e.g. gate+up."""
    k: Annotated[int, Field(ge=64, multiple_of=64)]
    """Inputs; a multiple of 64."""
    n: Annotated[int, Field(ge=8, multiple_of=8)]
    """Outputs; a multiple of 8."""
    bits: Literal[4, 8]
    """Bits of a code."""
    bars: Bars | None = None
    """Bars of this shape; they go before the check's."""

    @property
    def label(self) -> str:
        """The shape as ids show it."""
        return f"{self.k}x{self.n}-{self.bits}bit"
