"""Children: allow-listed environment, the protocol, and every way in which one can end badly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_harness import ROOT, alive, gone, worker

from harness.errors import RunError
from harness.process import Child, ChildInputError, ChildMemoryError, child_environment, describe_exit, stray_flags
from harness.protocol import Progress, RawLine, Setup

SETUP = Setup(target="target", drafter="drafter")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts scripted children and makes sure that none outlives the test."""
    children: list[Child] = []

    def make(flags: dict[str, str | None] | None = None, **script: Any) -> Child:
        child = Child("tiny", flags or {}, tmp_path / "logs" / "tiny.log", command=worker(tmp_path, **script))
        children.append(child)
        return child

    yield make
    for child in children:
        child.kill()


def test_environment_is_an_allow_list() -> None:
    """Guards against flags, paths and secrets of the shell reaching a child."""
    shell = {"PATH": "/bin", "MLXCEL_QMV_MULTIROW": "0", "PYTHONSTARTUP": "x", "API_TOKEN": "y", "OMP_NUM_THREADS": "1"}
    built = child_environment({"MLXCEL_SDPA_VECTOR_LARGE_D": "0", "MLXCEL_PREFILL_CHUNK": None}, shell)
    assert built["PATH"] == "/bin"
    assert built["OMP_NUM_THREADS"] == "1"
    assert built["MLXCEL_SDPA_VECTOR_LARGE_D"] == "0"
    assert set(built) == {
        "PATH",
        "OMP_NUM_THREADS",
        "MLXCEL_SDPA_VECTOR_LARGE_D",
        "PYTHONPATH",
        "PYTHONUTF8",
        "PYTHONHASHSEED",
    }


def test_stray_flags_are_found_by_prefix() -> None:
    """Guards against a misspelt flag in the shell that nobody would notice."""
    shell = {"MLXCEL_QMV_MULTIROWS": "0", "MLX_ENABLE_TF32": "1", "PATH": "/bin"}
    assert stray_flags(shell) == {"MLXCEL_QMV_MULTIROWS": "0", "MLX_ENABLE_TF32": "1"}


def test_a_conversation(start: Any) -> None:
    """Ready with the flags that the child read, raw lines and a result for each of two jobs, then a clean end."""
    child = start({"MLXCEL_QMV_MULTIROW": "0"})
    ready = child.start(SETUP)
    assert ready.flags_requested["MLXCEL_QMV_MULTIROW"] == "0"
    seen: list[Any] = []
    for number in (1, 2):
        result = child.run(
            "probe", f"x::probe{number}", {"stage": "rowwise", "draws": [8]}, timeout_s=20, on_event=seen.append
        )
        assert result.job == number
    assert [event.line["line"] for event in seen if isinstance(event, RawLine)] == ["draw", "decision", "path"] * 2
    child.close()
    assert not alive(child.pid)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", ["exit code 7", "the last words of this child"]),
        ("segv", ["SIGSEGV"]),
        ("kill", ["SIGKILL", "out of memory"]),
        ("garbage", ["Warning: something printed", "not the protocol"]),
        ("half", ["not the protocol"]),
    ],
)
def test_a_bad_end_is_one_line_with_its_cause(start: Any, how: str, words: list[str]) -> None:
    """Guards against a dead or babbling child that hangs the run or ends it with a traceback."""
    child = start(how=how)
    child.start(SETUP)
    with pytest.raises(RunError) as caught:
        child.run("probe", "x::probe", {"stage": "rowwise", "draws": [8]}, timeout_s=20)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert gone(child.pid)
    assert not child.alive


def test_a_child_that_dies_while_loading_says_so(start: Any) -> None:
    """Guards against waiting the whole deadline for a process that is gone."""
    child = start(at_start="exit")
    began = time.monotonic()
    with pytest.raises(RunError, match="exit code 7"):
        child.start(SETUP, timeout_s=60)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("how", ["hang", "stubborn"])
