"""Planted faults: every check that guards the row contract must refuse the kernel it is there for."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not built for this platform")

from support_kernel_faults import FAULTY_ROWS, Op, activations, op, shares_its_buffer, weights
from torch import Tensor

from kernels import MAX_ROWS
from kernels.testing import as_integers, poison, row_difference, same_bytes

EXPECTED = {
    "right only in slot 0": r"M=2: row 1 in slot 1: \d+ of 64 elements differ",
    "reads a neighbour's row": r"M=5|M=6: row 5 in slot 5: ",
    "a neighbour times zero": r"M=1: row 0 in slot 0: 64 of 64 elements differ .* 0x7fc00000 against",
    "right only in slot 0, in one shared buffer": r"M=2: row 1 in slot 1: ",
    "hands out its first result": r"M=1: row 0 in slot 0: ",
    "leaves a column unwritten": r"row 0 in slot 0: 1 of 64 elements differ .* first at \[63\]",
    "another sum from five rows on": r"M=5: row 0 in slot 0: ",
    "other bytes now and then": r"M=\d: row \d in slot \d: ",
}


def test_an_honest_kernel_passes() -> None:
    """Otherwise the refusals below would say nothing; its values are right too."""
    assert row_difference(op(""), [activations()]) is None
    exact = activations().double() @ weights().double().T
    found = op("")(activations(), MAX_ROWS).double()
    assert float((found - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("fault", FAULTY_ROWS)
def test_the_row_check_refuses(fault: str) -> None:
    """Each fault is found, and the message says in which call and slot it first shows."""
    difference = row_difference(FAULTY_ROWS[fault](), [activations()])
    assert difference is not None
    assert_matches(difference, EXPECTED[fault])


def assert_matches(text: str, pattern: str) -> None:
    """`pytest.raises(match=...)` for a string."""
    assert re.search(pattern, text), text


def test_a_check_without_copies_would_pass() -> None:
    """Why results are copied: kept in the op's own buffer, the expected bytes are always the ones just computed."""
    x, broken = activations(), shares_its_buffer(op("slot"))
    alone = torch.zeros_like(x)
    alone[0] = x[3]
    expected = broken(alone, 1)
    found = broken(x, MAX_ROWS)
    assert same_bytes(found, expected)
    assert row_difference(broken, [x]) is not None


def fast_ops() -> dict[str, tuple[Op, bool]]:
    """Row ops in torch and whether they hold."""
    scale = torch.arange(1.0, MAX_ROWS + 1)[:, None]
    return {
        "a position per slot": (lambda x, rows: x * scale, True),
        "a position, off by the count": (lambda x, rows: x * (scale + rows - 1), False),
        "a neighbour that is real": (lambda x, rows: x + x.roll(1, 0).nan_to_num(0.0), False),
    }


@pytest.mark.parametrize("name", list(fast_ops()))
def test_ops_with_a_position_per_slot(name: str) -> None:
    """Where the slot is an input, a row is compared in its own slot only."""
    function, holds = fast_ops()[name]
    x = torch.randn(MAX_ROWS, 4, generator=torch.Generator().manual_seed(1))
    assert (row_difference(function, [x], slots=False) is None) is holds
    assert row_difference(function, [x]) is not None


def test_several_inputs_and_outputs() -> None:
    """Integers among the inputs keep their values under NaN; the message names the output."""
    x, ids = torch.randn(MAX_ROWS, 4, generator=torch.Generator().manual_seed(1)), torch.arange(MAX_ROWS)

    def looks_up(x: Tensor, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        table = torch.arange(float(MAX_ROWS))
        return x + table[ids][:, None], ids.roll(1) if rows == 6 else ids.clone()

    assert_matches(row_difference(looks_up, [x, ids]) or "", "M=6: output 1, row 0 in slot 0: 1 of 1 elements")


def test_inputs_that_would_hide_a_mix_up_are_refused() -> None:
    """Equal rows, a wrong number of rows and a result with too few."""
    x = activations()
    with pytest.raises(ValueError, match="rows 0 and 1 are the same"):
        row_difference(op(""), [torch.ones_like(x)])
    with pytest.raises(ValueError, match=r"input 0 has shape \(3, 128\), not 8 rows"):
        row_difference(op(""), [x[:3]])
    with pytest.raises(ValueError, match=r"output 0 has shape \(0, 128\), fewer than 1 rows"):
        row_difference(lambda x, rows: x[:0], [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8])
def test_poison(dtype: torch.dtype) -> None:
    """No element keeps its value, in place, also in a view."""
    x = torch.ones(3, 4, dtype=dtype)
    poison(x[:, ::2])
    kept = as_integers(x) == as_integers(torch.ones_like(x))
    assert kept[:, 1::2].all()
    assert not kept[:, ::2].any()
