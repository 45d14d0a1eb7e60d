"""The triton backend: the `Kernels` bundle over packed matrices, for CUDA, and for the interpreter in tests.

Every op keeps a row's bytes by construction: one binary for M = 1..8. What has no row contract (prefill's products,
the op-by-op attention of stage `base`) is plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import MAX_ROWS, FusedOps, Kernels, Linear, Screen, Weight, reference
from kernels.argmax import argmax as argmax_ids
from kernels.argmax import head_argmax, head_best, softcap, write_best
from kernels.draft_rows import join_accepted_rows, join_rows
from kernels.embed import dense_rows, embed_rows
from kernels.fused_norms import norm_rows, residual_norm_rows, sum_norm_rows
from kernels.gated_qmv import ROWS_PER_PROGRAM, gated_qmv, takes_sums
from kernels.geglu import geglu_fused, geglu_ops, geglu_rows
from kernels.jit import GROUP, Release
from kernels.launch import LaunchShape
from kernels.qmv import qmv, qmv_rows
from kernels.repack import PackedWeight, dequantize_packed, pack_dense, pack_weight
from kernels.rmsnorm import rmsnorm
from kernels.rope import head_norms_rope, rope_general, rope_row
from kernels.rows import Rows, pack_rows, sum_partials
from kernels.screened_head import can_screen, quantized, screened_best
from kernels.sdpa_queries import QueryHeads
from kernels.sdpa_vector import plan_for, sdpa_rows, sdpa_vector, sdpa_vector_rows


def prepare(weight: Weight) -> Linear:
    """Repack a matrix tile-major: its own codes where it is stored in 4 or 8 bits with bf16 scales, bf16 otherwise."""
    if weight.model_dtype != torch.bfloat16:
        raise ValueError(f"triton backend: model dtype {weight.model_dtype}; the kernels take bfloat16")
    stored = weight.stored
    if stored is None or stored.scales.dtype != torch.bfloat16:
        packed = pack_dense(weight.data)
    else:
        packed = pack_weight(stored.words, stored.scales, stored.biases, weight.bits)
    return Linear(packed.out_features, packed.in_features, weight.bits, torch.bfloat16, "qmv", packed)


def linear(x: Tensor, w: Linear, rows: int = MAX_ROWS) -> Tensor:
    """x [8, K] times w [N, K] transposed -> [8, N] in one launch for all rows; rows past `rows` are zero."""
    packed: PackedWeight = w.operand
    return sum_partials(qmv(pack_rows(x.contiguous(), packed.bits, rows), packed, rows), rows)


def linear_rows(x: Tensor, w: Linear, rows: int = MAX_ROWS) -> Tensor:
    """The same bytes with a launch per row."""
    packed: PackedWeight = w.operand
    return sum_partials(qmv_rows(pack_rows(x.contiguous(), packed.bits, rows), packed, rows), rows)


def linear_any(x: Tensor, w: Linear) -> Tensor:
    """x [n, K] times w transposed -> [n, N]: up to 8 rows as `linear`, more by a library product of bf16 weights."""
    count = x.shape[0]
    if count <= MAX_ROWS:
        padded = x.new_zeros(MAX_ROWS, x.shape[1])
        padded[:count] = x
        return linear(padded, w, count)[:count]
    return F.linear(x, dense(w.operand).to(x.dtype))


def dense(weight: PackedWeight) -> Tensor:
    """The matrix in bf16 [N, K]: one launch on a GPU; the interpreter would take minutes for the same bytes."""
    return dense_rows(weight) if weight.codes.is_cuda else dequantize_packed(weight, torch.float32).to(torch.bfloat16)


def table(weight: Weight, head: Linear) -> PackedWeight:
    """What `embed` reads: the head's packed matrix, which is the embedding table too."""
    packed: PackedWeight = head.operand
    return packed


def embed(table: PackedWeight, ids: Tensor, scale: Tensor) -> Tensor:
    """Rows of the table for ids [n], any n, times the scale, rounded -> [n, H]."""
    return embed_rows(table, ids.int(), scale, ids.numel())


def argmax(logits: Tensor) -> list[int]:
    """Index of the largest value of each row [M, V]; ties go to the lowest index."""
    ids: list[int] = argmax_ids(logits).tolist()
    return ids


def sdpa(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[tuple[int, int]], first: int = 0) -> Tensor:
    """`sdpa_rows` over operands that may be views."""
    return sdpa_rows(q.contiguous(), k, v, spans, first)


