"""A Qwen 3.5 target's config.json: nothing guessed, features that are not computed refused, families told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support_geometry import TINY as GEMMA
from support_geometry import drafter_config as gemma_drafter
from support_geometry import target_config as gemma_target
from support_qwen35 import drafter_config, target_config

from engine.config import mtp_requires_linear_singleton
from engine.dispatch import STAGES, DispatchPolicy
from engine.errors import ConfigError
from engine.flags import Flags
from engine.pair import family_of
from engine.path import config_words
from engine.qwen35.config import parse_drafter_config, parse_target_config
from engine.qwen35.path import kernel_path

BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no head_dim": (lambda text: text.pop("head_dim"), "head_dim is missing; the geometry is never guessed"),
    "heads": (lambda text: text.update(num_key_value_heads=3), "num_attention_heads 4 is no multiple of"),
    "value heads": (lambda text: text.update(linear_num_value_heads=3), "linear_num_value_heads 3 is no multiple of"),
    "kernel": (lambda text: text.update(linear_conv_kernel_dim=1), "a convolution without a past"),
    "untied": (lambda text: text.update(tie_word_embeddings=False), "not supported: tie_word_embeddings false"),
    "ungated": (lambda text: text.update(attn_output_gate=False), "not supported: attn_output_gate false"),
    "experts": (lambda text: text.update(num_experts=64), "not supported: num_experts 64, mixture of experts"),
    "biases": (lambda text: text.update(attention_bias=True), "not supported: attention_bias True"),
    "gelu": (lambda text: text.update(hidden_act="gelu"), "not supported: hidden_act 'gelu', only silu"),
    "no rope": (lambda text: text.pop("rope_parameters"), "rope_parameters is missing"),
    "yarn": (lambda text: text["rope_parameters"].update(rope_type="yarn"), "not supported: rope_parameters.rope_type"),
    "share": (lambda text: text["rope_parameters"].pop("partial_rotary_factor"), "partial_rotary_factor must be a pos"),
    "odd share": (
        lambda text: text["rope_parameters"].update(partial_rotary_factor=0.1),
        "0.1 of head_dim 32 is no ev",
    ),
    "types": (lambda text: text.update(layer_types=["linear_attention"]), "layer_types has 1 entries but"),
    "kind": (lambda text: text["layer_types"].__setitem__(2, "sliding_attention"), "layer 2: unknown layer type"),
    "one kind": (lambda text: text.update(layer_types=["full_attention"] * 8), "has no linear_attention layer"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_config_that_is_wrong_or_not_supported_is_one_line(name: str) -> None:
    """A guess gives a model that runs and answers nonsense."""
    spoil, says = BAD[name]
    raw = target_config()
    spoil(raw["text_config"])
    with pytest.raises(ConfigError) as caught:
        parse_target_config(raw, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_real_geometry_is_read() -> None:
    """Guards the numbers of Qwen 3.5 4B: 24 linear and 8 full layers, 64 of 256 elements turned."""
    raw = target_config()
    raw["text_config"].update(
        hidden_size=2560,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(32)],
    )
    config = parse_target_config(raw)
    assert (config.kinds.count("linear"), config.kinds.count("full")) == (24, 8)
    assert (config.rotary_dim, config.conv_width, config.value_width) == (64, 8192, 4096)
    assert config.sliding_window is None
    assert not mtp_requires_linear_singleton(config, cuda=True)


def test_every_config_belongs_to_one_family_and_role() -> None:
    """A DFlash drafter says the model type of a plain Qwen 3, which is no target here."""
    found = [family_of(raw) for raw in (target_config(), drafter_config(), gemma_target(GEMMA), gemma_drafter(GEMMA))]
    assert [(family.name, role) for family, role in found] == [
        ("qwen35", "target"),
        ("qwen35", "drafter"),
        ("gemma4", "target"),
        ("gemma4", "drafter"),
    ]
    assert family_of({"model_type": "qwen3_5_text"})[1] == "target"
    with pytest.raises(ConfigError, match=r"unknown model_type 'qwen3'; known: gemma4, .*qwen3_5, .*DFlashDraftModel"):
        family_of({"model_type": "qwen3"})


def test_what_a_step_reads_beside_the_weights_is_counted_by_layer_kind() -> None:
    """A byte floor that left out the states would call a step slow that is at its bound."""
    config = parse_target_config(target_config())
    rows = 2 * 2 * 32 * 11 * 2  # K and V, 2 heads of 32, 11 rows, bf16
    state = 4 * 4 * 16 * 24 + 3 * 160 * 2  # fp32 state of 4 heads, 3 past inputs of 160 channels
    assert config.kv_bytes(10, 2) == 2 * rows + 6 * state


def test_stages_and_flags_show_in_the_names_of_the_kernels() -> None:
    """Two settings with one path compute the same; settings that differ must not share one."""

    def path(**changes: Any) -> dict[str, str]:
        policy = DispatchPolicy(**changes)
        return kernel_path(policy, 4, (4,), ((9, None),), cuda=False, dtype="bfloat16", fused=False)

    named = {stage: path(stage=stage) for stage in STAGES}
    assert named["attention"] == named["attention_mlp"], "this MLP has one kernel"
    assert len({str(found) for found in named.values()}) == 3
    assert {found["classic delta rule"] for found in named.values()} == {"rows"}
    assert named["base"]["verify delta rule"] == "chunk"
    for flags in (Flags(sdpa_large_d=False), Flags(qmv_multirow=False), Flags(prefill_chunk=4)):
        assert path(flags=flags) != named["rowwise"]
    assert config_words(parse_target_config(target_config())).startswith(
        "hidden 64, MLP 128, 2 full 4/2 x 32, 6 linear"
    )
    assert "taps 1, 3, 6" in config_words(parse_drafter_config(drafter_config()))
