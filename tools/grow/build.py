"""Recipes to stored tensors: packed as MLX stores them, or as floats. One matrix at a time, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quantize import GROUP_SIZE
from tools.grow.codes import Packed, empty, place
from tools.grow.errors import GrowError
from tools.grow.noise import noise
from tools.grow.recipe import Make, Matrix, Vector

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint32: "U32"}


@dataclass(frozen=True)
class Part:
    """One stored tensor before it is built."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Module:
    """A matrix or a vector, what it is stored as, and how to build it. `name` is the loader's, with `.weight`."""

    name: str
    stored_name: str
    shape: tuple[int, ...]
    bits: int | None
    floats: torch.dtype
    make: Make
    seed: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors in the file: one, or a matrix's words, scales and biases."""
        if self.bits is None:
            return (Part(self.stored_name, self.floats, self.shape),)
        (rows, columns), module = self.shape, self.stored_name.removesuffix(".weight")
        groups = (rows, columns // GROUP_SIZE)
        return (
            Part(self.stored_name, torch.uint32, (rows, columns * self.bits // 32)),
            Part(f"{module}.scales", torch.bfloat16, groups),
            Part(f"{module}.biases", torch.bfloat16, groups),
        )

    def build(self, device: str) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its values."""
        recipe = self.make()
        if isinstance(recipe, Vector):
            value = torch.full(self.shape, recipe.fill, device=device)
            value[recipe.index.to(device)] = recipe.values.to(device)
            yield self.parts[0], value.to(self.floats)
            return
        packed = self._noise(device) if not isinstance(recipe, Matrix) else self._assemble(recipe, device)
        repeat = recipe.repeat if isinstance(recipe, Matrix) else 1
        if self.bits is None:
            values: tuple[Tensor, ...] = (packed.floats(self.floats),)
        else:
            values = (packed.words, packed.scales.bfloat16(), packed.biases.bfloat16())
        for part, tensor in zip(self.parts, values, strict=True):
            yield part, (tensor.repeat(repeat, 1) if repeat > 1 else tensor).view(part.dtype)

    def _noise(self, device: str) -> Packed:
        rows, columns = self.shape
        return noise(rows, columns, self.bits or 8, self.name, self.seed, device)

    def _assemble(self, recipe: Matrix, device: str) -> Packed:
        rows, columns = self.shape
        least = max(placement.codes.bits for placement in recipe.placements)
        if self.bits is not None and self.bits < least:
            raise GrowError(f"{self.name}: nano has {least} bits and the geometry {self.bits}; only an MLP is split")
        packed = empty(rows // recipe.repeat, columns, self.bits or least, device)
        for placement in recipe.placements:
            place(packed, placement.codes, placement.rows, placement.groups)
        return packed
