"""Fused ops in plain torch over the reference backend, and a stand-in for CUDA graphs.

What is tested with them is the engine around the launches: rooms, control words, recordings, rounds that run ahead. A
step takes milliseconds here, and seconds in Triton's interpreter. Embeddings of rows past the real ones are NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from support_engine import TINY
from torch import Tensor

from engine.pair import Pair
from engine.speculative import accepted_prefix
from engine.target import Target
from kernels import MAX_ROWS, FusedOps, Linear, reference

T = TypeVar("T")

TINIER = replace(
    TINY, name="tinier", num_hidden_layers=2, period=2, vocab_size=320, hidden_size=64, intermediate_size=64
)
"""A sliding layer with a window of 16 and a full one."""


class Again:
    """Records by keeping the function: a run computes anew and fills the first result's tensors, as a graph does.

    As with graphs, recording runs it once before.
    """

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Count, and keep."""
        self.recorded += 1
        result = run()

        def replay() -> None:
            for old, new in zip(tensors(result), tensors(run()), strict=True):
                old.copy_(new)

        return replay, result


def tensors(found: Any) -> list[Tensor]:
    """Every tensor inside a result."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, tuple | list):
        return [tensor for part in found for tensor in tensors(part)]
    return tensors(tuple(vars(found).values())) if hasattr(found, "logits") else []


def in_torch(pair: Pair) -> Pair:
    """A pair of the reference backend whose steps and draft chains take these ops."""
    ops = fused_ops(pair.target._embedding)
    target = pair.target.with_kernels(replace(pair.target.kernels, fused=ops, fused_draft=None))
    drafter = copy.copy(pair.drafter)
    assert drafter is not None
    drafter.kernels = target.kernels
    drafter.bind(target)
    return replace(pair, target=target, drafter=drafter)


def fused_ops(table: Tensor) -> FusedOps:
    """The bundle; `packed` rows and `partials` are plain tensors [8, K]."""

    def embed(_head: Linear, ids: Tensor, scale: Tensor, rows: int) -> Tensor:
        out = torch.full((ids.numel(), table.shape[1]), float("nan"), dtype=table.dtype)
        out[:rows] = reference.embed(table, ids[:rows], scale)
        return out

    def join(
        head: Linear, ids: Tensor, at: int, pick: int | None, scale: Tensor, state: Tensor, following: Linear
    ) -> Tensor:
        if pick is not None:
            ids[at] = pick
        joined = torch.full((MAX_ROWS, 2 * table.shape[1]), float("nan"), dtype=table.dtype)
        joined[0] = torch.cat((reference.embed(table, ids[at : at + 1], scale)[0], state[0]))
        return joined

    def join_accepted(
        head: Linear,
        ids: Tensor,
        best: Tensor,
        hidden: Tensor,
        position: Tensor,
        draft_position: Tensor,
        rows: int,
        scale: Tensor,
        following: Linear,
    ) -> Tensor:
        vector = torch.full_like(hidden, float("nan"))
        accept(ids, best, hidden, position, draft_position, vector, rows)
        return join(head, ids, 0, None, scale, vector, following)

    return FusedOps(
        embed,
        lambda h, weight, eps, rows, following: reference.rmsnorm(h, weight, eps),
        reference.linear,
        reference.linear_rows,
        _heads,
        _attend,
        _residual,
        lambda partials, rows, following, fused: _geglu(partials, fused),
        lambda partials, w, rows, fused: reference.linear(_geglu(partials, fused), w, rows),
        _head,
        pack=lambda x, rows, following: x,
        join=join,
        join_accepted=join_accepted,
        enter=lambda partials, weight, eps, following: (partials, reference.rmsnorm(partials, weight, eps)),
        reuse=lambda packed, x, following: x,
        pick=lambda partials: reference.argmax(partials[:1])[0],
        settle=lambda pick, ids, at: ids[at : at + 1].fill_(pick),
    )


def accept(
    ids: Tensor, best: Tensor, hidden: Tensor, position: Tensor, draft_position: Tensor, vector: Tensor, rows: int
) -> None:
    """What a verify step leaves for the next round, by the host's rule: as `FusedOps.join_accepted`, and the state goes
    to row 0 of vector [8, H]."""
    accepted = accepted_prefix(ids[1:rows].tolist(), best[:rows].tolist())
    ids[0] = best[accepted]
    vector[0] = hidden[accepted]
    draft_position.copy_(position + accepted)
    position += accepted + 1


def accept_of(target: Target) -> Callable[..., None]:
    """The same by the target's own fused ops, which hand the state on instead of leaving it in `vector`."""
    ops = target.kernels.fused
    assert ops is not None

    def call(
        ids: Tensor, best: Tensor, hidden: Tensor, position: Tensor, draft_position: Tensor, vector: Tensor, rows: int
    ) -> None:
        scale = target.embed_scale
        ops.join_accepted(target.head, ids, best, hidden, position, draft_position, rows, scale, target.head)

    return call


