"""How a draft step begins, in one launch: a token's embedding beside a state of the target's width, packed for `pre`.

A chain's first step takes the target's own state, or the one that the last verify step leaves behind what it accepts;
a later one takes the drafter's partial sums as `post` leaves them, and its token as the head's keys, which the launch
writes down as the next id on the way. Nobody has to look in between. The bytes are those of the single ops: embed,
sum, join, pack.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.argmax import best_of
from kernels.embed import embedded
from kernels.jit import SLOTS, Release, check_operand, launch_options, wait_for_producers
from kernels.repack import PackedWeight
from kernels.rows import Rows, load_partials, new_rows, store_rows

GROUPS_PER_PROGRAM = 2
"""Small enough that one row covers much of a card."""


def join_rows(
    table: PackedWeight,
    ids: Tensor,
    at: int,
    keys: Tensor | None,
    scale: Tensor,
    state: Tensor,
    bits: int,
    release: Release = "late",
) -> Rows:
    """Row 0 of a draft step: the table's row of a token, times the scale, then a state -> `Rows` of width 2 B.

    The token is ids[at], ids int32 [8], or that of keys int64 [8, blocks] (`kernels.argmax.head_best`), which goes to
    ids[at]. scale bf16, one value. state: row 0 of bf16 [8, B], or of partial sums fp32 [split, 8, B].
    `release`: when the next launch's programs may start.
    """
    where = "join_rows"
    _check_table(where, table, ids, scale)
    if not 0 <= at < SLOTS:
        raise ValueError(f"{where}: place {at} of {SLOTS} ids")
    blocks = 0
    if keys is not None:
        check_operand(f"{where}: keys", keys, torch.int64, (SLOTS, None))
        blocks = keys.shape[1]
    width, summed = table.in_features, state.dtype == torch.float32
    wanted = (None, SLOTS, width) if summed else (SLOTS, width)
    check_operand(f"{where}: state", state, torch.float32 if summed else torch.bfloat16, wanted)
    out = new_rows(2 * width, bits, ids.device)
    _join[_grid(width)](
        table.codes,
        table.scales,
        scale,
        ids,
        at,
        keys,
        state,
        out.values,
        out.sums,
        out.scales,
        width // 64,
        TABLE_BITS=table.bits,
        TILE=table.shape.tile,
        BLOCKS=blocks,
        BLOCK=triton.next_power_of_2(max(blocks, 1)),
        SPLIT=state.shape[0] if summed else 0,
        BITS=bits,
        G=GROUPS_PER_PROGRAM,
        RELEASE=release,
        **launch_options(ids.device, 1),
    )
    return out


def join_accepted_rows(
    table: PackedWeight,
    ids: Tensor,
    best: Tensor,
    hidden: Tensor,
    position: Tensor,
    draft_position: Tensor,
    rows: int,
    scale: Tensor,
    bits: int,
    release: Release = "late",
) -> Rows:
    """Carry on behind the longest prefix of drafts that equals the target's own tokens -> `Rows` as `join_rows` makes.

    ids int32 [8] are the block's rows, best int32 [8] its greedy tokens, hidden bf16 [8, B] its states, position
    int32 [1] its first row's. Of `rows` rows a are accepted: the next step takes token best[a] and state hidden[a],
    ids[0] becomes best[a], position moves on by a + 1 and draft_position stands one before it.
    `release` as in `join_rows`.
    """
    where = "join_accepted_rows"
    _check_table(where, table, ids, scale)
    width = table.in_features
    check_operand(f"{where}: best", best, torch.int32, (SLOTS,))
    check_operand(f"{where}: hidden", hidden, torch.bfloat16, (SLOTS, width))
    for name, word in (("position", position), ("draft_position", draft_position)):
        check_operand(f"{where}: {name}", word, torch.int32, (1,))
    if not 1 <= rows <= SLOTS:
        raise ValueError(f"{where}: {rows} rows; a block has 1 to {SLOTS}")
    out = new_rows(2 * width, bits, ids.device)
    _join_accepted[_grid(width)](
        table.codes,
        table.scales,
        scale,
        ids,
        best,
        hidden,
        position,
        draft_position,
        out.values,
        out.sums,
        out.scales,
        rows,
        width // 64,
        TABLE_BITS=table.bits,
        TILE=table.shape.tile,
        BITS=bits,
        G=GROUPS_PER_PROGRAM,
        RELEASE=release,
        **launch_options(ids.device, 1),
    )
    return out


def _check_table(where: str, table: PackedWeight, ids: Tensor, scale: Tensor) -> None:
    """ValueError unless ids and scale are what an embedding takes."""
    check_operand(f"{where}: ids", ids, torch.int32, (SLOTS,))
    if scale.dtype != torch.bfloat16 or scale.numel() != 1:
        raise ValueError(f"{where}: scale must be one bf16 value, got {scale.dtype} of {scale.numel()} elements")
    if table.codes.device != ids.device:
        raise ValueError(f"{where}: table on {table.codes.device}, ids on {ids.device}")


def _grid(width: int) -> tuple[int, int]:
    """The two halves of a joined row, and the programs of each."""
    return 2, triton.cdiv(width // 64, GROUPS_PER_PROGRAM)


@triton.jit(do_not_specialize=["at", "groups"])
def _join(
    codes_ptr, table_scales_ptr, scale_ptr, ids_ptr, at, keys_ptr, state_ptr, values_ptr, sums_ptr, scales_ptr, groups,
    TABLE_BITS: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    BITS: tl.constexpr, G: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """SPLIT 0: the state is a plain row; BLOCKS 0: the token is there already."""
    half = tl.program_id(0)
    group = tl.program_id(1) * G + tl.arange(0, G)
    valid = group < groups
    column = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    wait_for_producers(RELEASE)
    if half == 0:
        if BLOCKS == 0:
            token = tl.load(ids_ptr + at)
        else:
            token = best_of(keys_ptr, 0, BLOCKS, BLOCK)
            if tl.program_id(1) == 0:
                tl.store(ids_ptr + at, token)
        x = embedded(codes_ptr, table_scales_ptr, scale_ptr, token, group, valid, groups, TABLE_BITS, TILE)
    else:
        if SPLIT == 0:
            x = tl.load(state_ptr + column, mask=valid[:, None], other=0.0).to(tl.float32)
        else:
            x = load_partials(state_ptr, 0, column, groups * 64, valid[:, None], SPLIT)
    store_rows(values_ptr, sums_ptr, scales_ptr, x, half * groups + group, 0, groups * 128, valid, BITS)


@triton.jit(do_not_specialize=["rows", "groups"])
def _join_accepted(
    codes_ptr, table_scales_ptr, scale_ptr, ids_ptr, best_ptr, hidden_ptr, position_ptr, draft_position_ptr,
    values_ptr, sums_ptr, scales_ptr, rows, groups,
    TABLE_BITS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """Every program finds what was accepted; one writes it down, in words that no other program reads."""
    half = tl.program_id(0)
    group = tl.program_id(1) * G + tl.arange(0, G)
    valid = group < groups
    column = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    row = tl.arange(0, 8)
    wait_for_producers(RELEASE)
    drafted = tl.load(ids_ptr + 1 + row, mask=row + 1 < rows, other=-1)
    found = tl.load(best_ptr + row, mask=row + 1 < rows, other=-1)
    accepted = tl.min(tl.where((row + 1 < rows) & (drafted != found), row, rows - 1), 0)
    if half == 0:
        token = tl.load(best_ptr + accepted)
        if tl.program_id(1) == 0:
            position = tl.load(position_ptr) + accepted
            tl.debug_barrier()  # every thread has read the position before it moves on
            tl.store(ids_ptr, token)
            tl.store(position_ptr, position + 1)
            tl.store(draft_position_ptr, position)
        x = embedded(codes_ptr, table_scales_ptr, scale_ptr, token, group, valid, groups, TABLE_BITS, TILE)
    else:
        state = hidden_ptr + accepted * (groups * 64) + column
        x = tl.load(state, mask=valid[:, None], other=0.0).to(tl.float32)
    store_rows(values_ptr, sums_ptr, scales_ptr, x, half * groups + group, 0, groups * 128, valid, BITS)
