"""What this machine has, asked of torch once so that the parent never loads it."""

from __future__ import annotations

from typing import Any

import torch

from harness.worker.bench import Bench, Output


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """CUDA or why not, and each GPU's name, compute capability and free memory in GiB."""
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else "; this torch is built without CUDA"
        return {"cuda": False, "reason": f"torch.cuda.is_available() is False{built}", "gpus": []}
    gpus = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, _ = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": torch.cuda.get_device_name(index),
                "compute_capability": f"{major}.{minor}",
                "free_gib": free / 2**30,
            }
        )
    return {"cuda": True, "reason": "", "gpus": gpus, "cuda_runtime": torch.version.cuda}
