"""Products that finish their own sums: the bytes of their consumers, in any order of arrival, and counters at zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not built for this platform")

import triton
import triton.language as tl
from support_rowops import DEVICE, EPS, by_row, halves, random, rows_hold, same_rows, weight
from triton.runtime.interpreter import interpreter_builder

from engine.quantize import quantize
from kernels import Stored, Weight, finishing, qmv, triton_backend
from kernels.fused_norms import residual_norm_rows
from kernels.geglu import geglu_rows
from kernels.jit import INTERPRETED
from kernels.launch import TABLE, Finish, LaunchShape
from kernels.products import Squared, gated_product, product, sums_of
from kernels.repack import PackedWeight, pack_dense, pack_weight
from kernels.rows import Rows, pack_rows, sum_partials
from kernels.testing import same_bytes

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
in_turn = pytest.mark.skipif(not INTERPRETED.value, reason="takes the interpreter, where programs run in a known order")


def packed(rows: int, width: int, bits: int, shape: LaunchShape, seed: int = 0) -> PackedWeight:
    """A matrix [rows, width] of random values."""
    dense = halves(rows, width, seed=seed, scale=0.05)
    return pack_dense(dense, shape) if bits == 16 else pack_weight(*quantize(dense, bits), bits, shape)


def finished(weight: PackedWeight, finish: Finish) -> PackedWeight:
    """The same matrix, whose products finish their sums."""
    return replace(weight, shape=replace(weight.shape, finish=finish))


def in_index_order(partials: Tensor) -> Tensor:
    """fp32 [split, 8, N] -> [1, 8, N], as consumers add."""
    total = partials[0].clone()
    for part in partials[1:]:
        total += part
    return total[None]


def counted() -> int:
    """What the counters hold together."""
    return int(finishing.counters(halves(1).device).abs().sum())


def activations(width: int, bits: int, seed: int = 1) -> Rows:
    """Eight packed rows."""
    return pack_rows(halves(8, width, seed=seed), bits)


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of a launch run last first, so that a tile's last to arrive has its first part."""
    turn = interpreter_builder.set_grid_idx

    def turned(x: int, y: int, z: int) -> None:
        grid = interpreter_builder.grid_dim
        turn(*(size - 1 - index for size, index in zip(grid, (x, y, z), strict=True)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", turned)


# ---- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "split", "rows"),
    [
        (4, 5, 1),
        (8, 2, 3),
        (16, 5, 8),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((4, 2, 8), (8, 5, 1))),
    ],
    ids=str,
)
def test_finished_sums_are_the_partial_sums_in_index_order(bits: int, split: int, rows: int) -> None:
    """A last bit that differs here is another token somewhere; rows past M and columns past N stay untouched."""
    width, columns = 320, 80  # the last tile is not whole
    matrix, x = packed(columns, width, bits, LaunchShape(32, 1, 2, 2, split)), activations(width, bits)
    expected = in_index_order(qmv.qmv(x, matrix, rows))
    out = torch.full((1, 8, columns), 7.0, device=DEVICE)
    assert qmv.qmv(x, finished(matrix, "sum"), rows, out=out) is out
    assert same_bytes(out[:, :rows], expected[:, :rows])
    assert bool((out[:, rows:] == 7.0).all())
    assert counted() == 0


def test_a_launch_per_row_finishes_each_row() -> None:
    """The flag that turns multirow off changes no byte here either."""
    matrix, x = packed(64, 192, 4, LaunchShape(64, 1, 2, 2, 3, "squares")), activations(192, 4)
    together, apart = product(x, matrix, 3), product(x, matrix, 3, per_row=True)
    assert isinstance(together, Squared)
    assert isinstance(apart, Squared)
    assert same_bytes(apart.sums[:, :3], together.sums[:, :3])
    assert same_bytes(apart.squares[:3], together.squares[:3])
    assert apart.sums[:, 3:].isnan().all()  # torch.empty is NaN here: nobody wrote there
    assert counted() == 0


def test_negative_zeros_stay() -> None:
    """Parts past the last are added as -0.0: as 0.0 they would turn a sum of -0.0 around."""
    x = pack_rows(torch.zeros(8, 192, dtype=torch.bfloat16, device=DEVICE), 16)
    negative = torch.full((32, 192), -0.0, dtype=torch.bfloat16, device=DEVICE)
    negative.view(torch.int16).fill_(-32768)
    matrix = pack_dense(negative, LaunchShape(32, 1, 2, 2, 3))
    assert same_bytes(qmv.qmv(x, finished(matrix, "sum")), in_index_order(qmv.qmv(x, matrix)))


