"""Reads stored tensors onto a device: several threads, in chunks, each byte once and never through a second copy.

One thread copies from the page cache at a fraction of what the memory, or the link to a GPU, can take. On CUDA the
chunks go through a ring of pinned buffers, so that reading and the copy to the device overlap.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError

CHUNK_BYTES = 8 << 20
MAX_THREADS = 16
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of the dtypes that can be read."""


@dataclass
class Meter:
    """What was read so far: host seconds, the copy to the device included, and bytes."""

    seconds: float = 0.0
    nbytes: int = 0


def read_tensor(
    file: Path, start: int, dtype: str, shape: tuple[int, ...], device: str, meter: Meter | None = None
) -> Tensor:
    """The tensor at byte `start` of a file, as it is stored, on the device; CheckpointError where bytes are missing."""
    began = time.perf_counter()
    kind = DTYPES[dtype]
    nbytes = kind.itemsize
    for length in shape:
        nbytes *= length
    ring = _ring(device) if torch.device(device).type == "cuda" else None
    try:
        out = read_staged(file, start, nbytes, ring) if ring is not None else _read_plain(file, start, nbytes)
    except OSError as error:
        raise _failed(file, error.strerror or str(error)) from error
    if meter is not None:
        meter.seconds += time.perf_counter() - began
        meter.nbytes += nbytes
    return out.view(kind).view(shape)


class Ring:
    """Buffers between a file and a device, used in turn; pinned where the device is a GPU."""

    def __init__(self, device: str, slots: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device, self.chunk_bytes = device, chunk_bytes
        self._cuda = torch.device(device).type == "cuda"
        self.buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(slots)]
        self._copied: list[Any] = [None] * slots

    def wait(self, slot: int) -> None:
        """Until the slot's last copy has left it."""
        if self._copied[slot] is not None:
            self._copied[slot].synchronize()

    def send(self, slot: int, into: Tensor) -> None:
        """Queue the copy of a slot's first bytes to the device."""
        into.copy_(self.buffers[slot][: into.numel()], non_blocking=True)
        if self._cuda:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[slot] = event


def read_staged(file: Path, start: int, nbytes: int, ring: Ring) -> Tensor:
    """Bytes [nbytes] of a file on the ring's device."""
    out = torch.empty(nbytes, dtype=torch.uint8, device=ring.device)
    waiting: deque[tuple[int, int, int, Future[None]]] = deque()

    def send_oldest() -> None:
        first, end, slot, read = waiting.popleft()
        read.result()
        ring.send(slot, out[first:end])

    descriptor = os.open(file, os.O_RDONLY)
    try:
        for number, first in enumerate(range(0, nbytes, ring.chunk_bytes)):
            if len(waiting) == len(ring.buffers):
                send_oldest()
            slot = number % len(ring.buffers)
            ring.wait(slot)
            end = min(first + ring.chunk_bytes, nbytes)
            view = ring.buffers[slot].numpy().data[: end - first]
            waiting.append((first, end, slot, _pool().submit(_fill, file, descriptor, view, start + first)))
        while waiting:
            send_oldest()
    finally:
        for *_, read in waiting:
            read.cancel() or read.exception()  # a buffer or descriptor still in use must not go away
        os.close(descriptor)
    for slot in range(len(ring.buffers)):
        ring.wait(slot)  # the next tensor starts at slot 0 again
    return out


def release() -> None:
    """Give the pinned buffers back; the next read makes new ones."""
    _ring.cache_clear()


def _read_plain(file: Path, start: int, nbytes: int) -> Tensor:
    """Bytes [nbytes] of a file in ordinary memory."""
    out = torch.empty(nbytes, dtype=torch.uint8)
    view = out.numpy().data
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if nbytes <= CHUNK_BYTES:
            _fill(file, descriptor, view, start)
            return out
        parts = [
            _pool().submit(_fill, file, descriptor, view[first : first + CHUNK_BYTES], start + first)
            for first in range(0, nbytes, CHUNK_BYTES)
        ]
        failures = [error for part in parts if (error := part.exception()) is not None]
        if failures:
            raise failures[0]
    finally:
        os.close(descriptor)
    return out


def _fill(file: Path, descriptor: int, view: memoryview, start: int) -> None:
    """Read until the view is full."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise _failed(file, f"it ends at byte {start + done}, in the middle of a tensor")
        done += count


def _failed(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file.parent.name}/{file.name}: cannot be read: {why}; fetch the file again")


@functools.cache
def _ring(device: str) -> Ring:
    return Ring(device, 2 * _threads())


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="read")


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, cores)
