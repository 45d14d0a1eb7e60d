"""The whole engine at Qwen 3.5 4B's shapes on device `meta`: no memory, no numbers, but every launch and every device.

    python tests/support_qwen35_launches.py

Prints one JSON object: the variants that the gate's entries make, and for each forward the variants that it launches.
Not under TRITON_INTERPRET: launches are recorded as a GPU would get them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from engine.checkpoint import Checkpoint
from engine.dispatch import DispatchPolicy
from engine.flags import Flags
from engine.qwen35.config import parse_drafter_config, parse_target_config
from engine.qwen35.drafter import DFlashDrafter
from engine.qwen35.target import Qwen35Target
from engine.qwen35.weights import drafter_tensors, target_tensors
from kernels import Stored, Weight, triton_backend
from kernels.gate import qwen35
from kernels.gate.judge import collect
from kernels.gate.record import Variant, recorded_launches
from tools.seed_qwen35_pair import REAL

ARCH = 90
SHAPE = dataclasses.replace(REAL, num_hidden_layers=5, drafter_layers=1, taps=(0, 1, 2, 3, 4))
"""The 4B's shapes with fewer layers, of both kinds; five are tapped, as in the 4B."""


class Shapes(Checkpoint):
    """A checkpoint of names and shapes: 4 bits for the target's matrices, bf16 for the drafter's."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], bits: int) -> None:
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "entries", {})

    def verify(self, shapes: Any, role: Any) -> None:
        """Nothing is stored that could be wrong."""

    def tensor(self, name: str, device: str = "cpu") -> torch.Tensor:
        """A tensor of the right shape, on the device that was asked for."""
        return torch.empty(self.shapes[name], dtype=torch.bfloat16, device=device)  # type: ignore[attr-defined]

    def weight(self, module: str, dtype: torch.dtype, device: str = "cpu") -> Weight:
        """A matrix, packed where the checkpoint is."""
        rows, columns = self.shapes[f"{module}.weight"]  # type: ignore[attr-defined]
        if self.bits == 16:  # type: ignore[attr-defined]
            return Weight(torch.empty(rows, columns, dtype=dtype, device=device), 16)
        words = torch.empty(rows, columns // 8, dtype=torch.int32, device=device).view(torch.uint32)
        scales = torch.empty(rows, columns // 64, dtype=torch.bfloat16, device=device)
        return Weight(lambda: torch.empty(rows, columns, dtype=dtype, device=device), 4, Stored(words, scales, scales))


def pair(device: str) -> tuple[Qwen35Target, DFlashDrafter]:
    """Target and drafter on the triton backend, with the values of a step's last look left out: `meta` has none."""

    def argmax(logits: torch.Tensor) -> list[int]:
        triton_backend.argmax_ids(logits)
        return [5] * logits.shape[0]

    kernels = dataclasses.replace(triton_backend.KERNELS, argmax=argmax)
    config, draft_config = parse_target_config(SHAPE.target_config()), parse_drafter_config(SHAPE.drafter_config())
    policy = DispatchPolicy(backend="triton")
    stored, drafts = Shapes(target_tensors(config, "mlx"), 4), Shapes(drafter_tensors(draft_config), 16)
    target = Qwen35Target(stored, config, policy, device, kernels=kernels)
    drafter = DFlashDrafter(drafts, draft_config, policy, device, kernels=kernels)
    drafter.bind(target)
    return target, drafter


def forwards(target: Qwen35Target, drafter: DFlashDrafter) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every kind of forward of this pair, by name: prefill, a classic and an unpadded step, rounds, other stages."""
    caches = target.new_caches()

    def drafted(rows: int, count: int) -> object:
        """A block of which one row stays, then a draft that reads it."""
        target.step([5] * rows, caches, "verify")
        caches.rollback(rows - 1)
        shared = target.shared_kv(caches)
        return drafter.draft(5, shared, shared, count)

    yield "prefill", lambda: target.logits(target.prefill(list(range(5, 75)), caches).unsqueeze(0))
    yield "prefill of the rest", lambda: target.prefill(list(range(5, 15)), caches)
    yield "first draft", lambda: drafted(1, 3)
    yield "classic", lambda: target.step([5], caches.clone(), "classic")
    yield "unpadded", lambda: target.unpadded_step(5, caches.clone())
    for rows in (2, 4, 8):
        yield f"verify {rows}", partial(target.step, [5] * rows, caches.clone(), "verify")
        yield f"round of {rows}", partial(drafted, rows, rows - 1)
    for stage, flags, rows in (
        ("base", Flags(), 2),
        ("base", Flags(), 4),
        ("attention", Flags(), 4),
        ("base", Flags(qmv_multirow=False, sdpa_large_d=False), 4),
    ):
        other = target.with_policy(dataclasses.replace(target.policy, stage=stage, flags=flags))
        yield f"{stage} of {rows}, {flags.sdpa_large_d}", partial(other.step, [5] * rows, caches.clone(), "verify")


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Dequantizing for prefill is a launch on a GPU and torch elsewhere."""
    with mock.patch.object(triton_backend, "dense", lambda weight: triton_backend.dense_rows(weight)):
        yield


def main() -> int:
    """Record everything; see the module's text."""
    binaries, errors = collect(list(qwen35.entries()), ARCH)
    numbers: dict[Variant, int] = {binary.variant: number for number, binary in enumerate(binaries)}
    names = {number: f"{variant.kernel}: {variant.describe()}" for variant, number in numbers.items()}
    found: dict[str, list[int]] = {}
    with as_on_a_gpu(), recorded_launches(ARCH) as launches:
        for name, call in forwards(*pair("meta")):
            launches.clear()
            call()
            for variant in dict.fromkeys(launches):
                names.setdefault(numbers.setdefault(variant, len(numbers)), f"{variant.kernel}: {variant.describe()}")
            found[name] = sorted({numbers[variant] for variant in launches})
    sys.stdout.write(json.dumps({"errors": errors, "gate": len(binaries), "names": names, "forwards": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
