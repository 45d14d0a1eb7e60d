"""Whether this machine is fit to measure on now: memory for the pair, nobody else on the GPU, a quiet CPU.

Too little memory and a foreign process on the GPU refuse. A busy CPU is waited for, then noted beside every figure
that it may have touched; `--require quiet` refuses it. Locks are in `harness.locks`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import gpus
from harness.errors import GateError
from harness.gpus import Gpu
from harness.meter import Meter, load1
from harness.record.telemetry import busy

BUSY_SHARE = 0.5  # load average per core above which the CPU counts as busy
PROCESS_BYTES = 600 * 2**20  # interpreter, torch and one prompt's caches
CUDA_HOST_BYTES = 2 * 2**30  # a process with torch's CUDA libraries, beside the page cache that it reads weights from
CUDA_BYTES = 2**30  # context, kernels, workspaces and one prompt's caches on the GPU
QUIET_SAMPLE_S = 0.5
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


def check_memory(
    folders: Sequence[Path], device: str, available: int | None = None, gpu_free: int | None = None
) -> None:
    """Raise GateError when a pair will not fit into the memory that is free now, on the host and on the GPU."""
    reason = memory_problem(folders, device, memory_available_bytes() if available is None else available, gpu_free)
    if reason is not None:
        raise GateError(reason)


def memory_problem(folders: Sequence[Path], device: str, host_free: int | None, gpu_free: int | None) -> str | None:
    """What does not fit where, in GiB and with what to do about it; None when it fits or nobody says what is free."""
    names = " and ".join(folder.name for folder in folders) or "a child without a pair"
    weights = sum(estimate_load_bytes(folder, device) for folder in folders)
    cuda = device.startswith("cuda")
    host_needed = CUDA_HOST_BYTES if cuda else PROCESS_BYTES + weights
    if host_free is not None and host_needed > host_free:
        return (
            f"memory: loading {names} takes about {host_needed / _GIB:.1f} GiB and {host_free / _GIB:.1f} GiB are "
            "free; end other programs or use a larger machine"
        )
    gpu_needed = CUDA_BYTES + weights
    if cuda and gpu_free is not None and gpu_needed > gpu_free:
        return (
            f"memory: loading {names} takes about {gpu_needed / _GIB:.1f} GiB of GPU memory and "
            f"{gpu_free / _GIB:.1f} GiB are free on {device}; end what else runs there, or use a larger GPU"
        )
    return None


def job_memory_problem(
    folders: Sequence[Path], jobs: int, host_free: int | None, gpu_free: int | None = None, device: str = "cpu"
) -> str | None:
    """Why that many children at once do not fit on a CPU or on one GPU, with the number that does; None when they fit.

    `host_free` and `gpu_free`: bytes; None where nobody says.
    """
    weights = sum(estimate_load_bytes(folder, device) for folder in folders)
    cuda = device.startswith("cuda")
    host = CUDA_HOST_BYTES if cuda else PROCESS_BYTES + weights
    for needed, free, where in ((host, host_free, ""), (CUDA_BYTES + weights, gpu_free, f" on {device}")):
        if free is None or jobs * needed <= free or (where and not cuda):
            continue
        return (
            f"memory: {jobs} jobs take about {jobs} x {needed / _GIB:.1f} GiB and {free / _GIB:.1f} GiB are free"
            f"{where}; give --jobs {max(free // needed, 1)}, or end other programs"
        )
    return None


def foreign_processes(gpu: Gpu) -> str | None:
    """Who else computes on a GPU on which none of our children runs yet, in words; None when nobody or unknown."""
    state = gpus.state(gpu)
    if state is None or not state.processes:
        return None
    number = len(state.processes)
    used = sum(nbytes or 0 for nbytes in state.processes.values())
    held = f", holding {used / _GIB:.1f} GiB," if used else ""
    who = "another process" if number == 1 else f"{number} other processes"
    return f"{who}{held} compute{'s' * (number == 1)} on {gpu}"


@dataclass(frozen=True)
class Quiet:
    """What waiting for a quiet CPU came to; `note` is empty when it is quiet."""

    waited_s: float
    note: str


def wait_until_quiet(limit_s: float = 0.0, sample_s: float = QUIET_SAMPLE_S) -> Quiet:
    """Look at the CPU, while none of our own children works, until it is quiet or the limit is over."""
    began = time.monotonic()
    meter = Meter()
    while True:
        before = meter.read()
        time.sleep(sample_s)
        note = busy(before, meter.read())
        waited = time.monotonic() - began
        if note is None or waited >= limit_s:
            return Quiet(round(waited, 1), (note or "").partition(": ")[2])
