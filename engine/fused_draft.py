"""A round's whole draft chain in few launches, each token staying on the device for the next step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import Kind, LayerShape
from engine.fused import Tables
from engine.layers import LayerWeights
from kernels import FusedOps, Linear, Screen


@dataclass(frozen=True)
class DraftWeights:
    """What the chain reads: the drafter's own matrices, and the target's table for the embeddings."""

    shapes: tuple[LayerShape, ...]
    layers: tuple[LayerWeights, ...]
    embedding: Linear
    embed_scale: Tensor
    pre: Linear
    post: Linear
    head: Linear
    final_norm: Tensor
    window: int
    eps: float
    fused_geglu: dict[int, bool]
    screen: Screen | None = None


def fused_draft(
    ops: FusedOps,
    weights: DraftWeights,
    joined: object,
    ids: Tensor,
    position: Tensor,
    kv: dict[Kind, Tensor],
    tables: Tables,
    max_keys: int,
    count: int,
) -> None:
    """`count` greedy tokens after the one in ids[0], into ids[1] to ids[count]; ids int32 [8].

    joined: what the first step reads, that token's embedding beside the target's state (`FusedOps.join`). position
    int32 [1]: the rotary position and the newest key that is seen, the same in every step; kv: the buffers of the
    target's last sliding and last full layer.
    """
    for step in range(1, count + 1):
        y, packed = _forward(ops, weights, joined, position, kv, tables, max_keys)
        pick = _pick(ops, weights, y, packed)
        if step == count:
            ops.settle(pick, ids, step)
        else:
            state = ops.product(ops.reuse(packed, y, weights.post), weights.post, 1)
            joined = ops.join(weights.embedding, ids, step, pick, weights.embed_scale, state, weights.pre)


def _read(weights: DraftWeights) -> Linear:
    """The matrix that the final state is multiplied with: the head, or its screen."""
    return weights.head if weights.screen is None else weights.screen.weight


def _pick(ops: FusedOps, weights: DraftWeights, y: Tensor, packed: object) -> object:
    """A step's token, from the state [8, h] and the same made ready for what is read."""
    partials = ops.product(packed, _read(weights), 1)
    if weights.screen is None:
        return ops.pick(partials)
    assert ops.pick_screened is not None
    return ops.pick_screened(partials, y, weights.head, weights.screen)


def _forward(
    ops: FusedOps,
    weights: DraftWeights,
    joined: object,
    position: Tensor,
    kv: dict[Kind, Tensor],
    tables: Tables,
    max_keys: int,
) -> tuple[Tensor, object]:
    """One step: the state after the final norm [8, h], and the same made ready for the head."""
    product = ops.product
    first = weights.layers[0]
    h, packed = ops.enter(product(joined, weights.pre, 1), first.input_norm, weights.eps, first.qkv)
    y = torch.empty_like(h)
    for index, (shape, w) in enumerate(zip(weights.shapes, weights.layers, strict=True)):
        last = index + 1 == len(weights.layers)
        cos, sin = tables[shape.kind]
        partials = product(packed, w.qkv, 1)
        operands = (kv[shape.kind], position, 1, weights.window if shape.kind == "sliding" else None, max_keys, w.o)
        if ops.attend_sums is not None:
            packed = ops.attend_sums(partials, w.norm_heads, cos, sin, shape, weights.eps, *operands)
        else:
            q = ops.heads(partials, w.norm_heads, cos, sin, position, 1, shape, None, weights.eps)
            packed = ops.attend(q, *operands)
        a, packed = ops.residual(
            product(packed, w.o, 1),
            h,
            w.post_attention_norm,
            None,
            w.pre_feedforward_norm,
            weights.eps,
            1,
            w.gate_up,
            None,
        )
        fused = weights.fused_geglu[w.gate_up.bits]
        following = weights.final_norm if last else weights.layers[index + 1].input_norm
        h, packed = ops.residual(
            ops.gated(product(packed, w.gate_up, 1), w.down, 1, fused),
            a,
            w.post_feedforward_norm,
            w.layer_scalar,
            following,
            weights.eps,
            1,
            _read(weights) if last else weights.layers[index + 1].qkv,
            y if last else None,
        )
    return y, packed
