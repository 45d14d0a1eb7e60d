"""MLX: `mx.quantized_matmul` on the same codes. No graph: calls are timed by the host's clock, launches included.

On a machine without CUDA it runs on the CPU, which serves to try the whole path, not to compare speed.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.peers.base import GROUP, Affine, Product


def available(device: str) -> str | None:
    """None, or why not."""
    if find_spec("mlx") is None:
        return "mlx is not installed"
    try:
        import mlx.core as mx
    except ImportError as error:
        return f"mlx does not import: {str(error).splitlines()[0][:160]}"
    if device.startswith("cuda") and not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        return "this mlx is built without CUDA"
    return None


def version() -> str:
    """Version of the package."""
    return f"mlx {metadata.version('mlx')}"


def supports(k: int, n: int, bits: int) -> str | None:
    """None, or why not."""
    return None


def build(affine: Affine, copies: int) -> Product:
    """The codes word for word, as many times as asked, and a call that only queues."""
    import mlx.core as mx

    mx.set_default_device(mx.gpu if affine.codes.is_cuda else mx.cpu)
    words = affine.words().cpu().numpy().view(np.uint32)
    scales, biases = (_to_mlx(mx, tensor) for tensor in (affine.scales, affine.biases))
    sets = [(mx.array(words), scales + 0, biases + 0) for _ in range(copies)]
    mx.eval(sets)
    inputs: dict[tuple[int, int], Any] = {}

    def call(x: Tensor, copy: int) -> Any:
        key = (x.data_ptr(), x.shape[0])
        if key not in inputs:
            inputs[key] = _to_mlx(mx, x)
            mx.eval(inputs[key])
        weight, scale, bias = sets[copy]
        return mx.quantized_matmul(inputs[key], weight, scale, bias, transpose=True, group_size=GROUP, bits=affine.bits)

    def batch(x: Tensor, order: list[int]) -> None:
        mx.eval([call(x, copy) for copy in order])
        mx.synchronize()

    def to_torch(out: Any) -> Tensor:
        return torch.from_numpy(np.array(out.astype(mx.float32))).to(affine.codes.device)

    size = affine.n * affine.k * affine.bits // 8 + 2 * affine.n * affine.k // GROUP * 2
    note = "no graph: timed by the host's clock with its launches, so an upper bound of its kernel's time"
    return Product(
        size, call, affine.scales.float(), affine.biases.float(), "host", note, to_torch=to_torch, batch=batch
    )


def _to_mlx(mx: Any, tensor: Tensor) -> Any:
    """A bf16 tensor, by its bits."""
    bits = tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    return mx.array(bits).view(mx.bfloat16)