def _heads(
    partials: Tensor,
    norm_heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    rows: int,
    shape: Any,
    kv: Tensor | None,
    eps: float,
) -> Tensor:
    heads = partials.view(MAX_ROWS, -1, shape.head_dim)
    turned = shape.num_heads + shape.num_kv_heads
    normed = reference.rmsnorm(heads, norm_heads, eps)
    v = reference.rmsnorm(heads[:, shape.num_heads :], None, eps) if shape.k_eq_v else normed[:, turned:]
    first = int(position)
    if first < 0 or first + rows > cos.shape[0]:
        raise IndexError(f"rows {first}..{first + rows - 1} of a table of {cos.shape[0]} positions")
    at = (first + torch.arange(MAX_ROWS)).clamp(max=cos.shape[0] - 1)
    q, k = reference.rope_row(normed[:, :turned], cos[at], sin[at]).tensor_split((shape.num_heads,), 1)
    if kv is not None:
        for row in range(rows):
            slot = (first + row) % kv.shape[2]
            kv[0, :, slot], kv[1, :, slot] = k[row], v[row]
    return q


def _attend(
    q: Tensor, kv: Tensor, position: Tensor, rows: int, window: int | None, max_keys: int, following: Linear
) -> Tensor:
    base = int(position)
    if base + rows > max_keys:
        raise IndexError(f"rows {base}..{base + rows - 1} of a step over {max_keys} keys")
    starts = [0 if window is None else max(0, base + row - window + 1) for row in range(rows)]
    first = starts[0]
    keys = kv[:, :, torch.arange(first, base + rows) % kv.shape[2]]
    spans = [(start - first, base + row + 1 - first) for row, start in enumerate(starts)]
    return reference.sdpa_rows(q, keys[0], keys[1], spans, first).view(MAX_ROWS, -1)


def _residual(
    partials: Tensor,
    h: Tensor,
    post_norm: Tensor,
    scalar: Tensor | None,
    next_norm: Tensor,
    eps: float,
    rows: int,
    following: Linear,
    normed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out = h + reference.rmsnorm(partials, post_norm, eps)
    if scalar is not None:
        out = out.mul_(scalar)
    packed = reference.rmsnorm(out, next_norm, eps)
    if normed is not None:
        normed.copy_(packed)
    return out, packed


def _geglu(partials: Tensor, fused: bool) -> Tensor:
    gate, up = partials.chunk(2, -1)
    return reference.geglu_fused(gate, up) if fused else reference.geglu_ops(gate, up)


def _head(partials: Tensor, rows: int, cap: float | None, with_logits: bool) -> tuple[Tensor | None, Tensor]:
    logits = partials if cap is None else reference.softcap(partials, cap)
    ids = torch.full((MAX_ROWS,), -1, dtype=torch.int32)
    ids[:rows] = torch.tensor(reference.argmax(logits[:rows]), dtype=torch.int32)
    return (logits if with_logits else None), ids


class Oracle:
    """A drafter that knows the text and is wrong where it is told to be: drafts without a network, over a room."""

    def __init__(self, text: list[int], start: int, wrong: Iterable[int], accept: Callable[..., None]) -> None:
        self.text, self.start, self.wrong, self.accept = text, start, frozenset(wrong), accept

    def recording(self, shared: Any, count: int, max_keys: int, verified: Tensor | None = None) -> Callable[[], None]:
        """Like the drafter's: behind what the last verify step accepts, `count` tokens into the room's words."""
        room = shared.caches.room

        def run() -> None:
            if verified is not None:
                self.accept(room.ids, room.best, verified, room.position, room.draft_position, room.vector, count + 1)
            begin = int(room.position) - self.start
            for index in range(count):
                at = begin + index
                token = self.text[at] if at < len(self.text) else 0
                room.ids[1 + index] = (token + 1) % 320 if at in self.wrong else token

        return run
