"""Ops of a gated-delta layer and of gated blocks, in plain torch: what Qwen 3.5 needs beyond Gemma's kernels.

The recurrence takes one row at a time with the same shapes whatever the number of rows, so a row's bytes follow from
its inputs and the state before it. Elementwise ops take 8 padded rows of a padded width.
fp32 inside, one rounding at the end, throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import MAX_ROWS
from kernels.reference import LANES, by_rows

CHUNK = 64
"""Tokens that prefill's form of the recurrence takes in one matrix product."""

L2_EPS = 1e-6
"""Added to the sum of squares under the root of the q and k norms."""


@dataclass(frozen=True)
class DeltaInputs:
    """One range of rows: q and k fp32 [n, Hk, Dk] normalised (q scaled too), v fp32 [n, Hv, Dv], and for each value
    head its log decay (0 or less) and its write strength beta, fp32 [n, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


def causal_conv(inputs: Tensor, weight: Tensor) -> Tensor:
    """SiLU of a depthwise causal convolution: row r sees inputs r .. r + K - 1 -> fp32 [n, C].

    inputs [K - 1 + n, C], the K - 1 rows before the first in front; weight fp32 [K, C]. Products are added oldest
    first, without a fused multiply-add.
    """
    taps, rows = weight.shape[0], inputs.shape[0] - weight.shape[0] + 1
    wide = inputs.float()
    total = wide[:rows] * weight[0]
    for tap in range(1, taps):
        total = total.add_(wide[tap : tap + rows] * weight[tap])
    return _by_rows(F.silu, total)


def l2_heads(x: Tensor, scale: float) -> Tensor:
    """x * (sum(x^2) + 1e-6)^-0.5 * scale over the last dim; x fp32 [n, H, D]."""
    squares = (x * x).sum(-1, keepdim=True)
    return x * squares.add_(L2_EPS).rsqrt_().mul_(scale)


def gates(a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(log decay, beta) = (-rate * softplus(a + dt_bias), sigmoid(b)); a and b [n, Hv], rate = exp(A_log) fp32 [Hv]."""
    decay = _by_rows(
        lambda x, bias, factor: F.softplus(x.float() + bias).mul_(factor).neg_(),
        a,
        dt_bias.expand(a.shape),
        rate.expand(a.shape),
    )
    return decay, _by_rows(lambda x: torch.sigmoid(x.float()), b)


def delta_rows(inputs: DeltaInputs, state: Tensor, rows: int) -> tuple[Tensor, list[Tensor]]:
    """The recurrence, row by row: S <- S e^g; d = (v - S^T k) beta; S <- S + k d^T; o = S^T q.

    state fp32 [Hv, Dk, Dv] before the first row, never written to -> outputs fp32 [n, Hv, Dv] (rows past `rows` are
    zero) and the state after each row. Gated delta rule: Yang, Kautz, Hatamizadeh 2024 (arXiv 2412.06464).
    """
    q, k = _per_value_head(inputs.q, inputs.v), _per_value_head(inputs.k, inputs.v)
    out = torch.zeros_like(inputs.v)
    states: list[Tensor] = []
    for row in range(rows):
        key = k[row].unsqueeze(-1)
        state = state * inputs.log_decay[row].exp()[:, None, None]
        change = (inputs.v[row] - (state * key).sum(1)).mul_(inputs.beta[row].unsqueeze(-1))
        state = state.add_(key * change.unsqueeze(1))
        out[row] = (state * q[row].unsqueeze(-1)).sum(1)
        states.append(state)
    return out, states


def delta_chunk(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same recurrence over n rows by matrix products of up to 64 rows: other sums, so other bytes.

    On CUDA its products follow MLX_ENABLE_TF32, as prefill's attention does.
    -> outputs fp32 [n, Hv, Dv] and the state after the last row. The rows of a chunk are a unit lower triangular
    system, (I + A) d = beta (v - e^G S^T k), with A_ij = beta_i e^(G_i - G_j) k_i . k_j for j < i and G the running
    sum of log decays.
    """
    q = _per_value_head(inputs.q, inputs.v).transpose(0, 1)
    k = _per_value_head(inputs.k, inputs.v).transpose(0, 1)
    v, beta = inputs.v.transpose(0, 1), inputs.beta.t().unsqueeze(-1)
    log_decay = inputs.log_decay.t()
    pieces: list[Tensor] = []
    for begin in range(0, v.shape[1], CHUNK):
        part = slice(begin, begin + CHUNK)
        queries, keys, values, strength = q[:, part], k[:, part], v[:, part], beta[:, part]
        total = log_decay[:, part].cumsum(-1)
        n = total.shape[-1]
        later = torch.ones(n, n, dtype=torch.bool, device=total.device).triu(1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
        since = total.exp().unsqueeze(-1)
        overlap = (keys @ keys.transpose(1, 2)) * between
        known = strength * (values - since * (keys @ state))
        change = torch.linalg.solve_triangular((strength * overlap).tril(-1), known, upper=False, unitriangular=True)
        pieces.append(since * (queries @ state) + ((queries @ keys.transpose(1, 2)) * between) @ change)
        left = (total[:, -1:] - total).exp().unsqueeze(-1)
        state = state * total[:, -1].exp()[:, None, None] + (keys * left).transpose(1, 2) @ change
    return torch.cat(pieces, 1).transpose(0, 1).contiguous(), state


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rmsnorm(x) * weight * silu(gate) in gate's dtype; x fp32 [n, H, D], weight fp32 [D], gate [n, H * D]."""
    squares = (x * x).sum(-1, keepdim=True)
    normed = x * squares.mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_() * weight
    return _by_rows(lambda y, g: F.silu(g.float()).mul_(y).to(g.dtype), normed.flatten(1), gate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in fp32 with one rounding; gate and up [n, I]."""
    return _by_rows(lambda g, u: F.silu(g.float()).mul_(u).to(g.dtype), gate, up)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) in fp32 with one rounding; both [n, N]."""
    return _by_rows(lambda y, g: torch.sigmoid(g.float()).mul_(y).to(y.dtype), x, gate)


def _by_rows(op: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """The row contract for up to 8 rows on a CPU: a width that would leave a scalar tail is padded.

    A GPU has no such tail, and prefill's rows have no contract.
    """
    x = operands[0]
    rows, width = x.shape
    if x.device.type != "cpu" or rows > MAX_ROWS:
        return op(*operands)
    tail = -width % LANES
    if not tail:
        return by_rows(op, *operands)
    return by_rows(op, *(F.pad(operand, (0, tail)) for operand in operands))[:, :width]


def _per_value_head(x: Tensor, v: Tensor) -> Tensor:
    """q or k [n, Hk, D] for each value head [n, Hv, D]: head h of k serves the value heads h * Hv / Hk and on."""
    return x.repeat_interleave(v.shape[1] // x.shape[1], 1)


@dataclass(frozen=True)
class DeltaOps:
    """The ops of this module as a bundle, so that a test, or another backend, can replace one."""

    causal_conv: Callable[[Tensor, Tensor], Tensor] = causal_conv
    l2_heads: Callable[[Tensor, float], Tensor] = l2_heads
    gates: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = gates
    delta_rows: Callable[[DeltaInputs, Tensor, int], tuple[Tensor, list[Tensor]]] = delta_rows
    delta_chunk: Callable[[DeltaInputs, Tensor], tuple[Tensor, Tensor]] = delta_chunk
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gated_norm
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor] = sigmoid_gate
