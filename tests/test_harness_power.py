"""The shipped verdict on simulated runs: how often it errs, what it finds, and what `harness power` proposes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support_record import run_lines, write_record

from harness import power, resample, stats
from harness.cli import run_cli
from harness.power import Noise, Schedule

RUNS, RESAMPLES = 2000, 999  # many runs matter here, not many resamples: the rule itself is held by the first test
SCHEDULES = (
    Schedule(6),
    Schedule(6, processes=3, order="abba", null_blocks=1),
    Schedule(12, processes=2, smallest_effect=0.005),
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_simulation_judges_as_the_run_does(schedule: Schedule) -> None:
    """Guards against a power that belongs to another rule than the one that ships: same verdict, run by run."""
    deltas, nulls, blocks = power.simulate(schedule, Noise(0.03), 0.04, runs=25)
    sizes = [place for place, size in enumerate(schedule.sizes) for _ in range(size)]
    verdicts = [
        stats.judge_deltas(
            list(deltas[run]),
            list(nulls[run]),
            schedule.smallest_effect,
            processes=sizes,
            null_blocks=list(blocks[run]),
        ).verdict
        for run in range(25)
    ]
    together = power.judge(schedule, deltas, nulls, blocks)
    for verdict in ("faster", "slower", "equivalent"):
        assert getattr(together, verdict) == pytest.approx(verdicts.count(verdict) / 25), verdict
    assert 0 < verdicts.count("faster") < 25  # both answers occur, so the comparison can fail


@pytest.mark.parametrize("generation", [0.01, 0.05, 0.15])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_arms_are_rarely_called_different(schedule: Schedule, generation: float) -> None:
    """Guards the false-positive rate of the shipped rule: A against A, at most 5 % verdicts, at any noise."""
    assert power.rates(schedule, Noise(generation), runs=RUNS, resamples=RESAMPLES).decided <= 0.05


def test_equal_arms_whose_processes_differ_need_several_processes() -> None:
    """Guards against a verdict on the luck of one process: with 2 % between processes one alone errs, three do not."""
    noise = Noise(0.01, process=0.02)
    assert power.rates(Schedule(6, processes=1), noise, runs=RUNS, resamples=RESAMPLES).decided > 0.10
    assert power.rates(Schedule(6, processes=3), noise, runs=RUNS, resamples=RESAMPLES).decided <= 0.05


def test_an_effect_at_the_smallest_of_interest_is_rarely_called_equivalent() -> None:
    """Guards against *equivalent* as a word for "not seen": an effect of just that size may be called so in 5 %."""
    for pairs in (6, 12):
        schedule = Schedule(pairs, order="abba", smallest_effect=0.03)
        assert power.rates(schedule, Noise(0.01), 0.03, runs=RUNS, resamples=RESAMPLES).equivalent <= 0.05
        assert power.rates(schedule, Noise(0.01), 0.0, runs=RUNS, resamples=RESAMPLES).equivalent >= 0.8


@pytest.mark.parametrize(
    ("schedule", "noise"),
    [(Schedule(6, order="abba"), Noise(0.02)), (Schedule(6, 3, "abba", 1), Noise(0.03, process=0.005))],
)
def test_an_injected_slowdown_is_found_with_the_repeats_proposed(schedule: Schedule, noise: Noise) -> None:
    """Guards the power of the rule: -5 % is found in at least 80 % of fresh runs at the proposed number of pairs."""
    proposal = power.propose(schedule, noise, -0.05, runs=500)
    assert proposal is not None
    assert proposal.schedule.pairs % schedule.processes == 0
    again = power.rates(proposal.schedule, noise, -0.05, runs=RUNS, seed=101, resamples=RESAMPLES)
    assert again.slower >= 0.8
    assert again.faster == 0
    assert proposal.false_positives <= 0.05


def test_a_proposal_grows_with_the_noise_and_ends_where_no_number_helps() -> None:
    """Guards against a constant: five times the noise takes far more pairs, and processes that differ too much none."""
    quiet = power.propose(Schedule(6), Noise(0.02), -0.05, runs=200)
    loud = power.propose(Schedule(6), Noise(0.05), -0.05, runs=200)
    assert quiet is not None
    assert loud is not None
    assert quiet.schedule.pairs < 20 < loud.schedule.pairs < 80
    assert power.propose(Schedule(6), Noise(0.01, process=0.08), -0.05, runs=100) is None
    with pytest.raises(ValueError, match="does not exceed"):
        power.propose(Schedule(6), Noise(0.02), 0.02)


def test_processes_are_drawn_before_pairs() -> None:
    """Guards against pairs pooled over processes: two processes that disagree widen the interval, pairs that do not."""
    deltas = (0.10,) * 6 + (0.20,) * 6
    apart, wide = resample.interval(deltas, (0,) * 6 + (1,) * 6)
    mixed, _ = resample.interval(deltas, (0, 1) * 6)
    assert apart == pytest.approx((0.1, 0.2))  # one resample in four draws the first process twice
    assert mixed[0] > 0.115
    assert mixed[1] < 0.185
    assert resample.interval(tuple(reversed(deltas)), (1,) * 6 + (0,) * 6) == (apart, wide)
    narrow, wider = resample.interval((0.10, 0.11, 0.12, 0.13, 0.14, 0.15), (0,) * 6)
    assert wider[0] < narrow[0] < narrow[1] < wider[1]
    with pytest.raises(ValueError, match="do not pair"):
        resample.interval(deltas, (0, 0))


def test_weights_are_shares_and_unequal_processes_are_resampled_at_their_own_size() -> None:
    """Guards against a pair of a small process that is drawn as often as one of a large one."""
    shares = resample.weights((2, 4), 4000)
    assert shares.sum(axis=1) == pytest.approx(1.0)
    assert shares.min() == 0
    assert set((shares[:, :2].sum(axis=1) == 0).tolist()) == {True, False}  # whole processes are left out
    means = shares.mean(axis=0)
    assert means[:2] == pytest.approx(means[0], rel=0.1)
    assert means[2:] == pytest.approx(means[2], rel=0.1)


def test_noise_of_a_run_by_hand() -> None:
    """A null delta is two generations apart; processes differ by what their pairs do not explain."""
    assert power.noise_of((0.02, -0.02), (0.5, 0.5), ()).generation == pytest.approx(0.02 / 2**0.5)
    spread = power.noise_of((0.02, -0.02, 0.02, -0.02), (0.10, 0.10, 0.20, 0.20), (0, 0, 1, 1))
    assert spread.process == pytest.approx(0.0707, abs=1e-4)
    assert power.noise_of((0.02,) * 4, (0.10, 0.20, 0.12, 0.18), (0, 0, 1, 1)).process == 0.0


# ---- the command ----------------------------------------------------------------------------------------------------


def test_power_takes_noise_from_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against planning with a guess where a record holds the machine's own noise."""
    page = write_record(tmp_path, run_lines()).paths.page
    assert run_cli(["power", "--record", str(page), "--effect", "-5%", "--runs", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["noise"] == pytest.approx(((0.004**2 + 0.009**2 + 0.004**2) / 6) ** 0.5, rel=0.01)
    assert found["proposed"]["repeats"] == 6
    assert found["proposed"]["power"] > 0.9


def test_power_of_a_spec_says_what_its_own_repeats_find(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a spec that is measured for an hour and could never have resolved its question."""
    asked = ["power", "specs/gemma4_nano.yaml", "--noise", "10%", "--effect", "5%", "--runs", "100"]
    assert run_cli(asked) == 0
    said = capsys.readouterr().out
    assert said.startswith("specs/gemma4_nano.yaml::decode: ")
    assert "as it stands, 6 repeats: +5 % found in" in said
    assert "proposed:" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--effect", "5%"], "either --noise or --record"),
        (["--effect", "1%", "--noise", "2%"], "smallest effect of interest is 2 %"),
        (["--effect", "5%", "--noise", "0"], "must be positive"),
        (["--effect", "much", "--noise", "2%"], "is no share"),
        (["--effect", "5%", "--noise", "nan"], "is no share"),
        (["--effect", "5%", "--record", "nowhere.md"], "no such record"),
        (["specs/kernels_gemma4.yaml", "--effect", "5%", "--noise", "2%"], "no throughput check"),
    ],
)
def test_power_refuses_what_it_cannot_plan(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a traceback or a silent default for a question without an answer."""
    assert run_cli(["power", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
