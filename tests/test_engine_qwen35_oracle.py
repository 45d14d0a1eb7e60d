"""The Qwen 3.5 target against transformers in fp32: logits at every position, greedy ids, tapped hidden states.

The model is random, 8 layers deep (6 linear, 2 full) and saved by transformers, so its files are its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers, the numeric oracle, is not installed")

from support_engine import one_thread, read_config, write_json
from support_qwen35 import PACKED, TINY, QwenOracle, mlx_tensors, qwen_oracle, write_target

from engine.decode import classic_decode
from engine.dispatch import STAGES, DispatchPolicy
from engine.errors import CheckpointError
from engine.flags import Flags
from engine.pair import Pair, load_pair
from engine.requests import GenerationRequest

LOGITS_ATOL = 1e-4
"""fp32 sums in another order, over 8 layers and 140 tokens of recurrence, with logits that spread by 1.2."""

GREEDY_TOKENS = 128


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case() -> QwenOracle:
    return qwen_oracle()


@pytest.fixture(scope="module")
def pair(case: QwenOracle) -> Pair:
    return load_pair(case.folder, None, DispatchPolicy(), dtype=torch.float32)


@pytest.fixture(scope="module")
def text(case: QwenOracle) -> list[int]:
    """A prompt of 7 and what transformers generates after it, past two chunks of 64."""
    draw = random.Random(7)
    prompt = [draw.randrange(2, case.geometry.vocab_size) for _ in range(7)]
    return prompt + list(case.greedy(prompt, GREEDY_TOKENS))


@pytest.fixture(scope="module")
def expected(case: QwenOracle, text: list[int]) -> Tensor:
    """transformers' logits at every position [n, V], from one uncached forward."""
    logits: Tensor = case.forward(text).logits[0]
    return logits


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    worst = (ours.float() - theirs).abs().max().item()
    assert worst <= LOGITS_ATOL, f"rows differ by {worst:.2e}"


def test_the_saved_geometry_is_read_as_it_was_written(case: QwenOracle, pair: Pair) -> None:
    """Guards rope_parameters and layer_types, which transformers moved into their present form only lately."""
    config, geometry = pair.target.config, case.geometry
    assert list(config.layer_types) == geometry.layer_types
    assert (config.head_dim, config.rotary_dim) == (32, 8)
    assert (config.conv_width, config.value_width) == (160, 96)
    assert config.rope_theta == 1e7
    assert pair.family.name == "qwen35"


def test_the_oracles_text_is_worth_comparing(text: list[int], expected: Tensor) -> None:
    """Guards against flat logits and looping text, on which a wrong model agrees by luck."""
    assert len(set(text)) >= 80
    assert expected.std().item() > 1.0


def test_classic_decode_gives_the_oracles_ids_and_logits(pair: Pair, text: list[int], expected: Tensor) -> None:
    """Guards every op of both layer kinds, over 128 greedy tokens; ids alone would hide a small mistake."""
    prompt, continuation = text[:7], text[7:]
    found = classic_decode(pair.target, GenerationRequest(tuple(prompt), GREEDY_TOKENS, ignore_stop=True), 2048)
    assert list(found.tokens) == continuation
    caches = pair.target.new_caches()
    rows = [pair.target.step([token], caches, "classic").logits[0] for token in text]
    assert_close(torch.stack(rows), expected)


@pytest.mark.parametrize("rows", [3, 8])
def test_verify_blocks_give_the_oracles_logits(pair: Pair, text: list[int], expected: Tensor, rows: int) -> None:
    """Guards the order of rows inside a block: each must see the state that the row before it left."""
    caches = pair.target.new_caches()
    blocks = [
        pair.target.step(text[start : start + rows], caches, "verify").logits for start in range(0, len(text), rows)
    ]
    assert_close(torch.cat(blocks), expected)


@pytest.mark.parametrize("cuts", [(135,), (1, 3, 70, 135), (64, 128, 135)], ids=str)
def test_prefill_in_any_cut_leads_to_the_oracles_logits(
    pair: Pair, text: list[int], expected: Tensor, cuts: tuple[int, ...]
) -> None:
    """Guards the state and the convolution's past across ranges, some shorter than the past itself."""
    caches, start = pair.target.new_caches(), 0
    for end in cuts:
        hidden = pair.target.prefill(text[start:end], caches)
        assert_close(pair.target.logits(hidden.unsqueeze(0)), expected[end - 1 : end])
        start = end
    assert caches.length == len(text)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "rowwise"])
