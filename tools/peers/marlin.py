"""Marlin, from vLLM's bare library: `torch.ops._C.marlin_gemm`, loaded from the path in $HARNESS_MARLIN_LIBRARY.

Symmetric form: w = (q - 2^(bits - 1)) * s, without zero points, so it reads 6 % fewer bytes at 4 bits than an affine
matrix. Its zero points are integers, which the affine form does not map to.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tools.peers.base import Affine, Product, clones, nbytes, needs_cuda

LIBRARY = "HARNESS_MARLIN_LIBRARY"
TYPE_BIAS_SHIFT = 17  # vLLM's ScalarType as an integer: exponent 8 bits, mantissa 8, sign 1, bias 32, ...
IEEE_SHIFT = 50  # ... finite-only 1, then how NaN is represented
SCALE_ORDER = [row + 8 * column for row in range(8) for column in range(8)]


def available(device: str) -> str | None:
    """None, or why not."""
    return needs_cuda(device) or _load(os.environ.get(LIBRARY, ""))


def version() -> str:
    """Name of the library file."""
    return Path(os.environ.get(LIBRARY, "")).name


@lru_cache(maxsize=1)
def _load(path: str) -> str | None:
    if not path:
        return f"${LIBRARY} is not set; it names vLLM's _C.abi3.so"
    if not Path(path).is_file():
        return f"${LIBRARY} names no file"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"the library does not load: {str(error).splitlines()[0][:160]}"
    missing = [name for name in ("marlin_gemm", "gptq_marlin_repack") if not hasattr(torch.ops._C, name)]
    return f"the library has no {', '.join(missing)}" if missing else None


def supports(k: int, n: int, bits: int) -> str | None:
    """None, or why not."""
    if n % 64 or k % 128:
        return f"needs N in 64s and K in 128s, got {k} x {n}"
    return None


def build(affine: Affine, copies: int) -> Product:
    """Pack along K as GPTQ does, let the library repack, permute the scales, copy, call."""
    bits, k, n = affine.bits, affine.k, affine.n
    device = affine.codes.device
    empty = torch.empty(0, dtype=torch.int32, device=device)
    packed = torch.ops._C.gptq_marlin_repack(_pack_along_k(affine), empty, k, n, bits, False)
    scales = affine.scales.t().contiguous().view(-1, len(SCALE_ORDER))[:, SCALE_ORDER].reshape(-1, n).contiguous()
    half = 1 << (bits - 1)
    type_id = (bits << 8) | (half << TYPE_BIAS_SHIFT) | (1 << IEEE_SHIFT)
    workspace = torch.zeros(
        torch.cuda.get_device_properties(device).multi_processor_count, dtype=torch.int32, device=device
    )
    weights, scale_copies = clones(packed, copies), clones(scales, copies)

    def call(x: Tensor, copy: int) -> Tensor:
        return torch.ops._C.marlin_gemm(
            x,
            None,  # output
            weights[copy],
            None,  # bias
            scale_copies[copy],
            None,  # scales of the activations
            None,  # global scale
            None,  # zero points
            empty,  # no reordering of K
            empty,
            workspace,
            type_id,
            x.shape[0],
            n,
            k,
            True,  # K is whole
            False,  # no atomics
            True,  # fp32 reduction
            False,  # integer zero points
        )

    wide = affine.scales.float()
    note = "symmetric: no zero points, fewer bytes than the affine form"
    return Product(nbytes(packed, scales), call, wide, -half * wide, note=note)


def _pack_along_k(affine: Affine) -> Tensor:
    """int32 [K / codes per word, N], the first code in the lowest bits."""
    per_word = 32 // affine.bits
    codes = affine.codes.t().reshape(affine.k // per_word, per_word, affine.n)
    words = torch.zeros(affine.k // per_word, affine.n, dtype=torch.int32, device=codes.device)
    for place in range(per_word):
        words |= codes[:, place].to(torch.int32) << (affine.bits * place)
    return words
