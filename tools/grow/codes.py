"""A quantized matrix as codes, scales and biases, and the changes that keep every code.

Nano's matrices are never quantized a second time: rows and groups of 64 move, scales are multiplied, 8-bit codes
split into two 4-bit ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.quantize import GROUP_SIZE, MIN_SCALE, dequantize, pack, unpack


@dataclass(frozen=True)
class Codes:
    """codes int32 [N, G, 64], scales and biases fp32 [N, G]: weight = scale * code + bias."""

    codes: Tensor
    scales: Tensor
    biases: Tensor
    bits: int

    @property
    def rows(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def groups(self) -> int:
        """Groups of 64 in a row."""
        return self.codes.shape[1]

    def scaled(self, factor: float) -> Codes:
        """The same codes for a matrix `factor` times as large."""
        return replace(self, scales=self.scales * factor, biases=self.biases * factor)

    def columns(self, start: int, end: int) -> Codes:
        """The groups start..end-1 of every row."""
        return Codes(self.codes[:, start:end], self.scales[:, start:end], self.biases[:, start:end], self.bits)

    def split(self) -> tuple[Codes, Codes]:
        """8 bits as 4 and 4: (high, low) matrices whose sum is this one. Scales stay exact in bf16 (times 16)."""
        high = Codes(self.codes >> 4, self.scales * 16, self.biases, 4)
        return high, Codes(self.codes & 15, self.scales, torch.zeros_like(self.biases), 4)

    def spread(self, factor: int) -> Codes:
        """Column c moves to `factor` * c: each group becomes `factor` groups under its own scale and bias.

        Columns between hold the code nearest to zero; their inputs are zero, so its remainder never counts.
        """
        nearest = torch.round(-self.biases / self.scales).clamp(0, 2**self.bits - 1).to(self.codes.dtype)
        wide = nearest[:, :, None, None].expand(-1, -1, GROUP_SIZE, factor).clone()
        wide[..., 0] = self.codes
        shape = (self.rows, self.groups * factor, GROUP_SIZE)
        scales, biases = (x.repeat_interleave(factor, 1) for x in (self.scales, self.biases))
        return Codes(wide.reshape(shape), scales, biases, self.bits)


def from_packed(words: Tensor, scales: Tensor, biases: Tensor, bits: int, device: str) -> Codes:
    """A stored module's parts as Codes."""
    codes = unpack(words.to(device), bits).view(words.shape[0], -1, GROUP_SIZE)
    return Codes(codes, scales.to(device).float(), biases.to(device).float(), bits)


@dataclass(frozen=True)
class Packed:
    """Words int32 [N, K * bits / 32], scales and biases fp32 [N, K / 64]."""

    words: Tensor
    scales: Tensor
    biases: Tensor
    bits: int

    def floats(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K], rounded once."""
        return dequantize(self.words, self.scales, self.biases, self.bits, GROUP_SIZE, dtype)


def empty(rows: int, columns: int, bits: int, device: str) -> Packed:
    """A matrix of zeros, as `mx.quantize` writes one: code 0, the least scale, no bias."""
    groups = columns // GROUP_SIZE
    words = torch.zeros(rows, columns * bits // 32, dtype=torch.int32, device=device)
    return Packed(
        words, torch.full((rows, groups), -MIN_SCALE, device=device), torch.zeros(rows, groups, device=device), bits
    )


def place(into: Packed, codes: Codes, rows: Tensor, groups: Tensor) -> None:
    """Write codes into a matrix: row i to rows[i], its group g to groups[g]."""
    per_group = GROUP_SIZE * into.bits // 32
    words = pack(codes.codes.flatten(1), into.bits).view(torch.int32).view(codes.rows, codes.groups, per_group)
    where = rows.to(words.device)[:, None], groups.to(words.device)[None]
    into.words.view(into.words.shape[0], -1, per_group)[where] = words
    into.scales[where], into.biases[where] = codes.scales, codes.biases
