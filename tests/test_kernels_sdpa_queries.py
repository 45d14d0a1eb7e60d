"""Attention that makes its queries from the q product's sums, on bytes against head norms and RoPE of their own."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not built for this platform")

from support_kernels_sdpa import mutant
from support_rowops import DEVICE, EPS, by_row, halves, holds_in_a_graph, random, same_rows, weight
from torch import Tensor

from kernels import Linear, sdpa_vector, triton_backend
from kernels.rope import head_norms_rope
from kernels.rows import Rows
from kernels.sdpa_queries import QueryHeads

NAN = float("nan")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
nan_arithmetic = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@dataclass(frozen=True)
class Case:
    """A layer of a drafter: query heads over a target's KV heads, and the parts that its q product leaves."""

    heads: int
    groups: int
    width: int
    window: int | None
    split: int
    span: int = 120
    bits: int = 4

    @property
    def ring(self) -> int:
        return self.span if self.window is None else self.window + 7

    def operands(self, position: int, rows: int) -> tuple[Tensor, QueryHeads, tuple[Any, ...]]:
        """Sums, tables and the rest of a call; NaN in the sums of other rows and at the positions of none."""
        sums = random(self.split, 8, self.heads * self.width, seed=1)
        sums[:, rows:] = NAN
        tables = [random(self.span, self.width, seed=seed) for seed in (2, 3)]
        for table in tables:
            table[:position] = table[position + rows :] = NAN
        norms = weight(self.heads, self.width, seed=4)
        kv = halves(2, self.groups, self.ring, self.width, seed=5)
        where = torch.tensor([position], dtype=torch.int32, device=DEVICE)
        rest = (kv[0], kv[1], where, rows, self.window, self.ring, self.span, self.bits)
        return sums, QueryHeads(norms, tables[0], tables[1], EPS), rest

    def apart(self, position: int, rows: int) -> Rows:
        """Queries from their own launch."""
        sums, heads, rest = self.operands(position, rows)
        tables = heads.norm_heads, heads.cos, heads.sin
        q = head_norms_rope(sums, *tables, rest[2], rows, self.heads, 0, False, EPS, None, None, 1)
        return sdpa_vector.sdpa_vector_rows(q, *rest)

    def together(self, position: int, rows: int, module: Any = sdpa_vector) -> Rows:
        """Queries made in attention."""
        sums, heads, rest = self.operands(position, rows)
        found: Rows = module.sdpa_vector_rows(sums, *rest, query_heads=heads, settled=True)
        return found


PAIR = Case(heads=2, groups=1, width=64, window=40, split=3)
"""Two query heads to a KV head, as a tuned sliding layer has; a chunk is 64 keys."""
PAIRS = Case(heads=4, groups=2, width=64, window=40, split=2)
SINGLE = Case(heads=1, groups=1, width=128, window=None, split=1, bits=8)
CALLS = [
    *((PAIR, position, rows) for rows, position in enumerate((61, 63, 0, 60, 91, 30, 57, 59), 1)),
    (PAIRS, 44, 1),
    (PAIRS, 62, 3),
    (SINGLE, 63, 2),
    (dataclasses.replace(PAIR, split=8, bits=16), 118, 1),
]
"""Around the edge of a chunk (64), the ring's wrap (47, 94) and the first key."""


@nan_arithmetic
@pytest.mark.parametrize(
    ("case", "position", "rows"),
    [*CALLS[:3], *(pytest.param(*call, marks=pytest.mark.slow) for call in CALLS[3:])],
    ids=str,
)
def test_queries_from_sums_have_the_bytes_of_their_own_launch(case: Case, position: int, rows: int) -> None:
    """A bit that differed would make another draft; NaN stands in every row and position that is not of this call."""
    found = case.together(position, rows)
    assert same_rows(found, case.apart(position, rows), rows)
    assert not found.values[:rows].isnan().any()


FAULTS = {
    "positions of the first row": ("base + row + 1, index", "base, index"),
    "a row of its tile's first": ("row = first + index\n", "row = first\n"),
    "a partner that is not rounded": (
        "round_bf16(raw_partner * scale * partner_weight)",
        "raw_partner * scale * partner_weight",
    ),
    "the wrong partner": ("(at + D // 2) % D", "(at + 1) % D"),
    "the partner's weight": ("tl.load(norm_heads_ptr + partner)", "tl.load(norm_heads_ptr + own)"),
    "another KV head's weight": ("    norm_heads_ptr += kv_head * (GROUP * D)\n", ""),
}


