"""The round loop against classic decode, on a target whose every key matters."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_engine import TINY, TINY_31B, make_pair
from support_loop import FakeTarget, ScriptedDrafter, hostile, oracle, parity, script, scripted

from engine.decode import classic_decode
from engine.errors import EngineError, RequestError
from engine.requests import GenerationRequest
from engine.speculative import RoundEvent, accepted_prefix, speculative_decode

make_pair_once = functools.cache(make_pair)


def prompt_of(length: int, vocab: int = 29, salt: int = 1) -> tuple[int, ...]:
    return tuple((5 * i * i + 3 * i + salt) % vocab for i in range(length))


def drafter_for(target, request, corrupt):
    """A scripted drafter that knows classic's output far past the budget."""
    longer = GenerationRequest(request.tokens, request.max_tokens + 16)
    continuation = classic_decode(FakeTarget(target.config.vocab_size, target.config.sliding_window), longer, 0).tokens
    return ScriptedDrafter(request.tokens + continuation, target.config.vocab_size, corrupt)


def classic_snapshots(request, chunk=0):
    """Cache bytes of a classic run by cache length, with its generation."""
    target, snapshots = FakeTarget(), {}

    def on_token(_token: int) -> None:
        snapshots[target.caches.length] = target.caches.snapshot_bytes()

    return classic_decode(target, request, chunk, on_token), snapshots


@settings(max_examples=300, deadline=None)
@given(
    block_size=st.integers(1, 8),
    prompt_length=st.integers(1, 40),
    max_tokens=st.integers(0, 20),
    stop_at=st.one_of(st.none(), st.integers(0, 19)),
    ignore_stop=st.booleans(),
    wrong=st.lists(st.booleans(), min_size=1, max_size=23),
    chunk=st.sampled_from([0, 5, 16]),
    salt=st.integers(0, 28),
)
def test_rounds_equal_classic_in_tokens_finish_and_cache_bytes(
    block_size, prompt_length, max_tokens, stop_at, ignore_stop, wrong, chunk, salt
):
    """Guards accept, cut, carry and rollback around the window of 16: any slip changes a later token or key."""
    prompt = prompt_of(prompt_length, salt=salt)
    free, _ = classic_snapshots(GenerationRequest(prompt, max_tokens))
    stop = (free.tokens[stop_at],) if stop_at is not None and stop_at < len(free.tokens) else ()
    request = GenerationRequest(prompt, max_tokens, stop_ids=stop, ignore_stop=ignore_stop)
    classic, snapshots = classic_snapshots(request, chunk)
    drafter = drafter_for(FakeTarget(), request, lambda number, index: wrong[(number * 7 + index) % len(wrong)])
    target, seen = FakeTarget(), []

    def on_round(event: RoundEvent) -> None:
        length = event.caches.length
        assert event.caches.snapshot_bytes() == snapshots[length]
        seen.append(event)

    streamed: list[int] = []
    generation = speculative_decode(target, drafter, request, block_size, chunk, on_round, streamed.append)
    assert generation.tokens == classic.tokens == tuple(streamed)
    assert generation.finish_reason == classic.finish_reason
    assert {rows for mode, rows in target.step_rows if mode == "verify"} <= {block_size}
    assert generation.rounds.num_rounds == len(seen)
    assert generation.rounds.num_emitted == max(len(classic.tokens) - 1, 0) == sum(len(event.emitted) for event in seen)
    if seen:
        assert seen[-1].caches.length == len(prompt) + len(classic.tokens) - 1


@pytest.mark.parametrize("block_size", [1, 4], ids="block{}".format)
def test_zero_accepts_never_make_a_negative_index(block_size):
    """Guards the all-rejected round: the bonus is row 0's token and the rollback leaves row 0."""
    request = GenerationRequest(prompt_of(33), 20)
    classic, _ = classic_snapshots(request)
    generation = speculative_decode(FakeTarget(), drafter_for(FakeTarget(), request, hostile), request, block_size, 0)
    assert generation.tokens == classic.tokens
    assert generation.rounds.num_accepted == 0
    assert generation.rounds.num_rounds == 19
    assert generation.rounds.acceptance_length == 1.0


