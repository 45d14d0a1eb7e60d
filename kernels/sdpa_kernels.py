"""The attention kernels: `attend`, or `scores_of` and `values_of`, for a chunk of keys, and `combine` for a row.

Keys are visited by absolute position: a block or chunk begins at a multiple of its size, wherever its keys lie in the
cache. What a row may not see is replaced, never multiplied by zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.jit import INTERPRETED, dot, release_consumers, to_bf16, wait_for_producers
from kernels.rows import store_rows
from kernels.sdpa_queries import queries_of_sums, query_angles, query_weights


@triton.jit
def wrapped(start, index, ring):
    """Slots start + index of a ring; start below twice its length, index below its length."""
    slot = start + index
    slot = tl.where(slot >= ring, slot - ring, slot)
    return tl.where(slot >= ring, slot - ring, slot)


@triton.jit
def slot_of(key, index, ring, origin):
    """Slots of the keys key + index, index below the ring's length."""
    return wrapped((key - origin) % ring, index, ring)


@triton.jit
def interior(begin, size, eldest, newest, window):
    """Whether every row of the tile sees all of these keys: then no mask is needed, and none would change a bit."""
    return (begin + size - 1 <= eldest) & (begin > newest - window)


@triton.jit
def not_finite(v_ptr, key, stop, begin, size, ring, origin, D: tl.constexpr):
    """Bit i is set where the value of key + i, below stop and in this chunk, holds an infinity or NaN; 8 bits."""
    index = tl.arange(0, 8)
    keys = key + index
    held = (keys < stop) & (keys >= begin) & (keys < begin + size)
    words = (v_ptr + slot_of(key, index, ring, origin) * D).to(tl.pointer_type(tl.int32))  # two bf16 values each
    pattern = tl.load(words[:, None] + tl.arange(0, D // 2)[None, :], mask=held[:, None], other=0)
    wild = ((pattern & 0x7F80) == 0x7F80) | ((pattern & 0x7F800000) == 0x7F800000)
    return tl.sum(tl.max(wild.to(tl.int32), 1) << index, 0)


@triton.jit
def wild_keys(v_ptr, begin, eldest, newest, oldest, window, ring, origin, D: tl.constexpr, CHUNK: tl.constexpr):
    """Which keys that some rows see and others do not, at most 7 at either end, hold a value that is not finite: bits
    from eldest + 1 and from oldest on.

    0 * NaN is NaN. Such keys leave the product, and the rows that see them become NaN by their weights, or afterwards.
    """
    ahead = 0
    behind = 0
    if (newest > eldest) & (newest >= begin) & (eldest + 1 < begin + CHUNK):
        ahead = not_finite(v_ptr, eldest + 1, newest + 1, begin, CHUNK, ring, origin, D)
    if newest - window >= tl.maximum(oldest, begin):
        behind = not_finite(v_ptr, oldest, newest - window + 1, begin, CHUNK, ring, origin, D)
    return ahead, behind


@triton.jit
def has_bit(bits, index):
    """Whether bit `index` of an 8-bit number is set; False outside 0..7."""
    return (((bits >> (index & 7)) & 1) == 1) & (index == (index & 7))


@triton.jit
def reach(base, tile, rows, window, PER_TILE: tl.constexpr):
    """Of a tile's rows: position of the first and of the last real one, and the oldest key that any of them sees."""
    eldest = base + tile * PER_TILE
    newest = base + tl.minimum((tile + 1) * PER_TILE, rows) - 1
    return eldest, newest, tl.maximum(eldest - window + 1, 0)


@triton.jit
def written(begin, newest, oldest, number, blocks, BLOCK: tl.constexpr):
    """Whether the scores of the block that begins here are stored: a row of the tile sees a key of it, and its number
    in the scratch is one of those that were launched."""
    return (begin <= newest) & (begin + BLOCK > oldest) & (number < blocks)


@triton.jit
def seen_block(begin, positions, window, number, blocks, BLOCK: tl.constexpr):
    """Which rows see a key of the block that begins here, where it is one of those that were launched: for them its
    scores are stored, whatever tile they are in."""
    return (begin <= positions) & (begin + BLOCK > positions - window + 1) & (number < blocks)


@triton.jit
def first_of(base, window, SIZE: tl.constexpr):
    """Number of the block or chunk at index 0 of the scratch: that of the oldest key that row 0 sees."""
    return tl.maximum(base - window + 1, 0) // SIZE


@triton.jit
def request(pointers):
    """Ask the L2 for the lines at these addresses, whose values a later launch will read."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["rows", "window", "ring", "origin", "head_slots", "held_chunks"])
def attend(
    q_ptr, k_ptr, v_ptr, position_ptr, state_ptr, acc_ptr,
    rows, window, ring, origin, head_slots, held_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr,
    CHUNK: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, SETTLED: tl.constexpr,
    norm_heads_ptr=None, cos_ptr=None, sin_ptr=None, eps=None, SPLIT: tl.constexpr = 0,
):  # fmt: skip
    """Partial softmax of one chunk of keys for one tile of query slots; grid (tiles, KV heads, chunks).

    Tiles come first so that those that read the same keys run side by side. SPLIT: q_ptr holds so many partial sums
    fp32 [SPLIT, 8, HEADS * D] of the q product, which become queries here; 0: the queries.
    """
    PER_TILE: tl.constexpr = SLOTS // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    if SPLIT > 0:
        # The position is read before the wait: written before the product that this launch follows, which has waited.
        base = tl.load(position_ptr)
        weight, partner_weight = query_weights(norm_heads_ptr, kv_head, GROUP, D)
        cos, sin = query_angles(cos_ptr, sin_ptr, base + tile * PER_TILE, True, GROUP, D)
    elif SETTLED:
        base = tl.load(position_ptr)
    k_ptr += kv_head.to(tl.int64) * head_slots * D
    v_ptr += kv_head.to(tl.int64) * head_slots * D
    wait_for_producers()
    if SPLIT == 0 and not SETTLED:
        base = tl.load(position_ptr)
    eldest, newest, oldest = reach(base, tile, rows, window, PER_TILE)
    begin = (first_of(base, window, CHUNK) + tl.program_id(2)) * CHUNK
    if (begin > newest) | (begin + CHUNK <= oldest):
        return  # no row of this tile sees a key here, and the combine reads a row's own chunks only

    slot = tl.arange(0, SLOTS)
    row = tile * PER_TILE + slot // GROUP
    head = kv_head * GROUP + slot % GROUP
    real = (slot < PER_TILE * GROUP) & (row < rows)
    columns = tl.arange(0, D)
    if SPLIT > 0:
        q = queries_of_sums(
            q_ptr, cos_ptr, sin_ptr, weight, partner_weight, cos, sin, eps, base, tile * PER_TILE, newest - eldest + 1,
            kv_head, HEADS, GROUP, D, SLOTS, SPLIT,
        )  # fmt: skip
    else:
        q = tl.load(q_ptr + (row * HEADS + head)[:, None] * D + columns[None, :], mask=real[:, None], other=0.0)
    positions = base + row
    ahead, behind = wild_keys(v_ptr, begin, eldest, newest, oldest, window, ring, origin, D, CHUNK)

    m = tl.full([SLOTS], -1e30, tl.float32)
    l = tl.full([SLOTS], 0.0, tl.float32)  # noqa: E741
    acc = tl.full([SLOTS, D], 0.0, tl.float32)
    start = begin + tl.maximum(oldest - begin, 0) // INNER * INNER
    index = tl.arange(0, INNER)
    # A block that a slot does not see leaves it as it was: the maximum stays, the sums are multiplied by exp2(0) = 1
    # and exact zeros are added.
    for key in tl.range(start, tl.minimum(begin + CHUNK, newest + 1), INNER, num_stages=STAGES):
        keys = key + index
        held = (keys >= oldest) & (keys <= newest)
        offsets = slot_of(key, index, ring, origin)[:, None] * D + columns[None, :]
        k = tl.load(k_ptr + offsets, mask=held[:, None], other=0.0)
        broken = has_bit(ahead, keys - eldest - 1) | has_bit(behind, keys - oldest)
        v = tl.load(v_ptr + offsets, mask=(held & ~broken)[:, None], other=0.0)
        scores = dot(q, tl.trans(k), tl.full([SLOTS, INNER], 0.0, tl.float32)) * 1.4426950408889634
        seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, 1))
        alpha = tl.exp2(m - top)
        weights = tl.exp2(scores - top[:, None])
        rounded = to_bf16(tl.where(seen & broken[None, :], float("nan"), weights))
        l = tl.fma(l, alpha, tl.sum(rounded.to(tl.float32), 1))  # noqa: E741
        acc = dot(rounded, v, acc * alpha[:, None])
        m = top

    release_consumers()

    pair = row * HEADS + head
    at = state_ptr + pair * held_chunks + tl.program_id(2)
    tl.store(at, m, mask=real)
    tl.store(at + ROWS * HEADS * held_chunks, l, mask=real)
    acc_ptr += tl.program_id(2).to(tl.int64) * (ROWS * HEADS * D)
    tl.store(acc_ptr + pair[:, None] * D + columns[None, :], acc, mask=real[:, None])


@triton.jit(do_not_specialize=["rows", "window", "ring", "origin", "head_slots", "held_blocks"])
def scores_of(
    q_ptr, k_ptr, v_ptr, position_ptr, state_ptr, weights_ptr,
    rows, window, ring, origin, head_slots, held_blocks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr,
    SETTLED: tl.constexpr,
):  # fmt: skip
    """Softmax weights of one block of keys for one tile of query slots; grid (tiles, KV heads, blocks).

    Tiles come first so that those that read the same keys run side by side. WHOLE: a block's maximum is the whole
    number at or above it. AHEAD: of every so many blocks the values are asked for, so that the memory has work while
    this launch ends and the next begins.
    """
    PER_TILE: tl.constexpr = SLOTS // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    k_ptr += kv_head.to(tl.int64) * head_slots * D
    if SETTLED:
        base = tl.load(position_ptr)
    wait_for_producers()
    if not SETTLED:
        base = tl.load(position_ptr)
    _, newest, oldest = reach(base, tile, rows, window, PER_TILE)
    begin = (first_of(base, window, BLOCK) + tl.program_id(2)) * BLOCK
    if (begin > newest) | (begin + BLOCK <= oldest):
        return  # no row of this tile sees a key here, and nobody reads what such a block would store

    slot = tl.arange(0, SLOTS)
    row = tile * PER_TILE + slot // GROUP
    head = kv_head * GROUP + slot % GROUP
    real = (slot < PER_TILE * GROUP) & (row < rows)
    columns = tl.arange(0, STEP)
    index = tl.arange(0, BLOCK)
    keys = begin + index
    held = (keys >= oldest) & (keys <= newest)
    q_at = q_ptr + (row * HEADS + head)[:, None] * D + columns[None, :]
    k_at = k_ptr + slot_of(begin, index, ring, origin)[:, None] * D + columns[None, :]
    scores = tl.full([SLOTS, BLOCK], 0.0, tl.float32)
    for column in tl.range(0, D, STEP, num_stages=STAGES):
        q = tl.load(q_at + column, mask=real[:, None], other=0.0)
        k = tl.load(k_at + column, mask=held[:, None], other=0.0)
        scores = dot(q, tl.trans(k), scores)
    release_consumers()
    if AHEAD:  # noqa: SIM102 (a constant first: 0 divides nothing)
        if (tile == 0) & (tl.program_id(2) % AHEAD == 0):
            slots = slot_of(begin, tl.minimum(index, newest - begin), ring, origin)
            v_at = v_ptr + kv_head.to(tl.int64) * head_slots * D + slots[:, None] * D
            request(v_at + tl.arange(0, (D + 63) // 64)[None, :] * 64)

    scores = scores * 1.4426950408889634
    positions = base + row
    seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
    scores = tl.where(seen, scores, float("-inf"))
    m = tl.maximum(tl.max(scores, 1), -1e30)  # a slot that sees nothing here: weights exp2(-inf) = 0, and sum 0
    if WHOLE:
        m = tl.ceil(m)
    weights = to_bf16(tl.exp2(scores - m[:, None]))
    at = (row * HEADS + head) * held_blocks + tl.program_id(2)
    tl.store(state_ptr + at, m, mask=real)
    tl.store(state_ptr + ROWS * HEADS * held_blocks + at, tl.sum(weights.to(tl.float32), 1), mask=real)
    tl.store(weights_ptr + at[:, None] * BLOCK + index[None, :], weights, mask=real[:, None])


@triton.jit(
    do_not_specialize=["rows", "window", "ring", "origin", "head_slots", "blocks", "held_blocks", "held_chunks"]
)
def values_of(
    v_ptr, position_ptr, block_state_ptr, weights_ptr, chunk_state_ptr, acc_ptr,
    rows, window, ring, origin, head_slots, blocks, held_blocks, held_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, INNER: tl.constexpr,
    PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk's weights times its values, for a part of the head; grid (tiles, KV heads x parts, chunks)."""
    PER_TILE: tl.constexpr = SLOTS // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1) // (D // PART)
    columns = tl.program_id(1) % (D // PART) * PART + tl.arange(0, PART)
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
    first_block = begin // BLOCK - first_of(base, window, BLOCK)  # index in the scratch; negative before the window

    maxima_at = block_state_ptr + pair * held_blocks + first_block
    sums_at = maxima_at + ROWS * HEADS * held_blocks
    m = tl.full([SLOTS], -1e30, tl.float32)
    for block in tl.static_range(CHUNK // BLOCK):
        mask = real & written(begin + block * BLOCK, newest, oldest, first_block + block, blocks, BLOCK)
        m = tl.maximum(m, tl.load(maxima_at + block, mask=mask, other=-1e30))
    l = tl.full([SLOTS], 0.0, tl.float32)  # noqa: E741
    for block in tl.static_range(CHUNK // BLOCK):
        mask = real & written(begin + block * BLOCK, newest, oldest, first_block + block, blocks, BLOCK)
        scale = tl.exp2(tl.load(maxima_at + block, mask=mask, other=-1e30) - m)
        l = tl.fma(tl.load(sums_at + block, mask=mask, other=0.0), scale, l)  # noqa: E741

    weights_at = weights_ptr + (pair * held_blocks + first_block)[:, None] * BLOCK + index[None, :]
    start = (begin - origin) % ring
    acc = tl.full([SLOTS, PART], 0.0, tl.float32)
    if interior(begin, CHUNK, eldest, newest, window):
        for first in tl.range(0, CHUNK, INNER, num_stages=STAGES):
            v_at = v_ptr + wrapped(start + first, index, ring)[:, None] * D + columns[None, :]
            weights = tl.load(weights_at + first, mask=real[:, None], other=0.0)
            product = dot(weights, tl.load(v_at), tl.full([SLOTS, PART], 0.0, tl.float32))
            scale = tl.exp2(tl.load(maxima_at + first // BLOCK, mask=real, other=-1e30) - m)
            acc = tl.fma(product, tl.broadcast_to(scale[:, None], (SLOTS, PART)), acc)
    else:
        nothing = to_bf16(tl.full([SLOTS, INNER], float("nan"), tl.float32))
        for first in tl.range(0, CHUNK, INNER, num_stages=STAGES):
            keys = begin + first + index
            held = (keys >= oldest) & (keys <= newest)
            number = first // BLOCK
            known = real & written(begin + number * BLOCK, newest, oldest, first_block + number, blocks, BLOCK)
            broken = has_bit(ahead, keys - eldest - 1) | has_bit(behind, keys - oldest)
            v_at = v_ptr + wrapped(start + first, index, ring)[:, None] * D + columns[None, :]
            weights = tl.load(weights_at + first, mask=known[:, None], other=0.0)
            v = tl.load(v_at, mask=(held & ~broken)[:, None], other=0.0)
            seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
            weights = tl.where(seen & broken[None, :], nothing, weights)
            product = dot(weights, v, tl.full([SLOTS, PART], 0.0, tl.float32))
            scale = tl.exp2(tl.load(maxima_at + first // BLOCK, mask=known, other=-1e30) - m)
            acc = tl.fma(product, tl.broadcast_to(scale[:, None], (SLOTS, PART)), acc)
    release_consumers()

    at = chunk_state_ptr + pair * held_chunks + tl.program_id(2)
    leading = real & (tl.program_id(1) % (D // PART) == 0)
    tl.store(at, m, mask=leading)
    tl.store(at + ROWS * HEADS * held_chunks, l, mask=leading)
    acc_ptr += tl.program_id(2).to(tl.int64) * (ROWS * HEADS * D)
    tl.store(acc_ptr + pair[:, None] * D + columns[None, :], acc, mask=real[:, None])


@triton.jit(do_not_specialize=["window", "max_keys", "chunks", "capacity", "out_features"])
def combine(
    position_ptr, state_ptr, acc_ptr, values_ptr, sums_ptr, scales_ptr,
    window, max_keys, chunks, capacity, out_features,
    HEADS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """Partials of one (row, head) summed over its own chunks, in tiles from the first of them on, and rounded once.

    Grid (rows, heads, parts of a head). BITS 0 stores bf16 [n, H, D], else rows ready for a product.
    """
    base = tl.load(position_ptr)  # before the wait: written before the launch that this one follows, which has waited
    wait_for_producers(RELEASE)
    row = tl.program_id(0)
    pair = row * HEADS + tl.program_id(1)
    columns = tl.program_id(2) * PART + tl.arange(0, PART)
    stored = first_of(base, window, CHUNK)
    first = tl.maximum(base + row - window + 1, 0) // CHUNK
    last = (base + row) // CHUNK

    m = tl.full([1], -1e30, tl.float32)
    l = tl.full([1], 0.0, tl.float32)  # noqa: E741
    acc = tl.full([PART], 0.0, tl.float32)
    for start in tl.range(first, last + 1, TILE, num_stages=1):
        chunk = start + tl.arange(0, TILE)
        index = chunk - stored
        own = (chunk <= last) & (index < chunks)
        part_m = tl.load(state_ptr + pair * capacity + index, mask=own, other=-1e30)
        part_l = tl.load(state_ptr + (ROWS * HEADS + pair) * capacity + index, mask=own, other=0.0)
        offsets = (index.to(tl.int64) * (ROWS * HEADS) + pair)[:, None] * D + columns[None, :]
        part = tl.load(acc_ptr + offsets, mask=own[:, None], other=0.0)
        top = tl.maximum(m, tl.max(part_m, 0))
        alpha = tl.exp2(m - top)
        weights = tl.exp2(part_m - top)
        l = tl.fma(l, alpha, tl.sum(part_l * weights, 0))  # noqa: E741
        acc = tl.fma(acc, alpha.broadcast_to(acc.shape), tl.sum(part * weights[:, None], 0))
        m = top
    result = acc / l
    result = tl.where(last - stored < chunks, result, float("nan"))  # too few chunks were launched: no row is a guess
    result = tl.where(base + row < max_keys, result, float("nan"))  # its chunk may be there, its last block is not
    if BITS == 0:
        tl.store(values_ptr + pair * D + columns, to_bf16(result))
    else:
        group = (tl.program_id(1) * D) // PART + tl.program_id(2) + tl.arange(0, 1)
        tile = to_bf16(result).to(tl.float32)[None, :]
        store_rows(values_ptr, sums_ptr, scales_ptr, tile, group, row, out_features, group >= 0, BITS)