def test_a_deadline_ends_the_whole_group(start: Any, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a hung child, one that ignores TERM, and what it started itself, living on."""
    monkeypatch.setattr("harness.process.TERM_GRACE_S", 0.5)
    child = start(how=how, grandchild=True)
    child.start(SETUP)
    grandchild = int((tmp_path / "grandchild.txt").read_text(encoding="ascii"))
    with pytest.raises(RunError, match=r"took longer than 0\.5 s"):
        child.run("probe", "x::probe", {"stage": "rowwise", "draws": [8]}, timeout_s=0.5)
    assert gone(child.pid)
    assert gone(grandchild)


def test_a_job_out_of_memory_ends_the_child(start: Any) -> None:
    """Guards against a next job that starves on what the last one left in memory."""
    child = start(fail="memory", on="probe")
    child.start(SETUP)
    with pytest.raises(ChildMemoryError, match="no"):
        child.run("probe", "x::probe", {"stage": "rowwise", "draws": [8]}, timeout_s=20)
    assert not child.alive
    assert gone(child.pid)


@pytest.mark.parametrize(("kind", "error"), [("input", ChildInputError), ("internal", RunError)])
def test_a_failed_job_leaves_the_child_running(start: Any, kind: str, error: type[RunError]) -> None:
    """Guards against restarting a loaded pair because one prompt was refused."""
    child = start(fail=kind, on="probe")
    child.start(SETUP)
    with pytest.raises(error, match="no"):
        child.run("probe", "x::probe", {"stage": "rowwise", "draws": [8]}, timeout_s=20)
    assert child.run("steps", "x::decode", timeout_s=20).job == 2


def test_a_refused_load_is_the_engine_s_own_sentence(start: Any) -> None:
    """Guards against hiding "this is a drafter" behind "child died"."""
    child = start(refuse="config.json: this is a drafter; give it as drafter")
    with pytest.raises(ChildInputError, match="this is a drafter"):
        child.start(SETUP)
    assert gone(child.pid)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    """Guards against a traceback from Popen."""
    with pytest.raises(RunError, match="cannot start"):
        Child("tiny", {}, tmp_path / "tiny.log", command=(str(tmp_path / "nowhere"),))


def test_closing_twice_and_after_a_kill_is_harmless(start: Any) -> None:
    """Guards against a second signal to a process id that may belong to somebody else."""
    child = start()
    child.start(SETUP)
    child.close()
    child.close()
    child.kill()
    with pytest.raises(RunError):
        child.run("steps", "x::decode", timeout_s=5)


@pytest.mark.parametrize(
    ("code", "words"), [(3, "exit code 3"), (-11, "SIGSEGV"), (-9, "SIGKILL"), (-200, "signal 200")]
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    """Guards against a bare negative number in a reason."""
    assert words in describe_exit(code)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see whether a process lives")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with a job"])
def test_the_real_worker_ends_when_its_parent_is_killed(tmp_path: Path, busy: bool) -> None:
    """Guards against orphans that hold memory and cores after `kill -9` of a run."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from harness.process import Child; from harness.protocol import Setup\n"
        f"child = Child('machine', {{}}, Path({str(tmp_path / 'w.log')!r}))\n"
        "child.start(Setup()); print(child.pid, flush=True)\n"
        + ('child._send(\'{"id": 1, "kind": "machine", "args": {}}\')\n' if busy else "")
        + "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    assert gone(pid)


def test_progress_events_reach_the_caller(tmp_path: Path) -> None:
    """Guards against swallowing what the progress bar needs."""
    code = (
        "import sys\n"
        'sys.stdin.readline(); print(\'{"event": "ready"}\', flush=True); sys.stdin.readline()\n'
        'print(\'{"event": "progress", "job": 1, "done": 1, "total": 2}\', flush=True)\n'
        'print(\'{"event": "result", "job": 1}\', flush=True)\n'
    )
    seen: list[Any] = []
    with Child("tiny", {}, tmp_path / "tiny.log", command=(sys.executable, "-c", code)) as child:
        child.start(SETUP)
        child.run("steps", timeout_s=20, on_event=seen.append)
    assert [(event.done, event.total) for event in seen if isinstance(event, Progress)] == [(1, 2)]


def test_an_answer_to_another_job_is_refused(tmp_path: Path) -> None:
    """Guards against filing one job's numbers under another case."""
    code = (
        "import sys\n"
        'sys.stdin.readline(); print(\'{"event": "ready"}\', flush=True); sys.stdin.readline()\n'
        'print(\'{"event": "result", "job": 5}\', flush=True); sys.stdin.read()\n'
    )
    with Child("tiny", {}, tmp_path / "tiny.log", command=(sys.executable, "-c", code)) as child:
        child.start(SETUP)
        with pytest.raises(RunError, match="answered job 5 while job 1"):
            child.run("steps", timeout_s=20)
