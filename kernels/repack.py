"""Matrices as the product streams them: tile-major, one contiguous run for each program, the same bytes in all.

MLX keeps a row's codes together; a program that works on a tile of rows would then read 32 bytes here and there. The
repack is done once at load, moves bits and loses none: `unpack_weight` gives back what `pack_weight` took.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jit import GROUP
from kernels.launch import LaunchShape, launch_shape

WORD_BITS = 32
SLAB_BYTES = 64 << 20
"""Codes that are repacked at a time: the temporary copies stay this small however large the matrix is."""
_NIBBLES = 0x0F0F0F0F


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [N, K] ready for `qmv`.

    codes: uint8 [tiles, K / 64, tile, 64 * bits / 8], or bf16 [tiles, K / 64, tile, 64] where bits is 16.
    scales: int32 [tiles, K / 64, tile], a group's bf16 bias in the upper half and its bf16 scale in the lower; empty
    where bits is 16. Rows past N are zero.
    """

    codes: Tensor
    scales: Tensor
    out_features: int
    in_features: int
    bits: int
    shape: LaunchShape

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads, without the rows past N."""
        stored = self.out_features * self.in_features * self.bits // 8
        return stored + (self.out_features * (self.in_features // GROUP) * 4 if self.bits < 16 else 0)


def pack_weight(
    words: Tensor, scales: Tensor, biases: Tensor, bits: int, shape: LaunchShape | None = None
) -> PackedWeight:
    """MLX affine codes uint32 [N, K * bits / 32], scales and biases bf16 [N, K / 64] -> PackedWeight.

    ValueError where the three do not belong together or are of another dtype.
    """
    if bits not in (4, 8):
        raise ValueError(f"pack_weight: {bits} bits; affine codes have 4 or 8")
    rows, groups = scales.shape
    width = groups * GROUP
    if words.shape != (rows, width * bits // WORD_BITS) or biases.shape != scales.shape:
        raise ValueError(
            f"pack_weight: codes {tuple(words.shape)}, scales {tuple(scales.shape)} and biases {tuple(biases.shape)}"
            f" are no {bits}-bit matrix with groups of {GROUP}"
        )
    if scales.dtype != torch.bfloat16 or biases.dtype != torch.bfloat16:
        raise ValueError(f"pack_weight: scales {scales.dtype} and biases {biases.dtype}; the product takes bfloat16")
    shape = shape or launch_shape(width, rows, bits)
    words = words.contiguous().view(torch.int32)
    scales, biases = scales.contiguous().view(torch.int16), biases.contiguous().view(torch.int16)
    tiles, stored = -(-rows // shape.tile), GROUP * bits // 8
    codes = torch.empty(tiles, groups, shape.tile, stored, dtype=torch.uint8, device=words.device)
    both = torch.empty(tiles, groups, shape.tile, dtype=torch.int32, device=words.device)
    slab = max(SLAB_BYTES // (shape.tile * groups * stored), 1) * shape.tile
    for first in range(0, rows, slab):
        part, place = slice(first, first + slab), slice(first // shape.tile, (first + slab) // shape.tile)
        spread = _spread(words[part]) if bits == 4 else words[part]
        codes[place] = _tiles(spread.view(torch.uint8).view(-1, groups, stored), shape.tile)
        pairs = (biases[part].int() << 16) | (scales[part].int() & 0xFFFF)
        both[place] = _tiles(pairs.unsqueeze(-1), shape.tile).squeeze(-1)
    return PackedWeight(codes, both, rows, width, bits, shape)


def pack_dense(weight: Tensor, shape: LaunchShape | None = None) -> PackedWeight:
    """A bf16 matrix [N, K] -> PackedWeight of 16 bits; ValueError on another dtype or a ragged K."""
    if weight.dtype != torch.bfloat16 or weight.ndim != 2 or weight.shape[1] % GROUP:
        raise ValueError(
            f"pack_dense: expected bfloat16 [N, K] with K a multiple of {GROUP}, got {weight.dtype}"
            f" {tuple(weight.shape)}"
        )
    rows, width = weight.shape
    shape = shape or launch_shape(width, rows, 16)
    codes = _tiles(weight.contiguous().view(rows, width // GROUP, GROUP), shape.tile).contiguous()
    return PackedWeight(codes, torch.empty(0, dtype=torch.int32, device=weight.device), rows, width, 16, shape)


def unpack_weight(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack_weight`: words uint32 [N, K * bits / 32], scales and biases bf16 [N, K / 64]."""
    rows = weight.out_features
    codes = _rows(weight.codes, rows).reshape(rows, -1)
    both = _rows(weight.scales.unsqueeze(-1), rows).squeeze(-1)
    scales = both.to(torch.int16).view(torch.bfloat16)
    biases = (both >> 16).to(torch.int16).view(torch.bfloat16)
    words = codes.view(torch.int32)
    return (_gather(words) if weight.bits == 4 else words).view(torch.uint32), scales, biases


def unpack_dense(weight: PackedWeight) -> Tensor:
    """The inverse of `pack_dense`: bf16 [N, K]."""
    return _rows(weight.codes, weight.out_features).reshape(weight.out_features, -1)


def dequantize_packed(weight: PackedWeight, dtype: torch.dtype = torch.float64) -> Tensor:
    """scale * code + bias [N, K], computed in `dtype`: what the product means."""
    if weight.bits == 16:
        return unpack_dense(weight).to(dtype)
    rows = weight.out_features
    words, scales, biases = unpack_weight(weight)
    stored = words.view(torch.uint8).view(rows, -1)
    if weight.bits == 4:
        stored = torch.stack((stored & 15, stored >> 4), -1)
    codes = stored.reshape(rows, -1, GROUP).to(dtype)
    return (codes * scales.to(dtype).unsqueeze(-1) + biases.to(dtype).unsqueeze(-1)).flatten(1)


def _spread(words: Tensor) -> Tensor:
    """Eight nibbles of each int32 -> the even ones in bits 3..6 of its bytes, the odd ones there after a rotation."""
    even, odd = words & _NIBBLES, (words >> 4) & _NIBBLES
    return (even << 3) | _rotate_left_4(odd << 3)


def _gather(words: Tensor) -> Tensor:
    """The inverse of `_spread`."""
    even = (words >> 3) & _NIBBLES
    odd = (((words >> 4) & 0x0FFFFFFF) | (words << 28)) >> 3 & _NIBBLES
    return even | (odd << 4)


def _rotate_left_4(words: Tensor) -> Tensor:
    return (words << 4) | ((words >> 28) & 15)


def _tiles(x: Tensor, tile: int) -> Tensor:
    """[N, groups, w] -> [tiles, groups, tile, w], zeros past N; may be a view."""
    rows, groups, width = x.shape
    tiles = -(-rows // tile)
    if tiles * tile != rows:
        x = torch.cat((x, x.new_zeros(tiles * tile - rows, groups, width)))
    return x.view(tiles, tile, groups, width).transpose(1, 2)


def _rows(x: Tensor, rows: int) -> Tensor:
    """The inverse of `_tiles` -> [N, groups, w]."""
    tiles, groups, tile, width = x.shape
    return x.transpose(1, 2).reshape(tiles * tile, groups, width)[:rows].contiguous()
