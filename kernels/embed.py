"""Embeddings from the head's own packed matrix: the table need not be held a second time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import check_operand, launch_options, round_bf16, to_bf16, wait_for_producers
from kernels.repack import PackedWeight

GROUPS_PER_PROGRAM = 8


def embed_rows(table: PackedWeight, ids: Tensor, scale: Tensor, rows: int, out: Tensor | None = None) -> Tensor:
    """Rows `ids` of the table, dequantized and rounded to bf16, times the scale, rounded -> bf16 [n, H].

    ids int32 [n] on the device, the first `rows` of them real; scale bf16, one value. Other rows are not written.
    """
    check_operand("embed_rows: ids", ids, torch.int32, (None,))
    if not 1 <= rows <= ids.numel():
        raise ValueError(f"embed_rows: {rows} rows of {ids.numel()} ids")
    if scale.dtype != torch.bfloat16 or scale.numel() != 1:
        raise ValueError(f"embed_rows: scale must be one bf16 value, got {scale.dtype} of {scale.numel()} elements")
    width = table.in_features
    if out is None:
        out = torch.empty(ids.numel(), width, dtype=torch.bfloat16, device=ids.device)
    check_operand("embed_rows: out", out, torch.bfloat16, (ids.numel(), width))
    groups = width // 64
    _embed[(rows, triton.cdiv(groups, GROUPS_PER_PROGRAM))](
        table.codes,
        table.scales,
        ids,
        scale,
        out,
        groups,
        BITS=table.bits,
        TILE=table.shape.tile,
        G=GROUPS_PER_PROGRAM,
        **launch_options(ids.device, 4),
    )
    return out


def dense_rows(weight: PackedWeight) -> Tensor:
    """The whole matrix, dequantized and rounded -> bf16 [N, K]; a table whose every row is asked for, times one."""
    ids = torch.arange(weight.out_features, dtype=torch.int32, device=weight.codes.device)
    one = torch.ones(1, dtype=torch.bfloat16, device=weight.codes.device)
    return embed_rows(weight, ids, one, weight.out_features)


@triton.jit
def embedded(codes_ptr, scales_ptr, scale_ptr, token, group, valid, groups, BITS: tl.constexpr, TILE: tl.constexpr):
    """Groups of a token's row, dequantized and rounded, times the scale, rounded: fp32 [G, 64] of bf16 values.

    What `kernels.repack` put where is undone here, element by element; group int32 [G], valid bool [G].
    """
    column = tl.arange(0, 64)
    start = ((token // TILE).to(tl.int64) * groups + group) * TILE + token % TILE  # of this row in each group
    if BITS == 16:
        value = tl.load(codes_ptr + start[:, None] * 64 + column[None, :], mask=valid[:, None], other=0.0)
        value = value.to(tl.float32)
    else:
        if BITS == 4:
            # byte b of a word holds even code b in bits 3..6; odd code b begins in bit 7 and goes on in the next byte
            byte = column // 2
            following = (byte & 28) | ((byte + 1) & 3)
            at = codes_ptr + start[:, None] * 32
            first = tl.load(at + byte[None, :], mask=valid[:, None], other=0).to(tl.int32)
            second = tl.load(at + following[None, :], mask=valid[:, None], other=0).to(tl.int32)
            odd = (first >> 7) | ((second & 7) << 1)
            code = tl.where((column % 2 == 0)[None, :], (first >> 3) & 15, odd)
        else:
            code = tl.load(codes_ptr + start[:, None] * 64 + column[None, :], mask=valid[:, None], other=0)
        both = tl.load(scales_ptr + start, mask=valid, other=0)
        scale = (both << 16).to(tl.float32, bitcast=True)
        bias = (both & -65536).to(tl.float32, bitcast=True)
        value = round_bf16(code.to(tl.float32) * scale[:, None] + bias[:, None])
    return round_bf16(value * tl.load(scale_ptr).to(tl.float32))


@triton.jit(do_not_specialize=["groups"])
def _embed(
    codes_ptr, scales_ptr, ids_ptr, scale_ptr, out_ptr, groups,
    BITS: tl.constexpr, TILE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """One row, G groups of 64."""
    row = tl.program_id(0)
    group = tl.program_id(1) * G + tl.arange(0, G)
    valid = group < groups
    wait_for_producers()
    token = tl.load(ids_ptr + row)
    value = embedded(codes_ptr, scales_ptr, scale_ptr, token, group, valid, groups, BITS, TILE)
    place = out_ptr + row * (groups * 64) + group[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(place, to_bf16(value), mask=valid[:, None])
