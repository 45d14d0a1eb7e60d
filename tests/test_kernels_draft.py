"""The launches of a draft step that stand for several ops: bytes of the ops in a row, and what a verify step leaves."""

from __future__ import annotations

import pytest
import torch
from support_fused import accept
from torch import Tensor

pytest.importorskip("triton", reason="triton is not built for this platform")

from support_rowops import DEVICE, EPS, by_row, halves, partials_of, random, rows_hold, same_rows, weight

from engine.quantize import quantize
from kernels import Linear, rmsnorm, triton_backend
from kernels.argmax import COLUMNS_PER_PROGRAM, head_argmax, head_best, write_best
from kernels.draft_rows import join_accepted_rows, join_rows
from kernels.embed import embed_rows
from kernels.fused_norms import sum_norm_rows
from kernels.launch import LaunchShape
from kernels.repack import PackedWeight, pack_dense, pack_weight
from kernels.rows import Rows, pack_rows, sum_partials
from kernels.testing import poison, same_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

SHAPE = LaunchShape(32, 1, 2, 2, 1)
SCALE = torch.tensor(62.0, dtype=torch.bfloat16, device=DEVICE)
VOCABULARY = 70
"""The last tile is not full."""


def table(bits: int, width: int) -> PackedWeight:
    """A packed table of 70 rows."""
    dense = halves(VOCABULARY, width, seed=bits)
    return pack_dense(dense, SHAPE) if bits == 16 else pack_weight(*quantize(dense, bits), bits, SHAPE)


def words(*values: int) -> Tensor:
    """int32 [n]."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def state_of(split: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """A state whose row 0 alone is real, as the launch takes it, and as a plain row: partial sums where split > 0."""
    if split == 0:
        plain = halves(8, width, seed=seed)
        plain[1:] = float("nan")
        return plain, plain
    partials = random(split, 8, width, seed=seed)
    partials[:, 1:] = float("nan")
    return partials, sum_partials(partials)


def joined_ops(packed: PackedWeight, token: int, plain: Tensor, bits: int) -> Rows:
    """Row 0 of a draft step as single ops: embed, join, pack."""
    embedded = embed_rows(packed, words(*[token] * 8), SCALE, 1)
    return pack_rows(torch.cat((embedded, plain), -1), bits, 1)


def keys_of(token: int) -> Tensor:
    """The head's keys for a vocabulary of two blocks, in which row 0 likes this token best; other rows' never lie."""
    logits = random(1, 8, COLUMNS_PER_PROGRAM + 8, seed=token)
    logits[0, :, token] = 90.0
    logits[0, 1:, token + 1] = 100.0
    return head_best(logits, 8, None)


@pytest.mark.parametrize(
    ("table_bits", "bits", "width", "split"),
    [(4, 4, 64, 0), (4, 16, 320, 3), (8, 8, 192, 8), (16, 4, 192, 1), (4, 8, 64, 2)],
    ids=str,
)
def test_join_is_embed_sum_join_and_pack(table_bits: int, bits: int, width: int, split: int) -> None:
    """A byte that differed would be another draft than the plain chain's; the halves end inside a program's groups."""
    packed = table(table_bits, width)
    state, plain = state_of(split, width, seed=5)
    token = VOCABULARY - 1
    ids = words(3, 9, token, 4, 5, 6, 7, 8)
    found = join_rows(packed, ids, 2, None, SCALE, state, bits)
    assert same_rows(found, joined_ops(packed, token, plain, bits), 1)
    assert ids.tolist() == [3, 9, token, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("at", "token"), [(1, 0), (4, 69), (7, 31)])
def test_join_takes_the_heads_token_and_writes_it_down(at: int, token: int) -> None:
    """Every program finds the token; the verify step reads the one that was written, and no other word may move."""
    packed, keys = table(4, 320), keys_of(token)
    state, plain = state_of(2, 320, seed=6)
    ids = words(*range(40, 48))
    found = join_rows(packed, ids, at, keys, SCALE, state, 4)
    assert same_rows(found, joined_ops(packed, token, plain, 4), 1)
    assert ids.tolist() == [token if index == at else 40 + index for index in range(8)]


@pytest.mark.parametrize("token", [0, 7, COLUMNS_PER_PROGRAM - 1, COLUMNS_PER_PROGRAM + 6])
def test_a_pick_is_written_where_it_belongs(token: int) -> None:
    """The chain's last token stands where the verify step's row is, as the whole argmax finds it."""
    keys = keys_of(token)
    ids = words(*range(40, 48))
    write_best(keys, ids, 3)
    assert ids.tolist() == [40, 41, 42, token, 44, 45, 46, 47]
    logits = random(2, 8, COLUMNS_PER_PROGRAM + 8, seed=9)
    write_best(head_best(logits, 1, None), ids, 0)
    assert int(ids[0]) == int(head_argmax(logits, 1, None)[0][0])


@pytest.mark.parametrize(
    ("rows", "right"),
    [(1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (4, 3), (8, 6), (8, 7)],
)
@pytest.mark.parametrize(("width", "bits"), [(64, 4), (320, 16)])
def test_the_device_accepts_what_the_host_accepts(rows: int, right: int, width: int, bits: int) -> None:
    """None, some and all of a block; what stands past its rows looks right and must not count, nor may a NaN state."""
    best = torch.arange(40, 48, dtype=torch.int32)
    ids = torch.cat((torch.tensor([7], dtype=torch.int32), best[:7]))  # every draft right, past the block too
    if right + 1 < rows:
        ids[1 + right] += 1
    hidden = halves(8, width, seed=rows).cpu()
    hidden[right, 3] = float("nan")
    places = torch.tensor([500], dtype=torch.int32), torch.tensor([499], dtype=torch.int32)
    own = [x.clone().to(DEVICE) for x in (ids, best, hidden, *places)]
    vector = torch.zeros_like(hidden)
    accept(ids, best, hidden, *places, vector, rows)
    packed = table(4, width)
    found = join_accepted_rows(packed, *own, rows, SCALE, bits)
    for expected, word in zip((ids, best, hidden, *places), own, strict=True):
        assert same_bytes(expected, word.cpu())
    assert int(own[3]) == 500 + right + 1
    assert int(own[0][0]) == 40 + right
    assert same_rows(found, joined_ops(packed, 40 + right, vector.to(DEVICE), bits), 1)


@pytest.mark.parametrize(("width", "split", "bits"), [(192, 1, 4), (64, 30, 16), (320, 3, 8), (1088, 2, 4)], ids=str)
def test_sums_and_their_norm_are_the_ops_in_a_row(width: int, split: int, bits: int) -> None:
    """The residual of the first layer and what its product reads; rows that are not real are not read. 1,088 columns
    are more than a program takes, so the row's programs meet."""
    partials, w = random(split, 8, width, seed=10), weight(width, seed=11)
    expected = sum_partials(partials)
    normed = pack_rows(rmsnorm.rmsnorm(expected, w, EPS), bits)
    poison(partials[:, 5:])
    h, packed = sum_norm_rows(partials, w, EPS, 5, bits)
    assert same_bytes(h[:5], expected[:5])
    assert same_rows(packed, normed, 5)


