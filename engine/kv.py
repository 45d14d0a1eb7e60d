"""What a drafter reads of a target: the committed K and V of its last sliding and its last full layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.cache import CacheSet
from engine.config import Kind


@dataclass(frozen=True)
class SharedKV:
    """Committed K and V, each [Hkv, K, D], of the last sliding (at most a window) and the last full layer.

    `length` is the number of committed positions. The tensors may be views into the caches: use them before
    the next step.
    """

    sliding: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]
    length: int


class LentKV:
    """The same, where it lies: a drafter that reads the cache buffers itself never cuts a tensor out of them."""

    def __init__(self, caches: CacheSet, sliding_layer: int, full_layer: int) -> None:
        self.caches = caches
        self.layers: dict[Kind, int] = {"sliding": sliding_layer, "full": full_layer}
        self.length = caches.length

    @property
    def sliding(self) -> tuple[Tensor, Tensor]:
        """K and V of the last sliding layer, oldest first, at most a window."""
        return self._rows("sliding")

    @property
    def full(self) -> tuple[Tensor, Tensor]:
        """K and V of the last full layer."""
        return self._rows("full")

    def _rows(self, kind: Kind) -> tuple[Tensor, Tensor]:
        kv = self.caches[self.layers[kind]].committed()
        return kv[0], kv[1]
