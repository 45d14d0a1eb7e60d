"""How attention is cut: the constants of each shape, and room for the partial results between its two kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from kernels import MAX_ROWS


@dataclass(frozen=True)
class Plan:
    """Constants of one attention shape, never of the number of rows; others give another order of sums, so other bytes.

    slots: query slots of a tile. chunk: keys of one partial softmax; inner: keys taken at once. Where the weights have
    a launch of their own, block: its keys a program, whole ones to a chunk; step: elements of a head that it takes at
    once; part: elements of a head that a program of the values writes. warps and stages of all; block_stages, where
    not 0, of the weights' loop, and block_slots its tile's query slots. scaled: weights of blocks that differ by powers
    of two. registers: most of a thread of the values or of the whole, where not 0. ahead: of every so many blocks the
    values are asked for while the weights are made; 0 for none.
    """

    slots: int
    chunk: int
    inner: int
    warps: int
    stages: int
    block: int = 0
    step: int = 0
    part: int = 0
    block_stages: int = 0
    scaled: bool = False
    registers: int = 0
    block_slots: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.scaled and not self.block:
            raise ValueError(f"attention: {self}: scaled needs blocks")
        if self.block_slots and not self.scaled:
            raise ValueError(f"attention: {self}: tiles of their own for the weights need scaled")

    @property
    def reads(self) -> int:
        """Keys whose slots one load computes; a ring has to hold as many."""
        return max(self.block, self.inner)


FULL = Plan(64, 512, 64, 4, 3, block=64, block_stages=3, block_slots=16, scaled=True)
PLANS = {
    (256, 16, 8): Plan(slots=16, chunk=32, inner=32, warps=4, stages=1),
    (256, 32, 16): Plan(slots=16, chunk=32, inner=32, warps=4, stages=1, registers=168),
    (512, 16, 1): replace(FULL, slots=16, step=64, part=64, registers=128, ahead=5),
    (512, 32, 4): replace(FULL, step=128, part=128, registers=168),
}
"""Tuned shapes: (head_dim, query heads, KV heads) of the sliding and full layers of 12B and 31B, and of their drafters,
which read the same caches."""


def plan_for(head_dim: int, heads: int, groups: int) -> Plan:
    """The plan of a shape, tuned or safe; ValueError where none fits.

    head_dim a power of two from 16 to 512; `groups` KV heads with at most 64 query heads each.
    """
    group = heads // groups
    if head_dim not in (16, 32, 64, 128, 256, 512):
        raise ValueError(f"attention: head_dim {head_dim} is not supported; use a power of two from 16 to 512")
    if not 1 <= group <= 64:
        raise ValueError(f"attention: {group} query heads per KV head do not fit a tile of 64 slots")
    if (known := PLANS.get((head_dim, heads, groups))) is not None:
        return known
    slots = 16 if group <= 16 else triton.next_power_of_2(group)
    if group <= 2 and head_dim <= 256:
        small = head_dim <= 32
        return Plan(slots, chunk=32 if small else 64, inner=16 if small else 32, warps=4, stages=2)
    if head_dim <= 32:
        return Plan(slots, chunk=32, inner=16, warps=4, stages=2, block=16, step=16, part=16)
    return Plan(slots, chunk=128, inner=32, warps=4, stages=3, block=64, step=64, part=64)


@dataclass(frozen=True)
class Scratch:
    """What the kernels hand on, for every (row, head): a block's maximum and sum fp32 [2, 8, H, blocks] and weights
    bf16 [8, H, blocks, keys of a block]; a chunk's maximum and sum fp32 [2, 8, H, chunks] and acc fp32
    [chunks, 8, H, D]."""

    block_state: Tensor
    weights: Tensor
    chunk_state: Tensor
    acc: Tensor


def blocks_for(max_keys: int, window: int | None, plan: Plan) -> int:
    """Blocks that cover every visible key of any 8 rows as long as positions stay below max_keys; 0 without blocks."""
    return _cover(max_keys, window, plan.block) if plan.block else 0


def chunks_for(max_keys: int, window: int | None, plan: Plan) -> int:
    """Chunks that cover them."""
    return _cover(max_keys, window, plan.chunk)


def _cover(max_keys: int, window: int | None, size: int) -> int:
    everything = triton.cdiv(max_keys, size)
    return everything if window is None else min(everything, triton.cdiv(window + MAX_ROWS, size) + 1)


def allocate_scratch(
    heads: int,
    groups: int,
    head_dim: int,
    window: int | None,
    max_keys: int,
    device: torch.device | str,
    plan: Plan | None = None,
) -> Scratch:
    """Room for the partials of calls with up to max_keys keys; layers of one shape may share it."""
    plan = plan or plan_for(head_dim, heads, groups)
    blocks, chunks = blocks_for(max_keys, window, plan), chunks_for(max_keys, window, plan)
    return Scratch(
        torch.empty(2, MAX_ROWS, heads, blocks, dtype=torch.float32, device=device),
        torch.empty(MAX_ROWS, heads, blocks, plan.block, dtype=torch.bfloat16, device=device),
        torch.empty(2, MAX_ROWS, heads, chunks, dtype=torch.float32, device=device),
        torch.empty(chunks, MAX_ROWS, heads, head_dim, dtype=torch.float32, device=device),
    )
