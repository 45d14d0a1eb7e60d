"""Norms between two products; a wide row is shared among programs.

One program cannot read a wide row's partial sums at more than a few per cent of the card's speed, and a row is all
there is in classic decode. So on a GPU a wide row has a cluster of programs (`kernels.cluster_norms`); the interpreter,
which runs one program after another, gets a launch per phase of the kernels here, which serve narrow rows everywhere.
Sums are the tree of `kernels.tree` and roundings stand where `engine.layers` rounds, so a fused launch has the bytes of
the plain ops in a row. M only says how many rows there are; other rows are not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cluster_norms
from kernels.jit import (
    INTERPRETED,
    SLOTS,
    Release,
    check_operand,
    launch_options,
    round_bf16,
    to_bf16,
    wait_for_producers,
)
from kernels.rmsnorm import check_rows, checked_rows, inverse_rms
from kernels.rows import Rows, load_partials, store_rows
from kernels.tree import tree_sum

WHOLE = 512
"""Widest row that one program takes alone: a drafter's of 1,024, with up to 32 partial sums, is faster shared."""

SLICE, MOST_SLICES = 256, 32
"""Elements of a wide row that a program of the interpreter's takes, and how many programs a row has at most."""

ALONE, FIRST, SECOND, THIRD = 0, 1, 2, 3
"""Phases of a launch: all in one, or up to the first sum over the row, to the second, and to the end."""


def norm_rows(
    h: Tensor,
    weight: Tensor,
    eps: float,
    rows: int,
    bits: int,
    out: Rows | None = None,
    normed: Tensor | None = None,
) -> Rows:
    """The norm of the first `rows` rows of h bf16 [8, D], packed for a product with a matrix of these bits.

    weight fp32 [D]. `normed` bf16 [8, D], where given, also receives the plain rows. Neither writes other rows.
    """
    check_operand("norm_rows: h", h, torch.bfloat16, (SLOTS, None))
    width = h.shape[1]
    check_operand("norm_rows: weight", weight, torch.float32, (width,))
    check_rows("norm_rows", rows)
    if normed is not None:
        check_operand("norm_rows: normed", normed, torch.bfloat16, (SLOTS, width))
    out = checked_rows("norm_rows", out, width, bits, h.device)
    slices, size = _slices(width)
    if slices > 1 and not INTERPRETED:
        cluster_norms.norm(h, weight, eps, rows, out, normed)
        return out
    between = _slice_sums(slices, h.device)
    for phase in _phases(slices, SECOND):
        _norm_rows[(rows, slices)](
            h,
            weight,
            normed,
            out.values,
            out.sums,
            out.scales,
            between,
            float(eps),
            D=width,
            SIZE=size,
            BITS=bits,
            PHASE=phase,
            **launch_options(h.device, _warps(size)),
        )
    return out


def sum_norm_rows(
    partials: Tensor, weight: Tensor, eps: float, rows: int, bits: int, release: Release = "late"
) -> tuple[Tensor, Rows]:
    """A product's sums as rows, and their norm, packed for a product with a matrix of these bits.

    partials fp32 [split, 8, D]; weight fp32 [D] -> bf16 [8, D] and `Rows`; slots from `rows` on are not written.
    `release`: when the next launch's programs may start.
    """
    where = "sum_norm_rows"
    check_operand(f"{where}: partials", partials, torch.float32, (None, SLOTS, None))
    split, _, width = partials.shape
    check_operand(f"{where}: weight", weight, torch.float32, (width,))
    check_rows(where, rows)
    out = torch.empty(SLOTS, width, dtype=torch.bfloat16, device=partials.device)
    packed = checked_rows(where, None, width, bits, partials.device)
    slices, size = _slices(width)
    if slices > 1 and not INTERPRETED:
        cluster_norms.sum_norm(partials, weight, eps, rows, out, packed, release)
        return out, packed
    between = _slice_sums(slices, partials.device)
    for phase in _phases(slices, SECOND):
        _sum_norm_rows[(rows, slices)](
            partials,
            weight,
            out,
            packed.values,
            packed.sums,
            packed.scales,
            between,
            float(eps),
            D=width,
            SIZE=size,
            SPLIT=split,
            BITS=bits,
            PHASE=phase,
            RELEASE=release,
            **launch_options(partials.device, _warps(size), alone=True),
        )
    return out, packed


