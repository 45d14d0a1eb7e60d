"""Row-wise kernels on the device at Gemma's shapes: rows and fused launches on bytes, in graphs, a hundred times."""

from __future__ import annotations

import pytest
import torch
from support_rowops import (
    EPS,
    by_row,
    every_bf16,
    geglu_composed,
    halves,
    head_ops,
    holds_in_a_graph,
    partials_of,
    random,
    residual_ops,
    rounded_once,
    same_rows,
    weight,
)
from torch import Tensor

from kernels import argmax, fused_norms, geglu, reference, rmsnorm, rope
from kernels.rows import pack_rows, sum_partials
from kernels.testing import row_difference, same_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: these are Gemma's own shapes"),
]

HIDDEN = [1024, 3840, 5376]
VOCABULARY = 262144


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("split", [1, 8, 32])
@pytest.mark.parametrize("width", HIDDEN)
def test_residual_norm_rows(width: int, split: int, bits: int) -> None:
    """Equal to the single ops on bytes, row by row, and in a graph."""
    post, following = weight(width, seed=1), weight(width, seed=2)
    scalar = torch.tensor([0.7305], dtype=torch.bfloat16, device="cuda")
    partials, residual = random(8, split, width, seed=3), halves(8, width, seed=4, scale=4)

    def op(partials: Tensor, residual: Tensor, rows: int) -> list[Tensor]:
        normed = torch.empty_like(residual)
        h, packed = fused_norms.residual_norm_rows(
            partials_of(partials), residual, post, scalar, following, EPS, rows, bits, normed=normed
        )
        assert packed is not None
        return [h, normed, *by_row(packed)]

    h, normed, packed = residual_ops(partials_of(partials), residual, post, scalar, following, bits)
    for found, expected in zip(op(partials, residual, 8), [h, normed, *by_row(packed)], strict=True):
        assert same_bytes(found, expected)
    assert row_difference(op, [partials, residual]) is None
    holds_in_a_graph(lambda: op(partials, residual, 8))


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("width", HIDDEN)
def test_norm_rows(width: int, bits: int) -> None:
    """The norm of the reference, and the packing of the plain norm."""
    h, w = halves(8, width, seed=5, scale=3), weight(width, seed=6)
    wide = h.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double()
    plain = rmsnorm.rmsnorm(h, w, EPS)
    assert rounded_once(plain, exact)
    normed = torch.empty_like(h)
    packed = fused_norms.norm_rows(h, w, EPS, 8, bits, normed=normed)
    assert same_bytes(normed, plain)
    assert same_rows(packed, pack_rows(plain, bits), 8)
    assert row_difference(lambda x, m: by_row(fused_norms.norm_rows(x, w, EPS, m, bits)), [h]) is None
    holds_in_a_graph(lambda: by_row(fused_norms.norm_rows(h, w, EPS, 8, bits)))


