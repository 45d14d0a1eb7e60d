"""Kernels of the verify path: for each op, row r of an M-row call has the bytes of the one-row call.

`kernels_for("reference")` gives the callables of a backend as one bundle, which the engine passes
around as an object, so that a test can replace a single op without touching globals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 8
"""Rows of every call in the verify path; fewer real rows are padded, so that no shape depends on their number."""

BACKENDS = ("reference", "triton")
"""Known backends."""


@dataclass(frozen=True)
class Stored:
    """A matrix as an MLX checkpoint stores it: words uint32 [N, K * bits / 32], scales and biases [N, K / 64]."""

    words: Tensor
    scales: Tensor
    biases: Tensor


@dataclass(frozen=True)
class Weight:
    """A matrix as the checkpoint loader gives it: bits of the stored form, and that form where it is MLX's.

    `source` is the matrix [N, K] in model dtype, or what dequantizes it: a backend that multiplies by the stored form
    never asks for `data`.
    """

    source: Tensor | Callable[[], Tensor]
    bits: int
    stored: Stored | None = None
    dtype: Any = None

    @functools.cached_property
    def data(self) -> Tensor:
        """The matrix in model dtype, dequantized once."""
        return self.source() if callable(self.source) else self.source

    @property
    def model_dtype(self) -> Any:
        """Dtype of `data`, known without making it where the loader said so."""
        return self.dtype if self.dtype is not None else self.data.dtype


@dataclass(frozen=True)
class Linear:
    """A matrix made ready for one backend: `route` names how its products are computed, `operand` belongs to it."""

    out_features: int
    in_features: int
    bits: int
    dtype: Any
    route: str
    operand: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix as its products read it: packed, or in model dtype where a backend multiplies that."""
        if self.route == "qmv":
            return int(self.operand.nbytes)
        return self.out_features * self.in_features * int(self.dtype.itemsize)


@dataclass(frozen=True)
class FusedOps:
    """Ops of a step in few launches, with the bytes of the single ops that each replaces. `packed`, `partials` and
    `pick` are the backend's own: activations made ready for a product, its sums before they are added and rounded,
    and a row's greedy token before it is written down.

    embed(head, ids int32 [8], scale, rows) -> h [8, H]      rows of the head's own matrix
    norm(h, weight, eps, rows, for) -> packed                for the product with a matrix
    product(packed, w, rows) -> partials                     one launch for all rows
    product_rows(packed, w, rows) -> partials                a launch per row
    heads(partials, norm_heads, cos, sin, position int32 [1], rows, shape, kv [2, Hkv, slots, D] | None, eps)
                                                             -> q [8, H, D]: head norms and RoPE; k and v go into kv
    attend(q, kv, position, rows, window | None, max_keys, for) -> packed
    residual(partials, h, post_norm, scalar | None, next_norm, eps, rows, for, normed | None) -> (h, packed)
    geglu(partials, rows, for, fused) -> packed
    gated(partials, w, rows, fused) -> partials              geglu and the product with w
    head(partials, rows, cap | None, with_logits) -> (logits [8, V] | None, ids int32 [8])
    pack(x [8, K], rows, for) -> packed                      rows as they are, of attention that a flag takes apart

    A draft step has one row; it reads and writes a room's ids int32 [8], where each token follows the one before:
    join(head, ids, at, pick | None, scale, state, for) -> packed
                                                             a token's embedding beside row 0 of a state, bf16 [8, H] or
                                                             partials; the token is ids[at], or the pick, put there
    join_accepted(head, ids, best int32 [8], hidden [8, H], position, draft_position int32 [1], rows, scale, for)
                                                             -> packed: the same behind what a verify step of so many
                                                             rows accepts; ids and positions move on
    enter(partials, weight, eps, for) -> (h, packed)         rows as they are, and their norm
    reuse(packed, x [8, K], for) -> packed                   x as it is: `packed`, which holds it, where its form fits
    pick(partials) -> pick                                   of the head's partials
    pick_screened(partials, x [8, K], head, screen) -> pick  the same of a screen's: x is what both multiply
    settle(pick, ids, at)                                    the pick goes to ids[at]
    attend_sums(partials, norm_heads, cos, sin, shape, eps, kv, position, rows, window | None, max_keys, for) -> packed
                                                             `heads` of a drafter and `attend`, or None: those two
    """

    embed: Callable[..., Tensor]
    norm: Callable[..., Any]
    product: Callable[[Any, Linear, int], Tensor]
    product_rows: Callable[[Any, Linear, int], Tensor]
    heads: Callable[..., Tensor]
    attend: Callable[..., Any]
    residual: Callable[..., tuple[Tensor, Any]]
    geglu: Callable[..., Any]
    gated: Callable[[Tensor, Linear, int, bool], Tensor]
    head: Callable[..., tuple[Tensor | None, Tensor]]
    pack: Callable[[Tensor, int, Linear], Any]
    join: Callable[..., Any]
    join_accepted: Callable[..., Any]
    enter: Callable[[Tensor, Tensor, float, Linear], tuple[Tensor, Any]]
    reuse: Callable[[Any, Tensor, Linear], Any]
    pick: Callable[[Tensor], Any]
    settle: Callable[[Any, Tensor, int], None]
    attend_sums: Callable[..., Any] | None = None
    pick_screened: Callable[[Tensor, Tensor, Linear, Screen], Any] | None = None


