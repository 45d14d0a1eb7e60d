"""What every test gets: no flags from the shell, and uninitialised float memory that cannot pass for a result.

Without a GPU, Triton kernels run in the interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # triton reads this once, when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FLAG_PREFIXES = ("MLXCEL_", "MLX_", "HARNESS_")


def pytest_collection_finish() -> None:
    """Where a collected test has imported triton, its interpreter gets quicker; others must not pay for the import."""
    if INTERPRETED and "triton" in sys.modules:
        from support_interpreter import patch_once_per_launch

        patch_once_per_launch()


@pytest.fixture(autouse=True)
def clean_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag exported in the shell must not change what a test sees."""
    for name in list(os.environ):
        if name.startswith(FLAG_PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def nan_filled_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.empty` returns NaN in engine and kernel tests, so reading what nobody wrote cannot pass."""
    module = request.node.path.name
    if "torch" not in sys.modules or not module.startswith(("test_engine", "test_kernels", "test_adversarial")):
        yield
        return
    import torch

    real_empty, real_empty_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(real_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(real_empty_like(*a, **k)))
    yield
