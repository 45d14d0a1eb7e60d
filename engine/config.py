"""Geometry of a Gemma 4 target or MTP drafter, parsed from its config.json.

Field names are config.json's. Nothing is guessed: a missing size, a contradiction or a feature
of the family that is not supported (PLE, MoE, shared-KV targets) is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.config_reader import ConfigReader, text_section
from engine.errors import ConfigError

Kind = Literal["sliding", "full"]

TARGET_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
DRAFTER_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_KINDS: dict[str, Kind] = {"sliding_attention": "sliding", "full_attention": "full"}


@dataclass(frozen=True)
class LayerShape:
    """Attention geometry of one layer."""

    kind: Kind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    k_eq_v: bool


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding of one layer kind; the rotated share and the factor are 1 unless config.json says otherwise."""

    rope_theta: float
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    proportional: bool = False


@dataclass(frozen=True)
class TextConfig:
    """What target and drafter have in common."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_global_key_value_heads: int
    head_dim: int
    global_head_dim: int
    sliding_window: int
    attention_k_eq_v: bool
    rms_norm_eps: float
    max_position_embeddings: int
    final_logit_softcapping: float | None
    layer_types: tuple[str, ...]
    rope_sliding: RopeParameters
    rope_full: RopeParameters
    eos_token_ids: tuple[int, ...]

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Attention geometry of every layer."""
        return tuple(self.layer_shape(_KINDS[name]) for name in self.layer_types)

    def layer_shape(self, kind: Kind) -> LayerShape:
        """Attention geometry of a layer kind."""
        if kind == "full":
            return LayerShape(
                "full",
                self.num_attention_heads,
                self.num_global_key_value_heads,
                self.global_head_dim,
                self.attention_k_eq_v,
            )
        return LayerShape("sliding", self.num_attention_heads, self.num_key_value_heads, self.head_dim, False)

    def rope(self, kind: Kind) -> RopeParameters:
        """Rotary parameters of a layer kind."""
        return self.rope_full if kind == "full" else self.rope_sliding

    def last_layer(self, kind: Kind) -> int:
        """Index of the last layer of a kind: the one whose K/V a drafter reads."""
        return max(i for i, name in enumerate(self.layer_types) if _KINDS[name] == kind)


@dataclass(frozen=True)
class TargetConfig(TextConfig):
    """A target: every layer has K/V of its own."""


@dataclass(frozen=True)
class DrafterConfig(TextConfig):
    """A drafter: query-only layers over the target's K/V, and the target's hidden width."""

    backbone_hidden_size: int


def config_role(raw: Mapping[str, Any], where: str = "config.json") -> Literal["target", "drafter"]:
    """Whether a config.json describes a target or a drafter; ConfigError for any other model type."""
    model_type = raw.get("model_type")
    if model_type in TARGET_TYPES:
        return "target"
    if model_type in DRAFTER_TYPES:
        return "drafter"
    known = ", ".join((*TARGET_TYPES, *DRAFTER_TYPES))
    raise ConfigError(f"{where}: unknown model_type {model_type!r}; known: {known}")


def parse_target_config(raw: Mapping[str, Any], where: str = "config.json") -> TargetConfig:
    """The target's geometry from a parsed config.json, top level or its text_config; ConfigError names the field."""
    if config_role(raw, where) != "target":
        raise ConfigError(f"{where}: model_type {raw['model_type']!r} is a drafter; give it as drafter, not as target")
    text = text_section(raw, where)
    reader = _Reader(text, raw, where)
    reader.refuse_unsupported_target()
    return TargetConfig(**reader.common())


def parse_drafter_config(raw: Mapping[str, Any], where: str = "config.json") -> DrafterConfig:
    """The drafter's geometry from a parsed config.json; ConfigError names the field."""
    if config_role(raw, where) != "drafter":
        raise ConfigError(f"{where}: model_type {raw['model_type']!r} is a target; give it as target, not as drafter")
    if raw.get("use_ordered_embeddings"):
        raise ConfigError(f"{where}: not supported: use_ordered_embeddings (the centroid head of E2B and E4B drafters)")
    reader = _Reader(text_section(raw, where), raw, where)
    reader.refuse_unsupported()
    width = _Reader(raw, raw, where).positive("backbone_hidden_size")
    return DrafterConfig(**reader.common(), backbone_hidden_size=width)