def test_full_accept_keeps_the_bonus_token():
    """Guards the dropped bonus: 25 tokens are one of prefill and six whole rounds of four."""
    request = GenerationRequest(prompt_of(9), 25)
    generation = speculative_decode(FakeTarget(), drafter_for(FakeTarget(), request, oracle), request, 4, 0)
    rounds = generation.rounds
    assert (rounds.num_rounds, rounds.num_drafted, rounds.num_accepted, rounds.num_emitted) == (6, 18, 18, 24)
    assert rounds.acceptance_length == 4.0
    assert rounds.accepted_at == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("prompt_length", range(12, 21), ids="prompt{}".format)
def test_context_crossing_the_window_works(prompt_length):
    """Guards the ring's edge: prompts just under, at and over the window of 16."""
    request = GenerationRequest(prompt_of(prompt_length), 40)
    classic, _ = classic_snapshots(request)
    drafter = drafter_for(FakeTarget(), request, script("1101"))
    assert speculative_decode(FakeTarget(), drafter, request, 4, 0).tokens == classic.tokens


def test_one_token_sequence_for_all_block_sizes():
    """Guards a result that depends on the number of drafts."""
    request = GenerationRequest(prompt_of(11), 120)
    classic, _ = classic_snapshots(request)
    for block_size in range(1, 9):
        drafter = drafter_for(FakeTarget(), request, script("10"))
        assert speculative_decode(FakeTarget(), drafter, request, block_size, 0).tokens == classic.tokens


@pytest.mark.parametrize("max_tokens", range(8), ids="budget{}".format)
def test_budget_inside_a_block_is_exact(max_tokens):
    """Guards a block that emits past the budget; drafting starts whenever more than one token is left."""
    request = GenerationRequest(prompt_of(2), max_tokens)
    generation = speculative_decode(FakeTarget(), drafter_for(FakeTarget(), request, oracle), request, 4, 0)
    assert len(generation.tokens) == max_tokens
    assert generation.finish_reason == "length"
    assert (generation.rounds.num_drafted > 0) == (max_tokens >= 2)


@pytest.mark.parametrize("stop_at", range(1, 5), ids="row{}".format)
def test_stop_inside_a_block_ends_the_text_there(stop_at):
    """Guards tokens emitted after an accepted stop token, in ids and in the cache."""
    prompt = prompt_of(5, salt=2)
    free, _ = classic_snapshots(GenerationRequest(prompt, 12))
    stop = free.tokens[stop_at]
    first = free.tokens.index(stop)
    request = GenerationRequest(prompt, 12, stop_ids=(stop,))
    target = FakeTarget()
    generation = speculative_decode(target, drafter_for(target, request, oracle), request, 5, 0)
    assert generation.tokens == free.tokens[: first + 1]
    assert generation.finish_reason == "stop"
    assert target.caches.length == len(prompt) + first


def test_stop_within_the_budget_beats_the_length_limit():
    """Guards [10, 11, STOP, 20, 21, 22] with a budget of 5: the stop decides, not the budget."""
    request = GenerationRequest((1,), 5, stop_ids=(12,))
    assert request.cut([10, 11, 12, 20, 21, 22], 0) == ((10, 11, 12), True)
    assert request.cut([10, 11, 12, 20, 21, 22], 3) == ((10, 11), False)
    assert request.cut([10, 11, 12, 20, 21, 22], 5) == ((), False)


def test_two_sessions_interleaved_keep_apart():
    """Guards shared state between generations: a second one runs inside the first one's rounds."""
    first, second = GenerationRequest(prompt_of(7), 15), GenerationRequest(prompt_of(19, salt=4), 15)
    target = FakeTarget()
    inner = []

    def on_round(_event: RoundEvent) -> None:
        inner.append(speculative_decode(target, drafter_for(target, second, script("1011")), second, 4, 0))

    outer = speculative_decode(target, drafter_for(target, first, script("1011")), first, 4, 0, on_round)
    assert outer.tokens == classic_snapshots(first)[0].tokens
    assert inner
    assert {generation.tokens for generation in inner} == {classic_snapshots(second)[0].tokens}
    assert len({generation.rounds.accepted_per_round for generation in inner}) == 1


