"""A record must not claim more than its raw lines hold: each way to do so is named on the page and by the check."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import support_record as support
from support_record import change, record_of

from harness.record.lines import (
    AnyLine,
    ArmLine,
    CaseLine,
    CheckLine,
    ChildLine,
    ComparisonLine,
    DecisionLine,
    DrawLine,
    StartLine,
)
from harness.record.render import render


def is_case(kind: str) -> Callable[[AnyLine], bool]:
    return lambda line: isinstance(line, CaseLine) and line.kind == kind


def without(lines: list[AnyLine], kind: type[AnyLine], check: str) -> list[AnyLine]:
    case = support.case_id(check)
    return [line for line in lines if not (isinstance(line, kind) and getattr(line, "case", "") == case)]


@pytest.mark.parametrize("name", support.SCENARIOS)
def test_sound_runs_do_not_contradict_themselves(name: str) -> None:
    """The guard of the guards below: it must be silent on every honest ending."""
    assert record_of(support.run_lines(support.SCENARIOS[name])).contradictions == ()
    assert record_of(support.killed_lines()).contradictions == ()


CONTRADICTIONS: dict[str, tuple[Callable[[list[AnyLine]], list[AnyLine]], str]] = {
    "probe without draws": (lambda lines: without(lines, DrawLine, "probe"), "probe: outcome pass, but no draw"),
    "probe without decision": (lambda lines: without(lines, DecisionLine, "probe"), "no decision says engaged"),
    "draw that differs": (
        lambda lines: change(lines, lambda line: isinstance(line, DrawLine), passed=False, differing_bytes=2),
        "draw 0 (8 tokens) differs",
    ),
    "draw that compared nothing": (
        lambda lines: change(lines, lambda line: isinstance(line, DrawLine), positions=0, total_bytes=0),
        "compared nothing",
    ),
    "parity that compared nothing": (lambda lines: without(lines, ComparisonLine, "parity"), "nothing was compared"),
    "parity without a round": (
        lambda lines: change(
            lines, lambda line: isinstance(line, ComparisonLine), accepted_per_round=(), drafted_per_round=()
        ),
        "no round ran for code at block size 2",
    ),
    "identical with two hashes": (
        lambda lines: change(lines, lambda line: isinstance(line, ComparisonLine), mtp_sha256="2" * 64),
        "is called identical, but its hashes differ",
    ),
    "wrong verdict": (
        lambda lines: change(lines, is_case("throughput"), verdict="slower"),
        "the raw lines give faster",
    ),
    "throughput without arms": (lambda lines: without(lines, ArmLine, "decode"), "no arm was timed"),
    "statement that does not hold": (
        lambda lines: change(lines, lambda line: isinstance(line, CheckLine), passed=False),
        "target.sliding_window does not hold",
    ),
    "statement that was never made": (lambda lines: without(lines, CheckLine, "rows"), "no statement was checked"),
    "decline that engaged": (
        lambda lines: change(
            lines, lambda line: isinstance(line, DecisionLine) and line.case.endswith("::decline"), engaged=True
        ),
        "decline: outcome declined, but no decision says declined",
    ),
    "counter off by one": (
        lambda lines: change(
            lines, lambda line: isinstance(line, ArmLine) and line.slot == "arm", accepted_per_round=(3,) * 91
        ),
        "do not add up",
    ),
    "run that drafted otherwise": (
        lambda lines: change(
            lines,
            lambda line: isinstance(line, ArmLine) and (line.repeat, line.slot) == (2, "arm"),
            prompt="code",  # as repeat 0 had
            accepted_per_round=(0,) * 255,
            drafted_per_round=(3,) * 255,
        ),
        "decode: outcome pass, but for prompt code: mtp does not draft alike each time",
    ),
    "flag that was not read": (
        lambda lines: change(
            lines,
            lambda line: isinstance(line, ChildLine) and line.child == "multirow:0+large_d:0",
            flags_effective={"MLXCEL_QMV_MULTIROW": "1", "MLXCEL_SDPA_VECTOR_LARGE_D": "0"},
        ),
        "MLXCEL_QMV_MULTIROW=0 was asked for, but the child read 1",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_an_outcome_its_lines_do_not_bear_out_is_named(name: str) -> None:
    """Each is one way for a record to claim more than it holds."""
    spoil, expected = CONTRADICTIONS[name]
    record = record_of(spoil(support.run_lines()))
    assert any(expected in problem for problem in record.contradictions), record.contradictions
    assert "contradicts itself" in render(record, "stem")


def test_arms_that_were_not_interleaved_are_named() -> None:
    """AAAA then BBBB turns drift into a result."""
    lines = support.run_lines()
    arms = [line for line in lines if isinstance(line, ArmLine)]
    others = [line for line in lines if not isinstance(line, ArmLine)]
    cut = next(place for place, line in enumerate(others) if is_case("throughput")(line))
    sorted_arms = sorted(arms, key=lambda line: line.slot)
    record = record_of([*others[:cut], *sorted_arms, *others[cut:]])
    assert any("not interleaved" in problem for problem in record.contradictions)


def test_an_impossible_speedup_is_named() -> None:
    """6x at block size 4 is a broken clock, not a result."""
    lines = support.run_lines(support.Scenario(speed=support.Speed((6.0, 6.1, 6.2))))
    assert any("impossible" in problem for problem in record_of(lines).contradictions)


def test_a_run_of_an_older_start_line_is_still_grouped() -> None:
    """Lines of a case that no start line planned must not vanish."""
    lines = [line for line in support.run_lines() if not isinstance(line, StartLine)]
    record = record_of([support.start_line([]), *lines])
    assert len(record.cases) == 22
