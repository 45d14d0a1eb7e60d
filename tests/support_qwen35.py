"""Random Qwen 3.5 targets and DFlash drafters: inside transformers, as Hugging Face and as MLX checkpoints.

`qwen_oracle()` builds a target in transformers once per test run and saves it with `save_pretrained`; `write_mlx`
writes the same weights as MLX stores them. A DFlash drafter has no class in transformers: `write_drafter` makes one.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from support_engine import (
    generated,
    quantize_tensors,
    scratch_folder,
    small_tokenizer_files,
    with_quantization,
    write_checkpoint,
)
from torch import Tensor

if TYPE_CHECKING:
    from engine.pair import Pair

Config = dict[str, Any]
Tensors = dict[str, Tensor]
EOS = 1


@dataclass(frozen=True)
class QwenGeometry:
    """Sizes of a target and of its drafter."""

    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 16
    linear_value_head_dim: int = 24
    linear_conv_kernel_dim: int = 4
    drafter_layers: int = 3
    drafter_heads: int = 4
    drafter_kv_heads: int = 2
    drafter_head_dim: int = 16
    drafter_intermediate_size: int = 96
    block_size: int = 16
    taps: tuple[int, ...] = (1, 3, 6)

    @property
    def mask_token_id(self) -> int:
        """The last id of the vocabulary."""
        return self.vocab_size - 1

    @property
    def layer_types(self) -> list[str]:
        """Full attention every fourth layer."""
        return [
            "full_attention" if (index + 1) % 4 == 0 else "linear_attention" for index in range(self.num_hidden_layers)
        ]


TINY = QwenGeometry()
"""Odd widths on purpose: value heads of 24 leave a scalar tail, q and k have half as many heads as v."""


PACKED = replace(TINY, linear_value_head_dim=32, drafter_intermediate_size=128)
"""Every matrix has whole groups of 64 inputs, so that it can be quantized."""


def text_config(geometry: QwenGeometry = TINY) -> Config:
    """The target's text config, as config.json has it."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    return {
        **{name: getattr(geometry, name) for name in names},
        "layer_types": geometry.layer_types,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }


def target_config(geometry: QwenGeometry = TINY) -> Config:
    """The target's config.json as the hub has it: a text_config inside."""
    return {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **text_config(geometry)}}


def drafter_config(geometry: QwenGeometry = TINY, **changes: Any) -> Config:
    """The drafter's config.json."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": geometry.block_size,
        "dflash_config": {"mask_token_id": geometry.mask_token_id, "target_layer_ids": list(geometry.taps)},
        "num_target_layers": geometry.num_hidden_layers,
        "vocab_size": geometry.vocab_size,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.drafter_intermediate_size,
        "num_hidden_layers": geometry.drafter_layers,
        "num_attention_heads": geometry.drafter_heads,
        "num_key_value_heads": geometry.drafter_kv_heads,
        "head_dim": geometry.drafter_head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000_000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        **changes,
    }


def random_target(geometry: QwenGeometry = TINY, seed: int = 21) -> Tensors:
    """Hugging Face tensors by name without a prefix, fp32; large enough that logits spread and states matter."""
    from engine.qwen35.config import parse_target_config
    from engine.qwen35.weights import target_tensors

    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for name, shape in sorted(target_tensors(parse_target_config(target_config(geometry)), "hf").items()):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            found[name] = noise.abs() * 0.5 - 2.0  # a state keeps about 0.8 to 0.9 of itself a token
        elif name.endswith("dt_bias"):
            found[name] = 0.3 * noise
        elif name.endswith("linear_attn.norm.weight"):
            found[name] = 1.0 + 0.2 * noise
        elif len(shape) == 1:
            found[name] = 0.2 * noise  # RMSNorm multiplies by 1 + w
        elif name.endswith("conv1d.weight"):
            found[name] = 0.8 * noise
        elif name == "embed_tokens.weight":
            found[name] = 0.15 * noise
        else:
            found[name] = noise * (1.0 / shape[-1] ** 0.5)
    return found


def random_drafter(geometry: QwenGeometry = TINY, seed: int = 22) -> Tensors:
    """A drafter's tensors, fp32."""
    from engine.qwen35.config import parse_drafter_config
    from engine.qwen35.weights import drafter_tensors

    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for name, shape in sorted(drafter_tensors(parse_drafter_config(drafter_config(geometry))).items()):
        noise = torch.randn(shape, generator=generator)
        found[name] = 1.0 + 0.2 * noise if len(shape) == 1 else noise * (1.5 / shape[-1] ** 0.5)
    return found


