"""Readings of the machine around each timed arm: GPU by NVML where it is installed, CPU from the system's own files."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.gpus import Gpu
from harness.record.telemetry import Telemetry

REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of nvmlClocksEventReasons (nvml.h)."""
POWER, THERMAL = 0, 1  # nvmlPerfPolicyType_t
SM, MEMORY = 1, 2  # nvmlClockType_t
CORE_TEMPERATURE = 0  # nvmlTemperatureSensors_t
MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
_PROC = Path("/proc")
_CPUS = Path("/sys/devices/system/cpu")


class Meter:
    """Reads one machine, and one of its GPUs; keeps NVML open between readings. Close it, or use it as a context."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        self._gpu = gpu
        self._module: Any = None
        self._handle: Any = None
        if gpu is not None:
            with contextlib.suppress(Exception):  # no package or no driver: the GPU's fields stay empty
                module = importlib.import_module("pynvml")
                module.nvmlInit()
                self._module = module
                self._handle = module.nvmlDeviceGetHandleByUUID(gpu.uuid)

    def read(self, children: Iterable[int] = ()) -> Telemetry:
        """The state now; `children` are the process ids that work for this run beside its own process."""
        gpu = self._read_gpu() if self._handle is not None else {}
        busy, cores = cpu_busy_s()
        own = sum(os.times()[:2]) + sum(process_cpu_s(pid) for pid in children)
        return Telemetry(
            at_s=round(time.monotonic(), 3),
            load1=load1(),
            cores=cores,
            cpu_mhz=cpu_mhz(),
            cpu_busy_s=busy,
            own_cpu_s=round(own, 2),
            cpu_throttles=cpu_throttles(),
            **gpu,
        )

    def _read_gpu(self) -> dict[str, Any]:
        """What NVML says of the GPU; a value that this card or driver does not have is left out."""
        nvml, handle = self._module, self._handle
        found: dict[str, Any] = {}

        def take(name: str, function: str, *args: int, scale: float = 1.0) -> None:
            with contextlib.suppress(Exception):
                value = getattr(nvml, function)(handle, *args)
                found[name] = round(value * scale, 1) if scale != 1.0 else int(value)

        take("sm_clock_mhz", "nvmlDeviceGetClockInfo", SM)
        take("memory_clock_mhz", "nvmlDeviceGetClockInfo", MEMORY)
        take("temperature_c", "nvmlDeviceGetTemperature", CORE_TEMPERATURE)
        with contextlib.suppress(Exception):
            field = nvml.nvmlDeviceGetFieldValues(handle, [MEMORY_TEMPERATURE])[0]
            if field.nvmlReturn == 0:
                found["memory_temperature_c"] = int(field.value.uiVal)
        take("power_w", "nvmlDeviceGetPowerUsage", scale=1e-3)
        with contextlib.suppress(Exception):
            found["utilisation"] = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        for function in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if "throttle" not in found:  # the second is the older name of the first
                with contextlib.suppress(Exception):
                    found["throttle"] = reasons(int(getattr(nvml, function)(handle)))
        for name, policy in (("power_held_ms", POWER), ("thermal_held_ms", THERMAL)):
            with contextlib.suppress(Exception):
                found[name] = round(nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime / 1e6, 3)
        return found

    def close(self) -> None:
        """Let NVML go."""
        if self._module is not None:
            with contextlib.suppress(Exception):
                self._module.nvmlShutdown()
        self._module = self._handle = None

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reasons(bits: int) -> tuple[str, ...]:
    """NVML's bit mask in words; a bit that this list does not know keeps its number."""
    known = tuple(name for bit, name in REASONS.items() if bits & bit)
    unknown = bits & ~sum(REASONS)
    return (*known, f"reason_{unknown:#x}") if unknown else known


def load1() -> float | None:
    """The one-minute load average, where the system has one."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def cpu_busy_s() -> tuple[float | None, int | None]:
    """CPU seconds that all cores together have worked since boot (stolen time included), and their number."""
    try:
        lines = (_PROC / "stat").read_text(encoding="ascii").splitlines()
        ticks = [int(word) for word in lines[0].split()[1:9]]  # user nice system idle iowait irq softirq steal
        cores = sum(re.match(r"cpu\d", line) is not None for line in lines)
        return round((sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), 2), cores
    except (OSError, ValueError, IndexError):
        return None, None


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process and of what it has waited for; 0 for one that is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
        return sum(int(word) for word in stat.rpartition(")")[2].split()[11:15]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def cpu_mhz() -> float | None:
    """Mean clock of the cores in MHz, where the system says."""
    try:
        text = (_PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([0-9.]+)$", text, re.MULTILINE)]
    return round(sum(found) / len(found), 1) if found else None


def cpu_throttles() -> int | None:
    """How often any core was slowed down by heat since boot, where the system counts it."""
    total: int | None = None
    for file in _CPUS.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        with contextlib.suppress(OSError, ValueError):
            total = (total or 0) + int(file.read_text(encoding="ascii"))
    return total
