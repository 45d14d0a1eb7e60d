"""The exactness certificate: bound to every field that it names, and no speed-up without one, in a run or on a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support_record as support
from support_harness import IDENTITY, SPEC_TEXT, worker, write_spec
from support_record import change, record_of
from test_harness_oracle import with_curve

from harness import certificate
from harness.certificate import Wanted
from harness.context import RunContext
from harness.record.lines import (
    AnyLine,
    ArmLine,
    CaseLine,
    CertificateLine,
    DecisionLine,
    DrawLine,
    Identity,
    PathLine,
    ProbeInput,
    StartLine,
    StepLine,
)
from harness.record.model import CaseRecord
from harness.record.plot import ORACLE, plot_names
from harness.record.render import render
from harness.record.report import check, load_record, regenerate
from harness.record.store import read_lines
from harness.run import RunOptions, run_spec
from harness.spec import load_spec, plan

FLAGS = {"MLXCEL_QMV_MULTIROW": "1", "MLXCEL_SDPA_VECTOR_LARGE_D": "1"}
WALK = ProbeInput(name="walk of 128 from 160 tokens", prompt_tokens=160, rows=128, total_bytes=4096)
DRAW = ProbeInput(name="draw 0 (8 tokens)", prompt_tokens=8, rows=4, total_bytes=512)
CHAIN = "c" * 64


def identity(**changes: Any) -> Identity:
    return Identity.model_validate({**IDENTITY, "window": 1024, **changes})


def made(**changes: Any) -> CertificateLine:
    stated: dict[str, Any] = {
        "case": "x::probe",
        "identity": identity(),
        "flags": FLAGS,
        "stage": "rowwise",
        "block_size": 4,
        "inputs": (DRAW, WALK),
        "classic_sha256": CHAIN,
    }
    return certificate.make(**{**stated, **changes})


def wanted(**changes: Any) -> Wanted:
    stated: dict[str, Any] = {"identity": identity(), "flags": FLAGS, "stage": "rowwise", "block_size": 4, "reach": 307}
    return Wanted(**{**stated, **changes})


# ---- what it is bound to --------------------------------------------------------------------------------------------


def test_it_covers_what_it_was_made_for() -> None:
    """The guard of the guards below: a certificate that covers nothing would pass them all."""
    assert certificate.match(made(), wanted()) == []
    assert certificate.covering([made(block_size=2), made()], wanted()) == made()
    assert certificate.refusal([made(block_size=2), made()], wanted()) is None


@pytest.mark.parametrize("field", Identity.model_fields)
def test_each_part_of_the_identity_binds(field: str) -> None:
    """Guards against a certificate that outlives an edited kernel, another driver, card, pair or library."""
    other = 512 if field == "window" else 7 if field == "threads" else "0" * 63 + "4"
    reasons = certificate.match(made(), wanted(identity=identity(**{field: other})))
    assert len(reasons) == 1, reasons
    assert str(other)[:12] in reasons[0]
    assert str(getattr(identity(), field))[:12] in reasons[0]
    word = certificate.HASHES.get(field) or certificate.WORDS[field]
    assert word in reasons[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 6}, "certificate covers block size 4, this arm runs 6"),
        ({"stage": "attention"}, "certificate covers stage rowwise, this arm runs attention"),
        (
            {"flags": {**FLAGS, "MLXCEL_QMV_MULTIROW": "0"}},
            "certificate is for MLXCEL_QMV_MULTIROW=1, this arm reads 0",
        ),
        ({"flags": {**FLAGS, "MLX_NEW": "1"}}, "certificate is for MLX_NEW=nothing, this arm reads 1"),
        (
            {"reach": 1025},
            "certificate's walks end at position 288, this arm goes on to 1025, past the window of 1024"
            " (a probe with a draw of 1056 tokens covers it)",
        ),
    ],
)
def test_widths_stage_flags_and_reach_bind(changes: dict[str, Any], reason: str) -> None:
    """Guards against a proof at one width, stage, flag cell or length that is used at another."""
    assert certificate.match(made(), wanted(**changes)) == [reason]
    assert certificate.refusal([made()], wanted(**changes)) == reason


def test_the_inputs_bind() -> None:
    """Guards against a certificate of draws alone, which never rolled back, and of a walk that stayed in the window."""
    alone = certificate.match(made(inputs=(DRAW,)), wanted())
    assert alone == ["certificate has no walk, and this arm rolls back"]
    past = WALK.model_copy(update={"name": "walk of 128 from 1056 tokens", "prompt_tokens": 1056})
    assert certificate.match(made(inputs=(DRAW, WALK, past)), wanted(reach=5000)) == []
    long_draw = DRAW.model_copy(update={"prompt_tokens": 1056})
    assert certificate.match(made(inputs=(long_draw, WALK)), wanted(reach=5000)) != []


def test_nothing_compared_is_no_certificate() -> None:
    """Guards against a proof of nothing."""
    for inputs in ((), (WALK.model_copy(update={"rows": 0}),), (WALK.model_copy(update={"total_bytes": 0}),)):
        with pytest.raises(ValueError, match="compared nothing"):
            made(inputs=inputs)


@pytest.mark.parametrize(
    "changes",
    [{"block_size": 6}, {"stage": "base"}, {"flags": {}}, {"inputs": (WALK,)}, {"classic_sha256": "d" * 64}],
)
def test_an_edited_certificate_covers_nothing(changes: dict[str, Any]) -> None:
    """Guards against a file in which the statement was changed and the hash was not; every field is under the hash."""
    edited = made().model_copy(update=changes)
    words = "certificate was changed after it was written: its own SHA-256 does not fit"
    assert words in certificate.match(edited, wanted())
    other = made(identity=identity(driver="2.0")).model_copy(update={"identity": identity()})
    assert certificate.match(other, wanted()) == [words]


def test_the_nearest_certificate_gives_the_reason() -> None:
    """Guards against a refusal that names ten fields of a certificate for something else."""
    far = made(stage="base", block_size=2, identity=identity(torch="1", driver="9"))
    assert (
        certificate.refusal([far, made()], wanted(block_size=6)) == "certificate covers block size 4, this arm runs 6"
    )
    assert certificate.refusal([], wanted()) == "no probe left a sound exactness certificate"


# ---- in the run -----------------------------------------------------------------------------------------------------


def decode(tmp_path: Path, text: str = SPEC_TEXT, **script: Any) -> tuple[CaseLine, list[AnyLine]]:
    """The throughput case of the scripted pair."""
    case = next(case for case in plan(load_spec(write_spec(tmp_path, text))) if case.kind == "throughput")
    with RunContext(log_dir=tmp_path / "logs", command=worker(tmp_path, **script), lock_dir=tmp_path) as context:
        line = context.run(case)
    return line, context.lines


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({"uncertified": True}, "no probe left a sound exactness certificate"),
        ({"certificate": {"stage": "attention"}}, "certificate covers stage attention, this arm runs rowwise"),
        ({"certificate": {"source": "9" * 64}}, "certificate is for other bytes of the code of kernels and engine"),
        ({"certificate": {"driver": "580.1"}}, "certificate is for driver 580.1, this arm runs on none"),
        ({"path": {"longest_prompt": 900}}, ""),
    ],
)
def test_a_run_times_nothing_without_a_certificate(tmp_path: Path, script: dict[str, Any], reason: str) -> None:
    """Guards against a speed-up of an arm that no probe of this build, device and width has covered."""
    line, lines = decode(tmp_path, **script)
    if not reason:  # the scripted window is 16, and its walk ends past it
        assert line.outcome == "pass"
        return
    assert (line.outcome, line.verdict) == ("declined", None)
    assert line.reason.startswith(f"mtp: {reason}")
    assert line.reason.endswith("no speed is stated")
    assert not any(isinstance(found, ArmLine | StepLine) for found in lines)


def test_another_width_is_refused_by_its_number(tmp_path: Path) -> None:
    """Guards against block size 4's proof for an arm of 6 rows; the reason names both."""
    text = SPEC_TEXT.replace("arms: [{name: mtp}]", "arms: [{name: wide, block_size: 6}]")
    line, _ = decode(tmp_path, text, certificate={"width": 4})
    assert line.reason == "wide: certificate covers block size 4, this arm runs 6; no speed is stated"


