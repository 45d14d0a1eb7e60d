"""Trainable Gemma 4 target and drafter in plain torch, whole sequences at a time.

Weights come as a dict of checkpoint names, so that masters, fake-quantized and loaded weights run the same code.
`Attend` hides the attention backend: flex_attention on a GPU, masked scaled_dot_product_attention elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tools.nano.shape import FULL, NORMS, SLIDING, NanoShape

Weights = Mapping[str, torch.Tensor]
Rope = tuple[torch.Tensor, torch.Tensor]


def init_weights(shape: NanoShape, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Starting values, fp32: unit-rms embeddings, head scale split over q_norm and k_norm, small residual branches."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, size in shape.parameters().items():
        if len(size) == 2:
            spread = shape.hidden_size**-0.5 if "embed_tokens" in name else size[1] ** -0.5
            value = torch.randn(size, generator=generator) * spread
        elif "q_norm" in name or "k_norm" in name:
            value = torch.full(size, size[0] ** -0.25)
        elif "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
            value = torch.full(size, (2 * shape.num_hidden_layers) ** -0.5)
        else:
            value = torch.ones(size)
        weights[name] = value.to(device).requires_grad_(True)
    return weights


def rope_tables(shape: NanoShape, length: int, device: str) -> dict[str, Rope]:
    """fp32 (cos, sin) [length, D / 2] per layer kind; unrotated pairs of the full kind have frequency 0."""
    positions = torch.arange(length, dtype=torch.float32)
    tables: dict[str, Rope] = {}
    for kind, theta, rotated in ((SLIDING, 1e4, 1.0), (FULL, 1e6, 0.25)):
        width = shape.heads(kind)[2]
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        frequencies = theta**-exponents
        frequencies[int(rotated * width / 2) :] = 0.0
        angles = torch.outer(positions, frequencies)
        tables[kind] = (angles.cos().to(device), angles.sin().to(device))
    return tables


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm in fp32 with one rounding; the weight multiplies as it is."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate pairs (i, i + D / 2) of x [B, T, H, D] by the angles of rope [T, D / 2]."""
    cos, sin = rope[0].unsqueeze(-2), rope[1].unsqueeze(-2)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


