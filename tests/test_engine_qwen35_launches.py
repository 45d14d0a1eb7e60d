"""What the 4B of the second family launches on a GPU, found without one; its numbers are other tests' business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia", reason="this triton cannot compile for CUDA")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The engine's launches at the 4B's shapes, in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "support_qwen35_launches.py")]
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_launch_of_the_4b_is_one_that_the_gate_compiles(report: dict[str, Any]) -> None:
    """Else a kernel that spills, does not fit or does not build shows on a rented GPU, in the middle of a record."""
    assert not report["errors"]
    outside = {
        (name, report["names"][str(number)])
        for name, numbers in report["forwards"].items()
        for number in numbers
        if number >= report["gate"]
    }
    assert not outside
    launched = {number for numbers in report["forwards"].values() for number in numbers}
    unused = [report["names"][str(number)] for number in range(report["gate"]) if number not in launched]
    assert not unused, "the gate compiles what nobody launches; a shape has changed"


def test_a_block_and_a_classic_step_run_the_same_binaries(report: dict[str, Any]) -> None:
    """The row contract at the real shapes: the number of rows may not choose a kernel."""
    forwards = report["forwards"]
    assert len(forwards["classic"]) > 15
    assert forwards["verify 2"] == forwards["verify 4"] == forwards["verify 8"] == forwards["classic"]
    assert forwards["round of 2"] == forwards["round of 4"] == forwards["round of 8"]
