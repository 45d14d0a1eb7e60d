"""Activations on their way into and out of a product: `Rows` before it, partial sums after it.

`Rows` holds up to 8 rows as the product's tile wants them, written once by whatever produced them. Partial sums are
fp32 [split, 8, N]; whoever reads them adds them in index order and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import (
    GROUP,
    SLOTS,
    Release,
    check_operand,
    half_exponent,
    launch_options,
    power_of_two,
    to_bf16,
    wait_for_producers,
)
from kernels.tree import tree_sums

GROUPS_PER_PROGRAM = 16
COLUMNS_PER_PROGRAM = 1024


@dataclass(frozen=True)
class Rows:
    """8 rows of K activations, of which any number are real; slots that nobody wrote may hold anything.

    values [8, K]: bf16, each group of 64 as its 32 even, then its 32 odd elements (4 bits); fp16 in order, each group
    times a power of two (8 bits); bf16 in order (16 bits). sums fp32 [K / 64, 8]: the sum of a group's bf16 values.
    scales fp32 [K / 64, 8]: what undoes the power of two (8 bits alone).
    """

    values: Tensor
    sums: Tensor
    scales: Tensor
    bits: int

    @property
    def width(self) -> int:
        """K."""
        return int(self.values.shape[1])


def new_rows(width: int, bits: int, device: torch.device) -> Rows:
    """Uninitialised rows of K = width for a matrix of these bits; ValueError unless K is a multiple of 64."""
    if width % GROUP:
        raise ValueError(f"rows: width {width} is not a multiple of {GROUP}; packed products work on whole groups")
    if bits not in (4, 8, 16):
        raise ValueError(f"rows: {bits} bits; known: 4, 8, 16")
    dtype = torch.float16 if bits == 8 else torch.bfloat16
    groups = width // GROUP
    return Rows(
        torch.empty(SLOTS, width, dtype=dtype, device=device),
        torch.empty(groups, SLOTS, dtype=torch.float32, device=device),
        torch.empty(groups if bits == 8 else 1, SLOTS, dtype=torch.float32, device=device),
        bits,
    )


def pack_rows(x: Tensor, bits: int, rows: int = SLOTS, out: Rows | None = None, release: Release = "late") -> Rows:
    """The first `rows` rows of x bf16 [8, K] as `Rows` for a matrix of these bits.

    `release`: when the next launch's programs may start.
    """
    check_operand("pack_rows: x", x, torch.bfloat16, (SLOTS, None))
    out = out or new_rows(x.shape[1], bits, x.device)
    groups = x.shape[1] // GROUP
    grid = (rows, triton.cdiv(groups, GROUPS_PER_PROGRAM))
    _pack[grid](
        x,
        out.values,
        out.sums,
        out.scales,
        groups,
        BITS=bits,
        G=GROUPS_PER_PROGRAM,
        RELEASE=release,
        **launch_options(x.device, 4),
    )
    return out


def sum_partials(partials: Tensor, rows: int = SLOTS, out: Tensor | None = None) -> Tensor:
    """Partial sums fp32 [split, 8, N] -> bf16 [8, N]: added in index order, one rounding; other rows are untouched."""
    check_operand("sum_partials: partials", partials, torch.float32, (None, SLOTS, None))
    split, _, columns = partials.shape
    if out is None:
        out = torch.zeros(SLOTS, columns, dtype=torch.bfloat16, device=partials.device)
    grid = (rows, triton.cdiv(columns, COLUMNS_PER_PROGRAM))
    _sum[grid](partials, out, columns, SPLIT=split, BLOCK=COLUMNS_PER_PROGRAM, **launch_options(partials.device, 4))
    return out


@triton.jit
def store_rows(values_ptr, sums_ptr, scales_ptr, x, group, m, K, valid, BITS: tl.constexpr):
    """Store groups of row m: x fp32 [G, 64] of bf16 values, group int32 [G], valid bool [G]; K is the row's width."""
    column = tl.arange(0, 64)
    place = column
    if BITS == 4:
        place = (column % 2) * 32 + column // 2
    at = (m * K + group * 64)[:, None] + place[None, :]
    if BITS == 8:
        exponent = half_exponent(x, 1)
        tl.store(values_ptr + at, (x * power_of_two(exponent)[:, None]).to(tl.float16), mask=valid[:, None])
        tl.store(scales_ptr + group * 8 + m, power_of_two(254 - exponent), mask=valid)
    else:
        tl.store(values_ptr + at, to_bf16(x), mask=valid[:, None])
    tl.store(sums_ptr + group * 8 + m, tree_sums(x, x.shape[0], 64), mask=valid)


@triton.jit
def add_partials(partials_ptr, m, columns, N, mask, SPLIT: tl.constexpr):
    """Row m's partial sums at these columns, added in index order; fp32."""
    total = tl.load(partials_ptr + m * N + columns, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(partials_ptr + (part * 8 + m) * N + columns, mask=mask, other=0.0)
    return total


@triton.jit
def load_partials(partials_ptr, m, columns, N, mask, SPLIT: tl.constexpr):
    """Row m's value at these columns: the partial sums added and rounded to bf16, as fp32."""
    return to_bf16(add_partials(partials_ptr, m, columns, N, mask, SPLIT)).to(tl.float32)


@triton.jit(do_not_specialize=["groups"])
def _pack(x_ptr, values_ptr, sums_ptr, scales_ptr, groups, BITS: tl.constexpr, G: tl.constexpr, RELEASE: tl.constexpr):
    m = tl.program_id(0)
    group = tl.program_id(1) * G + tl.arange(0, G)
    valid = group < groups
    K = groups * 64
    wait_for_producers(RELEASE)
    x = tl.load(x_ptr + m * K + group[:, None] * 64 + tl.arange(0, 64)[None, :], mask=valid[:, None], other=0.0)
    store_rows(values_ptr, sums_ptr, scales_ptr, x.to(tl.float32), group, m, K, valid, BITS)


@triton.jit(do_not_specialize=["columns"])
def _sum(partials_ptr, out_ptr, columns, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_producers()
    total = load_partials(partials_ptr, m, at, columns, at < columns, SPLIT)
    tl.store(out_ptr + m * columns + at, to_bf16(total), mask=at < columns)
