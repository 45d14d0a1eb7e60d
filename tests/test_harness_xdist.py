"""pytest-xdist workers on a machine with GPUs: each case has a GPU to itself, and children see no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_harness import ROOT, worker
from support_spec import HEAD, write

DRIVER_MODULE = """\
from types import SimpleNamespace as N
UUIDS = ["GPU-a", "GPU-b"]
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: len(UUIDS)
nvmlDeviceGetHandleByIndex = lambda index: UUIDS[index]
nvmlDeviceGetHandleByUUID = nvmlDeviceGetUUID = lambda uuid: uuid
nvmlDeviceGetName = lambda uuid: "NVIDIA H200"
nvmlDeviceGetMemoryInfo = lambda uuid: N(free=100 * 2**30, total=140 * 2**30)
nvmlDeviceGetComputeRunningProcesses = lambda uuid: []
"""
CONFTEST = """\
import pytest

pytest_plugins = ["harness.pytest_plugin"]


@pytest.fixture(scope="session")
def spec_contexts(pytestconfig, tmp_path_factory):
    from harness.pytest_plugin import Contexts

    contexts = Contexts(pytestconfig, tmp_path_factory.mktemp("specs"), command={command!r})
    yield contexts
    contexts.close()
"""
MACHINE = {
    "cuda": True,
    "reason": "",
    "gpus": [{"name": "NVIDIA H200", "compute_capability": "9.0", "free_gib": 100.0}],
}


def test_workers_take_turns_on_the_gpus(tmp_path: Path) -> None:
    """Guards against two workers on one GPU, an idle second GPU, and a third worker that fails instead of waiting."""
    pytest.importorskip("xdist")
    probe = "  - {{kind: exactness_probe, id: probe{}, draws: [8], walk: false}}\n"
    checks = "".join(probe.format(number) for number in range(6))
    timed = "  - {kind: throughput, id: t, arms: [{name: mtp}], repeats: 1, max_tokens: 9, prompts: [{text: a b}]}\n"
    path = write(tmp_path, HEAD + checks + timed)
    for name in ("target", "drafter"):
        (path.parent / name).mkdir(exist_ok=True)
    command = worker(tmp_path, slow=0.2, machine=MACHINE)
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("{command!r}", repr(command)), encoding="utf-8")
    (tmp_path / "pynvml.py").write_text(DRIVER_MODULE, encoding="utf-8")
    marks = json.dumps([f"{mark}: of a spec" for mark in ("gpu", "slow", "bench", "weights")])
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest]\nmarkers = {marks}\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    words = ["-m", "pytest", "-q", "-n", "3", "--device", "cuda", "-p", "no:cacheprovider", "specs"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "7 passed" in done.stdout, done.stdout + done.stderr
    pins = dict(line.split() for line in (tmp_path / "pins.txt").read_text(encoding="utf-8").splitlines())
    assert set(pins.values()) == {"GPU-a", "GPU-b"}
    spans = []
    for line in (tmp_path / "spans.txt").read_text(encoding="utf-8").splitlines():
        began, ended, pid, case = line.split(" ", 3)
        if case:  # the question what the machine has takes no GPU
            spans.append((float(began), float(ended), pid, pins[pid]))
    together = [
        (one, other)
        for one in spans
        for other in spans
        if one[2] < other[2] and one[0] < other[1] and other[0] < one[1]
    ]
    assert together
    assert not [pair for pair in together if pair[0][3] == pair[1][3]]
