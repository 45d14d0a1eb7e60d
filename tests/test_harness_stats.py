"""Figures by hand: rates, acceptance, deltas, the verdict rule and the cost model."""

from __future__ import annotations

import random

import pytest

from harness import stats


def test_decode_rate_leaves_out_prefill_and_the_first_token() -> None:
    """Guards against dividing by prefill + decode (1.0 s + 2.0 s), which would say 33."""
    assert stats.decode_tok_s(100, 2.0) == pytest.approx(49.5)


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 1.0), (0, 1.0), (5, 0.0), (5, -1.0)])
def test_a_rate_of_nothing_is_refused(tokens: int, seconds: float) -> None:
    """Guards against an infinite or zero rate entering a delta."""
    with pytest.raises(ValueError, match="decode rate"):
        stats.decode_tok_s(tokens, seconds)


def test_acceptance_length_includes_the_bonus_token() -> None:
    """Guards against the two meanings of mean acceptance: 2.0 accepted per round is 3.0 emitted per verify."""
    accepted, drafted = (0, 4, 2), (4, 4, 4)
    assert sum(accepted) / len(accepted) == 2.0
    assert stats.acceptance_length(accepted) == 3.0
    assert stats.acceptance_rate(accepted, drafted) == pytest.approx(6 / 12)
    assert stats.accepted_at(accepted, drafted) == pytest.approx((2 / 3, 2 / 3, 1 / 3, 1 / 3))


def test_short_rounds_divide_by_the_drafts_they_offered() -> None:
    """Guards against dividing by the cap, which makes a round of one draft look bad."""
    accepted, drafted = (4, 1, 0), (4, 1, 4)
    assert stats.acceptance_rate(accepted, drafted) == pytest.approx(5 / 9)
    assert stats.offered_counts(drafted) == (3, 2, 2, 2)
    assert stats.accepted_counts(accepted) == (2, 1, 1, 1)
    assert stats.accepted_at(accepted, drafted) == pytest.approx((2 / 3, 1 / 2, 1 / 2, 1 / 2))


def test_no_drafts_is_rate_zero_and_no_rounds_has_no_length() -> None:
    """Guards against a division by zero at block size 1 and a made-up length of 1.0 without a round."""
    assert stats.acceptance_rate((0, 0), (0, 0)) == 0.0
    assert stats.accepted_at((0, 0), (0, 0)) == ()
    with pytest.raises(ValueError, match="at least one round"):
        stats.acceptance_length(())


@pytest.mark.parametrize(
    ("accepted", "drafted", "tokens", "block", "word"),
    [
        ((1, 2), (3,), 6, 4, "rounds of drafted"),
        ((4,), (3,), 6, 4, "accepted 4 of 3"),
        ((1, 2), (3, 4), 6, 4, "allows 3"),
        ((1, 2), (3, 3), 7, 4, "4..6"),
        ((1, 2), (3, 3), 3, 4, "4..6"),
    ],
)
def test_broken_counters_are_named(
    accepted: tuple[int, ...], drafted: tuple[int, ...], tokens: int, block: int, word: str
) -> None:
    """Guards against tokens counted twice or lost between rounds."""
    problem = stats.counter_problem(accepted, drafted, tokens=tokens, block_size=block)
    assert problem is not None
    assert word in problem


@pytest.mark.parametrize("tokens", [4, 5, 6])
def test_whole_and_cut_generations_reconcile(tokens: int) -> None:
    """1 from prefill, 2 + 3 from rounds; the last round may be cut inside its accepted drafts."""
    assert stats.counter_problem((1, 2), (3, 3), tokens=tokens, block_size=4) is None


def test_paired_and_null_deltas_by_hand() -> None:
    """12 tok/s between brackets of 10 and 10.2 is +18.8 %; the brackets themselves differ by +2 %."""
    assert stats.paired_delta(12.0, 10.0, 10.2) == pytest.approx(12 / 10.1 - 1)
    assert stats.null_delta(10.0, 10.2) == pytest.approx(0.02)
    assert stats.null_range((0.02, -0.01, 0.0)) == (-0.01, 0.02)


def test_brackets_cancel_linear_drift() -> None:
    """Guards against arms run far apart: with rates falling 10 % over the run, interleaved arms show no difference."""
    rates = [100 - 10 * i / 8 for i in range(9)]  # open, arm, close, three times
    deltas = [stats.paired_delta(rates[3 * r + 1], rates[3 * r], rates[3 * r + 2]) for r in range(3)]
    nulls = [stats.null_delta(rates[3 * r], rates[3 * r + 2]) for r in range(3)]
    assert max(map(abs, deltas)) < 1e-12
    assert stats.judge_deltas(deltas, nulls, 0.01).verdict == "unresolved"
    assert stats.bracket_drift([rates[i] for i in (0, 2, 3, 5, 6, 8)]) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("deltas", "nulls", "verdict"),
    [
        ((0.40, 0.45, 0.50), (0.01, -0.02, 0.0), "faster"),
        ((-0.40, -0.45, -0.50), (0.01, -0.02, 0.0), "slower"),
        ((0.40, 0.01, 0.50), (0.01, -0.02, 0.0), "unresolved"),
        ((0.05, 0.04, 0.06), (0.01, -0.06, 0.0), "unresolved"),
        ((0.05, 0.05, 0.05, 0.05, 0.05, 0.05), (0.0,) * 6, "faster"),
        ((0.001, -0.001, 0.002, 0.0, 0.001, -0.002), (0.001,) * 6, "equivalent"),
        ((0.03, 0.04, 0.03, 0.04, 0.03, 0.04), (0.08,) * 6, "unresolved"),
        ((0.10, -0.10, 0.08, -0.07, 0.02, 0.01), (0.01,) * 6, "unresolved"),
        ((-0.06, -0.05, -0.06, -0.05, -0.06, -0.05), (0.01,) * 6, "slower"),
    ],
)
def test_verdict_rule(deltas: tuple[float, ...], nulls: tuple[float, ...], verdict: str) -> None:
    """One example for each branch of the rule, both sides of six pairs."""
    assert stats.judge_deltas(deltas, nulls, 0.02).verdict == verdict


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_pairs_never_resolve(count: int) -> None:
    """Guards against a headline from a single lucky repeat."""
    result = stats.judge_deltas((0.9,) * count, (0.0,) * count, 0.02)
    assert result.verdict == "unresolved"
    assert "too few" in result.reason


