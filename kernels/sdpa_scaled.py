"""`scaled_values`: a chunk's values where the weights of its blocks differ by powers of two.

A block's weights are relative to the whole number at or above its maximum, in powers of two. What brings them to the
chunk's maximum changes no digit of a bf16 weight, so that all of a chunk's products add up inside the MMA.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.jit import INTERPRETED, dot, power_of_two, release_consumers, to_bf16, wait_for_producers
from kernels.sdpa_kernels import first_of, has_bit, reach, seen_block, wild_keys, wrapped

EDGE_STAGES = tl.constexpr(2)
"""Of the loop with a mask: mostly one or two blocks at a row's end, more at a window's edge or a ring's wrap."""


@triton.jit
def exponent_of(gap):
    """Biased exponent of 2^gap, at least that of 2^-126; gap is a whole number up to 0."""
    return tl.maximum(gap, -126.0).to(tl.int32) + 127


@triton.jit
def scaled(weights, gap):
    """bf16 [m, n] times 2^gap of its row: exact, so that a product of it may add to those of other blocks."""
    exponent = exponent_of(gap)
    if INTERPRETED:
        return to_bf16(weights.to(tl.float32) * power_of_two(exponent)[:, None])
    else:
        return weights * (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit(
    do_not_specialize=["rows", "window", "ring", "origin", "head_slots", "blocks", "held_blocks", "held_chunks"]
)
def scaled_values(
    v_ptr, position_ptr, block_state_ptr, weights_ptr, chunk_state_ptr, acc_ptr,
    rows, window, ring, origin, head_slots, blocks, held_blocks, held_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, INNER: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk's weights times its values, for a part of the head; grid (tiles, KV heads x parts, chunks).

    Unlike in `values_of` the products of all blocks add up where they are computed.
    """
    PER_TILE: tl.constexpr = SLOTS // GROUP
    PARTS: tl.constexpr = D // PART
    tile, kv_head, part = tl.program_id(0), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    columns = part * PART + tl.arange(0, PART)
    v_ptr += kv_head.to(tl.int64) * head_slots * D
    # Position and values are read before the wait: written before the launch that this one follows, which has waited.
    base = tl.load(position_ptr)
    eldest, newest, oldest = reach(base, tile, rows, window, PER_TILE)
    begin = (first_of(base, window, CHUNK) + tl.program_id(2)) * CHUNK
    ahead, behind = wild_keys(v_ptr, begin, eldest, newest, oldest, window, ring, origin, D, CHUNK)
    wait_for_producers()
    if (begin > newest) | (begin + CHUNK <= oldest):
        return

    slot = tl.arange(0, SLOTS)
    row = tile * PER_TILE + slot // GROUP
    pair = row * HEADS + kv_head * GROUP + slot % GROUP
    real = (slot < PER_TILE * GROUP) & (row < rows)
    positions = base + row
    index = tl.arange(0, INNER)
    stored = first_of(base, window, BLOCK)
    first_block = begin // BLOCK - stored  # index in the scratch; negative before the window
    maxima_at = block_state_ptr + pair * held_blocks + first_block
    weights_at = weights_ptr + (pair * held_blocks + first_block)[:, None] * BLOCK + index[None, :]
    start = (begin - origin) % ring
    m = tl.full([SLOTS], -1e30, tl.float32)
    for block in tl.static_range(CHUNK // BLOCK):
        there = real & seen_block(begin + block * BLOCK, positions, window, first_block + block, blocks, BLOCK)
        m = tl.maximum(m, tl.load(maxima_at + block, mask=there, other=-1e30))
    l = tl.full([SLOTS], 0.0, tl.float32)  # noqa: E741
    if part == 0:
        for block in tl.static_range(CHUNK // BLOCK):
            there = real & seen_block(begin + block * BLOCK, positions, window, first_block + block, blocks, BLOCK)
            gap = tl.load(maxima_at + block, mask=there, other=-1e30) - m
            total = tl.load(maxima_at + ROWS * HEADS * held_blocks + block, mask=there, other=0.0)
            l = tl.fma(total, power_of_two(exponent_of(gap)), l)  # noqa: E741

    # Blocks that every row of the tile sees whole need no mask, and none would change a bit; the rest come after them.
    acc = tl.full([SLOTS, PART], 0.0, tl.float32)
    stop = tl.minimum(tl.minimum(newest + 1, (stored + blocks) * BLOCK) - begin, CHUNK)
    whole = tl.minimum(tl.minimum(eldest + 1 - begin, ring - start), stop) // BLOCK * BLOCK
    whole = tl.where(begin > newest - window, tl.maximum(whole, 0), 0)
    v_at = v_ptr + (start + index)[:, None] * D + columns[None, :]
    for first in tl.range(0, whole, INNER, num_stages=STAGES):
        weights = tl.load(weights_at + first, mask=real[:, None], other=0.0)
        gap = tl.load(maxima_at + first // BLOCK, mask=real, other=-1e30) - m
        acc = dot(scaled(weights, gap), tl.load(v_at + first * D), acc)
    if whole < stop:
        from_block = tl.maximum(whole, tl.maximum(oldest - begin, 0) // BLOCK * BLOCK)
        for first in tl.range(from_block, stop, INNER, num_stages=EDGE_STAGES):
            keys = begin + first + index
            held = (keys >= oldest) & (keys <= newest)
            broken = has_bit(ahead, keys - eldest - 1) | has_bit(behind, keys - oldest)
            v_at = v_ptr + wrapped(start + first, index, ring)[:, None] * D + columns[None, :]
            number = first // BLOCK
            there = real & seen_block(begin + number * BLOCK, positions, window, first_block + number, blocks, BLOCK)
            weights = tl.load(weights_at + first, mask=there[:, None], other=0.0)
            v = tl.load(v_at, mask=(held & ~broken)[:, None], other=0.0)
            gap = tl.load(maxima_at + number, mask=there, other=-1e30) - m
            acc = dot(scaled(weights, gap), v, acc)
        eighth = tl.arange(0, 8)[None, :]
        newer = has_bit(ahead, eighth) & (eldest + 1 + eighth <= positions[:, None])
        older = has_bit(behind, eighth) & (oldest + eighth > positions[:, None] - window)
        newer &= eldest + 1 + eighth > positions[:, None] - window
        acc = tl.where(tl.max((newer | older).to(tl.int32), 1)[:, None] > 0, float("nan"), acc)

    release_consumers()

    if part == 0:
        at = chunk_state_ptr + pair * held_chunks + tl.program_id(2)
        tl.store(at, m, mask=real)
        tl.store(at + ROWS * HEADS * held_chunks, l, mask=real)
    acc_ptr += tl.program_id(2).to(tl.int64) * (ROWS * HEADS * D)
    tl.store(acc_ptr + pair[:, None] * D + columns[None, :], acc, mask=real[:, None])
