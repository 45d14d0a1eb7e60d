"""Sizes, random weights and config.json of Gemma 4 pairs that are small enough to build inside a test.

`support_engine` writes and loads them as checkpoints; `support_oracles` builds the same ones inside transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tools.nano.tokens import STOP_IDS

SLIDING, FULL = "sliding_attention", "full_attention"
SOFTCAP = 30.0
TABLE_SPREAD, SCORE_SPREAD, LOGIT_SPREAD = 0.25, 3.0, 2.0
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a random pair; every width that a matrix multiplies is a multiple of 64, so that all can be quantized.

    The drafter has the target's heads and window and sizes of its own for the stream, the MLP and the depth.
    """

    name: str
    model_type: str = "gemma4_unified"
    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 192
    num_hidden_layers: int = 6
    period: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    num_global_key_value_heads: int = 1
    head_dim: int = 32
    global_head_dim: int = 64
    sliding_window: int = 16
    max_position_embeddings: int = 4096
    eps: float = 1e-6
    drafter_hidden_size: int = 64
    drafter_intermediate_size: int = 128
    drafter_layers: int = 4

    def heads(self, kind: str) -> tuple[int, int]:
        """(KV heads, head_dim) of a layer kind."""
        if kind == FULL:
            return self.num_global_key_value_heads, self.global_head_dim
        return self.num_key_value_heads, self.head_dim


TINY = Geometry("tiny")
"""12B's layout in small: 5 sliding layers and 1 full one, one KV head in the full layer, window 16."""

TINY_31B = Geometry(
    "tiny_31b",
    model_type="gemma4",
    hidden_size=192,
    intermediate_size=320,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_global_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    drafter_hidden_size=128,
)
"""31B's layout in small: several KV heads in the full layer too, two query heads to each sliding one, odd widths."""

NANO_SHAPED = Geometry(
    "nano_shaped",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=18,
    head_dim=64,
    global_head_dim=128,
    sliding_window=1024,
    max_position_embeddings=8192,
    drafter_hidden_size=128,
    drafter_intermediate_size=768,
)
"""The nano pair's sizes with random weights."""

GEOMETRIES = {geometry.name: geometry for geometry in (TINY, TINY_31B, NANO_SHAPED)}


def drafter_for_another(geometry: Geometry, **sizes: int) -> Geometry:
    """The geometry of a drafter that was made for a target of other sizes, e.g. hidden_size=192 or vocab_size=576."""
    return replace(geometry, name=f"{geometry.name}_other", **sizes)


# -- shapes and weights ------------------------------------------------------------------------------------------------


def layer_types(layers: int, period: int) -> list[str]:
    """`period - 1` sliding layers, then a full one, over and over."""
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]


def layer_shapes(prefix: str, geometry: Geometry, kind: str, hidden: int, inner: int, own_kv: bool) -> Shapes:
    """Checkpoint name -> shape of one layer's tensors."""
    pairs, width = geometry.heads(kind)
    queries = geometry.num_attention_heads * width
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    shapes: Shapes = {
        f"{attention}q_proj.weight": (queries, hidden),
        f"{attention}o_proj.weight": (hidden, queries),
        f"{attention}q_norm.weight": (width,),
        f"{mlp}gate_proj.weight": (inner, hidden),
        f"{mlp}up_proj.weight": (inner, hidden),
        f"{mlp}down_proj.weight": (hidden, inner),
        f"{prefix}layer_scalar": (1,),
    }
    shapes.update({f"{prefix}{norm}.weight": (hidden,) for norm in NORMS})
    if own_kv:
        shapes[f"{attention}k_proj.weight"] = (pairs * width, hidden)
        shapes[f"{attention}k_norm.weight"] = (width,)
        if kind == SLIDING:
            shapes[f"{attention}v_proj.weight"] = (pairs * width, hidden)
    return shapes


def target_shapes(geometry: Geometry) -> Shapes:
    """Hugging Face names of a text-only target -> shapes."""
    hidden = geometry.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (geometry.vocab_size, hidden)}
    for layer, kind in enumerate(layer_types(geometry.num_hidden_layers, geometry.period)):
        prefix = f"model.layers.{layer}."
        shapes.update(layer_shapes(prefix, geometry, kind, hidden, geometry.intermediate_size, True))
    return {**shapes, "model.norm.weight": (hidden,)}


