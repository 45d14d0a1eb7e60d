"""The real child on a tiny random pair: every check kind end to end, a kill in the middle, bad checkpoints, `try`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support_engine import copy_of, make_pair, random_pair_dirs
from support_harness import ROOT, gone

from engine.flags import FLAGS
from harness import certificate, ledger
from harness.checks import attribution
from harness.context import RunContext
from harness.errors import HarnessError, RunError, UsageError
from harness.record.lines import (
    ArmLine,
    CaseLine,
    CertificateLine,
    CheckLine,
    ChildLine,
    ComparisonLine,
    DecisionLine,
    DrawLine,
    PathLine,
    StepLine,
)
from harness.record.report import check as check_record
from harness.record.store import read_lines
from harness.resume import find_unfinished
from harness.run import RunOptions, RunOutcome, run_spec
from harness.spec import load_spec, plan
from harness.trial import try_prompt
from harness.worker import identity, row_identity

THREADS = 1
SPEC = """\
schema: 1
name: tiny
title: A tiny random pair
pair:
  target: {path: target}
  drafter: {path: drafter}
  block_size: 4
checks:
  - kind: geometry
    id: geometry
    expect: {target: {sliding_window: 16, hidden_size: 128}, drafter: {hidden_size: 64}, full_layers: 1}
  - {kind: row_identity, id: rows}
  - {kind: exactness_probe, id: probe, draws: [8, 40]}
  - kind: attribution
    id: attribution
    draws: [8, 40]
    walk: false
    stages: [base, rowwise]
    matrix:
      large_d: {env: MLXCEL_SDPA_VECTOR_LARGE_D, values: [null, "0"]}
  - kind: greedy_parity
    id: parity
    prompts: [{text: "def add(a, b):", form: raw, name: code}, {text: say something, form: chat, name: talk}]
    max_tokens: 12
    ignore_stop: true
    block_sizes: [2, 4]
  # Past the window, where no more than 7 rows can be dropped again, and steps of 8 rows are timed all the same.
  - kind: throughput
    id: decode
    arms: [{name: mtp}]
    repeats: 3
    max_tokens: 8
    ignore_stop: true
    step_contexts: [40]
  - {kind: decline, id: decline, stage: base, expect_reason: differs, max_tokens: 8, draws: [8, 40]}
  - {kind: rollback, id: rollback, block_sizes: [2]}
