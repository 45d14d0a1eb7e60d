"""Norms between two products; a wide row is shared among programs of 256 elements each, which meet in memory.

One program cannot read a wide row's partial sums at more than a few per cent of the card's speed, and a row is all
there is in classic decode. So a row's programs each take a slice, leave its sum of squares, wait for one another, and
add up all slices in one order. Sums are the tree of `kernels.tree` and roundings stand where `engine.layers` rounds, so
a fused launch has the bytes of the plain ops in a row. M only says how many rows there are; other rows are not written.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import (
    INTERPRETED,
    SLOTS,
    check_operand,
    launch_options,
    release_consumers,
    round_bf16,
    to_bf16,
    wait_for_producers,
)
from kernels.rmsnorm import check_rows, checked_rows, inverse_rms
from kernels.rows import Rows, load_partials, store_rows
from kernels.tree import tree_sum

SLICE = 256
"""Elements of a wide row that one program takes: a warp's worth, so that nothing but shuffles happens inside it."""

WHOLE = 1024
"""Widest row that one program takes alone: a meeting costs more than it saves."""

MOST_SLICES = 32
"""Programs of a row at most: rows of up to 8,192."""

MEETING, FIRST, SECOND, THIRD = 0, 1, 2, 3
"""Phases of a launch: all of them with the row's programs meeting in between, or one, where programs run in turn."""


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
    for phase in _phases(slices, SECOND):
        _norm_rows[(rows, slices)](
            h,
            weight,
            normed,
            out.values,
            out.sums,
            out.scales,
            _meeting_place(h.device),
            float(eps),
            D=width,
            SIZE=size,
            BITS=bits,
            PHASE=phase,
            **launch_options(h.device, _warps(size)),
        )
    return out


