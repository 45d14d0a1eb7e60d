"""Jobs side by side: the record of a serial run, nothing beside what is timed, and a clean end whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support_harness import ROOT, SPEC_TEXT, gone, worker, write_spec
from support_nvml import FakeGpu, fake_nvml

from harness import gate, gpus
from harness.errors import GateError
from harness.events import RunEvent
from harness.pool import JobLost, Pool, Sink, bundles, grouped
from harness.process import WORKER_COMMAND
from harness.record.lines import AnyLine, CaseLine, ChildLine, EndLine, StartLine
from harness.record.report import check as check_record
from harness.record.store import read_lines
from harness.resume import find_unfinished
from harness.run import RunOptions, RunOutcome, run_spec
from harness.spec import Case, load_spec, plan

TIMES = ("seconds", "ready_s", "started_utc", "ended_utc", "date", "sources", "peak_memory_bytes", "load_phases")
READINGS = ("While timing", "Load at the start")


def run(tmp_path: Path, jobs: int, options: dict[str, Any] | None = None, **script: Any) -> RunOutcome:
    """A run with scripted children, into a folder named by its number of jobs."""
    settings: dict[str, Any] = {
        "out": tmp_path / f"out{jobs}",
        "command": "harness run specs/tiny.yaml",
        "lock_dir": tmp_path,
        "worker": worker(tmp_path, **script),
        "job_timeout_s": 20,
        "jobs": jobs,
    }
    return run_spec(load_spec(tmp_path / "specs" / "tiny.yaml"), RunOptions(**(settings | (options or {}))))


def data_of(outcome: RunOutcome) -> Path:
    return outcome.page.parent / "data" / outcome.page.stem


def without_times(value: Any) -> Any:
    """A record without what two runs of one thing may differ in."""
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key not in TIMES + READINGS}
    if isinstance(value, list):
        return [without_times(part) for part in value]
    return value


def record_of(outcome: RunOutcome) -> Any:
    return without_times(json.loads((data_of(outcome) / "record.json").read_text(encoding="utf-8")))


def order_of(outcome: RunOutcome) -> list[tuple[str, str]]:
    """What stands in runs.jsonl, in order, with each child once."""
    found = [
        (line.line, getattr(line, "case", getattr(line, "child", "")))
        for line in read_lines(data_of(outcome) / "runs.jsonl").lines
    ]
    return [item for n, item in enumerate(found) if item[0] != "child" or item not in found[:n]]


@pytest.mark.parametrize("script", [{"moved_chain": "rowwise"}, {"how": "kill", "on": "parity"}], ids=["fail", "error"])
def test_the_record_is_the_serial_one(tmp_path: Path, script: dict[str, str]) -> None:
    """Guards against outcomes, order or names that depend on which job was first, also where cases fail."""
    write_spec(tmp_path)
    one, three = run(tmp_path, 1, slow=0.01, **script), run(tmp_path, 3, slow=0.01, **script)
    assert record_of(one) == record_of(three)
    assert order_of(one) == order_of(three)
    assert [line.case for line in one.cases] == [line.case for line in three.cases]
    assert (one.exit_code, one.failed) == (three.exit_code, three.failed)
    assert not check_record(three.page)
    logs = [sorted(file.name for file in (data_of(run_) / "logs").iterdir()) for run_ in (one, three)]
    assert logs[0] == logs[1]
    assert not list(data_of(three).glob("job-*"))
    if "moved_chain" in script:
        assert three.exit_code == 1


def test_jobs_run_side_by_side_and_timed_cases_alone(tmp_path: Path) -> None:
    """Guards against a pool that is none, and against a figure taken while another case ran."""
    write_spec(tmp_path)
    run(tmp_path, 3, slow=0.15)
    spans = []
    for line in (tmp_path / "spans.txt").read_text(encoding="utf-8").splitlines():
        began, ended, pid, case = line.split(" ", 3)
        spans.append((float(began), float(ended), pid, case))

    def overlapping(one: tuple[float, float, str, str]) -> list[str]:
        return [other[3] for other in spans if other[2] != one[2] and other[0] < one[1] and one[0] < other[1]]

    timed = [span for span in spans if span[3].endswith("::decode")]
    assert len(timed) > 9
    assert not any(overlapping(span) for span in timed)
    assert max(len(set(overlapping(span))) for span in spans if span not in timed) >= 2


@pytest.mark.skipif(sys.platform != "linux", reason="only there the kernel ends a child with its thread")
def test_the_timed_case_keeps_the_child_of_its_job(tmp_path: Path) -> None:
    """Guards against a child that the kernel ends with the thread that started it, in the middle of a timed case."""
    write_spec(tmp_path)
    outcome = run(tmp_path, 2, slow=0.05, tied=True)
    assert outcome.exit_code == 0
    children = [line for line in read_lines(data_of(outcome) / "runs.jsonl").lines if isinstance(line, ChildLine)]
    assert not [line for line in children if (line.started_for or "").endswith("::decode")]


def test_each_job_has_a_gpu_and_its_children_see_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two jobs on one GPU, and against a child that sees all of them."""
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    fake_nvml(monkeypatch, FakeGpu("GPU-a"), FakeGpu("GPU-b"), FakeGpu("GPU-c"))
    write_spec(tmp_path)
    gpu = {"name": "NVIDIA H200", "compute_capability": "9.0", "free_gib": 100.0}
    outcome = run(tmp_path, 2, {"device": "cuda"}, slow=0.05, machine={"cuda": True, "reason": "", "gpus": [gpu]})
    assert outcome.exit_code == 0
    pins = {line.split()[1] for line in (tmp_path / "pins.txt").read_text(encoding="utf-8").splitlines()}
    assert pins == {"GPU-a", "GPU-b"}
    env = json.loads((data_of(outcome) / "env.json").read_text(encoding="utf-8"))
    assert env["gpu"] == {**{k: v for k, v in gpu.items() if k != "free_gib"}, "driver": "580.1", "power_limit_w": 700}
    assert "GPU-" not in outcome.page.read_text(encoding="utf-8")


