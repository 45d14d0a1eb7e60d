"""Which places a run may measure on: locks held, nobody else on the GPU; or, with `--no-gate`, what it went past."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import gate, gpus
from harness.errors import GateError
from harness.locks import POLL_S, Place, hold, places

SETTLE_S = 2.0  # in which the processes of a run that has just been killed are gone


@dataclass(frozen=True)
class Admitted:
    """A place for each job. `ignored`: what the gate would have refused; None: it was on."""

    places: tuple[Place, ...]
    ignored: tuple[str, ...] | None = None


@contextlib.contextmanager
def admit(
    device: str, jobs: int = 1, *, timed: bool = True, lock_dir: Path | None = None, gate_off: bool = False
) -> Iterator[Admitted]:
    """Hold a place per job while the run lasts; GateError says who is in the way and what to do.

    `timed`: something is measured for its time, so a foreign process on the GPU refuses; bytes do not mind it.
    """

    def foreign(place: Place) -> str | None:
        if not timed or place.gpu is None:
            return None
        deadline = time.monotonic() + SETTLE_S
        while (reason := gate.foreign_processes(place.gpu)) is not None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return reason

    if not gate_off:
        with hold(device, jobs, lock_dir, refuse=foreign) as held:
            _one_kind(held)
            yield Admitted(held)
        return
    with contextlib.ExitStack() as stack:
        try:
            admitted = Admitted(stack.enter_context(hold(device, jobs, lock_dir, refuse=foreign)), ())
        except GateError as refusal:
            admitted = Admitted(_anyway(device, jobs), (str(refusal),))
        yield admitted


def _anyway(device: str, jobs: int) -> tuple[Place, ...]:
    """Places without a lock, each GPU as often as it takes."""
    offered = places(device)
    return tuple(offered[number % len(offered)] for number in range(jobs))


def _one_kind(held: tuple[Place, ...]) -> None:
    """Raise GateError for jobs on different GPUs: one record describes one kind of machine."""
    names = sorted({place.gpu.name for place in held if place.gpu is not None})
    if len(names) > 1:
        raise GateError(
            f"the free GPUs are of several kinds ({', '.join(names)}) and a record describes one; "
            f"choose equal ones with {gpus.VISIBLE}"
        )
