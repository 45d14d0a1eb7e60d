"""`down` on gate_up's sums: the bytes of GeGLU and the product in two launches, whatever lies in other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="triton is not built for this platform")

import triton
import triton.language as tl  # noqa: F401  the interpreter looks for it where a kernel is written
from support_rowops import halves, holds_in_a_graph, random
from torch import Tensor

from engine.quantize import quantize
from kernels import Linear, gated_qmv, triton_backend
from kernels.gated_qmv import takes_sums
from kernels.geglu import geglu_rows, gelu_tanh
from kernels.jit import INTERPRETED, round_bf16
from kernels.launch import LaunchShape
from kernels.qmv import qmv
from kernels.repack import PackedWeight, pack_dense, pack_weight
from kernels.testing import as_integers, row_difference, same_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
"""numpy, under the interpreter, announces the infinities of gates far out."""

SHAPES = [
    (128, 96, LaunchShape(32, 1, 3, 1, 2), 64),
    (384, 80, LaunchShape(32, 2, 2, 1, 3), 128),
    (320, 64, LaunchShape(64, 1, 4, 2, 2), 32),
]
"""K, N, launch shape, rows a program: a last program that is not full, steps of two groups, a last part that is short,
a program of one tile."""


def matrix(width: int, features: int, shape: LaunchShape | None = None) -> PackedWeight:
    """A bf16 matrix of seeded values."""
    return pack_dense(halves(features, width, seed=1, scale=0.02), shape)


def gate_up(width: int, rows: int = 8) -> Tensor:
    """Sums [1, 8, 2 K] of which all rows past `rows` are NaN; gates on both sides of GeGLU's bend and far out."""
    sums = random(1, 8, 2 * width, seed=2, scale=3)
    sums[:, :, ::37] *= 20
    sums[:, rows:] = float("nan")
    return sums


def apart(sums: Tensor, weight: PackedWeight, rows: int) -> Tensor:
    """The two launches."""
    return qmv(geglu_rows(sums, rows, 16, True), weight, rows)[:, :rows]


@pytest.mark.parametrize(("width", "features", "shape", "per_program"), SHAPES, ids=str)
def test_it_has_the_bytes_of_two_launches(width: int, features: int, shape: LaunchShape, per_program: int) -> None:
    """Another rounding or another order of sums would be another drafter than the one that is probed."""
    weight = matrix(width, features, shape)
    for rows in range(1, 9) if per_program == 64 else (1, 5):
        sums = gate_up(width, rows)
        out = torch.full((shape.split, 8, features), 7.0, device=sums.device)
        gated_qmv.gated_qmv(sums, weight, rows, out, per_program)
        assert same_bytes(out[:, :rows], apart(sums, weight, rows)), rows
        assert bool((out[:, rows:] == 7.0).all()), rows


def test_rows_keep_their_bytes() -> None:
    """The row contract: any M, any slot, NaN next door."""
    weight = matrix(128, 40, LaunchShape(32, 1, 2, 1, 2))

    def op(x: Tensor, rows: int) -> Tensor:
        return gated_qmv.gated_qmv(x[None].contiguous(), weight, rows, per_program=32).transpose(0, 1)

    assert row_difference(op, [gate_up(128)[0]]) is None


@triton.jit
def _unrounded(x):
    return x


@triton.jit
def _rounded_gelu(x):
    return round_bf16(gelu_tanh(x))


FAULTS = {"sums as they are": ("_rounded", _unrounded), "a rounding per op": ("gelu_tanh", _rounded_gelu)}


@pytest.mark.skipif(not INTERPRETED.value, reason="a compiled kernel does not look its helpers up again")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rounding_is_another_result(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparison above would say nothing about the rounding points."""
    weight, sums = matrix(256, 64, LaunchShape(32, 1, 2, 1, 2)), gate_up(256)
    expected = apart(sums, weight, 8)
    assert same_bytes(gated_qmv.gated_qmv(sums, weight), expected)
    monkeypatch.setattr(gated_qmv, *FAULTS[fault])
    found = gated_qmv.gated_qmv(sums, weight)
    assert float((as_integers(found) != as_integers(expected)).double().mean()) > 0.5


def linear(weight: PackedWeight) -> Linear:
    """The matrix as the engine holds it."""
    return Linear(weight.out_features, weight.in_features, weight.bits, torch.bfloat16, "qmv", weight)


def test_what_it_cannot_take_goes_in_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in several parts would lose all but the first; another matrix or GeGLU with a rounding per op, its bytes."""
    taken: list[int] = []

    def noted(*operands: object, **options: object) -> Tensor:
        taken.append(1)
        return gated_qmv.gated_qmv(*operands, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_backend, "gated_qmv", noted)
    dense = matrix(128, 32, LaunchShape(32, 1, 2, 1, 1))
    packed = pack_weight(*quantize(halves(32, 128, seed=3), 4), 4, LaunchShape(32, 1, 2, 1, 1))
    one, two = gate_up(128), torch.cat((gate_up(128), gate_up(128) * 0.7))
    for sums, weight, fused, direct in (
        (one, dense, True, 1),
        (two, dense, True, 0),
        (one, packed, True, 0),
        (one, dense, False, 0),
    ):
        taken.clear()
        found = triton_backend.gated(sums, linear(weight), 2, fused)
        expected = qmv(geglu_rows(sums, 2, weight.bits, fused), weight, 2)
        assert same_bytes(found[:, :2], expected[:, :2])
        assert len(taken) == direct
        assert takes_sums(sums, weight) or not direct


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("takes 16", lambda d, q, s: gated_qmv.gated_qmv(s, q)),
        ("9 rows", lambda d, q, s: gated_qmv.gated_qmv(s, d, 9)),
        ("power of two", lambda d, q, s: gated_qmv.gated_qmv(s, d, 1, None, 96)),
        ("sums: expected torch.float32 1x8x128", lambda d, q, s: gated_qmv.gated_qmv(torch.cat((s, s)), d)),
        ("sums: expected torch.float32 1x8x128", lambda d, q, s: gated_qmv.gated_qmv(s[:, :, :64].contiguous(), d)),
        ("out: expected torch.float32 1x8x32", lambda d, q, s: gated_qmv.gated_qmv(s, d, 1, s)),
    ],
    ids=range(6),
)
def test_bad_operands_are_refused(message: str, call: Callable[[PackedWeight, PackedWeight, Tensor], object]) -> None:
    """Where, what and what to do, instead of a wrong product."""
    shape = LaunchShape(32, 1, 2, 1, 1)
    packed = pack_weight(*quantize(halves(32, 64, seed=3), 4), 4, shape)
    with pytest.raises(ValueError, match=message):
        call(matrix(64, 32, shape), packed, gate_up(64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: this is the drafter's own shape")
@pytest.mark.parametrize("per_program", [32, 64, 128, 256])
def test_a_drafters_down_on_a_gpu(per_program: int) -> None:
    """Bytes of the two launches at every M, the row contract, and the same bytes from graph replays."""
    weight = matrix(8192, 1024)

    def op(x: Tensor, rows: int) -> Tensor:
        return gated_qmv.gated_qmv(x[None].contiguous(), weight, rows, per_program=per_program).transpose(0, 1)

    for rows in range(1, 9):
        sums = gate_up(8192, rows)
        assert same_bytes(
            gated_qmv.gated_qmv(sums, weight, rows, per_program=per_program)[:, :rows], apart(sums, weight, rows)
        )
    sums = gate_up(8192)
    assert row_difference(op, [sums[0]]) is None
    holds_in_a_graph(lambda: [gated_qmv.gated_qmv(sums, weight, per_program=per_program)])
