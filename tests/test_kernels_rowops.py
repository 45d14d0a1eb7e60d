"""Row-wise kernels: values against float64 and the reference, rows and fused launches on bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from support_rowops import (
    DEVICE,
    EPS,
    by_row,
    every_bf16,
    geglu_composed,
    halves,
    head_ops,
    partials_of,
    random,
    residual_ops,
    rounded_once,
    rows_hold,
    same_rows,
    unpacked,
    weight,
)
from torch import Tensor

from kernels import argmax, fused_norms, geglu, reference, rmsnorm, rope
from kernels.jit import INTERPRETED, launch_options
from kernels.rows import new_rows, sum_partials
from kernels.testing import poison, same_bytes

overflows = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
"""numpy, under the interpreter, announces the infinities that a test puts in on purpose."""


def exact_norm(x: Tensor, w: Tensor | None) -> Tensor:
    """The norm in float64."""
    wide = x.double()
    out = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return out if w is None else out * w.double()


@pytest.mark.parametrize("shape", [(2, 16), (8, 192), (2, 257), (2, 320), (4, 3, 64), (2, 4096)], ids=str)
def test_rmsnorm(shape: tuple[int, ...]) -> None:
    """One rounding, weight used as it is, per head where it has heads; a wide row takes the folds of the tree."""
    x, per_row = halves(*shape, seed=1, scale=3), weight(*shape[1:], seed=2)
    before = x.clone()
    assert rounded_once(rmsnorm.rmsnorm(x, per_row, EPS), exact_norm(x, per_row))
    assert rounded_once(rmsnorm.rmsnorm(x, None, EPS), exact_norm(x, None))
    assert same_bytes(x, before)


def test_rmsnorm_takes_a_slice_of_heads() -> None:
    """The engine norms `heads[:, queries:]`: a view must not be read as if it were contiguous."""
    x = halves(2, 4, 32, seed=3)
    assert same_bytes(rmsnorm.rmsnorm(x[:, 1:3], None, EPS), rmsnorm.rmsnorm(x, None, EPS)[:, 1:3].contiguous())


def test_rmsnorm_rows() -> None:
    """A row's sum of squares is its own."""
    w = weight(192, seed=4)
    rows_hold(lambda x, m: rmsnorm.rmsnorm(x, w, EPS), [halves(8, 192, seed=5)])


@pytest.mark.parametrize(("width", "bits"), [(192, 4), (320, 8), (64, 16)], ids=str)
def test_norm_rows_is_the_norm_and_the_packing(width: int, bits: int) -> None:
    """The fused launch has the plain ops' bytes; rows that are not real are left alone."""
    h, w, normed = halves(8, width, seed=6, scale=2), weight(width, seed=7), poison(halves(8, width))
    expected = rmsnorm.rmsnorm(h, w, EPS)
    found = fused_norms.norm_rows(h, w, EPS, 5, bits, normed=normed)
    assert same_bytes(unpacked(found)[:5], expected[:5])
    assert same_bytes(normed[:5], expected[:5])
    assert normed[5:].isnan().all()
    again = new_rows(width, bits, h.device)
    for part in (again.values, again.sums, again.scales):
        poison(part)
    fused_norms.norm_rows(h, w, EPS, 3, bits, out=again)
    assert same_rows(again, found, 3)
    assert again.values[3:].isnan().all()
    assert again.sums[:, 3:].isnan().all()
    sums = expected.float().view(8, -1, 64).sum(-1).T
    torch.testing.assert_close(found.sums[:, :5], sums[:, :5], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("width", "split", "scalar", "bits"),
    [(192, 1, True, 4), (192, 3, False, 8), (320, 2, True, 8), (64, 8, False, 4)],
    ids=str,
)
def test_residual_norm_rows_is_the_ops_in_a_row(width: int, split: int, scalar: bool, bits: int) -> None:
    """Partials in index order, and a rounding after the sum, the norm, the add, the scalar and the next norm."""
    partials, residual = random(split, 8, width, seed=8), halves(8, width, seed=9, scale=4)
    post, following = weight(width, seed=10), weight(width, seed=11)
    layer = torch.tensor([0.7305], dtype=torch.bfloat16, device=DEVICE) if scalar else None
    h, plain, packed = residual_ops(partials, residual, post, layer, following, bits)
    out, normed = poison(torch.empty_like(residual)), poison(torch.empty_like(residual))
    found, rows = fused_norms.residual_norm_rows(
        partials, residual, post, layer, following, EPS, 6, bits, out=out, normed=normed
    )
    assert found is out
    assert rows is not None
    assert same_bytes(out[:6], h[:6])
    assert same_bytes(normed[:6], plain[:6])
    assert same_rows(rows, packed, 6)
    assert out[6:].isnan().all()
    assert normed[6:].isnan().all()
    alone, none = fused_norms.residual_norm_rows(partials, residual, post, layer, None, EPS, 8, bits)
    assert none is None
    assert same_bytes(alone, h)


