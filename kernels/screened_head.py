"""A draft's token from a bf16 head of which few rows are read: a copy in 8 bits says which rows could win.

For one row x every row w of the head has a sum of the copy's that is at most reach * ||x|| from its own. Rows whose
sum of the copy's lies further below the best than both together could make up lose for certain; the rest are computed
again, as `qmv` computes them, and the largest of those is the largest of all, ties included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.argmax import COLUMNS_PER_PROGRAM, LEAST, head_best, head_keys, key_of, value_of
from kernels.jit import GROUP, SLOTS, check_operand, dot, launch_options, round_bf16, wait_for_producers
from kernels.launch import LaunchShape
from kernels.repack import PackedWeight, dequantize_packed, pack_weight, unpack_dense
from kernels.rows import add_partials

BITS, LEVELS = 8, 255
ROWS_AT_ONCE = 64
"""Of the head, that are computed again where one of them could win."""

STAGES = tl.constexpr(4)
SLAB = 1 << 14
"""Rows of the head that are quantized at a time."""

ROUNDING, UP_TO = 2.0**-14, 1024
"""Most that fp32 sums of either product are off by, over ||w|| ||x||, for rows up to this width, and for wider ones in
proportion: 64 steps of the MMA, each within 2^-22 of a partial sum, make 2^-16; four times that is for the scales,
biases and offsets of the copy's."""


def can_screen(head: PackedWeight) -> bool:
    """Whether `screened_best` reads such a head: bf16, each row's sum in one piece, whole pieces to a tile."""
    return head.bits == 16 and head.shape.split == 1 and head.shape.tile % ROWS_AT_ONCE == 0


