"""The DFlash drafter against two oracles, over rounds: numpy in float64, and mlx-vlm on MLX's CPU if installed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_dflash import Float64Drafter, MlxDrafter, argmax
from support_engine import one_thread
from support_qwen35 import TINY, QwenGeometry, drafter_config, qwen_dirs, random_drafter, random_target, write_drafter

from engine.decode import classic_decode
from engine.errors import ConfigError, EngineError, PairError
from engine.pair import Pair, load_pair
from engine.qwen35.cache import DraftContext
from engine.qwen35.config import parse_drafter_config
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode

LOGITS_ATOL = 2e-4
ROUNDS = ((3, 7), (0, 7), (3, 3), (7, 7), (1, 1), (2, 6))
"""(drafts accepted, drafts asked for) of successive rounds."""


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """In fp32 from fp32 files: drafts are compared id by id."""
    from support_qwen35 import write_target

    folder = tmp_path_factory.mktemp("dflash")
    target = write_target(folder / "target", dtype=torch.float32)
    return load_pair(target, write_drafter(folder / "drafter", dtype=torch.float32), dtype=torch.float32)


def rounds(pair: Pair) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """(token, taps of all committed rows, taps of the new ones, our logits, count) of each round."""
    draw, target = random.Random(3), pair.target
    caches = target.new_caches()
    target.prefill([draw.randrange(2, TINY.vocab_size) for _ in range(19)], caches)
    every: list[torch.Tensor] = []
    for accepted, count in ROUNDS:
        shared = target.shared_kv(caches)
        new = torch.cat(shared.context._taps)
        every.append(new)
        token = draw.randrange(2, TINY.vocab_size)
        yield token, torch.cat(every), new, pair.drafter.draft_logits(token, shared, count), count
        target.step([token] + [draw.randrange(2, TINY.vocab_size) for _ in range(count)], caches, "verify")
        caches.rollback(count - accepted)


def test_drafts_equal_a_float64_drafter_without_a_cache(pair: Pair) -> None:
    """Guards positions, the context's K/V across rounds and partial accepts, and that block rows are not kept.

    The oracle computes every committed row anew, so a K/V row that was lost, kept too long or turned at another
    position shows.
    """
    oracle = Float64Drafter(TINY, random_drafter(), random_target()["embed_tokens.weight"])
    seen: set[int] = set()
    for token, taps, _, ours, count in rounds(pair):
        theirs = oracle.logits(token, taps, count)
        assert ours.shape == theirs.shape
        assert np.abs(ours.double().numpy() - theirs).max() < LOGITS_ATOL
        assert argmax(ours.numpy()) == argmax(theirs)
        seen |= set(argmax(theirs))
    assert len(seen) > 6, "drafts that are all alike would agree by luck"


def test_drafts_equal_mlx_vlms_drafter(pair: Pair) -> None:
    """Another project's drafter, with its own cache: agreement is not our reading of the paper alone."""
    pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")
    oracle = MlxDrafter(TINY, random_drafter(), random_target()["embed_tokens.weight"])
    for token, _, new, ours, count in rounds(pair):
        theirs = oracle.logits(token, new, count)
        assert np.abs(ours.numpy() - theirs).max() < LOGITS_ATOL
        assert argmax(ours.numpy()) == argmax(theirs)


def test_drafting_changes_nothing_that_the_target_reads(pair: Pair) -> None:
    """The context lives with the caches; K/V of the block must stay out of it."""
    target, caches = pair.target, pair.target.new_caches()
    hidden = target.prefill(list(range(5, 25)), caches)
    before = caches.snapshot_bytes()
    first = pair.drafter.draft(9, hidden, target.shared_kv(caches), 7)
    assert caches.snapshot_bytes() == before
    assert [layer.length for layer in caches.context.kv] == [20] * TINY.drafter_layers
    assert pair.drafter.draft(9, hidden, target.shared_kv(caches), 7) == first, "a second draft must see the same rows"


