"""Times of single steps: what belongs to a step and what does not."""

from __future__ import annotations

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
