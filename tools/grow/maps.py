"""Where nano's layers, heads and head elements go in the grown geometry. Pure index arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import LayerShape
from engine.quantize import GROUP_SIZE
from tools.grow.errors import GrowError


def layer_map(nano_layers: int, layers: int, period: int) -> dict[int, int]:
    """Grown layer -> nano layer. Groups of `period` spread evenly, the last on the last: the drafter reads its K/V."""
    small, large = nano_layers // period, layers // period
    found: dict[int, int] = {}
    for group in range(small):
        place = (group + 1) * large // small - 1
        found.update({place * period + i: group * period + i for i in range(period)})
    return found


def head_map(nano: LayerShape, grown: LayerShape) -> list[int]:
    """Grown query head of each nano query head: KV head g stays g, its query heads stay the first of its group."""
    share, room = nano.num_heads // nano.num_kv_heads, grown.num_heads // grown.num_kv_heads
    if nano.num_kv_heads > grown.num_kv_heads or share > room:
        raise GrowError(
            f"{nano.kind} layers: {nano.num_heads} query heads over {nano.num_kv_heads} KV heads do not fit"
            f" into {grown.num_heads} over {grown.num_kv_heads}; use a larger geometry"
        )
    return [head // share * room + head % share for head in range(nano.num_heads)]


def stretch(nano: LayerShape, grown: LayerShape) -> int:
    """Factor of head_dim. Rotary element j goes to factor * j, which turns at the very same frequency."""
    if grown.head_dim % nano.head_dim:
        raise GrowError(f"{nano.kind} layers: head_dim {grown.head_dim} is no multiple of nano's {nano.head_dim}")
    return grown.head_dim // nano.head_dim


def head_rows(heads: list[int], nano_dim: int, grown_dim: int, factor: int) -> Tensor:
    """Row of each element of each nano head, in nano's order; element j of a head at factor * j."""
    elements = torch.arange(nano_dim) * factor
    return (torch.tensor(heads)[:, None] * grown_dim + elements).flatten()


def head_groups(heads: list[int], groups: int, grown_dim: int) -> Tensor:
    """Group of 64 columns of each of a head's first `groups` groups, head by head."""
    return (torch.tensor(heads)[:, None] * (grown_dim // GROUP_SIZE) + torch.arange(groups)).flatten()
