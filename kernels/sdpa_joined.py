"""Large tiles with weights that differ by powers of two: `scaled_values` as a launch, or attention in one, `joined`.

A block's weights are relative to the whole number at or above its maximum, in powers of two. What brings them to the
chunk's maximum changes no digit of a bf16 weight, so that all of a chunk's products add up inside the MMA.

In `joined` a program draws a number and does that piece of work: the weights of a block, the values of a chunk, a part
of a row's total. It waits at a counter for the pieces it reads, all of smaller numbers, so what it waits for has begun.
No launch ends in between, so the memory need not be idle. Same arithmetic, in the same order, as in three launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.jit import INTERPRETED, dot, power_of_two, to_bf16, wait_for_producers
from kernels.sdpa_kernels import (
    block_scores,
    first_of,
    has_bit,
    interior,
    reach,
    row_total,
    store_block,
    store_total,
    wild_keys,
    wrapped,
    written,
)

TICKET = tl.constexpr(0)
LEAVING = tl.constexpr(1)
COUNTERS = tl.constexpr(2)
"""Where counters hold the next piece of work, the totals that are done, and the pieces that chunks and tiles have."""

PATIENCE = tl.constexpr(2 if INTERPRETED.value else 1 << 18)
"""Looks at a counter, some tenth of a second, after which a program gives up and its rows become NaN.

The interpreter runs one program after another: what is not there at once never comes.
"""


@triton.jit
def draw(counters_ptr):
    """The number of this program's piece of work: smaller ones have begun."""
    return tl.atomic_add(counters_ptr + TICKET, 1, sem="relaxed", scope="gpu")


@triton.jit
def signal(counter_ptr):
    """Count a piece as done; what the program wrote before is visible to whoever sees the count."""
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def await_pieces(counter_ptr, pieces):
    """Wait until so many pieces are done and visible; whether they are."""
    looks = 0
    done = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    while (done < pieces) & (looks < PATIENCE):
        done = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
        looks += 1
    tl.debug_barrier()
    return done >= pieces


@triton.jit
def split_piece(piece, of_blocks, of_values, chunks, lag):
    """(block's piece or -1, value's piece or -1, total's piece or -1): the blocks of `lag` chunks, the blocks of the
    others with the values of the chunk `lag` before in turns, the values that are left, and the totals.

    of_blocks, of_values: pieces of one chunk. lag: 1 to chunks; with chunks, all blocks come first.
    """
    later = piece - lag * of_blocks
    both = of_blocks + of_values
    mixed = (chunks - lag) * both
    step, place = later // both, later % both
    mid = (later >= 0) & (later < mixed)
    block = tl.where(later < 0, piece, tl.where(mid & (place < of_blocks), (lag + step) * of_blocks + place, -1))
    rest = later - mixed
    tail = (rest >= 0) & (rest < lag * of_values)
    value = tl.where(mid & (place >= of_blocks), step * of_values + place - of_blocks, -1)
    value = tl.where(tail, (chunks - lag) * of_values + rest, value)
    return block, value, tl.maximum(rest - lag * of_values, -1)


