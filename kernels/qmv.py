"""qmv: up to 8 rows times a quantized matrix, every row with the bytes it has alone.

Matrix rows are the MMA's m16 operand and activation rows its n8 operand, always 8 wide, so M = 1 and M = 8 run the same
instructions; M reaches the mask of the store and nothing else. Per group of 64 inputs
    acc += scale * (q . x) + bias * sum(x)
with fp32 accumulation and integer q exact in the operand type: 4-bit codes as bf16 16 + q (the offset folds into the
bias), 8-bit codes as fp16 q - 128 against activations that carry a power of two per group. K is split by the matrix's
shape, and a consumer adds the partial sums in index order.

The kernel here is written for the interpreter, which shows on any machine what is computed; on a GPU
`kernels.qmv_ahead` does the same operations in the same order, so that the two agree on bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import qmv_ahead
from kernels.jit import (
    INTERPRETED,
    SLOTS,
    check_operand,
    dot,
    launch_options,
    release_consumers,
    wait_for_producers,
)
from kernels.repack import PackedWeight
from kernels.rows import Rows
from kernels.unpack import UNPACK_4, UNPACK_8


def qmv(x: Rows, weight: PackedWeight, rows: int = SLOTS, out: Tensor | None = None) -> Tensor:
    """Partial sums of x times weight transposed: fp32 [split, 8, N]; slots from `rows` on are left as they were.

    ValueError where x was not packed for this matrix's K and bits.
    """
    out = _output(x, weight, rows, out)
    _launch(x, weight, 0, rows, out)
    return out


def qmv_rows(x: Rows, weight: PackedWeight, rows: int = SLOTS, out: Tensor | None = None) -> Tensor:
    """The same partial sums with a launch per row, each reading the matrix anew; the same bytes as `qmv`."""
    out = _output(x, weight, rows, out)
    for row in range(rows):
        _launch(x, weight, row, 1, out)
    return out


def _output(x: Rows, weight: PackedWeight, rows: int, out: Tensor | None) -> Tensor:
    if x.width != weight.in_features or x.bits != weight.bits:
        raise ValueError(
            f"qmv: rows packed for K = {x.width}, {x.bits} bits; the matrix has K = {weight.in_features},"
            f" {weight.bits} bits"
        )
    if not 1 <= rows <= SLOTS:
        raise ValueError(f"qmv: {rows} rows; a launch takes 1 to {SLOTS}")
    shape = (weight.shape.split, SLOTS, weight.out_features)
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=x.values.device)
    check_operand("qmv: out", out, torch.float32, shape)
    return out


def qmv_plain(x: Rows, weight: PackedWeight, rows: int = SLOTS, out: Tensor | None = None) -> Tensor:
    """The same bytes as `qmv` from the kernel that the interpreter can run, wherever it runs."""
    out = _output(x, weight, rows, out)
    _launch_plain(x, weight, 0, rows, out)
    return out


def _launch(x: Rows, weight: PackedWeight, first: int, count: int, out: Tensor) -> None:
    (_launch_plain if INTERPRETED.value else qmv_ahead.launch)(x, weight, first, count, out)


def _launch_plain(x: Rows, weight: PackedWeight, first: int, count: int, out: Tensor) -> None:
    shape = weight.shape
    _qmv[qmv_ahead.grid_of(weight)](
        *qmv_ahead.operands(x, weight, first, count, out),
        BITS=weight.bits,
        TILE=shape.tile,
        UNROLL=shape.unroll,
        STAGES=shape.stages,
        **launch_options(x.values.device, shape.warps, shape.stages),
    )


@triton.jit
def _codes_4(packed, following):
    """uint8 [.., 32] -> even and odd codes plus 16 [.., 32]; `following` holds the next byte of each one's word."""
    if INTERPRETED:
        odd = (packed >> 7) | ((following & 7) << 1)
        return ((packed >> 3) & 15).to(tl.float32) + 16.0, odd.to(tl.float32) + 16.0
    else:
        return tl.inline_asm_elementwise(
            UNPACK_4, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )


@triton.jit
def _codes_8(packed):
    """uint8 [.., 64] -> codes minus 128 as fp16 [.., 64]."""
    if INTERPRETED:
        return packed.to(tl.float32) - 128.0
    else:
        return tl.inline_asm_elementwise(UNPACK_8, "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit(do_not_specialize=["first", "count", "N", "groups", "part"])
def _qmv(
    values_ptr,
    sums_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    first,
    count,
    N,
    groups,
    part,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):
    STORED: tl.constexpr = 32 if BITS == 4 else 64
    tile = tl.program_id(0)
    share = tl.program_id(1)
    row = tl.arange(0, TILE)
    slot = tl.arange(0, 8)
    column = tl.arange(0, STORED)
    begin = share * part
    start = (tile * groups + begin).to(tl.int64)
    codes_at = codes_ptr + start * (TILE * STORED) + row[:, None] * STORED + column[None, :]
    scales_at = scales_ptr + start * TILE + row
    x_at = values_ptr + slot[:, None] * (groups * 64) + begin * 64 + column[None, :]
    sums_at = sums_ptr + begin * 8 + slot
    x_scales_at = x_scales_ptr + begin * 8 + slot
    acc = tl.zeros((TILE, 8), tl.float32)
    wait_for_producers()
    for step in tl.range(0, tl.minimum(part, groups - begin) // UNROLL, num_stages=STAGES):
        for inner in tl.static_range(UNROLL):
            group = step * UNROLL + inner
            packed = tl.load(codes_at + group * (TILE * STORED), eviction_policy="evict_first")
            if BITS == 16:
                acc = dot(packed, tl.trans(tl.load(x_at + group * 64)), acc)
            else:
                both = tl.load(scales_at + group * TILE)
                sums = tl.load(sums_at + group * 8)
                scale = (both << 16).to(tl.float32, bitcast=True)
                bias = (both & -65536).to(tl.float32, bitcast=True)
                product = tl.zeros((TILE, 8), tl.float32)
                if BITS == 4:
                    following = packed
                    if INTERPRETED:
                        turned = (column & 28) | ((column + 1) & 3)
                        following = tl.load(codes_at + group * (TILE * STORED) + (turned - column)[None, :])
                    even, odd = _codes_4(packed, following)
                    product = dot(even, tl.trans(tl.load(x_at + group * 64)), product)
                    product = dot(odd, tl.trans(tl.load(x_at + group * 64 + 32)), product)
                    bias = tl.fma(scale, -16.0, bias)
                else:
                    product = dot(_codes_8(packed), tl.trans(tl.load(x_at + group * 64)), product)
                    product = product * tl.load(x_scales_at + group * 8)[None, :]
                    bias = tl.fma(scale, 128.0, bias)
                acc = tl.fma(product, tl.broadcast_to(scale[:, None], (TILE, 8)), acc)
                acc = tl.fma(tl.broadcast_to(bias[:, None], (TILE, 8)), tl.broadcast_to(sums[None, :], (TILE, 8)), acc)
    release_consumers()
    n = tile * TILE + row
    stored = (slot >= first) & (slot < first + count)
    tl.store(out_ptr + (share * 8 + slot[None, :]) * N + n[:, None], acc, mask=stored[None, :] & (n < N)[:, None])
