"""Byte checks of one kernel on its own: nothing is timed before a row is shown to be the same in any company.

Outputs are copied before the next call, so that a kernel that writes into its last result cannot look equal to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import MAX_ROWS

Call = Callable[[Tensor, int], Tensor]
"""(x [8, ...], rows) -> [8, ...] with row r of the result in slot r; rows from `rows` on are not defined."""


@dataclass(frozen=True)
class Found:
    """One statement: what was compared, and how many bytes of how many differ."""

    name: str
    differing: int
    total: int
    first: str = ""

    @property
    def words(self) -> str:
        """As a raw line says it."""
        if not self.differing:
            return f"0 of {self.total} bytes differ"
        return f"{self.differing} of {self.total} bytes differ, first {self.first}"


class Tally:
    """Counts differing bytes over many comparisons, on the device until it is read."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._total = 0
        self._counts: list[tuple[str, Tensor]] = []
        self._device = device

    def compare(self, where: str, found: Tensor, expected: Tensor) -> None:
        """Compare two tensors of one shape and type; `where` names them."""
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise ValueError(f"{self.name}: {tuple(found.shape)} {found.dtype} against {tuple(expected.shape)}")
        left, right = (x.contiguous().reshape(-1).view(torch.uint8) for x in (found, expected))
        self._total += left.numel()
        self._counts.append((where, (left != right).sum()))

    def found(self) -> Found:
        """The statement; a tally of nothing is a failure."""
        if not self._counts:
            return Found(self.name, 1, 1, "nothing was compared")
        counts = torch.stack([count for _, count in self._counts]).cpu().tolist()
        first = next((where for (where, _), count in zip(self._counts, counts, strict=True) if count), "")
        return Found(self.name, int(sum(counts)), self._total, first)


def row_checks(
    call: Call, call_rows: Call, x: Tensor, again: Callable[[], Tensor], repeat_calls: int
) -> Iterator[Found]:
    """Every check of an op whose row does not depend on its slot.

    x [8, ...] bf16; `call_rows` is the op with a launch per row, again() calls it with all of x.
    """
    nan = torch.full_like(x, float("nan"))
    alone = []
    for row in range(MAX_ROWS):
        one = nan.clone()
        one[0] = x[row]
        alone.append(call(one, 1)[0].clone())
    if any(bool(torch.isnan(out.float()).any()) for out in alone):
        yield Found("a row alone, NaN in the other slots", 1, 1, "NaN reached the row")
        return
    tally = Tally("M = 1..8 against one-row calls", x.device)
    for count in range(1, MAX_ROWS + 1):
        out = call(x, count)
        for row in range(count):
            tally.compare(f"M = {count}, row {row}", out[row], alone[row])
    yield tally.found()
    tally = Tally("each row in each slot", x.device)
    for shift in range(MAX_ROWS):
        out = call(x.roll(shift, 0), MAX_ROWS)
        for row in range(MAX_ROWS):
            slot = (row + shift) % MAX_ROWS
            tally.compare(f"row {row} in slot {slot}", out[slot], alone[row])
    yield tally.found()
    tally = Tally("a launch per row", x.device)
    out = call_rows(x, MAX_ROWS)
    for row in range(MAX_ROWS):
        tally.compare(f"row {row}", out[row], alone[row])
    yield tally.found()
    tally = Tally("NaN in the other rows", x.device)
    for slot in range(MAX_ROWS):
        lonely = nan.clone()
        lonely[slot] = x[slot]
        tally.compare(f"row {slot}", call(lonely, MAX_ROWS)[slot], alone[slot])
    yield tally.found()
    yield from repeat_checks(again, torch.stack(alone), repeat_calls)


def repeat_checks(call: Callable[[], Tensor], expected: Tensor, repeat_calls: int) -> Iterator[Found]:
    """The same call many times, and on CUDA from a graph; expected is what it gave before."""
    device = expected.device
    differing = torch.zeros((), dtype=torch.int64, device=device)
    want = expected.contiguous().reshape(-1).view(torch.uint8)
    for _ in range(repeat_calls):
        differing += (call().contiguous().reshape(-1).view(torch.uint8) != want).sum()
    name = f"{repeat_calls} identical calls"
    yield Found(name, int(differing), want.numel() * repeat_calls, "in one of the calls")
    if device.type == "cuda":
        from harness.worker.kernel_clock import capture

        held: list[Tensor] = []
        graph = capture(lambda: held.append(call()))
        held[0].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        tally = Tally("graph against eager", device)
        tally.compare("the replay", held[0], expected)
        yield tally.found()