def test_jobs_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against four pairs in the memory of one; nothing is written, and the number that fits is named."""
    write_spec(tmp_path)
    monkeypatch.setattr(gate, "memory_available_bytes", lambda: 2 * 2**30)
    with pytest.raises(GateError, match=r"4 jobs take about 4 x 0\.6 GiB and 2\.0 GiB are free; give --jobs 3"):
        run(tmp_path, 4)
    assert not (tmp_path / "out4").exists()
    outcome = run(tmp_path, 4, {"gate_off": True, "only": ("specs/tiny.yaml::probe",)})
    start = next(line for line in read_lines(data_of(outcome) / "runs.jsonl").lines if isinstance(line, StartLine))
    assert "give --jobs 3" in (start.gate_ignored or ("",))[0]


NANO = """\
schema: 1
name: tiny
title: The nano pair
pair:
  target: {path: checkpoints/gemma4-nano-it-4bit}
  drafter: {path: checkpoints/gemma4-nano-it-assistant-4bit}
checks:
  - {kind: exactness_probe, id: probe, draws: [8], walk: false}
  - kind: attribution
    id: attribution
    draws: [8]
    walk: false
    stages: [base, rowwise]
    matrix:
      large_d: {env: MLXCEL_SDPA_VECTOR_LARGE_D, values: [null, "0"]}
  - {kind: decline, id: base, stage: base, expect_reason: layer 0, max_tokens: 8, prompts: [{text: "def f(x):"}]}