"""


def write_spec(folder: Path, text: str = SPEC, target: Path | None = None, drafter: Path | None = None) -> Path:
    """A spec with links to the checkpoints beside it."""
    dirs = random_pair_dirs()
    (folder / "specs").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    (folder / "specs" / "target").symlink_to(target or dirs.target)
    (folder / "specs" / "drafter").symlink_to(drafter or dirs.drafter)
    path = folder / "specs" / "tiny.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunOutcome]:
    """One run of every kind."""
    folder = tmp_path_factory.mktemp("whole")
    spec = load_spec(write_spec(folder))
    options = RunOptions(out=folder / "out", command="harness run specs/tiny.yaml", lock_dir=folder, threads=THREADS)
    return folder, run_spec(spec, options)


def test_every_kind_runs_on_a_real_pair(whole: tuple[Path, RunOutcome]) -> None:
    """Guards the whole chain: the child, its raw lines, the judges and the record that is computed from them."""
    _, outcome = whole
    found = {line.case.partition("::")[2]: line.outcome for line in outcome.cases}
    reasons = "\n".join(f"{line.case}: {line.outcome}: {line.reason}" for line in outcome.cases)
    assert found.pop("decode") in ("pass", "unresolved"), reasons
    assert found == {
        "geometry": "pass",
        "rows": "pass",
        "probe": "pass",
        "attribution[stage:base+large_d:unset]": "declined",
        "attribution[stage:base+large_d:0]": "declined",
        "attribution[stage:rowwise+large_d:unset]": "pass",
        "attribution[stage:rowwise+large_d:0]": "pass",
        "parity": "pass",
        "decline": "declined",
        "rollback": "pass",
    }, reasons
    assert outcome.exit_code == 0
    assert not check_record(outcome.page)


def test_its_raw_lines_say_what_was_compared(whole: tuple[Path, RunOutcome]) -> None:
    """Guards against green cases that measured nothing."""
    folder, outcome = whole
    lines = read_lines(folder / "out" / "data" / outcome.page.stem / "runs.jsonl").lines
    draws = [line for line in lines if isinstance(line, DrawLine) and line.case.endswith("::probe")]
    assert [line.draw.split()[0] for line in draws].count("walk") == 2
    assert all(line.positions and line.total_bytes and line.passed for line in draws)
    decisions = {line.case.partition("::")[2]: line for line in lines if isinstance(line, DecisionLine)}
    assert decisions["probe"].log_line.startswith("MTP engaged:")
    base = decisions["attribution[stage:base+large_d:unset]"]
    assert base.log_line.startswith("MTP declined:")
    assert base.first_divergence is not None
    assert base.first_divergence.differing_bytes > 0
    assert base.classic_sha256 == decisions["attribution[stage:rowwise+large_d:unset]"].classic_sha256
    alone = {
        line.case.partition("[")[2]: line.found
        for line in lines
        if isinstance(line, CheckLine) and line.name == attribution.OPS_STATEMENT
    }
    assert alone["stage:base+large_d:unset]"] == "rope, geglu, attention"
    assert alone["stage:rowwise+large_d:unset]"] == alone["stage:rowwise+large_d:0]"] == "none"
    comparisons = [line for line in lines if isinstance(line, ComparisonLine)]
    assert {(line.prompt, line.block_size) for line in comparisons} == {
        (prompt, size) for prompt in ("code", "talk") for size in (2, 4)
    }
    assert all(line.tokens == 12 and line.identical and line.accepted_per_round for line in comparisons)
    assert len([line for line in lines if isinstance(line, ArmLine)]) == 9
    steps = {line.step: line for line in lines if isinstance(line, StepLine)}
    assert set(steps) == {"classic", "classic_unpadded", "verify", "draft_round"}
    assert all(seconds > 0 for line in steps.values() for seconds in line.seconds)
    ops = {line.name.split(":")[0] for line in lines if isinstance(line, CheckLine) and line.case.endswith("::rows")}
    assert ops == {"linear", "rmsnorm", "rope", "geglu", "attention", "lm_head"}


def test_children_report_the_flags_that_they_read(whole: tuple[Path, RunOutcome]) -> None:
    """Guards against labels: one child per flag cell, and each says itself what it runs with."""
    folder, outcome = whole
    lines = read_lines(folder / "out" / "data" / outcome.page.stem / "runs.jsonl").lines
    children = {line.child: line for line in lines if isinstance(line, ChildLine)}
    assert set(children) == {"default", "large_d:0"}
    read = {name: child.flags_effective["MLXCEL_SDPA_VECTOR_LARGE_D"] for name, child in children.items()}
    assert read == {"default": "1", "large_d:0": "0"}
    assert all(child.threads == THREADS and child.versions["torch"] and child.target for child in children.values())
    text = (folder / "out" / "data" / outcome.page.stem / "runs.jsonl").read_text(encoding="utf-8")
    assert str(folder) not in text


def test_a_real_probe_leaves_a_certificate_and_a_real_child_its_ledger(whole: tuple[Path, RunOutcome]) -> None:
    """Guards against facts that were handed down: the arm is covered by what the child itself found, flag cells have
    other kernels, and each child states every flag and knob."""
    folder, outcome = whole
    lines = read_lines(folder / "out" / "data" / outcome.page.stem / "runs.jsonl").lines
    proofs = {line.case.partition("::")[2]: line for line in lines if isinstance(line, CertificateLine)}
    assert set(proofs) == {"probe", "decode"}  # attribution shows what differs; it walks nowhere here
    assert certificate.walk_reach(proofs["probe"]) == 160 + 128
    assert proofs["probe"].identity == proofs["decode"].identity
    bound = proofs["probe"].identity
    assert (bound.torch, bound.threads, bound.window, bound.backend) == (torch.__version__, THREADS, 16, "reference")
    assert bound.source == identity.source_sha256()
    assert bound.target == identity.checkpoint_sha256(random_pair_dirs().target)
    paths = [line for line in lines if isinstance(line, PathLine)]
    arm = next(line for line in paths if line.arm == "mtp")
    assert (arm.stage, arm.block_size, arm.longest_prompt > 3) == ("rowwise", 4, True)
    assert certificate.refusal([proofs["decode"]], certificate.Wanted.of(arm, 40)) is None
    cells = {line.case.partition("[")[2]: line for line in paths if "attribution" in line.case}
    assert len({line.fingerprint for line in cells.values()}) == len(cells) == 4
    unfused = cells["stage:rowwise+large_d:0]"]
    assert (unfused.flags["MLXCEL_SDPA_VECTOR_LARGE_D"], unfused.path["classic attention, sliding"]) == (
        "0",
        "unfused_row",
    )
    for child in (line for line in lines if isinstance(line, ChildLine)):
        told = {row.name: row for row in child.settings}
        assert set(FLAGS) | {"device", "threads", "backend", "dtype", "OMP_NUM_THREADS"} <= set(told)
        assert told["threads"].source == "command line"
        assert told["MLXCEL_SDPA_VECTOR_LARGE_D"].source == ("spec" if child.child == "large_d:0" else "default")
        assert ledger.first_difference(child.settings) is None


SHORT = (
    SPEC.partition("checks:")[0]
    + """\
