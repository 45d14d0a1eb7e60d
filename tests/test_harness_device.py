"""The device that a child computes on."""

from __future__ import annotations

import pytest
import torch

from harness.protocol import Setup
from harness.worker.bench import Bench


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_a_numbered_gpu_is_the_current_one(device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels launch on the current device whatever their operands are on, and events wait for its stream alone."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    Bench(Setup(device=device))
    assert chosen == expected
