"""Checks on bytes that the tests, the loader and the harness share.

`same_bytes` compares, `slot_independent` tries whether an 8-row product keeps a row's bytes in every slot,
`row_difference` tries the whole row contract of an op and says where it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kernels import MAX_ROWS

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(x: Tensor) -> Tensor:
    """The same bytes as an integer tensor of the same shape, so that NaN equals itself and -0.0 differs from 0.0."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """True when shape, dtype and every byte agree; empty tensors are never the same."""
    if a.dtype != b.dtype or a.shape != b.shape or a.numel() == 0:
        return False
    return torch.equal(as_integers(a), as_integers(b))


def slot_independent(
    product: Callable[[Tensor], Tensor],
    in_features: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> bool:
    """Whether a row of an 8-row product has the same bytes in any slot, alone, among others and beside NaN.

    product maps [8, in_features] to [8, N]. The row alone in slot 0 is what classic decode computes.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(MAX_ROWS, in_features, generator=generator).to(dtype=dtype, device=device)
    alone = torch.zeros_like(x)
    alone[0] = x[0]
    expected = product(alone)[0]
    crowd = x.clone()
    for slot in range(MAX_ROWS):
        crowd.copy_(x.roll(slot, 0))
        if not same_bytes(product(crowd)[slot], expected):
            return False
        crowd.fill_(float("nan"))
        crowd[slot] = x[0]
        if not same_bytes(product(crowd)[slot], expected):
            return False
    return True


RowOp = Callable[..., Tensor | Sequence[Tensor]]
"""An op on rows: op(x [8, ...], further inputs [8, ...], rows) -> [8, ...] or several; the first `rows` are real."""


def poison(x: Tensor) -> Tensor:
    """Fill x in place with NaN, or with all bits set where it holds no floats, and return it."""
    if x.is_floating_point():
        return x.fill_(float("nan"))
    return x.fill_(255 if x.dtype == torch.uint8 else -1)


def row_difference(
    op: RowOp,
    inputs: Sequence[Tensor],
    rows: Iterable[int] = range(1, MAX_ROWS + 1),
    slots: bool = True,
    repeats: int = 2,
) -> str | None:
    """Where an op breaks the row contract, as a line of text; None when it holds.

    inputs: tensors [8, ...] of 8 different rows; op(*inputs, rows) gets fresh copies at every call, and what it
    returned is copied, then overwritten, before the next call: an op that hands out an old buffer, or the buffer
    it is compared with, cannot pass. A row's one-row call, alone in slot 0 among zeros, is compared with

    * the same row among M = 1..8, the slots beyond M holding NaN (integers keep their values there);
    * with `slots`: the same row in every slot among the seven others, and in every slot among NaN. Without, for an op
      whose result depends on the slot (a position per row), the row's own slot among NaN, and its one-row call is the
      op with all other slots zero and M = slot + 1;
    * the 8-row call, `repeats` times more.

    ValueError when an input or a result has not 8 rows or two inputs' rows are the same, which would hide a mix-up.
    """
    _check_inputs(inputs)
    alone = [
        [out[0 if slots else r] for out in _call(op, _only(inputs, r, 0 if slots else r, 0.0), 1 if slots else r + 1)]
        for r in range(MAX_ROWS)
    ]
    for what, arranged, count, placed in _arrangements(inputs, list(rows), slots, repeats):
        found = _call(op, arranged, count)
        for slot, row in placed.items():
            for index, (out, expected) in enumerate(zip(found, alone[row], strict=True)):
                if not same_bytes(out[slot], expected):
                    which = f"output {index}, " if len(found) > 1 else ""
                    return f"{what}: {which}row {row} in slot {slot}: {_first_difference(out[slot], expected)}"
    return None


def _check_inputs(inputs: Sequence[Tensor]) -> None:
    for index, x in enumerate(inputs):
        if x.dim() == 0 or x.shape[0] != MAX_ROWS:
            raise ValueError(f"row_difference: input {index} has shape {tuple(x.shape)}, not {MAX_ROWS} rows")
    for r in range(1, MAX_ROWS):
        if all(same_bytes(x[0], x[r]) for x in inputs):
            raise ValueError(f"row_difference: rows 0 and {r} are the same; give every row other values")


def _call(op: RowOp, inputs: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Copies of what op returns; its own tensors are poisoned, so that nobody can hand them out again."""
    result = op(*inputs, rows)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    copies = [out.clone() for out in outputs]
    for index, out in enumerate(copies):
        if out.dim() == 0 or out.shape[0] < rows:
            raise ValueError(f"row_difference: output {index} has shape {tuple(out.shape)}, fewer than {rows} rows")
    for out in outputs:
        poison(out)
    return copies


def _only(inputs: Sequence[Tensor], row: int, slot: int, filler: float) -> list[Tensor]:
    """Inputs with one row in a slot and the filler elsewhere; integers keep their values where the filler is NaN."""
    placed = []
    for x in inputs:
        out = x.roll(slot - row, 0) if filler != filler and not x.is_floating_point() else torch.full_like(x, filler)
        out[slot] = x[row]
        placed.append(out)
    return placed


def _arrangements(
    inputs: Sequence[Tensor], rows: list[int], slots: bool, repeats: int
) -> Iterator[tuple[str, list[Tensor], int, dict[int, int]]]:
    """(what it is, inputs, M, {slot: row}) of every call that is compared with the one-row calls."""
    nan = float("nan")
    for count in rows:
        some = [x.clone() for x in inputs]
        for x in some:
            if x.is_floating_point():
                x[count:] = nan
        yield f"M={count}", some, count, {r: r for r in range(count)}
    for shift in range(1, MAX_ROWS) if slots else ():
        rolled = [x.roll(shift, 0) for x in inputs]
        yield f"rows moved by {shift}", rolled, MAX_ROWS, {(r + shift) % MAX_ROWS: r for r in range(MAX_ROWS)}
    for slot in range(MAX_ROWS):
        row = (slot + 3) % MAX_ROWS if slots else slot
        yield "NaN in the other slots", _only(inputs, row, slot, nan), MAX_ROWS, {slot: row}
    for repeat in range(repeats):
        again = [x.clone() for x in inputs]
        yield f"repeat {repeat + 1} of M={MAX_ROWS}", again, MAX_ROWS, {r: r for r in range(MAX_ROWS)}


def _first_difference(found: Tensor, expected: Tensor) -> str:
    """How many elements of a row differ and the first of them, in hexadecimal."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {tuple(found.shape)} against {expected.dtype} {tuple(expected.shape)}"
    ours, theirs = as_integers(found).flatten(), as_integers(expected).flatten()
    if ours.numel() == 0:
        return "no elements"
    where = (ours != theirs).nonzero().flatten()
    at, digits = int(where[0]), 2 * found.element_size()
    mask = (1 << 4 * digits) - 1
    shown = " against ".join(f"0x{int(x[at]) & mask:0{digits}x}" for x in (ours, theirs))
    return f"{where.numel()} of {ours.numel()} elements differ from the one-row call, first at [{at}]: {shown}"
