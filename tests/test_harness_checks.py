"""Every check kind: a case that passes and the cases that must not, judged from raw lines alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support_harness import SPEC_TEXT, check, comparison, decision, draw, worker, write_spec

from harness.checks import attribution, geometry
from harness.checks.base import Judgement
from harness.checks.registry import KINDS, get
from harness.context import RunContext
from harness.errors import UsageError
from harness.record.lines import LINE_ADAPTER, AnyLine, ArmLine, CheckLine, DecisionLine, StepLine
from harness.spec import Case, load_spec, plan
from harness.spec.model import CHECK_MODELS


@pytest.fixture
def cases(tmp_path: Path) -> dict[str, Case]:
    """The plan of the scripted spec, by name."""
    return {case.name: case for case in plan(load_spec(write_spec(tmp_path)))}


def lines_of(*contents: dict[str, Any]) -> list[AnyLine]:
    return [LINE_ADAPTER.validate_python(content) for content in contents]


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine] = ()) -> Judgement:
    return get(case.kind).judge(case, lines, others)


def run(tmp_path: Path, case: Case, **script: Any) -> tuple[Judgement, list[AnyLine]]:
    """One case through a scripted child."""
    context = RunContext(
        log_dir=tmp_path / "logs", command=worker(tmp_path, **script), lock_dir=tmp_path, job_timeout_s=20
    )
    with context:
        line = context.run(case)
    return Judgement(line.outcome, line.reason, line.verdict), context.lines


def test_each_kind_of_a_spec_has_a_runner_and_each_runner_a_claim() -> None:
    """Guards against a kind that validates and then cannot run; the module's docstring opens with the spec's claim."""
    assert set(KINDS) == set(CHECK_MODELS)
    for name, kind in KINDS.items():
        doc = __import__(kind.judge.__module__, fromlist=["x"]).__doc__ or ""
        assert doc.startswith(f"`{name}`:"), name
        assert len(doc.splitlines()[0]) > len(name) + 20, name


def test_an_unknown_kind_lists_the_known_ones() -> None:
    """Guards against a KeyError for a typo."""
    with pytest.raises(UsageError, match="known kinds: geometry"):
        get("parity")


# ---- exactness_probe ------------------------------------------------------------------------------------------------


def test_probe_passes_and_says_what_it_compared(tmp_path: Path, cases: dict[str, Case]) -> None:
    """The good path, through a child."""
    result, _ = run(tmp_path, cases["probe"])
    assert result.outcome == "pass"
    assert "4 rows" in result.reason


def test_probe_fails_when_a_draw_differs_or_mtp_declines(cases: dict[str, Case]) -> None:
    """Guards against a probe whose failed draw is outvoted, or that declines quietly."""
    case, name = cases["probe"], cases["probe"].id
    differs = judge(case, lines_of(draw(name, False), decision(name, True, "c")))
    assert differs.outcome == "fail"
    assert "12 of 512 bytes" in differs.reason
    declined = judge(case, lines_of(draw(name, True), decision(name, False, "c")))
    assert declined.outcome == "fail"
    assert declined.reason.startswith("MTP declined:")


def test_probe_that_compared_too_little_is_no_pass(cases: dict[str, Case]) -> None:
    """Guards against passing on nothing: no decision, no draw, an empty draw, or the walk left out."""
    case, name = cases["probe"], cases["probe"].id
    good = lines_of(draw(name, True), decision(name, True, "c"))
    assert judge(case, good).outcome == "pass"
    assert judge(case, []).outcome == "error"
    assert judge(case, good[1:]).outcome == "error"
    empty = lines_of({**draw(name, True), "positions": 0}, decision(name, True, "c"))
    assert judge(case, empty).outcome == "fail"
    walking = replace(case, check=case.check.model_copy(update={"walk": True}))
    assert "no walk" in judge(walking, good).reason
    longer = replace(case, check=case.check.model_copy(update={"draws": (8, 1056)}))
    assert judge(longer, good).reason == "block size 4: 1 of 2 draws were compared"


def ops(name: str, found: str = "none", passed: bool = True) -> dict[str, Any]:
    """The statement about ops on their own."""
    return {**check(name, attribution.OPS_STATEMENT, passed), "found": found}


# ---- attribution ----------------------------------------------------------------------------------------------------


def test_attribution_outcomes(cases: dict[str, Case]) -> None:
    """The before picture is a declared decline with its first divergence; the fix must pass."""
    base = cases["attribution[stage:base+multirow:unset]"]
    fixed = cases["attribution[stage:rowwise+multirow:unset]"]
    bad = judge(base, lines_of(draw(base.id, False), decision(base.id, False, "c"), ops(base.id, "attention, rope")))
    assert bad.outcome == "declined"
    assert base.declared_decline
    assert bad.reason == (
        "first divergence: layer 0 (sliding) attention core at position 2, 12 of 128 bytes differ; "
        "ops that differ on their own: attention, rope"
    )
    good = lines_of(draw(fixed.id, True), decision(fixed.id, True, "c"), ops(fixed.id))
    assert judge(fixed, good).outcome == "pass"
    assert (
        judge(fixed, lines_of(draw(fixed.id, False), decision(fixed.id, False, "c"), ops(fixed.id))).outcome == "fail"
    )
    alone = lines_of(draw(fixed.id, True), decision(fixed.id, True, "c"), ops(fixed.id, "geglu", False))
    assert "yet ops that differ on their own: geglu" in judge(fixed, alone).reason
    assert judge(fixed, good[:2]).outcome == "error"


def test_attribution_fails_when_a_stage_moves_classic(tmp_path: Path, cases: dict[str, Case]) -> None:
    """Guards against a fix that changes decode itself; other flag cells may have other bytes."""
    base = cases["attribution[stage:base+multirow:unset]"]
    fixed = cases["attribution[stage:rowwise+multirow:unset]"]
    other_cell = cases["attribution[stage:base+multirow:0]"]
    own = lines_of(draw(fixed.id, True), decision(fixed.id, True, "c"), ops(fixed.id))
    same = lines_of(decision(base.id, False, "c"), decision(other_cell.id, False, "x"))
    moved = lines_of(decision(base.id, False, "d"))
    assert judge(fixed, own, [*same, *own]).outcome == "pass"
    result = judge(fixed, own, [*moved, *own])
    assert result.outcome == "fail"
    assert "classic bytes differ" in result.reason
    again = lines_of(
        decision(base.id, False, "d"), decision(base.id, False, "c")
    )  # a resumed record: the latest counts
    assert judge(fixed, own, [*again, *own]).outcome == "pass"


def test_attribution_without_evidence_is_an_error(cases: dict[str, Case]) -> None:
    """Guards against a cell that declines because the probe never ran and looks like the expected picture."""
    base = cases["attribution[stage:base+multirow:unset]"]
    assert judge(base, lines_of(decision(base.id, False, "c"))).outcome == "error"
    assert judge(base, []).outcome == "error"
    no_hash = lines_of(draw(base.id, False), {**decision(base.id, False, "c"), "classic_sha256": None}, ops(base.id))
    assert judge(base, no_hash).outcome == "error"


# ---- greedy_parity --------------------------------------------------------------------------------------------------


def parity_lines(case: Case, **changes: Any) -> list[AnyLine]:
    content = {**comparison(case.id, "text1", 4, True), **changes}
    return lines_of(decision(case.id, True, "c"), content)


def test_parity_passes_through_a_child(tmp_path: Path, cases: dict[str, Case]) -> None:
    """The good path."""
    result, lines = run(tmp_path, cases["parity"])
    assert result.outcome == "pass"
    assert "block sizes 4" in result.reason
    assert any(isinstance(line, DecisionLine) for line in lines)


@pytest.mark.parametrize(
    ("changes", "outcome", "word"),
    [
        ({"identical": False, "first_difference": 4}, "fail", "token 4 of 9 differs"),
        ({"text_identical": False}, "fail", "text or finish reason"),
        ({"accepted_per_round": (), "drafted_per_round": ()}, "fail", "no round ran"),
        ({"tokens": 12}, "error", "emitted = prefill + rounds + accepted - cut: 12 tokens, but"),
        ({"accepted_per_round": (4, 3)}, "error", "drafted = accepted + rejected: round 0 accepted 4 of 3"),
        ({"accepted_per_round": (1, 1), "drafted_per_round": (1, 1), "tokens": 5}, "error", "another block size ran"),
        ({"accepted_per_round": (), "drafted_per_round": (), "tokens": 1}, "error", "no round ran"),
    ],
)
def test_parity_fails_on(cases: dict[str, Case], changes: dict[str, Any], outcome: str, word: str) -> None:
    """Each way in which an identical-looking comparison proves nothing or the opposite."""
    result = judge(cases["parity"], parity_lines(cases["parity"], **changes))
    assert result.outcome == outcome
    assert word in result.reason


def test_parity_floors(cases: dict[str, Case]) -> None:
    """Guards against a drafter that reads the wrong layer (text equal, nothing accepted) and against looping text."""
    case = cases["parity"]

    def with_floor(**floor: Any) -> Judgement:
        lines = parity_lines(case, accepted_per_round=(1, 0), tokens=4, distinct_tokens=3)
        return judge(replace(case, check=case.check.model_copy(update=floor)), lines)

    assert with_floor().outcome == "pass"
    assert with_floor(min_acceptance=0.1).outcome == "pass"
    low = with_floor(min_acceptance=0.2)
    assert low.outcome == "fail"
    assert "acceptance rate 0.167" in low.reason
    assert with_floor(min_distinct_tokens=3).outcome == "pass"
    assert with_floor(min_distinct_tokens=4).outcome == "fail"


def test_parity_declines_without_generating(cases: dict[str, Case]) -> None:
    """A width that the probe refuses is a decline, never a pass on fewer comparisons."""
    case = cases["parity"]
    result = judge(case, lines_of(decision(case.id, False, "c")))
    assert result.outcome == "declined"
    assert not case.declared_decline
    assert judge(case, lines_of(decision(case.id, True, "c"))).outcome == "error"


# ---- throughput -----------------------------------------------------------------------------------------------------


def arm_lines(
    case: Case, arm_s: Sequence[float], close_s: Sequence[float] = (0.2,) * 6, **changes: Any
) -> list[AnyLine]:
    """Repeats with classic at 0.2 s, an arm, and closing classic; 9 tokens each."""
    lines: list[dict[str, Any]] = [decision(case.id, True, "c")]
    for repeat, seconds in enumerate(arm_s):
        for slot, took in (("open", 0.2), ("arm", seconds), ("close", close_s[repeat])):
            mtp = slot == "arm"
            line = {
                "line": "arm",
                "case": case.id,
                "repeat": repeat,
                "slot": slot,
                "arm": "mtp" if mtp else "classic",
                "block_size": 4 if mtp else 1,
                "prompt": "text1",
                "prompt_tokens": 3,
                "tokens": 9,
                "sha256": "a" * 64,
                "distinct_tokens": 9,
                "ttft_s": 0.01,
                "decode_s": took,
                "accepted_per_round": (3, 3) if mtp else (),
                "drafted_per_round": (3, 3) if mtp else (),
            }
            lines.append({**line, **(changes if mtp else {})})
    return lines_of(*lines)


def test_throughput_through_a_child(tmp_path: Path, cases: dict[str, Case]) -> None:
    """Outputs first, then open, arm, close for each repeat, then steps; twice the rate is faster."""
    result, lines = run(tmp_path, cases["decode"])
    assert (result.outcome, result.verdict) == ("pass", "faster")
    timed = [line for line in lines if isinstance(line, ArmLine)]
    assert [(line.repeat, line.slot) for line in timed] == [(r, s) for r in range(3) for s in ("open", "arm", "close")]
    assert {line.step for line in lines if isinstance(line, StepLine)} == {
        "classic",
        "classic_unpadded",
        "verify",
        "draft_round",
    }
    assert [line.passed for line in lines if isinstance(line, CheckLine)] == [True]


def test_throughput_states_no_speed_when_tokens_differ(tmp_path: Path, cases: dict[str, Case]) -> None:
    """Guards against a speed-up for text that is not classic's: nothing is timed, no verdict is given."""
    result, lines = run(tmp_path, cases["decode"], differ=True)
    assert (result.outcome, result.verdict) == ("fail", None)
    assert "no speed is stated" in result.reason
    assert not any(isinstance(line, ArmLine | StepLine) for line in lines)