@triton.jit
def pieces_seen(begin, end, newest, oldest, SIZE: tl.constexpr):
    """Blocks or chunks between two of their boundaries that a row of the tile sees."""
    return tl.maximum(tl.minimum(newest, end - 1) // SIZE - tl.maximum(oldest, begin) // SIZE + 1, 0)


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


@triton.jit
def store_chunk(
    v_ptr, block_state_ptr, weights_ptr, chunk_state_ptr, acc_ptr, base, begin, tile, kv_head, columns, at_chunk,
    leading, sane, ahead, behind, rows, window, ring, origin, blocks, held_blocks, held_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, INNER: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk's weights times its values at these columns of the head; `leading` stores its maximum and sum too.

    v_ptr: of this KV head. ahead, behind: its wild keys. `sane` is False for a chunk whose weights never came: its
    sums are NaN, as are those of a row whose last block was not launched.
    """
    PER_TILE: tl.constexpr = SLOTS // GROUP
    eldest, newest, oldest = reach(base, tile, rows, window, PER_TILE)
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
        there = written(begin + block * BLOCK, newest, oldest, first_block + block, blocks, BLOCK)
        m = tl.maximum(m, tl.load(maxima_at + block, mask=real & there, other=-1e30))

    acc = tl.full([SLOTS, PART], 0.0, tl.float32)
    if interior(begin, CHUNK, eldest, newest, window) & (start + CHUNK <= ring):
        v_at = v_ptr + (start + index)[:, None] * D + columns[None, :]
        for first in tl.range(0, CHUNK, INNER, num_stages=STAGES):
            weights = tl.load(weights_at + first, mask=real[:, None], other=0.0)
            gap = tl.load(maxima_at + first // BLOCK, mask=real, other=-1e30) - m
            acc = dot(scaled(weights, gap), tl.load(v_at + first * D), acc)
    else:
        # Only the blocks that some row of the tile sees and that were launched: others would add exact zeros.
        from_block = tl.maximum(oldest - begin, 0) // BLOCK * BLOCK
        stop = tl.minimum(tl.minimum(newest + 1, (stored + blocks) * BLOCK) - begin, CHUNK)
        for first in tl.range(from_block, stop, INNER, num_stages=STAGES):
            keys = begin + first + index
            held = (keys >= oldest) & (keys <= newest)
            broken = has_bit(ahead, keys - eldest - 1) | has_bit(behind, keys - oldest)
            v_at = v_ptr + wrapped(start + first, index, ring)[:, None] * D + columns[None, :]
            weights = tl.load(weights_at + first, mask=real[:, None], other=0.0)
            v = tl.load(v_at, mask=(held & ~broken)[:, None], other=0.0)
            gap = tl.load(maxima_at + first // BLOCK, mask=real, other=-1e30) - m
            acc = dot(scaled(weights, gap), v, acc)
        eighth = tl.arange(0, 8)[None, :]
        newer = has_bit(ahead, eighth) & (eldest + 1 + eighth <= positions[:, None])
        older = has_bit(behind, eighth) & (oldest + eighth > positions[:, None] - window)
        newer &= eldest + 1 + eighth > positions[:, None] - window
        acc = tl.where(tl.max((newer | older).to(tl.int32), 1)[:, None] > 0, float("nan"), acc)

    pairs = pair * held_chunks + at_chunk
    if leading:
        l = tl.full([SLOTS], 0.0, tl.float32)  # noqa: E741
        for block in tl.static_range(CHUNK // BLOCK):
            there = written(begin + block * BLOCK, newest, oldest, first_block + block, blocks, BLOCK)
            gap = tl.load(maxima_at + block, mask=real & there, other=-1e30) - m
            total = tl.load(maxima_at + ROWS * HEADS * held_blocks + block, mask=real & there, other=0.0)
            l = tl.fma(total, power_of_two(exponent_of(gap)), l)  # noqa: E741
        l = tl.where(sane & (positions // BLOCK - stored < blocks), l, float("nan"))  # noqa: E741
        tl.store(chunk_state_ptr + pairs, m, mask=real)
        tl.store(chunk_state_ptr + ROWS * HEADS * held_chunks + pairs, l, mask=real)
    acc_ptr += at_chunk.to(tl.int64) * (ROWS * HEADS * D)
    tl.store(acc_ptr + pair[:, None] * D + columns[None, :], acc, mask=real[:, None])


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
    wait_for_producers()
    base = tl.load(position_ptr)
    eldest, newest, oldest = reach(base, tile, rows, window, PER_TILE)
    begin = (first_of(base, window, CHUNK) + tl.program_id(2)) * CHUNK
    if (begin > newest) | (begin + CHUNK <= oldest):
        return
    v_ptr += kv_head.to(tl.int64) * head_slots * D
    ahead, behind = wild_keys(v_ptr, begin, eldest, newest, oldest, window, ring, origin, D, CHUNK)
    store_chunk(
        v_ptr, block_state_ptr, weights_ptr, chunk_state_ptr, acc_ptr,
        base, begin, tile, kv_head, part * PART + tl.arange(0, PART), tl.program_id(2), part == 0, begin >= 0,
        ahead, behind, rows, window, ring, origin, blocks, held_blocks, held_chunks,
        HEADS, GROUP, D, SLOTS, BLOCK, ROWS, CHUNK, INNER, PART, STAGES,
    )  # fmt: skip


@triton.jit
def do_block(
    here, q_ptr, k_ptr, block_state_ptr, weights_ptr, chunks_ptr, base,
    rows, window, ring, origin, head_slots, blocks, chunks, held_blocks, tiles,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The weights of one block for one tile of query slots; counted for its chunk."""
    PER_TILE: tl.constexpr = SLOTS // GROUP
    GROUPS: tl.constexpr = HEADS // GROUP
    tile, kv_head, number = here % tiles, here // tiles % GROUPS, here // (tiles * GROUPS)
    _, newest, oldest = reach(base, tile, rows, window, PER_TILE)
    begin = (first_of(base, window, BLOCK) + number) * BLOCK
    chunk = begin // CHUNK - first_of(base, window, CHUNK)  # one more than there are, where rows lie past max_keys
    if written(begin, newest, oldest, number, blocks, BLOCK) & (chunk < chunks):
        slot = tl.arange(0, SLOTS)
        row = tile * PER_TILE + slot // GROUP
        pair = row * HEADS + kv_head * GROUP + slot % GROUP
        real = (slot < PER_TILE * GROUP) & (row < rows)
        scores = block_scores(
            q_ptr + pair[:, None] * D, k_ptr + kv_head.to(tl.int64) * head_slots * D, real, begin, newest, oldest,
            ring, origin, D, SLOTS, BLOCK, STEP, STAGES,
        )  # fmt: skip
        keys = begin + tl.arange(0, BLOCK)
        positions = base + row
        seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
        at = pair * held_blocks + number
        store_block(scores, seen, block_state_ptr, weights_ptr, at, real, ROWS * HEADS * held_blocks, BLOCK, True)
        signal(chunks_ptr + (tile * GROUPS + kv_head) * chunks + chunk)


@triton.jit
def do_chunk(
    here, v_ptr, block_state_ptr, weights_ptr, chunk_state_ptr, acc_ptr, chunks_ptr, tiles_ptr, base,
    rows, window, ring, origin, head_slots, blocks, chunks, held_blocks, held_chunks, tiles,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, INNER: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of the head of one chunk's values, once its blocks are done; counted for its tile and part."""
    PER_TILE: tl.constexpr = SLOTS // GROUP
    GROUPS: tl.constexpr = HEADS // GROUP
    PARTS: tl.constexpr = D // PART
    tile, head_part, number = here % tiles, here // tiles % (GROUPS * PARTS), here // (tiles * GROUPS * PARTS)
    kv_head, part = head_part // PARTS, head_part % PARTS
    eldest, newest, oldest = reach(base, tile, rows, window, PER_TILE)
    begin = (first_of(base, window, CHUNK) + number) * CHUNK
    if (begin <= newest) & (begin + CHUNK > oldest):
        end = tl.minimum(begin + CHUNK, (first_of(base, window, BLOCK) + blocks) * BLOCK)
        wanted = pieces_seen(begin, end, newest, oldest, BLOCK)
        v_ptr += kv_head.to(tl.int64) * head_slots * D
        ahead, behind = wild_keys(v_ptr, begin, eldest, newest, oldest, window, ring, origin, D, CHUNK)
        sane = await_pieces(chunks_ptr + (tile * GROUPS + kv_head) * chunks + number, wanted)
        store_chunk(
            v_ptr, block_state_ptr, weights_ptr, chunk_state_ptr, acc_ptr,
            base, begin, tile, kv_head, part * PART + tl.arange(0, PART), number, part == 0, sane,
            ahead, behind, rows, window, ring, origin, blocks, held_blocks, held_chunks,
            HEADS, GROUP, D, SLOTS, BLOCK, ROWS, CHUNK, INNER, PART, STAGES,
        )  # fmt: skip
        signal(tiles_ptr + (tile * GROUPS + kv_head) * PARTS + part)


@triton.jit
def do_total(
    here, chunk_state_ptr, acc_ptr, counters_ptr, tiles_ptr, values_ptr, sums_ptr, scales_ptr, base,
    rows, window, chunks, held_chunks, out_features, used,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """WIDTH elements of one (row, head), once the chunks of its tile are done; the last leaves the counters zero."""
    PER_TILE: tl.constexpr = SLOTS // GROUP
    GROUPS: tl.constexpr = HEADS // GROUP
    PARTS: tl.constexpr = D // PART
    PIECES: tl.constexpr = D // WIDTH
    piece, head, row = here % PIECES, here // PIECES % HEADS, here // (PIECES * HEADS)
    tile = row // PER_TILE
    _, newest, oldest = reach(base, tile, rows, window, PER_TILE)
    first_chunk = first_of(base, window, CHUNK)
    wanted = pieces_seen(first_chunk * CHUNK, (first_chunk + chunks) * CHUNK, newest, oldest, CHUNK)
    counter_ptr = tiles_ptr + (tile * GROUPS + head // GROUP) * PARTS
    sane = await_pieces(counter_ptr + piece * WIDTH // PART, wanted)
    sane &= await_pieces(counter_ptr, wanted)  # the first part stores the maxima and the sums
    pair = row * HEADS + head
    columns = piece * WIDTH + tl.arange(0, WIDTH)
    result = row_total(
        chunk_state_ptr, acc_ptr, base, row, pair, columns, window, chunks, held_chunks,
        HEADS, D, CHUNK, TILE, WIDTH, ROWS,
    )  # fmt: skip
    result = tl.where(sane, result, float("nan"))
    group = head * D // WIDTH + piece
    store_total(values_ptr, sums_ptr, scales_ptr, result, pair, columns, row, group, out_features, D, BITS)
    if signal(counters_ptr + LEAVING) == rows * HEADS * PIECES - 1:
        for at in tl.range(0, used, 128):
            index = at + tl.arange(0, 128)
            tl.store(counters_ptr + index, tl.zeros([128], tl.int32), mask=index < used)


@triton.jit(
    do_not_specialize=[
        "rows", "window", "ring", "origin", "head_slots", "blocks", "chunks", "held_blocks", "held_chunks", "tiles",
        "lag", "out_features",
    ]
)  # fmt: skip
def joined(
    q_ptr, k_ptr, v_ptr, position_ptr, block_state_ptr, weights_ptr, chunk_state_ptr, acc_ptr, counters_ptr,
    values_ptr, sums_ptr, scales_ptr,
    rows, window, ring, origin, head_slots, blocks, chunks, held_blocks, held_chunks, tiles, lag, out_features,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, INNER: tl.constexpr, PART: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    BLOCK_STAGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All of attention; the grid is all pieces: tiles x KV heads x (blocks and parts of a chunk) x chunks, and rows x
    heads x (D / WIDTH), in the order of `split_piece`.

    counters int32 are zero before and after. There is no early release: whoever follows would take up the room of
    pieces that are still to begin.
    """
    GROUPS: tl.constexpr = HEADS // GROUP
    wait_for_producers()
    piece = draw(counters_ptr)
    base = tl.load(position_ptr)
    chunks_ptr = counters_ptr + COUNTERS  # blocks done, of each (tile, KV head, chunk)
    tiles_ptr = chunks_ptr + tiles * GROUPS * chunks  # chunks done, of each (tile, KV head, part)
    block, value, total = split_piece(
        piece, tiles * GROUPS * (CHUNK // BLOCK), tiles * GROUPS * (D // PART), chunks, lag
    )
    if block >= 0:
        do_block(
            block, q_ptr, k_ptr, block_state_ptr, weights_ptr, chunks_ptr, base,
            rows, window, ring, origin, head_slots, blocks, chunks, held_blocks, tiles,
            HEADS, GROUP, D, SLOTS, ROWS, BLOCK, STEP, CHUNK, BLOCK_STAGES,
        )  # fmt: skip
    elif value >= 0:
        do_chunk(
            value, v_ptr, block_state_ptr, weights_ptr, chunk_state_ptr, acc_ptr, chunks_ptr, tiles_ptr,
            base, rows, window, ring, origin, head_slots, blocks, chunks, held_blocks, held_chunks, tiles,
            HEADS, GROUP, D, SLOTS, ROWS, BLOCK, CHUNK, INNER, PART, STAGES,
        )  # fmt: skip
    else:
        do_total(
            total, chunk_state_ptr, acc_ptr, counters_ptr, tiles_ptr, values_ptr, sums_ptr, scales_ptr, base,
            rows, window, chunks, held_chunks, out_features, tiles * GROUPS * (chunks + D // PART) + COUNTERS,
            HEADS, GROUP, D, SLOTS, ROWS, CHUNK, PART, TILE, WIDTH, BITS,
        )  # fmt: skip
