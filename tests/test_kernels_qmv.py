"""The quantized product: exact repack, values against float64, rows on bytes, and launch shapes for every matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not built for this platform")

from engine.quantize import quantize, unpack
from kernels.launch import CARDS, TABLE, Card, LaunchShape, even_room, even_split, launch_shape
from kernels.qmv import qmv, qmv_plain, qmv_rows
from kernels.repack import (
    PackedWeight,
    dequantize_packed,
    pack_dense,
    pack_weight,
    unpack_dense,
    unpack_weight,
)
from kernels.rows import Rows, new_rows, pack_rows, sum_partials
from kernels.testing import row_difference, same_bytes
from tools import tune_qmv

# ||out - exact|| / ||exact|| of the partial sums before the output rounding.
ERROR = {4: 2e-6, 8: 5e-7, 16: 2e-6}
BF16_ONE_ROUNDING = 1.01 * 2**-8

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = [
    (256, 96, LaunchShape(32, 1, 3, 2, 3)),
    (256, 80, LaunchShape(32, 2, 2, 1, 2)),
    (320, 64, LaunchShape(64, 1, 4, 2, 1)),
]
BITS = (4, 8, 16)


def seeded(seed: int) -> torch.Generator:
    """A generator for one draw."""
    return torch.Generator().manual_seed(seed)


def random_weight(width: int, rows: int, bits: int, shape: LaunchShape | None = None, seed: int = 0) -> PackedWeight:
    """A quantized normal matrix, as a checkpoint would hold it."""
    dense = (torch.randn(rows, width, generator=seeded(seed)) * 0.02).to(torch.bfloat16).to(DEVICE)
    if bits == 16:
        return pack_dense(dense, shape)
    words, scales, biases = quantize(dense, bits)
    return pack_weight(words, scales, biases, bits, shape)


def random_rows(width: int, seed: int = 1) -> Tensor:
    """Eight different rows with a large element here and there, as hidden states have them."""
    x = torch.randn(8, width, generator=seeded(seed))
    x[:, :: max(1, width // 5)] *= 30
    return x.to(torch.bfloat16).to(DEVICE)


def error(found: Tensor, exact: Tensor) -> float:
    """||found - exact|| / ||exact||."""
    return float((found.double() - exact).norm() / exact.norm())


def product(weight: PackedWeight, launch: Callable[..., Tensor] = qmv) -> Callable[[Tensor, int], Tensor]:
    """The op as `row_difference` takes it: [8, K], rows -> [8, split, N]."""

    def op(x: Tensor, rows: int) -> Tensor:
        return launch(pack_rows(x, weight.bits), weight, rows).transpose(0, 1)

    return op


@given(
    bits=st.sampled_from((4, 8)),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    tile=st.sampled_from((16, 32, 64)),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=30, deadline=None)
def test_repacking_is_reversible(bits: int, rows: int, groups: int, tile: int, seed: int) -> None:
    """Every code, scale and bias comes back, whatever the shape: the product reads the checkpoint's own numbers."""
    generator = seeded(seed)
    words = torch.randint(-(2**31), 2**31, (rows, groups * 2 * bits), generator=generator).int().view(torch.uint32)
    both = torch.randint(-(2**15), 2**15, (2, rows, groups), generator=generator).to(torch.int16).view(torch.bfloat16)
    packed = pack_weight(words, both[0], both[1], bits, LaunchShape(tile, 1, 2, 1, 1))
    found = unpack_weight(packed)
    for back, put in zip(found, (words, both[0], both[1]), strict=True):
        assert same_bytes(
            back.view(torch.int32) if back.dtype == torch.uint32 else back,
            put.contiguous().view(torch.int32) if put.dtype == torch.uint32 else put,
        )