@dataclass(frozen=True)
class Screen:
    """A copy of a head in fewer bits, and how far its sums may be from the head's own: reach * ||x||, fp32 [1]."""

    weight: Linear
    reach: Tensor


@dataclass(frozen=True)
class Kernels:
    """The ops of one backend. x stands for 8 padded rows, of which the first `rows` are real.

    prepare(weight) -> Linear                        made ready once, at load
    linear(x [8, K], w, rows) -> [8, N]              one product for all rows
    linear_rows(x [8, K], w, rows) -> [8, N]         a launch per row; the same bytes as `linear`
    linear_any(x [n, K], w) -> [n, N]                any number of rows: prefill, drafter, unpadded step
    rmsnorm(x [..., D], weight fp32 | None, eps)     fp32 inside, one rounding
    rope_row(x [8, h, D], cos, sin [8, 1, D])        decode's kernel: fp32 inside, one rounding
    rope_general(x [8, h, D], cos, sin [8, 1, D])    cos and sin, the products and the sum rounded
    geglu_fused(gate, up [8, I])                     fp32 inside, one rounding
    geglu_ops(gate, up [8, I])                       a rounding per op
    sdpa_rows(q [M, H, D], k, v [Hkv, K, D], spans, first)  decode's maskless kernel for each row over keys
                                                     [start, end); `first` is the position of the first key
    sdpa_unfused(q [H, M, D], k, v, mask | None)     matmul, softmax, matmul, each rounded to model dtype
    softcap(logits [M, V], cap)                      a rounding per op
    argmax(logits [M, V]) -> list of M ids           ties go to the lowest id
    table(weight, head) -> table                     what `embed` reads: the matrix, or the head's packed form
    embed(table, ids, scale) -> [n, H]               rows times the rounded scale, rounded

    `fused_draft`: the ops of a draft step where they are launched otherwise than a verify step's, same bytes.
    `screen`(head) -> Screen | None: what a draft's head is read through, made at load; None for a head that is read
    whole.
    """

    backend: str
    prepare: Callable[[Weight], Linear]
    linear: Callable[[Tensor, Linear, int], Tensor]
    linear_rows: Callable[[Tensor, Linear, int], Tensor]
    linear_any: Callable[[Tensor, Linear], Tensor]
    rmsnorm: Callable[[Tensor, Tensor | None, float], Tensor]
    rope_row: Callable[[Tensor, Tensor, Tensor], Tensor]
    rope_general: Callable[[Tensor, Tensor, Tensor], Tensor]
    geglu_fused: Callable[[Tensor, Tensor], Tensor]
    geglu_ops: Callable[[Tensor, Tensor], Tensor]
    sdpa_rows: Callable[[Tensor, Tensor, Tensor, Sequence[tuple[int, int]], int], Tensor]
    sdpa_unfused: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    softcap: Callable[[Tensor, float], Tensor]
    argmax: Callable[[Tensor], list[int]]
    table: Callable[[Weight, Linear], Any]
    embed: Callable[[Any, Tensor, Tensor], Tensor]
    fused: FusedOps | None = None
    fused_draft: FusedOps | None = None
    screen: Callable[[Linear], Screen | None] | None = None


def kernels_for(backend: str) -> Kernels:
    """The ops of a backend; ValueError names the known ones, or says that triton is not installed."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; known backends: {', '.join(BACKENDS)}")
    if backend == "triton":
        try:
            from kernels import triton_backend
        except ImportError as error:
            raise ValueError(f"backend triton: {error}; install triton, or use backend reference") from error
        return triton_backend.KERNELS
    from kernels import reference

    return reference.KERNELS
