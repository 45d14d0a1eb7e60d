"""What a schedule can find, and how many pairs it takes: the shipped verdict on simulated runs. Pure; numpy is late.

A simulated generation's rate is the true one times exp(noise); a process shifts its arms' ratio by a share of its own.
A run is then judged by `harness.stats.judge_deltas`' rule, for many runs at once; `tests/test_harness_power.py` holds
both to the same verdicts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from harness import resample
from harness.stats import INTERVAL_PAIRS

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

RUNS = 1000
SEED = 7
TARGET = 0.8
MOST_PAIRS = 1000
SEARCH_RESAMPLES = 999  # while searching; what is stated of a proposal comes from the full rule
GUARD = 2.0  # standard errors of the simulation that a proposal must clear its target by


@dataclass(frozen=True)
class Schedule:
    """What a spec fixes before the run."""

    pairs: int
    processes: int = 1
    order: Literal["bracket", "abba"] = "bracket"
    null_blocks: int = 0  # at each end of each process
    smallest_effect: float = 0.02

    @property
    def sizes(self) -> tuple[int, ...]:
        """Pairs of each process, shared out as the run does."""
        ends = [place * self.pairs // self.processes for place in range(self.processes + 1)]
        return tuple(end - begin for begin, end in pairwise(ends))


@dataclass(frozen=True)
class Noise:
    """Relative standard deviations: of one generation's rate, and of an arm's ratio between processes."""

    generation: float
    process: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Shares of simulated runs by verdict; the rest is unresolved."""

    faster: float
    slower: float
    equivalent: float

    @property
    def decided(self) -> float:
        """Runs that say faster or slower: on equal arms, the false-positive rate."""
        return self.faster + self.slower

    def found(self, effect: float) -> float:
        """Runs that say what is true of an effect."""
        return self.faster if effect > 0 else self.slower


@dataclass(frozen=True)
class Proposal:
    """A number of pairs with what it was simulated to do."""

    schedule: Schedule
    power: float
    false_positives: float


def noise_of(nulls: Sequence[float], deltas: Sequence[float], processes: Sequence[int]) -> Noise:
    """The noise that a run's own deltas show: a null delta is the difference of two generations.

    Processes differ by the spread of their mean deltas beyond what their pairs' own spread explains (one-way analysis
    of variance); 0 for one process, or where it explains all.
    """
    generation = math.sqrt(statistics.fmean(null * null for null in nulls) / 2)
    groups = [
        [delta for delta, own in zip(deltas, processes, strict=False) if own == process]
        for process in sorted(set(processes))
    ]
    within = [statistics.variance(group) for group in groups if len(group) > 1]
    if len(groups) < 2 or len(within) != len(groups):
        return Noise(generation)
    between = statistics.variance([statistics.fmean(group) for group in groups])
    explained = statistics.fmean(within) / (len(deltas) / len(groups))
    return Noise(generation, math.sqrt(max(between - explained, 0.0)))


def simulate(
    schedule: Schedule, noise: Noise, effect: float = 0.0, *, runs: int = RUNS, seed: int = SEED
) -> tuple[Array, Array, Array]:
    """Deltas [runs, pairs], their bracket nulls [runs, pairs], and null block deltas [runs, blocks] of whole runs."""
    import numpy as np

    random = np.random.Generator(np.random.PCG64(seed))
    turns = 2 if schedule.order == "abba" else 1
    blocks = 2 * schedule.null_blocks * schedule.processes
    rates = np.exp(random.normal(0.0, noise.generation, (runs, schedule.pairs + blocks, 2 + turns)))
    ratio = (1 + effect) * np.exp(random.normal(0.0, noise.process, (runs, schedule.processes)))
    opening, closing = rates[..., 0], rates[..., -1]
    running = turns / (1 / rates[..., 1:-1]).sum(axis=-1)  # tokens over seconds, pooled
    deltas = running / ((opening + closing) / 2)
    pairs = schedule.pairs
    own = deltas[:, :pairs] * np.repeat(ratio, schedule.sizes, axis=1) - 1
    return own, (closing / opening - 1)[:, :pairs], deltas[:, pairs:] - 1


def judge(
    schedule: Schedule, deltas: Array, nulls: Array, blocks: Array, *, resamples: int = resample.RESAMPLES
) -> Rates:
    """The shipped rule on many runs at once, from six pairs on."""
    import numpy as np

    if schedule.pairs < INTERVAL_PAIRS:
        raise ValueError(f"{schedule.pairs} pairs are judged one by one; a simulation starts at {INTERVAL_PAIRS}")
    low, high, wide_low, wide_high = resample.intervals(deltas, schedule.sizes, resamples=resamples)
    noise = np.concatenate((nulls, blocks), axis=1)
    floor = np.maximum(schedule.smallest_effect, np.abs(noise.mean(axis=1)))
    faster, slower = low > floor, high < -floor
    within = (wide_low > -schedule.smallest_effect) & (wide_high < schedule.smallest_effect)
    equivalent = within & ~faster & ~slower
    return Rates(float(faster.mean()), float(slower.mean()), float(equivalent.mean()))


def rates(
    schedule: Schedule,
    noise: Noise,
    effect: float = 0.0,
    *,
    runs: int = RUNS,
    seed: int = SEED,
    resamples: int = resample.RESAMPLES,
) -> Rates:
    """How often a schedule gives each verdict under an effect."""
    return judge(schedule, *simulate(schedule, noise, effect, runs=runs, seed=seed), resamples=resamples)


def propose(
    schedule: Schedule, noise: Noise, effect: float, *, target: float = TARGET, runs: int = RUNS, seed: int = SEED
) -> Proposal | None:
    """The fewest pairs, a multiple of the processes, that find the effect in a share `target` of runs; None: too many.

    The simulated power must clear the target by two of its own standard errors. ValueError for an effect that does not
    exceed the smallest effect of interest: the rule never states it.
    """
    if abs(effect) <= schedule.smallest_effect:
        smallest = f"the smallest effect of {100 * schedule.smallest_effect:g} %"
        raise ValueError(f"an effect of {100 * effect:g} % does not exceed {smallest}")
    step = schedule.processes
    bar = target + GUARD * math.sqrt(target * (1 - target) / runs)

    def power(count: int) -> float:
        tried = replace(schedule, pairs=count * step)
        return rates(tried, noise, effect, runs=runs, seed=seed, resamples=SEARCH_RESAMPLES).found(effect)

    fewest, most = math.ceil(INTERVAL_PAIRS / step), MOST_PAIRS // step
    high = fewest
    while power(high) < bar:
        fewest = high + 1
        if high >= most:
            return None
        high = min(2 * high, most)
    while fewest < high:
        middle = (fewest + high) // 2
        fewest, high = (fewest, middle) if power(middle) >= bar else (middle + 1, high)
    found = replace(schedule, pairs=high * step)
    # Other seeds than the search's: its own would flatter the number that it stopped at.
    seen = rates(found, noise, effect, runs=runs, seed=seed + 1).found(effect)
    return Proposal(found, seen, rates(found, noise, runs=runs, seed=seed + 2).decided)
