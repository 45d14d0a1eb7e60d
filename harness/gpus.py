"""The GPUs of this machine as the driver lists them, without torch: who they are, what is free, who else is on them.

NVML (extra `gpu`) answers where it is installed, else `nvidia-smi`, else nothing is known. Neither makes a context.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
SMI_TIMEOUT_S = 20.0
_MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` is the driver's own, `uuid` what locks and children name it by."""

    index: int
    uuid: str
    name: str

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


@dataclass(frozen=True)
class State:
    """What a GPU holds now. `processes` maps ids, as the driver sees them, to bytes; None: it does not say."""

    free_bytes: int
    total_bytes: int
    processes: Mapping[int, int | None] | None = None


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """The initialised NVML module, or None without the package, a driver or a GPU."""
    try:
        module = importlib.import_module("pynvml")
        module.nvmlInit()
    except Exception:  # no package, no driver library, a driver that is being replaced: all mean "ask elsewhere"
        yield None
        return
    try:
        yield module
    finally:
        with contextlib.suppress(Exception):
            module.nvmlShutdown()


def text(value: str | bytes) -> str:
    """NVML gives bytes in its older releases."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def installed() -> tuple[Gpu, ...]:
    """Every GPU of the machine in the driver's order; empty where none is known."""
    with nvml() as module:
        if module is not None:
            with contextlib.suppress(Exception):
                handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(module.nvmlDeviceGetCount())]
                return tuple(
                    Gpu(index, text(module.nvmlDeviceGetUUID(handle)), text(module.nvmlDeviceGetName(handle)))
                    for index, handle in enumerate(handles)
                )
    return tuple(Gpu(int(index), uuid, name) for index, uuid, name in _smi("--query-gpu=index,uuid,name", 3))


def visible(environ: Mapping[str, str] | None = None, every: Sequence[Gpu] | None = None) -> tuple[Gpu, ...]:
    """The GPUs that a child started from this environment would number 0, 1, ...; as CUDA, cut at the first unknown."""
    every = installed() if every is None else every
    chosen = (os.environ if environ is None else environ).get(VISIBLE)
    if chosen is None:
        return tuple(every)
    found: list[Gpu] = []
    for word in (part.strip() for part in chosen.split(",")):
        if word.isdigit():
            match = [gpu for gpu in every if gpu.index == int(word)]
        else:
            match = [gpu for gpu in every if word and gpu.uuid.startswith(word)]
        if len(match) != 1:
            break
        found += match
    return tuple(found)


def state(gpu: Gpu) -> State | None:
    """Memory and compute processes of one GPU now, or None where nobody says."""
    with nvml() as module:
        if module is not None:
            with contextlib.suppress(Exception):
                handle = module.nvmlDeviceGetHandleByUUID(gpu.uuid)
                memory = module.nvmlDeviceGetMemoryInfo(handle)
                processes: dict[int, int | None] | None = None
                with contextlib.suppress(Exception):
                    running = module.nvmlDeviceGetComputeRunningProcesses(handle)
                    processes = {int(one.pid): one.usedGpuMemory for one in running}
                return State(int(memory.free), int(memory.total), processes)
    for uuid, free, total in _smi("--query-gpu=uuid,memory.free,memory.total", 3):
        if uuid == gpu.uuid and free.isdigit() and total.isdigit():
            apps = [row for row in _smi("--query-compute-apps=gpu_uuid,pid,used_memory", 3) if row[0] == gpu.uuid]
            used = {int(pid): int(mib) * _MIB if mib.isdigit() else None for _, pid, mib in apps if pid.isdigit()}
            return State(int(free) * _MIB, int(total) * _MIB, used)
    return None


def facts(gpu: Gpu) -> dict[str, Any]:
    """Driver version and power limit in watts, where NVML says; nothing that names this one card."""
    found: dict[str, Any] = {}
    with nvml() as module:
        if module is None:
            return found
        with contextlib.suppress(Exception):
            found["driver"] = text(module.nvmlSystemGetDriverVersion())
        with contextlib.suppress(Exception):
            handle = module.nvmlDeviceGetHandleByUUID(gpu.uuid)
            found["power_limit_w"] = round(module.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    return found


def _smi(query: str, columns: int) -> list[list[str]]:
    """Rows of an `nvidia-smi` query with that many columns; none without the program or where it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == columns] if done.returncode == 0 else []
