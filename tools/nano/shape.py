"""Geometry of the nano pair: the one place where its sizes are written down.

`NanoShape` describes the target, `DraftShape` its drafter; both know their parameter shapes and layer kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SLIDING = "sliding_attention"
FULL = "full_attention"
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True)
class NanoShape:
    """Gemma 4 text target in small: 5 sliding layers and 1 full layer, repeated."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 18
    period: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    num_global_key_value_heads: int = 1
    head_dim: int = 64
    global_head_dim: int = 128
    sliding_window: int = 1024
    softcap: float | None = 30.0
    eps: float = 1e-6
    max_position_embeddings: int = 8192
    reads_target: bool = False

    @property
    def layer_types(self) -> tuple[str, ...]:
        """One kind per layer; the last of each period is full."""
        return tuple(FULL if (layer + 1) % self.period == 0 else SLIDING for layer in range(self.num_hidden_layers))

    def heads(self, kind: str) -> tuple[int, int, int]:
        """(query heads, KV heads, head_dim) of a layer kind."""
        if kind == FULL:
            return self.num_attention_heads, self.num_global_key_value_heads, self.global_head_dim
        return self.num_attention_heads, self.num_key_value_heads, self.head_dim

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name -> shape of every stored tensor."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer, kind in enumerate(self.layer_types):
            queries, pairs, width = self.heads(kind)
            prefix = f"model.layers.{layer}."
            attention = prefix + "self_attn."
            shapes[attention + "q_proj.weight"] = (queries * width, hidden)
            if not self.reads_target:
                shapes[attention + "k_proj.weight"] = (pairs * width, hidden)
                if kind == SLIDING:
                    shapes[attention + "v_proj.weight"] = (pairs * width, hidden)
                shapes[attention + "k_norm.weight"] = (width,)
            shapes[attention + "q_norm.weight"] = (width,)
            shapes[attention + "o_proj.weight"] = (hidden, queries * width)
            shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
            for norm in NORMS:
                shapes[prefix + norm + ".weight"] = (hidden,)
            shapes[prefix + "layer_scalar"] = (1,)
        shapes["model.norm.weight"] = (hidden,)
        return shapes

    def bits(self, name: str) -> int | None:
        """Bits of a stored tensor: 8 for the MLP, 4 for other matrices, None for vectors."""
        if len(self.parameters()[name]) != 2:
            return None
        return 8 if any(module in name for module in MLP) else 4


@dataclass(frozen=True)
class DraftShape(NanoShape):
    """Drafter of a nano target: four query-only layers over the target's last sliding and last full K/V."""

    hidden_size: int = 128
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    period: int = 4
    softcap: float | None = None
    reads_target: bool = True
    backbone_hidden_size: int = field(default=256)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name -> shape; the two projections carry no `model.` prefix."""
        shapes = super().parameters()
        shapes["pre_projection.weight"] = (self.hidden_size, 2 * self.backbone_hidden_size)
        shapes["post_projection.weight"] = (self.backbone_hidden_size, self.hidden_size)
        return shapes

    def bits(self, name: str) -> int | None:
        """Bits of a stored tensor: 4 for every matrix."""
        return 4 if len(self.parameters()[name]) == 2 else None


TINY = NanoShape(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    period=3,
    head_dim=16,
    global_head_dim=32,
    sliding_window=32,
    max_position_embeddings=512,
)
TINY_DRAFT = DraftShape(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    head_dim=16,
    global_head_dim=32,
    sliding_window=32,
    max_position_embeddings=512,
    backbone_hidden_size=64,
)