@dataclass(frozen=True)
class Attend:
    """Causal attention with the layer kind's mask: q [B, H, T, D] over k, v [B, Hkv, T, D], scale 1."""

    window: int
    masks: Mapping[str, Any] = field(default_factory=dict)
    use_flex: bool = False

    def __call__(self, kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention output [B, H, T, D]."""
        if self.use_flex:
            from torch.nn.attention.flex_attention import flex_attention

            out = flex_attention(q, k, v, block_mask=self.masks[kind], scale=1.0, enable_gqa=True)
            assert isinstance(out, torch.Tensor)
            return out
        rows = torch.arange(q.shape[2], device=q.device)
        columns = torch.arange(k.shape[2], device=q.device)
        ahead = rows.unsqueeze(1) - columns
        seen = (ahead >= 0) & (ahead < self.window) if kind == SLIDING else ahead >= 0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=True)


def make_attend(shape: NanoShape, length: int, device: str) -> Attend:
    """The attention backend for sequences of `length` tokens on `device`."""
    if device == "cpu":
        return Attend(shape.sliding_window)
    from torch.nn.attention.flex_attention import create_block_mask

    window = shape.sliding_window

    def sliding(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < window)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    masks = {
        kind: create_block_mask(rule, None, None, length, length, device=device)
        for kind, rule in ((SLIDING, sliding), (FULL, causal))
    }
    return Attend(window, masks, True)


def layer_weights(weights: Weights, layer: int) -> dict[str, torch.Tensor]:
    """One layer's tensors under their short names (`self_attn.q_proj`, `layer_scalar`, ...)."""
    prefix = f"model.layers.{layer}."
    return {
        name.removeprefix(prefix).removesuffix(".weight"): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def block(
    x: torch.Tensor,
    w: dict[str, torch.Tensor],
    shape: NanoShape,
    kind: str,
    rope: Rope,
    attend: Attend,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One decoder layer; returns (stream [B, T, hidden], k, v [B, Hkv, T, D]); `shared` K/V replace the own ones."""
    batch, length = x.shape[:2]
    queries, pairs, width = shape.heads(kind)
    normed = rms_norm(x, w["input_layernorm"], shape.eps)
    q = F.linear(normed, w["self_attn.q_proj"]).view(batch, length, queries, width)
    q = rotate(rms_norm(q, w["self_attn.q_norm"], shape.eps), rope).transpose(1, 2)
    if shared is None:
        raw = F.linear(normed, w["self_attn.k_proj"]).view(batch, length, pairs, width)
        raw_v = raw if kind == FULL else F.linear(normed, w["self_attn.v_proj"]).view_as(raw)
        k = rotate(rms_norm(raw, w["self_attn.k_norm"], shape.eps), rope).transpose(1, 2)
        v = rms_norm(raw_v, None, shape.eps).transpose(1, 2)
    else:
        k, v = shared
    mixed = attend(kind, q, k, v).transpose(1, 2).reshape(batch, length, queries * width)
    out = F.linear(mixed, w["self_attn.o_proj"])
    x = x + rms_norm(out, w["post_attention_layernorm"], shape.eps)
    normed = rms_norm(x, w["pre_feedforward_layernorm"], shape.eps)
    gate = F.gelu(F.linear(normed, w["mlp.gate_proj"]), approximate="tanh")
    out = F.linear(gate * F.linear(normed, w["mlp.up_proj"]), w["mlp.down_proj"])
    x = x + rms_norm(out, w["post_feedforward_layernorm"], shape.eps)
    return x * w["layer_scalar"], k, v


def head(hidden: torch.Tensor, table: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Logits over the tied table, soft-capped where the config says so."""
    logits = F.linear(hidden, table)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


Block = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Runner:
    """A shape with what its forward pass needs for one sequence length."""

    shape: NanoShape
    attend: Attend
    ropes: Mapping[str, Rope]
    block: Block = block

    def embed(self, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
        """Scaled embeddings [B, T, hidden]; the scale is rounded to the table's dtype first."""
        table = weights["model.embed_tokens.weight"]
        scale = torch.tensor(self.shape.hidden_size**0.5, dtype=table.dtype, device=table.device)
        return F.embedding(tokens, table) * scale

    def stack(
        self, weights: Weights, x: torch.Tensor, shared: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """All layers and the final norm: (hidden [B, T, hidden], last K/V of each kind)."""
        last: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, kind in enumerate(self.shape.layer_types):
            own = None if shared is None else shared[kind]
            x, k, v = self.block(x, layer_weights(weights, layer), self.shape, kind, self.ropes[kind], self.attend, own)
            last[kind] = (k, v)
        return rms_norm(x, weights["model.norm.weight"], self.shape.eps), last

    def target(
        self, weights: Weights, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Target forward over tokens [B, T]: final-normed hidden rows and the K/V that a drafter reads."""
        return self.stack(weights, self.embed(weights, tokens))

    def draft(
        self,
        weights: Weights,
        embedded: torch.Tensor,
        g: torch.Tensor,
        shared: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step at every row: (logits' input y [B, T, hidden], next g [B, T, backbone])."""
        x = F.linear(torch.cat((embedded, g), -1), weights["pre_projection.weight"])
        y, _ = self.stack(weights, x, shared)
        return y, F.linear(y, weights["post_projection.weight"])


def make_runner(shape: NanoShape, length: int, device: str, compiled: bool) -> Runner:
    """A runner for sequences of `length`; `compiled` compiles one layer per kind and reuses it for all of them."""
    layer: Block = block
    if compiled:
        torch._dynamo.config.cache_size_limit = 64
        layer = torch.compile(block, dynamic=False)
    return Runner(shape, make_attend(shape, length, device), rope_tables(shape, length, device), layer)


__all__ = ["NORMS", "Attend", "Runner", "Weights", "block", "head", "init_weights", "make_runner", "rms_norm"]