def test_a_run_leaves_its_certificate_on_the_page(tmp_path: Path) -> None:
    """The chain: probe, certificate, figure, page; the page is what `report --check` recomputes."""
    path = write_spec(tmp_path)
    only = ("specs/tiny.yaml::decode",)
    options = RunOptions(only, out=tmp_path / "out", command="x", lock_dir=tmp_path, worker=worker(tmp_path))
    outcome = run_spec(load_spec(path), options)
    assert not check(outcome.page)
    page = outcome.page.read_text(encoding="utf-8")
    assert "## Exactness certificates" in page
    assert "| decode: mtp |" in page
    assert "faster than classic" in page
    refused = run_spec(load_spec(path), replace(options, worker=worker(tmp_path, uncertified=True)))
    assert refused.exit_code == 1
    assert not check(refused.page)
    words = refused.page.read_text(encoding="utf-8")
    title = next(line for line in words.splitlines() if line.startswith("# "))
    assert "no speed is stated, mtp: no probe left a sound exactness certificate" in title
    assert "tok/s |" not in words


def test_a_null_block_is_no_arm_that_needs_one(tmp_path: Path) -> None:
    """Guards against a record that contradicts itself because classic in an arm's place has no certificate."""
    schedule = "repeats: 4, processes: 2, order: abba, null_blocks: 1"
    path = write_spec(tmp_path, SPEC_TEXT.replace("repeats: 3", schedule))
    only = ("specs/tiny.yaml::decode",)
    options = RunOptions(only, out=tmp_path / "out", command="x", lock_dir=tmp_path, worker=worker(tmp_path))
    outcome = run_spec(load_spec(path), options)
    assert not check(outcome.page)
    page = outcome.page.read_text(encoding="utf-8")
    assert "(null blocks" in page
    assert "contradicts itself" not in page
    assert "faster than classic" in page


