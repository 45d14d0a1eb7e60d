"""Rotary embedding, alone and fused with the head norms between the qkv product and attention.

Pairs are (i, i + D/2), so a program holds the two halves of a head apart and nothing is moved. The fused launch adds
the product's partial sums, norms, rotates and writes k and v into the cache, with the plain ops' bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import (
    SLOTS,
    Release,
    check_operand,
    launch_options,
    round_bf16,
    to_bf16,
    wait_for_producers,
)
from kernels.rmsnorm import check_rows, inverse_rms
from kernels.rows import load_partials
from kernels.tree import tree_sum

WIDEST = 2048
"""Largest head_dim of the fused launch: a program holds a head."""


def rope_row(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs in fp32 with one rounding: decode's kernel.

    x bf16 [n, h, D]; cos and sin fp32 [n, 1, D], sin with the first half negated. ValueError on other shapes.
    """
    return _launch_rope("rope_row", x, cos, sin, general=False)


def rope_general(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same rotation in model dtype: cos and sin rounded first, then each product and the sum."""
    return _launch_rope("rope_general", x, cos, sin, general=True)


def head_norms_rope(
    partials: Tensor,
    norm_heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    rows: int,
    heads: int,
    kv_heads: int,
    k_eq_v: bool,
    eps: float,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    ring: int,
    general: bool = False,
    out: Tensor | None = None,
    settled: bool = False,
    release: Release = "late",
) -> Tensor:
    """From the qkv product to attention's operands: head norms and RoPE; k and v go straight into the cache.

    partials fp32 [split, 8, N], N = all heads x D: q, k, v; q, k where v is k; q alone with kv_heads 0 (no caches).
    norm_heads fp32 [heads + kv_heads (+ kv_heads), D]; cos and sin fp32 [positions, D], sin with the first half
    negated; position int32 [1] on the device: row r stands at position + r, in slot (position + r) % ring of the
    caches bf16 [kv_heads, slots, D]. Returns q bf16 [8, heads, D]; rows past `rows` are written nowhere. `settled`: the
    position was written before the step's first launch ended, so that it may be read before the wait. `release`: when
    the next launch's programs may start.
    """
    where = "head_norms_rope"
    check_rows(where, rows)
    check_operand(f"{where}: partials", partials, torch.float32, (None, SLOTS, None))
    split, _, columns = partials.shape
    all_heads = heads + (kv_heads if k_eq_v else 2 * kv_heads)
    width = norm_heads.shape[-1]
    if width & (width - 1) or not 2 <= width <= WIDEST:
        raise ValueError(f"{where}: head_dim {width} is not a power of two up to {WIDEST}; use the plain ops")
    if columns != all_heads * width:
        raise ValueError(
            f"{where}: partials of {columns} columns; {all_heads} heads of {width} need {all_heads * width}"
        )
    check_operand(f"{where}: norm_heads", norm_heads, torch.float32, (all_heads, width))
    check_operand(f"{where}: cos", cos, torch.float32, (None, width))
    check_operand(f"{where}: sin", sin, torch.float32, (cos.shape[0], width))
    check_operand(f"{where}: position", position, torch.int32, (1,))
    slots = _check_caches(where, k_cache, v_cache, kv_heads, width, ring)
    if out is None:
        out = torch.empty(SLOTS, heads, width, dtype=torch.bfloat16, device=partials.device)
    check_operand(f"{where}: out", out, torch.bfloat16, (SLOTS, heads, width))
    _head_norms_rope[(rows, all_heads)](
        partials,
        norm_heads,
        cos,
        sin,
        position,
        out,
        k_cache,
        v_cache,
        float(eps),
        slots,
        ring,
        H=heads,
        HKV=kv_heads,
        D=width,
        SPLIT=split,
        K_EQ_V=k_eq_v,
        GENERAL=general,
        SETTLED=settled,
        RELEASE=release,
        **launch_options(partials.device, 1, alone=True),
    )
    return out


def _check_caches(
    where: str, k_cache: Tensor | None, v_cache: Tensor | None, kv_heads: int, width: int, ring: int
) -> int:
    """Slots of the caches; ValueError unless there are two of the right shape, or none for no heads."""
    if k_cache is None or v_cache is None:
        if kv_heads or k_cache is not v_cache:
            raise ValueError(f"{where}: {kv_heads} key heads need both caches; a drafter has neither")
        return 0
    check_operand(f"{where}: k_cache", k_cache, torch.bfloat16, (kv_heads, None, width))
    slots = k_cache.shape[1]
    check_operand(f"{where}: v_cache", v_cache, torch.bfloat16, (kv_heads, slots, width))
    if not SLOTS <= ring <= slots:
        raise ValueError(f"{where}: ring {ring} must hold {SLOTS} rows and fit into {slots} slots")
    return slots


def _launch_rope(where: str, x: Tensor, cos: Tensor, sin: Tensor, general: bool) -> Tensor:
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    check_operand(f"{where}: x", x, torch.bfloat16, (None, None, None))
    count, heads, width = x.shape
    if width % 2:
        raise ValueError(f"{where}: head_dim {width} is odd; pairs are (i, i + D/2)")
    check_operand(f"{where}: cos", cos, torch.float32, (count, 1, width))
    check_operand(f"{where}: sin", sin, torch.float32, (count, 1, width))
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width // 2)
    if x.numel():
        _rope[(count, heads)](x, cos, sin, out, D=width, BLOCK=block, GENERAL=general, **launch_options(x.device, 1))
    return out


@triton.jit
def turned(x, y, cos, sin, GENERAL: tl.constexpr):
    """x * cos + y * sin of bf16 values in fp32: as fp32 ops, or with a bf16 rounding per op."""
    if GENERAL:
        return round_bf16(x * round_bf16(cos)) + round_bf16(y * round_bf16(sin))
    else:
        return x * cos + y * sin


@triton.jit
def _rope(x_ptr, cos_ptr, sin_ptr, out_ptr, D: tl.constexpr, BLOCK: tl.constexpr, GENERAL: tl.constexpr):
    row = tl.program_id(0)
    low = tl.arange(0, BLOCK)
    high = low + D // 2
    real = low < D // 2
    at = (row * tl.num_programs(1) + tl.program_id(1)) * D
    wait_for_producers()
    cos_low = tl.load(cos_ptr + row * D + low, mask=real, other=0.0)
    cos_high = tl.load(cos_ptr + row * D + high, mask=real, other=0.0)
    sin_low = tl.load(sin_ptr + row * D + low, mask=real, other=0.0)
    sin_high = tl.load(sin_ptr + row * D + high, mask=real, other=0.0)
    x_low = tl.load(x_ptr + at + low, mask=real, other=0.0).to(tl.float32)
    x_high = tl.load(x_ptr + at + high, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + at + low, to_bf16(turned(x_low, x_high, cos_low, sin_low, GENERAL)), mask=real)
    tl.store(out_ptr + at + high, to_bf16(turned(x_high, x_low, cos_high, sin_high, GENERAL)), mask=real)


@triton.jit
def _angles(position_ptr, cos_ptr, sin_ptr, m, D: tl.constexpr):
    """Row m's position, and its cosines and sines: low half, high half."""
    position = tl.load(position_ptr) + m
    low = position.to(tl.int64) * D + tl.arange(0, D // 2)
    high = low + D // 2
    return position, tl.load(cos_ptr + low), tl.load(cos_ptr + high), tl.load(sin_ptr + low), tl.load(sin_ptr + high)


@triton.jit(do_not_specialize=["slots", "ring"])
def _head_norms_rope(
    partials_ptr,
    norm_heads_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    slots,
    ring,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    K_EQ_V: tl.constexpr,
    GENERAL: tl.constexpr,
    SETTLED: tl.constexpr,
    RELEASE: tl.constexpr,
):
    m = tl.program_id(0)
    head = tl.program_id(1)
    N: tl.constexpr = (H + HKV if K_EQ_V else H + 2 * HKV) * D
    low = tl.arange(0, D // 2)
    high = low + D // 2
    weight_low = tl.load(norm_heads_ptr + head * D + low)
    weight_high = tl.load(norm_heads_ptr + head * D + high)
    if SETTLED:
        position, cos_low, cos_high, sin_low, sin_high = _angles(position_ptr, cos_ptr, sin_ptr, m, D)
    wait_for_producers(RELEASE)
    if not SETTLED:
        position, cos_low, cos_high, sin_low, sin_high = _angles(position_ptr, cos_ptr, sin_ptr, m, D)
    raw_low = load_partials(partials_ptr, m, head * D + low, N, low >= 0, SPLIT)
    raw_high = load_partials(partials_ptr, m, head * D + high, N, low >= 0, SPLIT)
    squares = tree_sum(raw_low * raw_low, D // 2) + tree_sum(raw_high * raw_high, D // 2)
    scale = inverse_rms(squares, eps, D)
    x_low = round_bf16(raw_low * scale * weight_low)
    x_high = round_bf16(raw_high * scale * weight_high)
    turned_low = to_bf16(turned(x_low, x_high, cos_low, sin_low, GENERAL))
    turned_high = to_bf16(turned(x_high, x_low, cos_high, sin_high, GENERAL))
    if head < H:
        at = (m * H + head) * D
        tl.store(q_ptr + at + low, turned_low)
        tl.store(q_ptr + at + high, turned_high)
    if HKV > 0:
        slot = (position % ring).to(tl.int64)
        if (head >= H) & (head < H + HKV):
            at = ((head - H) * slots + slot) * D
            tl.store(k_ptr + at + low, turned_low)
            tl.store(k_ptr + at + high, turned_high)
            if K_EQ_V:
                tl.store(v_ptr + at + low, to_bf16(raw_low * scale))
                tl.store(v_ptr + at + high, to_bf16(raw_high * scale))
        if head >= H + HKV:
            at = ((head - H - HKV) * slots + slot) * D
            tl.store(v_ptr + at + low, to_bf16(x_low))
            tl.store(v_ptr + at + high, to_bf16(x_high))
