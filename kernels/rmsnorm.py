"""RMS norm, and the pieces that the fused norms (`kernels.fused_norms`) share with it.

Every row is one program; M only says how many programs there are.
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
    to_bf16,
    wait_for_producers,
)
from kernels.rows import Rows, new_rows
from kernels.tree import tree_sum


def rmsnorm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last dim; fp32 inside, one rounding.

    x bf16 [..., D]; weight fp32 [D], or [heads, D] for x [..., heads, D], or None. ValueError on other shapes.
    """
    x = x.contiguous()
    width = x.shape[-1]
    check_operand("rmsnorm: x", x, torch.bfloat16, tuple(x.shape))
    heads = 1
    if weight is not None:
        heads = weight.numel() // width
        if weight.shape not in ((width,), (1, width), (*x.shape[-2:-1], width)):
            raise ValueError(
                f"rmsnorm: weight {tuple(weight.shape)} for x {tuple(x.shape)}; expected [{width}] or one per head"
            )
        check_operand("rmsnorm: weight", weight, torch.float32, tuple(weight.shape))
    out = torch.empty_like(x)
    block = max(triton.next_power_of_2(width), 16)
    if x.numel():
        _rmsnorm[(x.numel() // (width * heads), heads)](
            x, weight, out, float(eps), D=width, BLOCK=block, **launch_options(x.device, _warps(block))
        )
    return out


def check_rows(where: str, rows: int) -> None:
    """ValueError unless 1 <= rows <= 8."""
    if not 1 <= rows <= SLOTS:
        raise ValueError(f"{where}: {rows} rows; a call takes 1 to {SLOTS}")


def checked_rows(where: str, out: Rows | None, width: int, bits: int, device: torch.device) -> Rows:
    """`out` where it fits this width and these bits, new rows where none are given, else ValueError."""
    if out is None:
        return new_rows(width, bits, device)
    if out.width != width or out.bits != bits:
        raise ValueError(f"{where}: rows of {out.width} at {out.bits} bits given, {width} at {bits} bits needed")
    return out


def _warps(block: int) -> int:
    """Warps of a norm, from the width alone: 4 elements a thread up to 1,024. The sum's bytes do not depend on it."""
    return min(max(block // 128, 1), 8)


@triton.jit
def inverse_rms(squares, eps, D: tl.constexpr):
    """(squares / D + eps)^-0.5 from a row's sum of squares."""
    return tl.rsqrt(eps + squares * (1.0 / D))


@triton.jit
def _normed(x, weight, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """x fp32 [BLOCK] of bf16 values, zero past D -> its norm in fp32, not yet rounded."""
    return x * inverse_rms(tree_sum(x * x, BLOCK), eps, D) * weight


@triton.jit
def _rmsnorm(x_ptr, weight_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    if weight_ptr is None:
        weight = 1.0
    else:
        weight = tl.load(weight_ptr + head * D + at, mask=at < D, other=0.0)
    row = tl.program_id(0) * tl.num_programs(1) + head
    wait_for_producers()
    x = tl.load(x_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + at, to_bf16(_normed(x, weight, eps, D, BLOCK)), mask=at < D)
