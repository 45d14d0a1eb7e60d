"""A run that is stopped in any way leaves a readable record, and `--resume` finishes it without repeating or mixing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support_harness import ROOT, SPEC_TEXT, gone, worker, write_spec

from harness.errors import UsageError
from harness.record.lines import CaseLine, EndLine, StartLine
from harness.record.report import check as check_record
from harness.record.store import read_lines
from harness.resume import find_unfinished
from harness.run import RunOptions, RunOutcome, run_spec
from harness.spec import load_spec, plan

CASES = 8


def run(tmp_path: Path, resume: Path | None = None, only: tuple[str, ...] = (), **script: Any) -> RunOutcome:
    """A run with scripted children, into `out` beside the spec."""
    options = RunOptions(
        only=only,
        out=tmp_path / "out",
        resume=resume,
        command="harness run specs/tiny.yaml",
        lock_dir=tmp_path,
        worker=worker(tmp_path, **script),
        job_timeout_s=20,
    )
    return run_spec(load_spec(tmp_path / "specs" / "tiny.yaml"), options)


def data_of(outcome: RunOutcome) -> Path:
    return outcome.page.parent / "data" / outcome.page.stem


def outcomes(data: Path) -> dict[str, str]:
    """The last outcome of each case in a record's raw lines."""
    lines = read_lines(data / "runs.jsonl").lines
    return {line.case.partition("::")[2]: line.outcome for line in lines if isinstance(line, CaseLine)}


def jobs(tmp_path: Path) -> Counter[str]:
    return Counter((tmp_path / "jobs.txt").read_text(encoding="utf-8").splitlines())


def test_a_whole_run(tmp_path: Path) -> None:
    """The reference for the tests below: every case once, in the plan's order, and a record that checks."""
    write_spec(tmp_path)
    outcome = run(tmp_path)
    assert outcome.exit_code == 0
    assert [line.case.partition("::")[2] for line in outcome.cases] == [
        case.name for case in plan(load_spec(tmp_path / "specs" / "tiny.yaml"))
    ]
    assert outcomes(data_of(outcome)) == {
        "probe": "pass",
        "attribution[stage:base+multirow:unset]": "declined",
        "attribution[stage:base+multirow:0]": "declined",
        "attribution[stage:rowwise+multirow:unset]": "pass",
        "attribution[stage:rowwise+multirow:0]": "pass",
        "parity": "pass",
        "decode": "pass",
        "decline": "declined",
    }
    assert (tmp_path / "starts.txt").read_text(encoding="utf-8").count("\n") == 2
    lines = read_lines(data_of(outcome) / "runs.jsonl").lines
    assert isinstance(lines[0], StartLine)
    assert isinstance(lines[-1], EndLine)
    assert not check_record(outcome.page)
    assert json.loads((data_of(outcome) / "env.json").read_text(encoding="utf-8"))["fingerprint"]


def test_errors_run_again_and_nothing_else(tmp_path: Path) -> None:
    """Guards against a resume that repeats finished cases or keeps an error for ever."""
    write_spec(tmp_path)
    first = run(tmp_path, how="exit", on="parity")
    assert first.exit_code == 3
    assert outcomes(data_of(first))["parity"] == "error"
    before = jobs(tmp_path)
    second = run(tmp_path, resume=data_of(first))
    assert second.page == first.page
    assert second.exit_code == 0
    again = jobs(tmp_path) - before
    assert again == Counter({"parity specs/tiny.yaml::parity": 1})
    assert outcomes(data_of(first))["parity"] == "pass"
    with pytest.raises(UsageError, match="nothing to resume"):
        find_unfinished(load_spec(tmp_path / "specs" / "tiny.yaml"), tmp_path / "out")


def test_a_second_run_on_one_day_gets_a_record_of_its_own(tmp_path: Path) -> None:
    """Guards against overwriting the morning's measurement in the afternoon."""
    write_spec(tmp_path)
    first, second = run(tmp_path), run(tmp_path)
    assert first.page != second.page
    assert first.page.exists()
    assert second.page.stem == first.page.stem + "-2"


def test_a_changed_spec_is_not_resumed(tmp_path: Path) -> None:
    """Guards against one record that mixes two specs."""
    write_spec(tmp_path)
    first = run(tmp_path, how="exit", on="parity")
    write_spec(tmp_path, SPEC_TEXT.replace("max_tokens: 9", "max_tokens: 8"))
    with pytest.raises(UsageError, match="has changed since"):
        run(tmp_path, resume=data_of(first))