"""


@pytest.mark.parametrize("executor", [pytest.param("local", marks=pytest.mark.slow), "ray"])
def test_the_nano_pair_gives_the_serial_record(tmp_path: Path, executor: str) -> None:
    """Guards against bytes, hashes or outcomes of the real engine that depend on the job that ran a case."""
    if executor == "ray":
        pytest.importorskip("ray")
    text = NANO if executor == "local" else NANO.replace('"0"]', "]")  # a child less for each cluster and run
    write_spec(tmp_path, text)
    (tmp_path / "specs" / "checkpoints").symlink_to(ROOT / "specs" / "checkpoints")
    options: dict[str, Any] = {"worker": WORKER_COMMAND, "job_timeout_s": 300}
    one = run(tmp_path, 1, options)
    two = run(tmp_path, 2, options | {"executor": executor})
    assert one.exit_code == two.exit_code == 0
    assert record_of(one) == record_of(two)
    assert order_of(one) == order_of(two)
    hashes = {case["classic_sha256"] for case in record_of(two)["cases"] if case["kind"] == "attribution"}
    assert len(hashes) == (2 if executor == "local" else 1)
    assert None not in hashes


# ---- stopping -------------------------------------------------------------------------------------------------------

DRIVER = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from harness.run import RunOptions, run_spec
from harness.spec import load_spec
folder = Path(sys.argv[1])
options = RunOptions(
    out=folder / "out3", command="harness run specs/tiny.yaml", lock_dir=folder, jobs=3, worker=tuple(sys.argv[2:])
)
sys.exit(run_spec(load_spec(folder / "specs" / "tiny.yaml"), options).exit_code)
"""


