"""Times of single steps: what belongs to a step and what does not."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from harness.worker import steps


def test_a_step_is_not_charged_for_the_copy_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the window a block of 8 rows is timed on a copy of the caches, which the device may still be making."""
    clock, waiting = [0.0], [0.5]  # seconds so far, and what the device still has to do

    def synchronize() -> None:
        clock[0] += waiting[0]
        waiting[0] = 0.0

    def step() -> str:
        waiting[0] += 2.0
        return "found"

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert steps._timed(step, "cuda") == (2.0, "found")
    assert steps._timed(step, "cpu") == (0.0, "found")


class FakeEvent:
    """A mark in a device's queue: at the end of what was queued before it."""

    queue: ClassVar = [0.0]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = self.queue[0]

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


def test_a_queued_step_is_timed_by_the_device_behind_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the launch of a chain's first recording, milliseconds with nothing before it, in a step's time."""
    queue, launching = FakeEvent.queue, 2.0
    host = [0.0]

    def pause(cycles: int) -> None:
        queue[0] = max(queue[0], host[0]) + cycles / 2e6

    def step() -> float:
        host[0] += launching
        queue[0] = max(queue[0], host[0]) + 3.0
        return 1.5

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", pause)
    assert steps._timed(step, "cuda", queued=True) == (3.0, 1.5)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    host[0] = queue[0]
    assert steps._timed(step, "cuda", queued=True) == (5.0, 1.5), "without the pause the launch is in it"
