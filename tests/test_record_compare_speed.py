"""`harness compare`: acceptance, paired deltas, verdicts, step costs and kernels, by their own intervals and nulls."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support_compare import (
    CHANGES,
    GATE_UP,
    KERNELS,
    NANO,
    Change,
    against,
    base,
    drop,
    ended,
    of,
    ours,
    pair,
    rows_of,
    side,
    timed,
    where,
)

from harness import stats
from harness.record.compare import Comparison, compare
from harness.record.compare_speed import arm_rows, judge_arms, judge_verdicts, moved
from harness.record.lines import ArmLine, ComparisonLine, KernelLine, KernelShapeLine, PeerLine
from harness.record.speed_model import ArmFigures, BarFigures

# ---- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "part"),
    [
        ("hardly slower", "same", "intervals +77.9% to +104.6% and +74.4% to +100.6% overlap"),
        ("slower arm", "regressed", "are apart, and -37.5% is beyond 2.0 %, the smallest effect of interest"),
        ("two pairs", "not comparable", "no interval in B: 2 pairs are too few"),
        ("four pairs", "regressed", "lie apart by more than 36.5 %, the largest |null| of both"),
        ("other text", "not comparable", "other text: classic's own output of code changed"),
        ("inexact", "not comparable", "inexact in B: engaged by override"),
    ],
)
def test_paired_deltas_are_judged_by_their_intervals_and_nulls(name: str, status: str, part: str) -> None:
    """Never by a bare percent: 2 % inside the intervals is nothing, 60 % outside them is something."""
    row = rows_of(against(name), "mtp: delta")
    assert row.status == status
    assert part in row.reason


def test_few_pairs_within_the_null_range_are_the_same() -> None:
    """Four pairs, a third slower, on a machine whose null deltas reach 36 %."""
    few = drop(lambda x: isinstance(x, ArmLine) and x.repeat > 3)
    row = rows_of(compare(side(NANO, few), side(NANO, few, timed(1.3))), "mtp: delta")
    assert row.status == "same"
    assert "within the null range" in row.reason


def test_step_costs_are_judged_over_classic_and_by_the_null_range() -> None:
    """A machine that is slower altogether is not a slower verify."""
    everything = of("decode", ArmLine, decode_s=lambda x: x.decode_s * 1.5, verify_s=lambda x: x.verify_s * 1.5)
    found = pair(NANO, everything)
    assert rows_of(found, "mtp: classic_step_ms").status == "regressed"
    assert rows_of(found, "mtp: verify_ms / classic_step_ms").status == "same"
    assert rows_of(found, "mtp: delta").status == "same"
    assert (
        "within 36.5 %, the largest |null| of both"
        in rows_of(pair(NANO, timed(1.2)), "mtp: verify_ms / classic_step_ms").reason
    )
    assert rows_of(pair(NANO, timed(1.6)), "mtp: verify_ms / classic_step_ms").status == "regressed"


@pytest.mark.parametrize(
    ("one", "two", "status"),
    [
        ("faster", "slower", "regressed"),
        ("slower", "faster", "improved"),
        ("equivalent", "faster", "improved"),
        ("faster", "unresolved", "not comparable"),
        ("unresolved", "unresolved", "same"),
    ],
)
def test_verdicts(one: str, two: str, status: str) -> None:
    """Unresolved decides nothing, on either side."""
    (arm,) = [arm for case in base(NANO).record.cases for arm in case.arms]
    before, after = (arm.model_copy(update={"verdict": verdict}) for verdict in (one, two))
    assert judge_verdicts(before, after)[0] == status


def test_acceptance_is_counted_so_the_smallest_effect_decides() -> None:
    """The same text with fewer accepted drafts; a change below the smallest effect of interest is none."""

    def fewer(every: int) -> Change:
        cut = lambda x: tuple(0 if i % every == 0 else n for i, n in enumerate(x.accepted_per_round))  # noqa: E731
        return of("parity", ComparisonLine, accepted_per_round=cut)

    figure = "acceptance_length, block size 4"
    assert rows_of(pair(NANO, fewer(2)), figure, "parity").status == "regressed"
    assert rows_of(compare(side(NANO, fewer(2)), base(NANO)), figure, "parity").status == "improved"
    row = rows_of(pair(NANO, fewer(80)), figure, "parity")
    assert row.status == "same"
    assert "within 2.0 %, the smallest effect of interest" in row.reason


def test_a_failed_throughput_case_has_deltas_that_decide_nothing() -> None:
    """Its raw deltas are in the record; its outcome says that they are no result."""
    row = rows_of(pair(NANO, timed(3.0), ended("decode", "fail", "acceptance below the floor")), "all")
    assert row.reason == "outcome fail in B: its deltas decide nothing"


def test_a_case_that_failed_on_its_bars_is_compared() -> None:
    """A bar that both records miss must not hide that one of them became slower."""
    a, b = base(NANO), side(NANO, timed(3.0))
    missed = BarFigures(what="draft step over classic step", value=0.06, limit=0.05, highest=True, met=False)
    old, new = (
        next(case for case in one.record.cases if case.arms).model_copy(
            update={"outcome": "fail", "verdict": "faster", "bars": (missed,)}
        )
        for one in (a, b)
    )
    assert {row.figure: row.status for row in arm_rows(a, b, old, new)}["mtp: delta"] == "regressed"


def test_steps_are_compared_where_the_text_is_another() -> None:
    """Kernels with other bytes write other text; what a step takes is no matter of which token it is."""
    for slow, status in ((1.0, "same"), (1.6, "regressed")):
        later = of("decode", ArmLine, decode_s=lambda x, slow=slow: x.decode_s * slow)
        found = pair(NANO, *CHANGES["other text"][1], later)
        assert rows_of(found, "mtp: classic_step_ms").status == status
        assert "other text" in rows_of(found, "mtp: delta").reason


def _runs(noise: float, effect: float, pairs: int, rng: random.Random) -> ArmFigures:
    """An arm of a simulated run: classic at 100 tok/s, the arm 50 % faster, times 1 + effect."""
    rates = [[100 * (1 + rng.gauss(0, noise)) for _ in range(3)] for _ in range(pairs)]
    deltas = tuple(stats.paired_delta(1.5 * (1 + effect) * mid, a, b) for a, mid, b in rates)
    nulls = tuple(stats.null_delta(a, b) for a, _, b in rates)
    interval = stats.bootstrap_interval(deltas, resamples=300) if pairs >= stats.INTERVAL_PAIRS else None
    (arm,) = [arm for case in base(NANO).record.cases for arm in case.arms]
    return arm.model_copy(update={"delta": deltas, "null": nulls, "n": pairs, "interval": interval})


@pytest.mark.parametrize("pairs", [3, 6])
def test_two_runs_of_the_same_thing_are_rarely_told_apart(pairs: int) -> None:
    """A/A at 2 % noise: at most 5 % of the pairs of records get a word other than same; a 15 % loss nearly always."""
    rng = random.Random(20261130)
    alike = [judge_arms(_runs(0.02, 0, pairs, rng), _runs(0.02, 0, pairs, rng))[0] for _ in range(120)]
    assert sum(word != "same" for word in alike) <= 6
    worse = [judge_arms(_runs(0.02, 0, pairs, rng), _runs(0.02, -0.15, pairs, rng))[0] for _ in range(40)]
    assert "improved" not in worse
    assert sum(word == "regressed" for word in worse) >= (36 if pairs >= stats.INTERVAL_PAIRS else 20)


def test_moved_is_symmetric_and_refuses_what_has_no_ratio() -> None:
    """Half and double are equally far."""
    for a, b, floor in ((1.0, 1.05, 0.05), (2.0, 1.0, 0.5), (1.0, 1.2, 0.1)):
        there = moved(a, b, floor, higher_is_better=True, within="x")[0]
        back = moved(b, a, floor, higher_is_better=True, within="x")[0]
        assert (there == "same") == (back == "same")
    assert moved(0.0, 1.0, 0.1, higher_is_better=True, within="x")[0] == "not comparable"
    assert moved(1.0, 1.2, 0.1, higher_is_better=False, within="x")[0] == "regressed"


# ---- kernels ---------------------------------------------------------------------------------------------------------


def statuses(found: Comparison, case: str = GATE_UP) -> dict[str, str]:
    """Figure -> status of the kernel rows of one shape."""
    return {row.figure: row.status for row in found.rows if row.case == case and row.aspect == "speed"}


def test_a_slower_kernel_regresses_in_time_share_and_ratios_and_nowhere_else() -> None:
    """20 % on every number of rows of one shape: what more rows cost did not move, other shapes neither."""
    found = against("slow kernel")
    mine = statuses(found)
    assert mine["us at M = 1"] == mine["stream_share"] == "regressed"
    assert {status for figure, status in mine.items() if figure.startswith("ratio to")} == {"regressed"}
    assert mine["m4_over_m1"] == mine["m8_over_m1"] == "same"
    assert {row.case for row in found.of("regressed")} == {GATE_UP}
    assert found.exit_code() == 1
    assert statuses(compare(side(KERNELS, ours(1.2)), base(KERNELS)))["us at M = 1"] == "improved"


def test_a_slower_card_is_told_from_a_slower_kernel_by_the_stream() -> None:
    """Both 5 % slower: the time is explained, the share did not move."""
    found = against("slow card")
    assert statuses(found)["us at M = 1"] == statuses(found)["stream_share"] == "same"
    assert "the stream's own +5.0%" in rows_of(found, "us at M = 1", GATE_UP).reason
    assert statuses(pair(KERNELS, ours(1.05)))["us at M = 1"] == "regressed"


def test_rows_that_cost_more_are_seen_in_their_ratio() -> None:
    """Eight rows alone become slower."""
    mine = statuses(pair(KERNELS, ours(1.3, (8,))))
    assert mine["m8_over_m1"] == "regressed"
    assert mine["us at M = 1"] == mine["m4_over_m1"] == "same"


def test_a_change_within_both_null_spreads_or_the_smallest_effect_is_the_same() -> None:
    """Half of the two spreads together; where that is less than 2 %, two cards differ by more."""
    kernel = next(case.kernel for case in base(KERNELS).record.cases if case.name == GATE_UP)
    assert kernel is not None
    assert kernel.null_spread is not None
    row = rows_of(pair(KERNELS, ours(1 + kernel.null_spread)), "stream_share", GATE_UP)
    assert row.status == "same"
    assert row.reason.endswith("is within 2.0 %, the smallest effect of interest")
    again = where(
        lambda x: getattr(x, "again", False), of(GATE_UP, KernelLine, us=lambda x: tuple(1.1 * t for t in x.us))
    )
    row = rows_of(pair(KERNELS, ours(1.05), again), "stream_share", GATE_UP)
    assert row.status == "same"
    assert row.reason.endswith("%, both null spreads")


@pytest.mark.parametrize(
    ("changes", "figure", "part"),
    [
        (CHANGES["differing byte"][1], "all", "withheld in B: its rows are not exact"),
        (CHANGES["no null arm"][1], "all", "no null arm in B"),
        (CHANGES["no stream"][1], "us at M = 1", "a slower card and a slower kernel look alike"),
        ((of(GATE_UP, KernelLine, clock="host"),), "all", "other clock: graph against host"),
        ((of(GATE_UP, KernelShapeLine, nbytes=1),), "all", "other nbytes"),
        ((where(lambda x: getattr(x, "peer", "") == "marlin", of(GATE_UP, PeerLine, version="2")),),
         "ratio to marlin at M = 1", "other version of the peer: _C.abi3.so against 2"),
        ((drop(lambda x: getattr(x, "arm", "") == "marlin"),
          where(lambda x: getattr(x, "peer", "") == "marlin", of(GATE_UP, PeerLine, reason="it is not installed"))),
         "ratio to marlin", "not measured in B: it is not installed"),
        ((where(lambda x: getattr(x, "arm", "") == "marlin", of(GATE_UP, KernelLine, clock="host",
          us=lambda x: tuple(value * 2 for value in x.us))),), "ratio to marlin at M = 1", "timed by the host's clock"),
    ],
)  # fmt: skip
def test_kernel_figures_that_cannot_be_compared_say_why(changes: Sequence[Change], figure: str, part: str) -> None:
    """Each with its own reason, and no other word than not comparable."""
    row = rows_of(pair(KERNELS, *changes), figure, GATE_UP)
    assert row.status == "not comparable"
    assert part in row.reason


def test_a_missed_bar_does_not_spoil_the_figures_and_a_differing_byte_does() -> None:
    """The bar judges the outcome; exact rows are still exact."""
    failed = pair(KERNELS, ours(1.2), ended(GATE_UP, "fail", "share below the bar"))
    assert rows_of(failed, "outcome", GATE_UP).status == "regressed"
    assert statuses(failed)["us at M = 1"] == "regressed"
    wrong = against("differing byte")
    assert "regressed" in {row.status for row in wrong.rows if row.case == GATE_UP and row.aspect == "bytes"}


def test_another_bar_stops_the_outcome_alone() -> None:
    """A stricter bar is another question to the same figures."""
    spec = ("n: 30720, bits: 4, bars: {min_stream_share: 0.68}", "n: 30720, bits: 4, bars: {min_stream_share: 0.99}")
    found = pair(KERNELS, ended(GATE_UP, "fail", "share 0.74"), spec=spec)
    assert rows_of(found, "outcome", GATE_UP).reason == "other spec: other bars at this shape"
    assert statuses(found)["us at M = 1"] == "same"