def test_sums_and_their_norm_keep_rows() -> None:
    """A row's sum of squares is its own."""
    w = weight(192, seed=12)

    def call(x: Tensor, m: int) -> list[Tensor]:
        h, packed = sum_norm_rows(partials_of(x), w, EPS, m, 8)
        return [h, *by_row(packed)]

    rows_hold(call, [random(8, 3, 192, seed=13)])


@pytest.mark.parametrize(("held", "wanted"), [(4, 4), (4, 16), (8, 4), (16, 16), (16, 8)])
def test_rows_are_packed_again_only_for_another_form(held: int, wanted: int) -> None:
    """Head and `post` read the same state; where they are stored alike, it is packed once."""
    x = halves(8, 192, seed=14)
    packed = pack_rows(x, held, 1)
    matrix = pack_dense(halves(64, 192)) if wanted == 16 else table(wanted, 192)
    post = Linear(64, 192, wanted, torch.bfloat16, "qmv", matrix)
    found = triton_backend.FUSED.reuse(packed, x, post)
    assert same_rows(found, pack_rows(x, wanted, 1), 1)
    assert (found is packed) == (held == wanted)


def test_operands_that_do_not_fit_are_refused() -> None:
    """A ninth row or id would be read behind the words, and a state of another width beside its row."""
    packed, ids, states = table(4, 64), words(*range(8)), halves(8, 64)
    place = words(0), words(0)
    for rows in (0, 9):
        with pytest.raises(ValueError, match="a block has 1 to 8"):
            join_accepted_rows(packed, ids, ids, states, *place, rows, SCALE, 4)
    for at in (-1, 8):
        with pytest.raises(ValueError, match=f"place {at} of 8 ids"):
            join_rows(packed, ids, at, None, SCALE, states, 4)
        with pytest.raises(ValueError, match=f"place {at} of 8 ids"):
            write_best(keys_of(1), ids, at)
    with pytest.raises(ValueError, match=r"state: expected torch.bfloat16 8x64"):
        join_rows(packed, ids, 0, None, SCALE, halves(8, 128), 4)
    with pytest.raises(ValueError, match=r"state: expected torch.float32 \?x8x64"):
        join_rows(packed, ids, 0, None, SCALE, states.float(), 4)
    with pytest.raises(ValueError, match="one bf16 value"):
        join_rows(packed, ids, 0, None, SCALE.float(), states, 4)
    with pytest.raises(ValueError, match=r"ids: expected torch.int32 8"):
        join_rows(packed, ids.long(), 0, None, SCALE, states, 4)
    with pytest.raises(ValueError, match=r"weight: expected torch.float32 64"):
        sum_norm_rows(random(1, 8, 64), weight(128), EPS, 1, 4)
