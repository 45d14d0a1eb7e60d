"""Grown pairs on the CPU: nano's text, acceptance and codes in a larger geometry, and faults that must be seen.

`small` is to nano what 12b is, `small4` what 31b is (a 4-bit MLP, a float drafter). Nothing of real size is built;
12b and 31b are planned to the byte, and single matrices of theirs are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_engine import one_thread, read_config, read_tensors
from support_grow import NANO, Run, build, distance, grown, loaded, nano_pair, nano_run, prompt, run

from engine.checkpoint import open_checkpoint
from engine.config import parse_target_config
from engine.layers import inv_freq
from engine.pair import load_pair
from tools.grow import pair as pair_module
from tools.grow import recipe
from tools.grow.geometry import GEOMETRIES
from tools.grow.maps import head_rows
from tools.grow.source import TARGET_NAME

LOGITS_MEAN = 0.01
"""fp32, mean difference of logits that spread over 5: the random layers' share. The least fault is 17 times as far."""


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def apart(mine: Run, nano: Run) -> float:
    """The larger of the target's and the drafter's distance."""
    return max(distance(mine.logits, nano.logits), distance(mine.draft_logits, nano.draft_logits))


@pytest.mark.parametrize("name", ["code", *(pytest.param(name, marks=pytest.mark.slow) for name in ("docs", "list"))])
def test_text_and_acceptance_are_nanos(name: str) -> None:
    """Guards the whole embedding: 64 greedy tokens in fp32, and the drafter's acceptance within 10 %."""
    mine, nano = run(loaded("small", True), prompt(name), 64), nano_run(name, 64)
    assert mine.tokens == nano.tokens
    assert len(set(nano.tokens)) > 15
    assert nano.acceptance > 0.2
    assert abs(mine.acceptance / nano.acceptance - 1) <= 0.1
    assert apart(mine, nano) < LOGITS_MEAN


def test_an_8_bit_mlp_in_4_bits_keeps_the_text() -> None:
    """Guards the split into high and low codes over two copies of the stream, and several KV heads in full layers."""
    mine, nano = run(loaded("small4", True), prompt("code"), 12), nano_run("code", 12)
    assert mine.tokens == nano.tokens
    assert mine.accepted == nano.accepted
    assert apart(mine, nano) < LOGITS_MEAN


def test_a_pair_without_fault_is_close() -> None:
    """The planted faults below are measured on this one."""
    assert apart(_fresh_run(), nano_run("code", 2)) < LOGITS_MEAN


def _fresh_run() -> Run:
    return run(load_pair(*build(GEOMETRIES["small"], floats=True), dtype=torch.float32), prompt("code"), 2)


def _unscaled_head_norms(plan: recipe.Plan, full_name: str, *rest: Any) -> recipe.Recipe:
    found = REAL_ATTENTION(plan, full_name, *rest)
    return dataclasses.replace(found, values=found.values * 2**0.5) if isinstance(found, recipe.Vector) else found


def _unscaled_hidden_half(plan: recipe.Plan, stream: recipe.Stream) -> recipe.Matrix:
    return REAL_PRE(dataclasses.replace(plan, embedding_factor=1.0), stream)


REAL_ATTENTION, REAL_PRE = recipe.Plan._attention, recipe._pre_projection
FAULTS: dict[str, tuple[object, str, object]] = {
    "RoPE elements not spread": (recipe, "stretch", lambda nano, grown: 1 if nano.kind == "sliding" else 2),
    "norm weights not scaled": (recipe.Stream, "norm_factor", 1.0),
    "head norms not scaled": (recipe.Plan, "_attention", _unscaled_head_norms),
    "embedding factor 1": (pair_module, "embedding_factor", lambda *_: 1.0),
    "drafter's hidden half not scaled": (recipe, "_pre_projection", _unscaled_hidden_half),
    "last group not last": (recipe, "layer_map", lambda nano, _grown, _period: {i: i for i in range(nano)}),
}  # fmt: skip


QUICK = ("RoPE elements not spread", "norm weights not scaled", "embedding factor 1")


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
)
def test_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison's power: every step of the recipe, left out, is far beyond the tolerance."""
    where, name, wrong = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    assert apart(_fresh_run(), nano_run("code", 2)) > 10 * LOGITS_MEAN


def test_drafter_reads_the_last_groups_keys_and_values() -> None:
    """A drafter over other layers leaves the text alone: K and V that it reads are nano's, at their places."""
    ids, found = prompt("code")[:24], []
    for pair in (nano_pair(), loaded("small", True)):
        caches = pair.target.new_caches()
        pair.target.prefill(ids, caches)
        found.append(pair.target.shared_kv(caches))
    nano, mine = found
    for kind, places in (("sliding", torch.arange(64)), ("full", torch.arange(128) * 2)):
        (keys, values), (own_keys, own_values) = getattr(nano, kind), getattr(mine, kind)
        heads = keys.shape[0]
        spread = torch.arange(keys.shape[2]) * 2
        assert distance(own_keys[:heads, :, spread], keys) < 1e-3
        assert distance(own_values[:heads, :, places], values * 2**0.5) < 5e-3
        assert values.abs().mean() > 0.1


def test_rope_places_turn_at_nanos_frequency() -> None:
    """Guards j -> 4j in the real geometries: equal inverse frequencies, turned and unturned, and pairs stay pairs."""
    nano = parse_target_config(open_checkpoint(NANO / TARGET_NAME).config)
    for kind in ("sliding", "full"):
        small, large = nano.layer_shape(kind).head_dim, {"sliding": 256, "full": 512}[kind]
        own, wide = inv_freq(nano.rope(kind), small), inv_freq(nano.rope(kind), large)
        rows = head_rows([0], small, large, large // small)
        assert torch.allclose(wide[rows[: small // 2]], own, rtol=1e-6, atol=0)
        assert torch.equal(rows[small // 2 :], rows[: small // 2] + large // 2)
        assert not torch.allclose(wide[: small // 2], own, rtol=1e-2)
        assert ((own == 0) == (wide[rows[: small // 2]] == 0)).all()


@pytest.mark.slow
def test_transformers_own_model_gives_nanos_logits() -> None:
    """An oracle that shares no code with the engine: a grown target inside transformers against nano's logits."""
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    folder = grown("small", True).target
    text = {
        key: value
        for key, value in read_config(folder)["text_config"].items()
        if key not in ("model_type", "enable_moe_block", "dtype")
    }
    config = transformers.Gemma4UnifiedTextConfig(**text)
    config._attn_implementation = "eager"
    model = transformers.Gemma4UnifiedForCausalLM(config)
    state = {name.removeprefix("language_model."): value for name, value in read_tensors(folder).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [name for name in missing if not name.endswith(("lm_head.weight", "inv_freq", "embed_scale"))]
    model.tie_weights()
    ids = prompt("code")
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([ids])).logits[0, -4:, :4096]
    assert distance(logits, nano_run("code", 2).logits) < LOGITS_MEAN
