"""The launches that begin a draft step, on the device at Gemma's shapes: bytes of the ops in a row, also in graphs."""

from __future__ import annotations

import pytest
import torch
from support_rowops import EPS, by_row, halves, holds_in_a_graph, partials_of, random, same_rows, weight
from torch import Tensor

from engine.quantize import quantize
from kernels import rmsnorm
from kernels.argmax import head_argmax, head_best, write_best
from kernels.draft_rows import join_accepted_rows, join_rows
from kernels.embed import embed_rows
from kernels.fused_norms import sum_norm_rows
from kernels.launch import LaunchShape
from kernels.repack import PackedWeight, pack_weight
from kernels.rows import Rows, pack_rows, sum_partials
from kernels.testing import row_difference, same_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: these are Gemma's own shapes"),
]

VOCABULARY = 262144
ROWS = 512
"""Of the table: a token's place in a larger one changes an address alone."""


def table(width: int) -> PackedWeight:
    """A table as the target's head is packed."""
    return pack_weight(*quantize(halves(ROWS, width, seed=1, scale=0.05), 4), 4, LaunchShape(256, 2, 3, 4, 1))


def first_row(x: Rows) -> list[Tensor]:
    """What belongs to row 0; nothing else is written."""
    return [part[:1] for part in by_row(x)]


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize(("width", "split"), [(3840, 8), (5376, 6), (5376, 13)])
def test_join(width: int, split: int, bits: int) -> None:
    """A later step over a full vocabulary of logits, and a first one behind a verify step that accepts two drafts."""
    packed, scale = table(width), torch.tensor([62.0], dtype=torch.bfloat16, device="cuda")
    logits = random(1, 8, VOCABULARY, seed=2)
    logits[0, 0, 300] = 90.0
    keys, state, ids = head_best(logits, 1, None), random(split, 8, width, seed=3), torch.zeros(8).int().cuda()
    assert int(head_argmax(logits, 1, None)[0][0]) == 300

    def later() -> list[Tensor]:
        return first_row(join_rows(packed, ids, 3, keys, scale, state, bits))

    embedded = embed_rows(packed, torch.full((8,), 300).int().cuda(), scale, 8)
    expected = first_row(pack_rows(torch.cat((embedded, sum_partials(state)), -1), bits))
    assert all(same_bytes(found, wanted) for found, wanted in zip(later(), expected, strict=True))
    assert ids.tolist() == [0, 0, 0, 300, 0, 0, 0, 0]
    holds_in_a_graph(later)

    hidden, best = halves(8, width, seed=4), torch.arange(40, 48).int().cuda()
    words = torch.tensor([7, 40, 41, 9, 9, 9, 9, 9]).int().cuda()
    places = [torch.tensor([500 - one]).int().cuda() for one in (0, 1)]
    found = join_accepted_rows(packed, words, best, hidden, places[0], places[1], 4, scale, bits)
    embedded = embed_rows(packed, torch.full((8,), 42).int().cuda(), scale, 8)
    joined = torch.cat((embedded, hidden[2:3].expand(8, -1)), -1)
    assert same_rows(found, pack_rows(joined.contiguous(), bits), 1)
    assert (words.tolist()[0], int(places[0]), int(places[1])) == (42, 503, 502)
    write_best(keys, words, 7)
    assert words.tolist() == [42, 40, 41, 9, 9, 9, 9, 300]


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize(("width", "split"), [(1024, 30), (1024, 32), (3840, 26)])
def test_sums_and_their_norm(width: int, split: int, bits: int) -> None:
    """Equal to the single ops on bytes, row by row, and in a graph."""
    w, partials = weight(width, seed=5), random(8, split, width, seed=6)

    def op(partials: Tensor, rows: int) -> list[Tensor]:
        h, packed = sum_norm_rows(partials_of(partials), w, EPS, rows, bits)
        return [h, *by_row(packed)]

    plain = sum_partials(partials_of(partials))
    expected = [plain, *by_row(pack_rows(rmsnorm.rmsnorm(plain, w, EPS), bits))]
    assert all(same_bytes(found, wanted) for found, wanted in zip(op(partials, 8), expected, strict=True))
    assert row_difference(op, [partials]) is None
    holds_in_a_graph(lambda: op(partials, 8))
