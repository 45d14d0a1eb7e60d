"""Jobs on a Ray cluster: the serial run's record, honest refusals, and nothing left behind. Skipped without Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support_harness import ROOT, gone, worker, write_spec
from test_harness_pool import data_of, order_of, record_of
from test_harness_pool import run as run_here

from harness.errors import GateError, UsageError
from harness.locks import hold
from harness.pool import Sink
from harness.ray_site import HARMLESS, RayJob, RaySite, import_ray
from harness.record.lines import CaseLine, EndLine
from harness.record.report import check as check_record
from harness.record.store import read_lines
from harness.resume import find_unfinished
from harness.spec import load_spec, plan

DRIVER = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from harness.errors import HarnessError
from harness.run import RunOptions, run_spec
from harness.spec import load_spec
folder, jobs = Path(sys.argv[1]), int(sys.argv[2])
options = RunOptions(
    out=folder / "out-ray", command="harness run specs/tiny.yaml", lock_dir=folder, jobs=jobs, executor="ray",
    worker=tuple(sys.argv[3:]), job_timeout_s=20,
)
try:
    outcome = run_spec(load_spec(folder / "specs" / "tiny.yaml"), options)
except HarnessError as error:
    sys.exit(f"refused: {error}")
print("page", outcome.page)
sys.exit(outcome.exit_code)
"""


def start(tmp_path: Path, jobs: int, **script: object) -> subprocess.Popen[str]:
    """A run on a cluster of its own, in a process of its own."""
    pytest.importorskip("ray")
    command = [sys.executable, "-c", DRIVER, str(tmp_path), str(jobs), *worker(tmp_path, **script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def data(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "out-ray" / "data").iterdir()
    return found


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback from an import."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'mtp-harness\[ray\]'"):
        import_ray()


def test_hosts_of_two_kinds_are_refused(tmp_path: Path) -> None:
    """Guards against one record of two machines; what changes no byte may differ."""
    loaded = load_spec(write_spec(tmp_path))
    one = {"versions": {"torch": "2.13"}, "host": {"cpu": "x", "memory_gib": 1}, "env": {}}

    class Ray:
        class exceptions:
            GetTimeoutError = RayTaskError = RayError = ZeroDivisionError

        @staticmethod
        def get(references: list[object], timeout: float) -> list[object]:
            return references

    class Actor:
        def __init__(self, env: dict[str, object]) -> None:
            self.environment = self
            self.env = env

        def remote(self, ids: list[str], command: str) -> dict[str, object]:
            return dict(self.env)

    same = {**one, "host": {"cpu": "x", "memory_gib": 2}}
    assert "host.memory_gib" in HARMLESS
    site = RaySite(Ray, [Actor(one), Actor(same)], None)
    assert site._environment(loaded, plan(loaded), "x")["versions"] == one["versions"]
    other = {**one, "versions": {"torch": "2.12"}, "host": {"cpu": "y"}}
    with pytest.raises(GateError, match=r"the hosts differ in host\.cpu, versions\.torch"):
        RaySite(Ray, [Actor(one), Actor(same), Actor(other)], None)._environment(loaded, plan(loaded), "x")
    with pytest.raises(GateError, match="no driver"):
        RaySite(Ray, [Actor({"error": "no driver"})], None)._environment(loaded, plan(loaded), "x")


def test_a_job_sends_what_its_host_has_not_seen(tmp_path: Path) -> None:
    """Guards against a case over there that is judged without the lines of the other jobs, or sees its own twice."""
    case = plan(load_spec(write_spec(tmp_path)))[0]
    sent: list[list[str]] = []

    class Ray:
        class exceptions:
            RayTaskError = RayError = ZeroDivisionError

        @staticmethod
        def get(item: object) -> object:
            return item

    class Actor:
        @property
        def run(self) -> Actor:
            return self

        def options(self, **_: object) -> Actor:
            return self

        def remote(self, case_id: str, earlier: list[str]) -> list[tuple[str, str]]:
            sent.append(earlier)
            line = CaseLine(case=case_id, kind=case.kind, outcome="pass", reason="", seconds=0.0)
            return [("line", line.model_dump_json())]

    before = CaseLine(case="x::earlier", kind="decline", outcome="pass", reason="", seconds=0.0)
    log: list[tuple[int, object]] = [(-1, before)]
    sink = Sink(lambda line: None, lambda event: None)
    first, second = (RayJob(Ray, number, Actor(), sink, log) for number in range(2))  # type: ignore[arg-type]
    for job in (first, second, first):
        assert job.run(case).case == case.id
    assert [len(lines) for lines in sent] == [1, 2, 1]
    assert "x::earlier" in sent[0][0]


def test_the_record_is_the_serial_one(tmp_path: Path) -> None:
    """Guards against a second kind of record: outcomes, order, names and logs are those of a run on one host."""
    write_spec(tmp_path)
    with start(tmp_path, 2, slow=0.02) as process:
        out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    pids = [int(line.split()[0]) for line in (tmp_path / "starts.txt").read_text(encoding="utf-8").splitlines()]
    assert all(gone(pid) for pid in pids)
    here = run_here(tmp_path, 1, slow=0.02)
    there = type(here)(here.cases, 0, Path(out.split("page ")[1].strip()))
    assert record_of(there) == record_of(here)
    assert order_of(there) == order_of(here)
    assert not check_record(there.page)
    logs = [sorted(file.name for file in (data_of(run) / "logs").iterdir()) for run in (here, there)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow, id="INT"),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow, id="TERM"),
        pytest.param(signal.SIGKILL, -9, id="KILL"),
    ],
)
def test_a_stopped_run_leaves_nothing_on_the_hosts(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Guards against actors and children that go on measuring for a writer that is gone."""
    write_spec(tmp_path)
    with start(tmp_path, 2, slow=0.5) as process:
        spans, deadline = tmp_path / "spans.txt", time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if spans.exists() and spans.read_text(encoding="utf-8").count("\n") >= 2:
                break
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    pids = [int(line.split()[0]) for line in (tmp_path / "starts.txt").read_text(encoding="utf-8").splitlines()]
    assert len(pids) >= 2
    assert all(gone(pid, 20) for pid in pids)
    lines = read_lines(data(tmp_path) / "runs.jsonl").lines
    assert isinstance(lines[-1], EndLine) == (number != signal.SIGKILL)
    assert not [line for line in lines if isinstance(line, CaseLine) and line.outcome == "error"]
    assert find_unfinished(load_spec(tmp_path / "specs" / "tiny.yaml"), tmp_path / "out-ray") == data(tmp_path)


@pytest.mark.parametrize("why", ["too small", pytest.param("locked", marks=pytest.mark.slow)])
def test_a_cluster_that_is_not_fit_is_refused_before_a_record_exists(tmp_path: Path, why: str) -> None:
    """Guards against waiting for ever for a place, and against timing beside another run of the same host."""
    write_spec(tmp_path)
    jobs = 10_000 if why == "too small" else 2
    other_run = hold("cpu", folder=tmp_path) if why == "locked" else contextlib.nullcontext()
    with other_run, start(tmp_path, jobs) as process:
        _, err = process.communicate(timeout=180)
    words = "--jobs 10000 takes a CPU for each job, and the cluster has" if why == "too small" else "holds the cpu lock"
    assert process.returncode == 1
    assert words in err
    assert not (tmp_path / "out-ray").exists()