checks:
  - {kind: geometry, id: geometry, expect: {full_layers: 1}}
  - {kind: exactness_probe, id: probe, draws: [8, 40]}
  - {kind: row_identity, id: rows, ops: [geglu], rows: [2, 3]}
"""
)
KILLED = """\
import sys
from pathlib import Path
from harness.run import RunOptions, run_spec
from harness.spec import load_spec
folder = Path(sys.argv[1])
options = RunOptions(out=folder / "out", command="harness run specs/tiny.yaml", lock_dir=folder, threads=1)
run_spec(load_spec(folder / "specs" / "tiny.yaml"), options)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see whether a process lives")
def test_a_real_child_says_how_much_it_has_held(tmp_path: Path) -> None:
    """Guards a limit that only a script ever breaks: torch alone takes more than a hundredth of a GiB."""
    text = SPEC.replace("id: geometry\n", "id: geometry\n    max_peak_gib: 0.01\n")
    options = RunOptions(("specs/tiny.yaml::geometry",), out=tmp_path / "out", command="x", lock_dir=tmp_path)
    (line,) = run_spec(load_spec(write_spec(tmp_path, text=text)), options).cases
    assert line.outcome == "fail"
    found = re.search(r"has held (\d+\.\d\d) GiB in memory, max_peak_gib is 0.01", line.reason)
    assert found, line.reason
    assert 0.05 < float(found[1]) < 20


def test_a_killed_run_of_a_real_pair_is_finished_by_resume(tmp_path: Path) -> None:
    """Guards against a lost or mixed record after `kill -9` in the middle of a case, and against orphaned children."""
    spec = load_spec(write_spec(tmp_path, SHORT))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environment) as process:
        runs, deadline = None, time.monotonic() + 60
        while time.monotonic() < deadline:
            runs = next((tmp_path / "out").glob("data/*/runs.jsonl"), None)
            if runs is not None and '"line":"case"' in runs.read_text(encoding="utf-8"):
                break  # the first case has ended, the probe of the second has begun
            time.sleep(0.01)
        time.sleep(0.1)
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert runs is not None
    assert children
    assert all(gone(pid, 10) for pid in children)
    partial = {line.case for line in read_lines(runs).lines if isinstance(line, CaseLine)}
    assert partial == {"specs/tiny.yaml::geometry"}
    data = find_unfinished(spec, tmp_path / "out")
    assert data == runs.parent
    options = RunOptions(
        out=tmp_path / "out", resume=data, command="harness run --resume", lock_dir=tmp_path, threads=THREADS
    )
    outcome = run_spec(spec, options)
    assert outcome.exit_code == 0, [line.reason for line in outcome.cases]
    ended = [line.case for line in read_lines(runs).lines if isinstance(line, CaseLine)]
    assert sorted(ended) == sorted(case.id for case in plan(spec))
    assert not check_record(outcome.page)


