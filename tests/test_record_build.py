"""From raw lines to figures: hand-worked values, what is withheld, what a cut run keeps, what contradicts itself."""

from __future__ import annotations

import pytest
import support_record as support
from support_record import change, record_of

from harness.errors import RecordError
from harness.record.finding import state_finding
from harness.record.lines import (
    AnyLine,
    ArmLine,
    CaseLine,
    CheckLine,
    ComparisonLine,
    EndLine,
)
from harness.record.model import CaseRecord, Record
from harness.record.render import render
from harness.record.speed import acceptance_figures
from harness.record.speed_model import ArmFigures


def case_of(record: Record, check: str) -> CaseRecord:
    return next(case for case in record.cases if case.check == check)


def the_arm(record: Record) -> ArmFigures:
    return case_of(record, "decode").arms[0]


# ---- figures --------------------------------------------------------------------------------------------------------


def test_deltas_pair_an_arm_with_its_own_brackets() -> None:
    """Against the run's mean classic rate a drifting machine would show up as a speed-up."""
    arm = the_arm(record_of(support.run_lines()))
    assert arm.delta == pytest.approx((0.412, 0.453, 0.479), abs=1e-5)
    assert arm.null == pytest.approx((0.004, 0.009, -0.004), abs=1e-5)
    assert arm.null_range == (min(arm.null), max(arm.null))
    assert (arm.n, arm.verdict, arm.interval) == (3, "faster", None)


def test_rates_leave_out_the_first_token_and_prefill() -> None:
    """100 tokens, 1 s of prefill and 2 s of decode are 49.5 tok/s of decode, never 33."""
    lines = support.repeat_lines(0, 2.0, 100.0)
    timed = [line.model_copy(update={"tokens": 100, "decode_s": 2.0, "ttft_s": 1.0}) for line in lines]
    record = record_of([support.start_line([support.case_id("decode")]), *timed])
    assert the_arm(record).repeats[0].open_tok_s == 49.5


def test_speedup_pools_tokens_and_seconds_and_names_the_other_mean() -> None:
    """Ratio of totals and mean of ratios differ; a record that prints one unnamed invites choosing."""
    ratios = (1.0, 2.0, 4.0)
    speed = support.Speed(ratios, verdict="unresolved", outcome="unresolved")
    arm = the_arm(record_of(support.run_lines(support.Scenario(speed=speed))))
    assert arm.speedup == pytest.approx(3 / (1 / 1 + 1 / 2 + 1 / 4), rel=0.01)  # equal tokens: harmonic mean
    assert arm.speedup_geomean == pytest.approx(2.0, rel=0.001)


def test_both_acceptance_counts_stand_with_their_names() -> None:
    """[0, 4, 2] of 4 drafts: 2.0 accepted per round, 3.0 tokens per verify; the two differ by the bonus token."""
    figures = acceptance_figures([(0, 4, 2)], [(4, 4, 4)])
    assert figures is not None
    assert (figures.accepted_per_round, figures.acceptance_length, figures.acceptance_rate) == (2.0, 3.0, 0.5)
    assert figures.accepted_at == pytest.approx((2 / 3, 2 / 3, 1 / 3, 1 / 3), abs=1e-5)


def test_short_rounds_count_what_they_offered() -> None:
    """Offered [4, 1, 4], accepted [4, 1, 0]: 5 of 9, and draft 2 existed in two rounds only."""
    figures = acceptance_figures([(4, 1, 0)], [(4, 1, 4)])
    assert figures is not None
    assert figures.acceptance_rate == pytest.approx(5 / 9, abs=1e-6)
    assert figures.accepted_at == pytest.approx((2 / 3, 1 / 2, 1 / 2, 1 / 2), abs=1e-5)


def test_acceptance_pools_generations_by_round() -> None:
    """A short generation must not weigh as much as a long one."""
    figures = acceptance_figures([(3,), (0, 0, 0)], [(3,), (3, 3, 3)])
    assert figures is not None
    assert (figures.num_rounds, figures.acceptance_rate) == (4, 0.25)


def test_steps_predict_from_their_own_medians() -> None:
    """2.808 tokens a round at 7.2 ms against 8.6 + 3 x 1.0 ms; unpadded classic makes the claim smaller."""
    record = record_of(support.run_lines())
    steps = case_of(record, "decode").steps[0]
    length = the_arm(record).acceptance
    assert length is not None
    assert steps.predicted_speedup == pytest.approx(length.acceptance_length * 7.2 / 11.6, rel=1e-4)
    assert steps.predicted_speedup_unpadded == pytest.approx(length.acceptance_length * 6.65 / 11.6, rel=1e-4)
    assert steps.break_even_acceptance == pytest.approx((11.6 / 7.2 - 1) / 3, rel=1e-4)
    assert steps.measured_speedup == the_arm(record).speedup


