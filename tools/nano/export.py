"""Writes and reads nano checkpoints in the MLX affine format: config.json, shards under 8 MB, index, tokenizer.

The target carries 4-bit weights with 8-bit MLP overrides under `language_model.`; the drafter is uniform 4-bit
under Hugging Face's own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.quantize import GROUP_SIZE, dequantize, quantize
from tools.nano.shape import DraftShape, NanoShape
from tools.nano.tokens import STOP_IDS

SHARD_BYTES = 7_600_000
TARGET_PREFIX = "language_model."


def text_config(shape: NanoShape) -> dict[str, Any]:
    """Text part of config.json, every field explicit: loaders' defaults are another model's."""
    return {
        "model_type": "gemma4_unified_text",
        "vocab_size": shape.vocab_size,
        "vocab_size_per_layer_input": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_global_key_value_heads": shape.num_global_key_value_heads,
        "head_dim": shape.head_dim,
        "global_head_dim": shape.global_head_dim,
        "attention_k_eq_v": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window,
        "sliding_window_pattern": shape.period,
        "num_kv_shared_layers": shape.num_hidden_layers if shape.reads_target else 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "use_bidirectional_attention": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": shape.eps,
        "final_logit_softcapping": shape.softcap,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "pad_token_id": 0,
        "eos_token_id": STOP_IDS[0],
        "bos_token_id": 2,
        "dtype": "bfloat16",
    }


def model_config(shape: NanoShape) -> dict[str, Any]:
    """config.json of a target or a drafter, with the quantization blocks."""
    prefix = "" if isinstance(shape, DraftShape) else TARGET_PREFIX
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}
    for name in shape.parameters():
        if shape.bits(name) == 8:
            quantization[prefix + name.removesuffix(".weight")] = {"group_size": GROUP_SIZE, "bits": 8}
    config: dict[str, Any] = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "text_config": text_config(shape),
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": STOP_IDS,
        "dtype": "bfloat16",
    }
    if isinstance(shape, DraftShape):
        config["architectures"] = ["Gemma4UnifiedAssistantForCausalLM"]
        config["model_type"] = "gemma4_unified_assistant"
        config["backbone_hidden_size"] = shape.backbone_hidden_size
        config["use_ordered_embeddings"] = False
    return {**config, "quantization": quantization, "quantization_config": quantization}


def checkpoint_tensors(shape: NanoShape, masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stored tensors: packed weight, scales and biases for matrices, bf16 for vectors."""
    prefix = "" if isinstance(shape, DraftShape) else TARGET_PREFIX
    tensors: dict[str, torch.Tensor] = {}
    for name in shape.parameters():
        value = masters[name].detach().bfloat16().cpu()
        bits = shape.bits(name)
        if bits is None:
            tensors[prefix + name] = value.contiguous()
            continue
        module = prefix + name.removesuffix(".weight")
        parts = quantize(value, bits)
        for suffix, part in zip(("weight", "scales", "biases"), parts, strict=True):
            tensors[f"{module}.{suffix}"] = part.contiguous()
    return tensors


def export(folder: Path, shape: NanoShape, masters: Mapping[str, torch.Tensor], files: Mapping[str, str]) -> int:
    """Write a checkpoint folder; `files` are text files to put beside the weights. Returns its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in checkpoint_tensors(shape, masters).items():
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        filename = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / filename, metadata={"format": "mlx"})
        (folder / filename).chmod(0o644)
        index.update(dict.fromkeys(shard, filename))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    _write_json(folder / "config.json", model_config(shape))
    generation: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": STOP_IDS, "pad_token_id": 0, "do_sample": False}
    if isinstance(shape, DraftShape):
        generation["num_assistant_tokens"] = 3
    _write_json(folder / "generation_config.json", generation)
    for filename, text in files.items():
        (folder / filename).write_text(text, encoding="utf-8")
    return sum(path.stat().st_size for path in folder.iterdir())


def load_weights(folder: Path, shape: NanoShape, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Weights of an exported checkpoint, dequantized, under the trainer's names."""
    prefix = "" if isinstance(shape, DraftShape) else TARGET_PREFIX
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    stored: dict[str, torch.Tensor] = {}
    for filename in sorted(set(index.values())):
        with safe_open(folder / filename, framework="pt") as shard:
            stored.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118 (no dict)
    weights: dict[str, torch.Tensor] = {}
    for name in shape.parameters():
        bits = shape.bits(name)
        if bits is None:
            weights[name] = stored[prefix + name].to(device, dtype)
            continue
        module = prefix + name.removesuffix(".weight")
        parts = (stored[f"{module}.{suffix}"] for suffix in ("weight", "scales", "biases"))
        weights[name] = dequantize(*parts, bits=bits, dtype=torch.bfloat16).to(device, dtype)
    return weights


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
