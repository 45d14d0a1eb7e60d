"""A step of 1 to 8 rows in few launches: classic decode's and the row-wise verify's, with the bytes of the plain ops.

Where a backend offers fused ops, a decoder layer is a product, head norms and RoPE into the cache, attention, a
product, norms and residual, a product, GeGLU, a product, norms and residual. Each leaves the bytes of the single ops
that it replaces, so a step may take this path or the plain one and nobody can tell. Attention that a flag takes apart
stands between them op by op, and such a step is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import Kind, LayerShape
from engine.layers import LayerWeights, RopeTable
from kernels import FusedOps, Linear


@dataclass(frozen=True)
class FusedWeights:
    """What a step reads beside the caches; `head` is the embedding table too."""

    shapes: tuple[LayerShape, ...]
    layers: tuple[LayerWeights, ...]
    head: Linear
    final_norm: Tensor
    embed_scale: Tensor
    window: int
    eps: float
    softcap: float | None


@dataclass(frozen=True)
class Choice:
    """What dispatch decides for such a step: a launch for all rows or one for each, GeGLU's rounding by bits, and the
    kinds of layers whose attention is apart, op by op."""

    per_row: bool
    fused_geglu: dict[int, bool]
    apart: frozenset[Kind] = frozenset()


@dataclass(frozen=True)
class FusedOutput:
    """Logits after the soft cap bf16 [8, V], hidden after the final norm bf16 [8, H], greedy ids int32 [8]; rows past
    the real ones are undefined."""

    logits: Tensor
    hidden: Tensor
    ids: Tensor


Tables = dict[Kind, tuple[Tensor, Tensor]]
"""cos and sin fp32 [positions, 1, D] of each layer kind."""


def fused_step(
    ops: FusedOps,
    weights: FusedWeights,
    choice: Choice,
    ids: Tensor,
    position: Tensor,
    rows: int,
    kv: Sequence[Tensor],
    tables: Tables,
    max_keys: int,
    attend_apart: Callable[[int, Tensor], Tensor] | None = None,
) -> FusedOutput:
    """Compute `rows` rows of ids int32 [8] from position int32 [1] on, and write their k and v into every layer's kv.

    Nothing here waits for the device or depends on a value there, so a call may be recorded and run again; but for
    attend_apart, (layer, q [8, H, D]) -> [8, H, D], which layers of the kinds that are apart take. kv are the layers'
    cache buffers; position + rows stays at most max_keys and within the tables.
    """
    product = ops.product_rows if choice.per_row else ops.product
    h = ops.embed(weights.head, ids, weights.embed_scale, rows)
    packed = ops.norm(h, weights.layers[0].input_norm, weights.eps, rows, weights.layers[0].qkv)
    hidden = torch.empty_like(h)
    for index, (shape, w) in enumerate(zip(weights.shapes, weights.layers, strict=True)):
        last = index + 1 == len(weights.layers)
        cos, sin = tables[shape.kind]
        q = ops.heads(
            product(packed, w.qkv, rows), w.norm_heads, cos, sin, position, rows, shape, kv[index], weights.eps
        )
        if shape.kind in choice.apart:
            assert attend_apart is not None
            packed = ops.pack(attend_apart(index, q).flatten(1), rows, w.o)
        else:
            window = weights.window if shape.kind == "sliding" else None
            packed = ops.attend(q, kv[index], position, rows, window, max_keys, w.o)
        a, packed = ops.residual(
            product(packed, w.o, rows),
            h,
            w.post_attention_norm,
            None,
            w.pre_feedforward_norm,
            weights.eps,
            rows,
            w.gate_up,
            None,
        )
        gated = ops.geglu(product(packed, w.gate_up, rows), rows, w.down, choice.fused_geglu[w.gate_up.bits])
        following = weights.final_norm if last else weights.layers[index + 1].input_norm
        h, packed = ops.residual(
            product(gated, w.down, rows),
            a,
            w.post_feedforward_norm,
            w.layer_scalar,
            following,
            weights.eps,
            rows,
            weights.head if last else weights.layers[index + 1].qkv,
            hidden if last else None,
        )
    logits, best = ops.head(product(packed, weights.head, rows), rows, weights.softcap, True)
    assert logits is not None
    return FusedOutput(logits, hidden, best)


def tables_upto(tables: dict[Kind, RopeTable], end: int) -> Tables:
    """Tables of positions below `end`; hold on to them, since a table that grows later is another one."""
    for table in tables.values():
        table.rows(0, end)
    return {kind: (table.cos, table.sin) for kind, table in tables.items()}
