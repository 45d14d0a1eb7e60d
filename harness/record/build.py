"""From raw lines to a `Record`: group the lines by case, compute each figure, name the finding. Pure.

Statistics come from `harness.stats`, the module that also judged the run. A speed-up exists here only while every
output of MTP in the whole run equals classic's: one differing token anywhere withholds all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from harness.errors import RecordError
from harness.pairs import NULL, is_bracketed
from harness.record.agreement import run_problems
from harness.record.certified import Certified, certify, with_speed, withhold_arms, withhold_steps
from harness.record.decode import decode_figures, engine_figures
from harness.record.evidence import contradictions_of
from harness.record.finding import state_finding
from harness.record.gate_view import gate_rows
from harness.record.host import device_label, host_rows
from harness.record.kernels import kernel_figures
from harness.record.ledger_rows import ledger_rows
from harness.record.lines import (
    AnyLine,
    ArmLine,
    BlockLine,
    CaseLine,
    CertificateLine,
    CheckLine,
    ChildLine,
    ComparisonLine,
    DecisionLine,
    DecodeLine,
    DrawLine,
    EndLine,
    FloorLine,
    GateLine,
    KernelLine,
    KernelShapeLine,
    Outcome,
    PathLine,
    PeerLine,
    RollbackLine,
    StartLine,
    StepLine,
    Verdict,
)
from harness.record.model import CaseRecord, CheckFigures, ChildRecord, ComparisonFigures, DrawFigures, Record
from harness.record.rollback import rollback_figures
from harness.record.spec_view import CaseName, SpecView
from harness.record.speed import (
    NOT_JUDGED,
    acceptance_figures,
    arm_figures,
    oracle_figures,
    outputs_by_prompt,
    step_figures,
)
from harness.record.speed import UNFINISHED as UNFINISHED_ARMS
from harness.record.speed_model import ArmFigures, BarFigures, StepFigures
from harness.spec.speed_model import StepBars
from harness.step_bars import step_bars

CaseEvent = (
    DrawLine
    | DecisionLine
    | ComparisonLine
    | ArmLine
    | GateLine
    | StepLine
    | FloorLine
    | CheckLine
    | RollbackLine
    | KernelShapeLine
    | PeerLine
    | KernelLine
    | BlockLine
    | DecodeLine
    | PathLine
    | CertificateLine
    | CaseLine
)
UNFINISHED = "unfinished: the run stopped before this case ended"
VERDICTS: tuple[Verdict, ...] = ("slower", "unresolved", "equivalent", "faster")  # worst first


@dataclass(frozen=True)
class Grouped:
    """The lines of one run, sorted out."""

    starts: tuple[StartLine, ...]
    children: dict[str, ChildLine]
    cases: dict[str, tuple[CaseEvent, ...]]
    end: EndLine | None
    abandoned: dict[str, int]  # repeats of a case that an earlier segment timed

    @property
    def planned(self) -> tuple[str, ...]:
        """Every id that some start line planned, in order of first mention."""
        return tuple(dict.fromkeys(name for start in self.starts for name in start.cases))


def group_lines(lines: Iterable[AnyLine]) -> Grouped:
    """Sort lines by case. After a resume only a case's lines from its last segment count: it was run again."""
    starts: list[StartLine] = []
    children: dict[str, ChildLine] = {}
    segments: dict[str, tuple[int, list[CaseEvent]]] = {}
    end: EndLine | None = None
    abandoned: Counter[str] = Counter()
    for line in lines:
        if isinstance(line, StartLine):
            starts.append(line)
            end = None  # an end before a resume does not end the resumed run
        elif isinstance(line, ChildLine):
            children[line.child] = line
        elif isinstance(line, EndLine):
            end = line
        else:
            segment, events = segments.get(line.case, (-1, []))
            if segment != len(starts):
                abandoned[line.case] += len({e.repeat for e in events if isinstance(e, ArmLine) and e.arm != NULL})
                events = []
                segments[line.case] = (len(starts), events)
            events.append(line)
    cases = {case: tuple(found) for case, (_, found) in segments.items()}
    return Grouped(tuple(starts), children, cases, end, dict(abandoned))