def test_a_pair_on_a_gpu_leaves_attention_to_kernels_that_take_any_length() -> None:
    """cuDNN's attention, which torch prefers on an H200, plans anew for every length: a draft of each round would wait
    for it, and the timed runs would hold it."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with pytest.raises((RuntimeError, AssertionError)):  # no machine has such a device
            load_pair(*qwen_dirs(), device="cuda:99")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def test_drafts_after_classic_steps_are_refused(pair: Pair) -> None:
    """Classic decode keeps no taps; drafting over the gap would read rows at the wrong positions."""
    target, caches = pair.target, pair.target.new_caches()
    hidden = target.prefill([5, 6, 7], caches)
    target.step([8], caches, "classic")
    with pytest.raises(EngineError, match="4 rows are committed, hidden states of 3 were kept"):
        pair.drafter.draft(9, hidden, target.shared_kv(caches), 3)
    caches.rollback(1)
    assert len(pair.drafter.draft(9, hidden, target.shared_kv(caches), 3)) == 3


def test_the_shared_context_check_sees_a_wrong_layer_and_stale_rows(pair: Pair) -> None:
    """A drafter that reads the wrong rows never changes the text: only bytes show it."""
    tokens = [(7 * i + 3) % TINY.vocab_size for i in range(30)]
    assert pair.family.shared_problem(pair.target, tokens) is None

    class Off:
        """The target, with its taps one layer late."""

        def __init__(self, base: Any) -> None:
            self._base, self.tapped = base, tuple(layer + 1 for layer in base.tapped)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._base, name)

    problem = pair.family.shared_problem(Off(pair.target), tokens)
    assert problem is not None
    assert problem.endswith("bytes differ from what layers 2, 4, 7 gave")


@pytest.mark.parametrize("count", [0, 16])
def test_a_block_that_the_drafter_was_not_made_for_is_refused(pair: Pair, count: int) -> None:
    """More masks than it was trained with would give drafts, and bad ones."""
    caches = pair.target.new_caches()
    hidden = pair.target.prefill([5], caches)
    with pytest.raises(EngineError, match=f"{count} drafts asked for, its block of 16 holds fewer"):
        pair.drafter.draft(9, hidden, pair.target.shared_kv(caches), count)


@pytest.mark.parametrize(
    ("geometry", "says"),
    [
        (QwenGeometry(hidden_size=128), "drafter hidden_size 128, target hidden_size 64"),
        (QwenGeometry(vocab_size=600), "drafter vocab_size 600, target vocab_size 512"),
        (QwenGeometry(num_hidden_layers=9), "drafter num_target_layers 9, target num_hidden_layers 8"),
    ],
    ids=["width", "vocabulary", "layers"],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, geometry: QwenGeometry, says: str) -> None:
    """It would draft garbage, which reads like a bad drafter."""
    drafter = write_drafter(tmp_path / "other", geometry, random_drafter(geometry))
    with pytest.raises(PairError, match=f"{says}: this drafter was made for another target"):
        load_pair(qwen_dirs()[0], drafter)


def test_a_drafter_of_another_family_is_refused() -> None:
    """Gemma's drafter reads K/V that a Qwen target does not have."""
    from support_engine import random_pair_dirs

    gemma = random_pair_dirs()
    with pytest.raises(PairError, match="a drafter of family gemma4, but qwen-tiny is a qwen35 target"):
        load_pair(qwen_dirs()[0], gemma.drafter)
    with pytest.raises(PairError, match="a drafter of family qwen35, but tiny-it is a gemma4 target"):
        load_pair(gemma.target, qwen_dirs()[1])
    with pytest.raises(PairError, match="qwen-tiny: this is a target; give it as target, not as drafter"):
        load_pair(qwen_dirs()[0], qwen_dirs()[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": None}, "block_size must be a positive integer"),
        ({"num_target_layers": 6}, r"target_layer_ids \[1, 3, 6\] name a layer past num_target_layers 6"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": 512, "target_layer_ids": [1]}}, "mask_token_id 512 is outside the vocab"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [3, 1]}}, "must rise without repeats"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": []}}, "must be a list of layer indices"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1], "causal": True}}, "causal True"),
        ({"layer_types": ["sliding_attention"]}, "only full_attention in a drafter"),
        ({"final_logit_softcapping": 30.0}, "not supported: final_logit_softcapping 30.0"),
        ({"rope_scaling": {"type": "yarn"}}, "scaled RoPE"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ],
    ids=str,
)
def test_a_drafters_config_is_never_guessed(changes: dict[str, Any], says: str) -> None:
    """A feature that is passed over in silence gives drafts of another model."""
    assert parse_drafter_config(drafter_config()).target_layer_ids == TINY.taps
    with pytest.raises(ConfigError, match=says):
        parse_drafter_config(drafter_config(**changes))


def test_a_drafter_that_reads_hidden_states_one_row_late_is_seen_by_acceptance_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text stays exact whatever the drafter reads; on the trained pair the counters show it (0.60 to 0.21)."""
    checkpoints = Path(__file__).resolve().parent.parent / "specs" / "checkpoints"
    pair = load_pair(checkpoints / "qwen35-nano-4bit", checkpoints / "qwen35-nano-dflash")
    assert pair.tokenizer is not None
    prompt = pair.tokenizer.encode_raw((checkpoints.parent / "prompts" / "docs.txt").read_text(encoding="utf-8"))
    request = GenerationRequest(prompt, 56, ignore_stop=True)
    classic = classic_decode(pair.target, request, 0).tokens
    take = DraftContext.take

    def late(self: DraftContext, length: int) -> torch.Tensor | None:
        taps = take(self, length)
        return None if taps is None else taps.roll(1, 0)

    rates = []
    for handed in (take, late):
        monkeypatch.setattr(DraftContext, "take", handed)
        found = speculative_decode(pair.target, pair.drafter, request, 4, 0)
        assert found.tokens == classic
        assert found.rounds is not None
        rates.append(found.rounds.acceptance_rate)
    assert rates[0] > 0.4
    assert rates[1] < rates[0] - 0.2
