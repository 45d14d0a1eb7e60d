"""Rounds and chains that run ahead of the host: what they leave in caches, control words and rooms, however they end.

Fused ops are plain torch here and recordings run again, so the engine's own part of the GPU path takes milliseconds a
step; `test_engine_recorded` runs the same over the kernels, and over CUDA graphs where there is a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support_engine import make_pair
from support_fused import TINIER, Again, Oracle, accept, in_torch
from torch import Tensor

from engine.cache import CacheSet, RingCache
from engine.capture import Capture
from engine.decode import classic_decode
from engine.drafts import DraftedBlock, Drafts
from engine.errors import EngineError
from engine.pair import Pair
from engine.requests import GenerationRequest
from engine.rounds import rounds
from engine.speculative import accepted_prefix, speculative_decode
from harness.worker.rollback import Tracked
from kernels.testing import same_bytes

GROWTH = 20
PROMPT = tuple(range(5, 43))
"""Past the ring's end, so that every row written takes another one's slot."""


@pytest.fixture(scope="module")
def plain() -> Pair:
    """Random weights on the reference backend, nothing recorded."""
    return make_pair(TINIER)


@pytest.fixture
def recorder() -> Again:
    """What stands for CUDA graphs."""
    return Again()


@pytest.fixture
def recorded(plain: Pair, recorder: Again) -> Pair:
    """The same weights, recorded in rooms that start with 20 rows."""
    pair = in_torch(plain)
    pair.target.record_steps(recorder, GROWTH)
    return pair


def classic_of(plain: Pair, request: GenerationRequest) -> tuple[Any, CacheSet]:
    """Classic decode without recordings, and its caches."""
    tracked = Tracked(plain.target)
    generation = classic_decode(tracked, request, 0)
    assert tracked.caches is not None
    return generation, tracked.caches


def rows_differ(ours: CacheSet, classic: CacheSet) -> list[str]:
    """Where rows that `ours` says it holds are not classic decode's."""
    found = []
    for index, (mine, its) in enumerate(zip(ours.layers, classic.layers, strict=True)):
        oldest = max(layer.oldest if isinstance(layer, RingCache) else 0 for layer in (mine, its))
        if mine.length != its.length:
            found.append(f"layer {index}: {mine.length} rows, classic has {its.length}")
        elif not same_bytes(mine.rows(oldest, mine.length).contiguous(), its.rows(oldest, its.length).contiguous()):
            found.append(f"layer {index}: rows {oldest}..{mine.length - 1}")
    return found


# ---- where a generation ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 26])
def test_rounds_that_run_ahead_end_where_classic_ends(
    plain: Pair, recorded: Pair, block_size: int, max_tokens: int
) -> None:
    """A budget smaller than a block, and one that makes the buffers grow while rounds run ahead."""
    request = GenerationRequest(PROMPT, max_tokens, ignore_stop=True)
    classic, cached = classic_of(plain, request)
    full, _ = classic_of(plain, replace(request, max_tokens=40))
    oracle = Oracle(list(full.tokens[1:]), len(PROMPT), {2, 4, 5, 13}, accept)
    tracked = Tracked(recorded.target)
    found = speculative_decode(tracked, oracle, request, block_size, 0)  # type: ignore[arg-type]
    assert (found.tokens, found.finish_reason) == (classic.tokens, "length")
    assert tracked.caches is not None
    assert rows_differ(tracked.caches, cached) == []
    assert tracked.caches.first_difference(cached)[0] is None
    if max_tokens == 26:
        assert found.rounds is not None
        assert found.rounds.num_accepted > found.rounds.num_rounds // 2


@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 8])
def test_a_stop_token_ends_a_round_and_the_one_ahead_of_it(
    plain: Pair, recorded: Pair, block_size: int, at: int
) -> None:
    """The round ahead went on behind the whole block: rows that it took are gone, and the cache must not offer them."""
    request = GenerationRequest(PROMPT, 40, ignore_stop=True)
    full, _ = classic_of(plain, request)
    stop = full.tokens[at]
    request = replace(request, ignore_stop=False, stop_ids=(stop,))
    classic, cached = classic_of(plain, request)
    oracle = Oracle(list(full.tokens[1:]), len(PROMPT), (), accept)
    tracked = Tracked(recorded.target)
    found = speculative_decode(tracked, oracle, request, block_size, 0)  # type: ignore[arg-type]
    assert (found.tokens, found.finish_reason) == (classic.tokens, "stop")
    assert tracked.caches is not None
    assert rows_differ(tracked.caches, cached) == []


def accepted_by(caches: CacheSet, source: Iterator[Any], block_size: int) -> list[int]:
    """The tokens of the next round, whose rejected rows are dropped."""
    done = next(source)
    accepted = accepted_prefix(done.draft_tokens, done.argmax)
    caches.rollback(block_size - 1 - accepted)
    return [*done.draft_tokens[:accepted], done.argmax[accepted]]


def started(recorded: Pair, plain: Pair, block_size: int) -> tuple[CacheSet, Iterator[Any]]:
    """Rounds over a prompt past the ring's end, with a drafter that is always right."""
    full, _ = classic_of(plain, GenerationRequest(PROMPT, 40, ignore_stop=True))
    caches = recorded.target.new_caches()
    hidden = recorded.target.prefill(PROMPT, caches)
    assert caches.room is not None
    caches.room.fit(caches, 100)
    oracle = Oracle(list(full.tokens[1:]), len(PROMPT), (), accept)
    return caches, rounds(recorded.target, oracle, caches, full.tokens[0], hidden, block_size, lambda: 100)


