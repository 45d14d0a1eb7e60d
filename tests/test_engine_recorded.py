"""Recorded steps and draft chains: rooms that outlive their caches, and the bytes of steps that are not recorded.

On a GPU these are CUDA graphs over the kernels. On a CPU a stand-in runs the recorded function again over the same
buffers: over fused ops in plain torch, and over the interpreted kernels, which take a second a step.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from support_engine import make_pair, random_pair_dirs
from support_fused import TINIER, Again, Oracle, accept_of, in_torch

pytest.importorskip("triton", reason="triton is not built for this platform")

from engine.cache import CacheSet, LinearCache, RingCache, new_caches
from engine.decode import classic_decode
from engine.dispatch import DispatchPolicy
from engine.drafts import DraftedBlock, Drafts
from engine.flags import Flags
from engine.pair import Pair, load_pair
from engine.requests import GenerationRequest
from engine.room import CudaRecorder, Recorder, Rooms
from engine.rounds import rounds
from engine.speculative import accepted_prefix, speculative_decode
from kernels.testing import same_bytes

CUDA = torch.cuda.is_available()
GROWTH = 20
PROMPT = list(range(5, 24))
"""Longer than the window, so that the ring is past its end within a few steps."""

interpreted = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(scope="module", params=["torch", pytest.param("kernels", marks=() if CUDA else pytest.mark.slow)])
def plain(request: pytest.FixtureRequest) -> Pair:
    """A tiny pair whose steps are not recorded: on the reference backend, or on Triton kernels."""
    flags = replace(Flags(), use_cuda_graphs=False)
    if request.param == "torch":
        return make_pair(TINIER, policy=DispatchPolicy(flags=flags))
    dirs, policy = random_pair_dirs(geometry=TINIER), DispatchPolicy(backend="triton", flags=flags)
    return load_pair(dirs.target, dirs.drafter, policy, device="cuda" if CUDA else "cpu")


@pytest.fixture
def recorder(plain: Pair) -> Recorder:
    """CUDA graphs where there is a GPU."""
    return CudaRecorder() if plain.target.device == "cuda" else Again()


@pytest.fixture
def recorded(plain: Pair, recorder: Recorder) -> Pair:
    """The same weights, recorded in rooms that start with 20 rows."""
    pair = plain.with_policy(DispatchPolicy(backend=plain.target.policy.backend))
    if pair.target.kernels.fused is None:
        pair = in_torch(pair)
    pair.target.record_steps(recorder, GROWTH)
    return pair


@interpreted
@pytest.mark.parametrize("plain", ["torch", "kernels"], indirect=True)
def test_recorded_steps_have_the_bytes_of_steps_that_are_not(plain: Pair, recorded: Pair) -> None:
    """Logits, hidden states, ids and caches of blocks past the window, with a rollback, as the room grows."""
    start = plain.target.new_caches()
    filled(start, len(PROMPT))
    found = []
    for target in (plain.target, recorded.target):
        caches = target.new_caches()
        for layer, held in zip(caches.layers, start.layers, strict=True):
            layer.copy_rows(held)
        kept: list[Any] = []
        for tokens, drop in (([7, 300], 1), ([19, 23], 0)):
            out = target.step(tokens, caches, "verify")
            caches.rollback(drop)
            kept.append((out.logits, out.hidden, out.argmax))
        found.append((kept, caches.snapshot_bytes(), caches))
    (expected, cached, _), (kept, own, caches) = found
    assert caches.room is not None
    assert caches.length > GROWTH
    for (logits, hidden, ids), (others, states, best) in zip(expected, kept, strict=True):
        assert same_bytes(logits, others)
        assert same_bytes(hidden, states)
        assert ids == best
    assert cached == own


@interpreted
@pytest.mark.parametrize(
    "plain", ["torch", pytest.param("kernels", marks=() if CUDA else pytest.mark.slow)], indirect=True
)
def test_attention_that_a_flag_takes_apart_leaves_the_other_launches_fused(plain: Pair, recorded: Pair) -> None:
    """Cells of that flag would take minutes op by op; a recording would hold one length of keys for ever."""
    policy = DispatchPolicy(backend=plain.target.policy.backend, flags=replace(Flags(), sdpa_large_d=False))
    alone = plain.target.with_policy(policy)
    alone = alone.with_kernels(replace(alone.kernels, fused=None))
    fused = recorded.target.with_policy(policy)
    attended: list[str] = []
    ops = fused.kernels.fused
    assert ops is not None
    attend = ops.attend
    watched = replace(ops, attend=lambda *given: (attended.append("fused"), attend(*given))[1])
    fused = fused.with_kernels(replace(fused.kernels, fused=watched))
    start = plain.target.new_caches()
    filled(start, len(PROMPT))
    found = []
    for target in (alone, fused):
        caches = target.new_caches()
        for layer, held in zip(caches.layers, start.layers, strict=True):
            layer.copy_rows(held)
        steps = [target.step([7], caches, "classic"), target.step([300, 19, 23], caches, "verify")]
        caches.rollback(1)
        steps.append(target.step([5], caches, "classic"))
        found.append((steps, caches.snapshot_bytes()))
        if target is fused:
            assert caches.room is not None
            assert not caches.room.recordings
    (expected, cached), (own, held) = found
    for one, other in zip(expected, own, strict=True):
        assert same_bytes(one.logits, other.logits)
        assert same_bytes(one.hidden, other.hidden)
        assert one.argmax == other.argmax
    assert cached == held
    assert attended == ["fused"] * 3  # a step's full layer; the sliding one is apart


@interpreted
def test_a_recording_serves_the_next_caches_and_later_contexts(recorded: Pair, recorder: Recorder) -> None:
    """A generation that recorded its steps anew would spend longer on that than on the tokens."""
    target = recorded.target
    for _ in range(2):
        caches = target.new_caches()
        target.prefill(PROMPT[:4], caches)
        before = caches.snapshot_bytes()
        target.step([7], caches, "classic")
        target.step([9], caches, "classic")
        caches.rollback(2)
        assert caches.snapshot_bytes() == before
        kv = caches[0].kv
        del caches
        gc.collect()
    assert target.new_caches()[0].kv is kv
    if isinstance(recorder, Again):
        assert recorder.recorded == 1


@interpreted
@pytest.mark.parametrize("plain", [pytest.param("kernels", marks=() if CUDA else pytest.mark.slow)], indirect=True)
def test_drafts_stay_on_the_device_until_someone_looks(plain: Pair, recorded: Pair) -> None:
    """The same proposals as the drafter's plain steps, carried into a verify block without a look at them."""
    assert recorded.drafter is not None
    assert plain.drafter is not None
    drafted = []
    for pair in (plain, recorded):
        target, drafter = pair.target, pair.drafter
        caches = target.new_caches()
        hidden = target.prefill(PROMPT, caches)
        drafts = drafter.draft(7, hidden, target.shared_kv(caches), 2)  # type: ignore[union-attr]
        block: Any = DraftedBlock(drafts) if isinstance(drafts, Drafts) else [7, *drafts]
        out = target.step(block, caches, "verify")
        drafted.append((list(drafts), out.argmax, out.logits, type(drafts)))
    (tokens, best, logits, kind), (others, own, rows, lazy) = drafted
    assert (kind, lazy) == (list, Drafts)
    assert tokens == others
    assert best == own
    assert same_bytes(logits, rows)