def mtp_requires_linear_singleton(config: Any, cuda: bool) -> bool:
    """True where only one linear sequence may be verified exactly: 31B geometry everywhere, 12B geometry on CUDA."""
    if (config.head_dim, getattr(config, "global_head_dim", None)) != (256, 512):  # another family has no such width
        return False
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_global_key_value_heads)
    return heads == (32, 16, 4) or (cuda and heads == (16, 8, 1))


class _Reader(ConfigReader):
    """Typed reads from one section of a Gemma 4 config.json."""

    def refuse_unsupported(self) -> None:
        """ConfigError for features of the family that this engine does not compute."""
        for key, feature in (
            ("hidden_size_per_layer_input", "per-layer embeddings (PLE)"),
            ("num_experts", "mixture of experts"),
            ("enable_moe_block", "mixture of experts"),
            ("attention_bias", "biases in attention"),
        ):
            if self.text.get(key):
                raise self.fail(f"not supported: {key} {self.text[key]!r}, {feature}")
        if self.text.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise self.fail("not supported: use_bidirectional_attention on text tokens")
        activation = self.text.get("hidden_activation", "gelu_pytorch_tanh")
        if activation != "gelu_pytorch_tanh":
            raise self.fail(f"not supported: hidden_activation {activation!r}, only gelu_pytorch_tanh")
        if self.text.get("tie_word_embeddings", self.top.get("tie_word_embeddings", True)) is not True:
            raise self.fail("not supported: tie_word_embeddings false, the head is the embedding table")

    def refuse_unsupported_target(self) -> None:
        """As above, and what only a target may not have."""
        self.refuse_unsupported()
        if self.text.get("num_kv_shared_layers"):
            raise self.fail(f"not supported: num_kv_shared_layers {self.text['num_kv_shared_layers']} in a target")
        if self.text.get("use_double_wide_mlp"):
            raise self.fail("not supported: use_double_wide_mlp")

    def common(self) -> dict[str, Any]:
        """All fields of TextConfig."""
        layer_types = self.layer_types()
        k_eq_v = self.flag("attention_k_eq_v")
        head_dim, kv_heads = self.positive("head_dim"), self.positive("num_key_value_heads")
        global_head_dim, global_kv_heads = self.full_geometry(layer_types, k_eq_v, head_dim, kv_heads)
        heads = self.positive("num_attention_heads")
        for name, count in (("num_key_value_heads", kv_heads), ("num_global_key_value_heads", global_kv_heads)):
            if heads % count:
                raise self.fail(f"num_attention_heads {heads} is no multiple of {name} {count}")
        for name, width in (("head_dim", head_dim), ("global_head_dim", global_head_dim)):
            if width % 16:
                raise self.fail(f"not supported: {name} {width}, it must be a multiple of 16")
        window, most = self.positive("sliding_window"), self.positive("max_position_embeddings")
        if window > most:
            raise self.fail(f"sliding_window {window} is more than max_position_embeddings {most}")
        softcap = self.get("final_logit_softcapping")
        return {
            "model_type": str(self.top.get("model_type")),
            "vocab_size": self.positive("vocab_size"),
            "hidden_size": self.positive("hidden_size"),
            "intermediate_size": self.positive("intermediate_size"),
            "num_hidden_layers": self.positive("num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_global_key_value_heads": global_kv_heads,
            "head_dim": head_dim,
            "global_head_dim": global_head_dim,
            "sliding_window": self.positive("sliding_window"),
            "attention_k_eq_v": k_eq_v,
            "rms_norm_eps": self.number(self.text, "rms_norm_eps", ""),
            "max_position_embeddings": self.positive("max_position_embeddings"),
            "final_logit_softcapping": None
            if softcap is None
            else self.number(self.text, "final_logit_softcapping", ""),
            "layer_types": layer_types,
            "rope_sliding": self.rope("sliding_attention"),
            "rope_full": self.rope("full_attention"),
            "eos_token_ids": self.eos(),
        }

    def layer_types(self) -> tuple[str, ...]:
        """One kind per layer; both kinds must occur, since a drafter reads the last of each."""
        count = self.positive("num_hidden_layers")
        names = self.get("layer_types")
        if not isinstance(names, list) or len(names) != count:
            found = len(names) if isinstance(names, list) else repr(names)
            raise self.fail(f"layer_types has {found} entries but num_hidden_layers is {count}")
        for index, name in enumerate(names):
            if not isinstance(name, str) or name not in _KINDS:
                raise self.fail(f"layer {index}: unknown layer type {name!r}; known: {', '.join(_KINDS)}")
        pattern = self.text.get("sliding_window_pattern")
        if isinstance(pattern, int) and pattern > 0:
            for index, name in enumerate(names):
                if (name == "full_attention") != ((index + 1) % pattern == 0) and index + 1 < count:
                    raise self.fail(
                        f"layer {index}: layer_types says {name}, sliding_window_pattern {pattern} says otherwise"
                    )
        for kind in _KINDS:
            if kind not in names:
                raise self.fail(f"layer_types has no {kind} layer; a target needs both kinds")
        return tuple(names)

    def full_geometry(
        self, layer_types: tuple[str, ...], k_eq_v: bool, head_dim: int, kv_heads: int
    ) -> tuple[int, int]:
        """(global_head_dim, num_global_key_value_heads), from those keys or from per_layer_config."""
        wide = self.text.get("global_head_dim")
        shared = self.text.get("num_global_key_value_heads") if k_eq_v else kv_heads
        per_layer = self.text.get("per_layer_config")
        if isinstance(per_layer, Mapping):
            entries = self.overrides(per_layer, layer_types)
            for index, name in enumerate(layer_types):
                if name == "full_attention" and index not in entries and wide is None:
                    raise self.fail(f"layer {index}: a full layer without an entry in per_layer_config; add it")
            for index, entry in entries.items():
                if layer_types[index] == "sliding_attention":
                    if (entry.get("head_dim", head_dim), entry.get("num_key_value_heads", kv_heads)) != (
                        head_dim,
                        kv_heads,
                    ):
                        raise self.fail(f"layer {index}: per_layer_config gives a sliding layer another geometry")
                    continue
                own_dim, own_heads = entry.get("head_dim", wide), entry.get("num_key_value_heads", shared)
                if own_dim != (wide or own_dim) or own_heads != (shared or own_heads):
                    raise self.fail(
                        f"layer {index}: per_layer_config says head_dim {own_dim} and {own_heads} KV heads,"
                        f" another full layer or the global keys say {wide} and {shared}"
                    )
                wide, shared = own_dim, own_heads
        for key, value in (("global_head_dim", wide), ("num_global_key_value_heads", shared)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                found = "is missing" if value is None else f"must be a positive integer, found {value!r}"
                raise self.fail(f"{key} {found}; the geometry is never guessed, add it")
        return int(wide), int(shared)  # type: ignore[arg-type]

    def overrides(self, per_layer: Mapping[str, Any], layer_types: tuple[str, ...]) -> dict[int, Mapping[str, Any]]:
        """per_layer_config by layer index."""
        entries: dict[int, Mapping[str, Any]] = {}
        for key, entry in per_layer.items():
            if not str(key).isdigit() or int(key) >= len(layer_types) or not isinstance(entry, Mapping):
                raise self.fail(f"per_layer_config: {key!r} names no layer of {len(layer_types)}")
            entries[int(key)] = entry
        return entries

    def rope(self, kind: str) -> RopeParameters:
        """Rotary parameters of one layer kind."""
        table = self.get("rope_parameters")
        entry = table.get(kind) if isinstance(table, Mapping) else None
        if not isinstance(entry, Mapping):
            raise self.fail(f"rope_parameters.{kind} is missing")
        rope_type, path = entry.get("rope_type", "default"), f"rope_parameters.{kind}."
        if rope_type not in ("default", "proportional"):
            raise self.fail(f"not supported: {path}rope_type {rope_type!r}")
        proportional = rope_type == "proportional"
        partial = self.number(entry, "partial_rotary_factor", path, 1.0)
        if partial > 1 or (partial != 1 and not proportional):
            raise self.fail(f"not supported: {path}partial_rotary_factor {partial} with rope_type {rope_type!r}")
        return RopeParameters(
            self.number(entry, "rope_theta", path), partial, self.number(entry, "factor", path, 1.0), proportional
        )