@pytest.mark.parametrize(
    ("seconds", "close", "outcome", "verdict"),
    [
        ((0.1, 0.11, 0.09), (0.2, 0.21, 0.19), "pass", "faster"),
        ((0.4, 0.41, 0.39), (0.2, 0.21, 0.19), "pass", "slower"),
        ((0.2, 0.1, 0.1), (0.2, 0.21, 0.19), "unresolved", "unresolved"),
        ((0.2, 0.2, 0.2), (0.2, 0.2, 0.2), "unresolved", "unresolved"),
    ],
)
def test_throughput_verdicts(
    cases: dict[str, Case], seconds: Sequence[float], close: Sequence[float], outcome: str, verdict: str
) -> None:
    """The outcome says whether it could be resolved, the verdict what it is."""
    result = judge(cases["decode"], arm_lines(cases["decode"], seconds, close))
    assert (result.outcome, result.verdict) == (outcome, verdict)


@pytest.mark.parametrize(
    ("changes", "outcome", "word"),
    [
        ({"sha256": "b" * 64}, "fail", "tokens differ between timed runs"),
        ({"accepted_per_round": (), "drafted_per_round": ()}, "fail", "no round ran"),
        ({"decode_s": 0.01}, "fail", "impossible"),
        ({"tokens": 1, "decode_s": 0.0}, "fail", "tokens differ"),
        ({"drafted_per_round": (9, 9)}, "error", "allows 3"),
    ],
)
def test_throughput_refuses_figures_that_cannot_be(
    cases: dict[str, Case], changes: dict[str, Any], outcome: str, word: str
) -> None:
    """Guards against a headline from another text, from an idle drafter, or above the ceiling."""
    result = judge(cases["decode"], arm_lines(cases["decode"], (0.1, 0.1, 0.1), **changes))
    assert result.outcome == outcome
    assert word in result.reason
    assert result.verdict is None


