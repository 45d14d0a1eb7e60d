"""The geometries that a pair can be grown to, and their config.json files.

Sizes are those of the released checkpoints; everything else (soft cap, RoPE, window, stop ids) is nano's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.quantize import GROUP_SIZE

SLIDING, FULL = "sliding_attention", "full_attention"
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PERIOD = 6
TARGET_PREFIX = "language_model."


@dataclass(frozen=True)
class Side:
    """Sizes of a target or of a drafter, and the bits of its matrices (None: floats)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    bits: int | None
    mlp_bits: int | None

    def module_bits(self, module: str) -> int | None:
        """Bits of a module's matrix."""
        return self.mlp_bits if any(part in module for part in MLP) else self.bits


@dataclass(frozen=True)
class Geometry:
    """What a pair is grown to."""

    name: str
    family: str
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_global_key_value_heads: int
    head_dim: int
    global_head_dim: int
    max_position_embeddings: int
    target: Side
    drafter: Side

    @property
    def folders(self) -> tuple[str, str]:
        """Names of the target's and the drafter's folder: they say what they hold."""
        return f"gemma4-{self.name}-grown-it", f"gemma4-{self.name}-grown-it-assistant"

    def side(self, role: str) -> Side:
        """The target's or the drafter's sizes."""
        return self.target if role == "target" else self.drafter


GEOMETRIES: Mapping[str, Geometry] = {
    geometry.name: geometry
    for geometry in (
        Geometry(
            "12b", "gemma4_unified", 262144, 16, 8, 1, 256, 512, 262144,
            Side(3840, 15360, 48, bits=4, mlp_bits=8), Side(1024, 8192, 4, bits=4, mlp_bits=4),
        ),
        Geometry(
            "31b", "gemma4", 262144, 32, 16, 4, 256, 512, 262144,
            Side(5376, 21504, 60, bits=4, mlp_bits=4), Side(1024, 8192, 4, bits=None, mlp_bits=None),
        ),
        Geometry(
            "small", "gemma4_unified", 8192, 8, 4, 1, 128, 256, 8192,
            Side(320, 1024, 24, bits=4, mlp_bits=8), Side(192, 1024, 4, bits=4, mlp_bits=4),
        ),
        Geometry(
            "small4", "gemma4", 8192, 8, 4, 2, 128, 256, 8192,
            Side(512, 1536, 24, bits=4, mlp_bits=4), Side(256, 1024, 4, bits=None, mlp_bits=None),
        ),
    )
}  # fmt: skip
"""By name: the two real ones, and two in small for tests (as 12b and as 31b)."""

ARCHITECTURES = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}


def make_config(
    geometry: Geometry, role: str, nano: Mapping[str, Any], grown_from: Mapping[str, Any], floats: str | None = None
) -> dict[str, Any]:
    """config.json of a grown target or drafter from nano's own; `floats` names the dtype of an unquantized copy."""
    side, target = geometry.side(role), role == "target"
    period = PERIOD if target else side.num_hidden_layers
    config = copy.deepcopy(dict(nano))
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    start = ARCHITECTURES[geometry.family]
    config["architectures"] = [f"{start}ForConditionalGeneration" if target else f"{start}AssistantForCausalLM"]
    config["model_type"] = geometry.family if target else f"{geometry.family}_assistant"
    config["vocab_size"] = geometry.vocab_size
    config["text_config"].update(
        model_type=f"{geometry.family}_text",
        vocab_size=geometry.vocab_size,
        vocab_size_per_layer_input=geometry.vocab_size,
        hidden_size=side.hidden_size,
        intermediate_size=side.intermediate_size,
        num_hidden_layers=side.num_hidden_layers,
        num_attention_heads=geometry.num_attention_heads,
        num_key_value_heads=geometry.num_key_value_heads,
        num_global_key_value_heads=geometry.num_global_key_value_heads,
        head_dim=geometry.head_dim,
        global_head_dim=geometry.global_head_dim,
        layer_types=[FULL if (layer + 1) % period == 0 else SLIDING for layer in range(side.num_hidden_layers)],
        sliding_window_pattern=period,
        num_kv_shared_layers=0 if target else side.num_hidden_layers,
        max_position_embeddings=geometry.max_position_embeddings,
    )
    if not target:
        config["backbone_hidden_size"] = geometry.target.hidden_size
    config["grown_from"] = dict(grown_from)
    if floats is not None:
        config["dtype"] = config["text_config"]["dtype"] = floats
    elif side.bits is not None:
        section: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": side.bits, "mode": "affine"}
        if side.mlp_bits != side.bits:
            prefix = f"{TARGET_PREFIX}model." if target else "model."
            for layer in range(side.num_hidden_layers):
                for part in MLP:
                    section[f"{prefix}layers.{layer}.{part}"] = {"group_size": GROUP_SIZE, "bits": side.mlp_bits}
        config["quantization"] = config["quantization_config"] = section
    return config
