"""The machine's state before and after an arm, and whether it disturbed what was timed between. Pure.

Whether a pair of readings spoils an arm is decided from the readings alone, never from the time that was measured.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

THROTTLED, BUSY = "throttled", "busy"
HARMLESS = frozenset({"gpu_idle", "applications_clocks_setting"})  # nothing to do, or the clock that somebody chose
VIOLATION_SHARE = 0.01  # of the time between two readings that a clock was held down
FOREIGN_SHARE = 0.25  # of all cores: other work that takes more than this disturbs
SHORTEST_S = 0.2  # CPU seconds are counted in hundredths; a shorter span says nothing


class Telemetry(BaseModel):
    """One reading. Whatever this machine does not tell is None."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_s: float  # monotonic clock of the reading process
    load1: float | None = None
    cores: int | None = None  # of the machine, for `cpu_busy_s`
    cpu_mhz: float | None = None  # mean over the cores
    cpu_busy_s: float | None = None  # CPU seconds that the whole machine has worked, and that were taken from it
    own_cpu_s: float | None = None  # CPU seconds of this run's processes
    cpu_throttles: int | None = None  # times a core was slowed down by heat, counted by the system
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    power_w: float | None = None
    utilisation: int | None = None  # percent of the last second in which a kernel ran
    throttle: tuple[str, ...] | None = None  # NVML's reasons for the clock, in its words
    power_held_ms: float | None = None  # time that the power limit has held the clock down, since the driver loaded
    thermal_held_ms: float | None = None  # the same for heat


def throttled(before: Telemetry | None, after: Telemetry | None) -> str | None:
    """`throttled: <what held the clock down>` when either reading, or a counter between them, says so; else None."""
    found = {
        name for reading in (before, after) if reading is not None for name in reading.throttle or () if name
    } - HARMLESS
    if before is not None and after is not None:
        span_ms = 1000 * (after.at_s - before.at_s)
        for name, start, end in (
            ("power limit", before.power_held_ms, after.power_held_ms),
            ("heat", before.thermal_held_ms, after.thermal_held_ms),
        ):
            if start is not None and end is not None and end - start > VIOLATION_SHARE * max(span_ms, 1.0):
                found.add(f"{name} {end - start:.0f} ms")
        if before.cpu_throttles is not None and (after.cpu_throttles or 0) > before.cpu_throttles:
            found.add("cpu heat")
    return f"{THROTTLED}: {', '.join(sorted(found))}" if found else None


def foreign_cores(before: Telemetry | None, after: Telemetry | None) -> float | None:
    """Cores that other programs kept busy between two readings; None when that cannot be told."""
    if before is None or after is None or after.at_s - before.at_s < SHORTEST_S:
        return None
    if None in (before.cpu_busy_s, after.cpu_busy_s, before.own_cpu_s, after.own_cpu_s):
        return None
    whole = (after.cpu_busy_s or 0.0) - (before.cpu_busy_s or 0.0)
    own = (after.own_cpu_s or 0.0) - (before.own_cpu_s or 0.0)
    return max((whole - own) / (after.at_s - before.at_s), 0.0)


def busy(before: Telemetry | None, after: Telemetry | None) -> str | None:
    """`busy: <how much>` when other programs took more than a quarter of the cores between two readings; else None."""
    foreign = foreign_cores(before, after)
    cores = after.cores if after is not None else None
    if foreign is None or not cores or foreign <= FOREIGN_SHARE * cores:
        return None
    return f"{BUSY}: other work on {foreign:.1f} of {cores} cores"


def disturbed(before: Telemetry | None, after: Telemetry | None) -> str | None:
    """Why an arm between two readings does not count, as `code: detail`, or None."""
    return throttled(before, after) or busy(before, after)