def test_throughput_needs_every_repeat_and_enough_tokens(cases: dict[str, Case]) -> None:
    """Guards against a verdict from a run that was cut, and against the rate of one token."""
    case = cases["decode"]
    assert "repeat 3 of 3" in judge(case, arm_lines(case, (0.1, 0.1))).reason
    single = [
        line.model_copy(update={"tokens": 1}) if isinstance(line, ArmLine) else line
        for line in arm_lines(case, (0.1,) * 3)
    ]
    single = [
        line.model_copy(update={"accepted_per_round": (), "drafted_per_round": ()})
        if isinstance(line, ArmLine)
        else line
        for line in single
    ]
    result = judge(case, single)
    assert result.outcome == "error"
    assert "ask for more tokens" in result.reason


def test_throughput_notes_a_drift_of_classic(cases: dict[str, Case]) -> None:
    """Guards against hiding that the machine slowed down from the first repeat to the last."""
    case = cases["decode"]
    lines = arm_lines(case, (0.1,) * 3, (0.2,) * 3)
    assert "drifted" not in judge(case, lines).reason
    slower, classics = [], 0
    for line in lines:
        if isinstance(line, ArmLine) and line.arm == "classic":
            line = line.model_copy(update={"decode_s": 0.2 + 0.01 * classics})
            classics += 1
        slower.append(line)
    assert "classic's rate drifted (rank correlation -1.00)" in judge(case, slower).reason