def ended_cases(out: Path) -> list[CaseLine]:
    """The cases that the record of the run into this folder has so far."""
    return [
        line for file in out.glob("data/*/runs.jsonl") for line in read_lines(file).lines if isinstance(line, CaseLine)
    ]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see whether a process lives")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["Ctrl-C", "SIGTERM", "SIGKILL"],
)
def test_a_stopped_pool_leaves_no_process_and_a_record_that_resumes(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Guards against orphans of any job, against lost cases, and against an error that only says that we stopped."""
    write_spec(tmp_path)
    script = {} if number == signal.SIGKILL else {"grandchild": True}  # nobody is left to end what a child started
    command = [sys.executable, "-c", DRIVER, str(tmp_path), *worker(tmp_path, slow=0.3, **script)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        deadline = time.monotonic() + 30
        starts = tmp_path / "starts.txt"
        while time.monotonic() < deadline:
            begun = starts.read_text(encoding="utf-8").count("\n") if starts.exists() else 0
            if begun >= 3 and ended_cases(tmp_path / "out3"):  # every job has a child, the record a case
                break
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(30) == code
    started = starts.read_text(encoding="utf-8").splitlines()
    assert len(started) >= 3
    assert all(gone(int(line.split()[0])) for line in started)
    if script:
        assert gone(int((tmp_path / "grandchild.txt").read_text(encoding="ascii")))  # the one that was started last
    (data,) = (tmp_path / "out3" / "data").iterdir()
    lines = read_lines(data / "runs.jsonl").lines
    ended = ended_cases(tmp_path / "out3")
    assert 0 < len(ended) < 8
    assert not [line for line in ended if line.outcome == "error"]
    assert isinstance(lines[-1], EndLine) == (number != signal.SIGKILL)
    found = find_unfinished(load_spec(tmp_path / "specs" / "tiny.yaml"), tmp_path / "out3")
    outcome = run(tmp_path, 2, {"resume": found})
    assert outcome.exit_code == 0
    assert len(outcome.cases) == 8
    assert not check_record(outcome.page)
    assert not list(data.glob("job-*"))
    again = [line.case for line in read_lines(data / "runs.jsonl").lines if isinstance(line, CaseLine)]
    assert len(again) == len(set(again)) == 8


# ---- the pool on its own --------------------------------------------------------------------------------------------


class FakeJob:
    """A job that does what a function says."""

    def __init__(self, sink: Sink, act: Any = None) -> None:
        self.sink, self.act = sink, act
        self.ran: list[str] = []
        self.killed = self.closed = False
        self.stopped = threading.Event()

    def run(self, case: Case) -> CaseLine:
        self.ran.append(case.name)
        if self.act is not None:
            self.act(self, case)
        line = CaseLine(case=case.id, kind=case.kind, outcome="pass", reason="", seconds=0.0)
        self.sink.emit(line)
        return line

    def release(self, wanted: Iterable[Any]) -> None:
        list(wanted)

    def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        self.killed = True
        self.stopped.set()


def pool_of(tmp_path: Path, *acts: Any) -> tuple[Pool, list[FakeJob], list[AnyLine], list[RunEvent], tuple[Case, ...]]:
    lines: list[AnyLine] = []
    events: list[RunEvent] = []
    sink = Sink(lines.append, events.append)
    jobs = [FakeJob(sink, act) for act in acts]

    def lost(case: Case, reason: str) -> CaseLine:
        return CaseLine(case=case.id, kind=case.kind, outcome="error", reason=reason, seconds=0.0)

    return Pool(jobs, sink, lost), jobs, lines, events, plan(load_spec(write_spec(tmp_path)))


def test_cases_that_are_judged_together_stay_together(tmp_path: Path) -> None:
    """Guards against a stage that is judged before its sibling was measured."""
    cases = grouped(plan(load_spec(write_spec(tmp_path))))
    names = [[case.name for case in bundle] for bundle in bundles(cases)]
    assert ["attribution[stage:base+multirow:0]", "attribution[stage:rowwise+multirow:0]"] in names
    assert sum(map(len, names)) == len(cases) == 8


def test_every_case_runs_once_and_events_count(tmp_path: Path) -> None:
    """Guards against a case that two jobs take, or none."""
    pool, jobs, lines, events, cases = pool_of(tmp_path, *[lambda job, case: time.sleep(0.01)] * 3)
    pool.run(cases)
    assert sorted(line.case for line in lines if isinstance(line, CaseLine)) == sorted(case.id for case in cases)
    assert all(job.ran for job in jobs)
    ends = [event.done for event in events if event.kind == "case_end"]
    assert ends == list(range(1, 9))
    assert all(job.closed for job in jobs)
    assert [job.ran[-1] for job in jobs].count("decode") == 1


def lose(job: FakeJob, case: Case) -> None:
    raise JobLost("host gone")


def test_a_lost_job_costs_its_case_and_the_others_go_on(tmp_path: Path) -> None:
    """Guards against one dead host that ends the run, or whose case is simply missing."""
    pool, jobs, lines, _, cases = pool_of(tmp_path, lose, lambda job, case: time.sleep(0.02))
    pool.run(cases)
    outcomes = {line.case: line.outcome for line in lines if isinstance(line, CaseLine)}
    assert list(outcomes.values()).count("error") == 1
    assert len(outcomes) == 8
    assert len(jobs[0].ran) == 1


def test_with_every_job_lost_each_case_says_so(tmp_path: Path) -> None:
    """Guards against a run of nothing that ends well."""
    pool, _, lines, _, cases = pool_of(tmp_path, lose, lose)
    pool.run(cases)
    ended = [line for line in lines if isinstance(line, CaseLine)]
    assert [(line.outcome, line.reason) for line in ended] == [("error", "host gone")] * 8


def test_a_bug_in_a_job_s_thread_reaches_the_caller(tmp_path: Path) -> None:
    """Guards against an exception that dies with its thread while the run ends well."""

    def crash(job: FakeJob, case: Case) -> None:
        raise ZeroDivisionError("a bug")

    pool, jobs, lines, _, cases = pool_of(tmp_path, crash, lambda job, case: time.sleep(0.05))
    with pytest.raises(ZeroDivisionError):
        pool.run(cases)
    assert all(job.killed for job in jobs)
    assert len([line for line in lines if isinstance(line, CaseLine)]) < 8


def test_nothing_is_filed_after_a_stop(tmp_path: Path) -> None:
    """Guards against the error lines of children that we ended ourselves."""
    pool, jobs, lines, _, cases = pool_of(tmp_path, *[lambda job, case: job.stopped.wait(10)] * 2)
    thread = threading.Thread(target=lambda: pool.run(cases))
    thread.start()
    while not all(job.ran for job in jobs):
        time.sleep(0.01)
    pool.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert not lines
    assert [len(job.ran) for job in jobs] == [1, 1]


def test_children_are_named_alike_whoever_starts_first(tmp_path: Path) -> None:
    """Guards against two jobs that call one child by two names, and one name for two children."""
    write_spec(tmp_path, SPEC_TEXT)
    outcome = run(tmp_path, 3, slow=0.05)
    children = [line for line in read_lines(data_of(outcome) / "runs.jsonl").lines if isinstance(line, ChildLine)]
    assert {line.child for line in children} == {"default", "multirow:0"}
    assert all((line.env_requested.get("MLXCEL_QMV_MULTIROW") == "0") == (line.child != "default") for line in children)
