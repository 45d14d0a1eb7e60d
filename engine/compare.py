"""Byte comparison of tensors and of cache snapshots.

Exactness means equal bytes: -0.0 and 0.0 differ, and a NaN equals itself when its bits do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as a flat uint8 tensor, in logical order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def differing_bytes(left: Tensor, right: Tensor) -> int:
    """Number of bytes that differ; raises ValueError when shape or dtype do, since that is no comparison."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(f"{tuple(left.shape)} {left.dtype} against {tuple(right.shape)} {right.dtype}")
    return int((as_bytes(left) != as_bytes(right)).sum())


def sha256_of(tensors: Sequence[Tensor]) -> str:
    """SHA-256 over the bytes of the tensors, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(as_bytes(tensor).cpu().numpy().tobytes())
    return digest.hexdigest()


def flatten(item: Any) -> list[Tensor]:
    """All tensors, byte strings and numbers inside a snapshot, in a fixed order, as tensors."""
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, bytes | bytearray):
        return [torch.frombuffer(bytearray(item), dtype=torch.uint8) if item else torch.empty(0, dtype=torch.uint8)]
    if isinstance(item, Mapping):
        return [tensor for key in sorted(item) for tensor in flatten(item[key])]
    if isinstance(item, Sequence) and not isinstance(item, str):
        return [tensor for part in item for tensor in flatten(part)]
    if isinstance(item, int | float):
        return [torch.tensor(item)]
    raise TypeError(f"snapshot: cannot compare a {type(item).__name__}")


def snapshot_difference(left: Any, right: Any) -> tuple[int, int]:
    """Differing bytes and total bytes of two snapshots of one layer; other shapes differ in every byte."""
    ours, theirs = flatten(left), flatten(right)
    total = sum(tensor.numel() * tensor.element_size() for tensor in ours)
    same_form = len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True)
    )
    if not same_form:
        return max(total, 1), max(total, 1)
    return sum(differing_bytes(a, b) for a, b in zip(ours, theirs, strict=True)), total
