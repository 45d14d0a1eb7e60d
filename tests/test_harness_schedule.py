"""Blocks, processes and discards: what runs in which order, what counts, and what a resumed run may not change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support_harness import SPEC_TEXT, alive, worker, write_spec

from harness import disturbance, pairs, stats
from harness.checks.registry import get
from harness.checks.throughput import schedule, slots
from harness.context import RunContext
from harness.errors import SpecError, UsageError
from harness.record.build import build_record
from harness.record.lines import AnyLine, ArmLine, CaseLine, CheckLine, ChildLine, Disturbance
from harness.record.report import check as check_record
from harness.record.sections.speed import throughput as throughput_section
from harness.record.store import read_lines
from harness.record.telemetry import Telemetry
from harness.run import RunOptions, RunOutcome, run_spec
from harness.spec import Case, load_spec, plan
from harness.spec.model import Discard, Throughput

DECODE = "{kind: throughput, id: decode, arms: [{name: mtp}], repeats: 3, max_tokens: 9}"
FULL = DECODE.replace("repeats: 3", "repeats: 6, processes: 2, order: abba, null_blocks: 1")


def decode_case(tmp_path: Path, entry: str) -> Case:
    """The throughput case of the scripted spec, asked as `entry`."""
    path = write_spec(tmp_path, SPEC_TEXT.replace(DECODE, entry))
    return next(case for case in plan(load_spec(path)) if case.kind == "throughput")


def check_of(case: Case) -> Throughput:
    assert isinstance(case.check, Throughput)
    return case.check


def measure(tmp_path: Path, case: Case, **script: Any) -> tuple[CaseLine, list[AnyLine]]:
    """One case through scripted children."""
    context = RunContext(
        log_dir=tmp_path / "logs", command=worker(tmp_path, **script), lock_dir=tmp_path, job_timeout_s=20
    )
    with context:
        return context.run(case), context.lines


def test_a_fresh_process_starts_after_the_last_one_has_ended(tmp_path: Path) -> None:
    """Guards against two loaded pairs that share the machine while the second is timed."""
    left: list[bool] = []

    def look(line: AnyLine) -> None:
        if isinstance(line, ChildLine):
            starts = (tmp_path / "starts.txt").read_text(encoding="utf-8").splitlines()
            left.extend(alive(int(start.split()[0])) for start in starts[:-1])

    case = decode_case(tmp_path, FULL)
    with RunContext(log_dir=tmp_path / "logs", command=worker(tmp_path), lock_dir=tmp_path, emit=look) as context:
        context.run(case)
    assert left == [False]


def timed(lines: Sequence[AnyLine]) -> list[ArmLine]:
    return [line for line in lines if isinstance(line, ArmLine)]


# ---- the schedule ---------------------------------------------------------------------------------------------------


def test_each_process_opens_and_closes_with_null_blocks(tmp_path: Path) -> None:
    """Guards against null blocks that see only the start of a run, or repeats that one process gets all of."""
    check = check_of(decode_case(tmp_path, FULL))
    blocks = schedule(check, 1)
    assert [(block.process, block.null) for block in blocks] == [
        (process, null) for process in (0, 1) for null in (True, False, False, False, True)
    ]
    assert [block.repeat for block in blocks if not block.null] == [0, 1, 2, 3, 4, 5]
    assert len({block.repeat for block in blocks}) == len(blocks)
    uneven = check.model_copy(update={"repeats": 7, "processes": 3, "null_blocks": 0})
    assert [block.process for block in schedule(uneven, 2)] == [0, 0, 1, 1, 2, 2, 2]


def test_brackets_are_the_special_case_of_one_turn(tmp_path: Path) -> None:
    """Guards the first version's order, and that ABBA mirrors the arms, so that each is centred on its repeat."""
    one = check_of(decode_case(tmp_path, DECODE))
    assert [slot for slot, _ in slots(one, False)] == ["open", "arm", "close"]
    assert [(block.process, block.null) for block in schedule(one, 1)] == [(0, False)] * 3
    two = DECODE.replace("[{name: mtp}]", "[{name: a}, {name: b}]").replace("repeats: 3", "repeats: 3, order: abba")
    both = check_of(decode_case(tmp_path, two))
    assert [arm.name if arm else "classic" for _, arm in slots(both, False)] == [
        "classic",
        "a",
        "b",
        "b",
        "a",
        "classic",
    ]
    assert [arm for _, arm in slots(both, True)] == [None] * 4


