"""Sizes of the small pair, and its config.json files. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BITS, GROUP = 4, 64
STOP_IDS = [1, 106]


@dataclass(frozen=True)
class QwenNano:
    """The real model's structure in small: three gated-delta layers, then a full one, twice."""

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    drafter_layers: int = 2
    drafter_heads: int = 4
    drafter_kv_heads: int = 2
    drafter_head_dim: int = 32
    block_size: int = 16
    mask_token_id: int = 4
    taps: tuple[int, ...] = (1, 3, 5, 6)

    @property
    def kinds(self) -> list[str]:
        """Kind of every layer."""
        return ["full" if index % 4 == 3 else "linear" for index in range(self.num_hidden_layers)]

    def text_config(self) -> dict[str, Any]:
        """The target's text config."""
        names = [name for name in vars(self) if not name.startswith(("drafter", "block", "mask", "taps"))]
        return {
            **{name: getattr(self, name) for name in names},
            "layer_types": [
                "full_attention" if i % 4 == 3 else "linear_attention" for i in range(self.num_hidden_layers)
            ],
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        }

    def target_config(self) -> dict[str, Any]:
        """The target's config.json, as MLX writes it."""
        block = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
        return {
            "model_type": "qwen3_5",
            "eos_token_id": STOP_IDS,
            "text_config": {"model_type": "qwen3_5_text", **self.text_config()},
            "quantization": block,
            "quantization_config": block,
        }

    def drafter_config(self) -> dict[str, Any]:
        """The drafter's config.json."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.taps)},
            "num_target_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.drafter_layers,
            "num_attention_heads": self.drafter_heads,
            "num_key_value_heads": self.drafter_kv_heads,
            "head_dim": self.drafter_head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000_000,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        }
