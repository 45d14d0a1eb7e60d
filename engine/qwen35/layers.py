"""One Qwen 3.5 decoder layer of either kind, written once for classic decode, verify and prefill.

A `Run` says how many rows there are and which form each op takes; the layer only knows the order of the ops and
where they are captured. What touches a cache is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.capture import Capture
from engine.qwen35.cache import StateCache
from engine.qwen35.config import Qwen35Config
from engine.qwen35.weights import FullWeights, LinearWeights, MlpWeights
from kernels import Kernels, Linear
from kernels.delta import DeltaInputs, DeltaOps

DeltaForm = Literal["rows", "chunk", "prefill"]
"""The recurrence row by row, by matrix products with a state for each row, or so with the last row's alone."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [n, H, D], k and v [n, Hkv, D]) -> [n, H, D]; appends k and v to the layer's cache."""

States = Callable[[int], StateCache]
"""The cache of a linear layer."""


@dataclass(frozen=True)
class Run:
    """How one forward computes: its kernels, its rows (n computed, the first `rows` real), its caches."""

    kernels: Kernels
    delta: DeltaOps
    rows: int
    linear: Callable[[Tensor, Linear], Tensor]
    rope: Literal["row", "general"]
    table: tuple[Tensor, Tensor]
    attend: Attend
    states: States
    form: DeltaForm
    capture: Capture | None = None

    def note(self, layer: int, kind: str, op: str, rows: Tensor) -> None:
        """Record an op's real rows where somebody asked for them."""
        if self.capture is not None:
            self.capture.record(layer, kind, op, rows[: self.rows])


def run_layer(run: Run, index: int, config: Qwen35Config, w: FullWeights | LinearWeights, h: Tensor) -> Tensor:
    """One decoder layer over h [n, H] -> [n, H]."""
    kernels, eps = run.kernels, config.rms_norm_eps
    kind = "full" if isinstance(w, FullWeights) else "linear"
    x = kernels.rmsnorm(h, w.mlp.input_norm, eps)
    y = _full(run, index, config, w, x) if isinstance(w, FullWeights) else _linear(run, index, config, w, x)
    run.note(index, kind, "attention output", y)
    a = h + y
    y = mlp(kernels, run.delta, run.linear, w.mlp, kernels.rmsnorm(a, w.mlp.post_attention_norm, eps))
    run.note(index, kind, "MLP output", y)
    out = a + y
    run.note(index, kind, "layer output", out)
    return out


def mlp(
    kernels: Kernels, delta: DeltaOps, linear: Callable[[Tensor, Linear], Tensor], w: MlpWeights, x: Tensor
) -> Tensor:
    """down(silu(gate(x)) * up(x)); x [n, H] -> [n, H]."""
    gate, up = linear(x, w.gate_up).chunk(2, -1)
    return linear(delta.swiglu(gate, up), w.down)


def rotate(op: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the leading elements of every head, as many as the table has, and pass the others on; x [n, h, D]."""
    turned = table[0].shape[-1]
    if turned == x.shape[-1]:
        return op(x, *table)
    return torch.cat((op(x[..., :turned].contiguous(), *table), x[..., turned:]), -1)


def _full(run: Run, index: int, config: Qwen35Config, w: FullWeights, x: Tensor) -> Tensor:
    """Gated attention: x [n, H] -> [n, H]."""
    kernels, heads, groups, dim = run.kernels, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    raw = run.linear(x, w.qkv)
    n = raw.shape[0]
    gated, k, v = torch.split(raw, [2 * heads * dim, groups * dim, groups * dim], -1)
    q, gate = gated.reshape(n, heads, 2, dim).unbind(2)
    k, v = k.reshape(n, groups, dim), v.reshape(n, groups, dim)
    normed = kernels.rmsnorm(torch.cat((q, k), 1), w.norm_heads, config.rms_norm_eps)
    turned = rotate(kernels.rope_row if run.rope == "row" else kernels.rope_general, normed, run.table)
    for op, rows in (("q_proj", q), ("k_proj", k), ("v_proj", v), ("attention gate", gate)):
        run.note(index, "full", op, rows)
    for op, both in (("norm", normed), ("rope", turned)):
        run.note(index, "full", f"q_{op}", both[:, :heads])
        run.note(index, "full", f"k_{op}", both[:, heads:])
    core = run.attend(index, turned[:, :heads].contiguous(), turned[:, heads:], v)
    run.note(index, "full", "attention core", core)
    return run.linear(run.delta.sigmoid_gate(core.reshape(n, -1), gate.reshape(n, -1)), w.o)


def _linear(run: Run, index: int, config: Qwen35Config, w: LinearWeights, x: Tensor) -> Tensor:
    """A gated-delta mixer: x [n, H] -> [n, H]."""
    heads, values = config.linear_num_value_heads, config.value_width
    raw = run.linear(x, w.in_proj)
    mixed, z, b, a = torch.split(raw, [config.conv_width, values, heads, heads], -1)
    cache = run.states(index)
    conv = run.delta.causal_conv(cache.conv_inputs(mixed), w.conv)
    inputs = delta_inputs(run.delta, config, w, conv, a, b)
    run.note(index, "linear", "in_proj", raw)
    run.note(index, "linear", "convolution", conv)
    run.note(index, "linear", "decay", inputs.log_decay)
    run.note(index, "linear", "beta", inputs.beta)
    core = _recur(run, cache, mixed, inputs)
    run.note(index, "linear", "delta rule", core)
    return run.linear(run.delta.gated_norm(core, w.norm, z.contiguous(), config.rms_norm_eps), w.out)


def delta_inputs(
    ops: DeltaOps, config: Qwen35Config, w: LinearWeights, conv: Tensor, a: Tensor, b: Tensor
) -> DeltaInputs:
    """What the recurrence takes, from the convolution's output fp32 [n, C] and the projections a and b [n, Hv]."""
    n, keys, dim = conv.shape[0], config.key_width, config.linear_key_head_dim
    q, k, v = torch.split(conv, [keys, keys, config.value_width], -1)
    log_decay, beta = ops.gates(a.contiguous(), b.contiguous(), w.rate, w.dt_bias)
    return DeltaInputs(
        ops.l2_heads(q.reshape(n, -1, dim), dim**-0.5),
        ops.l2_heads(k.reshape(n, -1, dim), 1.0),
        v.reshape(n, config.linear_num_value_heads, -1),
        log_decay,
        beta,
    )


def _recur(run: Run, cache: StateCache, mixed: Tensor, inputs: DeltaInputs) -> Tensor:
    """The recurrence in the form that the run asks for -> fp32 [n, Hv, Dv]; appends to the cache."""
    if run.form == "prefill":
        core, state = run.delta.delta_chunk(inputs, cache.state)
        cache.replace(mixed, state)
        return core
    if run.form == "rows":
        core, states = run.delta.delta_rows(inputs, cache.state, run.rows)
    else:  # the block at once; each row's state by a product of its own, since a rollback may ask for it
        core = torch.zeros_like(inputs.v)
        core[: run.rows] = run.delta.delta_chunk(_first(inputs, run.rows), cache.state)[0]
        states = [run.delta.delta_chunk(_first(inputs, row + 1), cache.state)[1] for row in range(run.rows)]
    cache.append(mixed[: run.rows], states)
    return core


def _first(inputs: DeltaInputs, n: int) -> DeltaInputs:
    """The first n rows."""
    return DeltaInputs(inputs.q[:n], inputs.k[:n], inputs.v[:n], inputs.log_decay[:n], inputs.beta[:n])
