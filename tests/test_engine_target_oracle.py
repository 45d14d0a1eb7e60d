"""The target against transformers in fp32: logits at every position, greedy ids past the window, both families.

The models are random, 12 layers deep and saved by transformers, so names, shards, config and numbers are its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers, the numeric oracle, is not installed")

from support_broken import edit_tensors
from support_engine import copy_of, one_thread, read_config, write_json
from support_oracles import Oracle, load_oracle_pair, oracle

from engine.config import DrafterConfig, TargetConfig
from engine.decode import classic_decode
from engine.dispatch import STAGES, DispatchPolicy
from engine.flags import Flags
from engine.pair import Pair, load_pair
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode

LOGITS_ATOL = 1e-4
"""fp32 sums in another order, over 12 layers whose logits spread by about 2."""

CASES = [("12b", 16), ("31b", 8)]
ALL_CASES = [("12b", 8), ("12b", 16), ("31b", 8), ("31b", 16)]
GREEDY_TOKENS = 72
ROUND_TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """<bos> and random ids."""
    draw = random.Random(1000 * seed + length)
    return [2, *(draw.randrange(3, vocab_size) for _ in range(length - 1))]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-window{case[1]}")
def case(request: pytest.FixtureRequest) -> Oracle:
    return oracle(*request.param)


@pytest.fixture(scope="module")
def pair(case: Oracle) -> Pair:
    return load_oracle_pair(case)


@pytest.fixture(scope="module")
def text(case: Oracle) -> list[int]:
    """A prompt within the window and what transformers generates after it, past both windows."""
    prompt = prompt_of(7, case.geometry.vocab_size)
    return prompt + list(case.greedy(prompt, GREEDY_TOKENS))


@pytest.fixture(scope="module")
def expected(case: Oracle, text: list[int]) -> Tensor:
    """transformers' logits at every position [n, V], from one uncached forward."""
    return case.logits(text)


def assert_close(ours: Tensor, theirs: Tensor, spread: float = 1.0) -> None:
    """Rows within the tolerance, none of them NaN; `spread` scales it for values that are larger than logits."""
    assert ours.shape == theirs.shape
    worst = (ours.float() - theirs).abs().max().item()
    assert worst <= LOGITS_ATOL * spread, f"rows differ by {worst:.2e}"


def test_saved_geometry_is_read_as_it_was_written(case: Oracle, pair: Pair) -> None:
    """Guards per_layer_config, where transformers puts the full layers' head_dim and KV heads, under `05` keys too."""
    geometry = case.geometry
    for config in (pair.target.config, pair.drafter.config):
        full, sliding = config.layer_shape("full"), config.layer_shape("sliding")
        assert (full.num_kv_heads, full.head_dim) == geometry.heads("full_attention")
        assert (sliding.num_kv_heads, sliding.head_dim) == geometry.heads("sliding_attention")
        assert config.sliding_window == geometry.sliding_window
    assert isinstance(pair.target.config, TargetConfig)
    assert isinstance(pair.drafter.config, DrafterConfig)
    assert pair.drafter.config.final_logit_softcapping is None
    assert pair.target.config.final_logit_softcapping == 30.0


def test_oracle_text_is_worth_comparing(text: list[int], expected: Tensor) -> None:
    """Guards against flat logits and looping text, on which a wrong model agrees by luck."""
    assert len(set(text)) >= 25
    assert expected.std().item() > 1.0


def test_classic_steps_give_the_oracles_logits_at_every_position(pair: Pair, text: list[int], expected: Tensor) -> None:
    """Guards every op of the layer, RoPE positions, and the ring after it has gone round."""
    caches = pair.target.new_caches()
    rows = [pair.target.step([token], caches, "classic").logits[0] for token in text]
    assert_close(torch.stack(rows), expected)


@pytest.mark.parametrize("rows", [2, 3, 4, 7, 8])
def test_verify_blocks_give_the_oracles_logits_at_every_position(
    pair: Pair, text: list[int], expected: Tensor, rows: int
) -> None:
    """Guards each row's own visible keys in a block: one too many or too few moves logits far beyond the tolerance."""
    caches = pair.target.new_caches()
    blocks = [
        pair.target.step(text[start : start + rows], caches, "verify").logits for start in range(0, len(text), rows)
    ]
    assert_close(torch.cat(blocks), expected)


POLICIES = {stage: DispatchPolicy(stage=stage) for stage in STAGES} | {
    "large_d:0": DispatchPolicy(flags=Flags(sdpa_large_d=False)),
    "base+large_d:0": DispatchPolicy(stage="base", flags=Flags(sdpa_large_d=False)),
    "multirow:0": DispatchPolicy(flags=Flags(qmv_multirow=False)),
    "compiled_mlp:0": DispatchPolicy(flags=Flags(compiled_mlp=False)),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_stage_and_flag_is_the_same_function(pair: Pair, text: list[int], expected: Tensor, name: str) -> None:
    """Guards the kernels that only a stage or a flag reaches: they may round otherwise, never compute otherwise."""
    target = pair.with_policy(POLICIES[name]).target
    caches = target.new_caches()
    blocks = [target.step([token], caches, "classic").logits for token in text[:20]]
    blocks += [target.step(text[start : start + 5], caches, "verify").logits for start in range(20, len(text), 5)]
    assert_close(torch.cat(blocks), expected)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 23, 24, 41, 79])
def test_prefill_gives_the_oracles_last_logits(pair: Pair, text: list[int], expected: Tensor, length: int) -> None:
    """Guards the causal window mask of prefill around both windows and the ring's 7 slots of margin."""
    caches = pair.target.new_caches()
    hidden = pair.target.prefill(text[:length], caches)
    assert_close(pair.target.logits(hidden[None]), expected[length - 1 : length])
    assert caches.length == length


