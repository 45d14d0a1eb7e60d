"""tinygemm: torch's own int4 product, `torch._weight_int4pack_mm`.

Its function is w = (q - 8) * s + z, so an affine matrix maps exactly but for one rounding: z = b + 8 s in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.peers.base import GROUP, Affine, Product, clones, nbytes, needs_cuda

INNER_K_TILES = 8


def available(device: str) -> str | None:
    """None, or why not."""
    if reason := needs_cuda(device):
        return reason
    if not hasattr(torch, "_weight_int4pack_mm"):
        return f"torch {torch.__version__} has no _weight_int4pack_mm"
    return None


def version() -> str:
    """It is part of torch."""
    return f"torch {torch.__version__}"


def supports(k: int, n: int, bits: int) -> str | None:
    """None, or why not."""
    if bits != 4:
        return f"has no {bits}-bit weights in groups"
    if n % 8 or k % (16 * INNER_K_TILES):
        return f"needs N in eights and K in {16 * INNER_K_TILES}s, got {k} x {n}"
    return None


def build(affine: Affine, copies: int) -> Product:
    """Pack once, copy, call."""
    # Two codes a byte, the even one in the high half.
    packed = torch._convert_weight_to_int4pack(
        ((affine.codes[:, 0::2] << 4) | affine.codes[:, 1::2]).contiguous(), INNER_K_TILES
    )
    zeros = (affine.biases.float() + 8 * affine.scales.float()).to(torch.bfloat16)
    scales_zeros = torch.stack((affine.scales, zeros), -1).transpose(0, 1).contiguous()  # [K / 64, N, 2]
    weights, pairs = clones(packed, copies), clones(scales_zeros, copies)

    def call(x: Tensor, copy: int) -> Tensor:
        return torch._weight_int4pack_mm(x, weights[copy], GROUP, pairs[copy])

    return Product(nbytes(packed, scales_zeros), call, affine.scales.float(), zeros.float() - 8 * affine.scales.float())