@nan_arithmetic
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.slow if at > 1 else ()) for at, name in enumerate(FAULTS)]
)
def test_planted_faults_are_caught(fault: str, tmp_path: Path) -> None:
    """Each in one step of the queries."""
    module = mutant(tmp_path, f"queries{list(FAULTS).index(fault)}", [FAULTS[fault]])
    assert not same_rows(PAIRS.together(57, 2, module), apart(57, 2), 2), "not caught"


@functools.cache
def apart(position: int, rows: int) -> Rows:
    """What the faults are compared with."""
    return PAIRS.apart(position, rows)


def test_the_unchanged_copy_passes(tmp_path: Path) -> None:
    """Otherwise the faults above would be caught by the copying."""
    assert same_rows(PAIRS.together(57, 2, mutant(tmp_path, "queries", [])), apart(57, 2), 2)


@pytest.mark.parametrize("heads", [2, 3], ids=["in one launch", "apart"])
def test_the_op_falls_back_where_weights_have_their_own_launch(heads: int) -> None:
    """Three heads to a KV head, as in a full layer: such a plan takes queries, and a chain need not know which do."""
    case = dataclasses.replace(PAIR, heads=heads, window=None)
    sums, tables, (k, v, where, rows, window, _, span, bits) = case.operands(30, 1)
    shape = SimpleNamespace(num_heads=heads, num_kv_heads=0, head_dim=case.width, k_eq_v=False)
    following = Linear(64, heads * case.width, bits, torch.bfloat16, "qmv", SimpleNamespace(bits=bits))
    place = torch.stack((k, v)), where, rows, window, span, following
    angles = tables.cos[:, None], tables.sin[:, None]
    found = triton_backend.attend_sums(sums, tables.norm_heads, *angles, shape, EPS, *place)
    ops = triton_backend.FUSED
    q = ops.heads(sums, tables.norm_heads, *angles, where, rows, shape, None, EPS)
    assert same_rows(found, ops.attend(q, *place), rows)


def test_operands_that_do_not_fit_are_refused() -> None:
    """Sums of another width would be read as other heads, and a plan with blocks would read them as queries."""
    sums, heads, rest = PAIRS.operands(20, 2)

    def message(x: Tensor = sums, **changes: Tensor) -> str:
        with pytest.raises(ValueError, match="attention: ") as caught:
            sdpa_vector.sdpa_vector_rows(x, *rest, query_heads=dataclasses.replace(heads, **changes))
        return str(caught.value)

    assert "sums of q: expected torch.float32 ?x8x256" in message(sums[:, :, :128].contiguous())
    assert "sums of q: expected torch.float32" in message(sums.bfloat16())
    assert "norm_heads: expected torch.float32" in message(norm_heads=heads.norm_heads.bfloat16())
    assert "cos: expected torch.float32 ?x64" in message(cos=heads.cos[:, :32].contiguous())
    assert "sin: expected torch.float32 120x64" in message(sin=heads.sin[:-1])
    sums, heads, rest = dataclasses.replace(PAIRS, heads=6).operands(20, 2)
    assert "which takes q and no sums" in message(sums)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [Case(16, 8, 256, 1024, 8, 2100), Case(32, 16, 256, 1024, 2, 2100, 16), Case(32, 16, 256, 1024, 4, 2100)],
    ids=["12b", "31b", "31b in 4 bits"],
)
def test_queries_from_sums_on_the_device(case: Case) -> None:
    """Both drafters' sliding layers: every number of rows, before and behind the window's end, and in a graph."""
    for position in (0, 62, 1020, 2045):
        for rows in range(1, 9):
            assert same_rows(case.together(position, rows), case.apart(position, rows), rows), (position, rows)
    sums, heads, rest = case.operands(2045, 1)

    def first_row() -> list[Tensor]:
        found = sdpa_vector.sdpa_vector_rows(sums, *rest, query_heads=heads, settled=True)
        return [part[:1] for part in by_row(found)]

    holds_in_a_graph(first_row)
