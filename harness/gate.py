"""Whether this machine is fit to measure on now: one measuring run per device, memory for the pair, a quiet CPU.

The lock and the memory check refuse; a busy CPU is only noted, beside every figure that it may have touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from harness.errors import GateError
from harness.record.store import slug

BUSY_SHARE = 0.5  # load average per core above which the CPU counts as busy
PROCESS_BYTES = 600 * 2**20  # interpreter, torch and one prompt's caches
DENSE_BITS = 16
SMALL_PAIR_BYTES = 64 * 2**20
_GIB = 2**30


@dataclass(frozen=True)
class Reading:
    """The machine's state at one moment."""

    load1: float | None
    cores: int
    memory_available_gib: float | None

    @property
    def busy(self) -> bool:
        """Whether other work runs here."""
        return self.load1 is not None and self.load1 > BUSY_SHARE * self.cores

    @property
    def note(self) -> str:
        """What a reader must know, or an empty string."""
        if not self.busy:
            return ""
        return f"other work was running: load average {self.load1:.2f} on {self.cores} cores before the first arm"


def reading() -> Reading:
    """Load, cores and memory now."""
    available = memory_available_bytes()
    return Reading(
        load1=load1(),
        cores=usable_cores(),
        memory_available_gib=round(available / _GIB, 2) if available is not None else None,
    )


def load1() -> float | None:
    """The one-minute load average, where the system has one."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_available_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def estimate_load_bytes(folder: Path, device: str) -> int:
    """Memory that loading a checkpoint takes in the process: on a CPU its weights are dequantized once.

    An estimate from file sizes and the smallest bit width in config.json; 0 for a folder that cannot be read.
    """
    try:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        quantization = config.get("quantization") or {}
        bits = int(quantization.get("bits", DENSE_BITS))
    except (OSError, ValueError, TypeError, AttributeError):
        return 0  # the loader says what is wrong with it, and says it better
    factor = DENSE_BITS / bits if device == "cpu" and bits > 0 else 1.0
    return int(size * factor)


def default_threads(folders: tuple[Path, ...], device: str) -> int | None:
    """Threads of a child that the user did not set: one for a small pair on a CPU, else torch's own choice (None).

    A small pair's step is hundreds of tiny ops. Two threads meet after each of them, so any other process that takes
    one of their cores stalls every op: measured on two busy cores, 650 ms a step with two threads, 22 ms with one.
    """
    if not device.startswith("cpu"):
        return None
    size = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    return 1 if size < SMALL_PAIR_BYTES else None


def check_memory(folders: tuple[Path, ...], device: str, available: int | None = None) -> None:
    """Raise GateError when a pair will not fit into the memory that is free now."""
    free = memory_available_bytes() if available is None else available
    if free is None or not device.startswith("cpu"):
        return
    needed = PROCESS_BYTES + sum(estimate_load_bytes(folder, device) for folder in folders)
    if needed > free:
        names = " and ".join(folder.name for folder in folders) or "a child without a pair"
        raise GateError(
            f"memory: loading {names} takes about {needed / _GIB:.1f} GiB and {free / _GIB:.1f} GiB are free; "
            "end other programs or use a larger machine"
        )


@contextlib.contextmanager
def measuring_lock(device: str, folder: Path | None = None) -> Iterator[None]:
    """Hold the machine-wide lock of a device; raises GateError at once when another run holds it."""
    path = (folder or Path(tempfile.gettempdir())) / f"mtp-harness-{slug(device)}.lock"
    lock = FileLock(path, timeout=0, mode=0o666)
    try:
        lock.acquire()
    except Timeout:
        raise GateError(
            f"another measuring run holds the {device} lock; two at once would disturb each other: wait for it to end"
        ) from None
    except OSError as error:
        raise GateError(
            f"cannot lock {device} for measuring ({error.strerror}); point TMPDIR to a folder of your own"
        ) from None
    try:
        yield
    finally:
        lock.release()