def test_dequantizing_the_repacked_matrix_gives_the_checkpoint_values() -> None:
    """The oracle of the tests below reads the packed form; it must mean what `unpack` of the words means."""
    dense = torch.randn(48, 192, generator=seeded(3)).to(torch.bfloat16)
    for bits in (4, 8):
        words, scales, biases = quantize(dense, bits)
        codes = unpack(words, bits).view(48, 3, 64).double()
        exact = (codes * scales.double()[..., None] + biases.double()[..., None]).flatten(1)
        packed = pack_weight(words, scales, biases, bits, LaunchShape(32, 1, 2, 1, 1))
        assert torch.equal(dequantize_packed(packed), exact)
    packed = pack_dense(dense, LaunchShape(32, 1, 2, 1, 1))
    assert same_bytes(unpack_dense(packed), dense)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("width", "rows", "shape"), SMALL, ids=lambda value: str(value))
def test_products_are_close_to_float64(width: int, rows: int, shape: LaunchShape, bits: int) -> None:
    """Codes, offsets, scales and the split are all undone: fp32 accumulation and nothing coarser."""
    weight, x = random_weight(width, rows, bits, shape), random_rows(width)
    exact = x.double() @ dequantize_packed(weight).T
    partials = qmv(pack_rows(x, bits), weight)
    assert partials.shape == (shape.split, 8, rows)
    assert error(partials.sum(0), exact) < ERROR[bits]
    rounded = sum_partials(partials)
    assert rounded.dtype == torch.bfloat16
    assert float((rounded.double() - exact).abs().max() / exact.abs().max()) < BF16_ONE_ROUNDING


