"""Capture points of one forward, for localizing a divergence.

A forward that is given a `Capture` records the rows of every op in execution order; the
probe compares two captures row by row. A forward without one pays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LAYER_OPS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "v_norm",
    "attention core",
    "attention output",
    "MLP output",
    "layer output",
)
FINAL_OPS = ("final norm", "LM head")
OPS = LAYER_OPS + FINAL_OPS
"""Names of the capture points, in execution order."""

FINAL_KIND = "final"
"""The layer kind under which the ops after the last layer are recorded."""


@dataclass(frozen=True)
class CaptureEntry:
    """The rows that one op produced in one forward, rows [M, ...]."""

    layer: int
    kind: str
    op: str
    rows: Tensor

    @property
    def stage(self) -> tuple[int, str, str]:
        """Where this entry belongs: layer, layer kind, op."""
        return (self.layer, self.kind, self.op)


@dataclass
class Capture:
    """Collects entries in execution order."""

    entries: list[CaptureEntry] = field(default_factory=list)

    def record(self, layer: int, kind: str, op: str, rows: Tensor) -> None:
        """Keep a copy of an op's rows [M, ...]; later writes to the tensor do not reach it."""
        self.entries.append(CaptureEntry(layer, kind, op, rows.detach().clone()))
