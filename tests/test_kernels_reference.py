"""The reference kernels: values against float64 with named tolerances, rows against themselves on bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import BACKENDS, MAX_ROWS, Linear, Weight, kernels_for, reference
from kernels.testing import as_integers, same_bytes, slot_independent

# Largest error relative to the result's own scale. One bf16 rounding is 2^-8 at most; the op-by-op forms round
# several times. SHARE: of bf16 results, how many may differ from the exact value's own rounding.
FP32_ELEMENTWISE = 2e-6
FP32_SUMS = 5e-6
BF16_ONE_ROUNDING = 1.01 * 2**-8
BF16_ROUNDING_PER_OP = 3 * 2**-8
ONE_ROUNDING_SHARE = 0.01

NANO_SHAPES = [(256, 512), (256, 640), (256, 256), (512, 256), (256, 1536), (768, 256), (256, 4096)]
DRAFTER_SHAPES = [(512, 128), (128, 256), (256, 128), (128, 512), (128, 1536), (768, 128), (128, 4096)]
ODD_SHAPES = [(64, 96), (192, 80), (576, 33)]
WIDTHS = [16, 64, 72, 257, 300, 768, 1000, 5376]
DTYPES = [torch.bfloat16, torch.float32]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Seeded normal values."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def error(found: Tensor, exact: Tensor) -> float:
    """Largest difference over the largest exact value."""
    return float((found.double() - exact).abs().max() / exact.abs().max())


def tolerance(dtype: torch.dtype, fp32: float, bf16: float) -> float:
    """The named tolerance of a dtype."""
    return fp32 if dtype == torch.float32 else bf16


def rounded_once(found: Tensor, exact: Tensor) -> bool:
    """Close, and in bf16 all but a few ties equal to the exact value's rounding."""
    if found.dtype == torch.float32:
        return error(found, exact) < FP32_SUMS
    share = float((found != exact.to(found.dtype)).double().mean())
    return error(found, exact) < BF16_ONE_ROUNDING and share < ONE_ROUNDING_SHARE


def ids(shapes: list[tuple[int, int]]) -> list[str]:
    """Test ids from shapes."""
    return [f"K{k}-N{n}" for k, n in shapes]


def rows_hold(op: Callable[..., Tensor], *operands: Tensor) -> None:
    """Every row of an 8-row call equals the row alone in slot 0 of 8, whatever slot it sits in."""
    for slot in range(MAX_ROWS):
        moved = op(*(x.roll(slot, 0) for x in operands))[slot]
        alone = [torch.zeros_like(x) for x in operands]
        for destination, source in zip(alone, operands, strict=True):
            destination[0] = source[0]
        assert same_bytes(moved, op(*alone)[0]), slot


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("k", "n"), NANO_SHAPES + DRAFTER_SHAPES + ODD_SHAPES, ids=ids(NANO_SHAPES + DRAFTER_SHAPES + ODD_SHAPES)
)
def test_linear_rows_are_slot_independent(k: int, n: int, dtype: torch.dtype) -> None:
    """A product whose bits move with the slot or the neighbours would break parity at some block size only."""
    w = reference.prepare(Weight(random(n, k, dtype=dtype, seed=1), 16))
    x = random(MAX_ROWS, k, dtype=dtype, seed=2)
    full = reference.linear(x, w, MAX_ROWS)
    for rows in range(1, MAX_ROWS + 1):
        padded = torch.full_like(x, float("nan"))
        padded[:rows] = x[:rows]
        assert same_bytes(reference.linear(padded, w, rows)[:rows], full[:rows]), rows
        alone = torch.zeros_like(x)
        alone[0] = x[rows - 1]
        assert same_bytes(reference.linear(alone, w, 1)[0], full[rows - 1]), rows
    assert same_bytes(reference.linear_rows(x, w, MAX_ROWS), full)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), [(256, 512), (768, 256), (576, 33)], ids=ids([(256, 512), (768, 256), (576, 33)]))
