"""The head's last ops: soft cap, and the index of each row's largest logit.

A logit and its index become one integer whose order is "larger value, then lower index", so the maximum is exact
whatever the blocks and the order. NaN counts as larger than everything: the first NaN wins, as in numpy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import (
    SLOTS,
    check_operand,
    launch_options,
    round_bf16,
    to_bf16,
    wait_for_producers,
)
from kernels.rmsnorm import check_rows
from kernels.rows import load_partials

COLUMNS_PER_PROGRAM = 1024

LEAST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""A key that is below every value's."""


def softcap(logits: Tensor, cap: float) -> Tensor:
    """tanh(logits / cap) * cap with a rounding per op; logits bf16 [M, V]. ValueError on other shapes."""
    logits = logits.contiguous()
    check_operand("softcap: logits", logits, torch.bfloat16, (None, None))
    count, width = logits.shape
    out = torch.empty_like(logits)
    if logits.numel():
        _softcap[(count, triton.cdiv(width, COLUMNS_PER_PROGRAM))](
            logits, out, float(cap), V=width, BLOCK=COLUMNS_PER_PROGRAM, **launch_options(logits.device, 4)
        )
    return out


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest value of each row of logits bf16 [M, V] -> int32 [M] on the device.

    Ties go to the lowest index, NaN before any number. ValueError on other shapes.
    """
    logits = logits.contiguous()
    check_operand("argmax: logits", logits, torch.bfloat16, (None, None))
    count, width = logits.shape
    if not count or not width:
        raise ValueError(f"argmax: no values in logits {count}x{width}")
    blocks = triton.cdiv(width, COLUMNS_PER_PROGRAM)
    keys = torch.empty(count, blocks, dtype=torch.int64, device=logits.device)
    ids = torch.empty(count, dtype=torch.int32, device=logits.device)
    _block_keys[(count, blocks)](logits, keys, V=width, BLOCK=COLUMNS_PER_PROGRAM, **launch_options(logits.device, 4))
    _write_ids(keys, count, ids, 0)
    return ids


def head_argmax(
    partials: Tensor,
    rows: int,
    cap: float | None,
    out: Tensor | None = None,
    logits: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """From the head's partial sums to token ids: sum, round, soft cap where there is one, argmax.

    partials fp32 [split, 8, V] -> ids int32 [8] on the device, and `logits` bf16 [8, V] after the cap, filled where
    given. Rows past `rows` are not written. `out` and `keys` (`head_keys`) may be given to allocate nothing.
    """
    if out is None:
        out = torch.empty(SLOTS, dtype=torch.int32, device=partials.device)
    check_operand("head_argmax: out", out, torch.int32, (SLOTS,))
    keys = head_best(partials, rows, cap, logits, keys)
    _write_ids(keys, rows, out, 0)
    return out, logits


def head_best(
    partials: Tensor,
    rows: int,
    cap: float | None,
    logits: Tensor | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """`head_argmax` up to the largest key of each block of columns: int64 [8, blocks], for `write_best` or a reader
    that takes the largest of them itself (`best_of`)."""
    check_operand("head_argmax: partials", partials, torch.float32, (None, SLOTS, None))
    check_rows("head_argmax", rows)
    split, _, width = partials.shape
    if logits is not None:
        check_operand("head_argmax: logits", logits, torch.bfloat16, (SLOTS, width))
    blocks = triton.cdiv(width, COLUMNS_PER_PROGRAM)
    if keys is None:
        keys = head_keys(width, partials.device)
    check_operand("head_argmax: keys", keys, torch.int64, (SLOTS, blocks))
    _head_keys[(rows, blocks)](
        partials,
        logits,
        keys,
        1.0 if cap is None else float(cap),
        V=width,
        SPLIT=split,
        CAPPED=cap is not None,
        BLOCK=COLUMNS_PER_PROGRAM,
        **launch_options(partials.device, 4),
    )
    return keys


def write_best(keys: Tensor, ids: Tensor, at: int) -> None:
    """Write the token of row 0 of keys int64 [8, blocks] to ids[at]; ids int32 [8]. ValueError for another place."""
    check_operand("write_best: keys", keys, torch.int64, (SLOTS, None))
    check_operand("write_best: ids", ids, torch.int32, (SLOTS,))
    if not 0 <= at < SLOTS:
        raise ValueError(f"write_best: place {at} of {SLOTS} ids")
    _write_ids(keys, 1, ids, at)


def _write_ids(keys: Tensor, rows: int, ids: Tensor, at: int) -> None:
    blocks = keys.shape[1]
    _largest[(rows,)](
        keys,
        ids,
        at,
        BLOCKS=blocks,
        BLOCK=triton.next_power_of_2(blocks),
        **launch_options(keys.device, 4),
    )


def head_keys(width: int, device: torch.device) -> Tensor:
    """Scratch of `head_argmax` for a vocabulary of this size: int64 [8, blocks]."""
    return torch.empty(SLOTS, triton.cdiv(width, COLUMNS_PER_PROGRAM), dtype=torch.int64, device=device)


@triton.jit
def tanh(x):
    """tanh in fp32, within 2 ulp; exactly 1 or -1 where it rounds to that."""
    y = tl.abs(x)
    z = y * y
    p = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(p, z, -5.37397155531e-2)
    p = tl.fma(p, z, 1.33314422036e-1)
    p = tl.fma(p, z, -3.33332819422e-1)
    near = tl.fma(p * z, y, y)
    far = 1.0 - tl.div_rn(2.0, tl.exp2(y * 2.885390082) + 1.0)  # 2 log2(e)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (tl.where(y < 0.625, near, far).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _capped(x, cap):
    """tanh(x / cap) * cap of bf16 values with a bf16 rounding per op."""
    return round_bf16(round_bf16(tanh(round_bf16(tl.div_rn(x, cap)))) * cap)


@triton.jit
def key_of(x, index):
    """One integer per value whose order is: larger x, then lower index; x fp32, index int32 -> int64."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(x != x, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def value_of(key):
    """The value of a key int64 of `key_of`, fp32."""
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _store_key(keys_ptr, x, column, V: tl.constexpr):
    """Store the largest key of a block of columns; columns past V never win."""
    key = tl.where(column < V, key_of(x, column), LEAST)
    tl.store(keys_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(key, 0))