def test_throughput_acceptance_floor(cases: dict[str, Case]) -> None:
    """Guards against a fast arm whose drafter no longer drafts what it should."""
    case = cases["decode"]
    strict = replace(case, check=case.check.model_copy(update={"min_acceptance": 0.9}))
    lines = arm_lines(case, (0.1,) * 3, accepted_per_round=(2, 2, 1), drafted_per_round=(3, 3, 3))
    assert judge(case, lines).outcome == "pass"
    assert "below min_acceptance 0.9" in judge(strict, lines).reason


def test_an_arm_with_flags_gets_a_child_of_its_own(tmp_path: Path) -> None:
    """Guards against an arm that is labelled with a flag which was read once, before, in the same process."""
    text = SPEC_TEXT.replace(
        "arms: [{name: mtp}]", 'arms: [{name: mtp}, {name: per-row, env: {MLXCEL_QMV_MULTIROW: "0"}}]'
    )
    case = next(case for case in plan(load_spec(write_spec(tmp_path, text))) if case.kind == "throughput")
    result, lines = run(tmp_path, case)
    assert result.outcome == "pass"
    assert "per-row: faster" in result.reason
    starts = (tmp_path / "starts.txt").read_text(encoding="utf-8").splitlines()
    assert [start.split()[1] for start in starts] == ["unset", "0"]
    assert sum(isinstance(line, ArmLine) for line in lines) == 12


