"""The probe on a Qwen 3.5 target: engages at every width, and names faults that only this family can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from support_engine import one_thread
from support_qwen35 import TINY, qwen_pair

from engine.decision import decide, prepare_mtp, required_long_draw
from engine.decode import classic_decode
from engine.flags import Flags
from engine.probe import ExactnessProbe, ProbeResult
from engine.qwen35.cache import StateCache
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode

SMALL = dataclasses.replace(TINY, num_hidden_layers=4, taps=(0, 2), drafter_layers=2)


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def probe(target: Any, block_size: int = 4, walk: bool = True, draws: tuple[int, ...] = (8,)) -> ProbeResult:
    return ExactnessProbe(target, block_size, walk_prompt=20, walk_length=40).run(draws, walk=walk)


@pytest.mark.parametrize("block_size", range(2, 9))
def test_every_width_up_to_eight_is_exact(block_size: int) -> None:
    """The claim of the row contract for this family, through draws and walks with every partial accept."""
    result = probe(qwen_pair(SMALL).target, block_size)
    assert result.passed, result.reason
    assert sum(outcome.positions for outcome in result.outcomes) == block_size + 40


def test_no_geometry_of_this_family_asks_for_a_draw_past_a_window() -> None:
    """It has none; a long draw that a spec asks for is a draw like any other, and the walk starts from a short one."""
    target = qwen_pair(SMALL).target
    assert required_long_draw(target.config, cuda=True) is None
    result = probe(target, draws=(8, 70))
    assert [outcome.name for outcome in result.outcomes] == [
        "draw 0 (8 tokens)",
        "draw 1 (70 tokens)",
        "walk of 40 from 20 tokens",
    ]
    assert decide(target.config, result, Flags(), 4, cuda=True).engaged


def test_a_rollback_that_keeps_the_state_is_named_where_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commonest bug with recurrent layers: K/V are cut, the state has already seen the rejected rows.

    One block after a prompt cannot show it, which is why the walk is not optional.
    """

    def only_the_length(self: StateCache, n: int) -> None:
        self.length -= n

    monkeypatch.setattr(StateCache, "rollback", only_the_length)
    target = qwen_pair(SMALL).target
    assert probe(target, walk=False).passed
    result = probe(target)
    assert not result.passed
    found = result.first_divergence
    assert found is not None
    assert (found.layer, found.kind, found.op) == (0, "linear", "state")


def test_a_convolution_that_forgets_its_past_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose convolution starts from zeros is wrong in its first three rows and right after them."""
    real = StateCache.conv_inputs

    def forgetful(self: StateCache, rows: Any) -> Any:
        found = real(self, rows)
        real_rows = rows.shape[0] == 8 and bool((rows[1] != rows[2]).any())
        if real_rows:
            found = found.clone()
            found[: self.past] = 0
        return found

    monkeypatch.setattr(StateCache, "conv_inputs", forgetful)
    result = probe(qwen_pair(SMALL).target, walk=False)
    assert not result.passed
    found = result.first_divergence
    assert found is not None
    assert (found.layer, found.kind, found.op, found.position) == (0, "linear", "convolution", 0)


def test_stages_break_what_they_say() -> None:
    """`base` breaks the recurrence first, `attention` RoPE alone; classic's bytes are the same in all."""
    results = {stage: probe(qwen_pair(SMALL, stage).target, walk=False) for stage in ("base", "attention", "rowwise")}
    assert len({result.chain_sha256 for result in results.values()}) == 1
    firsts = {stage: result.first_divergence for stage, result in results.items()}
    assert firsts["rowwise"] is None
    assert firsts["base"] is not None
    assert (firsts["base"].layer, firsts["base"].op) == (0, "delta rule")
    assert firsts["attention"] is not None
    assert firsts["attention"].op in ("q_rope", "k_rope")


def test_rounds_equal_classic_decode_whatever_the_drafter_proposes() -> None:
    """Guards the loop end to end with drafts that are right, wrong and cut short by the budget."""
    pair = qwen_pair(SMALL)
    request = GenerationRequest(tuple(range(5, 30)), 33, ignore_stop=True)
    classic = classic_decode(pair.target, request, 16)

    class Cheater:
        """Proposes the right tokens, and a wrong one at a place that moves."""

        def __init__(self) -> None:
            self.rounds = 0

        def draft(self, token: int, hidden: Any, shared: Any, count: int) -> list[int]:
            done = shared.length - len(request.tokens) + 1
            found = [*classic.tokens[done : done + count], *[7] * count][:count]
            found[self.rounds % count] ^= self.rounds % 3 == 0
            self.rounds += 1
            return found

    for block_size in (2, 5, 8):
        mixed = speculative_decode(pair.target, Cheater(), request, block_size, 16)
        assert mixed.tokens == classic.tokens
        assert mixed.rounds is not None
        assert len(set(mixed.rounds.accepted_per_round)) > 1
        own = speculative_decode(pair.target, pair.drafter, request, block_size, 16)
        assert own.tokens == classic.tokens


def test_a_width_above_the_contract_declines_with_its_reason() -> None:
    """The drafter was trained for blocks of 16, so somebody will ask for them."""
    decision, result = prepare_mtp(qwen_pair(SMALL), 16)
    assert result is None
    assert decision.log_line == "MTP declined: block size 16 is above the 8 rows that verify keeps exact"