def test_residual_norm_rows_follows_the_reference() -> None:
    """The roundings are those of `engine.layers` with reference ops: `rmsnorm(y) + h`, times the layer scalar."""
    partials, residual = random(3, 8, 192, seed=12), halves(8, 192, seed=13)
    post, scalar = weight(192, seed=14), torch.tensor([1.1562], dtype=torch.bfloat16, device=DEVICE)
    y = (partials[0] + partials[1] + partials[2]).to(torch.bfloat16)
    h = reference.rmsnorm(y, post, EPS).add_(residual).mul_(scalar)
    found, _ = fused_norms.residual_norm_rows(partials, residual, post, scalar, None, EPS, 8, 4)
    assert float((found != h).double().mean()) < 0.002


def test_residual_norm_rows_rows() -> None:
    """Both sums and both outputs of a row are its own."""
    post, following = weight(64, seed=15), weight(64, seed=16)

    def op(partials: Tensor, residual: Tensor, rows: int) -> list[Tensor]:
        h, packed = fused_norms.residual_norm_rows(partials_of(partials), residual, post, None, following, EPS, rows, 8)
        assert packed is not None
        return [h, *by_row(packed)]

    rows_hold(op, [random(8, 2, 64, seed=17), halves(8, 64, seed=18)])


@pytest.mark.parametrize("width", [24, 64])
def test_rope_has_the_bytes_of_the_reference(width: int) -> None:
    """Only products and sums: no tolerance is needed, in either form."""
    x, cos, sin = halves(3, 2, width, seed=19), random(3, 1, width, seed=20), random(3, 1, width, seed=21)
    row, general = rope.rope_row(x, cos, sin), rope.rope_general(x, cos, sin)
    assert same_bytes(row.cpu(), reference.rope_row(x.cpu(), cos.cpu(), sin.cpu()))
    assert same_bytes(general.cpu(), reference.rope_general(x.cpu(), cos.cpu(), sin.cpu()))
    assert not same_bytes(row, general)
    assert rounded_once(row, x.double() * cos.double() + x.double().roll(width // 2, -1) * sin.double())


class HeadCase:
    """Operands of `head_norms_rope`, and caches whose every other slot must stay as it was."""

    def __init__(self, heads: int, kv_heads: int, k_eq_v: bool, width: int, split: int, ring: int, slots: int) -> None:
        self.heads, self.kv_heads, self.k_eq_v, self.ring, self.slots = heads, kv_heads, k_eq_v, ring, slots
        self.all_heads = heads + kv_heads * (1 if k_eq_v else 2)
        self.partials = random(split, 8, self.all_heads * width, seed=22)
        self.norms = weight(self.all_heads, width, seed=23)
        self.cos, self.sin = random(40, width, seed=24), random(40, width, seed=25)

    def caches(self) -> tuple[Tensor | None, Tensor | None]:
        shape = (self.kv_heads, self.slots, self.norms.shape[-1])
        k, v = (poison(halves(*shape)) if self.kv_heads else None for _ in "kv")
        return k, v

    def run(self, partials: Tensor, position: int, rows: int, general: bool = False, out: Tensor | None = None):  # type: ignore[no-untyped-def]
        k, v = self.caches()
        q = rope.head_norms_rope(
            partials,
            self.norms,
            self.cos,
            self.sin,
            torch.tensor([position], dtype=torch.int32, device=DEVICE),
            rows,
            self.heads,
            self.kv_heads,
            self.k_eq_v,
            EPS,
            k,
            v,
            self.ring,
            general,
            out,
        )
        return q, k, v


SLIDING = (2, 1, False, 16, 2, 11, 13)
FULL = (2, 1, True, 32, 1, 16, 16)


@pytest.mark.parametrize(("case", "general"), [(SLIDING, True), (FULL, False)], ids=["v-of-its-own", "k-is-v"])
def test_head_norms_rope_is_the_ops_in_a_row(case: tuple[int, int, bool, int, int, int, int], general: bool) -> None:
    """q, k and v as `engine.layers` computes them; k and v in the ring's slots, over its end, and nowhere else."""
    c, position, rows = HeadCase(*case), 28, 6
    at = slice(position, position + 8)
    q, k, v = head_ops(c.partials, c.norms, c.cos[at, None], c.sin[at, None], c.heads, c.kv_heads, c.k_eq_v, general)
    out = poison(torch.empty_like(q))
    found, k_cache, v_cache = c.run(c.partials, position, rows, general, out)
    assert same_bytes(found[:rows], q[:rows])
    assert found[rows:].isnan().all()
    written = [(position + r) % c.ring for r in range(rows)]
    for cache, rows_of in ((k_cache, k), (v_cache, v)):
        assert same_bytes(cache[:, written].transpose(0, 1).contiguous(), rows_of[:rows])
        others = [slot for slot in range(c.slots) if slot not in written]
        assert cache[:, others].isnan().all()


def test_head_norms_rope_of_a_drafter_has_queries_alone() -> None:
    """No keys, no caches."""
    c = HeadCase(1, 0, False, 16, 1, 0, 0)
    q, _, _ = head_ops(c.partials, c.norms, c.cos[7:15, None], c.sin[7:15, None], 1, 0, False, False)
    assert same_bytes(c.run(c.partials, 7, 8)[0], q)


@pytest.mark.parametrize("case", [SLIDING, FULL], ids=["v-of-its-own", "k-is-v"])
def test_head_norms_rope_rows(case: tuple[int, int, bool, int, int, int, int]) -> None:
    """Row r of a block at position p has the bytes of a one-row call at p + r, beside NaN too."""
    c, position = HeadCase(*case), 5
    for rows in (3, 8):
        block = c.partials.clone()
        block[:, rows:] = float("nan")
        q, k, v = c.run(block, position, rows)
        for r in {2, rows - 1}:
            alone = torch.full_like(block, float("nan"))
            alone[:, 0] = block[:, r]
            one_q, one_k, one_v = c.run(alone, position + r, 1)
            slot = (position + r) % c.ring
            assert same_bytes(one_q[0], q[r]), (rows, r)
            assert same_bytes(one_k[:, slot], k[:, slot]), (rows, r)
            assert same_bytes(one_v[:, slot], v[:, slot]), (rows, r)


@overflows
def test_geglu_rounds_the_exact_value_for_every_bf16() -> None:
    """Both signs and both tails: gelu_tanh in float64, rounded; the negative tail keeps its digits down to 1e-37."""
    x = every_bf16()
    wide = x.double()
    exact = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    tail = exact.abs() < 1e-37
    one = torch.ones_like(x)
    for found in (geglu.geglu_fused(x, one), geglu.geglu_ops(x, one)):
        assert float((found != exact.to(torch.bfloat16))[~tail & ~exact.isnan()].double().mean()) < 0.001
        assert (found.double() - exact)[tail].abs().max() < 1e-37
        assert torch.equal(found.isnan(), exact.isnan())
    expected = reference.geglu_fused(x.cpu(), one.cpu())
    near = ((x.cpu().abs() < 2) | (x.cpu() > 0)) & (expected.abs() > 2**-126)  # beyond, the tanh form has no digits
    assert float((found.cpu() != expected)[near].double().mean()) < 0.001


def test_geglu_forms() -> None:
    """One rounding against a rounding per op: different on purpose, and each as its definition says."""
    gate, up = halves(8, 192, seed=26, scale=2), halves(8, 192, seed=27)
    wide = gate.double()
    exact = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    assert rounded_once(geglu.geglu_fused(gate, up), exact * up.double())
    assert float((geglu.geglu_ops(gate, up) != exact.to(torch.bfloat16) * up).double().mean()) < 0.002
    assert not same_bytes(geglu.geglu_ops(gate, up), geglu.geglu_fused(gate, up))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "ops"])
