"""K/V caches: a ring with a margin for sliding layers, a growing one for full layers.

Rows are asked for by absolute position and come back oldest first, so slot order never reaches the
arithmetic. The margin of 7 rows lets a verify block be rolled back after a wrap without losing a key.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor
from typing_extensions import TypeVar

from engine.config import TextConfig
from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.room import Room

MARGIN = 7
"""Ring slots beyond the window: the rows of a block of 8 that a rollback can drop."""

GROWTH_STEP = 256
"""Rows by which a linear cache grows on its own; a room's grow by more, since each growth costs its graphs."""


class Snapshot(NamedTuple):
    """The logical content of one layer: position of the first row, and K and V bytes oldest first."""

    first_position: int
    k: bytes
    v: bytes


class LayerCache(ABC):
    """K/V rows of one layer. `kv` [2, Hkv, slots, D] holds them, `length` counts positions from 0."""

    kv: Tensor

    def __init__(self, num_kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype, device: str) -> None:
        self.kv = torch.zeros(2, num_kv_heads, slots, head_dim, dtype=dtype, device=device)
        self.length = 0

    @abstractmethod
    def write(self, k: Tensor, v: Tensor) -> None:
        """Append rows k and v [Hkv, M, D] at position `length`."""

    @abstractmethod
    def reserve(self, count: int) -> None:
        """Append `count` rows, at most a block of 8, that a kernel writes itself, position p to slot p mod slots."""

    @abstractmethod
    def rows(self, first: int, end: int) -> Tensor:
        """K and V of positions first..end-1, oldest first [2, Hkv, end - first, D]; may be a view, do not write to it.

        EngineError when a position is not held.
        """

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Drop the newest n rows; EngineError when that would uncover rows that are gone."""

    @abstractmethod
    def touched(self, count: int) -> None:
        """A kernel has written `count` rows past the last one, which nobody will keep."""

    @abstractmethod
    def copy_rows(self, other: Self) -> None:
        """Hold what another cache of the same kind and shape holds, in this one's own buffer."""

    def emptied(self, kv: Tensor) -> Self:
        """A cache of this kind without rows, over another buffer, whatever that holds."""
        other = copy.copy(self)
        other.kv, other.length = kv, 0
        return other

    @abstractmethod
    def first_visible(self, position: int) -> int:
        """Oldest position that a query at `position` may see."""

    def keys_upto(self, position: int) -> tuple[Tensor, Tensor, int]:
        """What a query at `position` sees: k, v [Hkv, K, D] oldest first, and the first key's position."""
        first = self.first_visible(position)
        kv = self.rows(first, position + 1)
        return kv[0], kv[1], first

    @abstractmethod
    def committed(self) -> Tensor:
        """All rows that a drafter may read [2, Hkv, K, D]: every one held, at most a window of them."""

    def snapshot(self) -> Snapshot:
        """The logical content, equal for two caches that hold the same rows in other slots."""
        kv = self.committed()
        return Snapshot(self.length - kv.shape[2], _bytes(kv[0]), _bytes(kv[1]))

    def clone(self) -> Self:
        """An independent copy."""
        other = copy.copy(self)
        other.kv = self.kv.clone()
        return other

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.kv.numel() * self.kv.element_size()

    def _put(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Store rows in consecutive slots."""
        for held, new in zip(self.kv.unbind(), (k, v), strict=True):
            held.narrow(1, slot, new.shape[1]).copy_(new)

    def _check_held(self, first: int, end: int, oldest: int) -> None:
        if not oldest <= first < end <= self.length:
            raise EngineError(
                f"cache: positions {first}..{end - 1} asked for, but {oldest}..{self.length - 1} are held"
            )


class LinearCache(LayerCache):
    """All rows, in buffers that grow by 256."""

    def __init__(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu", growth: int = GROWTH_STEP
    ) -> None:
        super().__init__(num_kv_heads, head_dim, 0, dtype, device)
        self.growth = growth

    def write(self, k: Tensor, v: Tensor) -> None:
        """Append rows, growing where they do not fit."""
        start = self.length
        self.reserve(k.shape[1])
        self._put(start, k, v)

    def reserve(self, count: int) -> None:
        """Grow where the rows do not fit."""
        self.make_room(self.length + count)
        self.length += count

    def make_room(self, end: int) -> None:
        """A buffer for positions below `end`, another one where the present one is too small."""
        if end > self.kv.shape[2]:
            slots = -(-end // self.growth) * self.growth
            with torch.inference_mode(False):  # a room's buffer outlives the step that made it grow
                grown = self.kv.new_zeros(2, self.kv.shape[1], slots, self.kv.shape[3])
                grown[:, :, : self.length] = self.kv[:, :, : self.length]
            self.kv = grown

    def touched(self, count: int) -> None:
        """Nothing is lost: the next rows are written over them."""

    def copy_rows(self, other: Self) -> None:
        """The rows alone; the buffers may differ in size."""
        self.length = 0
        self.make_room(other.length)
        self.length = other.length
        self.kv[:, :, : self.length] = other.kv[:, :, : self.length]

    def rows(self, first: int, end: int) -> Tensor:
        """A view of the rows."""
        self._check_held(first, end, 0)
        return self.kv[:, :, first:end]

    def rollback(self, n: int) -> None:
        """Drop the newest n rows."""
        if not 0 <= n <= self.length:
            raise EngineError(f"cache: cannot roll back {n} of {self.length} rows")
        self.length -= n

    def first_visible(self, position: int) -> int:
        """Every position is visible."""
        return 0

    def committed(self) -> Tensor:
        """Every row."""
        return self.kv[:, :, : self.length]


class RingCache(LayerCache):
    """The last window + 7 rows, written round and round: position p lives in slot p mod (window + 7)."""

    def __init__(self, num_kv_heads: int, head_dim: int, window: int, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__(num_kv_heads, head_dim, window + MARGIN, dtype, device)
        self.window = window
        self.slots = window + MARGIN
        self.high_water = 0

    @property
    def cursor(self) -> int:
        """Slot of the next row."""
        return self.length % self.slots

    @property
    def wrapped(self) -> bool:
        """Whether a slot has been written twice."""
        return self.high_water > self.slots

    @property
    def oldest(self) -> int:
        """Oldest position that is still held."""
        return max(0, self.high_water - self.slots)

    def write(self, k: Tensor, v: Tensor) -> None:
        """Append rows; of more than the ring holds, which only a prefill brings, the last ones stay."""
        count = k.shape[1]
        end = self.length + count
        if count > self.slots:
            k, v, count = k[:, -self.slots :], v[:, -self.slots :], self.slots
        start = (end - count) % self.slots
        head = min(count, self.slots - start)
        if head == count:
            self._put(start, k, v)
        else:
            self._put(start, k[:, :head], v[:, :head])
            self._put(0, k[:, head:], v[:, head:])
        self._advance(end)

    def reserve(self, count: int) -> None:
        """The ring is always whole; only the length moves."""
        self._advance(self.length + count)

    def touched(self, count: int) -> None:
        """The rows whose slots they took are gone."""
        self.high_water = max(self.high_water, self.length + count)

    def copy_rows(self, other: Self) -> None:
        """The whole ring: rows older than the window may come back by a rollback."""
        self.kv.copy_(other.kv)
        self.length, self.high_water = other.length, other.high_water

    def emptied(self, kv: Tensor) -> Self:
        """A ring without rows over another buffer."""
        other = super().emptied(kv)
        other.high_water = 0
        return other

    def _advance(self, end: int) -> None:
        self.length = end
        self.high_water = max(self.high_water, end)

    def rows(self, first: int, end: int) -> Tensor:
        """The rows; a view, or a copy in position order where they lie across the ring's end."""
        self._check_held(first, end, self.oldest)
        start, stop = first % self.slots, (end - 1) % self.slots + 1
        if start < stop:
            return self.kv[:, :, start:stop]
        return torch.cat((self.kv[:, :, start:], self.kv[:, :, :stop]), 2)

    def rollback(self, n: int) -> None:
        """Drop the newest n rows; after a wrap at most the margin's 7 of the last block."""
        length = self.length - n  # every round asks every layer, between two launches: few attributes, no calls
        if n < 0 or length < 0:
            raise EngineError(f"cache: cannot roll back {n} of {self.length} rows")
        if self.high_water > self.slots and self.high_water - self.slots > length - self.window:
            raise EngineError(
                f"cache: rolling back {n} rows to {length} needs position {max(0, length - self.window)},"
                f" but the ring holds {self.oldest} and later; roll back at most {MARGIN} rows of the last block"
            )
        self.length = length

    def first_visible(self, position: int) -> int:
        """The window, the query's own position included."""
        return max(0, position - self.window + 1)

    def committed(self) -> Tensor:
        """The last `window` rows, or as many as there are."""
        first = max(0, self.length - self.window)
        if first == self.length:
            return self.kv[:, :, :0]
        return self.rows(first, self.length)


class HeldLayer(Protocol):
    """What a set of caches asks of a layer's: K/V rows here, or the state of another family's layer."""

    length: int

    def reserve(self, count: int, /) -> None:
        """Append rows that a kernel writes itself."""

    def rollback(self, n: int, /) -> None:
        """Drop the newest n rows."""

    def clone(self) -> Any:
        """An independent copy."""

    def committed(self) -> Tensor:
        """The logical content; two layers of equal length hold the same when its bits are equal."""

    def snapshot(self) -> tuple[int, bytes, bytes]:
        """The logical content, to be compared with `==`."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""


HeldT = TypeVar("HeldT", bound=HeldLayer, default=LayerCache)


class CacheSet(Generic[HeldT]):
    """The caches of all layers, kept at one length; `room` is set where their buffers are a room's."""

    def __init__(self, layers: Sequence[HeldT], room: Room | None = None) -> None:
        self.layers = list(layers)
        self.room = room

    def __getitem__(self, layer: int) -> HeldT:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def length(self) -> int:
        """Rows held by every layer; EngineError when the layers disagree."""
        length = self.layers[0].length
        for index, layer in enumerate(self.layers):
            if layer.length != length:
                raise EngineError(f"cache: layer {index} holds {layer.length} rows, layer 0 holds {length}")
        return length

    def rollback(self, n: int) -> None:
        """Drop the newest n rows of every layer."""
        for layer in self.layers:
            layer.rollback(n)

    def reserve(self, count: int) -> None:
        """Append `count` rows to every layer, at most a block of 8, that kernels write themselves."""
        for layer in self.layers:
            layer.reserve(count)

    def clone(self) -> Self:
        """An independent copy, in a room of its own where this one has one."""
        if self.room is None:
            other = copy.copy(self)
            other.layers = [layer.clone() for layer in self.layers]
            return other
        roomy = self.room.another()
        for mine, its in zip(self.layers, roomy.layers, strict=True):
            its.copy_rows(cast("LayerCache", mine))  # rooms hold K/V alone
        return cast("Self", roomy)

    def first_difference(self, other: Self) -> tuple[int | None, int]:
        """First layer whose committed rows differ in a byte, compared where they lie, and the bytes compared.

        None for the layer when all are equal; as in a snapshot, a layer's first position counts 8 bytes.
        """
        compared = 0
        for index, (ours, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            mine, its = ours.committed(), theirs.committed()
            if ours.length != theirs.length or mine.shape != its.shape or not torch.equal(_words(mine), _words(its)):
                return index, compared
            compared += 8 + mine.numel() * mine.element_size()
        return None, compared

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.nbytes for layer in self.layers)

    def snapshot_bytes(self) -> list[tuple[int, bytes, bytes]]:
        """The logical bytes of every layer, by absolute position."""
        return [layer.snapshot() for layer in self.layers]


def new_caches(config: TextConfig, dtype: torch.dtype, device: str = "cpu", growth: int = GROWTH_STEP) -> CacheSet:
    """Empty caches for a target: a ring per sliding layer, a linear cache per full layer."""
    layers: list[LayerCache] = []
    for shape in config.layers:
        if shape.kind == "sliding":
            layers.append(RingCache(shape.num_kv_heads, shape.head_dim, config.sliding_window, dtype, device))
        else:
            layers.append(LinearCache(shape.num_kv_heads, shape.head_dim, dtype, device, growth))
    return CacheSet(layers)


def _words(x: Tensor) -> Tensor:
    """The same bits as integers, so that -0.0 differs from 0.0 and a NaN equals itself."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()
