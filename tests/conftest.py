"""What every test gets: no flags from the shell, and uninitialised float memory that cannot pass for a result."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

FLAG_PREFIXES = ("MLXCEL_", "MLX_", "HARNESS_")


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
