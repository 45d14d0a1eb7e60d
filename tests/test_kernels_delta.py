"""Ops of a gated-delta layer: values against float64 and torch's own convolution, and the row contract on bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from support_engine import one_thread
from torch import Tensor

from kernels import MAX_ROWS
from kernels.delta import (
    DeltaInputs,
    causal_conv,
    delta_chunk,
    delta_rows,
    gated_norm,
    gates,
    l2_heads,
    sigmoid_gate,
    swiglu,
)

WIDTHS = (1, 24, 64, 257, 300)


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs_of(rows: int, keys: int = 2, values: int = 4, dk: int = 16, dv: int = 24, seed: int = 0) -> DeltaInputs:
    """Normalised q and k, and decays and strengths as a trained layer has them."""
    return DeltaInputs(
        l2_heads(random(rows, keys, dk, seed=seed), dk**-0.5),
        l2_heads(random(rows, keys, dk, seed=seed + 1), 1.0),
        random(rows, values, dv, seed=seed + 2),
        -0.3 * random(rows, values, seed=seed + 3).abs(),
        random(rows, values, seed=seed + 4).sigmoid(),
    )


def picked(inputs: DeltaInputs, rows: slice) -> DeltaInputs:
    return DeltaInputs(*(getattr(inputs, name)[rows] for name in ("q", "k", "v", "log_decay", "beta")))


def float64_rule(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written down, in float64 and with explicit sums."""
    outs, state = [], state.double()
    share = inputs.v.shape[1] // inputs.q.shape[1]
    for row in range(inputs.q.shape[0]):
        out = []
        for head in range(inputs.v.shape[1]):
            q, k = (x[row, head // share].double() for x in (inputs.q, inputs.k))
            kept = state[head] * inputs.log_decay[row, head].double().exp()
            change = (inputs.v[row, head].double() - kept.T @ k) * inputs.beta[row, head].double()
            state = state.clone()
            state[head] = kept + torch.outer(k, change)
            out.append(state[head].T @ q)
        outs.append(torch.stack(out))
    return torch.stack(outs), state


def test_both_forms_of_the_rule_are_the_rule() -> None:
    """Guards the head that a value head reads, the order of decay and write, and chunks that are not full."""
    inputs, state = inputs_of(150), random(4, 16, 24, seed=9)
    theirs, last = float64_rule(inputs, state)
    chunked, after = delta_chunk(inputs, state)
    assert (chunked - theirs).abs().max() < 2e-5
    assert (after - last).abs().max() < 2e-5
    stepped, states = delta_rows(inputs, state, 150)
    assert (stepped - theirs).abs().max() < 2e-5
    assert (states[-1] - last).abs().max() < 2e-5
    assert theirs.abs().mean() > 0.03


def test_a_strong_decay_does_not_overflow_the_chunk_form() -> None:
    """exp of later minus earlier log decays grows without bound; rows that a key may not reach must not multiply it."""
    inputs = inputs_of(64)
    strong = DeltaInputs(inputs.q, inputs.k, inputs.v, inputs.log_decay * 40, inputs.beta)
    theirs, last = float64_rule(strong, torch.zeros(4, 16, 24))
    found, after = delta_chunk(strong, torch.zeros(4, 16, 24))
    assert (found - theirs).abs().max() < 2e-5
    assert (after - last).abs().max() < 2e-5


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_a_row_of_the_rule_has_the_bytes_of_its_one_row_call(rows: int) -> None:
    """Guards the row contract: rows after a row, their number, and NaN in the padding must not reach it."""
    inputs, state = inputs_of(MAX_ROWS), random(4, 16, 24, seed=9)
    before = state.clone()
    block = DeltaInputs(*(getattr(inputs, name).clone() for name in ("q", "k", "v", "log_decay", "beta")))
    for part in (block.q, block.k, block.v, block.log_decay, block.beta):
        part[rows:] = float("nan")
    out, states = delta_rows(block, state, rows)
    assert torch.equal(state, before), "the state before the block is needed again after a rollback"
    alone = state
    for row in range(rows):
        order = [row, *(other for other in range(MAX_ROWS) if other != row)]
        single = DeltaInputs(*(getattr(inputs, name)[order] for name in ("q", "k", "v", "log_decay", "beta")))
        own, following = delta_rows(single, alone, 1)
        alone = following[0]
        assert torch.equal(out[row], own[0])
        assert torch.equal(states[row], alone)
    assert len(states) == rows


@pytest.mark.parametrize("width", WIDTHS)
def test_the_convolution_is_torchs_and_its_rows_are_alone(width: int) -> None:
    """Guards the direction of the taps, and each row's bytes whatever follows it."""
    taps, weight = 4, random(4, width, seed=1)
    inputs = random(taps - 1 + MAX_ROWS, width, dtype=torch.bfloat16)
    found = causal_conv(inputs, weight)
    theirs = F.silu(F.conv1d(inputs.double().t()[None], weight.double().t()[:, None], groups=width)[0].t())
    assert (found - theirs).abs().max() < 1e-5
    for row in range(MAX_ROWS):
        alone = torch.full_like(inputs, float("nan"))
        alone[:taps] = inputs[row : row + taps]
        assert torch.equal(causal_conv(alone, weight)[0], found[row])


ELEMENTWISE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "swiglu": (swiglu, lambda a, b: F.silu(a) * b),
    "sigmoid_gate": (sigmoid_gate, lambda a, b: a * torch.sigmoid(b)),
    "gates decay": (
        lambda a, b: gates(a, b, torch.full((a.shape[1],), 0.2), torch.full((a.shape[1],), 0.1))[0],
        lambda a, b: -0.2 * F.softplus(a + 0.1),
    ),
    "gates beta": (
        lambda a, b: gates(a, b, torch.full((a.shape[1],), 0.2), torch.full((a.shape[1],), 0.1))[1],
        lambda a, b: torch.sigmoid(b),
    ),
    "gated_norm": (
        lambda a, b: gated_norm(a.float().unsqueeze(1), torch.full((a.shape[1],), 1.5), b, 1e-6),
        lambda a, b: a * (a.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * 1.5 * F.silu(b),
    ),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_gates_and_norms_have_their_values_and_their_rows_alone(name: str, width: int) -> None:
    """Guards against a scalar tail, whose exp differs from the vector loop's, falling into some rows alone."""
    ours, theirs = ELEMENTWISE[name]
    left, right = (random(MAX_ROWS, width, seed=seed, dtype=torch.bfloat16) for seed in (5, 6))
    found = ours(left, right)
    exact = theirs(left.double(), right.double())
    assert (found.double() - exact).abs().max() <= 2**-8 * max(1.0, exact.abs().max().item())
    for row in range(MAX_ROWS):
        a, b = torch.full_like(left, float("nan")), torch.full_like(right, float("nan"))
        a[0], b[0] = left[row], right[row]
        assert torch.equal(ours(a, b)[0], found[row])
