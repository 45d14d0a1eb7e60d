"""What all Triton kernels share: launch options, rounding, the dot, and dependent launches.

The interpreter gets bf16 arithmetic, bf16 products and the rounding to bf16 silently wrong and knows no inline
assembly. Kernels therefore go through the helpers here, which take another form under `TRITON_INTERPRET=1`: operands
widened to fp32, products as broadcast, multiply and sum, rounding by integers. Values there are compared with torch
references, never with a GPU's bits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in the interpreter; decided when triton is imported."""

GROUP = 64
"""Elements of K that share a scale and a bias; every width that is packed for a product is a multiple of it."""

SLOTS = 8
"""Rows of every activation tile: the MMA's n8 operand. Fewer real rows never make a smaller tile."""


Release = Literal["first", "early", "late"]
"""When a launch lets the next one's programs start (decisions 8, 15 and 16): before its wait, right after it, or when
its own are done."""

MOST_REGISTERS = 255
"""What a thread can have."""


def launch_options(device: torch.device, num_warps: int, num_stages: int = 1, alone: bool = False) -> dict[str, Any]:
    """Options of every launch: no contraction of multiply and add, and a dependent launch where the card has one.

    With a dependent launch the next kernel's programs start while this one drains; each waits in
    `wait_for_producers` before it touches what an earlier launch wrote. A kernel whose few programs each read many
    partial sums says `alone`: ptxas, which else saves registers for programs that will never come, then issues all
    loads before the first add instead of three to six at a time. Neither changes the order of a sum.
    """
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    if alone:
        options["maxnreg"] = MOST_REGISTERS
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        options["launch_pdl"] = True
    return options


def check_operand(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """ValueError unless x is contiguous, 16-byte aligned, of this dtype and shape (None: any size).

    A lost alignment or another stride compiles another kernel, with another order of sums.
    """
    fits = len(x.shape) == len(shape) and all(want in (None, have) for want, have in zip(shape, x.shape, strict=True))
    if not fits or x.dtype != dtype:
        wanted = "x".join("?" if size is None else str(size) for size in shape)
        found = "x".join(map(str, x.shape))
        raise ValueError(f"{name}: expected {dtype} {wanted}, got {x.dtype} {found}")
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(f"{name}: must be contiguous and 16-byte aligned; a view compiles another kernel")


LATE = tl.constexpr("late")


@triton.jit
def wait_for_producers(release: tl.constexpr = LATE):
    """Wait until every earlier launch has finished and its writes are visible. Every program calls it once, before
    its first write and before its first read of what a launch wrote that may still be running.

    `release`: when the next launch's programs may start. One that releases first says nothing of the launches before
    it, so what follows it may read before its own wait only what was there when the step's first launch had ended:
    weights, the position, cosines and sines. Behind one that releases after its wait, what was written before that one.
    """
    if not INTERPRETED:
        if release == "first":
            release_consumers()
        tl.extra.cuda.gdc_wait()
        if release == "early":
            release_consumers()


@triton.jit
def release_consumers():
    """Let the next launch's programs start once every program here has said so or ended."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def to_bf16(x):
    """fp32 to bf16, to nearest even; the interpreter's own cast truncates."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """The bf16 value nearest to x, kept in fp32."""
    return to_bf16(x).to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation; a [m, k], b [k, n] in bf16 or fp16, acc fp32 [m, n]."""
    if INTERPRETED:
        wide = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        return acc + tl.sum(wide, axis=1)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) from a biased exponent in 1..254, exactly; int32 -> fp32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def half_exponent(x, axis: tl.constexpr):
    """Biased exponent e of the power of two that puts the largest |x| along `axis` into [2^14, 2^15).

    Times 2^(e - 127) every bf16 value down to 2^-31 of the largest becomes an fp16 value exactly. x fp32.
    """
    return half_exponent_of(tl.max(x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.int32))


@triton.jit
def half_exponent_of(largest):
    """The same from the bits of the largest |x|, int32."""
    return tl.minimum(268 - (largest >> 23), 253)  # 14 + 2 * 127 - its exponent; 253 keeps the inverse normal
