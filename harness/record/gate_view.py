"""The host gate on a page: whether it was on, and what the machine did while arms were timed. From raw lines alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.record.lines import AnyLine, ArmLine, GateLine, StartLine
from harness.record.table import plural
from harness.record.telemetry import Telemetry, busy, foreign_cores, throttled


def gate_rows(starts: Sequence[StartLine], cases: Mapping[str, Sequence[AnyLine]]) -> dict[str, str]:
    """Label -> words for the host table; empty for a record from before there were readings, whose gate was on."""
    events = [event for lines in cases.values() for event in lines]
    gates = [event for event in events if isinstance(event, GateLine)]
    arms = [event for event in events if isinstance(event, ArmLine) and event.before and event.after]
    readings = [one for arm in arms for one in (arm.before, arm.after) if one is not None]
    readings += [gate.telemetry for gate in gates if gate.telemetry is not None]
    rows: dict[str, str] = {}
    off = [start.gate_ignored for start in starts if start.gate_ignored is not None]
    if off:
        ignored = [reason for reasons in off for reason in reasons] + [r for gate in gates for r in gate.ignored]
        found = f"it would have refused: {'; '.join(dict.fromkeys(ignored))}" if ignored else "it had nothing to refuse"
        rows["Host gate"] = f"off (--no-gate); {found}"
    if readings:
        rows["While timing"] = "; ".join(_while_timing(readings, arms, gates))
    return rows


def _while_timing(readings: Sequence[Telemetry], arms: Sequence[ArmLine], gates: Sequence[GateLine]) -> Iterable[str]:
    for name, unit in (
        ("sm_clock_mhz", "MHz SM clock"),
        ("memory_clock_mhz", "MHz memory clock"),
        ("temperature_c", "°C"),
        ("memory_temperature_c", "°C memory"),
        ("power_w", "W"),
        ("cpu_mhz", "MHz CPU"),
        ("load1", "load average"),
    ):
        values = [value for one in readings if (value := getattr(one, name)) is not None]
        if values:
            low, high = min(values), max(values)
            yield f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"
    if arms:
        held = [reason for arm in arms if (reason := throttled(arm.before, arm.after))]
        other = [foreign_cores(arm.before, arm.after) or 0.0 for arm in arms if busy(arm.before, arm.after)]
        yield f"{len(held)} of {plural(len(arms), 'timed run')} throttled" + _commonest(held)
        yield f"{len(other)} beside other work" + (f" (on up to {max(other):.1f} cores)" if other else "")
    notes = [gate.note for gate in gates if gate.note]
    if notes:
        yield f"at the start of {plural(len(notes), 'case')}: {notes[0]}"


def _commonest(reasons: Sequence[str]) -> str:
    """The commonest reason, in brackets."""
    if not reasons:
        return ""
    words = [reason.partition(": ")[2] for reason in reasons]
    return f" ({max(dict.fromkeys(words), key=words.count)})"
