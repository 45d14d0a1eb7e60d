"""qmv on a GPU: its first weights are on their way before the launch that makes its rows has ended.

What `kernels.qmv` says, with the same bytes, in Gluon, where a kernel says itself what its pipeline does when: Triton's
own starts all loads together, after the wait for the producers, and a product that waits has nothing on its way. Here
    release   the next launch's programs, few and small, may be placed beside these, and wait there
    copy      one step of weights, which no launch writes
    wait      until the producers' rows are visible
    copy      the rows of the first steps, then the pipeline's other weights: rows that are asked for behind a long
              queue of weights come late, and nothing can be multiplied before they are there
    loop      over the groups of K, as `kernels.qmv` does
Programs that are placed while others hold the card end up unevenly spread. So each asks for as much shared memory as
leaves a multiprocessor room for its share of the launch and for no more (decision 15).
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.jit import GROUP, launch_options, release_consumers, wait_for_producers
from kernels.launch import CARDS, Card, even_room
from kernels.repack import PackedWeight
from kernels.rows import Rows
from kernels.unpack import UNPACK_4, UNPACK_8

AHEAD = gl.constexpr(1)
"""Steps whose weights are copied before the wait: more of them delay what the producers read."""


def launch(x: Rows, weight: PackedWeight, first: int, count: int, out: Tensor) -> None:
    """Rows `first` to `first + count` of `kernels.qmv.qmv`, into out fp32 [split, 8, N]."""
    shape, grid = weight.shape, grid_of(weight)
    _qmv_ahead[grid](
        *operands(x, weight, first, count, out),
        BITS=weight.bits,
        TILE=shape.tile,
        UNROLL=shape.unroll,
        STAGES=max(2, shape.stages),
        ROOM=even_room(grid[0] * grid[1], card_of(x.values.device)),
        **launch_options(x.values.device, shape.warps),
    )


def grid_of(weight: PackedWeight) -> tuple[int, int]:
    """Programs: tiles and shares of K, tiles first: neighbours share their part of x, and find it in the cache."""
    return weight.codes.shape[0], weight.shape.split


def operands(x: Rows, weight: PackedWeight, first: int, count: int, out: Tensor) -> tuple[Tensor | int, ...]:
    """What a product's kernel takes before its constants; the last is the groups of K in a share."""
    groups, unroll = weight.in_features // GROUP, weight.shape.unroll
    part = triton.cdiv(triton.cdiv(groups, unroll), weight.shape.split) * unroll
    rows = x.values, x.sums, x.scales
    return *rows, weight.codes, weight.scales, out, first, count, weight.out_features, groups, part


def card_of(device: torch.device) -> Card:
    """The card behind a device; for tensors that are on none, one that the compiler is asked to build for."""
    if device.type == "cuda":
        return _card(device)
    return CARDS.get(triton.runtime.driver.active.get_current_target().arch, CARDS[90])


@functools.cache
def _card(device: torch.device) -> Card:
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_multiprocessor", CARDS[90].shared_bytes)
    return Card(found.multi_processor_count, shared)


