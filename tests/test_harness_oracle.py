"""The break-even oracle on costs whose answer is known, and in a record made of step lines."""

from __future__ import annotations

import json
import re

import pytest
from support_record import arm_line, case_id, change, record_of, run_lines

from harness import oracle, stats
from harness.oracle import Costs
from harness.record.lines import AnyLine, ArmLine, StepLine
from harness.record.plot import draw_plots, plot_names
from harness.record.report import record_json
from harness.record.sections.speed import steps as steps_section
from harness.record.speed_model import OracleFigures

# Verify grows by 3 ms a row and a draft takes 1 ms: the second draft still pays for its row, the third does not.
COSTS = Costs(10.0, {size: 7.0 + 3.0 * size for size in range(1, 9)}, {count: 1.0 * count for count in range(1, 8)})
SHARES = (0.90, 0.75, 0.20)


def test_the_optimum_of_known_costs_is_found() -> None:
    """Guards against "longer is better": by hand 1.357x, 1.559x and 1.295x at block sizes 2, 3 and 4."""
    found = oracle.points(COSTS, {4: SHARES})
    speedups = {point.block_size: point.predicted_speedup for point in found}
    assert speedups[2] == pytest.approx(19.0 / 14.0)
    assert speedups[3] == pytest.approx(26.5 / 18.0)
    assert speedups[4] == pytest.approx(28.5 / 22.0)
    assert oracle.best_block_size(found) == 3
    assert oracle.advice(found).startswith("best block size 3, predicted 1.47x")


def test_break_even_is_where_the_prediction_is_one() -> None:
    """Guards against a break-even of another formula than the prediction: at that rate the speed-up is exactly 1."""
    for point in oracle.points(COSTS, {}):
        length = 1 + (point.block_size - 1) * point.break_even_acceptance
        assert length * COSTS.classic_step_ms / point.round_ms == pytest.approx(1.0)
        assert point.round_ms == pytest.approx(COSTS.verify_ms[point.block_size] + point.block_size - 1)
        assert point.predicted_speedup is None


def test_the_prediction_meets_a_run_of_the_same_costs() -> None:
    """Guards against a cost model that leaves something out: rounds played out one by one agree within 5 %."""
    accepted = [3, 2, 0, 3, 1, 3, 0, 2, 3, 1] * 20
    drafted = [3] * len(accepted)
    tokens = sum(accepted) + len(accepted)
    seconds = sum(COSTS.verify_ms[4] + 3 * 1.0 for _ in accepted)
    measured = tokens / seconds * COSTS.classic_step_ms
    (point,) = [p for p in oracle.points(COSTS, {4: stats.accepted_at(accepted, drafted)}) if p.block_size == 4]
    assert point.predicted_speedup == pytest.approx(measured, rel=0.05)
    assert point.acceptance_rate == pytest.approx(stats.acceptance_rate(accepted, drafted))


def test_an_acceptance_below_break_even_says_what_it_takes() -> None:
    """Guards against a best block size among losers: classic decode wins, and the nearest miss is named."""
    found = oracle.points(COSTS, {4: (0.30, 0.10, 0.02)})
    assert oracle.best_block_size(found) == 1
    assert oracle.advice(found) == "no block size pays: 2 needs an acceptance rate of at least 0.40, it has 0.30"
    dear = Costs(5.0, {2: 20.0}, {1: 1.0})
    assert oracle.advice(oracle.points(dear, {2: (0.99,)})) == (
        "no block size pays: a round of 2 costs more than 2 classic steps"
    )


def test_what_was_never_accepted_does_not_win() -> None:
    """Guards against a recommendation from extrapolation: 8 is predicted best, and only said to be so *if*."""
    cheap = Costs(10.0, dict.fromkeys(range(1, 9), 11.0), {count: 0.1 * count for count in range(1, 8)})
    found = oracle.points(cheap, {3: (0.8, 0.64)})
    basis = {point.block_size: point.basis for point in found}
    assert basis == {2: "positions", 3: "measured", **dict.fromkeys(range(4, 9), "extrapolated")}
    assert oracle.best_block_size(found) == 3
    assert "8 would give" in oracle.advice(found)
    carried = oracle.length_at({3: (0.8, 0.64)}, 5)
    assert carried is not None
    assert carried[0] == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)
    assert oracle.length_at({2: ()}, 4) is None