def test_two_products_in_turn_share_the_counters() -> None:
    """Other tiles, other splits, both kinds of count: what one leaves behind would make the next finish too early."""
    small = packed(96, 192, 4, LaunchShape(32, 1, 2, 2, 3))
    large = packed(128, 320, 8, LaunchShape(64, 1, 2, 2, 5), seed=3)
    x, y = activations(192, 4), activations(320, 8)
    first, second = in_index_order(qmv.qmv(x, small)), geglu_rows(qmv.qmv(y, large), 8, 4, True)
    for _ in range(2):
        assert same_bytes(sums_of(product(x, finished(small, "sum"), 8)), first)
        assert same_rows(gated_product(y, finished(large, "gated"), 8, 4, True), second, 8)
    assert counted() == 0


@in_turn
@pytest.mark.parametrize("finish", ["squares", "gated"])
def test_the_order_of_arrival_does_not_matter(finish: Finish, request: pytest.FixtureRequest) -> None:
    """On a card any program may be last; here the first part's is, then the last part's."""
    matrix, x = packed(128, 320, 4, LaunchShape(64, 1, 2, 2, 5, finish)), activations(320, 4)
    forwards = parts(matrix, x)
    request.getfixturevalue("backwards")
    assert all(same_bytes(a, b) for a, b in zip(parts(matrix, x), forwards, strict=True))
    assert counted() == 0


def parts(matrix: PackedWeight, x: Rows, rows: int = 8) -> list[Tensor]:
    """What a finishing product leaves, by row."""
    if matrix.shape.finish == "gated":
        return by_row(gated_product(x, matrix, rows, 8, True))
    found = product(x, matrix, rows)
    assert isinstance(found, Squared)
    return [found.sums[0], found.squares]


@pytest.mark.parametrize("finish", ["squares", "gated"])
def test_rows_keep_their_bytes(finish: Finish) -> None:
    """Any M, any slot, NaN next door: the last program reads and writes the rows that are there, each on its own."""
    matrix = packed(128, 128, 4, LaunchShape(64, 1, 2, 2, 2, finish))
    rows_hold(lambda x, rows: parts(matrix, pack_rows(x, 4, rows), rows), [halves(8, 128, seed=5)])


