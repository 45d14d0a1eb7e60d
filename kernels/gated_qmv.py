"""gated_qmv: up to 8 rows times a bf16 matrix, the rows made from gate_up's sums while they are loaded.

What `geglu_rows` and `qmv` do in two launches, with the same bytes: gate and up are rounded, gelu_tanh(gate) * up is
computed in fp32 and rounded once, and each row of the matrix adds its groups of 64 as in `qmv`. Every program makes its
part of the rows again, so it takes several of the matrix's tiles; how many cannot reach the bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.geglu import gelu_tanh
from kernels.jit import (
    GROUP,
    INTERPRETED,
    SLOTS,
    check_operand,
    dot,
    launch_options,
    release_consumers,
    round_bf16,
    to_bf16,
    wait_for_producers,
)
from kernels.repack import PackedWeight

ROWS_PER_PROGRAM = 128
"""Rows of the matrix: down's 1,024 in 16 parts make 128 programs, which share the work of GeGLU over their warps."""

# Two values to bf16 in one instruction, and back: the compiler's own form takes one for each.
_ROUND = tl.constexpr("""
{
.reg .b32 both;
cvt.rn.bf16x2.f32 both, $3, $2;
shl.b32 $0, both, 16;
and.b32 $1, both, 0xFFFF0000;
}
""")


def takes_sums(sums: Tensor, weight: PackedWeight) -> bool:
    """Whether `gated_qmv` multiplies such sums by such a matrix: one partial sum, 16 bits."""
    return weight.bits == 16 and sums.shape[0] == 1


def gated_qmv(
    sums: Tensor,
    weight: PackedWeight,
    rows: int = SLOTS,
    out: Tensor | None = None,
    per_program: int = ROWS_PER_PROGRAM,
) -> Tensor:
    """Partial sums of GeGLU(gate, up), rounded once, times weight transposed: fp32 [split, 8, N].

    sums fp32 [1, 8, 2 K], gate in the first K columns, up in the rest. Slots from `rows` on are neither read nor
    written. per_program: rows of the matrix a program takes, at least a tile. ValueError where the matrix is not of 16
    bits, the sums are not one partial sum of twice its K, or per_program is not a power of two.
    """
    shape = weight.shape
    if weight.bits != 16:
        raise ValueError(f"gated_qmv: a matrix of {weight.bits} bits; it takes 16, others need their rows packed")
    if not 1 <= rows <= SLOTS:
        raise ValueError(f"gated_qmv: {rows} rows; a launch takes 1 to {SLOTS}")
    if per_program < 1 or per_program & (per_program - 1):
        raise ValueError(f"gated_qmv: {per_program} rows of the matrix a program; expected a power of two")
    check_operand("gated_qmv: sums", sums, torch.float32, (1, SLOTS, 2 * weight.in_features))
    size = (shape.split, SLOTS, weight.out_features)
    if out is None:
        out = torch.empty(size, dtype=torch.float32, device=sums.device)
    check_operand("gated_qmv: out", out, torch.float32, size)
    tiles, groups = weight.codes.shape[0], weight.in_features // GROUP
    together = max(1, per_program // shape.tile)
    steps = -(-groups // shape.unroll)
    _gated_qmv[(triton.cdiv(tiles, together), shape.split)](
        sums,
        weight.codes,
        out,
        rows,
        weight.out_features,
        tiles,
        groups,
        -(-steps // shape.split) * shape.unroll,
        TILE=shape.tile,
        TOGETHER=together,
        UNROLL=shape.unroll,
        STAGES=shape.stages,
        **launch_options(sums.device, together * shape.warps, shape.stages),
    )
    return out


@triton.jit
def _rounded(x):
    """As `round_bf16`. Not called pure, though it is: Triton then computes what follows once, spread over the program's
    threads, where else every warp would compute all of it again in the form that its MMA takes."""
    if INTERPRETED:
        return round_bf16(x)
    else:
        return tl.inline_asm_elementwise(_ROUND, "=r,=r,r,r", [x], dtype=tl.float32, is_pure=False, pack=2)


@triton.jit(do_not_specialize=["rows", "N", "tiles", "groups", "part"])
def _gated_qmv(
    sums_ptr,
    weight_ptr,
    out_ptr,
    rows,
    N,
    tiles,
    groups,
    part,
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):
    share = tl.program_id(1)
    row = tl.arange(0, TILE * TOGETHER)
    slot = tl.arange(0, 8)
    column = tl.arange(0, 64)
    begin = share * part
    tile = tl.minimum(tl.program_id(0) * TOGETHER + row // TILE, tiles - 1)  # past the last: read, and not stored
    start = (tile * groups + begin).to(tl.int64) * (TILE * 64) + (row % TILE) * 64
    weight_at = weight_ptr + start[:, None] + column[None, :]
    K = groups * 64
    gate_at = sums_ptr + slot[:, None] * (2 * K) + begin * 64 + column[None, :]
    real = slot < rows
    acc = tl.zeros((TILE * TOGETHER, 8), tl.float32)
    wait_for_producers()
    for step in tl.range(0, tl.minimum(part, groups - begin) // UNROLL, num_stages=STAGES):
        for inner in tl.static_range(UNROLL):
            group = step * UNROLL + inner
            weight = tl.load(weight_at + group * (TILE * 64), eviction_policy="evict_first")
            gate = _rounded(tl.load(gate_at + group * 64, mask=real[:, None], other=0.0))
            up = _rounded(tl.load(gate_at + K + group * 64, mask=real[:, None], other=0.0))
            acc = dot(weight, tl.trans(to_bf16(gelu_tanh(gate) * up)), acc)
    release_consumers()
    n = tl.program_id(0) * (TILE * TOGETHER) + row
    tl.store(out_ptr + (share * 8 + slot[None, :]) * N + n[:, None], acc, mask=real[None, :] & (n < N)[:, None])