@pytest.mark.parametrize("cuts", [(1,), (16,), (3, 30), (24, 25, 60), (70,)], ids=str)
def test_prefill_in_parts_goes_on_from_the_caches(
    pair: Pair, text: list[int], expected: Tensor, cuts: tuple[int, ...]
) -> None:
    """Guards a later range's view of earlier ranges, wrapped ring included, and a step after it."""
    caches = pair.target.new_caches()
    edges = (0, *cuts, len(text) - 1)
    for start, end in itertools.pairwise(edges):
        hidden = pair.target.prefill(text[start:end], caches)
        assert_close(pair.target.logits(hidden[None]), expected[end - 1 : end])
    step = pair.target.step(text[-1:], caches, "classic")
    assert_close(step.logits, expected[-1:])


def test_unpadded_step_is_the_same_function(pair: Pair, text: list[int], expected: Tensor) -> None:
    """Guards the timing-only step: a figure for another computation would be no baseline."""
    caches = pair.target.new_caches()
    pair.target.prefill(text[:30], caches)
    greedy = [pair.target.unpadded_step(token, caches) for token in text[30:-1]]
    assert greedy == expected[30:-1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("family", "window", "length"), [(*case, 5 if case[1] == 16 else 19) for case in ALL_CASES], ids=str
)
def test_greedy_ids_equal_generate_past_the_window(family: str, window: int, length: int) -> None:
    """Guards the whole decode loop over 72 tokens, from prompts within the window and beyond it."""
    case = oracle(family, window)
    pair = load_oracle_pair(case)
    prompt = prompt_of(length, case.geometry.vocab_size, seed=1)
    generated = case.greedy(prompt, GREEDY_TOKENS)
    request = GenerationRequest(tuple(prompt), GREEDY_TOKENS)
    assert classic_decode(pair.target, request, prefill_chunk=0).tokens == generated
    short = GenerationRequest(tuple(prompt), ROUND_TOKENS)
    rounds = speculative_decode(pair.target, pair.drafter, short, block_size=4, prefill_chunk=11)
    assert rounds.tokens == generated[:ROUND_TOKENS]
    assert rounds.rounds is not None
    assert rounds.rounds.num_rounds > 0


def test_hidden_row_is_the_final_normed_one(case: Oracle, pair: Pair, text: list[int]) -> None:
    """Guards what the drafter is given: transformers' last hidden state, after the final norm."""
    theirs = case.forward(text).hidden_states[-1][0]
    caches = pair.target.new_caches()
    hidden = pair.target.prefill(text[:-4], caches)
    step = pair.target.step(text[-4:], caches, "verify")
    assert_close(torch.cat((hidden[None], step.hidden)), theirs[-5:], spread=theirs.std().item())


@pytest.mark.parametrize("length", [6, 40])
def test_shared_kv_is_the_last_layer_of_each_kind(case: Oracle, pair: Pair, text: list[int], length: int) -> None:
    """Guards the layers that the drafter reads, and that a rejected row never reaches it."""
    theirs = case.forward(text[:length]).shared_kv_states
    caches = pair.target.new_caches()
    pair.target.prefill(text[:length], caches)
    pair.target.step([3, 4, 5], caches, "verify")
    caches.rollback(3)
    shared = pair.target.shared_kv(caches)
    window = case.geometry.sliding_window
    assert shared.length == length
    for ours, kind in ((shared.sliding, "sliding_attention"), (shared.full, "full_attention")):
        for mine, other in zip(ours, theirs[kind], strict=True):
            rows = length if kind == "full_attention" else min(length, window)
            assert_close(mine, other[0][:, -rows:])


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.", ""])
def test_names_of_every_release_form_load_alike(tmp_path: Path, prefix: str) -> None:
    """Guards the name prefixes of hub, MLX and text-only files, beside vision tensors that are none of our business."""
    case = oracle("12b", 8)
    folder = copy_of(case.target_dir, tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
        if prefix not in ("model.", ""):
            outer = "model." if prefix.startswith("model.") else ""
            tensors[f"{outer}vision_embedder.patch_dense.weight"] = torch.ones(4, 12)
            tensors[f"{outer}vision_embedder.patch_dense.bias"] = torch.ones(4)
            tensors[f"{outer}embed_vision.embedding_projection.weight"] = torch.ones(64, 4)
            tensors[f"{outer}embed_audio.embedding_projection.weight"] = torch.ones(64, 4)

    edit_tensors(folder, rename)
    if prefix not in ("model.", ""):
        write_json(folder / "config.json", {"model_type": "gemma4_unified", "text_config": read_config(folder)})
    target = load_pair(folder, None, DispatchPolicy(), dtype=torch.float32).target
    text = prompt_of(20, case.geometry.vocab_size)
    hidden = target.prefill(text, target.new_caches())
    assert_close(target.logits(hidden[None]), case.logits(text)[-1:])


def test_bf16_loses_no_more_than_transformers_does(case: Oracle, text: list[int], expected: Tensor) -> None:
    """Guards the rounding places of the bf16 path: an extra one costs accuracy that transformers' bf16 run keeps."""

    def error(logits: Tensor) -> float:
        return ((logits.float() - expected).pow(2).mean().sqrt() / expected.std()).item()

    target = load_pair(case.target_dir, None, DispatchPolicy(), dtype=torch.bfloat16).target
    caches = target.new_caches()
    ours = error(torch.stack([target.step([token], caches, "classic").logits[0] for token in text]))
    theirs = error(case.bf16_logits(text))
    assert 0 < ours < 1.25 * theirs, f"relative error {ours:.3f}, transformers {theirs:.3f}"