def residual_norm_rows(
    partials: Tensor,
    residual: Tensor,
    post_weight: Tensor,
    scalar: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    rows: int,
    bits: int,
    out: Tensor | None = None,
    packed: Rows | None = None,
    normed: Tensor | None = None,
    release: Release = "late",
) -> tuple[Tensor, Rows | None]:
    """What stands between a product and the next: norm, residual add, layer scalar, next norm, packing.

    partials fp32 [split, 8, D] of o or down; residual bf16 [8, D]; post_weight and next_weight fp32 [D]; scalar bf16
    [1] or None -> the new residual bf16 [8, D] and `Rows` of its norm, None without next_weight. `out` must not be
    the residual's own memory; `normed` bf16 [8, D] also receives the plain normed rows. Other rows are not written.
    `release`: when the next launch's programs may start.
    """
    check_operand("residual_norm_rows: partials", partials, torch.float32, (None, SLOTS, None))
    split, _, width = partials.shape
    where = "residual_norm_rows"
    check_rows(where, rows)
    check_operand(f"{where}: residual", residual, torch.bfloat16, (SLOTS, width))
    check_operand(f"{where}: post_weight", post_weight, torch.float32, (width,))
    if scalar is not None and (scalar.dtype != torch.bfloat16 or scalar.numel() != 1):
        raise ValueError(f"{where}: scalar must be one bf16 value, got {scalar.dtype} of {scalar.numel()} elements")
    if next_weight is not None:
        check_operand(f"{where}: next_weight", next_weight, torch.float32, (width,))
        packed = checked_rows(where, packed, width, bits, residual.device)
    elif normed is not None or packed is not None:
        raise ValueError(f"{where}: normed and packed rows need next_weight")
    if normed is not None:
        check_operand(f"{where}: normed", normed, torch.bfloat16, (SLOTS, width))
    if out is None:
        out = torch.empty_like(residual)
    check_operand(f"{where}: out", out, torch.bfloat16, (SLOTS, width))
    if out.data_ptr() == residual.data_ptr():
        raise ValueError(f"{where}: out is the residual itself; give another buffer")
    slices, size = _slices(width)
    if slices > 1 and not INTERPRETED:
        weights, results = (post_weight, scalar, next_weight), (out, packed, normed)
        cluster_norms.residual_norm((partials, residual), weights, eps, rows, bits, results, release)
        return out, packed
    between = _slice_sums(slices, residual.device)
    for phase in _phases(slices, SECOND if next_weight is None else THIRD):
        _residual_norm_rows[(rows, slices)](
            partials,
            residual,
            post_weight,
            scalar,
            next_weight,
            out,
            normed,
            None if packed is None else packed.values,
            None if packed is None else packed.sums,
            None if packed is None else packed.scales,
            between,
            float(eps),
            D=width,
            SIZE=size,
            SPLIT=split,
            BITS=bits,
            PHASE=phase,
            RELEASE=release,
            **launch_options(residual.device, _warps(size), alone=True),
        )
    return out, packed


def _slices(width: int) -> tuple[int, int]:
    """Programs of a row, and the elements of each, a power of two; ValueError for rows that are too wide."""
    if width > MOST_SLICES * SLICE:
        raise ValueError(f"norm_rows: rows of {width} elements; a row's programs take up to {MOST_SLICES * SLICE}")
    size = triton.next_power_of_2(width) if width <= WHOLE else SLICE
    return triton.cdiv(width, size), size


def _warps(size: int) -> int:
    """Warps of a program: 8 elements a thread of a slice, 4 of a whole row. The sum's bytes do not depend on it."""
    return 1 if size <= SLICE else size // 128


def _phases(slices: int, last: int) -> tuple[int, ...]:
    """One launch for a row that a program has alone, else one per phase."""
    return tuple(range(FIRST, last + 1)) if slices > 1 else (ALONE,)


def _slice_sums(slices: int, device: torch.device) -> Tensor | None:
    """Room for the sums of a row's slices, fp32 [2, 8, 32]: of the first norm, and of the second."""
    return torch.zeros(2, SLOTS, MOST_SLICES, dtype=torch.float32, device=device) if slices > 1 else None


@triton.jit
def _row_sum(own, sums_ptr, m, SLICES: tl.constexpr, MOST: tl.constexpr):
    """The sum over a row from each program's own sum; what is not there yet is there in the next phase."""
    if SLICES == 1:
        return own
    else:
        index = tl.arange(0, MOST)
        tl.store(sums_ptr + m * MOST + tl.program_id(1), own)
        return tree_sum(tl.load(sums_ptr + m * MOST + index, mask=index < SLICES, other=0.0), MOST)


