"""Which tensors a Qwen 3.5 target and a DFlash drafter are made of, and building a layer's weights from a checkpoint.

Hugging Face stores RMSNorm weights w of (1 + w) and the convolution as [C, 1, K]; MLX stores 1 + w and [C, K, 1].
The convolution's shape says which of the two a checkpoint is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.layers import fuse
from engine.qwen35.config import DFlashConfig, Qwen35Config
from kernels import Kernels, Linear

Layout = Literal["mlx", "hf"]


@dataclass(frozen=True)
class MlpWeights:
    """What both layer kinds have besides their mixer."""

    input_norm: Tensor
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class FullWeights:
    """Gated full attention. `qkv` gives [query | gate] per head, then k, then v; head_dim^-0.5 is in the q norm."""

    qkv: Linear
    o: Linear
    norm_heads: Tensor
    mlp: MlpWeights


@dataclass(frozen=True)
class LinearWeights:
    """A gated-delta layer. `in_proj` gives the convolution's channels, then z, b and a; `rate` is exp(A_log)."""

    in_proj: Linear
    out: Linear
    conv: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    mlp: MlpWeights


LayerWeights = FullWeights | LinearWeights


@dataclass(frozen=True)
class DrafterLayer:
    """One layer of the drafter: queries from the block, keys and values from the block and from the context."""

    q: Linear
    kv: Linear
    o: Linear
    q_norm: Tensor
    k_norm: Tensor
    mlp: MlpWeights


def target_tensors(config: Qwen35Config, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a target; matrices as [out, in] before quantization."""
    hidden, width = config.hidden_size, config.conv_width
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    for index, kind in enumerate(config.kinds):
        prefix = f"layers.{index}"
        shapes |= _mlp_tensors(prefix, hidden, config.intermediate_size)
        if kind == "full":
            shapes |= {
                f"{prefix}.self_attn.q_proj.weight": (2 * heads * dim, hidden),
                f"{prefix}.self_attn.k_proj.weight": (groups * dim, hidden),
                f"{prefix}.self_attn.v_proj.weight": (groups * dim, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, heads * dim),
                f"{prefix}.self_attn.q_norm.weight": (dim,),
                f"{prefix}.self_attn.k_norm.weight": (dim,),
            }
            continue
        taps, own = config.linear_conv_kernel_dim, f"{prefix}.linear_attn"
        shapes |= {
            f"{own}.in_proj_qkv.weight": (width, hidden),
            f"{own}.in_proj_z.weight": (config.value_width, hidden),
            f"{own}.in_proj_b.weight": (config.linear_num_value_heads, hidden),
            f"{own}.in_proj_a.weight": (config.linear_num_value_heads, hidden),
            f"{own}.out_proj.weight": (hidden, config.value_width),
            f"{own}.conv1d.weight": (width, taps, 1) if layout == "mlx" else (width, 1, taps),
            f"{own}.A_log": (config.linear_num_value_heads,),
            f"{own}.dt_bias": (config.linear_num_value_heads,),
            f"{own}.norm.weight": (config.linear_value_head_dim,),
        }
    return shapes


def drafter_tensors(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a drafter; it has neither an embedding table nor a head."""
    hidden, dim = config.hidden_size, config.head_dim
    wide, narrow = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        prefix = f"layers.{index}"
        shapes |= _mlp_tensors(prefix, hidden, config.intermediate_size)
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (wide, hidden),
            f"{prefix}.self_attn.k_proj.weight": (narrow, hidden),
            f"{prefix}.self_attn.v_proj.weight": (narrow, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, wide),
            f"{prefix}.self_attn.q_norm.weight": (dim,),
            f"{prefix}.self_attn.k_norm.weight": (dim,),
        }
    return shapes


