"""The ledger: what was asked for against what a child read, from where; and arms that differ in name only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import support_record as support
from support_harness import SPEC_TEXT, worker, write_spec
from support_record import change, record_of
from test_certificate import certified_lines, path

from harness import coverage, ledger
from harness.context import RunContext
from harness.record.lines import AnyLine, ArmLine, CaseLine, ChildLine, PathLine, Setting
from harness.record.render import render
from harness.spec import load_spec, plan


def setting(name: str = "threads", requested: str | None = None, effective: str = "1", **more: Any) -> Setting:
    stated = {"source": "", "read": "when the child starts", **more}
    return Setting(name=name, requested=requested, effective=effective, **stated)


# ---- sources and differences ----------------------------------------------------------------------------------------


def test_each_source_is_told_apart() -> None:
    """Guards against a value from the shell that reads as the spec's choice."""
    rows = [
        setting("MLXCEL_QMV_MULTIROW", "0", "0"),
        setting("MLXCEL_PREFILL_CHUNK", None, "2048"),
        setting("MLX_ENABLE_TF32", "1", "1"),
        setting("OMP_NUM_THREADS", None, "3"),
        setting("MKL_NUM_THREADS", None, "unset"),
        setting("threads", "2", "2"),
    ]
    env = {"MLXCEL_QMV_MULTIROW": "0", "MLXCEL_PREFILL_CHUNK": None}
    found = ledger.annotate(rows, env, {"OMP_NUM_THREADS": "3"}, {"threads": "command line"})
    assert [(row.requested, row.source) for row in found] == [
        ("0", "spec"),
        (None, "default"),
        ("1", "environment"),
        ("3", "environment"),
        (None, "default"),
        ("2", "command line"),
    ]
    assert ledger.first_difference(found) is None


def test_where_device_and_threads_come_from() -> None:
    """The command line beats the spec, the spec the default; OMP_NUM_THREADS counts where nothing else does."""
    assert ledger.sources("cpu", False, None, 1, {}) == {"device": "default", "threads": "default"}
    assert ledger.sources("cuda", True, 2, 2, {}) == {"device": "spec", "threads": "command line"}
    assert ledger.sources("cuda", False, None, None, {"OMP_NUM_THREADS": "4"}) == {
        "device": "command line",
        "threads": "environment",
    }


@pytest.mark.parametrize(
    ("row", "differs"),
    [
        (setting("MLXCEL_QMV_MULTIROW", "false", "0"), False),
        (setting("MLXCEL_QMV_MULTIROW", "0", "1"), True),
        (setting("MLXCEL_QMV_MULTIROW", None, "0"), True),
        (setting("MLXCEL_QMV_MULTIROW", "maybe", "1"), True),
        (setting("threads", "4", "1"), True),
        (setting("threads", None, "1"), False),
        (setting("OMP_NUM_THREADS", "4", "unset"), True),
        (setting("device", "cuda", "cuda:0"), False),
        (setting("device", "cuda", "cpu"), True),
        (setting("dtype", None, "bfloat16"), False),
    ],
)
def test_a_difference_is_found(row: Setting, differs: bool) -> None:
    """Guards against a knob that was asked for and not taken, and against one that moved by itself."""
    assert (ledger.difference(row) is not None) == differs
    assert (ledger.first_difference([setting(), row]) is not None) == differs


def test_a_job_at_another_stage_or_width_is_found() -> None:
    """Guards against a label: the stage and the block size are the target's own."""
    line = path("x")
    assert ledger.path_difference(line, {"block_size": 4}) is None
    assert ledger.path_difference(line, {"stage": "rowwise", "block_sizes": [2, 4]}) is None
    assert ledger.path_difference(line, {"stage": "base", "block_size": 4}) == (
        "stage base was asked for, rowwise is in force"
    )
    assert ledger.path_difference(line, {"block_sizes": [2, 8]}) == ("block size 2 or 8 was asked for, 4 is in force")


# ---- in the run -----------------------------------------------------------------------------------------------------


def run(tmp_path: Path, text: str, kind: str, **script: Any) -> tuple[CaseLine, list[AnyLine]]:
    case = next(case for case in plan(load_spec(write_spec(tmp_path, text))) if case.kind == kind)
    command = worker(tmp_path, **script)
    with RunContext(log_dir=tmp_path / "logs", command=command, lock_dir=tmp_path, threads=1) as context:
        line = context.run(case)
    return line, context.lines


def test_a_child_with_another_number_of_threads_fails_its_case(tmp_path: Path) -> None:
    """Guards against a run that asked for threads which its child did not take."""
    good = {"name": "threads", "requested": "1", "effective": "1", "source": "", "read": "when the child starts"}
    line, lines = run(tmp_path, SPEC_TEXT, "exactness_probe", settings=[good])
    assert line.outcome == "pass"
    child = next(line for line in lines if isinstance(line, ChildLine))
    assert [row.source for row in child.settings] == ["command line"]
    line, _ = run(tmp_path, SPEC_TEXT, "exactness_probe", settings=[{**good, "effective": "8"}])
    assert (line.outcome, line.reason) == ("fail", "child default: threads=1 was asked for, 8 is in force")