# ---- on the page ----------------------------------------------------------------------------------------------------


def certified_lines() -> list[AnyLine]:
    """The good synthetic run as one from today: its probe leaves a certificate, its arm states its kernels."""
    lines = change(support.run_lines(), lambda line: isinstance(line, StartLine), certified=True)
    found: list[AnyLine] = []
    probe, timed = support.case_id("probe"), support.case_id("decode")
    draws = [line for line in lines if isinstance(line, DrawLine) and line.case == probe]
    stated = [
        ProbeInput(name=d.draw, prompt_tokens=d.prompt_tokens, rows=d.positions, total_bytes=d.total_bytes)
        for d in draws
    ]
    for line in lines:
        if isinstance(line, ArmLine) and not any(isinstance(one, PathLine) for one in found):
            found.append(path(timed))
        found.append(line)
        if isinstance(line, DecisionLine) and line.case == probe:
            found.append(made(case=probe, inputs=stated, classic_sha256=line.classic_sha256))
    return found


def path(case: str, arm: str = "mtp", **changes: Any) -> PathLine:
    stated: dict[str, Any] = {
        "case": case,
        "arm": arm,
        "stage": "rowwise",
        "block_size": 4,
        "identity": identity(),
        "flags": FLAGS,
        "path": {},
        "longest_prompt": 184,
        "fingerprint": "f" * 64,
    }
    return PathLine.model_validate({**stated, **changes})


def test_a_certified_record_shows_what_covers_what() -> None:
    """The good end; the same figures as the record without certificates had."""
    record = record_of(certified_lines())
    assert record.contradictions == ()
    arm = next(case for case in record.cases if case.kind == "throughput").arms[0]
    assert arm.speedup == record_of(support.run_lines()).of_kind("throughput")[0].arms[0].speedup
    assert [one.covers for one in record.certificates] == [("decode: mtp",)]
    assert record.certificates[0].walk_reach == 1056 + 128


def drop(kind: type[AnyLine]) -> Callable[[list[AnyLine]], list[AnyLine]]:
    return lambda lines: [line for line in lines if not isinstance(line, kind)]


def edit(kind: type[AnyLine], **update: Any) -> Callable[[list[AnyLine]], list[AnyLine]]:
    return lambda lines: change(lines, lambda line: isinstance(line, kind), **update)