@triton.jit
def _pack_normed(
    x, m, at, normed_ptr, values_ptr, sums_ptr, scales_ptr, D: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr
):
    """Store a slice of a row's norm, x fp32 [SIZE] of bf16 values at columns `at`: packed, and plain if asked for."""
    if normed_ptr is not None:
        tl.store(normed_ptr + m * D + at, to_bf16(x), mask=at < D)
    group = tl.program_id(1) * (SIZE // 64) + tl.arange(0, SIZE // 64)
    store_rows(values_ptr, sums_ptr, scales_ptr, tl.reshape(x, [SIZE // 64, 64]), group, m, D, group < D // 64, BITS)


@triton.jit
def _norm_rows(
    h_ptr, weight_ptr, normed_ptr, values_ptr, sums_ptr, scales_ptr, slices_ptr, eps,
    D: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (D + SIZE - 1) // SIZE
    m, part = tl.program_id(0), tl.program_id(1)
    at = part * SIZE + tl.arange(0, SIZE)
    weight = tl.load(weight_ptr + at, mask=at < D, other=0.0)
    wait_for_producers()
    h = tl.load(h_ptr + m * D + at, mask=at < D, other=0.0).to(tl.float32)
    squares = _row_sum(tree_sum(h * h, SIZE), slices_ptr, m, SLICES, 32)
    if PHASE != 1:
        x = round_bf16(h * inverse_rms(squares, eps, D) * weight)
        _pack_normed(x, m, at, normed_ptr, values_ptr, sums_ptr, scales_ptr, D, SIZE, BITS)


@triton.jit
def _sum_norm_rows(
    partials_ptr, weight_ptr, out_ptr, values_ptr, sums_ptr, scales_ptr, slices_ptr, eps,
    D: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, PHASE: tl.constexpr,
    RELEASE: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (D + SIZE - 1) // SIZE
    m, part = tl.program_id(0), tl.program_id(1)
    at = part * SIZE + tl.arange(0, SIZE)
    weight = tl.load(weight_ptr + at, mask=at < D, other=0.0)
    wait_for_producers(RELEASE)
    h = load_partials(partials_ptr, m, at, D, at < D, SPLIT)
    squares = _row_sum(tree_sum(h * h, SIZE), slices_ptr, m, SLICES, 32)
    if PHASE != 1:
        tl.store(out_ptr + m * D + at, to_bf16(h), mask=at < D)
        x = round_bf16(h * inverse_rms(squares, eps, D) * weight)
        _pack_normed(x, m, at, None, values_ptr, sums_ptr, scales_ptr, D, SIZE, BITS)


@triton.jit
def _residual_norm_rows(
    partials_ptr, residual_ptr, post_weight_ptr, scalar_ptr, next_weight_ptr, out_ptr,
    normed_ptr, values_ptr, sums_ptr, scales_ptr, slices_ptr, eps,
    D: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, PHASE: tl.constexpr,
    RELEASE: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (D + SIZE - 1) // SIZE
    m, part = tl.program_id(0), tl.program_id(1)
    at = part * SIZE + tl.arange(0, SIZE)
    real = at < D
    post_weight = tl.load(post_weight_ptr + at, mask=real, other=0.0)
    if next_weight_ptr is not None:
        next_weight = tl.load(next_weight_ptr + at, mask=real, other=0.0)
    if scalar_ptr is not None:
        scalar = tl.load(scalar_ptr).to(tl.float32)
    wait_for_producers(RELEASE)
    residual = tl.load(residual_ptr + m * D + at, mask=real, other=0.0).to(tl.float32)
    y = load_partials(partials_ptr, m, at, D, real, SPLIT)
    squares = _row_sum(tree_sum(y * y, SIZE), slices_ptr, m, SLICES, 32)
    if PHASE != 1:
        h = round_bf16(residual + round_bf16(y * inverse_rms(squares, eps, D) * post_weight))
        if scalar_ptr is not None:
            h = round_bf16(h * scalar)
        tl.store(out_ptr + m * D + at, to_bf16(h), mask=real)
        if next_weight_ptr is not None:
            squares = _row_sum(tree_sum(h * h, SIZE), slices_ptr, 8 + m, SLICES, 32)
            if PHASE != 2:
                x = round_bf16(h * inverse_rms(squares, eps, D) * next_weight)
                _pack_normed(x, m, at, normed_ptr, values_ptr, sums_ptr, scales_ptr, D, SIZE, BITS)
