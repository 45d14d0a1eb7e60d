"""What goes wrong on a machine, seen from a whole run: memory, killed children, no driver, the gate off."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support_harness import SPEC_TEXT, gone, worker, write_spec
from support_nvml import FakeGpu, fake_nvml

from harness import gate
from harness.context import RunContext
from harness.locks import hold, places
from harness.meter import Meter, process_cpu_s
from harness.protocol import Failure
from harness.record.lines import ArmLine, CaseLine, ChildLine, GateLine, StartLine
from harness.record.report import check as check_record
from harness.record.store import read_lines
from harness.resume import find_unfinished
from harness.run import RunOptions, RunOutcome, run_spec
from harness.spec import load_spec, plan

NEEDS_CUDA = SPEC_TEXT.replace("checks:", "requires: {cuda: true}\nchecks:")


def run(tmp_path: Path, options: dict[str, Any] | None = None, **script: Any) -> RunOutcome:
    """A run with scripted children."""
    settings = {
        "out": tmp_path / "out",
        "command": "harness run specs/tiny.yaml",
        "lock_dir": tmp_path,
        "worker": worker(tmp_path, **script),
        "job_timeout_s": 20,
    }
    return run_spec(load_spec(tmp_path / "specs" / "tiny.yaml"), RunOptions(**{**settings, **(options or {})}))


def lines_of(outcome: RunOutcome) -> tuple[Any, ...]:
    return read_lines(outcome.page.parent / "data" / outcome.page.stem / "runs.jsonl").lines


def children(tmp_path: Path) -> list[int]:
    return [int(line.split()[0]) for line in (tmp_path / "starts.txt").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"how": "kill"}, "SIGKILL (the system may have run out of memory)"),
        ({"fail": "memory", "message": "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB"}, "20.00 GiB"),
    ],
    ids=["killed", "out of memory"],
)
def test_a_lost_child_ends_the_run_with_3_and_the_record_resumes(
    tmp_path: Path, script: dict[str, str], words: str
) -> None:
    """Guards against a killed or starved child that passes for a result, stops the other cases, or leaves a process."""
    write_spec(tmp_path)
    first = run(tmp_path, on="parity", **script)
    assert first.exit_code == 3
    bad = [line for line in first.cases if line.outcome == "error"]
    assert [line.case.partition("::")[2] for line in bad] == ["parity"]
    assert words in bad[0].reason
    assert len(first.cases) == 8
    assert not check_record(first.page)
    assert all(gone(pid) for pid in children(tmp_path))
    found = find_unfinished(load_spec(tmp_path / "specs" / "tiny.yaml"), tmp_path / "out")
    assert run(tmp_path, {"resume": found}).exit_code == 0


def test_a_child_out_of_memory_is_not_asked_again(tmp_path: Path) -> None:
    """Guards against a second case that fails because the first one's tensors still fill the GPU."""
    write_spec(tmp_path)
    outcome = run(tmp_path, on="probe", fail="memory")
    assert outcome.exit_code == 3
    ready = [line.child for line in lines_of(outcome) if isinstance(line, ChildLine)]
    assert ready.count("default") > 1


def test_cuda_s_own_words_are_a_memory_failure() -> None:
    """Guards against `OutOfMemoryError` as an internal error with a traceback, in a job and while loading."""
    torch = pytest.importorskip("torch")
    from harness.worker.__main__ import _failure

    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 1 GiB"
    )
    assert _failure(error, 3) == Failure(job=3, kind="memory", message=f"out of memory: {error}")
    host = RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to")
    assert _failure(host, None).kind == "memory"
    assert _failure(RuntimeError("CUDA error: an illegal memory access was encountered"), 1).kind == "internal"


@pytest.mark.parametrize(
    ("options", "outcome", "code"),
    [({}, "skipped", 0), ({"require": ("cuda",)}, "error", 3), ({"device": "cuda"}, "skipped", 0)],
    ids=["skipped", "required", "on cuda"],
)
def test_a_missing_driver_is_named(tmp_path: Path, options: dict[str, Any], outcome: str, code: int) -> None:
    """Guards against a run on the CPU that looks like the one on the GPU, and against a traceback from the driver."""
    write_spec(tmp_path, NEEDS_CUDA)
    ended = run(tmp_path, options)
    assert {line.outcome for line in ended.cases} == {outcome}
    assert ended.exit_code == code
    assert all("torch.cuda.is_available() is False" in line.reason for line in ended.cases)
    assert not check_record(ended.page)


