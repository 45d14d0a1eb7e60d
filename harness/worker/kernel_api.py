"""The one place where the harness calls our kernels on their own: both backends behind the same few functions.

On a CPU the Triton kernels run in the interpreter, which is for trying the path on tiny shapes, never for timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import Weight

GROUP = 64


@dataclass(frozen=True)
class OurProduct:
    """Our quantized product on one matrix, in `copies` copies.

    pack(x bf16 [8, K]) makes rows ready; run(packed, copy, rows) -> sums [parts, 8, N], of which rows `rows` on are
    not defined. nbytes: what one call must read.
    """

    copies: int
    nbytes: int
    config: str
    pack: Callable[[Tensor], Any]
    run: Callable[[Any, int, int], Tensor]
    run_rows: Callable[[Any, int, int], Tensor]  # the same with a launch per row


@dataclass(frozen=True)
class OurAttention:
    """Our attention on one layer shape: run(q [8, H, D], k, v, position int32 [1], first, rows) -> [8, H, D].

    `position` is row 0's on the device, `first` the same number on the host, which only the reference reads.
    """

    config: str
    run: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


def use_interpreter(device: str) -> None:
    """Before triton is imported: let its kernels run on a CPU."""
    if not device.startswith("cuda"):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def product(backend: str, codes: Tensor, scales: Tensor, biases: Tensor, bits: int, copies: int) -> OurProduct:
    """Our product for codes uint8 [N, K], scales and biases bf16 [N, K / 64]."""
    build = _reference_product if backend == "reference" else _triton_product
    return build(codes, scales, biases, bits, copies)


def total(sums: Tensor) -> Tensor:
    """Partial sums [parts, 8, N] -> fp32 [8, N], added in index order: the value before its rounding."""
    out = sums[0].float().clone()
    for part in sums[1:]:
        out += part.float()
    return out


def _triton_product(codes: Tensor, scales: Tensor, biases: Tensor, bits: int, copies: int) -> OurProduct:
    use_interpreter(str(codes.device))
    from kernels.qmv import qmv, qmv_rows
    from kernels.repack import pack_weight
    from kernels.rows import pack_rows

    packed = pack_weight(_words(codes, bits), scales, biases, bits)
    copied = (replace(packed, codes=packed.codes.clone(), scales=packed.scales.clone()) for _ in range(copies - 1))
    weights = [packed, *copied]

    def run(rows: Any, copy: int, count: int) -> Tensor:
        return qmv(rows, weights[copy], count)

    def run_rows(rows: Any, copy: int, count: int) -> Tensor:
        return qmv_rows(rows, weights[copy], count)

    shape = packed.shape
    words = f"tile {shape.tile}, {shape.unroll} groups a step, {shape.stages} stages, {shape.warps} warps"
    config = f"{words}, split {shape.split}"
    return OurProduct(copies, packed.nbytes, config, lambda x: pack_rows(x, bits), run, run_rows)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes, one a byte, as a checkpoint has them: uint32 [N, K * bits / 32], the first code in the lowest bits."""
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes.contiguous().view(torch.int32).view(torch.uint32)


def _reference_product(codes: Tensor, scales: Tensor, biases: Tensor, bits: int, copies: int) -> OurProduct:
    """The plain backend: the matrix dequantized to bf16, so its bytes are those of a dense product."""
    from kernels import reference

    n, k = codes.shape
    wide = codes.view(n, k // GROUP, GROUP).float() * scales.float()[..., None] + biases.float()[..., None]
    weights = [reference.prepare(Weight(wide.view(n, k).to(torch.bfloat16), bits)) for _ in range(copies)]

    def run(x: Tensor, copy: int, count: int) -> Tensor:
        return reference.linear(x, weights[copy], count)[None]

    def run_rows(x: Tensor, copy: int, count: int) -> Tensor:
        return reference.linear_rows(x, weights[copy], count)[None]

    return OurProduct(copies, 2 * n * k, "plain torch, bf16 weights", lambda x: x.clone(), run, run_rows)


def attention(
    backend: str, heads: int, groups: int, width: int, window: int | None, ring: int, max_keys: int, device: str
) -> OurAttention:
    """Our attention for `heads` query heads on `groups` KV heads of `width`; key p in slot p mod ring.

    As in a step, the position has to be older than the launch that a call follows.
    """
    if backend == "reference":
        return _reference_attention(window, ring)
    use_interpreter(device)
    from kernels.sdpa_plan import allocate_scratch, plan_for
    from kernels.sdpa_vector import sdpa_vector

    scratch = allocate_scratch(heads, groups, width, window, max_keys, device)
    plan = plan_for(width, heads, groups)

    def run(q: Tensor, k: Tensor, v: Tensor, position: Tensor, first: int, rows: int) -> Tensor:
        return sdpa_vector(q, k, v, position, rows, window, ring, max_keys, scratch=scratch, settled=True)

    words = f"{plan.slots} slots, chunks of {plan.chunk}, {plan.warps} warps" + (
        f", blocks of {plan.block}" if plan.block else ""
    )
    return OurAttention(words, run)


def _reference_attention(window: int | None, ring: int) -> OurAttention:
    from kernels import reference

    def run(q: Tensor, k: Tensor, v: Tensor, position: Tensor, first: int, rows: int) -> Tensor:
        out = torch.zeros_like(q)
        for row in range(rows):
            seen = visible(first + row, window)
            slots = torch.tensor([key % ring for key in seen], device=q.device)
            picked = k.index_select(1, slots), v.index_select(1, slots)
            out[row] = reference.sdpa_rows(q[row : row + 1], *picked, [(0, len(seen))])[0]
        return out

    return OurAttention("plain torch, a row at a time", run)


def visible(position: int, window: int | None) -> range:
    """Keys that the row at this position sees."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


def stream(device: str, nbytes: int) -> tuple[int, list[Callable[[], object]]]:
    """Bytes read by one call, and calls to choose the fastest from: each reads a buffer of about `nbytes` once."""
    if not device.startswith("cuda"):
        data = torch.zeros(nbytes // 4, dtype=torch.int32)
        return data.numel() * 4, [lambda: data.sum()]
    from kernels.stream import LAUNCHES, stream_read

    unit = max(block * steps for block, steps in LAUNCHES)
    data = torch.zeros(nbytes // 4 // unit * unit, dtype=torch.int32, device=device)
    outs = {launch: stream_read(data, launch=launch) for launch in LAUNCHES}
    return data.numel() * 4, [_reader(stream_read, data, outs[launch], launch) for launch in LAUNCHES]


def _reader(read: Any, data: Tensor, out: Tensor, launch: tuple[int, int]) -> Callable[[], object]:
    return lambda: read(data, out, launch)
