"""Decode and verify attention: up to 8 rows of one layer, each with the bytes it has alone.

Keys are cut into chunks at fixed absolute positions, whatever the call's rows, window or cache. For a chunk of keys and
a tile of query slots (row, head of the KV head's group) there is a partial softmax (maximum, sum, weighted values), and
a last launch adds up a row's own chunks in index order and rounds once. A small tile gets its partial softmax from one
launch, a large one from two: the weights of a block of keys, then a chunk's weights times its values, in one of two
forms. Neither a neighbour's NaN nor a stale slot reaches a row. Scale 1, no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from kernels import MAX_ROWS
from kernels.jit import Release, check_operand, launch_options
from kernels.rows import Rows, new_rows
from kernels.sdpa_kernels import attend, combine, scores_of, values_of
from kernels.sdpa_plan import Plan, Scratch, allocate_scratch, blocks_for, chunks_for, plan_for
from kernels.sdpa_queries import QueryHeads
from kernels.sdpa_scaled import scaled_values

__all__ = ["Scratch", "allocate_scratch", "plan_for", "sdpa_rows", "sdpa_vector", "sdpa_vector_rows"]

UNBOUNDED = 1 << 30
"""Window of a layer without one, and ring of a cache that never wraps: beyond every position."""

COMBINE_CHUNKS = 64
"""Chunks that the combine sums at once, in tiles from the first chunk on that a row sees."""

COMBINE_WIDTH = 64
"""Elements of a head that one program of the combine writes: a group of the product that follows."""


def sdpa_vector(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    rows: int,
    window: int | None,
    ring: int,
    max_keys: int,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    plan: Plan | None = None,
    settled: bool = False,
) -> Tensor:
    """Attend row r at position + r over keys [max(0, position + r - window + 1), position + r] -> [n, H, D].

    q [n, H, D] bf16 with n >= rows; k and v [Hkv, S, D] bf16, already holding the rows' own keys, key p in slot
    p mod ring; position int32 [1] on the device. max_keys bounds position + rows: a row beyond it comes out NaN.
    Rows from `rows` on are left as they are. `plan`, and with it the scratch, is for tuning: another plan, other bytes.
    `settled`: the position was written before the step's first launch ended, so that it may be read before the wait.
    ValueError on another dtype, shape or layout.
    """
    heads, width = _check(q, k, v, position, rows, window, ring, max_keys)
    if out is None:
        out = torch.empty_like(q)
    check_operand("attention: out", out, torch.bfloat16, tuple(q.shape))
    _launch(
        q,
        k,
        v,
        position,
        rows,
        window,
        ring,
        0,
        max_keys,
        scratch,
        (out, out, out),
        heads * width,
        0,
        plan,
        settled=settled,
    )
    return out


def sdpa_vector_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    rows: int,
    window: int | None,
    ring: int,
    max_keys: int,
    bits: int,
    out: Rows | None = None,
    scratch: Scratch | None = None,
    settled: bool = False,
    query_heads: QueryHeads | None = None,
    release: Release = "late",
) -> Rows:
    """`sdpa_vector` whose result is made ready for a product with `bits`-bit weights and H * D inputs.

    `settled` as there. With `query_heads` q is the partial sums fp32 [split, 8, H * D] of the q product, and head norms
    and RoPE happen here; the position must then be older than the launch before that product, whatever `settled` says.
    `release`: when the last launch here lets the next one's programs start. ValueError where the plan
    has blocks.
    """
    heads, width = _check(q, k, v, position, rows, window, ring, max_keys, query_heads)
    if width % COMBINE_WIDTH:
        raise ValueError(f"attention: head_dim {width} is no multiple of {COMBINE_WIDTH}, a group would span two heads")
    if out is None:
        out = new_rows(heads * width, bits, q.device)
    if (out.width, out.bits) != (heads * width, bits):
        raise ValueError(
            f"attention: rows hold {out.width} values for {out.bits} bits, wanted {heads * width} for {bits}"
        )
    parts = (out.values, out.sums, out.scales)
    place = (position, rows, window, ring, 0, max_keys)
    _launch(
        q, k, v, *place, scratch, parts, heads * width, bits, settled=settled, query_heads=query_heads, release=release
    )
    return out


def sdpa_rows(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[tuple[int, int]], first: int = 0) -> Tensor:
    """The bundle's one-row attention for each real row over keys [start, end) -> [n, H, D], other rows zero.

    q [n, H, D], k and v [Hkv, K, D] bf16, oldest key first. `first` is the position of k[:, 0]: chunks lie at absolute
    positions, so a block and its one-row calls agree only if both say where their keys begin. ValueError where the
    spans are not those of consecutive rows, full or under one window.
    """
    position, window = _consecutive(spans, first)
    where = torch.full((1,), position, dtype=torch.int32, device=q.device)
    rows, max_keys = len(spans), position + len(spans)
    heads, width = _check(q, k, v, where, rows, window, UNBOUNDED, max_keys)
    if max_keys - first > k.shape[1]:
        raise ValueError(f"attention: spans end at {max_keys - first}, but there are {k.shape[1]} keys")
    out = torch.zeros_like(q)
    _launch(q, k, v, where, rows, window, UNBOUNDED, first, max_keys, None, (out, out, out), heads * width, 0)
    return out


def _consecutive(spans: Sequence[tuple[int, int]], first: int) -> tuple[int, int | None]:
    """Position of the first row, and the window that the spans show (None: every row still sees position 0)."""
    if not spans:
        raise ValueError("attention: no spans; one per real row is needed")
    position = first + spans[0][1] - 1
    starts = [first + start for start, _ in spans]
    windows = {position + row + 1 - start for row, start in enumerate(starts) if start > 0}
    window = windows.pop() if windows else None
    expected = [
        (0 if window is None else max(0, position + row + 1 - window), position + row + 1) for row in range(len(spans))
    ]
    if windows or position < 0 or expected != [(first + start, first + end) for start, end in spans]:
        raise ValueError(
            f"attention: spans {list(spans)} from position {first} are not those of consecutive rows under one window"
        )
    return position, window


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    rows: int,
    window: int | None,
    ring: int,
    max_keys: int,
    query_heads: QueryHeads | None = None,
) -> tuple[int, int]:
    """Query heads and head_dim of a call whose operands fit together; ValueError says which do not."""
    if query_heads is None:
        check_operand("attention: q", q, torch.bfloat16, (None, None, None))
        held, heads, width = q.shape
    else:
        held, (heads, width) = MAX_ROWS, query_heads.check(q)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != torch.bfloat16 or x.dim() != 3 or x.shape[2] != width or x.shape != k.shape:
            found = f"{x.dtype} {list(x.shape)}"
            raise ValueError(f"attention: {name}: expected torch.bfloat16 [Hkv, S, {width}], got {found}")
        if x.stride()[1:] != (width, 1) or x.stride(0) % width or x.stride() != k.stride() or x.data_ptr() % 16:
            raise ValueError(f"attention: {name}: keys must lie one after another, 16-byte aligned, alike in k and v")
    if heads % k.shape[0]:
        raise ValueError(f"attention: {heads} query heads are no multiple of {k.shape[0]} KV heads")
    plan = plan_for(width, heads, k.shape[0])
    if query_heads is not None and plan.block:
        raise ValueError(f"attention: {plan} makes its weights in a launch of their own, which takes q and no sums")
    if position.dtype != torch.int32 or position.numel() != 1 or position.device != q.device:
        raise ValueError("attention: position must be an int32 tensor of one element on the device of q")
    if not 1 <= rows <= min(MAX_ROWS, held):
        raise ValueError(f"attention: {rows} rows asked for, q holds {held} and a call takes 1 to {MAX_ROWS}")
    if window is not None and window < 1:
        raise ValueError(f"attention: window {window} must be positive, or None")
    if max_keys < 1:
        raise ValueError(f"attention: max_keys {max_keys} must be positive")
    if ring == UNBOUNDED:
        return heads, width
    if k.shape[1] < min(ring, max_keys):
        raise ValueError(f"attention: {k.shape[1]} slots cannot hold {max_keys} keys in a ring of {ring}")
    if max_keys > ring and (window is None or ring < window + rows - 1):
        raise ValueError(f"attention: a ring of {ring} slots cannot hold what {rows} rows see of {max_keys} keys")
    if max_keys > ring and ring < plan.reads:
        raise ValueError(f"attention: a ring that wraps needs {plan.reads} slots or more, got {ring}")
    return heads, width


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    rows: int,
    window: int | None,
    ring: int,
    origin: int,
    max_keys: int,
    scratch: Scratch | None,
    out: tuple[Tensor, Tensor, Tensor],
    out_features: int,
    bits: int,
    plan: Plan | None = None,
    *,
    settled: bool = False,
    query_heads: QueryHeads | None = None,
    release: Release = "late",
) -> None:
    """All kernels of a call; the number of rows decides how many programs run, and nothing else."""
    groups, _, width = k.shape
    heads = out_features // width
    plan = plan or plan_for(width, heads, groups)
    if scratch is None:
        scratch = allocate_scratch(heads, groups, width, window, max_keys, q.device, plan)
    blocks, chunks = blocks_for(max_keys, window, plan), chunks_for(max_keys, window, plan)
    held_blocks, held_chunks = scratch.weights.shape[2], scratch.acc.shape[0]
    fits = scratch.acc.shape[1:] == (MAX_ROWS, heads, width) and scratch.weights.shape[3] == plan.block
    if not fits or held_chunks < chunks or held_blocks < blocks or scratch.acc.device != q.device:
        raise ValueError(
            f"attention: scratch for {held_chunks} chunks of {list(scratch.acc.shape[1:])} cannot take {chunks} chunks "
            f"of {[MAX_ROWS, heads, width]} on {q.device}; allocate_scratch with the same shape and max_keys"
        )
    reach = UNBOUNDED if window is None else window
    group = heads // groups
    tiles = triton.cdiv(rows, plan.slots // group)
    place = (rows, reach, ring, origin, k.stride(0) // width)
    shape = {"HEADS": heads, "GROUP": group, "D": width, "SLOTS": plan.slots, "ROWS": MAX_ROWS}
    options = {"STAGES": plan.stages, **launch_options(q.device, plan.warps, plan.stages)}
    bounded = options | ({"maxnreg": plan.registers} if plan.registers else {})
    if plan.block:
        grid = (tiles, groups, blocks, chunks)
        _partials_of_blocks(q, k, v, position, scratch, plan, grid, place, shape, options, settled)
    else:
        attend[(tiles, groups, chunks)](
            q,
            k,
            v,
            position,
            scratch.chunk_state,
            scratch.acc,
            *place,
            held_chunks,
            **shape,
            CHUNK=plan.chunk,
            INNER=plan.inner,
            SETTLED=settled,
            **(bounded if query_heads is None else bounded | query_heads.operands(q)),
        )
    part = min(COMBINE_WIDTH, width)
    combine[(rows, heads, width // part)](
        position,
        scratch.chunk_state,
        scratch.acc,
        *out,
        reach,
        max_keys,
        chunks,
        held_chunks,
        out_features,
        HEADS=heads,
        D=width,
        CHUNK=plan.chunk,
        TILE=COMBINE_CHUNKS,
        PART=part,
        ROWS=MAX_ROWS,
        BITS=bits,
        RELEASE=release,
        **launch_options(q.device, 4),
    )


def _partials_of_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    scratch: Scratch,
    plan: Plan,
    grid: tuple[int, int, int, int],
    place: tuple[int, ...],
    shape: dict[str, int],
    options: dict[str, Any],
    settled: bool,
) -> None:
    """The weights of every block, then every chunk's values; grid: tiles, KV heads, blocks, chunks."""
    tiles, groups, blocks, chunks = grid
    held_blocks, width = scratch.weights.shape[2], shape["D"]
    part = min(plan.part, width)
    block_slots = plan.block_slots or plan.slots
    scores_of[(triton.cdiv(place[0], block_slots // shape["GROUP"]), groups, blocks)](
        q,
        k,
        v,
        position,
        scratch.block_state,
        scratch.weights,
        *place,
        held_blocks,
        **(shape | {"SLOTS": block_slots}),
        BLOCK=plan.block,
        STEP=min(plan.step, width),
        WHOLE=plan.scaled,
        AHEAD=plan.ahead,
        SETTLED=settled,
        **(options | {"STAGES": plan.block_stages or plan.stages}),
    )
    options |= {"maxnreg": plan.registers} if plan.registers else {}
    operands = (v, position, scratch.block_state, scratch.weights, scratch.chunk_state, scratch.acc, *place, blocks)
    cut = {"BLOCK": plan.block, "CHUNK": plan.chunk, "INNER": plan.inner, "PART": part}
    grid_of_values = (tiles, groups * (width // part), chunks)
    if plan.scaled:
        scaled_values[grid_of_values](*operands, held_blocks, scratch.acc.shape[0], **shape, **cut, **options)
    else:
        values_of[grid_of_values](*operands, held_blocks, scratch.acc.shape[0], **shape, **cut, **options)