@pytest.mark.parametrize("bits", [4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_rows_keep_their_bytes(bits: int) -> None:
    """The row contract: any M, any slot, NaN next door, in one launch and in a launch per row."""
    width, rows, shape = 128, 40, LaunchShape(64, 1, 2, 1, 2)
    weight, x = random_weight(width, rows, bits, shape), random_rows(width)
    assert row_difference(product(weight), [x]) is None
    alone = product(weight, qmv_rows)
    for count in (1, 4, 8):
        together, apart = product(weight)(x, count)[:count], alone(x, count)[:count]
        assert same_bytes(together, apart), count


def test_slots_beyond_the_rows_are_not_written() -> None:
    """A store past M would overwrite what another launch left there."""
    width, rows, shape = SMALL[0]
    weight, x = random_weight(width, rows, 4, shape), pack_rows(random_rows(width), 4)
    out = torch.full((shape.split, 8, rows), 7.0, device=DEVICE)
    qmv(x, weight, 3, out=out)
    assert bool((out[:, 3:] == 7.0).all())
    assert not bool((out[:, :3] == 7.0).any())


def test_partial_sums_are_added_in_index_order() -> None:
    """fp32 addition is not associative: large, small, minus large has another sum in another order."""
    partials = torch.zeros(3, 8, 64, device=DEVICE)
    partials[0], partials[1], partials[2] = 2.0**24, 1.0, -(2.0**24)
    assert bool((sum_partials(partials) == 0.0).all())
    partials[1], partials[2] = -(2.0**24), 1.0
    assert bool((sum_partials(partials) == 1.0).all())


@pytest.mark.parametrize("bits", BITS)
def test_packed_rows_hold_the_activations(bits: int) -> None:
    """Rows come back exactly, also beside an element 2^18 larger, and a zero row stays zero."""
    x = random_rows(320)
    x[0] = 0
    x[1, 5] = 2.0**18
    packed = pack_rows(x, bits)
    values = packed.values.float().view(8, 5, 64)
    if bits == 4:
        values = values.view(8, 5, 2, 32).transpose(2, 3).reshape(8, 5, 64)
    elif bits == 8:
        values = values * packed.scales.T.unsqueeze(-1)
    assert same_bytes(values.reshape(8, 320), x.float())
    exact = x.double().view(8, 5, 64).sum(-1).T
    assert float((packed.sums.double() - exact).abs().max() / exact.abs().max()) < 1e-6


@given(
    width=st.integers(1, 400).map(lambda groups: 64 * groups),
    rows=st.integers(1, 300_000),
    bits=st.sampled_from(BITS),
)
@settings(max_examples=200, deadline=None)
def test_every_shape_has_a_launch_shape_without_empty_parts(width: int, rows: int, bits: int) -> None:
    """A part of K without groups would leave its partial sums unwritten."""
    check_shape(width, launch_shape(width, rows, bits))


def test_the_table_fits_its_matrices() -> None:
    """A row of the table must be launchable: whole steps, no empty part."""
    assert len(TABLE) >= 30
    for (width, _, _), shape in TABLE.items():
        check_shape(width, shape)


@given(
    programs=st.integers(1, 5000),
    multiprocessors=st.sampled_from((20, 132, 170)),
    shared=st.sampled_from((64 << 10, 100 << 10, 228 << 10)),
)
@settings(max_examples=300, deadline=None)
def test_no_multiprocessor_takes_more_than_its_share(programs: int, multiprocessors: int, shared: int) -> None:
    """A share fits, beside a few small programs of the next launch, and one program more does not."""
    card = Card(multiprocessors, shared)
    room, share = even_room(programs, card), -(-programs // multiprocessors)
    taken = room + 1024
    assert room % 128 == 0
    if room:
        assert share * taken <= shared - 3 * 1024
        assert (share + 1) * taken > shared
    else:
        assert share > 12  # so many that the next multiple of 128 bytes could not tell them apart


def test_room_on_an_h200() -> None:
    """The figures of decision 15, and that every tuned product can be spread evenly there: its own need is less."""
    assert [even_room(count, CARDS[90]) for count in (1, 132, 133, 924)] == [229376, 229376, 114176, 31872]
    crowded = []
    for (width, rows, bits), shape in TABLE.items():
        stored = {4: 36, 8: 68, 16: 128}[bits] * shape.tile + 1024
        programs = -(-rows // shape.tile) * shape.split
        if max(2, shape.stages) * shape.unroll * stored > even_room(programs, CARDS[90]):
            crowded.append((width, rows, bits))
    assert {rows for _, rows, _ in crowded} <= {262144}  # a head's programs come and go, more than a card holds at once


def test_the_tuner_takes_any_matrix_by_name() -> None:
    """A drafter in bf16 has matrices that the table does not hold yet."""
    names = ("8192x5376-4bit", "1024x262144-16bit", "1000x64-4bit", "64x8-4bit", "0x64-4bit", "64x64-3bit", "64x64")
    known: list[object] = [(8192, 5376, 4), (1024, 262144, 16)]
    assert [tune_qmv.matrix_of(name) for name in names] == known + [None] * 5


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_what_the_tuner_tries_can_be_launched(bits: int) -> None:
    """Its candidates have no empty part, and its views of random memory are matrices that `qmv` takes."""
    matrix = (320, 256, bits)
    found = list(tune_qmv.candidates(matrix, wide=True))
    assert len({shape.tile for shape in found}) >= 3
    for shape in found:
        check_shape(matrix[0], shape)
    codes, scales = torch.randint(0, 64, (1 << 18,), dtype=torch.uint8), torch.zeros(1 << 16, dtype=torch.int32)
    weight = tune_qmv.dummy_weight(matrix, LaunchShape(64, 1, 2, 2, 1), codes, scales)
    assert qmv(pack_rows(random_rows(320).cpu(), bits), weight, 1).shape == (1, 8, 256)


def check_shape(width: int, shape: LaunchShape) -> None:
    """Whole steps in every part and none empty."""
    groups = width // 64
    assert groups % shape.unroll == 0
    steps = groups // shape.unroll
    assert even_split(steps, shape.split) == shape.split


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: launch_shape(100, 64, 4), "multiple of 64"),
        (lambda: new_rows(96, 4, torch.device("cpu")), "not a multiple of 64"),
        (lambda: new_rows(64, 5, torch.device("cpu")), "known: 4, 8, 16"),
        (lambda: pack_rows(torch.zeros(4, 64, dtype=torch.bfloat16), 4), "expected torch.bfloat16 8x?"),
        (lambda: pack_rows(torch.zeros(8, 65, dtype=torch.bfloat16)[:, 1:], 4), "16-byte aligned"),
        (lambda: pack_dense(torch.zeros(8, 64)), "expected bfloat16"),
        (lambda: LaunchShape(48, 1, 2, 1, 1), "powers of two"),
        (lambda: LaunchShape(32, 1, 2, 4, 1), "at least 16 for each warp"),
        (lambda: qmv(pack_rows(random_rows(64), 8), random_weight(64, 32, 4)), "rows packed for K = 64, 8 bits"),
        (lambda: qmv(pack_rows(random_rows(64), 4), random_weight(64, 32, 4), 9), "9 rows"),
    ],
)
def test_bad_operands_are_refused(call: Callable[[], object], message: str) -> None:
    """Where, what and what to do, instead of a wrong product."""
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace("[", r"\[")):
        call()


