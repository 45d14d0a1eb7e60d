"""Attention on its own: a filled cache of one layer shape, byte checks, error, and the arms to time.

A row's place is its position, so its one-row call starts at that position; it also runs on a cache in which every key
that it may not see is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from harness.kernel_figures import OURS
from harness.record.lines import KernelShapeLine
from harness.worker import kernel_api
from harness.worker.kernel_api import visible
from harness.worker.kernel_checks import Found, Tally, repeat_checks
from harness.worker.kernel_clock import KernelArm
from harness.worker.kernel_geometry import layer_of
from harness.worker.kernel_qmv import copies_for, rel_error, sequence
from kernels import MAX_ROWS

MARGIN = 7  # slots of a ring beyond the window, as the engine's caches have them


class AttentionBench:
    """One layer shape at one context, ready to be checked and timed."""

    def __init__(self, args: dict[str, Any], device: str) -> None:
        self.args, self.device = args, device
        self.layer = layer_of(args["geometry"], args["layer"])
        self.context = int(args["context"])
        window = self.layer.window
        self.first = self.context - MAX_ROWS // 2  # rows on both sides of an edge of blocks and chunks of keys
        self.capacity = self.context + MAX_ROWS
        self.ring = self.capacity if window is None else window + MARGIN
        seen = len(visible(self.first, window))
        self.nbytes = seen * self.layer.groups * self.layer.width * 2 * 2
        self.copies = copies_for(self.nbytes, args["rotate_mb"], device)
        generator = torch.Generator(device).manual_seed(args["seed"])
        self.q = self._random(generator, MAX_ROWS, self.layer.heads, self.layer.width, scale=self.layer.width**-0.5)
        size = (self.layer.groups, self.ring, self.layer.width)
        first = (self._random(generator, *size), self._random(generator, *size))
        self.caches = [first, *((first[0].clone(), first[1].clone()) for _ in range(self.copies - 1))]
        places = range(self.first, self.first + MAX_ROWS)  # tensors made once: our attention reads them ahead
        self.positions = [torch.tensor([place], dtype=torch.int32, device=device) for place in places]
        self.ours = kernel_api.attention(
            args["backend"],
            self.layer.heads,
            self.layer.groups,
            self.layer.width,
            window,
            self.ring,
            self.capacity,
            device,
        )

    def _random(self, generator: torch.Generator, *size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=generator, device=self.device) * scale).to(torch.bfloat16)

    def shape_line(self, case: str) -> KernelShapeLine:
        """What is run."""
        layer = self.layer
        return KernelShapeLine(
            case=case,
            op="attention",
            name=f"{self.args['geometry']} {layer.kind}",
            shape=f"{layer.heads} heads on {layer.groups} x {layer.width}, {self.context} keys",
            nbytes=self.nbytes,
            copies=self.copies,
            backend=self.args["backend"],
            config=self.ours.config,
        )

    def _call(self, q: Tensor, rows: int, row: int = 0, cache: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attention of `rows` rows, the first at the place of row `row`."""
        k, v = cache or self.caches[0]
        return self.ours.run(q, k, v, self.positions[row], self.first + row, rows)

    def checks(self) -> Iterator[Found]:
        """Byte checks, the last of them on many calls."""
        nan = torch.full_like(self.q, float("nan"))
        alone = []
        for row in range(MAX_ROWS):
            one = nan.clone()
            one[0] = self.q[row]
            alone.append(self._call(one, 1, row)[0].clone())
        if any(bool(torch.isnan(out.float()).any()) for out in alone):
            yield Found("a row alone, NaN in the other slots", 1, 1, "NaN reached the row")
            return
        tally = Tally("M = 1..8 against one-row calls", self.q.device)
        for count in range(1, MAX_ROWS + 1):
            out = self._call(self.q, count)
            for row in range(count):
                tally.compare(f"M = {count}, row {row}", out[row], alone[row])
        yield tally.found()
        tally = Tally("one-row calls on a cache that holds the row's own keys alone", self.q.device)
        for row in range(MAX_ROWS):
            out = self._call(self.q.roll(-row, 0).contiguous(), 1, row, self._cut(row))
            tally.compare(f"row {row}", out[0], alone[row])
        yield tally.found()
        tally = Tally("NaN in the other rows", self.q.device)
        for row in range(MAX_ROWS):
            lonely = nan.clone()
            lonely[row] = self.q[row]
            tally.compare(f"row {row}", self._call(lonely, MAX_ROWS)[row], alone[row])
        yield tally.found()
        position, (k, v) = self.positions[0], self.caches[0]

        def again() -> Tensor:
            return self.ours.run(self.q, k, v, position, self.first, MAX_ROWS)

        yield from repeat_checks(again, torch.stack(alone), self.args["repeat_calls"])

    def _cut(self, row: int) -> tuple[Tensor, Tensor]:
        """The cache with NaN wherever this row may not look."""
        slots = torch.tensor([key % self.ring for key in visible(self.first + row, self.layer.window)])
        hidden = torch.ones(self.caches[0][0].shape[1], dtype=torch.bool)
        hidden[slots] = False
        hidden = hidden.to(self.q.device)[None, :, None]
        k, v = (tensor.masked_fill(hidden, float("nan")) for tensor in self.caches[0])
        return k, v

    def our_arms(self) -> list[KernelArm]:
        """Ours at each number of rows over rotated caches; the error of a row includes the rounding of its output."""
        error = rel_error(self._call(self.q, MAX_ROWS), self._exact())
        order = sequence(self.copies, self.nbytes, self.args["rotate_mb"])
        position = self.positions[0]
        return [
            KernelArm(OURS, rows, self.nbytes, len(order), self._calls(order, position, rows), rel_error=error)
            for rows in self.args["rows"]
        ]

    def _calls(self, order: list[int], position: Tensor, rows: int) -> Callable[[], None]:
        def run() -> None:
            for copy in order:
                self.ours.run(self.q, *self.caches[copy], position, self.first, rows)

        return run

    def _exact(self) -> Tensor:
        """Attention of all 8 rows in float64."""
        layer = self.layer
        out = torch.empty(MAX_ROWS, layer.heads, layer.width, dtype=torch.float64, device=self.q.device)
        k, v = self.caches[0]
        for row in range(MAX_ROWS):
            slots = torch.tensor([key % self.ring for key in visible(self.first + row, layer.window)], device=k.device)
            keys, values = (tensor.index_select(1, slots).double() for tensor in (k, v))
            queries = self.q[row].double().view(layer.groups, -1, layer.width)
            weights = torch.softmax(queries @ keys.transpose(1, 2), -1)
            out[row] = (weights @ values).reshape(layer.heads, layer.width)
        return out
