"""Which kernel each op of a forward takes: the thing under test.

Four stages name the steps from a block path that differs from decode (`base`) to one that does not
(`rowwise`). Classic decode takes decode's kernels in every stage; only a flag can move it, alike everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config import Kind
from engine.flags import Flags

Stage = Literal["base", "attention", "attention_mlp", "rowwise"]
AttentionKernel = Literal["row", "unfused_block", "unfused_row"]

STAGES: tuple[Stage, ...] = ("base", "attention", "attention_mlp", "rowwise")
"""The stages in the order in which they repair the verify block."""

BLOCK_ROWS = 4
"""Rows from which `base` treats a sliding layer's block as one masked product."""


@dataclass(frozen=True)
class DispatchPolicy:
    """Kernel choice as a function of rows, layer kind and bits; `decode` is True in classic decode."""

    stage: Stage = "rowwise"
    flags: Flags = Flags()
    backend: str = "reference"

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"unknown stage {self.stage!r}; known stages: {', '.join(STAGES)}")

    def attention(self, rows: int, kind: Kind, decode: bool) -> AttentionKernel:
        """Decode's one-row kernel, op by op for each row, or op by op for the masked block."""
        fused = kind == "full" or self.flags.sdpa_large_d
        if not decode and rows > 1 and self.stage == "base":
            if kind == "full" or not fused or rows >= BLOCK_ROWS:
                return "unfused_block"
            return "row"
        return "row" if fused else "unfused_row"

    def geglu(self, rows: int, bits: int, decode: bool) -> Literal["fused", "ops"]:
        """One rounding, or a rounding per op."""
        if not self.flags.compiled_mlp:
            return "ops"
        block_ops = self.stage in ("base", "attention") and bits == 8 and rows > 1 and not decode
        return "ops" if block_ops else "fused"

    def rope(self, rows: int, decode: bool) -> Literal["row", "general"]:
        """Decode's kernel, or the general one, which rounds cos and sin first."""
        return "general" if self.stage != "rowwise" and rows > 1 and not decode else "row"

    def linear(self, rows: int) -> Literal["multirow", "per_row"]:
        """One product for all rows, or a launch per row; the bytes are the same."""
        if rows == 1 or (self.flags.qmv_multirow and rows <= self.flags.qmv_multirow_max_rows):
            return "multirow"
        return "per_row"