def drafter_shapes(geometry: Geometry) -> Shapes:
    """Names of a drafter's tensors -> shapes."""
    hidden, backbone = geometry.drafter_hidden_size, geometry.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (geometry.vocab_size, hidden)}
    for layer, kind in enumerate(layer_types(geometry.drafter_layers, geometry.drafter_layers)):
        prefix = f"model.layers.{layer}."
        shapes.update(layer_shapes(prefix, geometry, kind, hidden, geometry.drafter_intermediate_size, False))
    shapes["model.norm.weight"] = (hidden,)
    shapes["pre_projection.weight"] = (hidden, 2 * backbone)
    shapes["post_projection.weight"] = (backbone, hidden)
    return shapes


def random_value(name: str, shape: tuple[int, ...], generator: torch.Generator, score_spread: float) -> torch.Tensor:
    """One fp32 tensor of a model whose attention and logits are neither flat nor stuck on one token.

    q_norm and k_norm give attention scores of spread `score_spread` whatever the head width. A small table and a large
    final norm keep a token's own embedding from deciding the next one. The drafter's pre_projection brings both of its
    halves, embedding and hidden row, to the size of what its layers add.
    """
    noise = torch.randn(shape, generator=generator)
    if name.endswith("layer_scalar"):
        return 0.5 + torch.rand(shape, generator=generator)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return (1 + 0.2 * noise) * score_spread**0.5 * shape[0] ** -0.25
    if name.endswith("model.norm.weight"):
        return (1 + 0.2 * noise) / TABLE_SPREAD * LOGIT_SPREAD
    if len(shape) == 1:
        return 1 + 0.2 * noise
    noise *= shape[1] ** -0.5
    if name.endswith("embed_tokens.weight"):
        return noise * TABLE_SPREAD
    if name.endswith("pre_projection.weight"):
        embedding, hidden = noise.chunk(2, 1)
        return torch.cat((embedding / TABLE_SPREAD, hidden * TABLE_SPREAD / LOGIT_SPREAD), 1)
    return noise * 1.2


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int, score_spread: float = SCORE_SPREAD) -> Tensors:
    """fp32 tensors for all names, the same for the same seed.

    Sharp attention (3) makes varied text, and amplifies every rounding; what is compared with another program over many
    layers wants it flatter.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: random_value(name, shape, generator, score_spread) for name, shape in sorted(shapes.items())}


# -- config.json -------------------------------------------------------------------------------------------------------


def text_config(geometry: Geometry, drafter: bool = False) -> Config:
    """The text section of a target's or a drafter's config.json, every field written out."""
    layers = geometry.drafter_layers if drafter else geometry.num_hidden_layers
    return {
        "model_type": f"{geometry.model_type}_text",
        "vocab_size": geometry.vocab_size,
        "hidden_size": geometry.drafter_hidden_size if drafter else geometry.hidden_size,
        "intermediate_size": geometry.drafter_intermediate_size if drafter else geometry.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": geometry.num_attention_heads,
        "num_key_value_heads": geometry.num_key_value_heads,
        "num_global_key_value_heads": geometry.num_global_key_value_heads,
        "head_dim": geometry.head_dim,
        "global_head_dim": geometry.global_head_dim,
        "sliding_window": geometry.sliding_window,
        "layer_types": layer_types(layers, layers if drafter else geometry.period),
        "attention_k_eq_v": True,
        "attention_bias": False,
        "num_kv_shared_layers": layers if drafter else 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0 if drafter else geometry.vocab_size,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": geometry.eps,
        "max_position_embeddings": geometry.max_position_embeddings,
        "final_logit_softcapping": None if drafter else SOFTCAP,
        "tie_word_embeddings": True,
        "rope_parameters": {
            FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "use_bidirectional_attention": None,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }


def target_config(geometry: Geometry) -> Config:
    """A target's config.json without its quantization block."""
    kind = "Gemma4Unified" if geometry.model_type == "gemma4_unified" else "Gemma4"
    return {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": geometry.model_type,
        "text_config": text_config(geometry),
        "vocab_size": geometry.vocab_size,
        "tie_word_embeddings": True,
        "eos_token_id": list(STOP_IDS),
        "torch_dtype": "bfloat16",
    }


def drafter_config(geometry: Geometry) -> Config:
    """A drafter's config.json without its quantization block."""
    kind = "Gemma4Unified" if geometry.model_type == "gemma4_unified" else "Gemma4"
    return {
        "architectures": [f"{kind}AssistantForCausalLM"],
        "model_type": f"{geometry.model_type}_assistant",
        "text_config": text_config(geometry, drafter=True),
        "backbone_hidden_size": geometry.hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
