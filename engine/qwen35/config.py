"""Geometry of a Qwen 3.5 target and of its DFlash drafter, parsed from their config.json.

Field names are config.json's. Nothing is guessed: a missing size or a feature that is not supported is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.config_reader import ConfigReader, text_section

LayerKind = Literal["linear", "full"]

TARGET_TYPES = ("qwen3_5", "qwen3_5_text")
DRAFTER_ARCHITECTURE = "DFlashDraftModel"
"""What a DFlash drafter's config.json says under `architectures`; its model_type is the plain Qwen 3's."""

_KINDS: dict[str, LayerKind] = {"linear_attention": "linear", "full_attention": "full"}


@dataclass(frozen=True)
class Qwen35Config:
    """A target: gated-delta layers, and gated full attention in between."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rope_theta: float
    partial_rotary_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of every layer."""
        return tuple(_KINDS[name] for name in self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_width(self) -> int:
        """Elements of a linear layer's keys, and of its queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Elements of a linear layer's values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def sliding_window(self) -> None:
        """No layer of this family has a window."""
        return None

    @property
    def words(self) -> str:
        """The shapes in one line."""
        full, linear = self.kinds.count("full"), self.kinds.count("linear")
        return (
            f"hidden {self.hidden_size}, MLP {self.intermediate_size}, {full} full {self.num_attention_heads}/"
            f"{self.num_key_value_heads} x {self.head_dim}, {linear} linear {self.linear_num_key_heads}/"
            f"{self.linear_num_value_heads} x {self.linear_key_head_dim} x {self.linear_value_head_dim}, "
            f"convolution {self.linear_conv_kernel_dim}, {self.rotary_dim} turned, vocabulary {self.vocab_size}"
        )

    def kv_bytes(self, context: int, itemsize: int) -> int:
        """Bytes that the row after `context` tokens reads beside the weights: K/V of full layers, states fp32."""
        rows = 2 * self.num_key_value_heads * self.head_dim * (context + 1) * itemsize
        state = 4 * self.value_width * self.linear_key_head_dim
        past = (self.linear_conv_kernel_dim - 1) * self.conv_width * itemsize
        return self.kinds.count("full") * rows + self.kinds.count("linear") * (state + past)


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter: full attention over the target's tapped hidden states and the whole block."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    @property
    def words(self) -> str:
        """The shapes in one line."""
        taps = ", ".join(map(str, self.target_layer_ids))
        return (
            f"hidden {self.hidden_size}, MLP {self.intermediate_size}, {self.num_hidden_layers} full "
            f"{self.num_attention_heads}/{self.num_key_value_heads} x {self.head_dim}, block {self.block_size}, "
            f"taps {taps}, vocabulary {self.vocab_size}"
        )


def parse_target_config(raw: Mapping[str, Any], where: str = "config.json") -> Qwen35Config:
    """The target's geometry from a parsed config.json, top level or its text_config; ConfigError names the field."""
    reader = _Reader(text_section(raw, where), raw, where)
    reader.refuse_unsupported_target()
    theta, partial = reader.rope(partial=True)
    sizes = {
        name: reader.positive(name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "max_position_embeddings",
        )
    }
    config = Qwen35Config(
        model_type=str(raw.get("model_type")),
        **sizes,
        **reader.heads(),
        rope_theta=theta,
        partial_rotary_factor=partial,
        rms_norm_eps=reader.number(reader.text, "rms_norm_eps", ""),
        layer_types=reader.layer_types(),
        eos_token_ids=reader.eos(),
    )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        heads = f"linear_num_value_heads {config.linear_num_value_heads}"
        raise reader.fail(f"{heads} is no multiple of linear_num_key_heads {config.linear_num_key_heads}")
    if config.linear_conv_kernel_dim < 2:
        raise reader.fail("not supported: linear_conv_kernel_dim 1, a convolution without a past")
    if config.rotary_dim < 2 or config.rotary_dim % 2:
        raise reader.fail(f"partial_rotary_factor {partial:g} of head_dim {config.head_dim} is no even number")
    return config


def parse_drafter_config(raw: Mapping[str, Any], where: str = "config.json") -> DFlashConfig:
    """The drafter's geometry from a parsed config.json; ConfigError names the field."""
    section = raw.get("dflash_config")
    own = section if isinstance(section, Mapping) else {}
    reader = _Reader({**raw, **own}, raw, where)
    reader.refuse_unsupported_drafter()
    sizes = {
        name: reader.positive(name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "block_size",
            "num_target_layers",
        )
    }
    config = DFlashConfig(
        model_type=str(raw.get("model_type")),
        **sizes,
        **reader.heads(),
        rope_theta=reader.rope(partial=False)[0],
        rms_norm_eps=reader.number(reader.text, "rms_norm_eps", ""),
        mask_token_id=reader.token_id("mask_token_id"),
        target_layer_ids=reader.layer_ids("target_layer_ids"),
    )
    if config.mask_token_id >= config.vocab_size:
        raise reader.fail(f"mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}")
    if max(config.target_layer_ids) >= config.num_target_layers:
        taps, layers = list(config.target_layer_ids), config.num_target_layers
        raise reader.fail(f"target_layer_ids {taps} name a layer past num_target_layers {layers}")
    return config


