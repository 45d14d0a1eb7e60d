"""What else the machine did while an arm ran: read before and after it, compared with the spec's limits.

The causes come from telemetry alone. Nothing here sees a rate, so no pair can be dropped for its value.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.record.lines import Disturbance
from harness.spec.model import Discard


@dataclass(frozen=True)
class CpuReading:
    """CPU seconds spent since boot by everybody and by our own processes, and when that was read."""

    at_s: float
    busy_s: float
    own_s: float


def cpu_reading(pids: Iterable[int], proc: Path = Path("/proc")) -> CpuReading | None:
    """CPU seconds now, `pids` being ours beside this process; None where the system does not say."""
    ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, (proc / "stat").read_text().splitlines()[0].split()[1:])
        own = sum(_process_ticks(proc / str(pid) / "stat") for pid in {os.getpid(), *pids})
    except (OSError, ValueError, IndexError):
        return None
    return CpuReading(time.monotonic(), (user + nice + system + irq + softirq) / ticks, own / ticks)


def _process_ticks(stat: Path) -> int:
    """User and system ticks of all threads of one process."""
    fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def foreign_cores(before: CpuReading | None, after: CpuReading | None) -> float | None:
    """Cores that other processes kept busy between two readings; None when that cannot be told."""
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    foreign = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(foreign, 0.0) / (after.at_s - before.at_s)


def disturbances(rule: Discard, foreign: float | None = None, throttled: str | None = None) -> tuple[Disturbance, ...]:
    """Causes that the spec's rule names, from the cores that were `foreign` and what held the clock down, in words."""
    found = []
    if rule.throttled and throttled:
        found.append(Disturbance(cause="throttled", detail=throttled))
    if rule.foreign_cores is not None and foreign is not None and foreign > rule.foreign_cores:
        detail = f"other processes kept {foreign:.2f} cores busy, the limit is {rule.foreign_cores:g}"
        found.append(Disturbance(cause="foreign_load", detail=detail))
    return tuple(found)