@pytest.mark.parametrize(
    ("drafts", "argmax", "accepted"),
    [((), [5], 0), ((5,), [6, 7], 0), ((5, 6, 7), [5, 6, 7, 8], 3), ((5, 9, 7), [5, 6, 7, 8], 1)],
    ids=["none", "zero", "full", "gap"],
)
def test_accepted_prefix_is_the_longest_equal_one(drafts, argmax, accepted):
    """Guards counting a match behind a mismatch."""
    assert accepted_prefix(drafts, argmax) == accepted


@pytest.mark.parametrize(
    ("returned", "text"),
    [([1, 2], "returned 2 tokens where 3"), ([1, -1, 2], "token -1 is outside"), ([1, 2, 29], "token 29 is outside")],
    ids=["short", "negative", "past-vocabulary"],
)
def test_a_drafter_that_breaks_its_contract_is_named(returned, text):
    """Guards a wild index into the target's embedding table."""

    class Bad:
        def draft(self, token, hidden, shared, count):
            return returned

    with pytest.raises(EngineError, match=text):
        speculative_decode(FakeTarget(), Bad(), GenerationRequest((1, 2), 5), 4, 0)


@pytest.mark.parametrize(
    ("block_size", "drafter", "text"),
    [(0, None, "must be 1 to 8"), (9, None, "must be 1 to 8"), (2, None, "needs a drafter")],
    ids=["zero", "nine", "no-drafter"],
)
def test_bad_block_sizes_are_refused(block_size, drafter, text):
    """Guards a width that the row contract does not cover."""
    with pytest.raises(RequestError, match=text):
        speculative_decode(FakeTarget(), drafter, GenerationRequest((1, 2), 5), block_size, 0)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    block_size=st.integers(1, 8),
    prompt_length=st.integers(1, 40),
    max_tokens=st.integers(1, 12),
    stop_at=st.one_of(st.none(), st.integers(0, 11)),
    wrong=st.lists(st.booleans(), min_size=1, max_size=11),
    boundary=st.one_of(st.none(), st.integers(1, 39)),
    salt=st.integers(0, 500),
)
def test_real_rounds_equal_classic_in_tokens_and_cache_bytes(
    block_size, prompt_length, max_tokens, stop_at, wrong, boundary, salt
):
    """Guards the same on the real engine in bf16: every K/V byte after every round is classic decode's."""
    target = make_pair_once().target
    prompt = prompt_of(prompt_length, 512, salt)
    free = GenerationRequest(prompt, max_tokens, history_boundary=boundary and min(boundary, prompt_length))
    request = free
    if stop_at is not None and stop_at < max_tokens:
        request = replace(free, stop_ids=(classic_decode(target, free, 0).tokens[stop_at],))
    drafter = scripted(request, 512, lambda number, index: wrong[(number * 7 + index) % len(wrong)])
    result = parity(target, target, request, block_size, drafter)
    assert result.holds, result


@pytest.mark.parametrize("geometry", [TINY, TINY_31B], ids=lambda geometry: geometry.name)
@pytest.mark.parametrize("block_size", [2, 4, 8], ids="block{}".format)
def test_the_real_drafter_never_changes_the_text(geometry, block_size):
    """Guards the whole pair past the window, with the drafter's own proposals instead of a script."""
    pair = make_pair_once(geometry)
    request = GenerationRequest(tuple(range(5, 25)), 20, history_boundary=12)
    result = parity(pair.target, pair.target, request, block_size, pair.drafter)
    assert result.holds
    assert result.rounds.rounds.num_drafted > 0
    assert result.classic.distinct_tokens > 5
