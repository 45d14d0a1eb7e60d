"""Norms of wide rows on a GPU: what `kernels.fused_norms` says, with the same bytes, a cluster of programs to a row.

One multiprocessor would read a row's partial sums alone while 131 wait, so each program of a cluster takes a slice, and
they add up their squares in `kernels.cluster`. In Gluon, which can say which program holds what; the interpreter, which
has no Gluon, runs the Triton kernels of `kernels.fused_norms` a phase at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.cluster import CLUSTER, EACH, begin, end, group_largest, group_sums, row_sum
from kernels.jit import (
    Release,
    half_exponent_of,
    launch_options,
    power_of_two,
    round_bf16,
    to_bf16,
    wait_for_producers,
)
from kernels.rmsnorm import inverse_rms
from kernels.rows import Rows


def norm(h: Tensor, weight: Tensor, eps: float, rows: int, out: Rows, normed: Tensor | None) -> None:
    """`kernels.fused_norms.norm_rows`, operands checked."""
    operands = h, weight, normed, out.values, out.sums, out.scales, float(eps)
    _norm_cluster[(rows,)](*operands, BITS=out.bits, **_options(h.shape[1], h.device))


def sum_norm(
    partials: Tensor, weight: Tensor, eps: float, rows: int, out: Tensor, packed: Rows, release: Release
) -> None:
    """`kernels.fused_norms.sum_norm_rows`, operands checked."""
    operands = partials, weight, out, packed.values, packed.sums, packed.scales, float(eps)
    constants = {"SPLIT": partials.shape[0], "BITS": packed.bits, "RELEASE": release}
    _sum_norm_cluster[(rows,)](*operands, **constants, **_options(out.shape[1], out.device, alone=True))


def residual_norm(
    sums: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor | None, Tensor | None],
    eps: float,
    rows: int,
    bits: int,
    results: tuple[Tensor, Rows | None, Tensor | None],
    release: Release,
) -> None:
    """`kernels.fused_norms.residual_norm_rows`, operands checked: partials and residual; the first norm's weight, the
    scalar, the second norm's; and out, packed and normed."""
    out, packed, normed = results
    into = (None, None, None) if packed is None else (packed.values, packed.sums, packed.scales)
    operands = *sums, *weights, out, normed, *into, float(eps)
    constants = {"SPLIT": sums[0].shape[0], "BITS": bits, "RELEASE": release}
    _residual_norm_cluster[(rows,)](*operands, **constants, **_options(out.shape[1], out.device, alone=True))


