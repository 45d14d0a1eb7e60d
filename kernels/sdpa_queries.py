"""Queries that attention makes itself from the q product's partial sums, with the bytes that `head_norms_rope` leaves.

A draft step has no k and v of its own: its head norms and RoPE are those of q alone, a few heads a program, and a
launch that is not there costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import SLOTS, check_operand, round_bf16, to_bf16
from kernels.rmsnorm import inverse_rms
from kernels.rope import turned
from kernels.rows import load_partials
from kernels.tree import tree_sums

REGISTERS = 168
"""Most of a thread: three programs of 4 warps to a multiprocessor."""


@dataclass(frozen=True)
class QueryHeads:
    """What turns a q product's sums into queries: norm_heads fp32 [H, D], cos and sin fp32 [positions, D] with sin's
    first half negated, eps of the norm."""

    norm_heads: Tensor
    cos: Tensor
    sin: Tensor
    eps: float

    def check(self, sums: Tensor) -> tuple[int, int]:
        """Heads and head_dim of sums fp32 [split, 8, H * D]; ValueError where they or the tables do not fit."""
        check_operand("attention: norm_heads", self.norm_heads, torch.float32, (None, None))
        heads, width = self.norm_heads.shape
        check_operand("attention: sums of q", sums, torch.float32, (None, SLOTS, heads * width))
        check_operand("attention: cos", self.cos, torch.float32, (None, width))
        check_operand("attention: sin", self.sin, torch.float32, (self.cos.shape[0], width))
        return heads, width

    def operands(self, sums: Tensor) -> dict[str, Any]:
        """What the kernel takes beside its other operands."""
        tables = {"norm_heads_ptr": self.norm_heads, "cos_ptr": self.cos, "sin_ptr": self.sin}
        return {**tables, "eps": float(self.eps), "SPLIT": sums.shape[0], "maxnreg": REGISTERS}


@triton.jit
def own_and_partner(GROUP: tl.constexpr, D: tl.constexpr):
    """Columns [GROUP, D] of a KV head's query heads: an element's own, and the one that it is turned with."""
    at = tl.arange(0, D)
    head = tl.arange(0, GROUP)[:, None] * D
    return head + at[None, :], head + ((at + D // 2) % D)[None, :]


@triton.jit
def query_weights(norm_heads_ptr, kv_head, GROUP: tl.constexpr, D: tl.constexpr):
    """Norm weights [GROUP, D] of a KV head's query heads, and their partners'."""
    own, partner = own_and_partner(GROUP, D)
    norm_heads_ptr += kv_head * (GROUP * D)
    return tl.load(norm_heads_ptr + own), tl.load(norm_heads_ptr + partner)


@triton.jit
def query_angles(cos_ptr, sin_ptr, position, real, GROUP: tl.constexpr, D: tl.constexpr):
    """cos and sin [GROUP, D] of a position, the same for every head; zeros, and no read, where it is not real."""
    at = tl.broadcast_to(tl.arange(0, D)[None, :], (GROUP, D))
    table = position.to(tl.int64) * D + at
    mask = real & (at >= 0)
    return tl.load(cos_ptr + table, mask=mask, other=0.0), tl.load(sin_ptr + table, mask=mask, other=0.0)


@triton.jit
def queries_of_row(
    sums_ptr, weight, partner_weight, cos, sin, eps, row, kv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Queries bf16 [GROUP, D] of one row for a KV head, GROUP a power of two.

    Each step is that of `head_norms_rope`: sums in index order and rounded, the norm by the same tree, rounded, the
    rotation in fp32 with one rounding. A partner is read again instead of moved, which would cost barriers.
    """
    own, partner = own_and_partner(GROUP, D)
    sums_ptr += kv_head * (GROUP * D)
    raw = load_partials(sums_ptr, row, own, HEADS * D, own >= 0, SPLIT)
    raw_partner = load_partials(sums_ptr, row, partner, HEADS * D, own >= 0, SPLIT)
    scale = inverse_rms(tree_sums(raw * raw, GROUP, D), eps, D)[:, None]
    x, y = round_bf16(raw * scale * weight), round_bf16(raw_partner * scale * partner_weight)
    return to_bf16(turned(x, y, cos, sin, False))


@triton.jit
def queries_of_sums(
    sums_ptr, cos_ptr, sin_ptr, weight, partner_weight, cos, sin, eps, base, first, count, kv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Queries bf16 [SLOTS, D] of a tile whose `count` real rows begin at `first`; of other slots zeros, and no read.

    cos and sin: those of the first row; a later row's are asked for while the row before it is turned.
    """
    row_of = tl.arange(0, SLOTS)[:, None] // GROUP
    q = to_bf16(tl.full([SLOTS, D], 0.0, tl.float32))
    for index in tl.range(0, count, num_stages=1):
        row = first + index
        x = queries_of_row(sums_ptr, weight, partner_weight, cos, sin, eps, row, kv_head, HEADS, GROUP, D, SPLIT)
        cos, sin = query_angles(cos_ptr, sin_ptr, base + row + 1, index + 1 < count, GROUP, D)
        everywhere = tl.broadcast_to(x[None, :, :], (SLOTS // GROUP, GROUP, D))
        q = tl.where(row_of == index, tl.reshape(everywhere, [SLOTS, D]), q)
    return q