def build_record(
    lines: Iterable[AnyLine], env: Mapping[str, Any], spec_text: str, sources: Mapping[str, str] | None = None
) -> Record:
    """The record of a run from its raw lines, its env.json and the copy of its spec.

    Raises RecordError for a spec that cannot be read; a run without a single start line gives an empty record.
    """
    spec = SpecView.parse(spec_text)
    run = group_lines(lines)
    start = run.starts[0] if run.starts else None
    identical = tokens_identical(run, spec)
    certified = certify(run.starts, run.cases)
    known = dict.fromkeys((*run.planned, *run.cases))
    cases = tuple(
        build_case(case_id, run.cases[case_id], spec, identical is False, certified, run.abandoned.get(case_id, 0))
        for case_id in known
        if case_id in run.cases
    )
    not_run = tuple(case_id for case_id in known if case_id not in run.cases)
    complete = run.end is not None and not run.end.interrupted and not not_run and all(c.finished for c in cases)
    date = start.started_utc[:10] if start else ""
    device = device_label(env, tuple(run.children.values()))
    known_failures = {case.check for case in cases if spec.known_failure(case.check) is not None}
    finding = state_finding(
        subject=spec.title,
        device=device,
        date=date,
        cases=cases,
        not_run=not_run,
        complete=complete,
        tokens_identical=identical,
        known_failures=known_failures,
    )
    return Record(
        title=finding.title,
        subject=spec.title,
        spec=start.spec if start else "",
        spec_name=spec.name,
        spec_sha256=start.spec_sha256 if start else "",
        command=run.starts[0].command if run.starts else "",
        device=device,
        date=date,
        started_utc=start.started_utc if start else "",
        ended_utc=run.end.ended_utc if run.end else None,
        resumed=sum(line.resumed for line in run.starts),
        complete=complete,
        exit_code=run.end.exit_code if run.end else None,
        outcome=overall_outcome(cases, not_run),
        verdict=overall_verdict(cases),
        negative=finding.negative,
        inexact=any(case.inexact for case in cases),
        tokens_identical=identical,
        counts=dict(Counter(case.outcome for case in cases)),
        cases=cases,
        not_run=not_run,
        children=tuple(build_child(line) for line in run.children.values()),
        contradictions=(
            *run_problems(run.starts, run.end, cases, known_failures),
            *(
                problem
                for case in cases
                for problem in contradictions_of(
                    case, run.cases[case.id], run.children.get(case.child or ""), certified
                )
            ),
        ),
        host=host_rows(env, tuple(run.children.values())) | gate_rows(run.starts, run.cases),
        certificates=certified.figures,
        ledger=ledger_rows(tuple(run.children.values()), run.cases, spec),
        sources=dict(sources or {}),
    )


def tokens_identical(run: Grouped, spec: SpecView) -> bool | None:
    """Whether every MTP output of the run equals classic's; None when no case compared outputs."""
    seen: list[bool] = []
    for case_id, events in run.cases.items():
        if spec.setting(CaseName.parse(case_id).check, "kind", "") == "throughput":
            seen += [e.passed for e in events if isinstance(e, CheckLine)]  # outputs compared before timing
        seen += [e.identical and e.text_identical for e in events if isinstance(e, ComparisonLine)]
        seen += [False for e in events if isinstance(e, RollbackLine) and not e.identical]
        arms = [e for e in events if isinstance(e, ArmLine)]
        seen += [len(hashes) == 1 for hashes in outputs_by_prompt(arms).values()]
    return all(seen) if seen else None