@interpreted
def test_classic_decode_runs_one_step_ahead_and_keeps_no_row_of_it(recorded: Pair) -> None:
    """Tokens, caches and a rollback afterwards as by single steps, also where the buffers grow on the way."""
    target = recorded.target
    ahead, alone = target.new_caches(), target.new_caches()
    for caches in (ahead, alone):
        target.prefill(PROMPT[: GROWTH - 2], caches)
    token, expected = 7, []
    for _ in range(3):
        token = target.step([token], alone, "classic").argmax[0]
        expected.append(token)
    chain = target.chain(7, ahead, 4)
    assert [next(chain) for _ in range(3)] == expected
    chain.close()  # a stop token: the step that ran ahead is nobody's
    assert ahead.first_difference(alone)[0] is None
    ring = ahead[0]
    assert isinstance(ring, RingCache)
    assert ring.high_water == ahead.length + 1
    assert target.step([7], ahead, "classic").argmax == target.step([7], alone, "classic").argmax


@interpreted
def test_a_round_that_ran_ahead_goes_on_behind_what_was_accepted(recorded: Pair) -> None:
    """Accepted 2, 1, 0 and all again: each round was launched before the host knew how the one before ended."""
    target, start = recorded.target, len(PROMPT) - 3
    caches = target.new_caches()
    hidden = target.prefill(PROMPT[:start], caches)
    text = list(target.chain(7, caches.clone(), 12))
    oracle = Oracle(text, start, {2, 4, 5}, accept_of(target))
    room = caches.room
    assert room is not None
    room.fit(caches, 3 * GROWTH)
    found: list[int] = []
    accepted: list[int] = []
    source = rounds(target, oracle, caches, 7, hidden, 3, lambda: 12 - len(found))
    while len(found) < 12:
        done = next(source)
        accepted.append(accepted_prefix(done.draft_tokens, done.argmax))
        emitted = [*done.draft_tokens[: accepted[-1]], done.argmax[accepted[-1]]][: 12 - len(found)]
        caches.rollback(3 - len(emitted))
        found += emitted
    source.close()
    assert found == text
    assert accepted[:4] == [2, 1, 0, 2]
    alone = target.new_caches()
    target.prefill(PROMPT[:start], alone)
    list(target.chain(7, alone, 12))
    assert caches.first_difference(alone)[0] is None


