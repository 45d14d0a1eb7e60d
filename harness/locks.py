"""Where a run may measure: one machine-wide lock per GPU, and one for the CPU. A killed process frees what it held.

`cuda` means any GPU that is free, `cuda:N` that one. A GPU is named by its UUID, so two runs that number GPUs
differently still exclude each other.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from harness import gpus
from harness.errors import GateError
from harness.gpus import Gpu
from harness.record.store import slug

POLL_S = 0.2


@dataclass(frozen=True)
class Place:
    """Where a child runs. `pin` is what it gets as CUDA_VISIBLE_DEVICES; None: what this process has."""

    device: str
    gpu: Gpu | None = None
    pin: str | None = None

    @property
    def key(self) -> str:
        """What its lock is named by."""
        if self.gpu is not None:
            return self.gpu.uuid
        return "cuda:0" if self.device == "cuda" else self.device

    @property
    def label(self) -> str:
        """How messages call it."""
        return str(self.gpu) if self.gpu is not None else self.device


def places(device: str) -> tuple[Place, ...]:
    """Every place that a device word may mean, best first."""
    if not device.startswith("cuda"):
        return (Place(device),)
    seen = gpus.visible()
    _, _, index = device.partition(":")
    if index:
        known = seen[int(index)] if index.isdigit() and int(index) < len(seen) else None
        return (Place(device, known),)
    if not seen:
        return (Place(device),)  # the driver names none: the child will say what it sees
    return tuple(Place(device, gpu, gpu.uuid if len(seen) > 1 else None) for gpu in seen)


@contextlib.contextmanager
def measuring_lock(device: str | Place, folder: Path | None = None, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a device, or of the GPU that it means first; GateError when another run holds it past `wait_s`.

    The folder is the system's for temporary files, so that all runs of a machine meet there.
    """
    place = device if isinstance(device, Place) else places(device)[0]
    lock = _lock(place, folder)
    if not _take(lock, place, wait_s):
        raise GateError(
            f"another measuring run holds the {place.label} lock; two at once would disturb each other: "
            "wait for it to end"
        )
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def hold(
    device: str,
    jobs: int = 1,
    folder: Path | None = None,
    *,
    refuse: Callable[[Place], str | None] = lambda place: None,
    wait_s: float = 0.0,
    prefer: Place | None = None,
) -> Iterator[tuple[Place, ...]]:
    """Hold a place of a device for each job. More jobs than GPUs share them in turn; on a CPU all share its cores.

    Jobs that share measure no time beside each other: the pool runs what is timed alone. `refuse` says why a place
    whose lock is ours is still not fit, or None; `prefer` is tried first. GateError, with every reason, when too few
    are left after `wait_s`; whatever was taken is free again by then.
    """
    offered = sorted(places(device), key=lambda place: place != prefer)
    wanted = min(jobs, len(offered))
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        while True:
            held, reasons = _take_free(offered, wanted, folder, refuse)
            if len(held) == wanted:
                break
            for _, lock in held:
                lock.release()
            if time.monotonic() >= deadline:
                raise GateError(_too_few(device, wanted, reasons, len(offered)))
            time.sleep(POLL_S)
        for _, lock in held:
            stack.callback(lock.release)
        found = tuple(place for place, _ in held)
        yield tuple(found[number % len(found)] for number in range(jobs))


def _take_free(
    offered: Sequence[Place], wanted: int, folder: Path | None, refuse: Callable[[Place], str | None]
) -> tuple[list[tuple[Place, FileLock]], list[str]]:
    """The first free places and their locks, and why each other one was passed over."""
    held: list[tuple[Place, FileLock]] = []
    reasons: list[str] = []
    try:
        for place in offered:
            if len(held) == wanted:
                break
            lock = _lock(place, folder)
            if not _take(lock, place, 0.0):
                reasons.append(f"another measuring run holds the {place.label} lock")
                continue
            held.append((place, lock))
            if (reason := refuse(place)) is not None:
                reasons.append(reason)
                held.pop()[1].release()
    except BaseException:
        for _, lock in held:
            lock.release()
        raise
    return held, reasons


def _too_few(device: str, wanted: int, reasons: Sequence[str], offered: int) -> str:
    what = "; ".join(reasons)
    if wanted == 1 and offered == 1:
        return f"{what}; two at once would disturb each other: wait for it to end, or give --no-gate"
    free = offered - len(reasons)
    return f"{what}; {wanted} of {offered} are needed on {device} and {free} free: wait, or name another with --device"


def _lock(place: Place, folder: Path | None) -> FileLock:
    path = (folder or Path(tempfile.gettempdir())) / f"mtp-harness-{slug(place.key)}.lock"
    return FileLock(path, mode=0o666, thread_local=False)


def _take(lock: FileLock, place: Place, wait_s: float) -> bool:
    """Whether the lock is ours now; GateError where no lock file can be made."""
    try:
        lock.acquire(timeout=wait_s, poll_interval=POLL_S)
    except Timeout:
        return False
    except OSError as error:
        raise GateError(
            f"cannot lock {place.label} for measuring ({error.strerror}); point TMPDIR to a folder of your own"
        ) from None
    return True