def mlx_tensors(weights: Mapping[str, Tensor]) -> Tensors:
    """Hugging Face tensors as MLX stores them: (1 + w) written out, convolutions turned, its prefix in front."""
    found: Tensors = {}
    for name, value in weights.items():
        plain = value.ndim == 1 and not name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))
        turned = value.transpose(1, 2) if value.ndim == 3 else value
        found[f"language_model.model.{name}"] = turned + 1.0 if plain else turned
    return found


def write_target(
    folder: Path,
    geometry: QwenGeometry = TINY,
    weights: Mapping[str, Tensor] | None = None,
    bits: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """A target in MLX's layout, with a tokenizer; `bits` quantizes its matrices."""
    tensors = mlx_tensors(random_target(geometry) if weights is None else weights)
    block: Config = {}
    if bits is not None:
        tensors, block = quantize_tensors(tensors, bits)
    else:
        tensors = {name: value.to(dtype) for name, value in tensors.items()}
    write_checkpoint(folder, with_quantization(target_config(geometry), block), tensors, shards=2)
    for name, text in tokenizer_files(geometry.vocab_size).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def write_drafter(
    folder: Path,
    geometry: QwenGeometry = TINY,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """A DFlash drafter."""
    tensors = random_drafter(geometry) if weights is None else weights
    write_checkpoint(folder, drafter_config(geometry), {name: value.to(dtype) for name, value in tensors.items()})
    return folder


CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|turn>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>assistant\\n' -}}{%- endif -%}
"""


@functools.cache
def tokenizer_files(vocab_size: int) -> dict[str, str]:
    """A small BPE without a token that begins every prompt, as Qwen's has none."""
    files = dict(small_tokenizer_files(vocab_size))
    settings = json.loads(files.get("tokenizer_config.json", "{}"))
    files["tokenizer_config.json"] = json.dumps({**settings, "bos_token": None})
    files["chat_template.jinja"] = CHAT_TEMPLATE
    return files


@dataclass(frozen=True)
class QwenOracle:
    """A target in transformers, the folder that it was saved to, and its weights."""

    geometry: QwenGeometry
    model: Any
    folder: Path
    weights: Tensors

    def forward(self, tokens: Sequence[int]) -> Any:
        """One uncached forward: logits [1, n, V], hidden_states (after the embedding, then after each layer)."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """The ids that `generate` appends, no stop token."""
        return generated(self.model, prompt, count)


@functools.cache
def qwen_oracle(geometry: QwenGeometry = TINY) -> QwenOracle:
    """The target in transformers, fp32 and eager, built on first use."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen3_5TextConfig(**text_config(geometry))
    config._attn_implementation = "eager"
    model = transformers.Qwen3_5ForCausalLM(config)
    weights = random_target(geometry)
    missing, unexpected = model.load_state_dict({f"model.{k}": v for k, v in weights.items()}, strict=False)
    assert [name for name in missing if name != "lm_head.weight"] == []
    assert unexpected == []
    model.tie_weights()
    folder = Path(tempfile.mkdtemp(prefix="qwen-oracle-", dir=scratch_folder()))
    model.eval().save_pretrained(folder, max_shard_size="200KB")
    return QwenOracle(geometry, model, folder, weights)


@functools.cache
def qwen_dirs(geometry: QwenGeometry = TINY, bits: int | None = None) -> tuple[Path, Path]:
    """Folders of a random bf16 pair, written once per test run: read them, never change them."""
    folder = Path(tempfile.mkdtemp(prefix="qwen-pair-", dir=scratch_folder()))
    target = write_target(folder / "qwen-tiny", geometry, bits=None if bits is None else {"default": bits})
    return target, write_drafter(folder / "qwen-tiny-dflash", geometry)


def qwen_pair(
    geometry: QwenGeometry = TINY, stage: str = "rowwise", bits: int | None = None, dtype: Any = torch.bfloat16
) -> Pair:
    """The random pair, loaded by the engine."""
    from engine.dispatch import DispatchPolicy
    from engine.pair import load_pair

    return load_pair(*qwen_dirs(geometry, bits), DispatchPolicy(stage=stage), dtype=dtype)
