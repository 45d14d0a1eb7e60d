"""Which tensors a target and a drafter are made of, and building a layer's weights from a checkpoint.

Names are the checkpoint's after normalisation (no `language_model.model.` or `model.` in front).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint import Checkpoint
from engine.config import DrafterConfig, LayerShape, TargetConfig, TextConfig
from engine.layers import LayerWeights, fuse
from kernels import Kernels, Linear

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def target_tensors(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a target; matrices as [out, in] before quantization."""
    return _common_tensors(config, values=True)


def drafter_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a drafter."""
    shapes = _common_tensors(config, values=False)
    shapes["pre_projection.weight"] = (config.hidden_size, 2 * config.backbone_hidden_size)
    shapes["post_projection.weight"] = (config.backbone_hidden_size, config.hidden_size)
    return shapes


def _common_tensors(config: TextConfig, values: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}"
        attention = f"{prefix}.self_attn"
        wide, narrow = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        shapes[f"{attention}.q_proj.weight"] = (wide, hidden)
        shapes[f"{attention}.o_proj.weight"] = (hidden, wide)
        shapes[f"{attention}.q_norm.weight"] = (layer.head_dim,)
        if values:
            shapes[f"{attention}.k_proj.weight"] = (narrow, hidden)
            shapes[f"{attention}.k_norm.weight"] = (layer.head_dim,)
            if not layer.k_eq_v:
                shapes[f"{attention}.v_proj.weight"] = (narrow, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        for norm in _NORMS:
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
        shapes[f"{prefix}.layer_scalar"] = (1,)
    return shapes


def layer_weights(
    checkpoint: Checkpoint,
    kernels: Kernels,
    prefix: str,
    shape: LayerShape,
    dtype: torch.dtype,
    device: str,
    values: bool,
) -> LayerWeights:
    """One layer's matrices, fused where they share their input, and its norms in fp32; a drafter has no K and V."""

    def matrix(*names: str) -> Linear:
        return kernels.prepare(fuse(*(checkpoint.weight(f"{prefix}.{name}", dtype, device) for name in names)))

    def vector(name: str) -> Tensor:
        return checkpoint.tensor(f"{prefix}.{name}.weight").float().to(device)

    projections = ["self_attn.q_proj"]
    norms = [vector("self_attn.q_norm").expand(shape.num_heads, -1)]
    if values:
        projections.append("self_attn.k_proj")
        norms.append(vector("self_attn.k_norm").expand(shape.num_kv_heads, -1))
        if not shape.k_eq_v:
            projections.append("self_attn.v_proj")
            norms.append(torch.ones(shape.num_kv_heads, shape.head_dim, device=device))
    return LayerWeights(
        qkv=matrix(*projections),
        o=matrix("self_attn.o_proj"),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
        down=matrix("mlp.down_proj"),
        norm_heads=torch.cat(norms).contiguous(),
        input_norm=vector("input_layernorm"),
        post_attention_norm=vector("post_attention_layernorm"),
        pre_feedforward_norm=vector("pre_feedforward_layernorm"),
        post_feedforward_norm=vector("post_feedforward_layernorm"),
        layer_scalar=checkpoint.tensor(f"{prefix}.layer_scalar").to(dtype).to(device),
    )
