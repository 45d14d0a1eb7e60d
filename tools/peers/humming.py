"""humming-kernels: compiled at run time for each shape; affine weights with floating-point zero points.

Its function is w = (q - z) * s with z = -b / s in bf16. It chooses its launch itself; where that splits K, one call
and the next may differ in bytes.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from tools.peers.base import GROUP, Affine, Product, clones, nbytes, needs_cuda


def available(device: str) -> str | None:
    """None, or why not."""
    if reason := needs_cuda(device):
        return reason
    if find_spec("humming") is None:
        return "humming-kernels is not installed"
    try:
        import humming.layer  # noqa: F401
    except Exception as error:  # its own dependencies, or no compiler
        return f"humming-kernels does not import: {str(error).splitlines()[0][:160]}"
    return None


def version() -> str:
    """Version of the package."""
    return f"humming-kernels {metadata.version('humming-kernels')}"


def supports(k: int, n: int, bits: int) -> str | None:
    """None, or why not."""
    return None


def build(affine: Affine, copies: int) -> Product:
    """Load the codes as they are, let the layer transform them, copy the layer's tensors, call."""
    from humming.forward import humming_forward
    from humming.layer import HummingLayer

    config = {
        "dtype": f"uint{affine.bits}",
        "group_size": GROUP,
        "has_zero_point": True,
        "is_fp_zero_point": True,
        "scale_dtype": "bfloat16",
    }
    zeros = (-affine.biases.float() / affine.scales.float()).to(torch.bfloat16)
    tensors = {"weight": affine.words(), "weight_scale": affine.scales, "zero_point": zeros}
    layer = HummingLayer(shape_n=affine.n, shape_k=affine.k, weight_config=config, torch_dtype=torch.bfloat16).to(
        affine.codes.device
    )
    layer.load_from_tensors(tensors)
    layer.transform()
    names = [name for name in ("weight", "weight_scale", "zero_point") if getattr(layer, name, None) is not None]
    own = {name: getattr(layer, name).data for name in names}
    sets = [dict(zip(names, row, strict=True)) for row in zip(*(clones(own[n], copies) for n in names), strict=True)]

    def call(x: Tensor, copy: int) -> Tensor:
        return humming_forward(layer.humming_config, inputs=x, locks=layer.locks, **sets[copy])

    wide = affine.scales.float()
    return Product(nbytes(*own.values()), call, wide, -zeros.float() * wide, note="floating-point zero points")
