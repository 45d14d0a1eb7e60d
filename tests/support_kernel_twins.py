"""Both forms of the product for the compile gate: the GPU's, and the one that the interpreter can run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.gate.entry import PRODUCT, Entry, Expect
from kernels.jit import GROUP, SLOTS
from kernels.launch import LaunchShape
from kernels.qmv import qmv, qmv_plain
from kernels.repack import PackedWeight
from kernels.rows import new_rows

TWINS = {4: LaunchShape(64, 2, 3, 2, 4), 8: LaunchShape(64, 1, 3, 2, 4), 16: LaunchShape(32, 1, 4, 1, 2)}
"""A launch shape for each number of bits."""


def call(product: Callable[..., Tensor], bits: int, m: int) -> None:
    """One product of 4,096 inputs and 1,024 outputs."""
    shape, groups = TWINS[bits], 4096 // GROUP
    stored, dtype = (GROUP, torch.bfloat16) if bits == 16 else (GROUP * bits // 8, torch.uint8)
    codes = torch.empty(1024 // shape.tile, groups, shape.tile, stored, dtype=dtype)
    scales = torch.empty(codes.shape[:3] if bits < 16 else (0,), dtype=torch.int32)
    weight = PackedWeight(codes, scales, 1024, 4096, bits, shape)
    product(new_rows(4096, bits, torch.device("cpu")), weight, m)


def gate_entries() -> list[Entry]:
    """Two entries for each number of bits."""
    forms = (("ahead", qmv, "_qmv_ahead", PRODUCT), ("plain", qmv_plain, "_qmv", Expect(mma="HMMA", rows=SLOTS)))
    return [
        Entry(f"{name} {bits}", partial(call, form, bits), {kernel: expect})
        for bits in TWINS
        for name, form, kernel, expect in forms
    ]