# ---- decline, geometry, row_identity --------------------------------------------------------------------------------


def test_decline_is_declared_and_checks_the_text(tmp_path: Path, cases: dict[str, Case]) -> None:
    """Its good end is `declined`; a changed text, a missing comparison or an engagement is not."""
    case = cases["decline"]
    result, lines = run(tmp_path, case)
    assert result.outcome == "declined"
    assert case.declared_decline
    own = [line for line in lines if getattr(line, "case", None) == case.id and line.line != "case"]
    assert judge(case, own).outcome == "declined"
    changed = [line.model_copy(update={"passed": False}) if isinstance(line, CheckLine) else line for line in own]
    assert judge(case, changed).outcome == "fail"
    assert judge(case, [line for line in own if not isinstance(line, CheckLine)]).outcome == "error"


GEOMETRY = """\
schema: 1
name: tiny
title: Shapes
pair: {target: {path: target}, drafter: {path: drafter}}
checks:
  - kind: geometry
    id: geometry
    expect: {target: {sliding_window: 16, hidden_size: 64}, full_layers: 1, linear_singleton_cuda: false}
"""


def test_geometry(tmp_path: Path) -> None:
    """All equal passes; a wrong value names both; an unknown field gets a suggestion; nothing compared is an error."""
    case = plan(load_spec(write_spec(tmp_path, GEOMETRY)))[0]
    facts = {"target": {"sliding_window": 16, "hidden_size": 64}, "full_layers": 1, "linear_singleton_cuda": False}
    result, _ = run(tmp_path, case, data=facts)
    assert (result.outcome, result.reason) == ("pass", "all 4 shapes and predicates are as expected")
    assert case.check.kind == "geometry"
    wrong = geometry.statements(case.id, case.check, {**facts, "target": {"sliding_window": 8, "hidden_sizes": 64}})
    result = judge(case, wrong)
    assert result.outcome == "fail"
    assert result.reason == "target.sliding_window: expected 16, found 8 (and 1 more)"
    assert next(line for line in wrong if line.name == "target.hidden_size").found == (
        "no such field; did you mean hidden_sizes?"
    )
    assert judge(case, []).outcome == "error"
    shared = geometry.statements(case.id, case.check, {**facts, "shared_kv_problem": "shared K/V: layer 3 differs"})
    assert judge(case, shared).reason.endswith("expected the same bytes, found shared K/V: layer 3 differs")
    assert judge(case, geometry.statements(case.id, case.check, {**facts, "shared_kv_problem": None})).outcome == "pass"


ROWS = """\
schema: 1
name: tiny
title: Rows
pair: {target: {path: target}, drafter: {path: drafter}}
checks:
  - {kind: row_identity, id: rows, ops: [linear, rope]}
"""


def test_row_identity(tmp_path: Path) -> None:
    """An op that differs fails, an op that was not compared is an error."""
    case = plan(load_spec(write_spec(tmp_path, ROWS)))[0]

    def line(name: str, passed: bool = True) -> CheckLine:
        found = "equal" if passed else "M = 3, row 2: 1 of 128 bytes differ"
        return CheckLine(case=case.id, name=name, passed=passed, expected="equal", found=found)

    assert judge(case, [line("linear: q_proj"), line("rope: sliding")]).outcome == "pass"
    assert judge(case, [line("linear: q_proj")]).reason == "op rope was not compared"
    bad = judge(case, [line("linear: q_proj", False), line("rope: sliding")])
    assert (bad.outcome, bad.reason) == ("fail", "linear: q_proj: M = 3, row 2: 1 of 128 bytes differ")
