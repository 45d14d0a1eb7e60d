"""What must hold before a run may measure, what a context skips, and how outcomes become an exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support_harness import ROOT, SPEC_TEXT, worker, write_spec

from engine.flags import read_flags
from harness import gate, provenance
from harness.context import RunContext, check_flags
from harness.errors import CheckFailed, GateError, UsageError
from harness.locks import measuring_lock
from harness.peak import peak_problem
from harness.record.lines import CaseLine, ChildLine
from harness.run import RunOptions, device_of, dry_run, exit_code, run_spec
from harness.spec import Case, load_spec, plan


def cases_of(tmp_path: Path, text: str = SPEC_TEXT) -> tuple[Case, ...]:
    """The plan of a spec in a folder of its own."""
    return plan(load_spec(write_spec(tmp_path, text)))


def context(tmp_path: Path, **options: Any) -> RunContext:
    """A context with scripted children."""
    script = options.pop("script", {})
    return RunContext(
        log_dir=tmp_path / "logs", command=worker(tmp_path, **script), lock_dir=tmp_path, job_timeout_s=20, **options
    )


# ---- lock and memory ------------------------------------------------------------------------------------------------


def test_two_measuring_runs_exclude_each_other(tmp_path: Path) -> None:
    """Guards against two runs that disturb each other's times: the second is told at once, another device is free."""
    code = (
        "import sys; from pathlib import Path; from harness.locks import measuring_lock\n"
        f"with measuring_lock('cpu', Path({str(tmp_path)!r})):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "held\n"
        refused = pytest.raises(GateError, match="another measuring run holds the cpu lock")
        with refused as caught, measuring_lock("cpu", tmp_path):
            pass
        assert caught.value.exit_code == 3
        with measuring_lock("cuda", tmp_path):
            pass
        other.stdin.close()
        other.wait(20)
    with measuring_lock("cpu", tmp_path):
        pass


def test_an_unusable_lock_folder_is_one_sentence(tmp_path: Path) -> None:
    """Guards against a traceback when the lock file cannot be made."""
    (tmp_path / "file").write_text("", encoding="ascii")
    with pytest.raises(GateError, match="cannot lock cpu"), measuring_lock("cpu", tmp_path / "file" / "x"):
        pass


@pytest.mark.parametrize(
    ("peak", "outcome", "reason"),
    [
        (2**31, "pass", ""),
        (2**31 + 2**25, "fail", "a child has held 2.03 GiB in memory, max_peak_gib is 2"),
        (None, "fail", "max_peak_gib is 2, and the child does not say how much it has held in memory"),
    ],
    ids=["within", "above", "unknown"],
)
def test_a_peak_above_the_spec_s_fails_the_case(tmp_path: Path, peak: int | None, outcome: str, reason: str) -> None:
    """Guards against a long prompt that takes a hundred times its share and passes on a machine that has it (B62)."""
    text = SPEC_TEXT.replace("id: probe, draws", "id: probe, max_peak_gib: 2, draws")
    with context(tmp_path, script={"peak": peak}) as running:
        line = running.run(cases_of(tmp_path, text)[0])
    assert line.outcome == outcome
    assert line.reason.endswith(reason)


def test_a_peak_is_named_by_where_it_was() -> None:
    """Guards a limit on a GPU's memory that reads as one on the host's, and a check without one."""
    assert peak_problem(2**40, None, "cpu") is None
    assert peak_problem(3 * 2**30, 2.5, "cuda:0") == "a child has held 3.00 GiB on the GPU, max_peak_gib is 2.5"


@pytest.mark.parametrize(("bits", "factor"), [(4, 4.0), (8, 2.0), (None, 1.0)])
def test_load_estimate_counts_dequantized_weights(tmp_path: Path, bits: int | None, factor: float) -> None:
    """Guards against measuring the file and forgetting that a CPU keeps 4-bit weights in 16."""
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    config = {"quantization": {"bits": bits}} if bits else {}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert gate.estimate_load_bytes(tmp_path, "cpu") == 1000 * factor
    assert gate.estimate_load_bytes(tmp_path, "cuda") == 1000


def test_too_little_memory_is_refused_before_loading(tmp_path: Path) -> None:
    """Guards against a child that the system kills in the middle of a load."""
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    gate.check_memory((tmp_path,), "cpu", available=2**30)
    with pytest.raises(GateError, match=r"takes about 0\.6 GiB and 0\.5 GiB are free"):
        gate.check_memory((tmp_path,), "cpu", available=2**29)


def test_a_small_pair_gets_one_thread_and_a_large_one_torch_s_choice(tmp_path: Path) -> None:
    """Guards against two threads that wait for each other at every tiny op, and against one thread for a real model."""
    assert gate.default_threads((tmp_path,), "cpu") == 1
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(gate.SMALL_PAIR_BYTES)
    assert gate.default_threads((tmp_path,), "cpu") is None
    assert gate.default_threads((tmp_path / "nowhere",), "cuda") is None


@pytest.mark.parametrize(("load", "busy"), [(0.9, False), (1.0, False), (1.1, True), (None, False)])
def test_a_busy_cpu_is_noted(load: float | None, busy: bool) -> None:
    """Guards against a table that hides what else was running."""
    state = gate.Reading(load1=load, cores=2, memory_available_gib=1.0)
    assert state.busy is busy
    assert bool(state.note) is busy


# ---- skips ----------------------------------------------------------------------------------------------------------

NEEDS = """\
schema: 1
name: tiny
title: Needs things
pair: {target: {path: nowhere-12b}, drafter: {path: nowhere-assistant}}
requires: {cuda: true}
checks:
  - {kind: exactness_probe, id: probe}
  - {kind: exactness_probe, id: later, skip: not today}
"""


def test_missing_weights_and_cuda_skip_with_both_reasons(tmp_path: Path) -> None:
    """Guards against a skip that names half of what is missing, and against a run that starts a child for nothing."""
    first, later = cases_of(tmp_path, NEEDS)
    with context(tmp_path) as run:
        line = run.run(first)
        assert line.outcome == "skipped"
        assert "nowhere-12b" in line.reason
        assert "nowhere-assistant" in line.reason
        assert "needs CUDA (torch.cuda.is_available() is False)" in line.reason
        assert run.run(later).reason == "not today"
    assert (tmp_path / "starts.txt").read_text(encoding="utf-8").count("\n") == 1  # the machine is asked once


@pytest.mark.parametrize(
    ("require", "word", "outcome"), [("weights", "nowhere-12b", "fail"), ("cuda", "needs CUDA", "error")]
)
def test_a_required_thing_that_is_missing_is_no_skip(tmp_path: Path, require: str, word: str, outcome: str) -> None:
    """Guards against a lane that skips everything and is green: without weights it fails, without CUDA it could not
    measure."""
    case = cases_of(tmp_path, NEEDS)[0]
    with context(tmp_path, require=[require]) as run:
        line = run.run(case)
    assert line.outcome == outcome
    assert word in line.reason
    assert f"--require {require}" in line.reason


def test_cuda_on_request_without_cuda_is_an_error(tmp_path: Path) -> None:
    """Guards against a run that silently falls back to the CPU: it could not measure."""
    case = cases_of(tmp_path)[0]
    with context(tmp_path, device="cuda") as run:
        line = run.run(case)
    assert line.outcome == "error"
    assert "device cuda" in line.reason


def test_more_memory_than_the_machine_has_is_a_skip(tmp_path: Path) -> None:
    """Guards against loading what the spec says will not fit."""
    text = SPEC_TEXT.replace("checks:", "requires: {memory_gib: 999999}\nchecks:")
    with context(tmp_path) as run:
        line = run.run(cases_of(tmp_path, text)[0])
    assert line.outcome == "skipped"
    assert "needs 999999 GiB" in line.reason


# ---- children of a context ------------------------------------------------------------------------------------------


def test_stages_of_a_flag_cell_share_a_child(tmp_path: Path) -> None:
    """Guards against loading the pair sixteen times for a table of 4 x 4; and cells must not share."""
    cases = [case for case in cases_of(tmp_path) if case.kind == "attribution"]
    assert len(cases) == 4
    with context(tmp_path) as run:
        for case in cases:
            run.run(case)
        names = {line.case: line.child for line in run.lines if isinstance(line, CaseLine)}
    starts = (tmp_path / "starts.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert sorted(start.split()[1] for start in starts) == ["0", "unset"]
    assert {name for case, name in names.items() if "multirow:0" in case} == {"multirow:0"}
    assert {name for case, name in names.items() if "multirow:unset" in case} == {"default"}


def test_a_child_that_ignores_its_flags_fails_the_case(tmp_path: Path) -> None:
    """Guards against a table whose rows are labelled with flags that never took effect."""
    cases = [case for case in cases_of(tmp_path) if "multirow:0" in case.id]
    with context(tmp_path, script={"deaf": True}) as run:
        line = run.run(cases[0])
        assert not any(isinstance(found, ChildLine) for found in run.lines)
    assert line.outcome == "fail"
    assert "MLXCEL_QMV_MULTIROW=0" in line.reason


def test_a_flag_that_leaked_into_a_child_fails_the_case() -> None:
    """Guards against a default cell that runs under a flag of the shell."""
    with pytest.raises(CheckFailed, match="reached the child"):
        check_flags("default", {}, {"MLXCEL_MTP_ALLOW_INEXACT": "0"}, read_flags({}).effective)


def test_a_dead_child_is_an_error_and_the_next_case_gets_a_new_one(tmp_path: Path) -> None:
    """Guards against one crash that takes the rest of the run with it."""
    probe, parity = (case for case in cases_of(tmp_path) if case.kind in ("exactness_probe", "greedy_parity"))
    with context(tmp_path, script={"how": "exit", "on": "probe"}) as run:
        first, second = run.run(probe), run.run(parity)
    assert first.outcome == "error"
    assert "exit code 7" in first.reason
    assert "the last words" in first.reason
    assert first.log == "default.log"
    assert second.outcome == "pass"


def test_lines_of_another_case_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against filing a child's line under a case that it does not belong to."""
    case = cases_of(tmp_path)[0]
    with context(tmp_path) as run:
        child = run.child(case, case.env)
        real = child.run
        monkeypatch.setattr(child, "run", lambda kind, case_id, *rest, **more: real(kind, "specs/x::y", *rest, **more))
        line = run.run(case)
    assert line.outcome == "error"
    assert "line of another case" in line.reason


# ---- options, exit codes, provenance --------------------------------------------------------------------------------


def line_of(case: Case, outcome: str) -> CaseLine:
    return CaseLine.model_validate(
        {"case": case.id, "kind": case.kind, "outcome": outcome, "reason": "-", "seconds": 0.0}
    )


def test_exit_codes(tmp_path: Path) -> None:
    """0: pass, declared decline, skipped, unresolved. 1: failure, undeclared decline. 3: error. 1 beats 3."""
    cases = {case.name: case for case in cases_of(tmp_path)}
    probe, parity, decline = cases["probe"], cases["parity"], cases["decline"]
    base = cases["attribution[stage:base+multirow:unset]"]

    def code(*outcomes: tuple[Case, str]) -> int:
        return exit_code(tuple(cases.values()), [line_of(case, outcome) for case, outcome in outcomes])[0]

    assert code((probe, "pass"), (parity, "skipped"), (decline, "declined"), (base, "declined")) == 0
    assert code((cases["decode"], "unresolved")) == 0
    assert code((probe, "declined")) == 1
    assert code((cases["attribution[stage:rowwise+multirow:unset]"], "declined")) == 1
    assert code((probe, "error")) == 3
    assert code((probe, "error"), (parity, "fail")) == 1


def test_known_failures(tmp_path: Path) -> None:
    """Guards both ways: a known failure does not fail the run, its unexpected pass does."""
    text = SPEC_TEXT.replace("walk: false}\n", "walk: false, xfail: {reason: known, issue: '#1'}}\n", 1)
    cases = cases_of(tmp_path, text)
    assert cases[0].xfail is not None
    assert exit_code(cases, [line_of(cases[0], "fail")]) == (0, ())
    assert exit_code(cases, [line_of(cases[0], "pass")]) == (1, (cases[0].id,))
    assert exit_code(cases, [line_of(cases[0], "skipped")]) == (0, ())


def test_a_flag_in_the_shell_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a flag that somebody set, believes in, and that no child sees."""
    loaded = load_spec(write_spec(tmp_path))
    monkeypatch.setenv("MLXCEL_QMV_MULTIROW", "0")
    with pytest.raises(UsageError, match="MLXCEL_QMV_MULTIROW=0 is set in the shell"):
        run_spec(loaded, RunOptions(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    """Guards against a run of nothing that looks like success."""
    loaded = load_spec(write_spec(tmp_path))
    with pytest.raises(UsageError, match="no case"):
        run_spec(loaded, RunOptions(only=("nope",), out=tmp_path / "out", lock_dir=tmp_path))


def test_a_dry_run_counts_children_and_states_its_basis(tmp_path: Path) -> None:
    """Two flag cells are two children; more tokens take longer; nothing is started and nothing written."""
    loaded = load_spec(write_spec(tmp_path))
    short = dry_run(loaded, RunOptions(out=tmp_path / "out"))
    assert short.children == 2
    assert "ms a step" in short.basis
    assert set(short.cases) == {case.id for case in plan(loaded)}
    longer = dry_run(
        load_spec(write_spec(tmp_path, SPEC_TEXT.replace("max_tokens: 9", "max_tokens: 900"))),
        RunOptions(out=tmp_path / "out"),
    )
    assert longer.seconds > short.seconds + 10
    assert not (tmp_path / "starts.txt").exists()
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_spec_that_cannot_run_here_says_so(tmp_path: Path) -> None:
    """Guards against an estimate of an hour for a run that would skip every case."""
    plan_only = dry_run(load_spec(write_spec(tmp_path, NEEDS)), RunOptions(out=tmp_path / "out"))
    assert (plan_only.children, plan_only.seconds) == (0, 0.0)
    assert "nowhere-12b" in plan_only.basis


def test_a_dry_run_takes_the_times_of_the_last_record(tmp_path: Path) -> None:
    """Guards against a guess where the spec has been measured on this machine before."""
    loaded = load_spec(write_spec(tmp_path))
    options = RunOptions(out=tmp_path / "out", lock_dir=tmp_path, worker=worker(tmp_path))
    run_spec(loaded, options)
    known = dry_run(loaded, options)
    assert "tiny-cpu-" in known.basis
    assert max(known.cases.values()) < 5


def test_device_follows_the_spec_unless_told(tmp_path: Path) -> None:
    """Guards against a GPU spec that runs on a CPU because nobody said otherwise."""
    nano, real = load_spec(write_spec(tmp_path / "a")), load_spec(write_spec(tmp_path / "b", NEEDS))
    assert device_of(nano, RunOptions()) == "cpu"
    assert device_of(real, RunOptions()) == "cuda"
    assert device_of(nano, RunOptions(device="cuda")) == "cuda"


def test_environment_holds_no_personal_data(tmp_path: Path) -> None:
    """Guards against home folders, user and host names in env.json; and the fingerprint ignores when it was made."""
    loaded = load_spec(write_spec(tmp_path))
    (tmp_path / "specs" / "target" / "config.json").write_text("{}", encoding="utf-8")
    cases = plan(loaded)
    env = provenance.environment(loaded, cases, device="cpu", command="harness run specs/tiny.yaml")
    text = json.dumps(env)
    assert str(tmp_path) not in text
    assert str(Path.home()) + "/" not in text
    assert not re.search(r"/(home|Users)/", text)
    assert env["spec"]["sha256"] == loaded.sha256
    assert env["checkpoints"]["target"]["config_sha256"]
    assert env["prompts"].keys() == {"text1"}
    later = {**env, "started_utc": "2030-01-01T00:00:00Z", "gate": {}, "command": "harness run"}
    assert provenance.fingerprint(later) == env["fingerprint"]
    moved = {**env, "versions": {**env["versions"], "torch": "9"}}
    assert provenance.fingerprint(moved) != env["fingerprint"]
    assert provenance.changed_parts(env, moved) == ["versions.torch"]


def test_the_command_line_names_the_program_not_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a reproduce line that works on one machine."""
    argv = ["/some/where/bin/harness", "run", "specs/x.yaml", "--only", "a b"]
    assert provenance.command_line(argv) == "harness run specs/x.yaml --only 'a b'"
    assert provenance.command_line(["/x/harness/__main__.py", "list"]) == "harness list"


def test_what_a_run_writes_does_not_make_the_next_one_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two specs in a row from one clean tree: the second record must not say "uncommitted changes"."""
    block = "<!-- BEGIN generated: results -->\n{}\n<!-- END generated: results -->\n"
    (tmp_path / "README.md").write_text("# title\n\n" + block.format("none"), encoding="utf-8")
    (tmp_path / "docs" / "benchmark_results").mkdir(parents=True)
    (tmp_path / "docs" / "benchmark_results" / "README.md").write_text("none\n", encoding="utf-8")
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    assert provenance.source()["dirty"] is False
    (tmp_path / "docs" / "benchmark_results" / "a.md").write_text("a record\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("# title\n\n" + block.format("a record"), encoding="utf-8")
    assert provenance.source()["dirty"] is False
    (tmp_path / "README.md").write_text("# another title\n\n" + block.format("a record"), encoding="utf-8")
    assert provenance.source()["dirty"] is True
    (tmp_path / "README.md").write_text("# title\n\n" + block.format("a record"), encoding="utf-8")
    (tmp_path / "code.py").write_text("x = 1\n", encoding="utf-8")
    assert provenance.source()["dirty"] is True
