"""A driver for tests: a module that answers as nvidia-ml-py does, for GPUs whose state a test sets."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest


@dataclass
class FakeGpu:
    """One card; times in nanoseconds and power in milliwatts, as NVML counts."""

    uuid: str
    name: str = "NVIDIA H200"
    free: int = 100 * 2**30
    total: int = 140 * 2**30
    processes: dict[int, int | None] = field(default_factory=dict)
    reasons: int = 0
    sm_clock: int = 1980
    memory_temperature: int | None = 74
    power_ns: int = 0
    thermal_ns: int = 0


class NotSupported(Exception):
    """What NVML raises for a reading that a card does not have."""


def fake_nvml(
    monkeypatch: pytest.MonkeyPatch, *cards: FakeGpu, missing: tuple[str, ...] = (), old_names: bool = False
) -> SimpleNamespace:
    """Install the driver; `missing` functions raise. The result's `open` counts inits without a shutdown."""
    seen = SimpleNamespace(open=0)
    module = ModuleType("pynvml")

    def init() -> None:
        seen.open += 1

    def shutdown() -> None:
        seen.open -= 1

    def by_uuid(uuid: str) -> FakeGpu:
        return next(card for card in cards if card.uuid == uuid)

    functions = {
        "nvmlInit": init,
        "nvmlShutdown": shutdown,
        "nvmlSystemGetDriverVersion": lambda: b"580.1" if old_names else "580.1",
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: cards[index],
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda card: card.uuid.encode() if old_names else card.uuid,
        "nvmlDeviceGetName": lambda card: card.name,
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(free=card.free, total=card.total),
        "nvmlDeviceGetComputeRunningProcesses": lambda card: [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes.items()
        ],
        "nvmlDeviceGetClockInfo": lambda card, kind: {1: card.sm_clock, 2: 3201}[kind],
        "nvmlDeviceGetTemperature": lambda card, sensor: 61,
        "nvmlDeviceGetFieldValues": lambda card, fields: [
            SimpleNamespace(
                nvmlReturn=3 * (card.memory_temperature is None),  # NVML_ERROR_NOT_SUPPORTED
                value=SimpleNamespace(uiVal={82: card.memory_temperature or 0}[field]),
            )
            for field in fields
        ],
        "nvmlDeviceGetPowerUsage": lambda card: 412_345,
        "nvmlDeviceGetEnforcedPowerLimit": lambda card: 700_000,
        "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=97),
        f"nvmlDeviceGetCurrentClocks{'Throttle' if old_names else 'Event'}Reasons": lambda card: card.reasons,
        "nvmlDeviceGetViolationStatus": lambda card, policy: SimpleNamespace(
            violationTime={0: card.power_ns, 1: card.thermal_ns}[policy]
        ),
    }

    def refuse(*args: object) -> None:
        raise NotSupported

    for name, function in functions.items():
        setattr(module, name, refuse if name in missing else function)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return seen


def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the package and without nvidia-smi."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("harness.gpus.shutil.which", lambda name: None)