def test_two_arms_share_brackets_and_keep_their_own_steps() -> None:
    """A second arm must not be read as a second repeat, nor take the first one's verify width."""
    lines: list[AnyLine] = [support.start_line([support.case_id("decode")])]
    for repeat in range(3):
        opening, arm, closing = support.repeat_lines(repeat, 1.5, 100.0)
        wide = support.arm_line(repeat, "arm", 120.0, "code", arm.sha256, block_size=8)
        other = wide.model_copy(update={"arm": "wide", "prompt": arm.prompt})
        lines += [opening, arm, other, closing]
    lines.append(support.case_line("decode", "throughput", "pass", "both faster", verdict="faster"))
    lines.append(EndLine(ended_utc="2026-11-30T09:05:00Z", exit_code=0))
    case = case_of(record_of(lines), "decode")
    assert [(arm.arm, arm.block_size, arm.n) for arm in case.arms] == [("mtp", 4, 3), ("wide", 8, 3)]
    assert case.bracketed
    assert min(case.arms[1].delta) > 0.15
    assert record_of(lines).title.startswith(
        "Nano pair: MTP (mtp) decodes +50.0% faster than classic; MTP (wide) decodes"
    )


# ---- titles ---------------------------------------------------------------------------------------------------------

TITLES = {
    "faster": "MTP decodes +41.2% to +47.9% faster than classic, byte-identical (CPU, 2026-11-30)",
    "slower": "MTP decodes 10.7% to 12.0% slower than classic, byte-identical (negative) (CPU, 2026-11-30)",
    "unresolved": "MTP against classic is unresolved, deltas -0.4% to +2.1%, null -0.4% to +0.9%, byte-identical "
    "(unresolved) (CPU, 2026-11-30)",
    "differs": "MTP text differs from classic from token 17 on, prompt docs, block size 4 (negative) (CPU, 2026-11-30)",
    "declined": "4 of 22 cases fail, first attribution[stage:rowwise+multirow:unset+large_d:unset]: layer 0 (sliding) "
    "attention core at position 0, 123 of 512 bytes differ (negative) (CPU, 2026-11-30)",
    "inexact": "MTP engaged inexact, by override (negative) (CPU, 2026-11-30)",
    "skipped": "nothing measured here, no checkpoint gemma-4-12b-it-4bit under $HARNESS_MODELS | set it "
    "(CPU, 2026-11-30)",
    "error": "1 of 22 cases could not be measured, first decode: child default died (signal 9) last log line: out of "
    "memory (CPU, 2026-11-30)",
}


@pytest.mark.parametrize("name", support.SCENARIOS)
def test_titles_state_the_finding(name: str) -> None:
    """Good, bad and empty results get a title of equal rank."""
    assert record_of(support.run_lines(support.SCENARIOS[name])).title == f"Nano pair: {TITLES[name]}"


def test_a_cut_run_says_what_it_found_and_that_it_was_cut() -> None:
    """Hours of machine time would read like nothing where the last cases are missing."""
    lines = [line for line in support.run_lines() if getattr(line, "case", "").partition("::")[2] != "rows"]
    title = record_of([line for line in lines if not isinstance(line, EndLine)]).title
    found = "MTP decodes +41.2% to +47.9% faster than classic, byte-identical"
    assert title == f"Nano pair: {found}, partial record, 21 of 22 cases finished (CPU, 2026-11-30)"


@pytest.mark.parametrize(
    ("name", "outcome", "verdict", "negative"),
    [
        ("faster", "pass", "faster", False),
        ("slower", "pass", "slower", True),
        ("unresolved", "unresolved", "unresolved", False),
        ("differs", "fail", "unresolved", True),
        ("declined", "fail", "faster", True),
        ("inexact", "fail", "faster", True),
        ("skipped", "skipped", None, False),
        ("error", "error", None, False),
    ],
)
def test_one_word_for_the_whole_run(name: str, outcome: str, verdict: str | None, negative: bool) -> None:
    """The index and CI read this word; a fail must win over everything."""
    record = record_of(support.run_lines(support.SCENARIOS[name]))
    assert (record.outcome, record.verdict, record.negative) == (outcome, verdict, negative)


