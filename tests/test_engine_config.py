"""config.json to geometry: the real models' shapes, both ways of writing them, and every refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_engine import TINY, TINY_31B, drafter_config, target_config

from engine.config import (
    LayerShape,
    RopeParameters,
    config_role,
    mtp_requires_linear_singleton,
    parse_drafter_config,
    parse_target_config,
)
from engine.errors import ConfigError
from engine.layers import RopeTable, inv_freq

Config = dict[str, Any]
PATTERN = ["sliding_attention"] * 5 + ["full_attention"]


def real(heads: int, kv: int, full_kv: int, hidden: int, mlp: int, layers: int) -> Config:
    """A config.json of the 12B or 31B geometry."""
    raw = target_config(TINY)
    raw["text_config"] |= {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_global_key_value_heads": full_kv,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "layer_types": PATTERN * (layers // 6),
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "vocab_size": 262144,
    }
    return raw


GEOMETRY_12B = real(16, 8, 1, 3840, 15360, 48)
GEOMETRY_31B = real(32, 16, 4, 5376, 21504, 60)


def changed(raw: Config, **text: Any) -> Config:
    """A copy with other fields in its text section; None removes a field."""
    other = copy.deepcopy(raw)
    section = other.get("text_config", other)
    for key, value in text.items():
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    return other


def test_the_real_geometries() -> None:
    """Which layers a drafter reads, and each kind's heads."""
    twelve, thirty_one = parse_target_config(GEOMETRY_12B), parse_target_config(GEOMETRY_31B)
    assert (twelve.last_layer("sliding"), twelve.last_layer("full")) == (46, 47)
    assert (thirty_one.last_layer("sliding"), thirty_one.last_layer("full")) == (58, 59)
    assert twelve.layers[5] == LayerShape("full", 16, 1, 512, True)
    assert thirty_one.layers[58] == LayerShape("sliding", 32, 16, 256, False)
    assert twelve.rope("full") == RopeParameters(1e6, 0.25, 1.0, True)
    assert twelve.eos_token_ids


@pytest.mark.parametrize(
    ("raw", "cuda", "expected"),
    [
        (GEOMETRY_12B, True, True),
        (GEOMETRY_12B, False, False),
        (GEOMETRY_31B, True, True),
        (GEOMETRY_31B, False, True),
        (target_config(TINY), True, False),
        (target_config(TINY_31B), True, False),
        (changed(GEOMETRY_12B, head_dim=128), True, False),
        (changed(GEOMETRY_31B, num_key_value_heads=8), False, False),
    ],
    ids=["12b-cuda", "12b-cpu", "31b-cuda", "31b-cpu", "tiny", "tiny_31b", "other-head_dim", "other-heads"],
)
def test_linear_singleton_predicate(raw: Config, cuda: bool, expected: bool) -> None:
    """True for 12B geometry on CUDA only and for 31B geometry everywhere; it adds the long draw."""
    assert mtp_requires_linear_singleton(parse_target_config(raw), cuda) is expected


@pytest.mark.parametrize("geometry", [TINY, TINY_31B], ids=lambda g: g.name)
def test_per_layer_config_says_the_same(geometry: Any) -> None:
    """transformers writes full layers' geometry per layer, with zero-padded keys; MLX conversions as global keys."""
    raw = target_config(geometry)
    text = raw["text_config"]
    entry = {"head_dim": text["global_head_dim"], "num_key_value_heads": text["num_global_key_value_heads"]}
    full = [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    folded = changed(
        raw, global_head_dim=None, num_global_key_value_heads=None, per_layer_config={f"{i:02d}": entry for i in full}
    )
    assert parse_target_config(folded) == parse_target_config(raw)
    flat = folded["text_config"] | {"model_type": "gemma4_text", "eos_token_id": raw.get("eos_token_id")}
    assert parse_target_config(flat).layers == parse_target_config(raw).layers
    with pytest.raises(ConfigError, match=f"layer {full[-1]}: a full layer without an entry"):
        parse_target_config(changed(folded, per_layer_config={}))


REQUIRED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "head_dim",
    "global_head_dim",
    "sliding_window",
    "attention_k_eq_v",
    "rms_norm_eps",
    "max_position_embeddings",
    "final_logit_softcapping",
    "layer_types",
    "rope_parameters",
]


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_size_is_an_error(field: str) -> None:
    """A guessed head_dim or window gives fluent wrong text, not a crash."""
    with pytest.raises(ConfigError, match=rf"^x/config.json: .*{field}"):
        parse_target_config(changed(target_config(TINY), **{field: None}), "x/config.json")


def sliding_geometry(raw: Config) -> None:
    """A sliding layer with the full layers' head_dim."""
    raw["text_config"]["per_layer_config"] = {"1": {"head_dim": 64}}


def other_full_geometry(raw: Config) -> None:
    """A full layer at odds with global_head_dim."""
    raw["text_config"]["per_layer_config"] = {"5": {"head_dim": 128}}


def set_text(**values: Any) -> Callable[[Config], None]:
    """Change fields of the text section."""
    return lambda raw: raw["text_config"].update(values)


