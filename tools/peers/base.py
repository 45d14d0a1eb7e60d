"""What every peer speaks: an affine quantized matrix in, a product that can be called and timed out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP = 64


@dataclass(frozen=True)
class Affine:
    """w[n, k] = scales[n, k / 64] * codes[n, k] + biases[n, k / 64].

    codes uint8 [N, K], one code a byte; scales and biases bf16 [N, K / 64].
    """

    codes: Tensor
    scales: Tensor
    biases: Tensor
    bits: int

    @property
    def n(self) -> int:
        """Outputs."""
        return int(self.codes.shape[0])

    @property
    def k(self) -> int:
        """Inputs."""
        return int(self.codes.shape[1])

    def words(self) -> Tensor:
        """Codes packed along K into int32 [N, K * bits / 32], the first code in the lowest bits: MLX's layout."""
        if self.bits == 8:
            return self.codes.contiguous().view(torch.int32)
        return (self.codes[:, 0::2] | (self.codes[:, 1::2] << 4)).contiguous().view(torch.int32)


@dataclass(frozen=True)
class Product:
    """A peer made ready for one matrix, with copies of it to rotate over.

    call(x bf16 [M, K], copy) -> its output; a list of outputs where `batch` is set: then one call runs many copies and
    waits for them. scales and biases are those of the function that the peer computes, for its reference.
    """

    nbytes: int
    call: Callable[[Tensor, int], object]
    scales: Tensor
    biases: Tensor
    clock: Literal["graph", "host"] = "graph"
    note: str = ""
    to_torch: Callable[[object], Tensor] | None = None
    batch: Callable[[Tensor, list[int]], None] | None = None

    def output(self, x: Tensor) -> Tensor:
        """The product with the first copy, as a tensor [M, N]."""
        out = self.call(x, 0)
        return self.to_torch(out) if self.to_torch is not None else out  # type: ignore[return-value]


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def clones(tensor: Tensor, count: int) -> list[Tensor]:
    """The tensor and count - 1 copies at other addresses."""
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def needs_cuda(device: str) -> str | None:
    """Why a CUDA kernel cannot run on this device, or None."""
    return None if device.startswith("cuda") else f"needs CUDA, and this run is on {device}"