def test_linear_is_close_to_float64(k: int, n: int, dtype: torch.dtype) -> None:
    """fp32 accumulation and one rounding: not a bf16 accumulator, not a transposed weight."""
    data, x = random(n, k, dtype=dtype, seed=3), random(MAX_ROWS, k, dtype=dtype, seed=4)
    w = reference.prepare(Weight(data, 16))
    exact = x.double() @ data.double().T
    for found in (reference.linear(x, w), reference.linear_rows(x, w), reference.linear_any(x[:3], w)):
        assert rounded_once(found, exact[: found.shape[0]])


@pytest.mark.parametrize("route", ["packed", "rows", "left", "fp32", "single"])
def test_every_route_computes_the_same_product(route: str) -> None:
    """Routes that other machines take must be right too, though this one chooses another."""
    data, x = random(96, 64, dtype=torch.bfloat16, seed=5), random(MAX_ROWS, 64, dtype=torch.bfloat16, seed=6)
    operand = reference._operand(route, data)
    if operand is None:
        pytest.skip(reason="this build of torch has no packed bf16 product")
    w = Linear(96, 64, 4, torch.bfloat16, route, operand)
    assert error(reference.linear(x, w), x.double() @ data.double().T) < BF16_ONE_ROUNDING
    assert w.nbytes == 96 * 64 * 2


def test_a_slot_dependent_route_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU whose products depend on the slot, the loader must choose a route that does not, down to row by row.

    The order of the routes is that of a CPU with bf16 instructions, the products are row by row, on any machine.
    """
    data = random(48, 64, dtype=torch.bfloat16, seed=7)
    monkeypatch.setattr(reference, "_has_bf16_instructions", lambda: True)

    def spoiled(routes: tuple[str, ...]) -> Callable[[Tensor, Linear], Tensor]:
        def product(x: Tensor, w: Linear) -> Tensor:
            out = torch.stack([data.float() @ row.float() for row in x]).bfloat16()
            if w.route in routes:
                out[5] *= 1.0078125  # the next bf16
            return out

        return product

    for routes, expected in ((("packed", "rows"), "left"), (("packed", "rows", "left", "fp32"), "single")):
        monkeypatch.setattr(reference, "_VERDICTS", {})
        monkeypatch.setattr(reference, "_product", spoiled(routes))
        chosen = reference.prepare(Weight(data, 4))
        assert chosen.route == expected
        assert slot_independent(lambda x, w=chosen: reference.linear(x, w), 64, torch.bfloat16)


def test_a_cpu_without_bf16_instructions_takes_fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated bf16 products take several times as long; a matrix too large to widen keeps them."""
    monkeypatch.setattr(reference, "_has_bf16_instructions", lambda: False)
    data = random(48, 64, dtype=torch.bfloat16, seed=7)
    assert reference.prepare(Weight(data, 4)).route == "fp32"
    monkeypatch.setattr(reference, "FP32_LIMIT", data.numel() - 1)
    assert reference.prepare(Weight(data, 4)).route != "fp32"


