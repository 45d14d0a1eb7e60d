"""What a classic step must read at least, and how fast this card reads when it does nothing else."""

from __future__ import annotations

from typing import Any

from harness.kernel_figures import STREAM
from harness.record.lines import FloorLine
from harness.worker import kernel_api
from harness.worker.kernel_clock import KernelArm, fastest, time_arms, warm

STREAM_BYTES = {"cuda": 2 << 30, "cpu": 8 << 20}
REPEATS = 10


def stream_seconds(device: str) -> tuple[int, tuple[float, ...]]:
    """Bytes of a buffer far larger than any cache, and the seconds in which it was read, one value per repeat."""
    nbytes, calls = kernel_api.stream(device, STREAM_BYTES["cuda" if device.startswith("cuda") else "cpu"])
    arm = KernelArm(STREAM, 0, nbytes, 1, fastest(calls, device))
    warm(arm)
    (us,) = time_arms([arm], REPEATS, device, lambda repeat: None)
    return nbytes, tuple(float(f"{value / 1e6:.6g}") for value in us)


def kv_bytes(config: Any, context: int, itemsize: int) -> int:
    """Bytes of the keys and values that the row after `context` tokens sees, its own among them, over all layers."""
    if hasattr(config, "kv_bytes"):  # a family with other layers counts for itself
        return int(config.kv_bytes(context, itemsize))
    total = 0
    for shape in config.layers:
        keys = context + 1
        if shape.kind == "sliding":
            keys = min(keys, config.sliding_window)
        total += 2 * shape.num_kv_heads * shape.head_dim * keys * itemsize
    return total


def floor_line(case: str, target: Any, context: int, stream: tuple[int, tuple[float, ...]]) -> FloorLine:
    """The inputs of the byte floor at one context."""
    return FloorLine(
        case=case,
        context_tokens=context,
        weight_bytes=target.nbytes,
        kv_bytes=kv_bytes(target.config, context, target.dtype.itemsize),
        stream_bytes=stream[0],
        stream_s=stream[1],
    )