GEOMETRY = [
    pytest.param(16, 8, False, 256, id="12b-sliding"),
    pytest.param(16, 1, True, 512, id="12b-full"),
    pytest.param(32, 16, False, 256, id="31b-sliding"),
    pytest.param(32, 4, True, 512, id="31b-full"),
    pytest.param(4, 0, False, 256, id="drafter"),
]


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "k_eq_v", "width"), GEOMETRY)
def test_head_norms_rope(heads: int, kv_heads: int, k_eq_v: bool, width: int, split: int) -> None:
    """q, k and v of the single ops on bytes, in the ring's slots over its end; a row alone has the same bytes."""
    all_heads, ring, position = heads + kv_heads * (1 if k_eq_v else 2), 1031, 2 * 1031 - 3
    partials, norms = random(split, 8, all_heads * width, seed=7), weight(all_heads, width, seed=8)
    cos, sin = random(2100, width, seed=9), random(2100, width, seed=10)
    at = slice(position, position + 8)
    expected = head_ops(partials, norms, cos[at, None], sin[at, None], heads, kv_heads, k_eq_v, False)
    slots = torch.tensor([(position + r) % ring for r in range(8)], device="cuda")
    start = torch.tensor([position], dtype=torch.int32, device="cuda")
    blank = torch.empty(kv_heads, ring, width, dtype=torch.bfloat16, device="cuda")

    def run(partials: Tensor, start: Tensor, rows: int) -> list[Tensor]:
        k, v = (torch.full_like(blank, float("nan")) if kv_heads else None for _ in "kv")
        q = rope.head_norms_rope(partials, norms, cos, sin, start, rows, heads, kv_heads, k_eq_v, EPS, k, v, ring)
        if k is None or v is None:
            return [q]
        return [q, *(cache[:, slots].transpose(0, 1).contiguous() for cache in (k, v))]

    block = run(partials, start, 8)
    for found, wanted in zip(block, expected[: len(block)], strict=True):
        assert same_bytes(found, wanted)
    for r in range(8):
        alone = torch.full_like(partials, float("nan"))
        alone[:, 0] = partials[:, r]
        q, *cached = run(alone, start + r, 1)
        assert same_bytes(q[0], block[0][r])
        for found, wanted in zip(cached, block[1:], strict=True):
            assert same_bytes(found[r], wanted[r])
            assert found[[s for s in range(8) if s != r]].isnan().all()
    for rows in range(1, 9):
        for found, wanted in zip(run(partials, start, rows), block, strict=True):
            assert same_bytes(found[:rows], wanted[:rows])
    holds_in_a_graph(lambda: run(partials, start, 8)[:1])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "ops"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [8192, 15360, 21504])
def test_geglu_rows(width: int, bits: int, fused: bool) -> None:
    """Equal to the single ops on bytes, row by row, and in a graph."""
    partials = random(8, 2, 2 * width, seed=11)

    def op(partials: Tensor, rows: int) -> list[Tensor]:
        return by_row(geglu.geglu_rows(partials_of(partials), rows, bits, fused))

    assert same_rows(
        geglu.geglu_rows(partials_of(partials), 8, bits, fused), geglu_composed(partials_of(partials), bits, fused), 8
    )
    assert row_difference(op, [partials]) is None
    holds_in_a_graph(lambda: op(partials, 8))


@pytest.mark.parametrize("cap", [None, 30.0])
def test_head_argmax(cap: float | None) -> None:
    """The ids of numpy over the capped logits, ties to the lowest; equal to the single ops, row by row, in a graph."""
    partials = random(8, 1, VOCABULARY, seed=12, scale=8)

    def op(partials: Tensor, rows: int) -> list[Tensor]:
        logits = torch.empty(8, VOCABULARY, dtype=torch.bfloat16, device="cuda")
        ids, _ = argmax.head_argmax(partials_of(partials), rows, cap, logits=logits)
        return [ids, logits]

    ids, logits = op(partials, 8)
    plain = sum_partials(partials_of(partials))
    assert same_bytes(logits, plain if cap is None else argmax.softcap(plain, cap))
    assert ids.tolist() == reference.argmax(logits)
    assert argmax.argmax(logits).tolist() == ids.tolist()
    assert row_difference(op, [partials]) is None
    holds_in_a_graph(lambda: op(partials, 8))


def test_elementwise_values_on_the_device() -> None:
    """The card's own exp2, rsqrt and division: gelu and softcap of every bf16 against float64 and the reference."""
    x = every_bf16()
    wide = x.double()
    exact = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    real = (exact.abs() > 1e-37) & ~exact.isnan()
    found = geglu.geglu_fused(x, torch.ones_like(x))
    assert float((found != exact.to(torch.bfloat16))[real].double().mean()) < 0.001
    assert torch.equal(found.isnan(), exact.isnan())
    capped, expected = argmax.softcap(x, 30.0).cpu(), reference.softcap(x.cpu(), 30.0)
    assert torch.equal(capped.isnan(), expected.isnan())
    assert int((capped != expected)[~expected.isnan()].sum()) <= 2