def _options(width: int, device: torch.device, alone: bool = False) -> dict[str, Any]:
    """A power of two of elements to a program, eight to a thread; at least a warp's."""
    size = max(triton.next_power_of_2(triton.cdiv(width, CLUSTER)), 32 * EACH)
    return {"D": width, "SIZE": size, "num_ctas": CLUSTER, **launch_options(device, size // (32 * EACH), alone=alone)}


@gluon.jit
def _elements(SIZE: gl.constexpr):
    """Which element of a row stands where: int32 [CLUSTER, SIZE], a line to a program, eight neighbours to a thread."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0], [[1, 0], [2, 0], [4, 0]])
    line = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    return line[:, None] * SIZE + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _added(partials_ptr, m, at, D: gl.constexpr, SPLIT: gl.constexpr):
    """Row m's partial sums, added in index order and rounded, as fp32."""
    total = gl.load(partials_ptr + m * D + at, mask=at < D, other=0.0)
    for part in gl.static_range(1, SPLIT):
        total += gl.load(partials_ptr + (part * 8 + m) * D + at, mask=at < D, other=0.0)
    return round_bf16(total)


@gluon.jit
def _store(x, m, at, normed_ptr, values_ptr, sums_ptr, scales_ptr, D: gl.constexpr, BITS: gl.constexpr):
    """Store row m's norm, x fp32 of bf16 values: as `kernels.rows.store_rows`, and plain if asked for."""
    real = at < D
    if normed_ptr is not None:
        gl.store(normed_ptr + m * D + at, to_bf16(x), mask=real)
    leads = real & (at % 64 == 0)
    place = m * D + at
    if BITS == 4:
        place = m * D + at // 64 * 64 + (at % 2) * 32 + at % 64 // 2
    if BITS == 8:
        exponent = half_exponent_of(group_largest(x))
        gl.store(values_ptr + place, (x * power_of_two(exponent)).to(gl.float16), mask=real)
        gl.store(scales_ptr + at // 64 * 8 + m, power_of_two(254 - exponent), mask=leads)
    else:
        gl.store(values_ptr + place, to_bf16(x), mask=real)
    gl.store(sums_ptr + at // 64 * 8 + m, group_sums(x), mask=leads)


@gluon.jit
def _norm_cluster(
    h_ptr, weight_ptr, normed_ptr, values_ptr, sums_ptr, scales_ptr, eps,
    D: gl.constexpr, SIZE: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    room = begin()
    m, at = gl.program_id(0), _elements(SIZE)
    weight = gl.load(weight_ptr + at, mask=at < D, other=0.0)
    wait_for_producers()
    h = gl.load(h_ptr + m * D + at, mask=at < D, other=0.0).to(gl.float32)
    x = round_bf16(h * inverse_rms(row_sum(h * h, 0), eps, D) * weight)
    _store(x, m, at, normed_ptr, values_ptr, sums_ptr, scales_ptr, D, BITS)
    end(room)


@gluon.jit
def _sum_norm_cluster(
    partials_ptr, weight_ptr, out_ptr, values_ptr, sums_ptr, scales_ptr, eps,
    D: gl.constexpr, SIZE: gl.constexpr, SPLIT: gl.constexpr, BITS: gl.constexpr, RELEASE: gl.constexpr,
):  # fmt: skip
    room = begin()
    m, at = gl.program_id(0), _elements(SIZE)
    weight = gl.load(weight_ptr + at, mask=at < D, other=0.0)
    wait_for_producers(RELEASE)
    h = _added(partials_ptr, m, at, D, SPLIT)
    x = round_bf16(h * inverse_rms(row_sum(h * h, 0), eps, D) * weight)
    _store(x, m, at, None, values_ptr, sums_ptr, scales_ptr, D, BITS)
    gl.store(out_ptr + m * D + at, to_bf16(h), mask=at < D)
    end(room)


@gluon.jit
def _residual_norm_cluster(
    partials_ptr, residual_ptr, post_weight_ptr, scalar_ptr, next_weight_ptr, out_ptr,
    normed_ptr, values_ptr, sums_ptr, scales_ptr, eps,
    D: gl.constexpr, SIZE: gl.constexpr, SPLIT: gl.constexpr, BITS: gl.constexpr, RELEASE: gl.constexpr,
):  # fmt: skip
    room = begin()
    m, at = gl.program_id(0), _elements(SIZE)
    post_weight = gl.load(post_weight_ptr + at, mask=at < D, other=0.0)
    if next_weight_ptr is not None:
        next_weight = gl.load(next_weight_ptr + at, mask=at < D, other=0.0)
    if scalar_ptr is not None:
        scalar = gl.load(scalar_ptr).to(gl.float32)
    wait_for_producers(RELEASE)
    residual = gl.load(residual_ptr + m * D + at, mask=at < D, other=0.0).to(gl.float32)
    y = _added(partials_ptr, m, at, D, SPLIT)
    h = round_bf16(residual + round_bf16(y * inverse_rms(row_sum(y * y, 0), eps, D) * post_weight))
    if scalar_ptr is not None:
        h = round_bf16(h * scalar)
    if next_weight_ptr is not None:
        x = round_bf16(h * inverse_rms(row_sum(h * h, 1), eps, D) * next_weight)
        _store(x, m, at, normed_ptr, values_ptr, sums_ptr, scales_ptr, D, BITS)
    gl.store(out_ptr + m * D + at, to_bf16(h), mask=at < D)
    end(room)