def test_an_undeclared_decline_is_the_headline() -> None:
    """`declined` is fine where the spec asks for it, and a bad result everywhere else."""
    decision = support.decision_line(support.case_id("decode"), support.divergence("base", "unset"), "x")
    end = support.case_line("decode", "throughput", "declined", decision.log_line)
    lines = [line for line in support.run_lines() if getattr(line, "case", "") != decision.case]
    record = record_of([*lines[:-1], decision, end, lines[-1]])
    assert record.title.startswith("Nano pair: MTP declines, layer 0 (sliding) attention core at position 0")
    assert (record.outcome, record.negative) == ("declined", True)


def test_must_pass_decides_what_is_declared() -> None:
    """A spec that demands `attention` too makes its divergence a bad result, not the expected picture."""
    demanding = support.SPEC_TEXT.replace("    id: attribution\n", "    id: attribution\n    must_pass: [attention]\n")
    declared = {case.name: case.declared for case in record_of(support.run_lines(), demanding).of_kind("attribution")}
    assert declared["attribution[stage:base+multirow:0+large_d:0]"]
    assert not declared["attribution[stage:attention+multirow:0+large_d:0]"]


def test_a_known_failure_is_not_the_headline() -> None:
    """xfail says that it fails today; the finding is elsewhere."""
    known = support.SPEC_TEXT.replace("id: rows}", "id: rows, xfail: {reason: odd widths differ, issue: '12'}}")
    lines = change(
        support.run_lines(),
        lambda line: isinstance(line, CaseLine) and line.kind == "row_identity",
        outcome="fail",
        reason="expected to fail",
    )
    assert "faster than classic" in record_of(lines, known).title
    assert "1 of 22 cases fails, first rows" in record_of(lines).title


@pytest.mark.parametrize(
    ("reason", "title"),
    [
        (
            "mlx_lm's time is 2.32 times ours, bar at least 3; mlx_lm was not measured, bar at least 3",
            "faster than classic, byte-identical, 2 bars missed, first mlx_lm's time is 2.32 times ours",
        ),
        ("our own block differs from our chain in 2 rows; no speed is stated", "fails, first engines: our own block"),
    ],
    ids=["a rival that is too fast", "rows of our own"],
)
def test_a_rivals_bar_does_not_hide_the_speed_up(reason: str, title: str) -> None:
    """How fast others are is no fault of the text; rows of our own that differ are."""
    record = record_of(support.run_lines())
    engines = {"name": "engines", "check": "engines", "kind": "peer_decode", "outcome": "fail", "reason": reason}
    cases = [*record.cases, record.cases[0].model_copy(update=engines)]
    told = {"subject": "A pair", "device": "GPU", "date": "2026-01-01", "not_run": (), "complete": True}
    finding = state_finding(cases=cases, tokens_identical=True, **told)
    assert title in finding.title
    assert finding.negative
    slow = state_finding(cases=cases[-1:], tokens_identical=None, **told)
    assert "1 of 1 case fails, first engines" in slow.title


# ---- withheld -------------------------------------------------------------------------------------------------------


def speed_figures(record: Record) -> list[object]:
    """Every figure of a record that compares speed."""
    found: list[object] = []
    for case in record.cases:
        for arm in case.arms:
            found += [arm.speedup, arm.speedup_geomean, arm.interval, *arm.delta, arm.round_ms, arm.classic_step_ms]
            found += [figure for r in arm.repeats for figure in (r.open_tok_s, r.arm_tok_s, r.close_tok_s, r.delta)]
        found += [
            f for s in case.steps for f in (s.predicted_speedup, s.predicted_speedup_unpadded, s.measured_speedup)
        ]
    return [figure for figure in found if figure is not None]


def drop_speed_claim(lines: list[AnyLine]) -> list[AnyLine]:
    """The lines without the throughput case's own words."""
    return change(lines, lambda line: isinstance(line, CaseLine) and line.kind == "throughput", reason="see verdict")


@pytest.mark.parametrize("where", ["timed run", "parity", "text only", "before timing"])
def test_one_wrong_token_anywhere_withholds_every_speed(where: str) -> None:
    """A faster wrong text is no result, wherever in the run it was seen."""
    lines = drop_speed_claim(support.run_lines())
    assert speed_figures(record_of(lines))
    if where == "timed run":
        lines = change(lines, lambda line: isinstance(line, ArmLine) and line.slot == "arm", sha256="0" * 64)
    elif where == "before timing":
        wrong = CheckLine(
            case=support.case_id("decode"), name="code: output of mtp", passed=False, expected="a", found="b"
        )
        lines = [*lines[:-1], wrong, lines[-1]]
    else:
        update = {"identical": False} if where == "parity" else {"text_identical": False}
        lines = change(lines, lambda line: isinstance(line, ComparisonLine), **update)
    record = record_of(lines)
    page = render(record, "stem")
    assert record.tokens_identical is False
    assert speed_figures(record) == []
    assert record.negative
    assert record.verdict == "unresolved"
    assert "differs from classic" in record.title
    for word in (
        "faster",
        "+41",
        "+45",
        "+47",
        "1.45x",
        "1.75x",
        "runs / alone",
        "deltas.svg",
        " tok/s |\n| 1 | code | 1",
    ):
        assert word not in page.replace("A faster wrong text", ""), word