# ---- in a record ----------------------------------------------------------------------------------------------------


def curve_lines() -> list[AnyLine]:
    """The costs above, as step lines."""
    steps = [("classic", 1, COSTS.classic_step_ms), *(("verify", rows, ms) for rows, ms in COSTS.verify_ms.items())]
    steps += [("draft_round", count, ms) for count, ms in COSTS.drafting_ms.items()]
    return [
        StepLine.model_validate(
            {
                "case": case_id("decode"),
                "step": step,
                "rows": rows,
                "context_tokens": 312,
                "seconds": tuple(ms / 1000 * (1 + 0.01 * place) for place in (-1, 0, 1)),
            }
        )
        for step, rows, ms in steps
    ]


def with_curve() -> list[AnyLine]:
    """The good run with its steps timed at every block size."""
    lines = run_lines()
    first = next(place for place, line in enumerate(lines) if isinstance(line, StepLine))
    kept = [line for line in lines if not isinstance(line, StepLine)]
    return [*kept[:first], *curve_lines(), *kept[first:]]


def oracle_of(lines: list[AnyLine]) -> OracleFigures:
    (case,) = record_of(lines).of_kind("throughput")
    (figures,) = case.oracle
    return figures


def test_the_record_holds_costs_prediction_and_measurement() -> None:
    """Guards against figures under other names than design fixes, and a table that drifts from them."""
    lines = with_curve()
    record = record_of(lines)
    (case,) = record.of_kind("throughput")
    figures = oracle_of(lines)
    four = next(point for point in figures.points if point.block_size == 4)
    assert four.verify_ms == pytest.approx(19.0)
    assert four.draft_step_ms == pytest.approx(1.0)
    assert figures.classic_step_ms == 10.0
    assert four.measured_speedup == case.arms[0].speedup
    assert case.steps[0].predicted_speedup == four.predicted_speedup
    assert [figures.block_size for figures in case.steps] == [4]  # one detailed table, for the arm's block size
    page = steps_section(record, "stem")
    row = next(line for line in page.splitlines() if line.startswith("| 4 | 19.00 |"))
    assert f"{four.predicted_speedup:.2f}x" in row
    assert f"{four.measured_speedup:.2f}x" in row
    assert "Break-even: best block size" in page
    names = {"predicted_speedup", "break_even_acceptance", "verify_ms", "draft_step_ms"}
    assert names <= set(json.loads(record_json(record))["cases"][-1]["oracle"][0]["points"][0])


def test_the_plot_shows_what_the_table_says() -> None:
    """Guards against a plot without its figures: every block size and its prediction stand in it as text."""
    record = record_of(with_curve())
    name = "decode-oracle.svg"
    assert name in [name for case in record.cases for name, _ in plot_names(case)]
    text = draw_plots(record)[name]
    for point in oracle_of(with_curve()).points:
        assert f"block size {point.block_size}" in text
        assert f"{point.predicted_speedup:.2f}x" in text
    assert "data/stem/decode-oracle.svg" in steps_section(record, "stem")


def test_no_prediction_where_tokens_differ() -> None:
    """Guards against a speed-up that comes in by the back door: with one wrong token the oracle keeps costs alone."""
    lines = change(with_curve(), lambda line: isinstance(line, ArmLine) and line.slot == "arm", sha256="b" * 64)
    figures = oracle_of(lines)
    assert all(point.predicted_speedup is None and point.measured_speedup is None for point in figures.points)
    assert (figures.advice, figures.best_block_size) == ("", None)
    assert not re.search(r"[0-9]x\b", steps_section(record_of(lines), "stem"))


def test_older_records_have_no_oracle() -> None:
    """Guards against a committed record.json that changes by itself: without drafting lines the key is absent."""
    assert "oracle" not in json.loads(record_json(record_of(run_lines())))["cases"][-1]
    assert arm_line(0, "arm", 10.0, "code", "a").process is None