def test_codes_that_do_not_belong_to_their_scales_are_refused() -> None:
    """A matrix of 8 bits read as 4 would be twice as wide."""
    words, scales, biases = quantize(torch.randn(32, 128).to(torch.bfloat16), 8)
    with pytest.raises(ValueError, match="no 4-bit matrix"):
        pack_weight(words, scales, biases, 4)
    with pytest.raises(ValueError, match="takes bfloat16"):
        pack_weight(words, scales.float(), biases.float(), 8)


# ---- on a GPU, by hand: every matrix of Gemma -----------------------------------------------------------------------


def gemma_ids(keys: Sequence[tuple[int, int, int]]) -> list[str]:
    """Ids of the table's matrices."""
    return [f"{k}x{n}-{bits}bit" for k, n, bits in keys]


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("key", list(TABLE), ids=gemma_ids(list(TABLE)))
def test_gemma_matrices_on_a_gpu(key: tuple[int, int, int]) -> None:
    """Rows on bytes, error against float64, a thousand repeats, and graph against eager, at the real shape."""
    width, rows, bits = key
    generator = torch.Generator("cuda").manual_seed(5)
    if bits == 16:
        noise = torch.randn(rows, width, device="cuda", generator=generator)
        weight = pack_dense((noise * 0.02).to(torch.bfloat16))
    else:
        codes = torch.randint(-(2**31), 2**31, (rows, width * bits // 32), device="cuda", generator=generator)
        levels = 2**bits - 1
        scales = (torch.rand(rows, width // 64, device="cuda", generator=generator) * 0.01 + 1e-3).to(torch.bfloat16)
        weight = pack_weight(codes.int().view(torch.uint32), scales, (scales * (-levels / 2)).to(torch.bfloat16), bits)
    x = random_rows(width)
    assert row_difference(product(weight), [x]) is None
    packed = pack_rows(x, bits)
    first = qmv(packed, weight)
    assert same_bytes(qmv_rows(packed, weight), first)
    assert same_bytes(qmv_plain(packed, weight), first)  # what the interpreter shows holds here
    some = slice(0, min(rows, 4096))
    small = PackedWeight(*_first_tiles(weight, some.stop), some.stop, width, bits, weight.shape)
    exact = x.double() @ dequantize_packed(small).T
    assert error(first.sum(0)[:, some], exact) < ERROR[bits]
    _repeats_agree(packed, weight, first)


def _first_tiles(weight: PackedWeight, rows: int) -> tuple[Tensor, Tensor]:
    tiles = rows // weight.shape.tile
    return weight.codes[:tiles], weight.scales[:tiles]


def _repeats_agree(x: Rows, weight: PackedWeight, expected: Tensor) -> None:
    """Eager repeats and graph replays, each into memory that was poisoned."""
    out = torch.empty_like(expected)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.fill_(float("nan"))
        qmv(x, weight, out=out)
        differing += (out.view(torch.int32) != expected.view(torch.int32)).sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qmv(x, weight, out=out)
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
        differing += (out.view(torch.int32) != expected.view(torch.int32)).sum()
    assert int(differing) == 0