def test_a_driver_that_dies_with_the_child_is_named(tmp_path: Path) -> None:
    """Guards against waiting for an answer from a machine child that the driver has crashed."""
    write_spec(tmp_path, NEEDS_CUDA)
    ended = run(tmp_path, {"require": ("cuda",)}, on="machine", how="segv")
    assert ended.exit_code == 3
    assert all("SIGSEGV" in line.reason for line in ended.cases)


def test_too_little_memory_ends_the_run_with_3_before_a_child_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a load that the system kills halfway; --no-gate goes on and the record says what it passed."""
    write_spec(tmp_path)
    monkeypatch.setattr(gate, "memory_available_bytes", lambda: 2**28)
    refused = run(tmp_path)
    assert refused.exit_code == 3
    assert all("takes about 0.6 GiB and 0.2 GiB are free" in line.reason for line in refused.cases)
    assert not (tmp_path / "starts.txt").exists()
    assert "--no-gate" not in refused.page.read_text(encoding="utf-8")
    anyway = run(tmp_path, {"gate_off": True})
    assert anyway.exit_code == 0
    assert [line.when for line in lines_of(anyway) if isinstance(line, GateLine) and line.ignored] == ["load"] * 2
    page = anyway.page.read_text(encoding="utf-8")
    assert "off (--no-gate); it would have refused: memory: loading target and drafter takes about 0.6 GiB" in page
    assert not check_record(anyway.page)


def test_without_the_gate_a_held_lock_is_passed_and_disclosed(tmp_path: Path) -> None:
    """Guards against a run beside another one whose record looks like any other."""
    write_spec(tmp_path)
    with hold("cpu", folder=tmp_path):
        outcome = run(tmp_path, {"gate_off": True, "only": ("specs/tiny.yaml::probe",)})
    start = next(line for line in lines_of(outcome) if isinstance(line, StartLine))
    assert start.gate_ignored is not None
    assert "another measuring run holds the cpu lock" in start.gate_ignored[0]
    assert "it would have refused: another measuring run holds the cpu lock" in outcome.page.read_text(encoding="utf-8")
    quiet = run(tmp_path, {"gate_off": True, "only": ("specs/tiny.yaml::probe",)})
    assert "off (--no-gate); it had nothing to refuse" in quiet.page.read_text(encoding="utf-8")


def test_idle_children_make_room_and_the_case_s_own_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a refusal while our own idle children hold the memory, and against ending an arm's child."""
    cases = {case.name: case for case in plan(load_spec(write_spec(tmp_path)))}
    other = cases["attribution[stage:rowwise+multirow:0]"]
    with RunContext(log_dir=tmp_path / "logs", command=worker(tmp_path), lock_dir=tmp_path) as context:
        assert context.run(cases["probe"]).outcome == "pass"
        (first,) = children(tmp_path)
        free = {1: 2**28, 0: 2**30}
        monkeypatch.setattr(gate, "memory_available_bytes", lambda: free[len(context._children)])
        assert context.run(other).outcome == "pass"
        assert gone(first)
        context._case_keys.update(context._children)
        assert context.child_key(cases["probe"], {}) not in context._children
        with pytest.raises(Exception, match="takes about"):
            context._check_memory(cases["probe"], (), "cpu")
        assert len(context._children) == 1