def quantized(head: PackedWeight, shape: LaunchShape | None = None) -> tuple[PackedWeight, Tensor]:
    """A copy of a head in 8 bits with groups of 64, and its reach fp32 [1]: |sum of the copy's - sum of the head's| is
    at most reach * ||x|| in every row. ValueError unless `can_screen`."""
    if not can_screen(head):
        raise ValueError(f"screen: a head of {head.bits} bits in {head.shape}; it takes bf16, whole rows, tiles of 64")
    dense = unpack_dense(head)
    rows, width = dense.shape
    parts, reach = [], torch.zeros(1, dtype=torch.float64, device=dense.device)
    rounding = ROUNDING * max(1.0, width / UP_TO)
    for first in range(0, rows, SLAB):
        slab = dense[first : first + SLAB].float().view(-1, width // GROUP, GROUP)
        low, high = slab.amin(-1), slab.amax(-1)
        scales = ((high - low) / LEVELS).clamp(min=2.0**-100).to(torch.bfloat16)
        biases = low.to(torch.bfloat16)
        codes = ((slab - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, LEVELS)
        words = codes.to(torch.uint8).view(-1, width).view(torch.int32).view(torch.uint32)
        part = pack_weight(words, scales, biases, BITS)
        copy = dequantize_packed(part).view(-1, width)
        own = slab.double().view(-1, width)
        lengths = own.norm(dim=1) + copy.norm(dim=1)
        reach = torch.maximum(reach, ((copy - own).norm(dim=1) + rounding * lengths).max())
        parts.append((words.view(torch.int32), scales, biases))
    words, scales, biases = (torch.cat([part[i] for part in parts]) for i in range(3))
    weight = pack_weight(words.view(torch.uint32), scales, biases, BITS, shape)
    return weight, (reach * (1 + 2.0**-10)).float()


def screened_best(sums: Tensor, x: Tensor, head: PackedWeight, copy: PackedWeight, reach: Tensor) -> Tensor:
    """Row 0's keys int64 [8, blocks] as `head_best` leaves them for the head's own sums: blocks that cannot win are
    the least key, so the largest of all is the same.

    sums fp32 [split, 8, V]: the product of x with the copy; x bf16 [8, K], of which row 0 counts. ValueError where
    they, head and copy do not belong together.
    """
    if not can_screen(head):
        raise ValueError(f"screened_best: a head of {head.bits} bits in {head.shape} was not screened")
    if (copy.out_features, copy.in_features) != (head.out_features, head.in_features):
        raise ValueError(
            f"screened_best: a copy of {copy.out_features}x{copy.in_features} for a head of"
            f" {head.out_features}x{head.in_features}"
        )
    check_operand("screened_best: sums", sums, torch.float32, (copy.shape.split, SLOTS, head.out_features))
    check_operand("screened_best: x", x, torch.bfloat16, (SLOTS, head.in_features))
    check_operand("screened_best: reach", reach, torch.float32, (1,))
    rough, keys = head_best(sums, 1, None), head_keys(head.out_features, x.device)
    blocks = rough.shape[1]
    _recheck[(blocks,)](
        sums,
        rough,
        x,
        head.codes,
        reach,
        keys,
        head.in_features // GROUP,
        V=head.out_features,
        SPLIT=copy.shape.split,
        TILE=head.shape.tile,
        ROWS=ROWS_AT_ONCE,
        BLOCKS=blocks,
        BLOCK=triton.next_power_of_2(blocks),
        COLUMNS=COLUMNS_PER_PROGRAM,
        WIDTH=triton.next_power_of_2(head.in_features),
        **launch_options(x.device, 4, STAGES.value),
    )
    return keys


@triton.jit(do_not_specialize=["groups"])
def _recheck(
    sums_ptr, rough_ptr, x_ptr, codes_ptr, reach_ptr, keys_ptr, groups,
    V: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The key of one block of the head's rows, of those that could win alone, added as `qmv` adds them."""
    PARTS: tl.constexpr = COLUMNS // ROWS
    block, row, part = tl.arange(0, BLOCK), tl.arange(0, ROWS), tl.arange(0, PARTS)
    slot, column, at = tl.arange(0, 8), tl.arange(0, 64), tl.arange(0, WIDTH)
    reach = tl.load(reach_ptr)
    wait_for_producers()
    keys = tl.load(rough_ptr + block, mask=block < BLOCKS, other=LEAST)
    best = value_of(tl.max(keys, 0))
    x = tl.load(x_ptr + at, mask=at < groups * 64, other=0.0).to(tl.float32)
    # Both rows may be off by reach * ||x||, and each of three roundings to bf16 by 2^-9 of a value of about this size.
    slack = 2.05 * reach * tl.sqrt_rn(tl.sum(x * x, 0)) + tl.abs(best) * 0.0078125 + 1e-30
    own = tl.program_id(0) * COLUMNS + part[:, None] * ROWS + row[None, :]
    # Nothing is below NaN: then all rows are computed.
    beaten = add_partials(sums_ptr, 0, own, V, own < V, SPLIT) < best - slack
    hopeful = tl.max(((own < V) & ~beaten).to(tl.int32), 1)
    wanted = tl.sum(hopeful << part, 0)

    largest = tl.full([1], LEAST, tl.int64)
    for number in tl.range(0, PARTS):
        if (wanted >> number) & 1 != 0:
            first = tl.program_id(0) * COLUMNS + number * ROWS
            start = (first // TILE * groups).to(tl.int64) * (TILE * 64) + first % TILE * 64
            codes_at = codes_ptr + start + row[:, None] * 64 + column[None, :]
            acc = tl.zeros((ROWS, 8), tl.float32)
            for group in tl.range(0, groups, num_stages=STAGES):
                weight = tl.load(codes_at + group * (TILE * 64))
                state = tl.load(x_ptr + slot[:, None] * 0 + group * 64 + column[None, :])
                acc = dot(weight, tl.trans(state), acc)
            value = round_bf16(tl.sum(tl.where(slot[None, :] == 0, acc, 0.0), 1))
            key = tl.where(first + row < V, key_of(value, first + row), LEAST)
            largest = tl.maximum(largest, tl.max(key, 0))
    tl.store(keys_ptr + tl.program_id(0) + tl.arange(0, 1), largest)