@pytest.mark.parametrize(("width", "split", "bits"), [(192, 1, 4), (320, 2, 8), (64, 3, 16)], ids=str)
def test_geglu_rows_is_the_ops_in_a_row(width: int, split: int, bits: int, fused: bool) -> None:
    """gate is the first half of the columns, up the second; both are rounded before the op."""
    partials = random(split, 8, 2 * width, seed=28)
    out = new_rows(width, bits, partials.device)
    poison(out.values)
    found = geglu.geglu_rows(partials, 5, bits, fused, out=out)
    assert same_rows(found, geglu_composed(partials, bits, fused), 5)
    assert found.values[5:].isnan().all()


def test_geglu_rows_rows() -> None:
    """Elementwise, but the packing takes a group's largest value and sum: a row's own."""

    def op(partials: Tensor, rows: int) -> list[Tensor]:
        return by_row(geglu.geglu_rows(partials_of(partials), rows, 8, True))

    rows_hold(op, [random(8, 2, 256, seed=29)])


@overflows
@pytest.mark.parametrize("cap", [30.0, 7.0])
def test_softcap_has_the_bytes_of_the_reference(cap: float) -> None:
    """Every bf16: a rounding per op, and exactly the cap where tanh has become 1."""
    x = every_bf16()
    found, expected = argmax.softcap(x, cap).cpu(), reference.softcap(x.cpu(), cap)
    assert torch.equal(found.isnan(), expected.isnan())
    different = found.nan_to_num(0.5).view(torch.int16) != expected.nan_to_num(0.5).view(torch.int16)
    assert int(different.sum()) <= (0 if INTERPRETED.value else 2)  # a card's exp2 may move a near tie
    far = x.cpu().abs() > 10 * cap
    assert (found[far].abs() == cap).all()


