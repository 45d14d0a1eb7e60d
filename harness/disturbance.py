"""What else the machine did while an arm ran: two readings of telemetry, compared with the spec's limits.

The causes come from telemetry alone. Nothing here sees a rate, so no pair can be dropped for its value.
"""

from __future__ import annotations

from harness.record.lines import Disturbance
from harness.record.telemetry import THROTTLED
from harness.spec.model import Discard


def disturbances(rule: Discard, foreign: float | None = None, throttled: str | None = None) -> tuple[Disturbance, ...]:
    """Causes that the spec's rule names, from the cores that were `foreign` and what held the clock down, in words."""
    found = []
    if rule.throttled and throttled:
        found.append(Disturbance(cause="throttled", detail=throttled.removeprefix(f"{THROTTLED}: ")))
    if rule.foreign_cores is not None and foreign is not None and foreign > rule.foreign_cores:
        detail = f"other processes kept {foreign:.2f} cores busy, the limit is {rule.foreign_cores:g}"
        found.append(Disturbance(cause="foreign_load", detail=detail))
    return tuple(found)