def test_other_stages_are_other_roundings_of_the_same_model(
    pair: Pair, text: list[int], expected: Tensor, stage: str
) -> None:
    """A stage that computed something else would decline for the wrong reason."""
    staged = pair.with_policy(DispatchPolicy(stage=stage)).target  # type: ignore[arg-type]
    caches = staged.new_caches()
    blocks = [staged.step(text[start : start + 5], caches, "verify").logits for start in range(0, 60, 5)]
    assert_close(torch.cat(blocks), expected[:60])


def test_the_unfused_attention_flag_is_the_same_model(pair: Pair, text: list[int], expected: Tensor) -> None:
    """MLXCEL_SDPA_VECTOR_LARGE_D=0 must move classic decode too, and by rounding alone."""
    target = pair.with_policy(DispatchPolicy(flags=Flags(sdpa_large_d=False))).target
    caches = target.new_caches()
    assert_close(torch.stack([target.step([t], caches, "classic").logits[0] for t in text[:24]]), expected[:24])


def test_the_unpadded_step_is_the_same_step(pair: Pair, text: list[int]) -> None:
    """It is what a reader takes as the honest cost of a classic step, so it must do all of its work."""
    target, caches = pair.target, pair.target.new_caches()
    target.prefill(text[:20], caches)
    other = caches.clone()
    for token in text[20:40]:
        assert target.unpadded_step(token, other) == target.step([token], caches, "classic").argmax[0]
    assert other.length == caches.length


def test_tapped_hidden_states_are_the_oracles(case: QwenOracle, text: list[int]) -> None:
    """Tap i is the state after layer i: one layer off would still draft, only worse."""
    target = load_pair(case.folder, None, DispatchPolicy(), dtype=torch.float32).target
    target.tapped = TINY.taps
    caches = target.new_caches()
    target.prefill(text[:30], caches)
    target.step(text[30:36], caches, "verify")
    found = target.shared_kv(caches).context.take(36)
    states = case.forward(text[:36]).hidden_states
    theirs = torch.cat([states[layer + 1][0] for layer in TINY.taps], -1)
    assert found.shape == theirs.shape
    assert (found - theirs).abs().max().item() < 1e-4


def test_an_mlx_checkpoint_of_the_same_weights_gives_the_same_bytes(
    case: QwenOracle, pair: Pair, text: list[int], tmp_path: Path
) -> None:
    """MLX writes 1 + w and turns the convolution; a norm taken for the other convention is off by one."""
    folder = write_target(tmp_path / "mlx", case.geometry, case.weights, dtype=torch.float32)
    other = load_pair(folder, None, DispatchPolicy(), dtype=torch.float32).target
    ours, theirs = other.new_caches(), pair.target.new_caches()
    for token in text[:12]:
        assert torch.equal(
            other.step([token], ours, "classic").logits, pair.target.step([token], theirs, "classic").logits
        )


def test_towers_and_mtp_weights_of_a_hub_checkpoint_are_passed_over(case: QwenOracle, tmp_path: Path) -> None:
    """The hub's files also hold a vision tower and an MTP head, under names that a text model must not trip over."""
    from support_engine import write_checkpoint
    from support_qwen35 import target_config

    tensors = {f"model.language_model.{name}": value for name, value in case.weights.items()}
    tensors |= {"mtp.fc.weight": torch.zeros(4, 4), "model.visual.blocks.0.norm1.weight": torch.zeros(4)}
    write_checkpoint(tmp_path / "hub", target_config(case.geometry), tensors)
    assert load_pair(tmp_path / "hub", None, DispatchPolicy(), dtype=torch.float32).target.config.num_hidden_layers == 8


def test_a_half_converted_checkpoint_is_refused(case: QwenOracle, tmp_path: Path) -> None:
    """Its norms could be of either convention, and nothing but the text would show it."""
    from support_engine import write_checkpoint
    from support_qwen35 import target_config

    tensors = mlx_tensors(case.weights)
    name = "language_model.model.layers.4.linear_attn.conv1d.weight"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    write_checkpoint(tmp_path / "half", target_config(case.geometry), tensors)
    with pytest.raises(CheckpointError, match=r"half: layers\.4\.linear_attn\.conv1d\.weight is laid out as hf"):
        load_pair(tmp_path / "half", None, DispatchPolicy(), dtype=torch.float32)


def test_bits_in_the_config_that_the_tensors_do_not_have_are_refused(tmp_path: Path) -> None:
    """Shared with Gemma's loader: a quantized Qwen goes through the same verification."""
    folder = write_target(tmp_path / "packed", PACKED, bits={"default": 4, "mlp": 8})
    load_pair(folder, None, DispatchPolicy())
    config = read_config(folder)
    config["quantization"] = {"group_size": 64, "bits": 8, "mode": "affine"}
    write_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match=r"config\.json says 8 bits"):
        load_pair(folder, None, DispatchPolicy())
