"""MLX affine quantization in plain torch: the same codes, scales and biases as `mx.quantize`.

Used by the checkpoint loader (dequantize), by the nano trainer and by test builders (quantize).
A row of `in` values is cut into groups; each group keeps one scale and one bias in the weight's dtype.
"""

from __future__ import annotations

import torch

BITS = (4, 8)
GROUP_SIZE = 64
MIN_SCALE = 1e-7

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantize(
    weight: torch.Tensor, bits: int, group_size: int = GROUP_SIZE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a matrix; returns (packed uint32, scales, biases), byte-equal to `mx.quantize`.

    weight [N, K] float -> packed [N, K * bits / 32] uint32, scales and biases [N, K / group_size] in weight's dtype.
    Raises ValueError on unsupported bits, a K that is no multiple of the group, or a non-float weight.
    """
    _check(bits, group_size)
    if weight.ndim != 2 or weight.dtype not in _FLOATS:
        raise ValueError(f"quantize needs a float matrix [N, K], got {tuple(weight.shape)} {weight.dtype}")
    rows, columns = weight.shape
    if columns == 0 or columns % group_size:
        raise ValueError(f"quantize: {columns} columns are no multiple of the group size {group_size}")
    codes, scale, bias = affine_codes(weight, bits, group_size)
    packed = pack(codes.reshape(rows, columns), bits)
    return packed, scale.to(weight.dtype), bias.to(weight.dtype)


def affine_codes(
    weight: torch.Tensor, bits: int, group_size: int = GROUP_SIZE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rule itself, in fp32: codes [N, K / g, g] and the unrounded scale and bias [N, K / g].

    The end of the range that is larger in magnitude is hit exactly, and zero is a code where it can be:
    the edge is a whole number of scales away from zero, otherwise the bias is zero.
    """
    levels = float(2**bits - 1)
    groups = weight.float().reshape(*weight.shape[:-1], -1, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    from_low = low.abs() > high.abs()
    scale = ((high - low) / levels).clamp_min(MIN_SCALE)
    scale = torch.where(from_low, scale, -scale)
    edge = torch.where(from_low, low, high)
    steps = torch.round(edge / scale)
    on_grid = steps != 0
    scale = torch.where(on_grid, edge / torch.where(on_grid, steps, 1.0), scale)
    bias = torch.where(on_grid, edge, 0.0)
    codes = torch.round((groups - bias.unsqueeze(-1)) / scale.unsqueeze(-1)).clamp(0.0, levels)
    return codes, scale, bias


def dequantize(
    packed: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor,
    bits: int,
    group_size: int = GROUP_SIZE,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Weights from codes: scale * code + bias in fp32, rounded once to `dtype`.

    packed [N, K * bits / 32] uint32 or int32, scales and biases [N, K / group_size] -> [N, K].
    Raises ValueError where the three shapes do not belong together.
    """
    _check(bits, group_size)
    if packed.ndim != 2 or scales.shape != biases.shape or scales.ndim != 2 or scales.shape[0] != packed.shape[0]:
        raise ValueError(
            f"dequantize: packed {tuple(packed.shape)}, scales {tuple(scales.shape)}, biases {tuple(biases.shape)}"
            " do not belong together"
        )
    columns = packed.shape[1] * 32 // bits
    if columns != scales.shape[1] * group_size:
        raise ValueError(
            f"dequantize: {packed.shape[1]} words of {bits} bits are {columns} columns,"
            f" but {scales.shape[1]} groups of {group_size} are {scales.shape[1] * group_size}"
        )
    codes = unpack(packed, bits).reshape(packed.shape[0], -1, group_size).float()
    return (scales.float().unsqueeze(-1) * codes + biases.float().unsqueeze(-1)).flatten(1).to(dtype)


def fake_quantize(weight: torch.Tensor, bits: int, group_size: int = GROUP_SIZE) -> torch.Tensor:
    """Weights [N, K] as they come back from a bf16 checkpoint: quantize, round scale and bias to bf16, dequantize.

    Same shape and dtype as the input; no gradient rule of its own (the trainer adds a straight-through one).
    """
    codes, scale, bias = affine_codes(weight.bfloat16(), bits, group_size)
    restored = scale.bfloat16().float().unsqueeze(-1) * codes + bias.bfloat16().float().unsqueeze(-1)
    return restored.flatten(-2).to(weight.dtype)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] -> uint32 words [N, K * bits / 32]; the first code sits in the lowest bits."""
    per_word = 32 // bits
    shifts = torch.arange(per_word, device=codes.device, dtype=torch.int64) * bits
    words = (codes.to(torch.int64).reshape(*codes.shape[:-1], -1, per_word) << shifts).sum(-1)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return signed.to(torch.int32).view(torch.uint32)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Words [N, W] uint32 or int32 -> codes [N, W * 32 / bits] int32, first code from the lowest bits."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    words = packed.view(torch.int32).unsqueeze(-1)
    codes: torch.Tensor = (words >> shifts) & (2**bits - 1)
    return codes.flatten(-2)


def _check(bits: int, group_size: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits {bits} not supported; use one of {BITS}")
    if group_size % 32 or group_size <= 0:
        raise ValueError(f"group size {group_size} not supported; use a multiple of 32")
