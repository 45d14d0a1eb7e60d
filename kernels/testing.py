"""Checks on bytes that the tests, the loader and the harness share.

`same_bytes` compares, `slot_independent` tries whether an 8-row product keeps a row's bytes in every slot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import MAX_ROWS

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(x: Tensor) -> Tensor:
    """The same bytes as an integer tensor of the same shape, so that NaN equals itself and -0.0 differs from 0.0."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """True when shape, dtype and every byte agree; empty tensors are never the same."""
    if a.dtype != b.dtype or a.shape != b.shape or a.numel() == 0:
        return False
    return torch.equal(as_integers(a), as_integers(b))


def slot_independent(
    product: Callable[[Tensor], Tensor],
    in_features: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> bool:
    """Whether a row of an 8-row product has the same bytes in any slot, alone, among others and beside NaN.

    product maps [8, in_features] to [8, N]. The row alone in slot 0 is what classic decode computes.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(MAX_ROWS, in_features, generator=generator).to(dtype=dtype, device=device)
    alone = torch.zeros_like(x)
    alone[0] = x[0]
    expected = product(alone)[0]
    crowd = x.clone()
    for slot in range(MAX_ROWS):
        crowd.copy_(x.roll(slot, 0))
        if not same_bytes(product(crowd)[slot], expected):
            return False
        crowd.fill_(float("nan"))
        crowd[slot] = x[0]
        if not same_bytes(product(crowd)[slot], expected):
            return False
    return True
