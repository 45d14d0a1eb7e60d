"""RMS norms: alone, as the producer of a product's rows, and with the residual add between two products.

All three form one sum of squares (`kernels.tree`) and round where `engine.layers` rounds, so a fused launch has the
bytes of the plain ops in a row. Every row is one program; M only says how many programs there are, and rows that no
program computes are not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import (
    SLOTS,
    check_operand,
    launch_options,
    release_consumers,
    round_bf16,
    to_bf16,
    wait_for_producers,
)
from kernels.rows import Rows, load_partials, new_rows, store_rows
from kernels.tree import tree_sum


def rmsnorm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last dim; fp32 inside, one rounding.

    x bf16 [..., D]; weight fp32 [D], or [heads, D] for x [..., heads, D], or None. ValueError on other shapes.
    """
    x = x.contiguous()
    width = x.shape[-1]
    check_operand("rmsnorm: x", x, torch.bfloat16, tuple(x.shape))
    heads = 1
    if weight is not None:
        heads = weight.numel() // width
        if weight.shape not in ((width,), (1, width), (*x.shape[-2:-1], width)):
            raise ValueError(
                f"rmsnorm: weight {tuple(weight.shape)} for x {tuple(x.shape)}; expected [{width}] or one per head"
            )
        check_operand("rmsnorm: weight", weight, torch.float32, tuple(weight.shape))
    out = torch.empty_like(x)
    block = max(triton.next_power_of_2(width), 16)
    if x.numel():
        _rmsnorm[(x.numel() // (width * heads), heads)](
            x, weight, out, float(eps), D=width, BLOCK=block, **launch_options(x.device, _warps(block))
        )
    return out


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
    block = max(triton.next_power_of_2(width), 64)
    _norm_rows[(rows,)](
        h,
        weight,
        normed,
        out.values,
        out.sums,
        out.scales,
        float(eps),
        D=width,
        BLOCK=block,
        BITS=bits,
        **launch_options(h.device, _warps(block)),
    )
    return out


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
) -> tuple[Tensor, Rows | None]:
    """What stands between a product and the next: norm, residual add, layer scalar, next norm, packing.

    partials fp32 [split, 8, D] of o or down; residual bf16 [8, D]; post_weight and next_weight fp32 [D]; scalar bf16
    [1] or None -> the new residual bf16 [8, D] and `Rows` of its norm, None without next_weight. `out` must not be
    the residual's own memory; `normed` bf16 [8, D] also receives the plain normed rows. Other rows are not written.
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
    block = max(triton.next_power_of_2(width), 64)
    _residual_norm_rows[(rows,)](
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
        float(eps),
        D=width,
        BLOCK=block,
        SPLIT=split,
        BITS=bits,
        **launch_options(residual.device, _warps(block)),
    )
    return out, packed


def check_rows(where: str, rows: int) -> None:
    """ValueError unless 1 <= rows <= 8."""
    if not 1 <= rows <= SLOTS:
        raise ValueError(f"{where}: {rows} rows; a call takes 1 to {SLOTS}")


def checked_rows(where: str, out: Rows | None, width: int, bits: int, device: torch.device) -> Rows:
    """`out` where it fits this width and these bits, new rows where none are given, else ValueError."""
    if out is None:
        return new_rows(width, bits, device)
    if out.width != width or out.bits != bits:
        raise ValueError(f"{where}: rows of {out.width} at {out.bits} bits given, {width} at {bits} bits needed")
    return out


def _warps(block: int) -> int:
    """Warps of a norm, from the width alone: 16 to 32 elements a thread. The sum's bytes do not depend on it."""
    return min(max(block // 512, 1), 8)


@triton.jit
def inverse_rms(squares, eps, D: tl.constexpr):
    """(squares / D + eps)^-0.5 from a row's sum of squares."""
    return tl.rsqrt(eps + squares * (1.0 / D))


@triton.jit
def _normed(x, weight, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """x fp32 [BLOCK] of bf16 values, zero past D -> its norm in fp32, not yet rounded."""
    return x * inverse_rms(tree_sum(x * x, BLOCK), eps, D) * weight


@triton.jit
def _rmsnorm(x_ptr, weight_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    release_consumers()
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    if weight_ptr is None:
        weight = 1.0
    else:
        weight = tl.load(weight_ptr + head * D + at, mask=at < D, other=0.0)
    row = tl.program_id(0) * tl.num_programs(1) + head
    wait_for_producers()
    x = tl.load(x_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + at, to_bf16(_normed(x, weight, eps, D, BLOCK)), mask=at < D)


@triton.jit
def _pack_normed(
    x, m, normed_ptr, values_ptr, sums_ptr, scales_ptr, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr
):
    """Store a row's norm, x fp32 [BLOCK] of bf16 values: plain where asked for, and packed."""
    at = tl.arange(0, BLOCK)
    if normed_ptr is not None:
        tl.store(normed_ptr + m * D + at, to_bf16(x), mask=at < D)
    group = tl.arange(0, BLOCK // 64)
    tile = tl.reshape(x, [BLOCK // 64, 64])
    store_rows(values_ptr, sums_ptr, scales_ptr, tile, group, m, D, group < D // 64, BITS)


@triton.jit
def _norm_rows(
    h_ptr,
    weight_ptr,
    normed_ptr,
    values_ptr,
    sums_ptr,
    scales_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    release_consumers()
    m = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at, mask=at < D, other=0.0)
    wait_for_producers()
    h = tl.load(h_ptr + m * D + at, mask=at < D, other=0.0).to(tl.float32)
    x = round_bf16(_normed(h, weight, eps, D, BLOCK))
    _pack_normed(x, m, normed_ptr, values_ptr, sums_ptr, scales_ptr, D, BLOCK, BITS)


@triton.jit
def _residual_norm_rows(
    partials_ptr,
    residual_ptr,
    post_weight_ptr,
    scalar_ptr,
    next_weight_ptr,
    out_ptr,
    normed_ptr,
    values_ptr,
    sums_ptr,
    scales_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
):
    release_consumers()
    m = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    real = at < D
    post_weight = tl.load(post_weight_ptr + at, mask=real, other=0.0)
    if next_weight_ptr is not None:
        next_weight = tl.load(next_weight_ptr + at, mask=real, other=0.0)
    if scalar_ptr is not None:
        scalar = tl.load(scalar_ptr).to(tl.float32)
    wait_for_producers()
    residual = tl.load(residual_ptr + m * D + at, mask=real, other=0.0).to(tl.float32)
    y = load_partials(partials_ptr, m, at, D, real, SPLIT)
    h = round_bf16(residual + round_bf16(_normed(y, post_weight, eps, D, BLOCK)))
    if scalar_ptr is not None:
        h = round_bf16(h * scalar)
    tl.store(out_ptr + m * D + at, to_bf16(h), mask=real)
    if next_weight_ptr is not None:
        x = round_bf16(_normed(h, next_weight, eps, D, BLOCK))
        _pack_normed(x, m, normed_ptr, values_ptr, sums_ptr, scales_ptr, D, BLOCK, BITS)
