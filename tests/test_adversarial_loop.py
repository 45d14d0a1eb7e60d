"""Faults planted in the round loop and in a deterministic target: parity, accounts and the probe catch them.

A fault enters through an object (an accept function, a request, a target), never through a global.
Every test also shows that the same check passes without the fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support_loop import FakeTarget, OneWidth, hostile, oracle, parity, script, scripted

from engine.probe import ExactnessProbe
from engine.requests import GenerationRequest
from engine.speculative import accepted_prefix
from harness.stats import counter_problem

PROMPT = (3, 17, 5, 11, 2, 23, 8)


def loop_parity(corrupt, request=None, rounds_request=None, accept=accepted_prefix, block_size=4):
    """Rounds with a planted loop fault against sound classic decode."""
    request = request or GenerationRequest(PROMPT, 25)
    return parity(
        FakeTarget(),
        FakeTarget(),
        request,
        block_size,
        scripted(request, 29, corrupt),
        rounds_request=rounds_request,
        accept=accept,
    )


def one_too_many(drafts, argmax):
    """Accepts the first wrong draft as well."""
    return min(accepted_prefix(drafts, argmax) + 1, len(drafts))


def one_too_few(drafts, argmax):
    """Drops the last right draft but still takes the target's token behind it."""
    return max(accepted_prefix(drafts, argmax) - 1, 0)


def test_accepting_one_draft_too_many_breaks_parity_at_that_token():
    """Guards an off-by-one accept: the wrong draft of the first round, token 3, is emitted."""
    corrupt = script("1101101")
    assert loop_parity(corrupt).holds
    faulty = loop_parity(corrupt, accept=one_too_many)
    assert not faulty.holds
    assert faulty.first_token == 3
    assert loop_parity(oracle, accept=one_too_many).holds, "with nothing to reject the fault is invisible"


def test_accepting_one_draft_too_few_only_costs_speed_and_the_counters_show_it():
    """Guards an off-by-one the other way: the text stays right, so only acceptance can tell."""
    sound, faulty = loop_parity(oracle), loop_parity(oracle, accept=one_too_few)
    assert sound.holds
    assert faulty.holds
    assert sound.rounds.rounds.accepted_at == (1.0, 1.0, 1.0)
    assert faulty.rounds.rounds.accepted_at == (1.0, 1.0, 0.0)


@dataclass(frozen=True)
class DeafRequest(GenerationRequest):
    """Looks for a stop token only at the end of a block."""

    def cut(self, emitted, already):
        kept = tuple(emitted[: max(self.max_tokens - already, 0)])
        return kept, bool(kept) and self.stops_at(kept[-1])


def test_a_stop_inside_a_block_that_is_passed_breaks_parity_right_after_it():
    """Guards text after an accepted stop token."""
    free = loop_parity(oracle).classic.tokens
    stop_at = next(at for at in range(1, 9) if at % 4 and free.index(free[at]) == at)
    request = GenerationRequest(PROMPT, 25, stop_ids=(free[stop_at],))
    deaf = DeafRequest(PROMPT, 25, stop_ids=(free[stop_at],))
    assert loop_parity(oracle, request).holds
    faulty = loop_parity(oracle, request, deaf)
    assert not faulty.holds
    assert faulty.first_token == stop_at + 1
    assert faulty.first_cache is not None, "the cache holds rows after the stop, too"


@dataclass(frozen=True)
class GreedyRequest(GenerationRequest):
    """Forgets the budget inside a block."""

    def cut(self, emitted, already):
        return tuple(emitted), False


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 6], ids="budget{}".format)
def test_a_block_that_overruns_the_budget_breaks_parity_at_the_budget(max_tokens):
    """Guards six tokens asked for and nine returned."""
    request = GenerationRequest(PROMPT, max_tokens)
    assert loop_parity(oracle, request).holds
    assert loop_parity(oracle, request, GreedyRequest(PROMPT, max_tokens)).first_token == max_tokens