@pytest.mark.parametrize("part", ["weights", "versions"])
def test_a_changed_environment_is_not_resumed(tmp_path: Path, part: str) -> None:
    """Guards against one record that mixes two sets of weights or two versions of torch; the refusal names which."""
    write_spec(tmp_path)
    first = run(tmp_path, how="exit", on="parity")
    env_file = data_of(first) / "env.json"
    if part == "weights":
        (tmp_path / "specs" / "target" / "config.json").write_text("{}", encoding="utf-8")
    else:
        env = json.loads(env_file.read_text(encoding="utf-8"))
        env["versions"]["torch"] = "0.0"
        env["fingerprint"] = "another"
        env_file.write_text(json.dumps(env), encoding="utf-8")
    lines = (data_of(first) / "runs.jsonl").read_bytes()
    with pytest.raises(UsageError, match="checkpoints.target" if part == "weights" else "versions.torch"):
        run(tmp_path, resume=data_of(first))
    assert (data_of(first) / "runs.jsonl").read_bytes() == lines


def test_a_record_of_another_spec_is_not_resumed(tmp_path: Path) -> None:
    """Guards against appending one spec's lines to another's record."""
    write_spec(tmp_path)
    first = run(tmp_path, only=("specs/tiny.yaml::probe",))
    other = tmp_path / "specs" / "other.yaml"
    other.write_text(SPEC_TEXT.replace("name: tiny", "name: other"), encoding="utf-8")
    with pytest.raises(UsageError, match="is a record of"):
        run_spec(load_spec(other), RunOptions(resume=data_of(first), lock_dir=tmp_path))


def test_a_part_of_a_spec_resumes_as_that_part(tmp_path: Path) -> None:
    """Guards against a resume that runs cases which the record never meant to hold."""
    write_spec(tmp_path)
    chosen = ("specs/tiny.yaml::probe", "specs/tiny.yaml::parity")
    first = run(tmp_path, only=chosen, how="exit", on="parity")
    second = run(tmp_path, resume=data_of(first))
    assert tuple(line.case for line in second.cases) == chosen
    assert second.exit_code == 0


DRIVER = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
from pathlib import Path
from harness.run import RunOptions, run_spec
from harness.spec import load_spec
folder = Path(sys.argv[1])
options = RunOptions(
    out=folder / "out", command="harness run specs/tiny.yaml", lock_dir=folder, worker=tuple(sys.argv[2:])
)
sys.exit(run_spec(load_spec(folder / "specs" / "tiny.yaml"), options).exit_code)
"""


def stopped_run(tmp_path: Path, number: signal.Signals, after: int = 4) -> tuple[int, list[int]]:
    """Start a run in a process of its own, send it a signal after some jobs; its exit code and its children's ids."""
    command = [sys.executable, "-c", DRIVER, str(tmp_path), *worker(tmp_path, slow=0.2)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if (tmp_path / "jobs.txt").exists() and sum(jobs(tmp_path).values()) >= after:
                break
            time.sleep(0.02)
        process.send_signal(number)
        code = process.wait(30)
    started = (tmp_path / "starts.txt").read_text(encoding="utf-8").splitlines()
    return code, [int(line.split()[0]) for line in started]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see whether a process lives")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_run_ends_its_children_and_renders_what_it_has(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Guards against orphans and against a record without a page; the resumed run has all cases, each run once."""
    write_spec(tmp_path)
    ended, children = stopped_run(tmp_path, number)
    assert ended == code
    assert all(gone(pid) for pid in children)
    (page,) = (tmp_path / "out").glob("tiny-*.md")
    assert not check_record(page)
    data = tmp_path / "out" / "data" / page.stem
    last = read_lines(data / "runs.jsonl").lines[-1]
    assert isinstance(last, EndLine)
    assert last.interrupted
    finished = outcomes(data)
    assert 0 < len(finished) < CASES
    assert_finishes(tmp_path, data)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see whether a process lives")
def test_a_killed_run_leaves_a_readable_record_that_resumes(tmp_path: Path) -> None:
    """Guards against losing an hour to `kill -9`: whole lines stay, a torn one is dropped, children end."""
    write_spec(tmp_path)
    ended, children = stopped_run(tmp_path, signal.SIGKILL)
    assert ended == -signal.SIGKILL
    assert all(gone(pid) for pid in children)
    (data,) = (tmp_path / "out" / "data").iterdir()
    assert 0 < len(outcomes(data)) < CASES
    with (data / "runs.jsonl").open("ab") as file:
        file.write(b'{"line": "draw", "case": "specs/tiny.ya')
    assert read_lines(data / "runs.jsonl").torn
    assert_finishes(tmp_path, data)


def assert_finishes(tmp_path: Path, data: Path) -> None:
    """Resume the unfinished record and hold it against a run that was never stopped."""
    loaded = load_spec(tmp_path / "specs" / "tiny.yaml")
    assert find_unfinished(loaded, tmp_path / "out") == data
    before = set(outcomes(data))
    outcome = run(tmp_path, resume=data)
    assert outcome.exit_code == 0
    assert len(outcome.cases) == CASES
    lines = read_lines(data / "runs.jsonl").lines
    ended = Counter(line.case for line in lines if isinstance(line, CaseLine))
    assert set(ended.values()) == {1}
    assert len(ended) == CASES
    assert before < set(outcomes(data))
    assert [line.resumed for line in lines if isinstance(line, StartLine)] == [False, True]
    assert not check_record(outcome.page)