DAMAGES: dict[str, tuple[Callable[[list[AnyLine]], list[AnyLine]], str]] = {
    "no certificate": (drop(CertificateLine), "no probe left a sound exactness certificate"),
    "no kernels": (drop(PathLine), "the child did not state its kernels"),
    "other driver": (
        edit(PathLine, identity=identity(driver="580.1")),
        "certificate is for driver none, this arm runs on 580.1",
    ),
    "other width": (edit(PathLine, block_size=6), "its kernels are stated for block size 6, it was timed at 4"),
    "edited": (edit(CertificateLine, block_size=6), "was changed after it was written"),
    "draw not there": (
        lambda lines: [line for line in lines if not (isinstance(line, DrawLine) and line.prompt_tokens == 160)],
        "states draws that did not pass in this case",
    ),
    "draw failed": (
        lambda lines: change(
            lines, lambda line: isinstance(line, DrawLine) and line.case == support.case_id("probe"), passed=False
        ),
        "states draws that did not pass in this case",
    ),
    "declined": (
        lambda lines: change(
            lines, lambda line: isinstance(line, DecisionLine) and line.case == support.case_id("probe"), engaged=False
        ),
        "stands beside no decision that engaged on its bytes",
    ),
    "overridden": (
        lambda lines: change(
            lines, lambda line: isinstance(line, DecisionLine) and line.case == support.case_id("probe"), inexact=True
        ),
        "stands beside no decision that engaged on its bytes",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_record_without_a_sound_certificate_shows_no_speed(name: str) -> None:
    """Guards against a page or record.json that states a speed-up whose proof is missing, edited or not its own."""
    damage, words = DAMAGES[name]
    record = record_of(damage(certified_lines()))
    case = record.of_kind("throughput")[0]
    arm = case.arms[0]
    assert any(words in problem for problem in record.contradictions), record.contradictions
    assert (arm.speedup, arm.speedup_geomean, arm.delta, arm.verdict) == (None, None, (), "unresolved")
    assert case.verdict == "unresolved"
    assert arm.verdict_reason.startswith("withheld: ")
    assert all(r.arm_tok_s is None and r.delta is None for r in arm.repeats)
    assert all(step.predicted_speedup is None and step.measured_speedup is None for step in case.steps)
    page = render(record, "x")
    assert "faster than classic" not in page
    assert record.title.startswith("Nano pair: MTP is byte-identical to classic, speed withheld") or record.negative
    assert "speed-up" not in page.partition("## Throughput")[2].partition("## Steps")[0]
    assert "withheld" in page


def test_a_refused_arm_has_no_prediction_for_any_block_size() -> None:
    """Guards against a speed-up that comes back by another door: the oracle's table, its advice, its plot, a bar."""
    curve = [line for line in with_curve() if isinstance(line, StepLine)]
    good = [line for line in certified_lines() if not isinstance(line, StepLine)]
    steps_at = next(
        place for place, line in enumerate(good) if isinstance(line, CaseLine) and line.kind == "throughput"
    )
    lines: list[AnyLine] = [*good[:steps_at], *curve, *good[steps_at:]]
    spec = support.SPEC_TEXT.replace("kind: throughput,", "kind: throughput, bars: {max_prediction_error: 0.5},")

    def seen(given: list[AnyLine]) -> tuple[CaseRecord, str]:
        record = record_of(given, spec)
        return record.of_kind("throughput")[0], render(record, "x")

    shown, _ = seen(lines)
    assert shown.oracle[0].best_block_size
    assert shown.oracle[0].points[2].measured_speedup
    assert shown.bars[0].value is not None
    case, page = seen(drop(CertificateLine)(lines))
    (figures,) = case.oracle
    assert figures.points[2].verify_ms == 19.0
    assert (figures.best_block_size, figures.advice) == (None, "")
    assert all(p.predicted_speedup is None and p.measured_speedup is None for p in figures.points)
    assert [bar.value for bar in case.bars] == [None]
    assert not [name for name, _ in plot_names(case) if name.endswith(ORACLE)]
    row = next(line for line in page.splitlines() if line.startswith("| 4 | 19.00 |"))
    assert row.count("withheld") == 4


def test_report_checks_certificates_again(tmp_path: Path) -> None:
    """Guards against a runs.jsonl edited after the run: the check names it, and rendering again withholds the speed."""
    store = support.write_record(tmp_path, certified_lines())
    page = store.paths.page
    assert not check(page)
    raw = store.paths.runs.read_text(encoding="utf-8").splitlines()
    assert sum('"line":"certificate"' in line for line in raw) == 1
    store.paths.runs.write_text("\n".join(x for x in raw if '"line":"certificate"' not in x) + "\n", encoding="utf-8")
    assert any(
        "mtp has a verdict, but no probe left a sound exactness certificate" in problem for problem in check(page)
    )
    regenerate(page)
    assert load_record(store.paths).of_kind("throughput")[0].arms[0].speedup is None
    assert "1.45" not in page.read_text(encoding="utf-8").partition("## Host")[0]


def test_records_from_before_certificates_render_as_they_did(tmp_path: Path) -> None:
    """Guards the committed records: no new key in record.json, no new block, the same speed-up; but a certificate,
    once in a record, is asked for whatever its start line says."""
    store = support.write_record(tmp_path, support.run_lines())
    stored = json.loads(store.paths.record.read_text(encoding="utf-8"))
    assert not {"certificates", "ledger"} & set(stored)
    assert not any("kernels_sha256" in case for case in stored["cases"])
    assert stored["verdict"] == "faster"
    assert "Exactness certificates" not in store.paths.page.read_text(encoding="utf-8")
    forged = edit(StartLine, certified=False)(edit(CertificateLine, block_size=6)(certified_lines()))
    assert record_of(forged).of_kind("throughput")[0].arms[0].speedup is None


def test_every_line_survives_the_file(tmp_path: Path) -> None:
    """Guards the certificate's hash against the round trip through JSON."""
    store = support.write_record(tmp_path, certified_lines())
    read = read_lines(store.paths.runs).lines
    found = certificate.certificates_in(read)
    assert len(found) == 1
    assert certificate.digest(found[0]) == found[0].sha256