def test_slot_independent_sees_what_it_should() -> None:
    """The check itself: a last bit in one slot, a neighbour that leaks and a NaN that spreads are all refused."""
    weight = random(32, 64, seed=8)

    def product(x: Tensor) -> Tensor:
        return torch.stack([row @ weight.T for row in x])

    def one_slot(x: Tensor) -> Tensor:
        out = product(x)
        as_integers(out)[6, 3] ^= 1
        return out

    def leaks(x: Tensor) -> Tensor:
        return product(x) + 0 * x.sum()

    assert slot_independent(product, 64, torch.float32)
    assert not slot_independent(one_slot, 64, torch.float32)
    assert not slot_independent(leaks, 64, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rmsnorm(width: int, dtype: torch.dtype) -> None:
    """fp32 inside with one rounding, weight used as it is (no 1 + w), rows independent."""
    x, weight = random(MAX_ROWS, width, dtype=dtype, seed=9, scale=3), 1 + 0.3 * random(width, seed=10)
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    before = x.clone()
    assert rounded_once(reference.rmsnorm(x, weight, 1e-6), exact * weight.double())
    assert rounded_once(reference.rmsnorm(x, None, 1e-6), exact)
    assert same_bytes(x, before)
    rows_hold(lambda z: reference.rmsnorm(z, weight, 1e-6), x)


def rope_inputs(width: int, dtype: torch.dtype, start: int = 700) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [8, 3, D], cos, sin [8, 1, D] and the exact rotation."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = (torch.arange(start, start + MAX_ROWS, dtype=torch.float64)[:, None] * frequencies)[:, None]
    x = random(MAX_ROWS, 3, width, dtype=dtype, seed=13)
    first, second = x.double().chunk(2, -1)
    exact = torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)
    cos, sin = angles.cos().float(), angles.sin().float()
    return x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), exact


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_rope(width: int, dtype: torch.dtype) -> None:
    """Halves paired i with i + D/2; decode's kernel rounds once, the general one cos, sin, products and sum."""
    x, cos, sin, exact = rope_inputs(width, dtype)
    row, general = reference.rope_row(x, cos, sin), reference.rope_general(x, cos, sin)
    assert rounded_once(row, exact)
    assert error(general, exact) < tolerance(dtype, FP32_ELEMENTWISE, BF16_ROUNDING_PER_OP)
    if dtype == torch.bfloat16:
        assert not rounded_once(general, exact)
    rows_hold(reference.rope_row, x, cos, sin)
    rows_hold(reference.rope_general, x, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_geglu(width: int, dtype: torch.dtype) -> None:
    """gelu_tanh(gate) * up; at odd widths a scalar tail would fall into the last slots' rows only."""
    gate, up = random(MAX_ROWS, 2 * width, dtype=dtype, seed=14, scale=2).chunk(2, -1)
    wide = gate.double()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    exact = 0.5 * wide * (1 + torch.tanh(inner)) * up.double()
    fused, ops = reference.geglu_fused(gate, up), reference.geglu_ops(gate, up)
    large = exact.abs() > 0.01  # further down 1 + tanh cancels, in fp32 as well
    assert rounded_once(fused[large], exact[large])
    assert error(fused, exact) < tolerance(dtype, FP32_ELEMENTWISE, BF16_ONE_ROUNDING)
    assert error(ops, exact) < tolerance(dtype, FP32_ELEMENTWISE, BF16_ROUNDING_PER_OP)
    if dtype == torch.bfloat16:
        assert not rounded_once(ops[large], exact[large])
    rows_hold(reference.geglu_fused, gate, up)
    rows_hold(reference.geglu_ops, gate, up)


def attention_inputs(
    heads: int, groups: int, width: int, keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q [8, H, D], k and v [Hkv, K, D] with the spread that normed queries and keys have."""
    q = random(MAX_ROWS, heads, width, dtype=dtype, seed=15, scale=width**-0.25)
    return q, random(groups, keys, width, dtype=dtype, seed=16), random(groups, keys, width, dtype=dtype, seed=17)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "width", "keys"), [(4, 2, 64, 301), (4, 1, 128, 77), (8, 4, 16, 9)])
def test_attention_is_close_to_float64(heads: int, groups: int, width: int, keys: int, dtype: torch.dtype) -> None:
    """Scale 1, query heads grouped in order, keys cut: one-row kernel, op by op, and the masked block."""
    q, k, v = attention_inputs(heads, groups, width, keys, dtype)
    spans = [(0 if row < 5 else row - 3, keys - MAX_ROWS + row + 1) for row in range(MAX_ROWS)]
    mask = torch.zeros(MAX_ROWS, keys, dtype=torch.bool)
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = True
    repeated = [x.double().repeat_interleave(heads // groups, 0) for x in (k, v)]
    scores = torch.einsum("mhd,hkd->hmk", q.double(), repeated[0]).masked_fill(~mask, -math.inf)
    exact = torch.einsum("hmk,hkd->mhd", scores.softmax(-1), repeated[1])
    per_op = tolerance(dtype, FP32_SUMS, 4 * BF16_ROUNDING_PER_OP)
    assert rounded_once(reference.sdpa_rows(q, k, v, spans), exact)
    block = reference.sdpa_unfused(q.transpose(0, 1).contiguous(), k, v, mask).transpose(0, 1)
    assert error(block, exact) < per_op
    start, end = spans[2]
    alone = reference.sdpa_unfused(q[2][:, None].contiguous(), k[:, start:end], v[:, start:end], None)[:, 0]
    assert error(alone, exact[2]) < per_op


@pytest.mark.parametrize("keys", [8, 63, 300, 1031])
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 64), (4, 1, 128), (16, 8, 256)])
def test_attention_row_does_not_depend_on_the_block(heads: int, groups: int, width: int, keys: int) -> None:
    """A row among eight over a longer buffer has the bytes of decode's call over exactly its keys."""
    q, k, v = attention_inputs(heads, groups, width, keys, torch.bfloat16)
    spans = [(min(3, row), keys - MAX_ROWS + row + 1) for row in range(MAX_ROWS)]
    block = reference.sdpa_rows(q, k.float(), v.float(), spans)
    poisoned = k.clone(), v.clone()
    for row, (start, end) in enumerate(spans):
        alone = torch.zeros_like(q)
        alone[0] = q[row]
        cut_k, cut_v = k[:, start:end].contiguous(), v[:, start:end].contiguous()
        assert same_bytes(reference.sdpa_rows(alone, cut_k, cut_v, [(0, end - start)])[0], block[row]), row
    for x in poisoned:
        x[:, spans[0][1] :] = float("nan")
    assert same_bytes(reference.sdpa_rows(q, *poisoned, spans[:1])[0], block[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_and_argmax(dtype: torch.dtype) -> None:
    """A rounding per op, in order; ties go to the lowest id, also when they arise from the cap."""
    logits = random(MAX_ROWS, 640, dtype=dtype, seed=18, scale=20)
    capped = reference.softcap(logits, 30.0)
    assert error(capped, 30 * torch.tanh(logits.double() / 30)) < tolerance(
        dtype, FP32_ELEMENTWISE, BF16_ROUNDING_PER_OP
    )
    for rows in range(1, MAX_ROWS):
        assert same_bytes(reference.softcap(logits[:rows], 30.0), capped[:rows])
    tied = torch.zeros(2, 640, dtype=dtype)
    tied[0, [600, 17, 18]] = 5.0
    assert reference.argmax(tied) == [17, 0]


def test_embed_rounds_the_product() -> None:
    """The scale is rounded before the product: bf16 has 73.5 for sqrt(5376), not 73.32."""
    table = random(40, 32, dtype=torch.bfloat16, seed=19)
    scale = torch.tensor(math.sqrt(5376), dtype=torch.bfloat16)
    found = reference.embed(table, torch.tensor([3, 39, 3]), scale)
    assert float(scale) == 73.5
    assert same_bytes(found, (table[[3, 39, 3]].float() * 73.5).bfloat16())
    assert same_bytes(table, random(40, 32, dtype=torch.bfloat16, seed=19))


def test_same_bytes() -> None:
    """Bytes, not values: NaN equals itself, the two zeros differ, nothing is not the same as nothing."""
    nan = torch.full((3,), float("nan"))
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bytes(torch.zeros(0), torch.zeros(0))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert not same_bytes(torch.zeros(2), torch.zeros(1, 2))


def test_backends() -> None:
    """An unknown backend is refused with the names of the known ones."""
    assert kernels_for("reference").backend == "reference"
    with pytest.raises(ValueError, match=f"'tritn'; known backends: {', '.join(BACKENDS)}"):
        kernels_for("tritn")
