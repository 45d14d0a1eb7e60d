"""Times of kernel arms, in turns: each repeat runs every arm once, so a drifting clock touches all alike.

On CUDA an arm is a graph of many calls that follow one another as in decode, over weights that have left the cache;
its replays are queued without a gap, so no launch of the host is in them. Elsewhere, and for a peer that cannot be
captured, the host's clock is all there is, launches included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

WARM_RUNS = 3
Clock = Literal["graph", "host"]


@dataclass
class KernelArm:
    """One arm: `run` makes `calls` calls of `launches` launches each. us fills up as it is timed."""

    name: str
    rows: int
    nbytes: int  # of one call
    calls: int
    run: Callable[[], object]
    launches: int = 1
    again: bool = False
    clock: Clock = "graph"
    rel_error: float | None = None


def warm(arm: KernelArm) -> None:
    """Compile and load whatever the first run needs; errors of a peer show here."""
    for _ in range(WARM_RUNS - 1):
        arm.run()
    if torch.cuda.is_available() and arm.clock == "graph":
        torch.cuda.synchronize()


def time_arms(
    arms: Sequence[KernelArm], repeats: int, device: str, progress: Callable[[int], None]
) -> list[tuple[float, ...]]:
    """Microseconds per call of each arm, one value per repeat."""
    if device.startswith("cuda"):
        return _time_on_gpu(arms, repeats, progress)
    found: list[list[float]] = [[] for _ in arms]
    for repeat in range(repeats):
        progress(repeat)
        for arm, values in zip(arms, found, strict=True):
            values.append(_host_us(arm))
    return [tuple(values) for values in found]


def _host_us(arm: KernelArm) -> float:
    began = time.perf_counter()
    arm.run()
    return (time.perf_counter() - began) / arm.calls * 1e6


def _time_on_gpu(arms: Sequence[KernelArm], repeats: int, progress: Callable[[int], None]) -> list[tuple[float, ...]]:
    graphs = [capture(arm.run) if arm.clock == "graph" else None for arm in arms]
    captured = [graph for graph in graphs if graph is not None]
    for ready in captured:
        for _ in range(WARM_RUNS):
            ready.replay()
    torch.cuda.synchronize()
    found: list[list[float]] = [[] for _ in arms]
    for repeat in range(repeats):
        progress(repeat)
        if captured:
            captured[0].replay()  # lead-in: the queue never runs dry while an arm is timed
        marks: list[tuple[Any, Any] | None] = []
        for graph in graphs:
            if graph is None:
                marks.append(None)
                continue
            begin, end = _event(), _event()
            begin.record()
            graph.replay()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        for arm, mark, values in zip(arms, marks, found, strict=True):
            if mark is not None:
                values.append(mark[0].elapsed_time(mark[1]) * 1e3 / arm.calls)
        for arm, mark, values in zip(arms, marks, found, strict=True):
            if mark is None:
                values.append(_host_us(arm))
    return [tuple(values) for values in found]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one run; everything it needs must have been compiled before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def fastest(calls: Sequence[Callable[[], object]], device: str) -> Callable[[], object]:
    """The call that takes the least time, tried a few times each."""
    if len(calls) == 1 or not device.startswith("cuda"):
        return calls[0]
    arms = [KernelArm("", 0, 1, 1, call) for call in calls]
    for arm in arms:
        warm(arm)
    times = time_arms(arms, 5, device, lambda repeat: None)
    return calls[min(range(len(calls)), key=lambda place: min(times[place]))]