@gluon.jit
def _copy_weights(
    codes_shared, scales_shared, codes_at, scales_at, step, to, real,
    BITS: gl.constexpr, SIZE: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """One step's codes and scales to place `to` of the pipeline, where there is such a step."""
    codes = codes_at + step * (SIZE * STORED)
    async_copy.async_copy_global_to_shared(codes_shared.index(to), codes, mask=real, eviction_policy="evict_first")
    if BITS < 16:
        async_copy.async_copy_global_to_shared(scales_shared.index(to), scales_at + step * SIZE, mask=real)


@gluon.jit
def _copy_rows(
    x_shared, sums_shared, x_scales_shared, x_at, sums_at, x_scales_at, step, to, real,
    BITS: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """One step's eight rows, with what 4 and 8 bits need beside the values."""
    async_copy.async_copy_global_to_shared(x_shared.index(to), x_at + step * (UNROLL * 64), mask=real)
    if BITS < 16:
        async_copy.async_copy_global_to_shared(sums_shared.index(to), sums_at + step * (UNROLL * 8), mask=real)
    if BITS == 8:
        scales = x_scales_at + step * (UNROLL * 8)
        async_copy.async_copy_global_to_shared(x_scales_shared.index(to), scales, mask=real)


@gluon.jit
def _multiplied(
    acc, codes_shared, scales_shared, x_shared, sums_shared, x_scales_shared,
    BITS: gl.constexpr, TILE: gl.constexpr, MMA: gl.constexpr, K_WIDTH: gl.constexpr,
):  # fmt: skip
    """acc [TILE, 8] and one group: as `kernels.qmv._qmv`, operation by operation."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, K_WIDTH)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, K_WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    SLOT: gl.constexpr = gl.SliceLayout(0, MMA)
    packed = codes_shared.load(A)
    if BITS == 16:
        acc = mma_v2(packed, x_shared.permute([1, 0]).load(B), acc)
    else:
        both = scales_shared.load(ROW)
        sums = sums_shared.load(SLOT)
        scale = (both << 16).to(gl.float32, bitcast=True)
        bias = (both & -65536).to(gl.float32, bitcast=True)
        product = gl.zeros([TILE, 8], gl.float32, MMA)
        if BITS == 4:
            even, odd = gl.inline_asm_elementwise(
                UNPACK_4, "=r,=r,=r,=r,r", [packed], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
            )
            product = mma_v2(even, x_shared.slice(0, 32, dim=1).permute([1, 0]).load(B), product)
            product = mma_v2(odd, x_shared.slice(32, 32, dim=1).permute([1, 0]).load(B), product)
            bias = gl.fma(scale, gl.full([TILE], -16.0, gl.float32, ROW), bias)
        else:
            codes = gl.inline_asm_elementwise(UNPACK_8, "=r,=r,r", [packed], dtype=gl.float16, is_pure=True, pack=4)
            product = mma_v2(codes, x_shared.permute([1, 0]).load(B), product)
            product = product * x_scales_shared.load(SLOT)[None, :]
            bias = gl.fma(scale, gl.full([TILE], 128.0, gl.float32, ROW), bias)
        acc = gl.fma(product, gl.broadcast(scale[:, None], product)[0], acc)
        acc = gl.fma(gl.broadcast(bias[:, None], product)[0], gl.broadcast(sums[None, :], product)[0], acc)
    return acc


@gluon.jit(do_not_specialize=["first", "count", "N", "groups", "part"])
def _qmv_ahead(
    values_ptr,
    sums_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    first,
    count,
    N,
    groups,
    part,
    BITS: gl.constexpr,
    TILE: gl.constexpr,
    UNROLL: gl.constexpr,
    STAGES: gl.constexpr,
    ROOM: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    STORED: gl.constexpr = 32 if BITS == 4 else 64
    SIZE: gl.constexpr = UNROLL * TILE
    CODE: gl.constexpr = gl.bfloat16 if BITS == 16 else gl.uint8
    X: gl.constexpr = gl.float16 if BITS == 8 else gl.bfloat16
    K_WIDTH: gl.constexpr = 2 if BITS == 16 else 4
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    # How copies are shared among threads, 16 bytes each, and how their targets are swizzled against bank conflicts.
    WIDE: gl.constexpr = 8 if BITS == 16 else 16
    ACROSS: gl.constexpr = STORED // WIDE
    CODES: gl.constexpr = gl.BlockedLayout([1, WIDE], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    X_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [min(2, WARPS), max(WARPS // 2, 1)], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(WIDE, 128 // (STORED * (2 if BITS == 16 else 1)), ACROSS, [1, 0])
    X_SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    tile, share = gl.program_id(0), gl.program_id(1)
    begin = share * part
    start = (tile * groups + begin).to(gl.int64)
    row = gl.arange(0, SIZE, gl.SliceLayout(1, CODES))
    column = gl.arange(0, STORED, gl.SliceLayout(0, CODES))
    codes_at = codes_ptr + start * (TILE * STORED) + (row[:, None] * STORED + column[None, :])
    scales_at = scales_ptr + start * TILE + gl.arange(0, SIZE, LINE)
    slot = gl.arange(0, 8, gl.SliceLayout(1, X_COPY))
    element = gl.arange(0, 64 * UNROLL, gl.SliceLayout(0, X_COPY))
    x_at = values_ptr + begin * 64 + (slot[:, None] * (groups * 64) + element[None, :])
    sums_at = sums_ptr + begin * 8 + gl.arange(0, 8 * UNROLL, LINE)
    x_scales_at = x_scales_ptr + begin * 8 + gl.arange(0, 8 * UNROLL, LINE)
    codes_shared = gl.allocate_shared_memory(CODE, [STAGES, SIZE, STORED], SWIZZLED)
    scales_shared = gl.allocate_shared_memory(gl.int32, [STAGES, SIZE], FLAT)
    x_shared = gl.allocate_shared_memory(X, [STAGES, 8, 64 * UNROLL], X_SWIZZLED)
    sums_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 8 * UNROLL], FLAT)
    x_scales_shared = gl.allocate_shared_memory(gl.float32, [STAGES, 8 * UNROLL], FLAT)
    steps = gl.minimum(part, groups - begin) // UNROLL

    release_consumers()
    for step in gl.static_range(AHEAD):
        _copy_weights(codes_shared, scales_shared, codes_at, scales_at, step, step, step < steps, BITS, SIZE, STORED)
    wait_for_producers()
    for step in gl.static_range(STAGES - 1):
        real = step < steps
        _copy_rows(x_shared, sums_shared, x_scales_shared, x_at, sums_at, x_scales_at, step, step, real, BITS, UNROLL)
    for step in gl.static_range(STAGES - 1):
        if step >= AHEAD:
            real = step < steps
            _copy_weights(codes_shared, scales_shared, codes_at, scales_at, step, step, real, BITS, SIZE, STORED)
        async_copy.commit_group()  # the first holds all rows and what went ahead
    acc = gl.zeros([TILE, 8], gl.float32, MMA)
    place = 0
    for step in range(0, steps):
        async_copy.wait_group(STAGES - 2)
        # Into the place that the last step has left: nobody reads it any more once all are past this step's wait.
        ahead, to = step + (STAGES - 1), gl.where(place == 0, STAGES - 1, place - 1)
        real = ahead < steps
        _copy_weights(codes_shared, scales_shared, codes_at, scales_at, ahead, to, real, BITS, SIZE, STORED)
        _copy_rows(x_shared, sums_shared, x_scales_shared, x_at, sums_at, x_scales_at, ahead, to, real, BITS, UNROLL)
        async_copy.commit_group()
        for group in gl.static_range(UNROLL):
            acc = _multiplied(
                acc,
                codes_shared.index(place).slice(group * TILE, TILE, dim=0),
                scales_shared.index(place).slice(group * TILE, TILE, dim=0),
                x_shared.index(place).slice(group * 64, 64, dim=1),
                sums_shared.index(place).slice(group * 8, 8, dim=0),
                x_scales_shared.index(place).slice(group * 8, 8, dim=0),
                BITS,
                TILE,
                MMA,
                K_WIDTH,
            )
        place = gl.where(place == STAGES - 1, 0, place + 1)
    n = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, MMA))
    slot = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    stored = (slot >= first) & (slot < first + count)
    gl.store(out_ptr + (share * 8 + slot)[None, :] * N + n[:, None], acc, mask=stored[None, :] & (n < N)[:, None])
    if ROOM > 0:
        gl.allocate_shared_memory(gl.uint8, [ROOM], FLAT)._keep_alive()
