"""A read-only stream: what this card reads per second when a kernel does nothing else.

The ceiling beside which the products' rates are stated, measured in the same run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import launch_options, release_consumers, wait_for_producers

LAUNCHES = ((4096, 16), (8192, 8), (8192, 16))
"""(elements of a block, blocks of a program) worth trying; the ceiling is the fastest of them."""

NUM_WARPS = 8


def stream_read(data: Tensor, out: Tensor | None = None, launch: tuple[int, int] = LAUNCHES[0]) -> Tensor:
    """Read int32 [n] once -> int32 [n / (block * steps)]: the sum of each program's part, wrapping.

    ValueError unless data is whole parts of `launch` = (block, steps) elements.
    """
    block, steps = launch
    programs = data.numel() // (block * steps)
    if (
        data.dtype != torch.int32
        or not data.is_contiguous()
        or programs * block * steps != data.numel()
        or not programs
    ):
        raise ValueError(
            f"stream_read: expected contiguous int32 in whole parts of {block * steps}, got {data.dtype} {data.numel()}"
        )
    if out is None:
        out = torch.empty(programs, dtype=torch.int32, device=data.device)
    _stream[(programs,)](data, out, BLOCK=block, STEPS=steps, **launch_options(data.device, NUM_WARPS))
    return out


@triton.jit
def _stream(data_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in range(STEPS):
        total += tl.load(data_ptr + first + step * BLOCK + tl.arange(0, BLOCK))
    wait_for_producers()
    release_consumers()
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))
