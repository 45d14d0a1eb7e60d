"""DFlash drafts by two programs that share nothing with the engine: numpy in float64, and mlx-vlm if installed.

The float64 drafter keeps no cache: it computes the K/V of every committed row anew in every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from support_qwen35 import QwenGeometry, drafter_config
from torch import Tensor

EPS = 1e-6
THETA = 1e7


class Float64Drafter:
    """Drafts from first principles; `table` is the target's embedding table, which is its head too."""

    def __init__(self, geometry: QwenGeometry, weights: Mapping[str, Tensor], table: Tensor) -> None:
        self.geometry = geometry
        self.w = {name: value.double().numpy() for name, value in weights.items()}
        self.table = table.double().numpy()

    def logits(self, token: int, taps: Tensor, count: int) -> np.ndarray:
        """Logits [count, V] of the masked rows after `token`, given the taps [n, layers * H] of all committed rows."""
        geometry, w = self.geometry, self.w
        context = _norm(taps.double().numpy() @ w["fc.weight"].T, w["hidden_norm.weight"])
        n = context.shape[0]
        x = self.table[[token] + [geometry.mask_token_id] * count]
        for index in range(geometry.drafter_layers):
            x = x + self._attention(
                f"layers.{index}", _norm(x, w[f"layers.{index}.input_layernorm.weight"]), context, n
            )
            y = _norm(x, w[f"layers.{index}.post_attention_layernorm.weight"])
            gate, up = (y @ w[f"layers.{index}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"layers.{index}.mlp.down_proj.weight"].T
        return _norm(x, w["norm.weight"])[1:] @ self.table.T

    def _attention(self, prefix: str, x: np.ndarray, context: np.ndarray, n: int) -> np.ndarray:
        """Rows of the block over all context rows and the whole block, both ways."""
        geometry, w = self.geometry, self.w
        heads, groups, dim = geometry.drafter_heads, geometry.drafter_kv_heads, geometry.drafter_head_dim

        def project(name: str, rows: np.ndarray) -> np.ndarray:
            return (rows @ w[f"{prefix}.self_attn.{name}_proj.weight"].T).reshape(len(rows), -1, dim)

        every = np.concatenate((context, x))
        keys = _rope(_norm(project("k", every), w[f"{prefix}.self_attn.k_norm.weight"]), np.arange(len(every)))
        queries = _rope(_norm(project("q", x), w[f"{prefix}.self_attn.q_norm.weight"]), n + np.arange(len(x)))
        values = project("v", every)
        out = np.empty_like(queries)
        for head in range(heads):
            group = head // (heads // groups)
            scores = queries[:, head] @ keys[:, group].T / dim**0.5
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = shares / shares.sum(-1, keepdims=True) @ values[:, group]
        found: np.ndarray = out.reshape(len(x), -1) @ w[f"{prefix}.self_attn.o_proj.weight"].T
        return found


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def _rope(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = positions[:, None] / THETA ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    left, right = x[..., :half], x[..., half:]
    return np.concatenate((left * cos - right * sin, right * cos + left * sin), -1)


class MlxDrafter:
    """mlx-vlm's own drafter on MLX's CPU in fp32, with a cache of its own from round to round."""

    def __init__(self, geometry: QwenGeometry, weights: Mapping[str, Tensor], table: Tensor) -> None:
        import mlx.core as mx
        from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel, ModelConfig

        mx.set_default_device(mx.cpu)
        config = drafter_config(geometry)
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
        self.model: Any = DFlashDraftModel(ModelConfig.from_dict(config))
        self.model.load_weights([(name, mx.array(value.float().numpy())) for name, value in weights.items()])
        embedding = mx.array(table.float().numpy())
        self.model.embed_tokens = lambda ids: embedding[ids]
        self.model.lm_head = lambda x: x @ embedding.T
        self.cache = self.model.make_cache()
        self.geometry = geometry

    def logits(self, token: int, new_taps: Tensor, count: int) -> np.ndarray:
        """Logits [count, V], given the taps of the rows committed since the last call."""
        import mlx.core as mx

        block = mx.array([[token] + [self.geometry.mask_token_id] * count])
        out = self.model(block, mx.array(new_taps.float().numpy())[None], self.cache)
        return np.array(out[0, 1:])


def argmax(logits: np.ndarray) -> list[int]:
    """Greedy ids of rows."""
    ids: Sequence[int] = logits.argmax(-1).tolist()
    return list(ids)