def test_a_probe_at_another_stage_fails_its_case(tmp_path: Path) -> None:
    """Guards against a stage that was asked for by name and not taken; the child can go on."""
    line, _ = run(tmp_path, SPEC_TEXT, "exactness_probe", path={"stage": "attention"})
    assert line.outcome == "fail"
    assert line.reason == "child default: stage rowwise was asked for, attention is in force"


TWO_ARMS = SPEC_TEXT.replace(
    "arms: [{name: mtp}]", 'arms: [{name: mtp}, {name: again, env: {MLXCEL_QMV_MULTIROW_MAX_ROWS: "4"}}]'
)


def test_arms_that_differ_in_name_only_are_refused(tmp_path: Path) -> None:
    """Guards against A/B of a thing with itself: a row limit of 4 changes nothing at block size 4."""
    line, lines = run(tmp_path, TWO_ARMS, "throughput")
    assert line.outcome == "fail"
    assert line.reason == (
        "arms identical: mtp and again run kernels multirow-4: MLXCEL_QMV_MULTIROW_MAX_ROWS=8 and 4 come to the same; "
        "nothing was timed"
    )
    assert not any(isinstance(found, ArmLine) for found in lines)
    assert sum(isinstance(found, PathLine) for found in lines) == 2
    other = TWO_ARMS.replace("MLXCEL_QMV_MULTIROW_MAX_ROWS", "MLXCEL_QMV_MULTIROW").replace('"4"', '"0"')
    assert run(tmp_path, other, "throughput")[0].outcome == "pass"


def test_identical_arms_are_found_from_lines_alone() -> None:
    """Arms of another case, and probes, are no arms of this one; a case that ran twice counts once."""
    one, two = path("x", "a"), path("x", "b")
    assert coverage.identical_arms([one, path("y", "b"), path("x", "")], "x") is None
    assert coverage.identical_arms([one, path("x", "a")], "x") is None
    assert "a and b" in (coverage.identical_arms([one, two], "x") or "")
    assert coverage.identical_arms([one, two, path("x", "b", fingerprint="0")], "x") is None


# ---- on the page ----------------------------------------------------------------------------------------------------


def with_settings(*rows: Setting) -> list[AnyLine]:
    lines = certified_lines()
    return [line.model_copy(update={"settings": rows}) if isinstance(line, ChildLine) else line for line in lines]


def test_the_page_shows_the_ledger() -> None:
    """Asked for, in force, source, when read and where; alike children share a row, jobs follow."""
    rows = (setting("threads", "2", "2", source="command line"), setting("dtype", None, "bfloat16", source="default"))
    lines = with_settings(*rows)
    record = record_of(lines)
    assert record.contradictions == ()
    assert [(row.name, row.requested, row.effective, row.source, row.where) for row in record.ledger] == [
        ("threads", "2", "2", "command line", ("every child",)),
        ("dtype", None, "bfloat16", "default", ("every child",)),
        ("stage", None, "rowwise", "default", ("decode: mtp",)),
        ("block size", "4", "4", "spec", ("decode: mtp",)),
    ]
    page = render(record, "x")
    assert "| threads | 2 | 2 | command line | when the child starts | every child |" in page
    odd = change(lines, lambda line: isinstance(line, ChildLine), settings=(rows[0],))
    told = record_of(odd).ledger
    assert told[0].where == ("every child",)
    assert told[1].where == tuple(f"multirow:{m}+large_d:{d}" for m, d in support.CELLS)


def test_a_difference_on_the_page_contradicts_the_record() -> None:
    """Guards against a raw line edited after the run: the ledger marks it, and the record contradicts itself."""
    record = record_of(with_settings(setting("threads", "2", "8", source="command line")))
    assert any("threads=2 was asked for, 8 is in force" in problem for problem in record.contradictions)
    assert record.ledger[0].differs is not None
    assert "**8**" in render(record, "x")
    lines = change(certified_lines(), lambda line: isinstance(line, PathLine), block_size=6)
    wide = record_of(
        [x.model_copy(update={"settings": (setting(),)}) if isinstance(x, ChildLine) else x for x in lines]
    )
    assert [row.differs for row in wide.ledger if row.name == "block size"] == [
        "block size=4 was asked for, 6 is in force"
    ]


def test_attribution_reports_cells_with_one_fingerprint() -> None:
    """A switch that reaches no kernel is named beside the matrix, and refused nowhere: showing it is the purpose."""
    cases = [name for name in support.all_ids() if "attribution" in name]
    paths = [path(name, None, fingerprint=name.replace("multirow:0", "multirow:unset")) for name in cases]
    lines = support.run_lines()
    places = {line.case: number for number, line in enumerate(lines) if isinstance(line, CaseLine)}
    for line in sorted(paths, key=lambda one: -places[one.case]):
        lines.insert(places[line.case], line)
    record = record_of(lines)
    words = "stage:base+multirow:unset+large_d:unset and stage:base+multirow:0+large_d:unset"
    assert f"Kernel fingerprints: the same in {words}" in render(record, "x")
    assert {case.outcome for case in record.of_kind("attribution")} == {"pass", "declined"}
    assert "Kernel fingerprints" not in render(record_of(support.run_lines()), "x")