def test_classic_that_differs_from_itself_also_withholds() -> None:
    """An opening and a closing bracket with two texts make the null arm meaningless."""
    lines = change(
        support.run_lines(), lambda line: isinstance(line, ArmLine) and line.slot == "close", sha256="1" * 64
    )
    assert record_of(lines).tokens_identical is False


def test_a_failed_case_keeps_its_deltas_and_loses_its_verdict() -> None:
    """Too low an acceptance fails the case; its deltas must not be sold as a speed-up beside the failure."""
    lines = change(
        support.run_lines(),
        lambda line: isinstance(line, CaseLine) and line.kind == "throughput",
        outcome="fail",
        verdict=None,
        reason="acceptance rate 0.600 is below min_acceptance 0.7",
    )
    record = record_of(lines)
    assert (the_arm(record).verdict, the_arm(record).speedup, len(the_arm(record).delta)) == ("unresolved", None, 3)
    assert "decode: acceptance rate 0.600 is below" in record.title


def test_an_inexact_run_says_so_on_every_screen() -> None:
    """The override must not be a footnote."""
    page = render(record_of(support.run_lines(support.SCENARIOS["inexact"])), "stem")
    head, _, rest = page.partition("## Result")
    assert "inexact" in head
    assert "> **Inexact**" in head
    assert "INEXACT" in rest or "differs" in rest


# ---- cut and resumed runs -------------------------------------------------------------------------------------------


def test_a_killed_run_keeps_whole_repeats_and_gives_no_verdict() -> None:
    """A kill at a lucky moment would be optional stopping."""
    record = record_of(support.killed_lines())
    decode = case_of(record, "decode")
    assert not record.complete
    assert not decode.finished
    assert decode.outcome == "error"
    assert [repeat.repeat for repeat in the_arm(record).repeats] == [0]
    assert the_arm(record).verdict == "unresolved"
    assert the_arm(record).speedup is None
    assert record.outcome == "error"


def test_cases_that_never_started_are_listed() -> None:
    """What is missing must be as visible as what is there."""
    lines = support.run_lines()[:6]
    record = record_of(lines)
    assert len(record.cases) + len(record.not_run) == 22
    assert support.case_id("decode") in record.not_run
    assert "not run" in render(record, "stem")


def test_a_case_run_again_counts_once() -> None:
    """After a resume the repeats of the cut attempt must not be pooled with those of the second."""
    again = [support.start_line(support.all_ids(), resumed=True), *support.throughput_lines(support.Scenario())]
    record = record_of([*support.killed_lines(), *again, EndLine(ended_utc="2026-11-30T09:30:00Z", exit_code=0)])
    assert the_arm(record).n == 3
    assert record.complete
    assert record.resumed == 1
    assert record.command == "harness run specs/gemma4_nano.yaml"


def test_an_end_before_a_resume_does_not_end_the_resumed_run() -> None:
    """An interrupted run writes an end line; the resume that is killed later is partial again."""
    start, *rest = support.run_lines()[:6]
    interrupted = EndLine(ended_utc="2026-11-30T09:02:00Z", exit_code=3, interrupted=True)
    record = record_of([start, *rest, interrupted, support.start_line(support.all_ids(), resumed=True)])
    assert record.ended_utc is None
    assert not record.complete


def test_an_error_that_a_resume_repairs_leaves_no_trace_in_the_outcome() -> None:
    """Errors are run again on resume; the last word counts."""
    lines = support.run_lines(support.SCENARIOS["error"])
    again = [support.start_line(support.all_ids(), resumed=True), *support.throughput_lines(support.Scenario())]
    record = record_of([*lines, *again, lines[-1]])
    assert (record.outcome, record.verdict) == ("pass", "faster")


def test_a_spec_copy_that_is_none_is_named() -> None:
    """spec.yaml cut off by a full disk: an error with the file, not a KeyError."""
    with pytest.raises(RecordError, match="no list of checks"):
        record_of(support.run_lines(), "schema: 1\n")
    with pytest.raises(RecordError, match="not YAML"):
        record_of(support.run_lines(), "a: [1")
