"""The ops of a Qwen 3.5 pair for `row_identity`: what differs from Gemma's, and the recurrence of its linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.attention import attend_step
from engine.layers import TABLE_STEP
from engine.qwen35.layers import rotate
from engine.qwen35.target import DISPATCHED_AS, Qwen35Target, delta_form
from harness.worker.row_identity import FULL_CONTEXT, Subject, heads_of, linears, subject_of
from kernels import MAX_ROWS
from kernels.delta import DeltaInputs


def _norms(target: Qwen35Target, generator: torch.Generator) -> Iterator[Subject]:
    """The hidden width, and the heads of full attention with a weight of their own each."""
    kernels, config = target.kernels, target.config

    def norm(name: str, shape: tuple[int, ...]) -> Subject:
        weight = torch.rand(shape, generator=generator).to(target.device) + 0.5
        return subject_of(name, shape, lambda x, order, decode: kernels.rmsnorm(x, weight, config.rms_norm_eps))

    heads = config.num_attention_heads + config.num_key_value_heads
    yield norm(f"hidden {config.hidden_size}", (config.hidden_size,))
    yield norm(f"full {heads} heads x {config.head_dim}", (heads, config.head_dim))


def _ropes(target: Qwen35Target, generator: torch.Generator) -> Iterator[Subject]:
    """Positions around the end of a table's chunk; a row keeps its position in any slot."""
    kernels, policy, config = target.kernels, target.policy, target.config
    cos, sin = target.rope_table.rows(TABLE_STEP - MAX_ROWS // 2, MAX_ROWS)

    def call(x: Tensor, order: Sequence[int], decode: bool) -> Tensor:
        picked = [*order, *[0] * (MAX_ROWS - len(order))]
        op = kernels.rope_row if policy.rope(len(order), decode) == "row" else kernels.rope_general
        return rotate(op, x, (cos[picked], sin[picked]))

    heads = config.num_attention_heads + config.num_key_value_heads
    name = f"full {heads} heads x {config.head_dim}, {config.rotary_dim} turned"
    yield subject_of(name, (heads, config.head_dim), call)


def _attentions(target: Qwen35Target, generator: torch.Generator) -> Iterator[Subject]:
    """Full attention over a filled cache; x holds queries, keys and values of the rows are fixed.

    A row's slot is its position here, so a block in reverse slots is the same block again.
    """
    kernels, policy, config = target.kernels, target.policy, target.config
    groups, width = config.num_key_value_heads, config.head_dim
    cache = target.new_caches().kv(config.kinds.index("full"))
    random = _random(target, generator)
    cache.write(random(groups, FULL_CONTEXT, width), random(groups, FULL_CONTEXT, width))
    keys, values = random(MAX_ROWS, groups, width), random(MAX_ROWS, groups, width)

    def call(x: Tensor, order: Sequence[int], decode: bool) -> Tensor:
        count, first = len(order), min(order)
        slots = [row - first for row in order]
        queries, k, v = (torch.full_like(like, float("nan")) for like in (x, keys, values))
        queries[slots] = x[:count]
        own = cache.clone()
        if first:
            own.write(keys[:first].transpose(0, 1), values[:first].transpose(0, 1))
        k[:count], v[:count] = keys[first : first + count], values[first : first + count]
        choice = policy.attention(count, DISPATCHED_AS, decode)
        return attend_step(kernels, choice, own, queries, k, v, count)[slots]

    name = f"full {config.num_attention_heads} heads x {width} over {FULL_CONTEXT} keys"
    yield subject_of(name, (config.num_attention_heads, width), call)


def _swiglus(target: Qwen35Target, generator: torch.Generator) -> Iterator[Subject]:
    """The MLP's width."""
    width = target.config.intermediate_size
    yield subject_of(f"{width} wide", (2 * width,), lambda x, order, decode: target.delta.swiglu(*x.chunk(2, -1)))


def _output_gates(target: Qwen35Target, generator: torch.Generator) -> Iterator[Subject]:
    """What closes a mixer: sigmoid gate of full attention, gated norm of the recurrence."""
    config, delta = target.config, target.delta
    width, heads = config.num_attention_heads * config.head_dim, config.linear_num_value_heads
    weight = torch.rand(config.linear_value_head_dim, generator=generator).to(target.device) + 0.5

    def norm(x: Tensor, order: Sequence[int], decode: bool) -> Tensor:
        core, gate = x.chunk(2, -1)
        core = core.float().reshape(MAX_ROWS, heads, -1)
        return delta.gated_norm(core, weight, gate.contiguous(), config.rms_norm_eps)

    yield subject_of(f"full {width} wide", (2 * width,), lambda x, order, decode: delta.sigmoid_gate(*x.chunk(2, -1)))
    yield subject_of(f"linear {heads} heads x {config.linear_value_head_dim}", (2 * config.value_width,), norm)


def _delta_rules(target: Qwen35Target, generator: torch.Generator) -> Iterator[Subject]:
    """The recurrence from a filled state; x holds queries, what the rows write into the state is fixed.

    A one-row call starts from the state that the rows before it leave, one by one, as classic decode does.
    """
    config, delta, policy = target.config, target.delta, target.policy
    heads, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads
    random = _random(target, generator)
    k = delta.l2_heads(random(MAX_ROWS, heads, width).float(), 1.0)
    v = random(MAX_ROWS, values, config.linear_value_head_dim).float()
    decay = -0.2 * random(MAX_ROWS, values).float().abs()
    beta = random(MAX_ROWS, values).float().sigmoid()
    state = random(values, width, config.linear_value_head_dim).float()

    def call(x: Tensor, order: Sequence[int], decode: bool) -> Tensor:
        count, first = len(order), min(order)
        slots = [row - first for row in order]
        q = torch.full_like(x, float("nan"), dtype=torch.float32)
        q[slots] = x[:count].float()
        q = delta.l2_heads(q.reshape(MAX_ROWS, heads, width), width**-0.5)
        before = state
        for row in range(first):
            before = delta.delta_rows(_padded(k, k, v, decay, beta, row, 1), before, 1)[1][0]
        inputs = _padded(q, k, v, decay, beta, first, count)
        if delta_form(policy, count, decode) == "chunk":
            parts = (x[:count] for x in (q, k[first:], v[first:], decay[first:], beta[first:]))
            return delta.delta_chunk(DeltaInputs(*parts), before)[0][slots]
        return delta.delta_rows(inputs, before, count)[0][slots]

    name = f"{heads} key and {values} value heads, state {width} x {config.linear_value_head_dim}"
    yield subject_of(name, (heads * width,), call)


def _padded(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, first: int, count: int) -> DeltaInputs:
    """8 rows of which the first `count` are those from `first` on (q's own first), and the others NaN."""

    def rows(x: Tensor) -> Tensor:
        block = torch.full_like(x, float("nan"))
        block[:count] = x[first : first + count]
        return block

    return DeltaInputs(q, rows(k), rows(v), rows(decay), rows(beta))


def _random(target: Qwen35Target, generator: torch.Generator) -> Callable[..., Tensor]:
    return lambda *sizes: torch.randn(sizes, generator=generator).to(dtype=target.dtype, device=target.device)


SUBJECTS: dict[str, Callable[..., Iterator[Subject]]] = {
    "linear": linears,
    "rmsnorm": _norms,
    "rope": _ropes,
    "swiglu": _swiglus,
    "output_gate": _output_gates,
    "attention": _attentions,
    "delta_rule": _delta_rules,
    "lm_head": heads_of,
}
