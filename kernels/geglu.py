"""GeGLU: gelu_tanh(gate) * up, with one rounding or one per op, alone or between gate_up and down.

gelu_tanh(x) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form without its cancellation, so
the negative tail keeps its digits. Elementwise: a row's bytes cannot depend on another row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import (
    GROUP,
    SLOTS,
    Release,
    check_operand,
    launch_options,
    round_bf16,
    to_bf16,
    wait_for_producers,
)
from kernels.rmsnorm import check_rows, checked_rows
from kernels.rows import Rows, load_partials, store_rows

COLUMNS_PER_PROGRAM = 1024
GROUPS_PER_PROGRAM = 2
"""Small enough that one row of the narrowest MLP still covers most of a card."""


def geglu_fused(gate: Tensor, up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up in fp32 with one rounding; gate and up bf16 [n, I]. ValueError on other shapes."""
    return _launch_geglu("geglu_fused", gate, up, fused=True)


def geglu_ops(gate: Tensor, up: Tensor) -> Tensor:
    """gelu_tanh(gate) rounded, times up rounded; gate and up bf16 [n, I]. ValueError on other shapes."""
    return _launch_geglu("geglu_ops", gate, up, fused=False)


def geglu_rows(
    partials: Tensor, rows: int, bits: int, fused: bool, out: Rows | None = None, release: Release = "late"
) -> Rows:
    """From gate_up's partial sums to the rows of `down`.

    partials fp32 [split, 8, 2 I], gate in the first I columns, up in the rest; both rounded before the op -> `Rows`
    of width I. Rows past `rows` are not written. ValueError unless I is a multiple of 64. `release`: when the next
    launch's programs may start.
    """
    check_operand("geglu_rows: partials", partials, torch.float32, (None, SLOTS, None))
    check_rows("geglu_rows", rows)
    split, _, columns = partials.shape
    if columns % (2 * GROUP):
        raise ValueError(f"geglu_rows: {columns} columns are not two halves of whole groups of {GROUP}")
    out = checked_rows("geglu_rows", out, columns // 2, bits, partials.device)
    grid = (rows, triton.cdiv(columns // 2 // GROUP, GROUPS_PER_PROGRAM))
    _geglu_rows[grid](
        partials,
        out.values,
        out.sums,
        out.scales,
        I=columns // 2,
        SPLIT=split,
        BITS=bits,
        FUSED=fused,
        G=GROUPS_PER_PROGRAM,
        RELEASE=release,
        **launch_options(partials.device, 1),
    )
    return out


def _launch_geglu(where: str, gate: Tensor, up: Tensor, fused: bool) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    check_operand(f"{where}: gate", gate, torch.bfloat16, (None, None))
    check_operand(f"{where}: up", up, torch.bfloat16, tuple(gate.shape))
    count, width = gate.shape
    out = torch.empty_like(gate)
    if gate.numel():
        _geglu[(count, triton.cdiv(width, COLUMNS_PER_PROGRAM))](
            gate, up, out, I=width, FUSED=fused, BLOCK=COLUMNS_PER_PROGRAM, **launch_options(gate.device, 4)
        )
    return out


@triton.jit
def gelu_tanh(x):
    """gelu in its tanh form, fp32; 0 or x exactly where the tail has gone, NaN stays NaN."""
    inner = x + 0.044715 * x * x * x
    return x / (1.0 + tl.exp2(inner * -2.302208198))  # 2 sqrt(2 / pi) log2(e)


@triton.jit
def _gated(gate, up, FUSED: tl.constexpr):
    """bf16 values gate and up in fp32 -> the product in fp32, not yet rounded."""
    if FUSED:
        return gelu_tanh(gate) * up
    else:
        return round_bf16(gelu_tanh(gate)) * up


@triton.jit
def _geglu(gate_ptr, up_ptr, out_ptr, I: tl.constexpr, FUSED: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < I
    at = tl.program_id(0) * I + column
    wait_for_producers()
    gate = tl.load(gate_ptr + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, to_bf16(_gated(gate, up, FUSED)), mask=real)


@triton.jit
def _geglu_rows(
    partials_ptr,
    values_ptr,
    sums_ptr,
    scales_ptr,
    I: tl.constexpr,  # noqa: E741
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    FUSED: tl.constexpr,
    G: tl.constexpr,
    RELEASE: tl.constexpr,
):
    m = tl.program_id(0)
    group = tl.program_id(1) * G + tl.arange(0, G)
    valid = group < I // 64
    column = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    wait_for_producers(RELEASE)
    gate = load_partials(partials_ptr, m, column, 2 * I, valid[:, None], SPLIT)
    up = load_partials(partials_ptr, m, column + I, 2 * I, valid[:, None], SPLIT)
    x = round_bf16(_gated(gate, up, FUSED))
    store_rows(values_ptr, sums_ptr, scales_ptr, x, group, m, I, valid, BITS)