def test_readings_count_the_run_s_own_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against our own child, which works on a whole core, as other work that spoils every arm."""
    asked: list[set[int]] = []
    read = Meter.read
    monkeypatch.setattr(Meter, "read", lambda self, pids=(): (asked.append(set(pids)), read(self, pids))[1])
    case = next(case for case in plan(load_spec(write_spec(tmp_path))) if case.kind == "throughput")
    with RunContext(log_dir=tmp_path / "logs", command=worker(tmp_path), lock_dir=tmp_path) as context:
        context.run(case)
    (child,) = children(tmp_path)
    assert {child} in asked
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 20
        while process_cpu_s(busy.pid) < 0.2 and time.monotonic() < deadline:
            time.sleep(0.02)
        with Meter() as meter:
            assert (meter.read([busy.pid]).own_cpu_s or 0) - (meter.read().own_cpu_s or 0) > 0.1
    finally:
        busy.kill()
        busy.wait()
    assert process_cpu_s(busy.pid) == 0.0


# ---- what is filed around timed arms --------------------------------------------------------------------------------


def test_timed_arms_carry_readings_and_the_page_sums_them_up(tmp_path: Path) -> None:
    """Guards against figures whose machine nobody looked at; and the page's row comes from the raw lines."""
    write_spec(tmp_path)
    outcome = run(tmp_path)
    lines = lines_of(outcome)
    arms = [line for line in lines if isinstance(line, ArmLine)]
    assert len(arms) == 9
    assert all(arm.before and arm.after and arm.before.at_s <= arm.after.at_s for arm in arms)
    assert all(arm.after is not None and arm.load1 == arm.after.load1 for arm in arms)
    gates = [line for line in lines if isinstance(line, GateLine)]
    assert [(line.case, line.when) for line in gates] == [
        ("specs/tiny.yaml::decode", "before"),
        ("specs/tiny.yaml::decode", "after"),
    ]
    page = outcome.page.read_text(encoding="utf-8")
    assert "| While timing | " in page
    assert "0 of 9 timed runs throttled" in page


def test_the_gpu_of_the_run_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the telemetry of GPU 0 beside figures of GPU 1, and a child on another GPU than the lock's."""
    fake_nvml(monkeypatch, FakeGpu("GPU-a", sm_clock=100), FakeGpu("GPU-b", sm_clock=1500, reasons=0x4))
    case = next(case for case in plan(load_spec(write_spec(tmp_path))) if case.kind == "throughput")
    place = places("cuda")[1]
    with RunContext(log_dir=tmp_path, device="cuda", place=place, command=worker(tmp_path)) as context:
        now = context.telemetry(case)
        assert (now.sm_clock_mhz, now.throttle) == (1500, ("sw_power_cap",))
        assert context._pinned == {"CUDA_VISIBLE_DEVICES": "GPU-b"}


def test_waiting_for_quiet_has_one_budget_and_a_quiet_minute_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a minute of waiting before each of forty kernel cases on a machine that is always busy."""
    asked: list[float] = []
    notes = iter(["busy", "busy", ""])

    def wait(limit: float) -> gate.Quiet:
        asked.append(limit)
        return gate.Quiet(min(limit, 2.0), next(notes))

    monkeypatch.setattr(gate, "wait_until_quiet", wait)
    case = next(case for case in plan(load_spec(write_spec(tmp_path))) if case.kind == "throughput")
    with RunContext(log_dir=tmp_path, command=worker(tmp_path), lock_dir=tmp_path, quiet_s=3.0) as context:
        for _ in range(5):
            with context.measuring(case):
                pass
    assert asked == [3.0, 1.0, 0.0]


@pytest.mark.parametrize("required", [False, True])
def test_a_busy_cpu_is_noted_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: bool) -> None:
    """Guards against a figure that hides what else ran, and against `--require quiet` that requires nothing."""
    write_spec(tmp_path)
    monkeypatch.setattr(gate, "wait_until_quiet", lambda limit: gate.Quiet(limit, "other work on 1.9 of 2 cores"))
    options: dict[str, Any] = {"quiet_s": 3.0, "require": ("quiet",) if required else ()}
    outcome = run(tmp_path, options)
    decode = next(line for line in outcome.cases if line.kind == "throughput")
    if required:
        assert (outcome.exit_code, decode.outcome) == (3, "error")
        assert decode.reason == "other work on 1.9 of 2 cores, also after 3 s (--require quiet)"
        assert not any(isinstance(line, ArmLine) for line in lines_of(outcome))
    else:
        assert outcome.exit_code == 0
        assert "at the start of 1 case: other work on 1.9 of 2 cores" in outcome.page.read_text(encoding="utf-8")
    assert isinstance(decode, CaseLine)