def _product(x: Rows, w: Linear, rows: int) -> Tensor:
    return qmv(x, w.operand, rows)


def _product_rows(x: Rows, w: Linear, rows: int) -> Tensor:
    return qmv_rows(x, w.operand, rows)


def _embed(head: Linear, ids: Tensor, scale: Tensor, rows: int) -> Tensor:
    return embed_rows(head.operand, ids, scale, rows)


def _norm(h: Tensor, weight: Tensor, eps: float, rows: int, following: Linear) -> Rows:
    return norm_rows(h, weight, eps, rows, following.operand.bits)


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
    release: Release = "late",
) -> Tensor:
    """`shape` has num_heads, num_kv_heads, head_dim and k_eq_v; where v is k, the raw k's norm has no weight."""
    width = shape.head_dim
    k, v, ring = (None, None, 1) if kv is None else (kv[0], kv[1], kv.shape[2])
    return head_norms_rope(
        partials,
        norm_heads,
        cos.view(-1, width),
        sin.view(-1, width),
        position,
        rows,
        shape.num_heads,
        shape.num_kv_heads,
        shape.k_eq_v,
        eps,
        k,
        v,
        ring,
        settled=True,  # a step writes its position first of all
        release=release,
    )


def _attend(
    q: Tensor,
    kv: Tensor,
    position: Tensor,
    rows: int,
    window: int | None,
    max_keys: int,
    following: Linear,
    release: Release = "late",
) -> Rows:
    bits, ring = following.operand.bits, kv.shape[2]
    place = position, rows, window, ring, max_keys
    if q.shape[2] % GROUP:
        out = sdpa_vector(q, kv[0], kv[1], *place, settled=True)
        return pack_rows(out.view(MAX_ROWS, -1), bits, rows, release=release)
    return sdpa_vector_rows(q, kv[0], kv[1], *place, bits, settled=True, release=release)


def attend_sums(
    partials: Tensor,
    norm_heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    shape: Any,
    eps: float,
    kv: Tensor,
    position: Tensor,
    rows: int,
    window: int | None,
    max_keys: int,
    following: Linear,
) -> Rows:
    """Queries and attention in one launch where the layer's plan has one; the position is older than the partials."""
    width = shape.head_dim
    if width % GROUP or plan_for(width, shape.num_heads, kv.shape[1]).block:
        q = _heads(partials, norm_heads, cos, sin, position, rows, shape, None, eps)
        return _attend(q, kv, position, rows, window, max_keys, following)
    heads = QueryHeads(norm_heads, cos.view(-1, width), sin.view(-1, width), eps)
    bits, ring = following.operand.bits, kv.shape[2]
    place = (position, rows, window, ring, max_keys)
    return sdpa_vector_rows(partials, kv[0], kv[1], *place, bits, settled=True, query_heads=heads)


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
    release: Release = "late",
) -> tuple[Tensor, Rows]:
    operands = partials, h, post_norm, scalar, next_norm, eps, rows, following.operand.bits
    out, packed = residual_norm_rows(*operands, normed=normed, release=release)
    assert packed is not None
    return out, packed


def _geglu(partials: Tensor, rows: int, following: Linear, fused: bool, release: Release = "late") -> Rows:
    return geglu_rows(partials, rows, following.operand.bits, fused, release=release)


def _geglu_product(partials: Tensor, w: Linear, rows: int, fused: bool, release: Release = "late") -> Tensor:
    return qmv(_geglu(partials, rows, w, fused, release), w.operand, rows)


def gated(
    partials: Tensor, w: Linear, rows: int, fused: bool, per_program: int = ROWS_PER_PROGRAM, release: Release = "late"
) -> Tensor:
    """`FusedOps.gated` in one launch where w takes gate_up's sums, in two elsewhere; the same bytes."""
    if fused and takes_sums(partials, w.operand):
        return gated_qmv(partials, w.operand, rows, per_program=per_program)
    return _geglu_product(partials, w, rows, fused, release)


def _head(partials: Tensor, rows: int, cap: float | None, with_logits: bool) -> tuple[Tensor | None, Tensor]:
    logits = None
    if with_logits:
        logits = torch.empty(MAX_ROWS, partials.shape[2], dtype=torch.bfloat16, device=partials.device)
    ids, _ = head_argmax(partials, rows, cap, logits=logits)
    return logits, ids


def _pack(x: Tensor, rows: int, following: Linear) -> Rows:
    return pack_rows(x, following.operand.bits, rows)


