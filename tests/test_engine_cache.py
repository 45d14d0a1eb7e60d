"""Ring and linear caches against a plain list of rows, under random appends, verify blocks, rollbacks and wraps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from engine.cache import GROWTH_STEP, MARGIN, CacheSet, LayerCache, LinearCache, RingCache
from engine.errors import EngineError
from kernels.testing import same_bytes

HEADS, WIDTH = 2, 3


def rows_of(serials: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows k and v [Hkv, n, D], one per serial number, no two alike."""
    numbers = torch.tensor(serials, dtype=torch.float32)[None, :, None]
    offsets = torch.arange(HEADS * WIDTH).view(HEADS, 1, WIDTH) / 16
    return numbers + offsets, -(numbers + offsets)


def ring(window: int) -> RingCache:
    """An fp32 ring."""
    return RingCache(HEADS, WIDTH, window, torch.float32)


def write(cache: LayerCache, serial: int, count: int) -> None:
    """Append rows of a serial number."""
    cache.write(*rows_of(range(serial, serial + count)))


class CacheMachine(RuleBasedStateMachine):
    """The rows that were appended and kept, as a list of serial numbers, one per position."""

    @initialize(window=st.integers(1, 12))
    def start(self, window: int) -> None:
        """A ring and a linear cache that always do the same."""
        self.window = window
        self.caches: list[LayerCache] = [ring(window), LinearCache(HEADS, WIDTH, torch.float32)]
        self.kept: list[int] = []
        self.serial = 1

    def append(self, count: int) -> None:
        """New rows in both caches and in the list."""
        for cache in self.caches:
            write(cache, self.serial, count)
        self.kept += range(self.serial, self.serial + count)
        self.serial += count

    @rule(count=st.integers(1, 40))
    def prefill(self, count: int) -> None:
        """A range of a prompt: any number of rows."""
        self.append(count)

    @rule()
    def decode(self) -> None:
        """One row."""
        self.append(1)

    @rule(rows=st.integers(1, 8), data=st.data())
    def verify(self, rows: int, data: st.DataObject) -> None:
        """A block, of which the carried row and an accepted prefix stay."""
        self.append(rows)
        dropped = data.draw(st.integers(0, rows - 1))
        for cache in self.caches:
            cache.rollback(dropped)
        del self.kept[len(self.kept) - dropped :]

    @rule()
    def copied(self) -> None:
        """Go on with clones; what happens to the originals must not reach them."""
        originals, self.caches = self.caches, [cache.clone() for cache in self.caches]
        for cache in originals:
            write(cache, 10**6, 5)

    @invariant()
    def holds_the_list(self) -> None:
        """Every visible key, and what a drafter may read, is the list's, oldest first."""
        for cache in getattr(self, "caches", []):
            limit = self.window if isinstance(cache, RingCache) else len(self.kept)
            assert cache.length == len(self.kept)
            self.expect(cache.committed(), self.kept[-limit:] if limit else [])
            if self.kept:
                k, v, first = cache.keys_upto(cache.length - 1)
                assert first == max(0, len(self.kept) - limit)
                self.expect(torch.stack((k, v)), self.kept[first:])

    def expect(self, kv: Tensor, serials: list[int]) -> None:
        """kv [2, Hkv, K, D] holds exactly these rows."""
        assert kv.shape[2] == len(serials)
        if serials:
            assert torch.equal(kv, torch.stack(rows_of(serials)))


TestCaches = CacheMachine.TestCase
TestCaches.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("window", [1, 5, 16])
def test_a_block_of_eight_can_be_rolled_back_at_every_cursor(window: int) -> None:
    """Without the margin a rejected row would overwrite a key that is still visible, only after a wrap."""
    for position in range(1, 3 * (window + MARGIN)):
        cache, plain = ring(window), ring(window)
        write(cache, 0, position)
        write(plain, 0, position)
        write(cache, 1000, 1)
        write(plain, 1000, 1)
        write(cache, 2000, 7)
        cache.rollback(7)
        assert cache.snapshot() == plain.snapshot(), position
        assert cache.wrapped == (position + 8 > window + MARGIN)
        assert cache.cursor == plain.cursor == (position + 1) % (window + MARGIN)


def test_snapshot_does_not_see_slots() -> None:
    """The same rows in other slots are the same content; another first position or one other bit is not."""
    one, other = ring(4), ring(4)
    write(one, 0, 20)
    write(other, 0, 3)
    write(other, 3, 17)
    other.kv[:, :, other.length % other.slots] += 1  # a slot outside the window
    assert one.snapshot() == other.snapshot()
    assert not same_bytes(one.kv, other.kv)
    other.kv[0, 0, (other.length - 4) % other.slots, 0] += 1
    assert one.snapshot() != other.snapshot()
    shifted = ring(4)
    write(shifted, -1, 21)
    assert one.snapshot()[1:] == shifted.snapshot()[1:]
    assert one.snapshot() != shifted.snapshot()


def test_a_rollback_that_would_lose_a_key_is_refused() -> None:
    """An over-long rollback after a wrap must raise, not show overwritten rows."""
    cache = ring(5)
    write(cache, 0, 30)
    with pytest.raises(EngineError, match="roll back at most 7"):
        cache.rollback(8)
    cache.rollback(7)
    assert cache.length == 23
    with pytest.raises(EngineError, match="roll back at most 7"):
        cache.rollback(1)
    short = ring(5)
    write(short, 0, 9)
    short.rollback(9)
    assert short.length == 0
    for cache in (ring(5), LinearCache(HEADS, WIDTH, torch.float32)):
        with pytest.raises(EngineError, match="cannot roll back 1 of 0"):
            cache.rollback(1)


def test_rows_that_are_not_held_are_refused() -> None:
    """Asking for a key that was overwritten, or not written yet, must raise."""
    cache = ring(4)
    write(cache, 0, 30)
    assert cache.oldest == 30 - 4 - MARGIN
    for first, end in ((cache.oldest - 1, 30), (28, 31), (5, 5)):
        with pytest.raises(EngineError, match="are held"):
            cache.rows(first, end)
    assert cache.rows(cache.oldest, 30).shape[2] == 4 + MARGIN


def test_linear_cache_grows_by_256() -> None:
    """Growth keeps the rows, and allocates in steps."""
    cache = LinearCache(HEADS, WIDTH, torch.bfloat16)
    assert cache.nbytes == 0
    for count, slots in ((1, 1), (255, 1), (1, 2), (600, 4)):
        write(cache, cache.length, count)
        assert cache.kv.shape[2] == slots * GROWTH_STEP
    assert torch.equal(cache.kv[0, 0, :857, 0], torch.arange(857).bfloat16())
    assert cache.nbytes == 2 * HEADS * 4 * GROWTH_STEP * WIDTH * 2


def test_cache_set_notices_layers_that_disagree() -> None:
    """One layer that forgot a rollback would shift its keys by a position."""
    caches = CacheSet([ring(4), LinearCache(HEADS, WIDTH, torch.float32)])
    for layer in caches.layers:
        write(layer, 0, 6)
    copied = caches.clone()
    caches.rollback(2)
    assert (caches.length, copied.length, len(caches)) == (4, 6, 2)
    assert caches.nbytes == sum(layer.nbytes for layer in caches.layers)
    assert [s.first_position for s in copied.snapshot_bytes()] == [2, 0]
    caches[1].rollback(1)
    with pytest.raises(EngineError, match="layer 1 holds 3 rows, layer 0 holds 4"):
        _ = caches.length