@pytest.mark.parametrize("after", [1, 2])
def test_an_error_between_two_rounds_leaves_no_row_that_is_not_classics(
    plain: Pair, recorded: Pair, after: int
) -> None:
    """Whoever catches it and drops the rows of the open round must not read what the one ahead has written."""
    caches, source = started(recorded, plain, 4)
    for _ in range(after - 1):
        accepted_by(caches, source, 4)
    next(source)
    with pytest.raises(KeyError):
        source.throw(KeyError("a callback"))  # type: ignore[attr-defined]
    ring = caches[0]
    assert isinstance(ring, RingCache)
    assert ring.high_water == len(PROMPT) + 4 * (after + 1)


def test_a_wait_that_is_interrupted_leaves_no_row_that_is_not_classics(
    plain: Pair, recorded: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds are on their way and the host knows the length of neither."""
    caches, source = started(recorded, plain, 4)

    def interrupted(_slot: int = 0) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(caches.room, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(source)
    ring = caches[0]
    assert isinstance(ring, RingCache)
    assert (caches.length, ring.high_water) == (len(PROMPT), len(PROMPT) + 8)
    chained = recorded.target.new_caches()
    recorded.target.prefill(PROMPT, chained)
    assert chained.room is not None
    chained.room.fit(chained, 100)
    monkeypatch.setattr(chained.room, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(recorded.target.chain(7, chained, 4)))
    ring = chained[0]
    assert isinstance(ring, RingCache)
    assert (chained.length, ring.high_water) == (len(PROMPT), len(PROMPT) + 2)


def test_a_caller_that_keeps_other_rows_than_the_device_is_refused(plain: Pair, recorded: Pair) -> None:
    """The round ahead stands where the device's rule put it; another length would pair its rows with other tokens."""
    caches, source = started(recorded, plain, 4)
    next(source)
    caches.rollback(2)
    with pytest.raises(EngineError, match="ran ahead"):
        next(source)
    chained = recorded.target.new_caches()
    recorded.target.prefill(PROMPT, chained)
    chain = iter(recorded.target.chain(7, chained, 4))
    next(chain)
    chained.rollback(1)
    with pytest.raises(EngineError, match="ran ahead"):
        next(chain)


# ---- drafts that are still on the device ----------------------------------------------------------------------------


def prefilled(pair: Pair) -> tuple[CacheSet, Tensor]:
    """Caches after the prompt, and its last state."""
    caches = pair.target.new_caches()
    return caches, pair.target.prefill(PROMPT, caches)


def test_drafts_that_nobody_looked_at_keep_their_tokens(recorded: Pair) -> None:
    """The next chain, or the next step, takes the words in which they stood."""
    target, drafter = recorded.target, recorded.drafter
    assert drafter is not None
    caches, hidden = prefilled(recorded)
    expected = [list(drafter.draft(token, hidden, target.shared_kv(caches), 3)) for token in (7, 300)]
    assert expected[0] != expected[1]
    first = drafter.draft(7, hidden, target.shared_kv(caches), 3)
    second = drafter.draft(300, hidden, target.shared_kv(caches), 3)
    target.step([11, 12, 13, 14], caches, "verify")
    assert [list(first), list(second)] == expected


def test_a_block_is_verified_where_the_caches_end(recorded: Pair, plain: Pair) -> None:
    """Drafts and position stand in the room's words; a step that is not recorded moves the caches and not the words."""
    target, drafter = recorded.target, recorded.drafter
    assert drafter is not None
    caches, hidden = prefilled(recorded)
    drafts = drafter.draft(7, hidden, target.shared_kv(caches), 2)
    assert isinstance(drafts, Drafts)
    target.step([11], caches, "classic", capture=Capture())
    found = target.step(DraftedBlock(drafts), caches, "verify")
    alone, _ = prefilled(plain)
    plain.target.step([11], alone, "classic")
    expected = plain.target.step([7, *drafts], alone, "verify")
    assert same_bytes(found.logits, expected.logits)
    assert caches.first_difference(alone)[0] is None


def test_the_first_round_of_a_process_drafts_as_the_next_ones_do(recorded: Pair, recorder: Again) -> None:
    """Recording a step runs it once: rows of an untried block must not stand where the drafter still reads."""
    found = []
    for _ in range(2):
        caches, hidden = prefilled(recorded)
        source = rounds(recorded.target, recorded.drafter, caches, 7, hidden, 8, lambda: 1)
        found.append(next(source))
        source.close()
        del caches, source
        gc.collect()
    assert recorder.recorded == 2  # the second time, nothing is recorded
    assert found[0] == found[1]


# ---- rooms ----------------------------------------------------------------------------------------------------------


def test_a_room_is_free_again_after_rounds(plain: Pair, recorded: Pair) -> None:
    """A recording that held on to the caches it was made for would cost a room a generation."""
    kv = []
    for _ in range(2):
        request = GenerationRequest(PROMPT, 12, ignore_stop=True)
        speculative_decode(recorded.target, recorded.drafter, request, 3, 0)
        gc.collect()
        caches = recorded.target.new_caches()
        kv.append(caches[0].kv)
        del caches
        gc.collect()
    assert kv[0] is kv[1]


def test_a_room_made_in_inference_mode_serves_outside_of_it(recorded: Pair) -> None:
    """Rooms outlive whoever asked first; a job runs in inference mode, its caller may not."""
    target, drafter = recorded.target, recorded.drafter
    assert drafter is not None
    with torch.inference_mode():
        caches, hidden = prefilled(recorded)
        other = caches.clone()
        drafts = drafter.draft(7, hidden, target.shared_kv(caches), 2)
    assert len(list(drafts)) == 2
    del other
    gc.collect()
    assert caches.clone().first_difference(caches)[0] is None
    assert not any(layer.kv.is_inference() for layer in caches.layers)