def test_abba_cancels_a_drift_that_a_bracket_of_two_arms_does_not() -> None:
    """Guards the reason for ABBA: under a linear drift the second arm of a bracket looks slower than the first."""
    rate = [100 - 2 * place for place in range(6)]
    bracket = [stats.paired_delta(rate[place], rate[0], rate[3]) for place in (1, 2)]
    abba = [stats.paired_delta((rate[i] + rate[j]) / 2, rate[0], rate[5]) for i, j in ((1, 4), (2, 3))]
    assert bracket[0] - bracket[1] > 0.02
    assert abba == pytest.approx([0.0, 0.0])


def test_processes_are_fresh_and_named_in_the_lines(tmp_path: Path) -> None:
    """Guards against "several processes" that are one: as many children as processes start, each decides anew."""
    result, lines = measure(tmp_path, decode_case(tmp_path, FULL))
    assert (result.outcome, result.verdict) == ("pass", "faster")
    assert sum(isinstance(line, ChildLine) for line in lines) == 2
    assert (tmp_path / "starts.txt").read_text(encoding="utf-8").count("\n") == 2
    runs = timed(lines)
    assert {(line.process, line.repeat) for line in runs if line.arm == "mtp"} == {(r // 3, r) for r in range(6)}
    assert [line.slot for line in runs[:4]] == ["open", "arm", "arm", "close"]
    assert {line.arm for line in runs if line.repeat >= 6} == {"classic", "null"}
    assert len(runs) == 4 * (6 + 4)
    assert pairs.is_bracketed(runs)


def test_more_processes_than_repeats_are_refused(tmp_path: Path) -> None:
    """Guards against a process without a pair, which would be resampled as nothing."""
    with pytest.raises(SpecError, match="4 processes share 3 repeats"):
        decode_case(tmp_path, DECODE.replace("repeats: 3", "repeats: 3, processes: 4"))


def test_a_missing_null_block_or_turn_is_an_error(tmp_path: Path) -> None:
    """Guards against a verdict from a run that holds less than its spec promised."""
    case = decode_case(tmp_path, FULL)
    _, lines = measure(tmp_path, case)
    own = [line for line in lines if getattr(line, "case", None) == case.id and not isinstance(line, CaseLine)]
    judge = get("throughput").judge
    assert judge(case, own, own).outcome == "pass"
    short = [line for line in own if not (isinstance(line, ArmLine) and line.repeat == 9)]
    assert judge(case, short, short).reason == "3 of 4 null blocks are complete"
    turn = next(line for line in own if isinstance(line, ArmLine) and line.arm == "mtp")
    once = [line for line in own if line is not turn]
    assert judge(case, once, once).reason == "repeat 1 of 6 is not complete for arm mtp"


def test_a_repeat_that_another_interrupts_is_not_bracketed() -> None:
    """Guards against pairs whose brackets ran before and after somebody else's repeat."""

    def line(repeat: int, slot: str) -> ArmLine:
        return arm(repeat, slot, 1.0)

    whole = [line(0, slot) for slot in pairs.SLOTS]
    assert pairs.is_bracketed([*whole, *(line(1, slot) for slot in pairs.SLOTS)])
    assert not pairs.is_bracketed([whole[0], line(1, "open"), *whole[1:]])
    assert not pairs.is_bracketed([whole[1], whole[0], whole[2]])


# ---- discards -------------------------------------------------------------------------------------------------------


def arm(
    repeat: int, slot: str, seconds: float, process: int | None = 0, disturbed: Any = (), name: str = ""
) -> ArmLine:
    """A generation of 101 tokens in that time."""
    mtp = slot == "arm" and not name
    return ArmLine(
        case="specs/tiny.yaml::decode",
        repeat=repeat,
        slot=slot,  # type: ignore[arg-type]
        arm=name or ("mtp" if mtp else "classic"),
        block_size=4 if mtp else 1,
        prompt="text1",
        prompt_tokens=3,
        tokens=101,
        sha256="a" * 64,
        distinct_tokens=50,
        ttft_s=0.01,
        decode_s=seconds,
        accepted_per_round=(3,) * 25 if mtp else (),
        drafted_per_round=(3,) * 25 if mtp else (),
        process=0,
        disturbed=disturbed,
    )


THROTTLED = (Disturbance(cause="throttled", detail="power cap, 41 % of the run"),)


def repeats_of(arm_s: Sequence[float], disturbed: Sequence[int] = (), slot: str = "close") -> list[ArmLine]:
    """Repeats against classic at 2 s; those in `disturbed` saw throttling in one of their slots."""
    return [
        arm(repeat, name, took if name == "arm" else 2.0, disturbed=THROTTLED * (repeat in disturbed and name == slot))
        for repeat, took in enumerate(arm_s)
        for name in pairs.SLOTS
    ]


@pytest.mark.parametrize("slot", pairs.SLOTS)
def test_a_disturbed_run_takes_its_whole_pair_out(slot: str) -> None:
    """Guards against dropping one side: whichever run was throttled, the pair is gone, delta and null alike."""
    found = pairs.pairs_of(repeats_of([1.0] * 5 + [9.0], disturbed=[5], slot=slot), "mtp")
    assert [bool(pair.disturbed) for pair in found] == [False] * 5 + [True]
    judged = pairs.judge_pairs(found, (), 0.02)
    assert judged.verdict == "faster"
    assert "all 5 deltas" in judged.reason


def test_an_outlier_without_a_cause_stays() -> None:
    """Guards against choosing by value: the same slow pair counts when telemetry says nothing against it."""
    judged = pairs.judge_pairs(pairs.pairs_of(repeats_of([1.0] * 4 + [9.0]), "mtp"), (), 0.02)
    assert judged.verdict == "unresolved"
    with pytest.raises(ValueError, match="outlier"):
        Disturbance.model_validate({"cause": "outlier", "detail": "far from the others"})


@pytest.mark.parametrize(("disturbed", "verdict"), [((0, 1), "faster"), ((0, 1, 2), "unresolved")])
def test_more_than_a_fifth_discarded_voids_the_run(disturbed: tuple[int, ...], verdict: str) -> None:
    """Guards against a verdict from what little was left: 2 of 10 pairs may go, 3 may not."""
    judged = pairs.judge_pairs(pairs.pairs_of(repeats_of([1.0] * 10, disturbed), "mtp"), (), 0.02)
    assert judged.verdict == verdict
    if verdict == "unresolved":
        assert judged.reason == "3 of 10 pairs were discarded; more than 20 % voids the run"
    gone = pairs.judge_pairs(pairs.pairs_of(repeats_of([1.0] * 3, range(3)), "mtp"), (), 0.02)
    assert gone.reason.startswith("3 of 3 pairs were discarded")


def test_null_blocks_count_as_noise() -> None:
    """Guards against null blocks that are shown and not used: a block beyond the deltas withholds the verdict."""
    runs = pairs.pairs_of(repeats_of([1.8] * 3), "mtp")
    calm = pairs.pairs_of([arm(3, slot, 2.0, name="null" * (slot == "arm")) for slot in pairs.SLOTS], "null")
    loud = pairs.pairs_of(
        [arm(3, slot, 1.6 if slot == "arm" else 2.0, name="null" * (slot == "arm")) for slot in pairs.SLOTS], "null"
    )
    assert pairs.judge_pairs(runs, calm, 0.02).verdict == "faster"
    assert loud[0].delta == pytest.approx(0.25)
    assert pairs.judge_pairs(runs, loud, 0.02).verdict == "unresolved"


def test_the_page_names_discards_processes_and_the_spec(tmp_path: Path) -> None:
    """Guards against a verdict whose rule could have been chosen afterwards, or pairs that vanish without a word."""
    case = decode_case(tmp_path, FULL)
    _, lines = measure(tmp_path, case)
    hit = next(
        n for n, line in enumerate(lines) if isinstance(line, ArmLine) and (line.repeat, line.slot) == (4, "arm")
    )
    assert isinstance(lines[hit], ArmLine)
    lines[hit] = lines[hit].model_copy(update={"disturbed": THROTTLED})
    text = (tmp_path / "specs" / "tiny.yaml").read_text(encoding="utf-8")
    record = build_record(lines, {}, text)
    (found,) = record.of_kind("throughput")
    (figures,) = found.arms
    assert figures.n == 5
    assert figures.processes == (0, 0, 0, 1, 1)
    assert len(figures.null_block) == 4
    assert [(one.repeat, one.cause) for one in figures.discarded] == [(4, "throttled")]
    page = throughput_section(record.model_copy(update={"spec_sha256": "0123456789abcdef" * 4}), "stem")
    assert "| 5 | throttled | power cap, 41 % of the run |" in page
    assert "SHA-256 `0123456789ab`" in page
    assert "| 6 | 2 | text1 |" in page


# ---- telemetry ------------------------------------------------------------------------------------------------------


def test_only_what_the_spec_names_counts() -> None:
    """Guards against a cause that the spec switched off, and one that is ignored although it asks for it."""
    (found,) = disturbance.disturbances(Discard(foreign_cores=0.4), 0.5)
    assert (found.cause, found.detail) == ("foreign_load", "other processes kept 0.50 cores busy, the limit is 0.4")
    assert disturbance.disturbances(Discard(foreign_cores=0.6), 0.5) == ()
    assert disturbance.disturbances(Discard(foreign_cores=0.6), None) == ()
    assert disturbance.disturbances(Discard(), 9.0) == ()
    (held,) = disturbance.disturbances(Discard(), None, "throttled: heat 40 ms")
    assert (held.cause, held.detail) == ("throttled", "heat 40 ms")
    assert disturbance.disturbances(Discard(throttled=False), None, "thermal") == ()


def test_foreign_load_reaches_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a rule in the spec that nothing applies: every run of a busy machine carries its cause."""
    readings = (Telemetry(at_s=n, cores=8, cpu_busy_s=5.0 * n, own_cpu_s=0.0) for n in range(1000))
    monkeypatch.setattr(RunContext, "telemetry", lambda self, case: next(readings))
    case = decode_case(tmp_path, DECODE.replace("repeats: 3", "repeats: 3, discard: {foreign_cores: 1}"))
    result, lines = measure(tmp_path, case)
    assert {line.disturbed[0].cause for line in timed(lines)} == {"foreign_load"}
    assert all(line.before and line.after and line.after.at_s == line.before.at_s + 1 for line in timed(lines))
    assert (result.outcome, result.verdict) == ("unresolved", "unresolved")
    assert "3 of 3 pairs discarded (foreign load 3)" in result.reason


# ---- no extension after looking -------------------------------------------------------------------------------------


def run(tmp_path: Path, resume: Path | None = None, **script: Any) -> RunOutcome:
    """A run of the scripted spec into `out`."""
    options = RunOptions(
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


def test_resume_adds_no_repeat_to_a_finished_arm(tmp_path: Path) -> None:
    """Guards against optional stopping: a case with a verdict stays as it is, whatever else runs again."""
    write_spec(tmp_path)
    first = run(tmp_path, how="exit", on="decline")
    before = timed(read_lines(data_of(first) / "runs.jsonl").lines)
    assert len(before) == 9
    run(tmp_path, resume=data_of(first))
    assert timed(read_lines(data_of(first) / "runs.jsonl").lines) == before


def test_a_changed_number_of_repeats_is_refused_by_name(tmp_path: Path) -> None:
    """Guards against raising `repeats` until the verdict is right: another number is another spec, and a new run."""
    write_spec(tmp_path)
    first = run(tmp_path, how="exit", on="decline")
    write_spec(tmp_path, SPEC_TEXT.replace("repeats: 3", "repeats: 6"))
    with pytest.raises(UsageError, match="decode had 3 repeats and now has 6; a run is not extended"):
        run(tmp_path, resume=data_of(first))


def test_an_interrupted_case_is_timed_anew_and_says_so(tmp_path: Path) -> None:
    """Guards against pairs of two sittings in one verdict, and against throwing some away without a word."""
    write_spec(tmp_path)
    first = run(tmp_path, fail="memory", on="steps")
    assert first.exit_code == 3
    second = run(tmp_path, resume=data_of(first))
    lines = read_lines(data_of(second) / "runs.jsonl").lines
    assert len(timed(lines)) == 18
    page = second.page.read_text(encoding="utf-8")
    assert "An earlier start of this case timed 3 repeats and was interrupted" in page
    assert not check_record(second.page)
    assert sum(isinstance(line, CheckLine) and "output of mtp" in line.name for line in lines) == 2
