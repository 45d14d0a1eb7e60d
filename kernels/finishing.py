"""The end of a product that adds up its own partial sums: the last program of a tile does what a consumer would.

Each program of a tile stores its part's sums and adds one to the tile's counter. Nobody waits: the one that finds
itself last reads all parts in index order, its own among them, so the sums have the bytes that a consumer of partial
sums gets, whatever the order of arrival. It needs no other program on the card, so any grid will do.

Why one counter per tile is enough. A program stores, meets its own threads at a barrier and counts with release and
acquire at the device's scope, so whoever counts last sees all stores; it reads from the L2, since an L1 may be old. It
sets the counter back to zero when all have arrived, and the next touch is another launch's, after its
`wait_for_producers`: that returns when this launch has ended with its stores visible. An early release only lets the
next launch's programs be placed, so it changes nothing, nor do graph replays, nor products with other tiles or splits
in turn. What must hold is that launches on a device's counters follow one another, on one stream or by events, as those
of `kernels.fused_norms` do; another stream may compute anything else meanwhile, another process has its own memory.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.geglu import gated
from kernels.jit import round_bf16
from kernels.rows import store_rows
from kernels.tree import tree_sums

MOST_TILES = 4096
"""Tiles of a product that can be finished; a matrix with more has enough programs without splitting K."""

PITCH = tl.constexpr(32)
"""int32 from counter to counter: a cache line each, so that counting at one does not delay another."""

ROWS_AT_ONCE = tl.constexpr(4)
"""Rows that the last program takes at a time: classic decode's one row should not pay for eight."""

PARTS_AT_ONCE = tl.constexpr(4)
"""Parts whose loads are under way together; more take registers from the main loop."""


@functools.cache
def counters(device: torch.device) -> Tensor:
    """A device's counters int32 [MOST_TILES, PITCH], all zero between launches."""
    with torch.inference_mode(False):
        return torch.zeros(MOST_TILES, PITCH.value, dtype=torch.int32, device=device)


@triton.jit
def arrive(counter_ptr, arrivals):
    """Count this program in; true for the last of `arrivals`, which sees what the others stored before."""
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def _total(parts_ptr, offset, real, split, TILE: tl.constexpr):
    """Sums fp32 of parts [split, 8, TILE] at these offsets, in index order.

    Past the last part -0.0 is added: it leaves every sum as it is, a negative zero too.
    """
    total = tl.load(parts_ptr + offset, mask=real, other=0.0, cache_modifier=".cg")
    for part in tl.range(1, split, PARTS_AT_ONCE, num_stages=1):
        for inner in tl.static_range(PARTS_AT_ONCE):
            at = parts_ptr + (part + inner) * (8 * TILE) + offset
            total += tl.load(at, mask=real & (part + inner < split), other=-0.0, cache_modifier=".cg")
    return total


@triton.jit
def _totals(gate_ptr, up_ptr, offset, real, split, TILE: tl.constexpr):
    """`_total` of two tiles, their loads under way together."""
    gate = tl.load(gate_ptr + offset, mask=real, other=0.0, cache_modifier=".cg")
    up = tl.load(up_ptr + offset, mask=real, other=0.0, cache_modifier=".cg")
    for part in tl.range(1, split, PARTS_AT_ONCE // 2, num_stages=1):
        for inner in tl.static_range(PARTS_AT_ONCE // 2):
            at = (part + inner) * (8 * TILE) + offset
            there = real & (part + inner < split)
            gate += tl.load(gate_ptr + at, mask=there, other=-0.0, cache_modifier=".cg")
            up += tl.load(up_ptr + at, mask=there, other=-0.0, cache_modifier=".cg")
    return gate, up


@triton.jit
def finish_sums(parts_ptr, total_ptr, squares_ptr, tile, first, end, split, N, TILE: tl.constexpr):
    """Rows first..end of a tile: their sums into total [8, N], and where asked for, the sum of squares of what they
    round to into squares [8, tiles]; a tile is a slice of the row's tree (`kernels.tree`)."""
    column = tile * TILE + tl.arange(0, TILE)
    for begin in tl.static_range(0, 8, ROWS_AT_ONCE):
        if first + begin < end:
            slot = first + begin + tl.arange(0, ROWS_AT_ONCE)
            offset = slot[:, None] * TILE + tl.arange(0, TILE)[None, :]
            real = (slot < end)[:, None] & (column < N)[None, :]
            total = _total(parts_ptr, offset, (slot < end)[:, None], split, TILE)
            tl.store(total_ptr + slot[:, None] * N + column[None, :], total, mask=real)
            if squares_ptr is not None:
                y = tl.where(real, round_bf16(total), 0.0)
                squares = tree_sums(y * y, ROWS_AT_ONCE, TILE)
                tl.store(squares_ptr + slot * tl.num_programs(0) + tile, squares, mask=slot < end)


@triton.jit
def finish_gated(
    gate_ptr, up_ptr, values_ptr, sums_ptr, scales_ptr, pair, first, end, split, width,
    TILE: tl.constexpr, BITS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Rows first..end of a gate tile and its up tile, through GeGLU, into rows of `width` for a matrix of BITS."""
    GROUPS: tl.constexpr = TILE // 64
    for begin in tl.static_range(0, 8, ROWS_AT_ONCE):
        if first + begin < end:
            slot = first + begin + tl.arange(0, ROWS_AT_ONCE)
            offset = slot[:, None] * TILE + tl.arange(0, TILE)[None, :]
            gate, up = _totals(gate_ptr, up_ptr, offset, (slot < end)[:, None], split, TILE)
            x = round_bf16(gated(round_bf16(gate), round_bf16(up), FUSED))
            index = tl.arange(0, ROWS_AT_ONCE * GROUPS)
            m = first + begin + index // GROUPS
            group = pair * GROUPS + index % GROUPS
            x = tl.reshape(x, [ROWS_AT_ONCE * GROUPS, 64])
            store_rows(values_ptr, sums_ptr, scales_ptr, x, group, m, width, m < end, BITS)