def sum_norm_rows(
    partials: Tensor, weight: Tensor, eps: float, rows: int, bits: int, early: bool = False
) -> tuple[Tensor, Rows]:
    """A product's sums as rows, and their norm, packed for a product with a matrix of these bits.

    partials fp32 [split, 8, D]; weight fp32 [D] -> bf16 [8, D] and `Rows`; slots from `rows` on are not written.
    `early`: the next launch's programs may start while this one runs (decision 8).
    """
    where = "sum_norm_rows"
    check_operand(f"{where}: partials", partials, torch.float32, (None, SLOTS, None))
    split, _, width = partials.shape
    check_operand(f"{where}: weight", weight, torch.float32, (width,))
    check_rows(where, rows)
    out = torch.empty(SLOTS, width, dtype=torch.bfloat16, device=partials.device)
    packed = checked_rows(where, None, width, bits, partials.device)
    slices, size = _slices(width)
    for phase in _phases(slices, SECOND):
        _sum_norm_rows[(rows, slices)](
            partials,
            weight,
            out,
            packed.values,
            packed.sums,
            packed.scales,
            _meeting_place(partials.device),
            float(eps),
            D=width,
            SIZE=size,
            SPLIT=split,
            BITS=bits,
            PHASE=phase,
            EARLY=early,
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
    early: bool = False,
) -> tuple[Tensor, Rows | None]:
    """What stands between a product and the next: norm, residual add, layer scalar, next norm, packing.

    partials fp32 [split, 8, D] of o or down; residual bf16 [8, D]; post_weight and next_weight fp32 [D]; scalar bf16
    [1] or None -> the new residual bf16 [8, D] and `Rows` of its norm, None without next_weight. `out` must not be
    the residual's own memory; `normed` bf16 [8, D] also receives the plain normed rows. Other rows are not written.
    `early`: the next launch's programs may start while this one runs (decision 8).
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
            _meeting_place(residual.device),
            float(eps),
            D=width,
            SIZE=size,
            SPLIT=split,
            BITS=bits,
            PHASE=phase,
            EARLY=early,
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
    """One launch whose programs meet; a launch per phase in the interpreter, which runs one program after another."""
    return tuple(range(FIRST, last + 1)) if INTERPRETED.value and slices > 1 else (MEETING,)


@functools.cache
def _meeting_place(device: torch.device) -> Tensor:
    """Words int64 [33, 2, 8, 32], for each number of slices, meeting, row and program: how many meetings the program
    has been at, and the bits of its own sum.

    One place for a device, since launches there follow one another on one stream.
    """
    with torch.inference_mode(False):
        return torch.zeros(MOST_SLICES + 1, 2, SLOTS, MOST_SLICES, dtype=torch.int64, device=device)


@triton.jit
def _word(count, own):
    """A count int32 above the bits of a sum fp32, in one int64: who reads the count has the sum."""
    return (count.to(tl.int64) << 32) | own.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _next_count(words_ptr, SLICES: tl.constexpr):
    """What this program's next meeting at these words is counted as: one more than its last, as for all of its row.

    Read from the L2: a line that another program brought into the L1 may be older.
    """
    if SLICES == 1:
        return 0
    return (tl.load(words_ptr + tl.program_id(1), volatile=True) >> 32).to(tl.int32) + 1


@triton.jit
def _row_sum(own, words_ptr, count, SLICES: tl.constexpr, MOST: tl.constexpr, MEET: tl.constexpr):
    """The sum over a row from each program's own sum, once every program of the row has left its own.

    Sum and count are one word, stored and read whole, so nothing has to be ordered: no fence, no atomic, one way there
    and one back. Rows of another number of programs have words elsewhere. Without MEET programs run in turn.
    """
    if SLICES == 1:
        return own
    else:
        index = tl.arange(0, MOST)
        tl.store(words_ptr + tl.program_id(1), _word(count, own))
        words = tl.load(words_ptr + index, mask=index < SLICES, other=0, volatile=True)
        if MEET:
            while tl.max(((index < SLICES) & ((words >> 32).to(tl.int32) != count)).to(tl.int32), 0) > 0:
                words = tl.load(words_ptr + index, mask=index < SLICES, other=0, volatile=True)
        sums = (words & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        return tree_sum(tl.where(index < SLICES, sums, 0.0), MOST)


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
    h_ptr, weight_ptr, normed_ptr, values_ptr, sums_ptr, scales_ptr, words_ptr, eps,
    D: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (D + SIZE - 1) // SIZE
    m, part = tl.program_id(0), tl.program_id(1)
    at = part * SIZE + tl.arange(0, SIZE)
    weight = tl.load(weight_ptr + at, mask=at < D, other=0.0)
    wait_for_producers()
    words_ptr += (SLICES * 16 + m) * 32
    count = _next_count(words_ptr, SLICES)
    h = tl.load(h_ptr + m * D + at, mask=at < D, other=0.0).to(tl.float32)
    squares = _row_sum(tree_sum(h * h, SIZE), words_ptr, count, SLICES, 32, PHASE == 0)
    if PHASE != 1:
        x = round_bf16(h * inverse_rms(squares, eps, D) * weight)
        _pack_normed(x, m, at, normed_ptr, values_ptr, sums_ptr, scales_ptr, D, SIZE, BITS)


@triton.jit
def _sum_norm_rows(
    partials_ptr, weight_ptr, out_ptr, values_ptr, sums_ptr, scales_ptr, words_ptr, eps,
    D: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, PHASE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (D + SIZE - 1) // SIZE
    m, part = tl.program_id(0), tl.program_id(1)
    at = part * SIZE + tl.arange(0, SIZE)
    weight = tl.load(weight_ptr + at, mask=at < D, other=0.0)
    wait_for_producers()
    release_consumers(EARLY)  # no consumer is placed before all programs that meet here are
    words_ptr += (SLICES * 16 + m) * 32
    count = _next_count(words_ptr, SLICES)
    h = load_partials(partials_ptr, m, at, D, at < D, SPLIT)
    squares = _row_sum(tree_sum(h * h, SIZE), words_ptr, count, SLICES, 32, PHASE == 0)
    if PHASE != 1:
        tl.store(out_ptr + m * D + at, to_bf16(h), mask=at < D)
        x = round_bf16(h * inverse_rms(squares, eps, D) * weight)
        _pack_normed(x, m, at, None, values_ptr, sums_ptr, scales_ptr, D, SIZE, BITS)


@triton.jit
def _residual_norm_rows(
    partials_ptr, residual_ptr, post_weight_ptr, scalar_ptr, next_weight_ptr, out_ptr,
    normed_ptr, values_ptr, sums_ptr, scales_ptr, words_ptr, eps,
    D: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, PHASE: tl.constexpr,
    EARLY: tl.constexpr,
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
    wait_for_producers()
    release_consumers(EARLY)  # no consumer is placed before all programs that meet here are
    words_ptr += (SLICES * 16 + m) * 32
    count = _next_count(words_ptr, SLICES)
    if next_weight_ptr is not None:
        again_ptr = words_ptr + 8 * 32
        again = _next_count(again_ptr, SLICES)
    residual = tl.load(residual_ptr + m * D + at, mask=real, other=0.0).to(tl.float32)
    y = load_partials(partials_ptr, m, at, D, real, SPLIT)
    squares = _row_sum(tree_sum(y * y, SIZE), words_ptr, count, SLICES, 32, PHASE == 0)
    if PHASE != 1:
        h = round_bf16(residual + round_bf16(y * inverse_rms(squares, eps, D) * post_weight))
        if scalar_ptr is not None:
            h = round_bf16(h * scalar)
        tl.store(out_ptr + m * D + at, to_bf16(h), mask=real)
        if next_weight_ptr is not None:
            squares = _row_sum(tree_sum(h * h, SIZE), again_ptr, again, SLICES, 32, PHASE == 0)
            if PHASE != 2:
                x = round_bf16(h * inverse_rms(squares, eps, D) * next_weight)
                _pack_normed(x, m, at, normed_ptr, values_ptr, sums_ptr, scales_ptr, D, SIZE, BITS)