@triton.jit
def _softcap(logits_ptr, out_ptr, cap, V: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0) * V + column
    wait_for_producers()
    x = tl.load(logits_ptr + at, mask=column < V, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, to_bf16(_capped(x, cap)), mask=column < V)


@triton.jit
def _block_keys(logits_ptr, keys_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_producers()
    x = tl.load(logits_ptr + tl.program_id(0) * V + column, mask=column < V, other=0.0).to(tl.float32)
    _store_key(keys_ptr, x, column, V)


@triton.jit
def _head_keys(
    partials_ptr,
    logits_ptr,
    keys_ptr,
    cap,
    V: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_producers()
    x = load_partials(partials_ptr, m, column, V, column < V, SPLIT)
    if CAPPED:
        x = _capped(x, cap)
    if logits_ptr is not None:
        tl.store(logits_ptr + m * V + column, to_bf16(x), mask=column < V)
    _store_key(keys_ptr, x, column, V)


@triton.jit
def best_of(keys_ptr, row, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The token of a row, from the keys of its blocks."""
    at = tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + row * BLOCKS + at, mask=at < BLOCKS, other=LEAST)
    return (0x7FFFFFFF - (tl.max(key, 0) & 0x7FFFFFFF)).to(tl.int32)


@triton.jit(do_not_specialize=["first"])
def _largest(keys_ptr, ids_ptr, first, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    wait_for_producers()
    tl.store(ids_ptr + first + row, best_of(keys_ptr, row, BLOCKS, BLOCK))
