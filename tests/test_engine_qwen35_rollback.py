"""Rollback of a Qwen 3.5 sequence: after a partial accept, its bytes are those of the same tokens one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_engine import one_thread
from support_qwen35 import TINY, qwen_pair, target_config

from engine.errors import EngineError
from engine.qwen35.cache import DraftContext, StateCache
from engine.qwen35.config import parse_target_config

WRONG = 7
CONFIG = parse_target_config(target_config())


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def target() -> Any:
    return qwen_pair().target


def tokens_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, TINY.vocab_size) for _ in range(count)]


@pytest.fixture(scope="module")
def chains(target: Any) -> dict[int, list[Any]]:
    """Prompt length -> snapshots after 0, 1, 2, ... tokens fed one at a time, and the logits of each step."""
    found = {}
    for prompt in (1, 2, 21):
        caches, tokens = target.new_caches(), tokens_of(prompt, prompt + 12)
        target.prefill(tokens[:prompt], caches)
        snapshots = [caches.snapshot_bytes()]
        for token in tokens[prompt:]:
            target.step([token], caches, "classic")
            snapshots.append(caches.snapshot_bytes())
        found[prompt] = snapshots
    return found


@pytest.mark.parametrize("prompt", [1, 2, 21], ids=lambda n: f"prompt{n}")
@pytest.mark.parametrize("rows", range(1, 9), ids=lambda n: f"rows{n}")
def test_rollback_leaves_the_state_of_one_by_one_at_every_accept_length(
    target: Any, chains: dict[int, list[Any]], prompt: int, rows: int
) -> None:
    """Guards K/V, the recurrent state and the convolution's past; prompts shorter than that past included.

    A state recomputed after a rollback, or one row off, changes every later token, and no test on text need notice.
    """
    tokens = tokens_of(prompt, prompt + 12)
    start = target.new_caches()
    target.prefill(tokens[:prompt], start)
    for kept in range(rows + 1):
        caches = start.clone()
        block = tokens[prompt : prompt + kept] + [WRONG] * (rows - kept)
        target.step(block, caches, "verify")
        caches.rollback(rows - kept)
        assert caches.snapshot_bytes() == chains[prompt][kept], f"{kept} of {rows} rows kept"
    assert start.snapshot_bytes() == chains[prompt][0], "clones must not share what a step writes"


def test_rounds_of_changing_size_never_drift_from_the_chain(target: Any, chains: dict[int, list[Any]]) -> None:
    """Guards states that survive a first rollback but not a second one on top of it."""
    tokens, caches, done = tokens_of(21, 33), target.new_caches(), 0
    target.prefill(tokens[:21], caches)
    for rows, kept in ((4, 1), (8, 0), (2, 2), (8, 3), (5, 1), (3, 3), (4, 2)):
        right = tokens[21 + done : 21 + done + kept]
        target.step(right + [WRONG] * (rows - kept), caches, "verify")
        caches.rollback(rows - kept)
        done += kept
        assert caches.snapshot_bytes() == chains[21][done]
    assert done == 12


def test_a_block_can_be_dropped_row_by_row_and_whole(target: Any, chains: dict[int, list[Any]]) -> None:
    """`steps` measures a block of 8 and drops all of it; a localizer drops what it likes."""
    tokens, caches = tokens_of(21, 33), target.new_caches()
    target.prefill(tokens[:21], caches)
    target.step(tokens[21:29], caches, "verify")
    for left in range(7, -1, -1):
        caches.rollback(1)
        assert caches.snapshot_bytes() == chains[21][left]
    with pytest.raises(EngineError, match="cannot roll back 1 rows, the states before 0 rows are kept"):
        caches.state(0).rollback(1)


def test_the_base_stage_rolls_back_to_states_of_its_own(target: Any) -> None:
    """A stage that must diverge still has to leave the tokens it kept, or it would decline for the wrong reason."""
    base, tokens = qwen_pair(stage="base", dtype=torch.float32).target, tokens_of(21, 33)
    caches, whole = base.new_caches(), base.new_caches()
    base.prefill(tokens[:21], caches)
    base.prefill(tokens[:21], whole)
    base.step([*tokens[21:24], WRONG, WRONG], caches, "verify")
    caches.rollback(2)
    base.step(tokens[21:24], whole, "verify")
    for ours, theirs in zip(caches.layers, whole.layers, strict=True):
        if isinstance(ours, StateCache):
            assert (ours.state - theirs.state).abs().max().item() < 1e-4
            assert ours.length == theirs.length == 24


def test_states_beyond_the_last_eight_rows_are_not_kept() -> None:
    """48 MiB a row in the real model: a cache that kept them all would eat the machine."""
    cache = StateCache(CONFIG, torch.float32)
    empty = cache.nbytes
    for step in range(30):
        state = torch.full_like(cache.state, float(step))
        cache.append(torch.zeros(1, CONFIG.conv_width), [state])
    one = cache.state.numel() * 4
    assert cache.nbytes <= empty + 8 * (one + CONFIG.conv_width * 4)
    cache.rollback(8)
    assert cache.state.unique().tolist() == [21.0]
    with pytest.raises(EngineError, match="cannot roll back 1 rows"):
        cache.rollback(1)


def test_inputs_and_states_must_be_of_the_same_rows() -> None:
    """One state too few would shift every later rollback by a row."""
    cache = StateCache(CONFIG, torch.float32)
    with pytest.raises(EngineError, match="2 rows of inputs, 1 states"):
        cache.append(torch.zeros(2, CONFIG.conv_width), [cache.state])


def test_a_context_is_cut_inside_waiting_taps_and_read_rows() -> None:
    """Taps of rejected rows that stayed would be read as if they had been accepted."""
    context = DraftContext()
    context.add(0, torch.arange(5.0).view(5, 1))
    context.add(5, torch.arange(5.0, 9.0).view(4, 1))
    context.cut(7)
    assert context.take(7).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert context.take(0) is None
    context.add(0, torch.arange(4.0).view(4, 1))
    context.cut(0)
    assert context.length == 0
    context.add(3, torch.ones(1, 1))  # a gap: what lies before was never tapped
    with pytest.raises(EngineError, match="4 rows are committed, hidden states of 0 were kept"):
        context.take(4)