@pytest.mark.parametrize("fault", ["drafter as target", "no shards"])
def test_a_bad_checkpoint_is_one_line_and_an_error(tmp_path: Path, fault: str) -> None:
    """Guards against a traceback, a hang or a skip where the user's checkpoint is wrong."""
    dirs = random_pair_dirs()
    target = tmp_path / "bad"
    if fault == "drafter as target":
        target = dirs.drafter
    else:
        copy_of(dirs.target, target)
        for file in target.glob("*.safetensors"):
            file.unlink()
    case = next(case for case in plan(load_spec(write_spec(tmp_path / "x", target=target))) if case.name == "probe")
    with RunContext(log_dir=tmp_path / "logs", lock_dir=tmp_path, threads=THREADS) as context:
        line = context.run(case)
    assert line.outcome == "error"
    assert "\n" not in line.reason
    assert "Traceback" not in line.reason
    assert "Traceback" not in (tmp_path / "logs" / "default.log").read_text(encoding="utf-8")


def test_try_streams_text_and_compares_with_classic(tmp_path: Path) -> None:
    """Guards `harness try`: pieces add up to the text, the gate's line is shown, classic gives the same tokens."""
    spec = load_spec(write_spec(tmp_path))
    pieces: list[str] = []
    result = try_prompt(
        spec, "hello", max_tokens=12, ignore_stop=True, classic=True, threads=THREADS, on_text=pieces.append
    )
    assert "".join(pieces) == result.text
    assert result.engaged
    assert result.log_line.startswith("MTP engaged:")
    assert result.tokens == 12
    assert result.decode_tok_s > 0
    assert result.acceptance_length is not None
    assert 1.0 <= result.acceptance_length <= 4.0
    assert result.identical


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompt": "  "}, UsageError),
        ({"max_tokens": 0}, UsageError),
        ({"block_size": 9}, UsageError),
        ({"missing": True}, RunError),
    ],
)
def test_try_refuses_bad_requests(tmp_path: Path, changes: dict[str, object], error: type[HarnessError]) -> None:
    """Guards against a child started for nothing, and against a traceback."""
    path = write_spec(tmp_path)
    if changes.pop("missing", False):
        (tmp_path / "specs" / "target").unlink()
    with pytest.raises(error):
        try_prompt(load_spec(path), **{"prompt": "hello", **changes})  # type: ignore[arg-type]


# ---- row_identity can fail ------------------------------------------------------------------------------------------


def faulty(fault: str) -> row_identity.Subject:
    """An op that breaks the row contract in one way."""
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))

    def single(x: torch.Tensor, order: object) -> torch.Tensor:
        return torch.nan_to_num(x) @ weight.T

    def block(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        out = torch.stack([single(row[None], order)[0] for row in x])
        reference = torch.stack([single(torch.cat((row[None], x.new_zeros(7, 32))), order)[0] for row in x])
        out.copy_(reference)
        if fault == "width 5" and len(order) == 5:
            out[3, 2] = torch.nextafter(out[3, 2], torch.tensor(torch.inf))
        if fault == "neighbour" and bool(x[1].isnan().any()):
            out[0] = float("nan")
        if fault == "slot" and order[0] != 0:
            out[1] += 1e-6
        return out

    return row_identity.Subject(fault, (32,), block, single)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("none", None), ("width 5", "M = 5, row 3"), ("neighbour", "NaN"), ("slot", "in reverse slots")],
)
def test_row_identity_catches_each_way_of_breaking_the_contract(fault: str, words: str | None) -> None:
    """Guards the check itself: a last bit at one width only, a leaking neighbour, a slot that matters."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    found = row_identity.compare(faulty(fault), x, range(1, 9))
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert words in str(found)


def test_row_identity_names_the_ops_of_the_base_stage() -> None:
    """Guards against comparing a kernel with itself: under stage base just attention, GeGLU and RoPE differ."""
    target = make_pair(stage="base").target
    generator = torch.Generator().manual_seed(0)
    differing = set()
    with torch.inference_mode():
        for op, subjects in row_identity.SUBJECTS.items():
            for subject in subjects(target, generator):
                x = torch.randn(8, *subject.shape, generator=generator).to(target.dtype)
                if row_identity.compare(subject, x, range(1, 9)) is not None:
                    differing.add(op)
    assert differing == {"attention", "geglu", "rope"}
