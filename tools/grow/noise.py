"""Full random matrices as codes: integer hashing alone, so a seed gives the same bytes on every device.

Uniform codes with a scale of either sign per group: what a random matrix costs, at the spread K ** -0.5 that keeps
activations of unit size.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from engine.quantize import GROUP_SIZE
from tools.grow.codes import Packed


def noise(rows: int, columns: int, bits: int, name: str, seed: int, device: str) -> Packed:
    """A random matrix [rows, columns] that depends on name and seed alone; scales are exact in bf16."""
    groups = columns // GROUP_SIZE
    words = hashed(rows * columns * bits // 32, f"{seed}/{name}/codes", device).view(rows, -1)
    choice = hashed(rows * groups, f"{seed}/{name}/scales", device).view(rows, groups)
    levels = 1 << bits
    unit = torch.tensor((12 / (levels * levels - 1) / columns) ** 0.5, dtype=torch.bfloat16).float().item()
    scales = (unit * (0.75 + (choice & 7).float() / 16)).bfloat16().float()
    scales = torch.where((choice & 8) == 0, scales, -scales)
    return Packed(words, scales, scales * -(levels // 2), bits)


def hashed(count: int, label: str, device: str) -> Tensor:
    """`count` well mixed int32 words of a stream that `label` names (multiply and xor-shift, 32 bits, wrapping)."""
    digest = hashlib.sha256(label.encode()).digest()
    start, step = _signed(int.from_bytes(digest[:4], "little")), int.from_bytes(digest[4:8], "little") | 1
    x = torch.arange(count, dtype=torch.int32, device=device).mul_(_signed(step)).add_(start)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        _xor_shift(x, shift)
        x.mul_(_signed(factor))
    _xor_shift(x, 16)
    return x


def _xor_shift(x: Tensor, shift: int) -> None:
    x.bitwise_xor_((x >> shift) & ((1 << (32 - shift)) - 1))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
