"""A head read through a copy in 8 bits: the token of the head itself, whatever the copy gets wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not built for this platform")

from support_rowops import DEVICE

from kernels.argmax import LEAST as LEAST_KEY
from kernels.argmax import head_best
from kernels.launch import LaunchShape, launch_shape
from kernels.qmv import qmv
from kernels.repack import PackedWeight, dequantize_packed, pack_dense
from kernels.rows import Rows, pack_rows
from kernels.screened_head import quantized, screened_best

LEAST = LEAST_KEY.value
WIDTH, ROWS = 64, 1100
"""Two blocks of columns, of which the last has 76 rows."""
SHAPE = LaunchShape(512, 1, 2, 2, 1)

nan_arithmetic = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


def halves(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Seeded bf16."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(torch.bfloat16).to(DEVICE)


def row_zero(x: Tensor) -> Tensor:
    """bf16 [8, K] with x in row 0 and NaN, which must not count, in the others."""
    rows = torch.full((8, len(x)), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    rows[0] = x
    return rows


def whole(x: Tensor, head: PackedWeight) -> Tensor:
    """Row 0's largest key of the head's own sums."""
    nothing = torch.zeros(1, device=DEVICE)
    return head_best(qmv(Rows(x, nothing, nothing, 16), head, 1), 1, None)[0].max()


def screened(x: Tensor, head: PackedWeight, copy: PackedWeight, reach: Tensor) -> Tensor:
    """Row 0's keys, found through the copy."""
    return screened_best(qmv(pack_rows(x, 8, 1), copy, 1), x, head, copy, reach)[0]


def outliers(weight: Tensor) -> Tensor:
    """A first input a thousand times as large in every group: in the copy the others are then all the same."""
    weight[:, ::64] = 100.0
    return weight


def ties(weight: Tensor) -> Tensor:
    """The same winner in three blocks and programs; the first must win."""
    weight[:] *= 0.125
    weight[77] = weight[500] = weight[1090] = halves(WIDTH, seed=2).abs()
    return weight


HEADS = {
    "random": lambda w: w,
    "ties": ties,
    "outliers": outliers,
    "nearly the same rows": lambda w: w[:1].repeat(ROWS, 1) + (w * 2.0**-6).to(torch.bfloat16),
    "constant rows": lambda w: w[:, :1].repeat(1, WIDTH),
    "all alike": lambda w: torch.ones_like(w),
}


QUICK = {"random", "ties", "outliers"}


@nan_arithmetic
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HEADS]
)
def test_the_token_is_the_heads_own(name: str) -> None:
    """Another token would be another drafter: the first of ties, with large, small and negative logits."""
    head = pack_dense(HEADS[name](halves(ROWS, WIDTH, seed=1, scale=0.1)).contiguous(), SHAPE)
    copy, reach = quantized(head, SHAPE)
    for seed, scale in ((3, 1.0), (4, -30.0)):
        x = halves(WIDTH, seed=seed, scale=scale)
        x[::64] = 0.0  # outliers do not count in the sums
        if name == "ties":
            x = x.abs()
        found = screened(row_zero(x), head, copy, reach)
        assert found.max() == whole(row_zero(x), head), seed
        assert (found > LEAST).any()


@nan_arithmetic
def test_sums_are_within_reach() -> None:
    """The bound that everything rests on, tried with rows that make the most of the copy's error."""
    weight = outliers(halves(ROWS, WIDTH, seed=6, scale=0.1))
    head = pack_dense(weight, SHAPE)
    copy, reach = quantized(head, SHAPE)
    nothing = torch.zeros(1, device=DEVICE)
    closest = 0.0
    for row in (0, 5, 700):
        x = weight[row].clone()
        x[::64] = 0.0
        mine = qmv(Rows(row_zero(x), nothing, nothing, 16), head, 1).sum(0)[0]
        its = qmv(pack_rows(row_zero(x), 8, 1), copy, 1).sum(0)[0]
        off = ((mine - its).abs().max() / x.double().norm()).item()
        assert off <= reach.item()
        closest = max(closest, off / reach.item())
    assert closest > 0.3  # a bound of infinity would hold as well, and screen nothing