@dataclass(frozen=True)
class NoBonusRequest(GenerationRequest):
    """Drops the target's own token when every draft of a block of four was accepted."""

    def cut(self, emitted, already):
        return super().cut(emitted[:3], already)


def test_a_dropped_bonus_token_is_found_by_the_accounts():
    """Guards a loop that loses its free token: the text is right, but rounds and tokens do not add up."""

    def accounts(result):
        rounds, tokens = result.rounds.rounds, len(result.rounds.tokens)
        return counter_problem(rounds.accepted_per_round, rounds.drafted_per_round, tokens=tokens, block_size=4)

    sound, faulty = loop_parity(oracle), loop_parity(oracle, rounds_request=NoBonusRequest(PROMPT, 25))
    assert sound.holds
    assert accounts(sound) is None
    assert faulty.rounds.tokens == faulty.classic.tokens, "the text alone does not show it"
    assert (sound.rounds.rounds.num_rounds, faulty.rounds.rounds.num_rounds) == (6, 8)
    identity = "emitted = prefill + rounds + accepted - cut"
    assert accounts(faulty) == f"{identity}: 25 tokens, but prefill and 8 rounds account for 30..33"


class StaleTarget(FakeTarget):
    """A rollback after the ring has wrapped does nothing to the ring: rejected keys stay where they were."""

    def new_caches(self):
        self.caches = super().new_caches()
        self.caches.stale = True
        return self.caches

    def step(self, tokens, caches, mode, capture=None):
        length = caches.length
        output = super().step(tokens, caches, mode, capture)
        if mode == "verify" and length > len(caches.ring):
            slots = [at % len(caches.ring) for at in range(length, caches.length)]
            caches.ring[slots[0]] = (length, caches.ring[slots[-1]][1])
        return output


def test_a_key_of_a_rejected_row_that_stays_in_a_wrapped_ring_breaks_the_cache_bytes():
    """Guards a rewind that is lost once the ring has gone round (prompt of 33, window 16, nothing accepted)."""
    request = GenerationRequest(tuple((5 * i * i + 1) % 29 for i in range(33)), 20)
    drafter = scripted(request, 29, hostile)
    assert parity(FakeTarget(), FakeTarget(), request, 4, drafter).holds
    faulty = parity(FakeTarget(), StaleTarget(), request, 4, drafter)
    assert faulty.first_cache == (34, 0), "after the first round, in the ring"
    assert faulty.first_token is not None


class OneInputOnly(FakeTarget):
    """Off by one bit only after one particular token, which two of three draws do not contain."""

    def step(self, tokens, caches, mode, capture=None):
        output = super().step(tokens, caches, mode, capture)
        for row, token in enumerate(tokens):
            if mode == "verify" and token == 3 + 977 * 2 + 1 + 13:
                output.logits[row].view(torch.int32)[0] ^= 1
        return output


def test_a_fault_that_shows_on_one_input_needs_several_draws():
    """Guards a probe with a single input: the first two draws pass, the third does not."""

    def verdicts(target):
        return [outcome.passed for outcome in ExactnessProbe(target, 4).run((8, 8, 8), walk=False).outcomes]

    assert verdicts(FakeTarget(vocab_size=997 * 4)) == [True, True, True]
    assert verdicts(OneInputOnly(vocab_size=997 * 4)) == [True, True, False]


def test_comparing_argmax_would_miss_what_the_bytes_show():
    """Guards a probe that compares greedy tokens: they are equal in every row that differs in a bit."""
    target = OneWidth()
    caches = target.new_caches()
    target.prefill(list(PROMPT), caches)
    chain, block = caches.clone(), caches.clone()
    tokens = [5, 9, 1, 4]
    single = [target.step([token], chain, "classic") for token in tokens]
    together = target.step(tokens, block, "verify")
    assert [output.argmax[0] for output in single] == together.argmax
    assert not ExactnessProbe(target, 4).run((8,), walk=False).passed
    assert ExactnessProbe(FakeTarget(), 4).run((8,), walk=False).passed
