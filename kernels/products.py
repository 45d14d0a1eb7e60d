"""What a step's products yield, by the launch shape of each matrix: sums as they are, finished ones, or rows of down.

Whatever a launch shape says, the bytes that arrive behind the consumer are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.finishing import MOST_TILES
from kernels.geglu import geglu_rows
from kernels.jit import GROUP, SLOTS
from kernels.qmv import Ending, finishes, multiply, qmv, qmv_rows
from kernels.repack import PackedWeight
from kernels.rows import Rows, new_rows


@dataclass(frozen=True)
class Squared:
    """A finished product: sums fp32 [1, 8, N], and squares fp32 [8, tiles], of each tile the sum of the squares of
    what its sums round to."""

    sums: Tensor
    squares: Tensor


def product(x: Rows, weight: PackedWeight, rows: int, per_row: bool = False) -> Tensor | Squared:
    """Sums of x times weight transposed, fp32 [parts, 8, N], with squares where the launch shape says so."""
    if weight.shape.finish != "squares" or not finishes(weight):
        return qmv_rows(x, weight, rows) if per_row else qmv(x, weight, rows)
    device, tiles = x.values.device, weight.codes.shape[0]
    sums = torch.empty(1, SLOTS, weight.out_features, dtype=torch.float32, device=device)
    squares = torch.empty(SLOTS, tiles, dtype=torch.float32, device=device)
    multiply(x, weight, rows, per_row, Ending(sums, squares))
    return Squared(sums, squares)


def sums_of(partials: Tensor | Squared) -> Tensor:
    """The sums alone, fp32 [parts, 8, N]: for a consumer that has no use for squares."""
    return partials.sums if isinstance(partials, Squared) else partials


def gated_product(x: Rows, weight: PackedWeight, rows: int, bits: int, fused: bool, per_row: bool = False) -> Rows:
    """gate_up's product and GeGLU: the rows of down, a matrix of `bits`; fused: GeGLU with one rounding."""
    if not _gates(weight):
        sums = qmv_rows(x, weight, rows) if per_row else qmv(x, weight, rows)
        return geglu_rows(sums, rows, bits, fused)
    out = new_rows(weight.out_features // 2, bits, x.values.device)
    multiply(x, weight, rows, per_row, Ending(rows=out, fused=fused, late=weight.shape.finish == "gated late"))
    return out


def _gates(weight: PackedWeight) -> bool:
    """Whether gate_up's own programs may finish GeGLU: a tile of gate has a tile of up, and both are whole groups."""
    tile = weight.shape.tile
    whole = tile % GROUP == 0 and weight.out_features % (2 * tile) == 0
    return weight.shape.finish in ("gated", "gated late") and whole and weight.codes.shape[0] <= MOST_TILES