def test_a_wider_row_may_be_further_off() -> None:
    """Sums of more steps round more often: a bound for rows of 1,024 would be too small for rows of 2,048."""
    reaches = {}
    for width in (64, 1024, 2048):
        head = pack_dense(torch.ones(64, width, dtype=torch.bfloat16, device=DEVICE), LaunchShape(64, 1, 2, 2, 1))
        copy, reach = quantized(head)  # which has no error, so that rounding alone is left
        assert torch.equal(dequantize_packed(copy), torch.ones_like(dequantize_packed(copy)))
        reaches[width] = reach.item() / (2 * width**0.5)
    assert reaches[64] == pytest.approx(reaches[1024])
    assert reaches[2048] == pytest.approx(2 * reaches[1024])


@nan_arithmetic
def test_without_its_reach_the_copy_would_pick_another() -> None:
    """The tests above would show a bound that is too small."""
    head = pack_dense(outliers(halves(ROWS, WIDTH, seed=1, scale=0.1)), SHAPE)
    copy, reach = quantized(head, SHAPE)
    x = halves(WIDTH, seed=3)
    x[::64] = 0.0
    x = row_zero(x)
    assert screened(x, head, copy, reach).max() == whole(x, head)
    assert screened(x, head, copy, torch.zeros_like(reach)).max() != whole(x, head)


@nan_arithmetic
def test_rows_that_cannot_win_are_not_read() -> None:
    """What is saved is their bytes."""
    weight = halves(ROWS, WIDTH, seed=7, scale=0.1)
    weight[640] = halves(WIDTH, seed=8).abs()
    head = pack_dense(weight, SHAPE)
    copy, reach = quantized(head, SHAPE)
    x = row_zero(halves(WIDTH, seed=9).abs())
    expected = whole(x, head)
    kept = head.codes[1, :, 128:192].clone()
    head.codes.fill_(float("nan"))
    head.codes[1, :, 128:192] = kept
    found = screened(x, head, copy, reach)
    assert found.max() == expected
    assert (found > LEAST).sum() == 1


@nan_arithmetic
def test_nan_wins_as_it_does_in_the_head() -> None:
    """A state that is not finite says nothing of which rows could win: all are read."""
    head = pack_dense(halves(ROWS, WIDTH, seed=1, scale=0.1), SHAPE)
    copy, reach = quantized(head, SHAPE)
    x = row_zero(torch.full((WIDTH,), float("nan")))
    found = screened(x, head, copy, reach)
    assert found.max() == whole(x, head)
    assert (found > LEAST).all()


def test_what_does_not_belong_together_is_refused() -> None:
    """A head whose sums come in parts, a copy of another head."""
    weight = halves(ROWS, WIDTH, seed=1)
    head, parted = pack_dense(weight, SHAPE), pack_dense(weight, LaunchShape(512, 1, 2, 2, 2))
    with pytest.raises(ValueError, match="it takes bf16, whole rows"):
        quantized(parted)
    copy, reach = quantized(head, SHAPE)
    sums, x = torch.zeros(copy.shape.split, 8, ROWS, device=DEVICE), row_zero(weight[0])
    with pytest.raises(ValueError, match="was not screened"):
        screened_best(sums, x, parted, copy, reach)
    with pytest.raises(ValueError, match="for a head of 64x64"):
        screened_best(sums, x, pack_dense(weight[:64].contiguous(), SHAPE), copy, reach)
    with pytest.raises(ValueError, match="sums"):
        screened_best(sums[:, :, :-1], x, head, copy, reach)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_drafters_head_on_the_device() -> None:
    """The 31B drafter's head: random states and its own rows as states, again and again, and in a graph."""
    rows, width = 262144, 1024
    weight = torch.randn(rows, width, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * 0.02
    head = pack_dense(weight.to(torch.bfloat16), launch_shape(width, rows, 16))
    copy, reach = quantized(head)
    x = row_zero(torch.zeros(width))
    graph = torch.cuda.CUDAGraph()
    screened(x, head, copy, reach)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        recorded = screened(x, head, copy, reach)
    for seed in range(40):
        x[0] = halves(width, seed=seed) if seed % 2 else weight[seed * 6151].to(torch.bfloat16)
        expected = whole(x, head)
        for _ in range(10):
            found = screened(x, head, copy, reach)
            assert found.max() == expected
            graph.replay()
            assert recorded.max() == expected
        assert (found > LEAST).sum() < 40