@pytest.mark.parametrize(("deltas", "nulls"), [((), ()), ((0.1, 0.2, 0.3), ()), ((0.1, 0.2, 0.3), (0.0, 0.1))])
def test_deltas_without_their_nulls_are_refused(deltas: tuple[float, ...], nulls: tuple[float, ...]) -> None:
    """Guards against a verdict whose null arm is missing or of another run."""
    with pytest.raises(ValueError, match="do not pair"):
        stats.judge_deltas(deltas, nulls, 0.02)


def _simulate(rng: random.Random, pairs: int, effect: float, noise: float) -> stats.VerdictResult:
    deltas, nulls = [], []
    for _ in range(pairs):
        opening, arm, closing = (100 * (1 + rng.gauss(0, noise)) for _ in range(3))
        deltas.append(stats.paired_delta(arm * (1 + effect), opening, closing))
        nulls.append(stats.null_delta(opening, closing))
    return stats.judge_deltas(deltas, nulls, 0.01, resamples=499)


@pytest.mark.parametrize("pairs", [3, 6])
def test_same_against_same_is_rarely_called_a_difference(pairs: int) -> None:
    """Guards the false-positive rate of the shipped rule: A against A at 2 % noise, 400 runs, at most 5 % verdicts."""
    rng = random.Random(7)
    verdicts = [_simulate(rng, pairs, 0.0, 0.02).verdict for _ in range(400)]
    assert sum(verdict in ("faster", "slower") for verdict in verdicts) <= 20


def test_an_injected_effect_is_found_with_the_repeats_it_proposes() -> None:
    """Guards the power of the rule: +5 % at 2 % noise is found in at least 80 % of runs of the proposed length."""
    pairs = stats.repeats_needed(0.02, 0.05, 0.01)
    assert pairs == 6
    rng = random.Random(11)
    found = sum(_simulate(rng, pairs, 0.05, 0.02).verdict == "faster" for _ in range(200))
    assert found >= 160


def test_more_noise_asks_for_more_repeats() -> None:
    """Guards against a gate of 3 % under a spread of 11 %: it says how many repeats that takes."""
    assert stats.repeats_needed(0.11, 0.03) > 100
    with pytest.raises(ValueError, match="does not exceed"):
        stats.repeats_needed(0.02, 0.01, 0.01)


def test_an_unresolved_effect_says_what_it_would_take() -> None:
    """Guards against "unresolved" as a dead end; nothing is promised for an effect that is too small to matter."""
    result = stats.judge_deltas((0.05, 0.06, 0.01), (0.05, -0.06, 0.04), 0.01)
    assert result.verdict == "unresolved"
    assert "an effect of +4.0 % would take about" in result.reason
    assert "would take" not in stats.judge_deltas((0.005, -0.001, 0.002), (0.05, -0.06, 0.04), 0.01).reason


def test_interval_is_the_same_each_time() -> None:
    """Guards against a record that cannot be recomputed from its raw lines."""
    deltas = (0.41, 0.44, 0.47, 0.43, 0.40, 0.46)
    first = stats.bootstrap_interval(deltas)
    assert first == stats.bootstrap_interval(deltas)
    assert min(deltas) <= first[0] < first[1] <= max(deltas)


def test_cost_model_by_hand() -> None:
    """Classic 8 ms, verify 9 ms, draft 1 ms, block 4: a round costs 12 ms, so length 1.5 breaks even, 3.0 doubles."""
    assert stats.round_ms(9.0, 1.0, 4) == 12.0
    assert stats.break_even_length(8.0, 9.0, 1.0, 4) == 1.5
    assert stats.break_even_acceptance(8.0, 9.0, 1.0, 4) == pytest.approx(0.5 / 3)
    assert stats.predicted_speedup(3.0, 8.0, 9.0, 1.0, 4) == 2.0
    assert stats.median_ms((0.001, 0.010, 0.002)) == 2.0


def test_best_block_size_of_known_costs() -> None:
    """Verify costs 300 + 109 n: at a length that saturates at 2, the model prefers three rows over four."""
    lengths = {2: 1.70, 3: 2.00, 4: 2.01}
    speedups = {b: stats.predicted_speedup(lengths[b], 409.0, 300.0 + 109.0 * b, 5.0, b) for b in lengths}
    assert speedups[3] > speedups[4]


@pytest.mark.parametrize(("speedup", "impossible"), [(3.9, False), (4.0, False), (4.01, True), (6.0, True)])
def test_a_speedup_above_the_block_size_is_impossible(speedup: float, impossible: bool) -> None:
    """Guards against a clock or counter fault that would read as a triumph."""
    assert (stats.ceiling_problem(speedup, 4) is not None) is impossible
