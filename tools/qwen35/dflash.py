"""The drafter in plain differentiable torch, for training: many blocks of one sequence at once.

Every block sees the sequence's committed rows before its carried token, and itself both ways.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.qwen35.shape import QwenNano

EPS, THETA = 1e-6, 1e7


def init(shape: QwenNano, seed: int) -> dict[str, Tensor]:
    """Fresh weights by checkpoint name, fp32, that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.drafter_head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(shape.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(shape.drafter_layers):
        own = f"layers.{index}"
        sizes |= {
            f"{own}.input_layernorm.weight": (hidden,),
            f"{own}.post_attention_layernorm.weight": (hidden,),
            f"{own}.self_attn.q_proj.weight": (shape.drafter_heads * dim, hidden),
            f"{own}.self_attn.k_proj.weight": (shape.drafter_kv_heads * dim, hidden),
            f"{own}.self_attn.v_proj.weight": (shape.drafter_kv_heads * dim, hidden),
            f"{own}.self_attn.o_proj.weight": (hidden, shape.drafter_heads * dim),
            f"{own}.self_attn.q_norm.weight": (dim,),
            f"{own}.self_attn.k_norm.weight": (dim,),
            f"{own}.mlp.gate_proj.weight": (inner, hidden),
            f"{own}.mlp.up_proj.weight": (inner, hidden),
            f"{own}.mlp.down_proj.weight": (hidden, inner),
        }
    found = {}
    for name, size in sizes.items():
        value = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) / size[-1] ** 0.5
        found[name] = value.requires_grad_()
    return found


def block_logits(
    shape: QwenNano, w: dict[str, Tensor], table: Tensor, taps: Tensor, tokens: Tensor, starts: Tensor, rows: int
) -> Tensor:
    """Logits [B, A, rows - 1, V] of the masked rows of A blocks per sequence.

    taps [B, T, layers * H] and tokens [B, T]; block a carries the token at `starts[a]` and sees taps before it.
    """
    batch, length = tokens.shape
    anchors = starts.numel()
    ids = torch.full((batch, anchors, rows), shape.mask_token_id)
    ids[:, :, 0] = tokens[:, starts]
    x = table[ids].flatten(1, 2)
    context = _norm(taps @ w["fc.weight"].t(), w["hidden_norm.weight"])
    places = (starts[:, None] + torch.arange(rows)).flatten()
    owner = torch.arange(anchors).repeat_interleave(rows)
    seen = torch.cat((torch.arange(length) < starts[owner][:, None], owner[:, None] == owner), 1)
    everywhere = torch.cat((torch.arange(length), places))
    for index in range(shape.drafter_layers):
        own = f"layers.{index}"
        y = _norm(x, w[f"{own}.input_layernorm.weight"])
        q = _heads(y, w[f"{own}.self_attn.q_proj.weight"], shape.drafter_head_dim)
        both = torch.cat((context, y), 1)
        k = _heads(both, w[f"{own}.self_attn.k_proj.weight"], shape.drafter_head_dim)
        v = _heads(both, w[f"{own}.self_attn.v_proj.weight"], shape.drafter_head_dim)
        q = _rope(_norm(q, w[f"{own}.self_attn.q_norm.weight"]), places)
        k = _rope(_norm(k, w[f"{own}.self_attn.k_norm.weight"]), everywhere)
        core = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        x = x + core.transpose(1, 2).flatten(2) @ w[f"{own}.self_attn.o_proj.weight"].t()
        y = _norm(x, w[f"{own}.post_attention_layernorm.weight"])
        gate, up = (y @ w[f"{own}.mlp.{part}_proj.weight"].t() for part in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{own}.mlp.down_proj.weight"].t()
    hidden = _norm(x, w["norm.weight"]).view(batch, anchors, rows, -1)[:, :, 1:]
    return hidden @ table.t()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _heads(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    return (x @ weight.t()).unflatten(-1, (-1, dim)).transpose(1, 2)


def _rope(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    left, right = x.split(half, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