def build_case(
    case_id: str,
    events: Sequence[CaseEvent],
    spec: SpecView,
    withhold: bool,
    certified: Certified,
    abandoned: int = 0,
) -> CaseRecord:
    """One case from its own lines; an arm that no certificate covers has no speed-up."""
    name = CaseName.parse(case_id)
    ended = next((event for event in reversed(events) if isinstance(event, CaseLine)), None)
    decisions = [event for event in events if isinstance(event, DecisionLine)]
    declining = [line for line in decisions if not line.engaged] or decisions
    draws = [event for event in events if isinstance(event, DrawLine)]
    checks = [event for event in events if isinstance(event, CheckLine)]
    arm_lines = [event for event in events if isinstance(event, ArmLine)]
    step_lines = [event for event in events if isinstance(event, StepLine)]
    floors = [event for event in events if isinstance(event, FloorLine)]
    judged = ended is not None and (ended.outcome in ("pass", "unresolved") or ended.verdict is not None)
    no_verdict = UNFINISHED_ARMS if ended is None else None if judged else NOT_JUDGED
    effect, refused = spec.smallest_effect(name.check), {} if withhold else certified.refused.get(case_id, {})
    arms = arm_figures(arm_lines, effect, withhold=withhold, no_verdict=no_verdict)
    steps = step_figures(step_lines, arms, withhold, floors)
    if refused:
        arms = withhold_arms(arms, arm_figures(arm_lines, effect, withhold=True), refused)
        blank = step_figures(step_lines, arms, True, floors)
        steps = withhold_steps(step_figures(step_lines, arms, withhold, floors), blank, arms)
    kind = ended.kind if ended else str(spec.setting(name.check, "kind", "unknown"))
    divergence = next((line.first_divergence for line in decisions if line.first_divergence), None)
    failing = next((draw for draw in draws if not draw.passed), None)
    kernel = kernel_figures(events)
    return CaseRecord(
        id=case_id,
        name=name.name,
        check=name.check,
        kind=kind,
        cell=name.cell,
        flag_cell=name.flag_cell,
        outcome=ended.outcome if ended else "error",
        reason=ended.reason if ended else UNFINISHED,
        declared=spec.declared(name, kind),
        verdict=(ended.verdict if not (withhold or refused) else "unresolved") if ended and ended.verdict else None,
        finished=ended is not None,
        child=ended.child if ended else None,
        seconds=ended.seconds if ended else 0.0,
        log=ended.log if ended else None,
        engaged=all(line.engaged for line in decisions) if decisions else None,
        inexact=any(line.inexact for line in decisions) if decisions else None,
        decision_reason=declining[0].reason if declining else None,
        log_lines=tuple(dict.fromkeys(line.log_line for line in decisions)),
        classic_sha256=next((line.classic_sha256 for line in decisions if line.classic_sha256), None),
        first_divergence=divergence,
        first_divergence_text=divergence.describe() if divergence else None,
        differing_bytes=kernel.differing_bytes if kernel else failing.differing_bytes if failing else None,
        draws=tuple(DrawFigures(**draw.model_dump(exclude={"line", "case"})) for draw in draws),
        comparisons=tuple(build_comparison(event) for event in events if isinstance(event, ComparisonLine)),
        checks=tuple(CheckFigures(**check.model_dump(exclude={"line", "case"})) for check in checks),
        arms=arms,
        steps=steps,
        bars=() if withhold or not steps else bar_figures(spec, name.check, arms, steps),
        kernel=kernel,
        decode=decode_figures(events, withhold),
        engines=engine_figures(events) if kind == "peer_decode" else (),
        rollback=rollback_figures([event for event in events if isinstance(event, RollbackLine)]),
        outputs=outputs_by_prompt(arm_lines),
        bracketed=is_bracketed(arm_lines),
        oracle=oracle_figures(step_lines, with_speed(arms), withhold),
        abandoned=abandoned,
        kernels_sha256=next((e.fingerprint for e in events if isinstance(e, PathLine) and not e.arm), None),
    )


def bar_figures(
    spec: SpecView, check: str, arms: Sequence[ArmFigures], steps: Sequence[StepFigures]
) -> tuple[BarFigures, ...]:
    """The spec's bars on steps and speed-up over the figures of its case."""
    try:
        bars = StepBars.model_validate(spec.setting(check, "bars", {}))
    except ValidationError as error:
        raise RecordError(
            f"the record's spec.yaml: bars of {check} are malformed: {error.errors()[0]['msg']}"
        ) from None
    found = step_bars(bars, spec.block_size, arms, steps)
    return tuple(
        BarFigures(what=bar.what, value=bar.value, limit=bar.limit, highest=bar.highest, met=bar.met) for bar in found
    )


def build_comparison(line: ComparisonLine) -> ComparisonFigures:
    """One comparison; its times stay in the raw lines, since no bracket or null arm stands beside them.

    So does the margin, which the case's reason states where something differs.
    """
    kept = line.model_dump(
        exclude={"line", "case", "margin", "accepted_per_round", "drafted_per_round", "decode_s", "classic_decode_s"}
    )
    return ComparisonFigures(**kept, acceptance=acceptance_figures([line.accepted_per_round], [line.drafted_per_round]))


def build_child(line: ChildLine) -> ChildRecord:
    """One child process."""
    return ChildRecord(**line.model_dump(exclude={"line", "settings", "started_for"}))


def overall_outcome(cases: Sequence[CaseRecord], not_run: Sequence[str]) -> Outcome:
    """One word for the run: what failed first, then what could not be measured, then what was left out."""
    outcomes = {case.outcome for case in cases}
    undeclared = any(case.outcome == "declined" and not case.declared for case in cases)
    if "fail" in outcomes:
        return "fail"
    if undeclared:
        return "declined"
    if "error" in outcomes or not_run or not cases:
        return "error"
    if outcomes == {"skipped"}:
        return "skipped"
    return "unresolved" if "unresolved" in outcomes else "pass"


def overall_verdict(cases: Sequence[CaseRecord]) -> Verdict | None:
    """The least favourable verdict of all measured arms; None when nothing was measured."""
    found = {arm.verdict for case in cases for arm in case.arms}
    return next((verdict for verdict in VERDICTS if verdict in found), None)