def layout_of(checkpoint: Checkpoint, config: Qwen35Config) -> Layout:
    """Whose conventions the checkpoint follows; CheckpointError where its convolutions say neither, or both."""
    taps = config.linear_conv_kernel_dim
    known: dict[tuple[int, ...], Layout] = {
        (config.conv_width, taps, 1): "mlx",
        (config.conv_width, 1, taps): "hf",
    }
    found: Layout | None = None
    for index, kind in enumerate(config.kinds):
        name = f"layers.{index}.linear_attn.conv1d.weight"
        entry = checkpoint.entries.get(name)
        if kind != "linear" or entry is None:  # a missing tensor is named when all are verified
            continue
        layout = known.get(entry.shape)
        if layout is None:
            wanted = " (MLX) or ".join(str(list(shape)) for shape in known) + " (Hugging Face)"
            raise CheckpointError(f"{checkpoint.name}: {name} has shape {list(entry.shape)}; expected {wanted}")
        if found not in (None, layout):
            raise CheckpointError(
                f"{checkpoint.name}: {name} is laid out as {layout}, the layers before it as {found}; "
                "the norms' convention follows it, so convert the checkpoint as a whole"
            )
        found = layout
    return found or "mlx"


@dataclass(frozen=True)
class WeightReader:
    """Reads one checkpoint's weights onto a device, in the layout that it has."""

    checkpoint: Checkpoint
    kernels: Kernels
    dtype: torch.dtype
    device: str
    layout: Layout = "mlx"

    def matrix(self, *names: str) -> Linear:
        """Matrices over the same input, as one."""
        return self.kernels.prepare(fuse(*(self.checkpoint.weight(name, self.dtype, self.device) for name in names)))

    def vector(self, name: str) -> Tensor:
        """A tensor in fp32."""
        return self.checkpoint.tensor(name).float().to(self.device)

    def norm(self, name: str) -> Tensor:
        """What RMSNorm multiplies by, fp32: 1 + w, which MLX stores and Hugging Face does not."""
        stored = self.vector(f"{name}.weight")
        return stored + 1.0 if self.layout == "hf" else stored

    def mlp(self, prefix: str, norm: Callable[[str], Tensor]) -> MlpWeights:
        """A layer's MLP and its two norms."""
        return MlpWeights(
            input_norm=norm(f"{prefix}.input_layernorm"),
            post_attention_norm=norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self.matrix(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
            down=self.matrix(f"{prefix}.mlp.down_proj"),
        )


def target_layer(reader: WeightReader, config: Qwen35Config, index: int) -> LayerWeights:
    """One layer of a target."""
    prefix = f"layers.{index}"
    mlp = reader.mlp(prefix, reader.norm)
    if config.kinds[index] == "full":
        own = f"{prefix}.self_attn"
        q_norm = reader.norm(f"{own}.q_norm") * config.head_dim**-0.5
        heads = (
            q_norm.expand(config.num_attention_heads, -1),
            reader.norm(f"{own}.k_norm").expand(config.num_key_value_heads, -1),
        )
        return FullWeights(
            qkv=reader.matrix(f"{own}.q_proj", f"{own}.k_proj", f"{own}.v_proj"),
            o=reader.matrix(f"{own}.o_proj"),
            norm_heads=torch.cat(heads).contiguous(),
            mlp=mlp,
        )
    own = f"{prefix}.linear_attn"
    conv = reader.vector(f"{own}.conv1d.weight")
    return LinearWeights(
        in_proj=reader.matrix(*(f"{own}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))),
        out=reader.matrix(f"{own}.out_proj"),
        conv=conv.view(config.conv_width, -1).t().contiguous(),
        rate=reader.vector(f"{own}.A_log").exp(),
        dt_bias=reader.vector(f"{own}.dt_bias"),
        norm=reader.vector(f"{own}.norm.weight"),
        mlp=mlp,
    )


def drafter_layer(reader: WeightReader, config: DFlashConfig, index: int) -> DrafterLayer:
    """One layer of a drafter; its norms hold plain weights in either layout."""
    prefix = f"layers.{index}"
    own = f"{prefix}.self_attn"
    return DrafterLayer(
        q=reader.matrix(f"{own}.q_proj"),
        kv=reader.matrix(f"{own}.k_proj", f"{own}.v_proj"),
        o=reader.matrix(f"{own}.o_proj"),
        q_norm=reader.vector(f"{own}.q_norm.weight") * config.head_dim**-0.5,
        k_norm=reader.vector(f"{own}.k_norm.weight"),
        mlp=reader.mlp(prefix, lambda name: reader.vector(f"{name}.weight")),
    )


def _mlp_tensors(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }
