"""Classic decode, request checks and the figures of a generation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support_loop import FakeTarget

from engine.decode import classic_decode
from engine.errors import RequestError
from engine.requests import GenerationRequest, validate_request
from engine.speculative import speculative_decode
from engine.stats import Generation, RoundStats, Timing
from engine.text import TextStream


@pytest.mark.parametrize("length", [1, 2, 17], ids="prompt{}".format)
def test_classic_feeds_each_token_once(length):
    """Guards an off-by-one in the chain: n tokens need one prefill and n - 1 steps."""
    target, seen = FakeTarget(), []
    generation = classic_decode(target, GenerationRequest(tuple(range(1, length + 1)), 4), 0, seen.append)
    assert list(generation.tokens) == seen
    assert len(seen) == 4
    assert target.step_rows == [("classic", 1)] * 3
    assert target.caches.length == length + 3
    assert generation.rounds is None


def test_a_stop_token_is_last_and_final():
    """Guards emitting past the stop, and a stop in the very first token."""
    free = classic_decode(FakeTarget(), GenerationRequest((3, 1), 9), 0)
    for stop in set(free.tokens):
        cut = classic_decode(FakeTarget(), GenerationRequest((3, 1), 9, stop_ids=(stop, 999)), 0)
        assert cut.tokens == free.tokens[: free.tokens.index(stop) + 1]
        assert cut.finish_reason == "stop"
        ignored = classic_decode(FakeTarget(), GenerationRequest((3, 1), 9, stop_ids=(stop,), ignore_stop=True), 0)
        assert ignored.tokens == free.tokens
        assert ignored.finish_reason == "length"


def test_no_budget_gives_no_tokens_and_runs_nothing():
    """Guards max_tokens 0 returning the prefill's token."""
    target = FakeTarget()
    generation = classic_decode(target, GenerationRequest((3, 1), 0), 0)
    assert (generation.tokens, generation.finish_reason) == ((), "length")
    assert target.step_rows == target.prefill_ranges == []


BAD = [
    (GenerationRequest((), 4), r"^prompt: no tokens"),
    (GenerationRequest((1, 29), 4), r"token 29 at index 1 is outside the vocabulary of 29"),
    (GenerationRequest((-1,), 4), r"token -1 at index 0"),
    (GenerationRequest((1,), -1), r"^max_tokens -1"),
    (GenerationRequest((1,), 4, temperature=0.7), r"^temperature 0.7: decoding is greedy only"),
    (GenerationRequest((1,), 4, batch=2), r"^batch 2: one sequence at a time"),
    (GenerationRequest((1,), 4, history_boundary=2), r"^history boundary 2"),
]


@pytest.mark.parametrize(("request_", "text"), BAD, ids=[text[1].strip("^")[:14] for text in BAD])
def test_bad_requests_read_alike_in_both_modes(request_, text):
    """Guards a request that one mode refuses and the other serves, or that is served under a sampled label."""
    with pytest.raises(RequestError, match=text) as classic:
        classic_decode(FakeTarget(), request_, 0)
    with pytest.raises(RequestError, match=text) as rounds:
        speculative_decode(FakeTarget(), None, request_, 1, 0)
    assert str(classic.value) == str(rounds.value)
    assert "\n" not in str(classic.value)


@pytest.mark.parametrize("length", [33, 34, 35], ids="prompt{}".format)
def test_a_prompt_past_the_context_is_refused_whatever_the_block(length):
    """Guards a limit that forgets the draft rows: one text for every length over 32."""
    config = SimpleNamespace(vocab_size=9, sliding_window=8, max_position_embeddings=32)
    with pytest.raises(RequestError, match=r"the model has 32 \(max_position_embeddings\)"):
        validate_request(GenerationRequest((1,) * length, 1), config)
    validate_request(GenerationRequest((1,) * 32, 1), config)


def test_round_figures_follow_their_definitions():
    """Guards acceptance length without the bonus, and rates that divide by the wrong count."""
    rounds = RoundStats(5, (0, 4, 2), 9, draft_s=0.6, verify_s=0.9)
    assert rounds.drafted_per_round == (4, 4, 4)
    assert rounds.acceptance_rate == 0.5
    assert rounds.acceptance_length == 3.0
    assert rounds.accepted_at == (2 / 3, 2 / 3, 1 / 3, 1 / 3)
    assert rounds.acceptance_length == pytest.approx(1 + sum(rounds.accepted_at))
    assert rounds.verify_ms == pytest.approx(300)
    assert rounds.draft_step_ms == pytest.approx(50)
    empty = RoundStats(4, (), 0, 0.0, 0.0)
    assert (empty.acceptance_rate, empty.acceptance_length, empty.accepted_at, empty.verify_ms) == (0, 0, (), 0)


def test_decode_rate_leaves_out_the_prefill():
    """Guards 100 tokens in 1 s of prefill and 2 s of decode being called 33 tokens a second."""
    generation = Generation(tuple(range(50)) * 2, "length", Timing(1.0, 2.0))
    assert generation.decode_tok_s == 49.5
    assert generation.classic_step_ms == pytest.approx(2000 / 99)
    assert generation.distinct_tokens == 50
    assert generation.timing.total_s == 3.0
    assert Generation((1,), "stop", Timing(1.0, 0.0)).decode_tok_s == 0


def test_streamed_text_holds_back_half_characters():
    """Guards showing a replacement sign for the first byte of a character."""
    raw = "aé→b".encode()
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    pieces = [stream.push(byte) for byte in raw]
    assert pieces == ["a", "", "é", "", "", "→", "b"]
    assert stream.push(0xC3) == ""
    assert stream.finish() == "\ufffd"