# ---- squares: the norm behind o and down ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "tile", "split", "rows"),
    [(336, 32, 3, 3), (1344, 128, 2, 2), pytest.param(1088, 512, 2, 1, marks=pytest.mark.slow)],
    ids=str,
)
def test_squares_save_a_meeting_and_no_byte(columns: int, tile: int, split: int, rows: int) -> None:
    """Rows in one program and in slices of 256, tiles narrower and wider than a slice, the last one not whole."""
    width = 64 * split
    matrix = packed(columns, width, 4, LaunchShape(tile, 1, 2, 1, split), seed=7)
    x, residual = activations(width, 4), halves(8, columns, seed=8)
    post, following, scalar = weight(columns, seed=9), weight(columns, seed=10), halves(1, seed=11)
    partials = qmv.qmv(x, matrix, rows)
    found = product(x, finished(matrix, "squares"), rows)
    assert isinstance(found, Squared)
    assert found.squares.shape == (8, -(-columns // tile))
    for scale, after in ((scalar, following if columns % 64 == 0 else None), (None, None)):
        h, packed_rows = residual_norm_rows(partials, residual, post, scale, after, EPS, rows, 8)
        out, ours = residual_norm_rows(found.sums, residual, post, scale, after, EPS, rows, 8, squares=found.squares)
        assert same_bytes(out[:rows], h[:rows])
        assert (ours is None) == (packed_rows is None)
        assert ours is None or packed_rows is None or same_rows(ours, packed_rows, rows)


def test_squares_of_another_shape_are_refused() -> None:
    """A launch that read past them would norm by noise."""
    partials, x, w = random(1, 8, 64), halves(8, 64), weight(64)
    with pytest.raises(ValueError, match=r"squares: expected torch\.float32 8x"):
        residual_norm_rows(partials, x, w, None, w, EPS, 1, 4, squares=random(1, 8))


# ---- gated: gate_up through GeGLU to the rows of down ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "split", "rows", "tile", "following", "fused"),
    [(4, 1, 3, 64, 4, True), (4, 5, 8, 128, 8, False), (8, 2, 1, 64, 16, True), (16, 5, 3, 128, 4, True)],
    ids=str,
)
def test_gated_rows_are_those_of_geglu(
    bits: int, split: int, rows: int, tile: int, following: int, fused: bool
) -> None:
    """One launch less and the same rows of down, with either rounding; rows past M are not written."""
    matrix, x = packed(256, 320, bits, LaunchShape(tile, 1, 2, 2, split), seed=4), activations(320, bits)
    expected = geglu_rows(qmv.qmv(x, matrix, rows), rows, following, fused)
    for finish, per_row in (("gated", False), ("gated late", True))[: 1 + (rows == 3)]:
        found = gated_product(x, finished(matrix, finish), rows, following, fused, per_row)
        assert same_rows(found, expected, rows)
        assert found.values[rows:].isnan().all()
        assert counted() == 0


@pytest.mark.parametrize(("columns", "tile"), [(384, 128), (128, 32)], ids=["a tile of both halves", "half a group"])
def test_what_cannot_be_gated_falls_back(columns: int, tile: int) -> None:
    """I no multiple of the tile, or a tile of less than a group: the sums are finished, GeGLU is a launch."""
    matrix, x = packed(columns, 192, 4, LaunchShape(tile, 1, 2, 2, 3)), activations(192, 4)
    expected = geglu_rows(qmv.qmv(x, matrix, 2), 2, 4, True)
    assert same_rows(gated_product(x, finished(matrix, "gated"), 2, 4, True), expected, 2)
    assert counted() == 0


# ---- the backend's ops, whatever the launch shapes say --------------------------------------------------------------


def test_the_fused_ops_take_finished_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every consumer of the bundle takes what a product yields, so that the engine need not know."""
    ops, found = triton_backend.FUSED, []
    for finish in ("no", "squares"):
        shape = LaunchShape(64, 1, 2, 2, 3, finish)
        monkeypatch.setattr("kernels.repack.launch_shape", lambda *_, shape=shape: shape)
        stored = Stored(*quantize(halves(128, 192, seed=2, scale=0.05), 4))
        w = triton_backend.prepare(Weight(halves(128, 192), 4, stored))
        x, h, norm = ops.pack(halves(8, 192, seed=3), 2, w), halves(8, 128, seed=4), weight(128, seed=5)
        y = ops.product(x, w, 2)
        assert isinstance(y, Squared) == (finish == "squares")
        out, rows = ops.residual(y, h, norm, None, norm, EPS, 2, w, None)
        gated, apart = ops.gated(x, w, 2, w, True), ops.gated_rows(x, w, 2, w, True)
        logits, _ = ops.head(y, 2, None, True)
        down = ops.geglu(y, 2, w, True)
        first, pick = ops.enter(y, norm, EPS, w)[0][:1], ops.pick(y)[:1]
        rest = [down.values, gated.values, apart.values, first, pick, logits, ops.product_rows(x, w, 2)]
        found.append([out, rows.values, *rest])
    for a, b in zip(found[0][:-1], found[1][:-1], strict=True):
        assert same_bytes(a[:2], b[:2])
    assert same_bytes(in_index_order(found[0][-1])[:, :2], found[1][-1].sums[:, :2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LaunchShape(64, 1, 2, 2, 3, "later"), "finish must be one of no, sum, squares, gated, gated late"),  # type: ignore[arg-type]
        (lambda: product(activations(64, 4), packed(32, 128, 4, LaunchShape(32, 1, 2, 2, 2, "squares")), 1), "K = 64"),
    ],
)
def test_bad_operands_are_refused(call: Callable[[], object], message: str) -> None:
    """As everywhere: where, what, what to do."""
    with pytest.raises(ValueError, match=message):
        call()


# ---- planted faults -------------------------------------------------------------------------------------------------


@triton.jit
def never_reset(counter_ptr, arrivals):
    """Leaves the counter as it is."""
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == arrivals - 1


@triton.jit
def first_is_last(counter_ptr, arrivals):
    """Lets the first program finish, which is not reset by anybody either way."""
    here = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    if here == arrivals - 1:
        tl.store(counter_ptr, 0)
    return here == 0


@triton.jit
def last_part_first(parts_ptr, offset, real, split, TILE: tl.constexpr):
    """Adds as they arrive when programs run backwards."""
    total = tl.load(parts_ptr + (split - 1) * (8 * TILE) + offset, mask=real, other=0.0)
    for part in tl.range(1, split):
        total += tl.load(parts_ptr + (split - 1 - part) * (8 * TILE) + offset, mask=real, other=0.0)
    return total


@triton.jit
def up_for_gate(gate_ptr, up_ptr, offset, real, split, TILE: tl.constexpr):
    """Swaps the two halves."""
    up, gate = totals(gate_ptr, up_ptr, offset, real, split, TILE)
    return gate, up


totals = finishing._totals
FAULTS = {
    "the counter is not reset": (qmv, "arrive", never_reset),
    "the first finishes": (qmv, "arrive", first_is_last),
    "parts in another order": (finishing, "_total", last_part_first),
    "gate and up swapped": (finishing, "_totals", up_for_gate),
}


@in_turn
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above would pass a finishing product with none of these."""
    matrix, x = packed(128, 192, 4, LaunchShape(64, 1, 2, 2, 3)), activations(192, 4)
    sums, rows = in_index_order(qmv.qmv(x, matrix)), geglu_rows(qmv.qmv(x, matrix), 8, 4, True)
    if fault:
        module, name, planted = FAULTS[fault]
        monkeypatch.setattr(module, name, planted)
    same = [
        same_bytes(qmv.qmv(x, finished(matrix, "sum")), sums)
        and same_rows(gated_product(x, finished(matrix, "gated"), 8, 4, True), rows, 8)
        for _ in range(2)
    ]
    clean = counted() == 0
    finishing.counters(halves(1).device).zero_()
    assert (all(same) and clean) is (fault == "")


# ---- on a GPU, by hand: the matrices in front of a norm or GeGLU ----------------------------------------------------

FINISHING: dict[tuple[int, int, int], Finish] = {
    key: "gated" if key[1] > 2 * key[0] else "squares" for key in TABLE if key[1] < 262144 and TABLE[key].split > 1
}


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("key", list(FINISHING), ids="{0[0]}x{0[1]}-{0[2]}bit".format)
def test_gemma_matrices_on_a_gpu(key: tuple[int, int, int]) -> None:
    """Bytes of the consumers at real shapes: by rows, per row, and over 300 graph replays into poisoned memory."""
    width, columns, bits = key
    matrix = packed(columns, width, bits, replace(TABLE[key], finish="no"))
    x = activations(width, bits)
    fine = finished(matrix, FINISHING[key])
    sums = qmv.qmv(x, matrix)
    for rows in (1, 4, 8):
        for per_row in (False, True):
            found = sums_of(product(x, finished(matrix, "sum"), rows, per_row))
            assert same_bytes(found[:, :rows], in_index_order(sums)[:, :rows])
    other = activations(width, bits, seed=9)
    if FINISHING[key] == "gated":
        for bits_after in (4, 8):
            for fused in (False, True):
                expected = geglu_rows(sums, 8, bits_after, fused)
                assert same_rows(gated_product(x, fine, 8, bits_after, fused), expected, 8)
                assert same_rows(gated_product(x, fine, 3, bits_after, fused, per_row=True), expected, 3)
        rows = geglu_rows(sums, 8, 4, True)
        _replays_agree(lambda x: parts_of(gated_product(x, fine, 8, 4, True)), other, x, parts_of(rows))
        return
    found = product(x, fine, 8)
    assert isinstance(found, Squared)
    squares = sum_partials(sums).double().square()
    assert float((found.squares.double().sum(1) / squares.sum(1) - 1).abs().max()) < 1e-5
    _replays_agree(lambda x: parts_of(product(x, fine, 8)), other, x, parts_of(found))


def parts_of(found: object) -> list[Tensor]:
    """What a finished product writes: sums and squares, or values and sums of 4-bit rows."""
    names = ("values", "sums") if isinstance(found, Rows) else ("sums", "squares")
    return [getattr(found, name) for name in names]


def _replays_agree(
    run: Callable[[Rows], list[Tensor]], other: Rows, x: Rows, expected: list[Tensor], replays: int = 300
) -> None:
    """A race between the last program and the others would show now and then.

    The parts of a product are the graph's own memory: that of another product's stands there when this one begins, so
    that what is read too early has other bytes.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(other)
        again = run(x)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(replays):
        graph.replay()
        for one, two in zip(again, expected, strict=True):
            differing += (one.view(torch.uint8) != two.view(torch.uint8)).sum()
    assert int(differing) == 0
    assert counted() == 0