def _join(
    head: Linear,
    ids: Tensor,
    at: int,
    pick: Tensor | None,
    scale: Tensor,
    state: Tensor,
    following: Linear,
    release: Release = "late",
) -> Rows:
    return join_rows(head.operand, ids, at, pick, scale, state, following.operand.bits, release)


def _join_accepted(
    head: Linear,
    ids: Tensor,
    best: Tensor,
    hidden: Tensor,
    position: Tensor,
    draft_position: Tensor,
    rows: int,
    scale: Tensor,
    following: Linear,
    release: Release = "late",
) -> Rows:
    bits = following.operand.bits
    return join_accepted_rows(head.operand, ids, best, hidden, position, draft_position, rows, scale, bits, release)


def _enter(
    partials: Tensor, weight: Tensor, eps: float, following: Linear, release: Release = "late"
) -> tuple[Tensor, Rows]:
    return sum_norm_rows(partials, weight, eps, 1, following.operand.bits, release)


def _reuse(packed: Rows, x: Tensor, following: Linear, release: Release = "late") -> Rows:
    bits = following.operand.bits
    if packed.bits == bits:
        return packed
    if bits == 16:  # a bf16 product takes the values as they are, and nothing else
        return Rows(x, packed.sums, packed.scales, bits)
    return pack_rows(x, bits, 1, release=release)


def _pick(partials: Tensor) -> Tensor:
    return head_best(partials, 1, None)


def _pick_screened(partials: Tensor, x: Tensor, head: Linear, screen: Screen) -> Tensor:
    return screened_best(partials, x, head.operand, screen.weight.operand, screen.reach)


def screen_of(head: Linear, shape: LaunchShape | None = None) -> Screen | None:
    """A screen of a bf16 head; None for another, which is small already. `shape`: how to launch it, for tuning."""
    if not can_screen(head.operand):
        return None
    copy, reach = quantized(head.operand, shape)
    return Screen(Linear(head.out_features, head.in_features, copy.bits, torch.bfloat16, "qmv", copy), reach)


LATE = FusedOps(
    _embed,
    _norm,
    _product,
    _product_rows,
    _heads,
    _attend,
    _residual,
    _geglu,
    _geglu_product,
    _head,
    pack=_pack,
    join=_join,
    join_accepted=_join_accepted,
    enter=_enter,
    reuse=_reuse,
    pick=_pick,
    settle=write_best,
    pick_screened=_pick_screened,
)
"""No launch but a product's lets the next one start before its own end or its loop's."""

ROW_WISE: dict[str, Callable[..., Any]] = {
    "join_accepted": _join_accepted,
    "join": _join,
    "enter": _enter,
    "heads": _heads,
    "attend": _attend,
    "residual": _residual,
    "geglu": _geglu,
    "gated": _geglu_product,
    "reuse": _reuse,
}
"""Ops whose last row-wise launch can let the next one start before its own end (decisions 8 and 15)."""

STEPS: dict[str, Release] = {"heads": "first", "attend": "first", "residual": "early", "geglu": "first"}
"""When those of classic and verify steps do: a residual norm's programs are few but large, and would be in the way of
the product before it."""
EARLY_IN_DRAFTS = "join_accepted", "join", "enter", "residual", "gated", "reuse"
"""Those of a draft step, with its few programs, that do right after their wait."""


def releasing(when: Mapping[str, Release]) -> FusedOps:
    """`LATE` with these ops letting the next launch start then: the same bytes."""
    return replace(LATE, **{name: partial(ROW_WISE[name], release=release) for name, release in when.items()})


def draft_ops(early: Collection[str] = EARLY_IN_DRAFTS) -> FusedOps:
    """Those of a draft step: queries are made in attention and GeGLU's rows in `down` where they can be."""
    made = partial(gated, release="early" if "gated" in early else "late")
    return replace(releasing(dict.fromkeys(early, "early")), attend_sums=attend_sums, gated=made)


FUSED = releasing(STEPS)
FUSED_DRAFT = draft_ops()

KERNELS = Kernels(
    backend="triton",
    prepare=prepare,
    linear=linear,
    linear_rows=linear_rows,
    linear_any=linear_any,
    rmsnorm=rmsnorm,
    rope_row=rope_row,
    rope_general=rope_general,
    geglu_fused=geglu_fused,
    geglu_ops=geglu_ops,
    sdpa_rows=sdpa,
    sdpa_unfused=reference.sdpa_unfused,
    softcap=softcap,
    argmax=argmax,
    table=table,
    embed=embed,
    fused=FUSED,
    fused_draft=FUSED_DRAFT,
    screen=screen_of,
)