@interpreted
def test_a_step_between_drafting_and_verifying_does_not_change_the_block(recorded: Pair) -> None:
    """The room's words are shared: whoever writes them last must not decide what an older block verifies."""
    target, drafter = recorded.target, recorded.drafter
    assert drafter is not None
    caches = target.new_caches()
    hidden = target.prefill(PROMPT, caches)
    drafts = drafter.draft(7, hidden, target.shared_kv(caches), 2)
    expected = list(drafts)
    target.step([300], caches, "classic")
    caches.rollback(1)
    first = target.step(DraftedBlock(drafts), caches, "verify")
    caches.rollback(3)
    again = target.step([7, *expected], caches, "verify")
    assert list(drafts) == expected
    assert same_bytes(first.logits, again.logits)


@interpreted
def test_recorded_rounds_emit_what_classic_decode_emits(plain: Pair, recorded: Pair) -> None:
    """Twelve tokens from a prompt at the window's edge, by rounds of three rows."""
    request = GenerationRequest(tuple(PROMPT), 12, ignore_stop=True)
    classic = classic_decode(plain.target, request, 0)
    rounds = speculative_decode(recorded.target, recorded.drafter, request, 3, 0)
    assert rounds.tokens == classic.tokens == classic_decode(recorded.target, request, 0).tokens


# ---- rooms ----------------------------------------------------------------------------------------------------------


def rooms() -> Rooms:
    """Rooms of the tiny geometry in fp32, nothing recorded."""
    config = make_pair(TINIER).target.config
    return Rooms(lambda: new_caches(config, torch.float32, growth=GROWTH), Again(), config.hidden_size)


def filled(caches: CacheSet, count: int, seed: int = 0) -> None:
    """Rows of random values in every layer."""
    generator = torch.Generator().manual_seed(seed)
    for layer in caches.layers:
        shape = layer.kv.shape[1], count, layer.kv.shape[3]
        layer.write(*(torch.randn(shape, generator=generator).to(layer.kv) for _ in range(2)))


def test_two_caches_never_share_a_room() -> None:
    """A chain and a block that wrote into one another's rows would agree about anything."""
    source = rooms()
    first, second = source.take(), source.take()
    assert {layer.kv.data_ptr() for layer in first.layers}.isdisjoint(layer.kv.data_ptr() for layer in second.layers)
    filled(first, 5)
    copied = first.clone()
    assert copied.room is not first.room
    assert copied.snapshot_bytes() == first.snapshot_bytes()
    filled(copied, 1, seed=1)
    assert copied.first_difference(first)[0] == 0


def test_a_layer_that_is_still_held_keeps_its_room() -> None:
    """Someone may hold one layer, and not the caches that it came with."""
    source = rooms()
    caches = source.take()
    filled(caches, 5)
    layer = caches[0]
    kept = layer.snapshot()
    del caches
    gc.collect()
    other = source.take()
    filled(other, 9, seed=2)
    assert layer.snapshot() == kept
    assert other[0].kv is not layer.kv


def test_a_room_is_handed_on_empty_and_as_large_as_it_grew() -> None:
    """What the last generation wrote must not count, its larger buffers should."""
    source = rooms()
    caches = source.take()
    room = caches.room
    assert room is not None
    filled(caches, GROWTH + 5)
    room.recordings["old"] = "a recording over the small buffers"
    assert room.fit(caches, GROWTH + 6) == 2 * GROWTH
    assert not room.recordings
    room.recordings["new"] = "one over the large ones"
    assert room.fit(caches, GROWTH + 7) == 2 * GROWTH
    assert list(room.recordings) == ["new"]
    del caches
    gc.collect()
    again = source.take()
    assert again.room is room
    assert again.length == 0
    assert {type(layer) for layer in again.layers} == {RingCache, LinearCache}
    assert all(layer.kv.shape[2] == 2 * GROWTH for layer in again.layers if isinstance(layer, LinearCache))
    filled(again, 3, seed=3)
    fresh = rooms().take()
    filled(fresh, 3, seed=3)
    assert again.snapshot_bytes() == fresh.snapshot_bytes()


def test_the_first_difference_counts_what_it_compared() -> None:
    """One flipped bit in the last layer, and bytes equal to a snapshot's."""
    source = rooms()
    caches = source.take()
    filled(caches, 30)
    other = caches.clone()
    total = sum(8 + len(part.k) + len(part.v) for part in caches.snapshot_bytes())
    assert caches.first_difference(other) == (None, total)
    other[1].kv[1, 0, 29, 0].neg_()
    assert caches.first_difference(other)[0] == 1
    other[1].kv[1, 0, 29, 0].neg_()
    other.rollback(1)
    assert caches.first_difference(other)[0] == 0
