"""A quantized product on its own: random weights of one shape, byte checks, error, and the arms to time.

Weights are random normals quantized in the checkpoint's affine format, rotated over copies so that none is found in
the cache. Peers get the same codes, as far as their format holds them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.kernel_figures import OURS
from harness.record.lines import KernelShapeLine, PeerLine
from harness.worker import kernel_api
from harness.worker.kernel_checks import Found, row_checks
from harness.worker.kernel_clock import Clock, KernelArm, warm
from kernels import MAX_ROWS

GROUP = 64
ELEMENTS_AT_ONCE = 1 << 26
MAX_CALLS = 1024
PEER_ERROR = 0.1
"""Largest error of a peer's output, which may be a sum in bf16: beyond it the peer computes another function."""


@dataclass(frozen=True)
class Codes:
    """An affine matrix: codes uint8 [N, K], scales and biases bf16 [N, K / 64]."""

    codes: Tensor
    scales: Tensor
    biases: Tensor


def random_codes(n: int, k: int, bits: int, generator: torch.Generator, device: str) -> Codes:
    """Normals of deviation 0.02, quantized group by group."""
    parts = []
    top = (1 << bits) - 1
    for begin in range(0, n, max(1, ELEMENTS_AT_ONCE // k)):
        rows = min(max(1, ELEMENTS_AT_ONCE // k), n - begin)
        w = torch.randn(rows, k // GROUP, GROUP, generator=generator, device=device) * 0.02
        low, high = w.amin(-1), w.amax(-1)
        scales, biases = ((high - low) / top).to(torch.bfloat16), low.to(torch.bfloat16)
        steps = (w - biases.float()[..., None]) / scales.float()[..., None]
        parts.append((steps.round_().clamp_(0, top).to(torch.uint8).view(rows, k), scales, biases))
    codes, scales, biases = (torch.cat(column) for column in zip(*parts, strict=True))
    return Codes(codes, scales, biases)


def exact(x: Tensor, codes: Tensor, scales: Tensor, biases: Tensor) -> Tensor:
    """The product in float64: x [M, K] -> [M, N], a part of N at a time."""
    n, k = codes.shape
    wide, out = x.double(), torch.empty(x.shape[0], n, dtype=torch.float64, device=x.device)
    step = max(1, ELEMENTS_AT_ONCE // k)
    for begin in range(0, n, step):
        part = slice(begin, min(begin + step, n))
        w = codes[part].view(-1, k // GROUP, GROUP).double()
        w = w * scales[part].double()[..., None] + biases[part].double()[..., None]
        out[:, part] = wide @ w.view(-1, k).t()
    return out


def rel_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected|| over all values."""
    return float((found.double() - expected).norm() / expected.norm())


def copies_for(nbytes: int, rotate_mb: int, device: str) -> int:
    """Copies to rotate over, at least two; on a CPU no more, since nothing there is timed for its speed."""
    return max(2, -(-rotate_mb * 1_000_000 // nbytes)) if device.startswith("cuda") else 2


def sequence(copies: int, nbytes: int, rotate_mb: int) -> list[int]:
    """Which copy each call of a timed sequence takes: all in turn, about twice `rotate_mb` in all."""
    rounds = min(max(1, round(2e6 * rotate_mb / (copies * nbytes))), max(1, MAX_CALLS // copies), 2)
    return list(range(copies)) * rounds


class QmvBench:
    """One shape, ready to be checked and timed."""

    def __init__(self, args: dict[str, Any], device: str) -> None:
        self.args, self.device = args, device
        shape = args["shape"]
        self.k, self.n, self.bits = int(shape["k"]), int(shape["n"]), int(shape["bits"])
        generator = torch.Generator(device).manual_seed(args["seed"])
        self.weight = random_codes(self.n, self.k, self.bits, generator, device)
        self.x = torch.randn(MAX_ROWS, self.k, generator=generator, device=device).to(torch.bfloat16)
        stored = self.n * self.k * self.bits // 8 + self.n * self.k // GROUP * 4
        self.copies = copies_for(stored, args["rotate_mb"], device)
        self.ours = kernel_api.product(
            args["backend"], self.weight.codes, self.weight.scales, self.weight.biases, self.bits, self.copies
        )
        self.packed = self.ours.pack(self.x)

    def shape_line(self, case: str) -> KernelShapeLine:
        """What is run."""
        return KernelShapeLine(
            case=case,
            op="qmv",
            name=self.args["shape"]["name"],
            shape=f"{self.k}x{self.n}-{self.bits}bit",
            nbytes=self.ours.nbytes,
            copies=self.copies,
            backend=self.args["backend"],
            config=self.ours.config,
        )

    def checks(self) -> Iterator[Found]:
        """Byte checks on the partial sums, before any rounding could hide a difference."""

        def call(x: Tensor, rows: int) -> Tensor:
            return self.ours.run(self.ours.pack(x), 0, rows).transpose(0, 1)

        def call_rows(x: Tensor, rows: int) -> Tensor:
            return self.ours.run_rows(self.ours.pack(x), 0, rows).transpose(0, 1)

        def again() -> Tensor:
            return self.ours.run(self.packed, 0, MAX_ROWS).transpose(0, 1)

        yield from row_checks(call, call_rows, self.x, again, self.args["repeat_calls"])

    def our_arms(self) -> list[KernelArm]:
        """Ours at each number of rows, and four one-row launches, each on weights of its own."""
        weight = self.weight
        expected = exact(self.x, weight.codes, weight.scales, weight.biases)
        error = rel_error(kernel_api.total(self.ours.run(self.packed, 0, MAX_ROWS)), expected)
        order = sequence(self.copies, self.ours.nbytes, self.args["rotate_mb"])
        arms = [
            KernelArm(OURS, rows, self.ours.nbytes, len(order), self._calls(order, rows), rel_error=error)
            for rows in self.args["rows"]
        ]
        if {1, 4} <= set(self.args["rows"]):
            alone = [self.ours.pack(self.x.roll(-row, 0)) for row in range(4)]
            order = order if len(order) % 4 == 0 else order * 4

            def four() -> None:
                for place, copy in enumerate(order):
                    self.ours.run(alone[place % 4], copy, 1)

            arms.append(KernelArm(OURS, 1, 4 * self.ours.nbytes, len(order) // 4, four, launches=4))
        return arms

    def _calls(self, order: list[int], rows: int) -> Callable[[], None]:
        def run() -> None:
            for copy in order:
                self.ours.run(self.packed, copy, rows)

        return run

    def peer(self, name: str, case: str) -> tuple[PeerLine, list[KernelArm]]:
        """A peer's arms, or none and the reason; whatever goes wrong in a peer is a reason, not a failure of ours."""
        try:
            module: Any = importlib.import_module(f"tools.peers.{name}")
        except ImportError as error:
            return PeerLine(case=case, peer=name, reason=f"tools/peers is not here: {error}"), []
        reason = module.available(self.device) or module.supports(self.k, self.n, self.bits)
        if reason:
            return PeerLine(case=case, peer=name, reason=reason), []
        try:
            arms, note = self._peer_arms(name, module)
        except Exception as error:
            words = " ".join(str(error).split())[:200]
            reason = f"{type(error).__name__}: {words}"
            return PeerLine(case=case, peer=name, reason=reason, version=module.version()), []
        reason = next((text for arm in arms if (text := _wrong(arm))), None)
        line = PeerLine(case=case, peer=name, reason=reason, version=module.version(), note=note)
        return line, [] if reason else arms

    def _peer_arms(self, name: str, module: Any) -> tuple[list[KernelArm], str]:
        from tools.peers.base import Affine

        weight = self.weight
        made = module.build(Affine(weight.codes, weight.scales, weight.biases, self.bits), self.copies)
        order = sequence(self.copies, made.nbytes, self.args["rotate_mb"])
        clock: Clock = "graph" if self.device.startswith("cuda") and made.clock == "graph" else "host"
        arms = []
        for rows in self.args["peer_rows"]:
            x = self.x[:rows].contiguous()
            error = rel_error(made.output(x), exact(x, weight.codes, made.scales, made.biases))
            arm = KernelArm(name, rows, made.nbytes, len(order), _peer_calls(made, x, order), clock=clock)
            arm.rel_error = error
            warm(arm)
            arms.append(arm)
        return arms, made.note


def _peer_calls(made: Any, x: Tensor, order: list[int]) -> Callable[[], None]:
    def run() -> None:
        if made.batch is not None:
            made.batch(x, order)
            return
        for copy in order:
            made.call(x, copy)

    return run


def _wrong(arm: KernelArm) -> str | None:
    if arm.rel_error is not None and not arm.rel_error <= PEER_ERROR:
        return f"its result is another one at M = {arm.rows}: relative error {arm.rel_error:.2g}, so it is not timed"
    return None