@triton.jit
def _tanh(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, argmax.tanh(tl.load(x_ptr + at)))


def test_tanh_is_within_two_ulp() -> None:
    """Near 0, where the quotient would cancel, at the seam of the two forms, and far out."""
    x = torch.cat((torch.linspace(-1, 1, 1 << 14), torch.linspace(-12, 12, 1 << 14))).to(DEVICE)
    found = torch.empty_like(x)
    _tanh[(x.numel() // 4096,)](x, found, BLOCK=4096, **launch_options(x.device, 4))
    exact = torch.tanh(x.double())
    size = exact.abs().float()
    ulp = torch.nextafter(size, torch.full_like(size, 2.0)).double() - size.double()
    assert ((found.double() - exact).abs() / ulp).max() < 2


def logits_with_traps(width: int) -> Tensor:
    """Ties in and across blocks, NaN, infinities, zeros of both signs, all negative, the last column."""
    x = halves(8, width, seed=30)
    x[0, [5, width - 1]] = 9.0
    x[1, [7, 1030, width - 2]] = float("nan")
    x[2] = -0.0
    x[2, 77] = 0.0
    x[3] = float("-inf")
    x[4] = -x[4].abs() - 1
    x[5, [3, 1100]] = float("inf")
    x[6, width - 1] = 100.0
    return x


@pytest.mark.parametrize("width", [1101, 2112])
def test_argmax(width: int) -> None:
    """As numpy has it: the lowest index of the largest value, the first NaN before everything."""
    x = logits_with_traps(width)
    found = argmax.argmax(x)
    assert found.dtype == torch.int32
    assert found.tolist() == reference.argmax(x)
    assert argmax.argmax(x[:1]).tolist() == found.tolist()[:1]


@pytest.mark.parametrize("cap", [None, 30.0])
def test_head_argmax_is_the_ops_in_a_row(cap: float | None) -> None:
    """The cap makes ties of different logits, so it comes before the argmax; other rows and their ids stay."""
    partials = random(2, 8, 1101, seed=31, scale=40)
    plain = sum_partials(partials)
    expected = plain if cap is None else argmax.softcap(plain, cap)
    ids, logits = torch.full((8,), -7, dtype=torch.int32, device=DEVICE), poison(torch.empty_like(plain))
    found, kept = argmax.head_argmax(partials, 6, cap, out=ids, logits=logits)
    assert found is ids
    assert kept is logits
    assert ids.tolist() == [*reference.argmax(expected)[:6], -7, -7]
    assert same_bytes(logits[:6], expected[:6])
    assert logits[6:].isnan().all()
    assert cap is None or reference.argmax(expected) != reference.argmax(plain)
    assert argmax.head_argmax(partials, 8, cap)[1] is None


def test_head_argmax_rows() -> None:
    """Ids and logits of a row are its own, beside NaN too."""

    def op(partials: Tensor, rows: int) -> list[Tensor]:
        partials = partials_of(partials)
        ids, logits = argmax.head_argmax(partials, rows, 30.0, logits=halves(8, 1030))
        assert logits is not None
        return [ids, logits]

    rows_hold(op, [random(8, 2, 1030, seed=32)])


def refusals() -> list[tuple[str, Callable[[], object]]]:
    """(part of the message, a call that must be refused)."""
    x, w, p = halves(8, 64), weight(64), random(1, 8, 64)
    c = HeadCase(*SLIDING)
    return [
        ("weight", lambda: rmsnorm.rmsnorm(x, weight(3, 64), EPS)),
        ("bfloat16", lambda: rmsnorm.rmsnorm(x.float(), w, EPS)),
        ("0 rows", lambda: fused_norms.norm_rows(x, w, EPS, 0, 4)),
        ("9 rows", lambda: fused_norms.norm_rows(x, w, EPS, 9, 4)),
        ("aligned", lambda: fused_norms.norm_rows(halves(8, 128)[:, ::2], w, EPS, 1, 4)),
        ("multiple of 64", lambda: fused_norms.norm_rows(halves(8, 96), weight(96), EPS, 1, 4)),
        ("8 bits given", lambda: fused_norms.norm_rows(x, w, EPS, 1, 4, out=new_rows(64, 8, x.device))),
        ("scalar", lambda: fused_norms.residual_norm_rows(p, x, w, w.bfloat16(), w, EPS, 1, 4)),
        ("another buffer", lambda: fused_norms.residual_norm_rows(p, x, w, None, w, EPS, 1, 4, out=x)),
        ("next_weight", lambda: fused_norms.residual_norm_rows(p, x, w, None, None, EPS, 1, 4, normed=x)),
        ("odd", lambda: rope.rope_row(halves(8, 1, 15), random(8, 1, 15), random(8, 1, 15))),
        ("rope_general: cos", lambda: rope.rope_general(halves(8, 1, 16), random(8, 16), random(8, 16))),
        ("columns", lambda: c.run(random(1, 8, 48), 0, 1)),
        ("ring", lambda: HeadCase(2, 1, False, 16, 2, 14, 13).run(c.partials, 0, 1)),
        ("power of two", lambda: HeadCase(1, 0, False, 48, 1, 0, 0).run(random(1, 8, 48), 0, 1)),
        ("whole groups", lambda: geglu.geglu_rows(p, 1, 4, True)),
        ("up", lambda: geglu.geglu_fused(x, halves(8, 32))),
        ("bfloat16", lambda: argmax.argmax(x.float())),
        ("no values", lambda: argmax.argmax(x[:0])),
        ("keys", lambda: argmax.head_argmax(p, 1, None, keys=argmax.head_keys(5000, p.device))),
    ]


@pytest.mark.parametrize("index", range(20))
def test_what_does_not_fit_is_refused(index: int) -> None:
    """The message says where and what."""
    message, call = refusals()[index]
    with pytest.raises(ValueError, match=message):
        call()