@dataclass(frozen=True)
class _Reader(ConfigReader):
    """Typed reads from one section of a config.json of this family."""

    def refuse_unsupported_target(self) -> None:
        """ConfigError for features of the family that this engine does not compute."""
        self.refuse(("attention_bias", "biases in attention"), ("num_experts", "mixture of experts"))
        if self.text.get("attn_output_gate", True) is not True:
            raise self.fail("not supported: attn_output_gate false, full attention is always gated here")
        if self.text.get("tie_word_embeddings", self.top.get("tie_word_embeddings")) is not True:
            raise self.fail("not supported: tie_word_embeddings false, the head is the embedding table")
        self.only_silu()

    def refuse_unsupported_drafter(self) -> None:
        """As above, for what a DFlash drafter may not have."""
        self.refuse(
            ("attention_bias", "biases in attention"),
            ("final_logit_softcapping", "a soft cap"),
            ("attention_sink_bias", "attention sinks"),
            ("causal", "a causal block"),
            ("is_causal", "a causal block"),
            ("rope_scaling", "scaled RoPE"),
            ("draft_window_size", "a window over the context"),
        )
        names = self.text.get("layer_types") or []
        if any(name != "full_attention" for name in names):
            raise self.fail(f"not supported: layer_types {names!r}, only full_attention in a drafter")
        self.only_silu()

    def refuse(self, *features: tuple[str, str]) -> None:
        """ConfigError for the first of these keys that is set."""
        for key, feature in features:
            if self.text.get(key):
                raise self.fail(f"not supported: {key} {self.text[key]!r}, {feature}")

    def only_silu(self) -> None:
        """ConfigError for another activation."""
        if self.text.get("hidden_act", "silu") != "silu":
            raise self.fail(f"not supported: hidden_act {self.text['hidden_act']!r}, only silu")

    def heads(self) -> dict[str, int]:
        """Attention heads, and their width."""
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        heads, groups, width = (self.positive(name) for name in names)
        if heads % groups:
            raise self.fail(f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
        if width % 16:
            raise self.fail(f"not supported: head_dim {width}, it must be a multiple of 16")
        return dict(zip(names, (heads, groups, width), strict=True))

    def rope(self, partial: bool) -> tuple[float, float]:
        """(rope_theta, partial_rotary_factor), from rope_parameters, or from the top where a drafter has it there."""
        table = self.text.get("rope_parameters")
        if table is None and not partial:
            return self.number(self.text, "rope_theta", ""), 1.0
        if not isinstance(table, Mapping):
            raise self.fail("rope_parameters is missing; the geometry is never guessed, add it")
        if table.get("rope_type", "default") != "default":
            raise self.fail(f"not supported: rope_parameters.rope_type {table['rope_type']!r}")
        share = self.number(table, "partial_rotary_factor", "rope_parameters.", None if partial else 1.0)
        if share > 1 or (share != 1 and not partial):
            raise self.fail(f"not supported: rope_parameters.partial_rotary_factor {share:g}")
        return self.number(table, "rope_theta", "rope_parameters."), share

    def layer_types(self) -> tuple[str, ...]:
        """One kind per layer."""
        count, names = self.positive("num_hidden_layers"), self.get("layer_types")
        if not isinstance(names, list) or len(names) != count:
            found = len(names) if isinstance(names, list) else repr(names)
            raise self.fail(f"layer_types has {found} entries but num_hidden_layers is {count}")
        for index, name in enumerate(names):
            if name not in _KINDS:
                raise self.fail(f"layer {index}: unknown layer type {name!r}; known: {', '.join(_KINDS)}")
        for kind in _KINDS:
            if kind not in names:
                raise self.fail(f"layer_types has no {kind} layer; a target needs both kinds")
        return tuple(names)

    def token_id(self, key: str) -> int:
        """A token id."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(f"{key} must be a token id, found {value!r}")
        return value

    def layer_ids(self, key: str) -> tuple[int, ...]:
        """Indices of layers, rising."""
        value = self.get(key)
        good = isinstance(value, list) and bool(value)
        if not good or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
            raise self.fail(f"{key} must be a list of layer indices, found {value!r}")
        if sorted(set(value)) != value:
            raise self.fail(f"{key} must rise without repeats, found {value!r}")
        return tuple(value)
