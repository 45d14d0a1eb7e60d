"""A spec's limit on memory against what a child says it has held. Pure."""

from __future__ import annotations

GIB = 2**30


def peak_problem(held: int | None, allowed_gib: float | None, device: str) -> str | None:
    """What breaks `max_peak_gib` [GiB], or None. `held` [bytes]: a child's peak so far; None where it says nothing."""
    if allowed_gib is None:
        return None
    where = "on the GPU" if device.startswith("cuda") else "in memory"
    if held is None:
        return f"max_peak_gib is {allowed_gib:g}, and the child does not say how much it has held {where}"
    if held <= allowed_gib * GIB:
        return None
    return f"a child has held {held / GIB:.2f} GiB {where}, max_peak_gib is {allowed_gib:g}"
