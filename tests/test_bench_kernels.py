"""Timings of single kernels on a GPU, for work on one of them: `pytest -m bench --benchmark-enable`.

One launch at a time, its host time included: for before and after on one machine. What a record states is measured by
`harness run specs/kernels_gemma4.yaml`, in graphs over rotated weights, beside peers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.worker import kernel_api
from harness.worker.kernel_attention import AttentionBench
from harness.worker.kernel_qmv import random_codes

pytestmark = [
    pytest.mark.bench,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MATRICES = {
    "12b-qkv": (3840, 8192, 4),
    "12b-o": (4096, 3840, 4),
    "12b-gate+up": (3840, 30720, 8),
    "12b-down": (15360, 3840, 8),
    "31b-gate+up": (5376, 43008, 4),
    "head": (3840, 262144, 4),
}
LAYERS = {"12b-sliding": ("12b", "sliding"), "12b-full": ("12b", "full"), "31b-full": ("31b", "full")}


def timed(benchmark: Any, call: Callable[[], object], nbytes: int) -> None:
    """Rounds of 20 launches, each round closed by a synchronisation."""

    def run() -> None:
        for _ in range(20):
            call()
        torch.cuda.synchronize()

    run()
    benchmark.extra_info["bytes"] = nbytes
    benchmark(run)


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("name", MATRICES)
def test_qmv(benchmark: Any, name: str, rows: int) -> None:
    """The product alone, on copies in turn."""
    k, n, bits = MATRICES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    codes = random_codes(n, k, bits, generator, "cuda")
    ours = kernel_api.product("triton", codes.codes, codes.scales, codes.biases, bits, 4)
    packed = ours.pack(torch.randn(8, k, device="cuda").to(torch.bfloat16))
    turns = iter(range(1 << 30))
    timed(benchmark, lambda: ours.run(packed, next(turns) % 4, rows), ours.nbytes)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("context", [2048, 32768])
@pytest.mark.parametrize("name", LAYERS)
def test_attention(benchmark: Any, name: str, context: int, rows: int) -> None:
    """Both launches of the attention of one layer."""
    geometry, layer = LAYERS[name]
    args = {"geometry": geometry, "layer": layer, "context": context, "backend": "triton", "seed": 0}
    bench = AttentionBench({**args, "rotate_mb": 64, "repeat_calls": 1, "rows": [rows]}, "cuda")
    arm = bench.our_arms()[0]
    timed(benchmark, lambda: bench._call(bench.q, rows), arm.nbytes)


def test_stream(benchmark: Any) -> None:
    """The ceiling: a kernel that reads 1 GiB and does nothing else."""
    nbytes, calls = kernel_api.stream("cuda", 1 << 30)
    timed(benchmark, calls[0], nbytes)
