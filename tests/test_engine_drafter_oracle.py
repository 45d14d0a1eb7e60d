"""The drafter against transformers' assistant in fp32: one step's logits and hidden row, and whole first rounds.

transformers runs the assistant at position P and lets it see stale rows after a partial accept; so first rounds are
compared for prompts within the window, and single steps past it get the same clean K/V on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers, the numeric oracle, is not installed")

from support_engine import one_thread
from support_oracles import DRAFTS, Oracle, load_oracle_pair, oracle

from engine.pair import Pair

ATOL = 1e-4
"""fp32 sums in another order, for values that spread by 1; wider ones in proportion."""

AT_P, AT_LAST = 0, -1
"""Offsets of the drafter's position from P: transformers' own, and our default."""


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """<bos> and random ids."""
    draw = random.Random(7000 * seed + length)
    return [2, *(draw.randrange(3, vocab_size) for _ in range(length - 1))]


@pytest.fixture(scope="module", params=[("12b", 16), ("31b", 16)], ids=lambda case: case[0])
def case(request: pytest.FixtureRequest) -> Oracle:
    return oracle(*request.param)


@pytest.fixture(scope="module")
def pair(case: Oracle) -> Pair:
    return load_oracle_pair(case)


def clean_kv(case: Oracle, prompt: list[int], window: int) -> dict[str, tuple[Tensor, Tensor]]:
    """transformers' shared K/V of a prompt, the sliding pair cut to its last `window` rows."""
    states = case.forward(prompt).shared_kv_states
    return {
        kind: tuple(x[:, :, -window:] if kind == "sliding_attention" else x for x in kv[:2])
        for kind, kv in states.items()
    }


@pytest.mark.parametrize("length", [1, 2, 9, 15, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_first_round_drafts_equal_assisted_generation(case: Oracle, pair: Pair, length: int, seed: int) -> None:
    """Guards the whole draft chain: the target's embedding, concat order, layers, own table, hidden fed back."""
    prompt = prompt_of(length, case.geometry.vocab_size, seed)
    carried, drafts = case.first_round(prompt)
    caches = pair.target.new_caches()
    hidden = pair.target.prefill(prompt, caches)
    token = int(pair.target.logits(hidden[None])[0].argmax())
    assert token == carried
    shared = pair.target.shared_kv(caches)
    assert len(drafts) == DRAFTS
    assert tuple(pair.drafter.draft(token, hidden, shared, DRAFTS, position_offset=AT_P)) == drafts


@pytest.mark.parametrize("offset", [AT_LAST, AT_P])
@pytest.mark.parametrize("length", [5, 16, 17, 45])
def test_draft_steps_equal_the_assistant_on_clean_kv(case: Oracle, pair: Pair, length: int, offset: int) -> None:
    """Guards past the window what assisted generation cannot: W sliding rows, either position, three chained steps."""
    prompt = prompt_of(length, case.geometry.vocab_size)
    theirs_kv = clean_kv(case, prompt, case.geometry.sliding_window)
    caches = pair.target.new_caches()
    g = pair.target.prefill(prompt, caches)
    shared = pair.target.shared_kv(caches)
    position = length + offset
    token, their_g = 77, case.forward(prompt).hidden_states[-1][0, -1]
    for _ in range(3):
        logits, g = pair.drafter.draft_step(token, g, shared, position)
        their_logits, their_g = case.draft_step(token, their_g, theirs_kv, position)
        for ours, theirs in ((logits, their_logits), (g, their_g)):
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= ATOL * theirs.std().clamp_min(1.0)
        token = int(their_logits.argmax())


def test_position_is_seen(case: Oracle, pair: Pair) -> None:
    """Guards the tests above: an offset that changed nothing could not tell P from P - 1."""
    prompt = prompt_of(12, case.geometry.vocab_size)
    caches = pair.target.new_caches()
    hidden = pair.target.prefill(prompt, caches)
    shared = pair.target.shared_kv(caches)
    at_p, _ = pair.drafter.draft_step(77, hidden, shared, len(prompt))
    at_last, _ = pair.drafter.draft_step(77, hidden, shared, len(prompt) - 1)
    assert (at_p - at_last).abs().max() > 100 * ATOL


def test_default_position_is_the_last_committed_one(case: Oracle, pair: Pair) -> None:
    """Guards the default of `draft`: P - 1 for every draft of a round."""
    prompt = prompt_of(11, case.geometry.vocab_size)
    caches = pair.target.new_caches()
    hidden = pair.target.prefill(prompt, caches)
    shared = pair.target.shared_kv(caches)
    chain, token, g = [], 77, hidden
    for _ in range(4):
        logits, g = pair.drafter.draft_step(token, g, shared, len(prompt) - 1)
        token = int(logits.reshape(-1).argmax())
        chain.append(token)
    assert list(pair.drafter.draft(77, hidden, shared, 4)) == chain


def test_drafting_leaves_the_caches_alone(case: Oracle, pair: Pair) -> None:
    """Guards the shared K/V: the drafter reads the target's rows in place and must not touch them."""
    caches = pair.target.new_caches()
    hidden = pair.target.prefill(prompt_of(30, case.geometry.vocab_size), caches)
    before = caches.snapshot_bytes()
    pair.drafter.draft(5, hidden, pair.target.shared_kv(caches), 7)
    assert caches.snapshot_bytes() == before


def test_wrong_layers_kv_gives_other_drafts(case: Oracle, pair: Pair) -> None:
    """Guards the oracle's power: K/V of the first sliding layer must not pass for those of the last."""
    prompt = prompt_of(16, case.geometry.vocab_size)
    caches = pair.target.new_caches()
    hidden = pair.target.prefill(prompt, caches)
    wrong = caches[0].committed()
    shared = pair.target.shared_kv(caches)
    right, _ = pair.drafter.draft_step(77, hidden, shared, len(prompt))
    shifted, _ = pair.drafter.draft_step(77, hidden, replace(shared, sliding=(wrong[0], wrong[1])), len(prompt))
    assert torch.isfinite(shifted).all()
    assert (right - shifted).abs().max() > 100 * ATOL