def rope(kind: str, **values: Any) -> Callable[[Config], None]:
    """Change one kind's rotary parameters."""
    return lambda raw: raw["text_config"]["rope_parameters"][kind].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_text(layer_types=PATTERN[:-1]), "layer_types has 5 entries but num_hidden_layers is 6"),
        (set_text(layer_types=["sliding_attention"] * 6), "layer_types has no full_attention layer"),
        (set_text(layer_types=[*PATTERN[:-1], "linear_attention"]), "layer 5: unknown layer type 'linear_attention'"),
        (set_text(sliding_window_pattern=3), "layer 2: layer_types says sliding_attention"),
        (sliding_geometry, "layer 1: per_layer_config gives a sliding layer another geometry"),
        (other_full_geometry, "layer 5: per_layer_config says head_dim 128"),
        (set_text(per_layer_config={"17": {}}), "per_layer_config: '17' names no layer of 6"),
        (set_text(num_attention_heads=3), "num_attention_heads 3 is no multiple of num_key_value_heads 2"),
        (set_text(head_dim=24), "not supported: head_dim 24"),
        (set_text(head_dim=True), "head_dim must be a positive integer, found True"),
        (set_text(vocab_size="512"), "vocab_size must be a positive integer, found '512'"),
        (set_text(attention_k_eq_v="yes"), "attention_k_eq_v must be true or false, found 'yes'"),
        (set_text(rms_norm_eps=0), "rms_norm_eps must be a positive number, found 0"),
        (set_text(hidden_size_per_layer_input=256), "not supported: hidden_size_per_layer_input 256"),
        (set_text(enable_moe_block=True), "not supported: enable_moe_block True, mixture of experts"),
        (set_text(num_kv_shared_layers=18), "not supported: num_kv_shared_layers 18 in a target"),
        (set_text(use_double_wide_mlp=True), "not supported: use_double_wide_mlp"),
        (set_text(attention_bias=True), "not supported: attention_bias"),
        (set_text(use_bidirectional_attention="all"), "not supported: use_bidirectional_attention"),
        (set_text(hidden_activation="silu"), "not supported: hidden_activation 'silu'"),
        (set_text(tie_word_embeddings=False), "not supported: tie_word_embeddings false"),
        (rope("full_attention", rope_type="yarn"), "rope_parameters.full_attention.rope_type 'yarn'"),
        (rope("sliding_attention", partial_rotary_factor=0.5), "partial_rotary_factor 0.5 with rope_type 'default'"),
        (rope("sliding_attention", rope_theta="10k"), "rope_theta must be a positive number, found '10k'"),
        (lambda raw: raw.update(eos_token_id="<eos>"), "eos_token_id must be token ids"),
        (lambda raw: raw.update(text_config=3), "text_config must be an object, found int"),
        (lambda raw: raw.update(model_type="llama"), "unknown model_type 'llama'; known: gemma4,"),
        (lambda raw: raw.update(model_type="gemma4_assistant"), "is a drafter; give it as drafter, not as target"),
    ],
)
def test_bad_targets_are_refused(change: Callable[[Config], None], message: str) -> None:
    """Each in one line that names the file, the field and what was found."""
    raw = copy.deepcopy(target_config(TINY))
    change(raw)
    with pytest.raises(ConfigError) as caught:
        parse_target_config(raw, "x/config.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("x/config.json: ")
    assert "\n" not in str(caught.value)


def test_drafters() -> None:
    """Backbone width and no soft cap; ordered embeddings and a target in a drafter's place are refused."""
    raw = drafter_config(TINY)
    config = parse_drafter_config(raw)
    assert (config.backbone_hidden_size, config.final_logit_softcapping) == (TINY.hidden_size, None)
    assert config_role(raw) == "drafter"
    for other, message in (
        (raw | {"use_ordered_embeddings": True}, "not supported: use_ordered_embeddings"),
        ({k: v for k, v in raw.items() if k != "backbone_hidden_size"}, "backbone_hidden_size is missing"),
        (target_config(TINY), "is a target; give it as target, not as drafter"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_drafter_config(other)


def test_proportional_frequencies() -> None:
    """The exponent's denominator is the whole head_dim, and pairs past the rotated share stand still."""
    found = inv_freq(RopeParameters(1e6, 0.25, 1.0, True), 512)
    expected = torch.tensor([1e6 ** (-2 * j / 512) if j < 64 else 0.0 for j in range(256)], dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(inv_freq(RopeParameters(1e6, 0.25, 8.0, True), 512), found / 8)


def test_a_position_has_one_rotation() -> None:
    """A table that grew in other steps, or was asked in another order, must hold the same bits."""
    parameters = RopeParameters(1e4)
    late, early = RopeTable(parameters, 48), RopeTable(parameters, 48)
    far = late.rows(900, 8)
    for start in range(0, 901, 300):
        near = early.rows(start, 8)
    assert all(torch.equal(a, b) for a, b in zip(far, near, strict=True))
    angles = torch.arange(900, 908, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, 48, 2) / 48)
    torch.testing.assert_close(far[0][:, 0, :24].double(), angles.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(far[1][:, 0, 24:].double(), angles.sin(), rtol=0, atol=1e-4)
    assert torch.equal(far[1][..., :24], -far[1][..., 24:])
