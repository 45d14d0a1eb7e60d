"""What a gate entry is: a call of a public wrapper, and what its kernels' machine code has to look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kernels.jit import Release

INSTRUCTIONS_PER_WEIGHT = {4: 2.8, 8: 4.5, 16: 2.0}
"""Most lane-instructions a weight of so many bits may cost in a product's main loop.

At the memory's speed an H200 can issue 3.9 to 4.4 per 4-bit weight, twice as many per 8-bit weight and four times as
many per bf16 weight, which need no unpacking.
"""


@dataclass(frozen=True)
class Expect:
    """What a kernel's machine code must show; spills, float atomics and two MMA families are refused in all.

    mma: "HMMA" (warp-level), "HGMMA" (warpgroup-level), "any" (one of the two) or "none".
    rows: columns of the product's second operand, the activation rows; None where a kernel has no such limit.
    per_weight: most lane-instructions of the main loop per weight; None where no weights are read.
    loads_ahead: fewest loads that a thread has on their way before it adds the first two; None where it reads little.
    copies_ahead: fewest asynchronous copies that a thread has on their way before it waits for the launch before.
    release: when the next launch's programs may start.
    shared_bytes: shared memory, where it has to be just that.
    """

    mma: str = "none"
    rows: int | None = None
    per_weight: float | None = None
    loads_ahead: int | None = None
    copies_ahead: int = 0
    release: Release = "late"
    shared_bytes: int | None = None


PRODUCT = Expect(mma="HMMA", rows=8, copies_ahead=1, release="first")
"""A product of any shape, tuned or not."""


def product(bits: int) -> Expect:
    """A quantized product: weights as the m16 operand, 8 rows as the n8 operand, few instructions per weight; the first
    weights are asked for before the wait, and the next launch may start before it."""
    return replace(PRODUCT, per_weight=INSTRUCTIONS_PER_WEIGHT[bits])


@dataclass(frozen=True)
class Entry:
    """One call to be compiled: call(rows) makes a public wrapper launch its kernels for M = rows rows.

    It runs once per M with the same shapes and options otherwise, on tensors of device "meta" or "cpu" that nothing
    reads or writes; each kernel it launches must come out as one variant. `expects` holds what kernels other than
    plain ones must show, by function name.
    """

    name: str
    call: Callable[[int], object]
    expects: Mapping[str, Expect] = field(default_factory=dict)
