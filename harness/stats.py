"""Every figure a record shows is computed here: acceptance, paired deltas, the verdict and the cost model.

Pure functions of raw measurements; the run's judgement and the record call the same ones, so they cannot disagree.
Standard library alone, except the bootstrap's numpy (and scipy), imported when six or more pairs ask for an interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness import counters, resample

Verdict = Literal["faster", "slower", "equivalent", "unresolved"]

MIN_PAIRS = 3  # below it no verdict: one or two deltas beat one or two null deltas by chance too often
INTERVAL_PAIRS = 6  # from here on a bootstrap interval says something; below it only returns its own extremes
MAX_DISCARDED = 0.2  # a larger share of discarded pairs voids the run
CONFIDENCE, RESAMPLES, SEED = resample.CONFIDENCE, resample.RESAMPLES, resample.SEED


# ---- rates and acceptance -------------------------------------------------------------------------------------------


def decode_tok_s(tokens: int, decode_s: float) -> float:
    """Decode rate in tokens/s: the first token comes from prefill, so (tokens - 1) / decode_s."""
    if tokens < 2 or decode_s <= 0:
        raise ValueError(f"a decode rate needs at least 2 tokens and a positive time, got {tokens} in {decode_s} s")
    return (tokens - 1) / decode_s


def _checked(accepted: Sequence[int], drafted: Sequence[int]) -> None:
    if len(accepted) != len(drafted):
        raise ValueError(f"{len(accepted)} rounds of accepted counts against {len(drafted)} rounds of drafted counts")
    for number, (got, offered) in enumerate(zip(accepted, drafted, strict=True)):
        if not 0 <= got <= offered:
            raise ValueError(f"round {number} accepted {got} of {offered} drafts")


def acceptance_rate(accepted: Sequence[int], drafted: Sequence[int]) -> float:
    """Accepted drafts over drafts really offered (a short round offers fewer); 0.0 when nothing was drafted."""
    _checked(accepted, drafted)
    offered = sum(drafted)
    return sum(accepted) / offered if offered else 0.0


def acceptance_length(accepted: Sequence[int]) -> float:
    """Tokens per verify, the bonus token included: 1 + accepted / rounds."""
    if not accepted:
        raise ValueError("an acceptance length needs at least one round")
    return 1.0 + sum(accepted) / len(accepted)


def accepted_counts(accepted: Sequence[int]) -> tuple[int, ...]:
    """Rounds in which draft i was accepted, for each position i that was ever accepted."""
    return tuple(sum(1 for got in accepted if got > i) for i in range(max(accepted, default=0)))


def offered_counts(drafted: Sequence[int]) -> tuple[int, ...]:
    """Rounds in which draft i existed: the denominators of `accepted_at`."""
    return tuple(sum(1 for offered in drafted if offered > i) for i in range(max(drafted, default=0)))


def accepted_at(accepted: Sequence[int], drafted: Sequence[int]) -> tuple[float, ...]:
    """Per-position acceptance: rounds that accepted draft i over rounds in which draft i existed."""
    _checked(accepted, drafted)
    offered = offered_counts(drafted)
    taken = accepted_counts(accepted) + (0,) * len(offered)
    return tuple(taken[i] / count for i, count in enumerate(offered))


def counter_problem(
    accepted: Sequence[int], drafted: Sequence[int], *, tokens: int | None = None, block_size: int | None = None
) -> str | None:
    """First broken identity between a generation's counters, in words with both sides, or None."""
    found = counters.generation_violations(accepted, drafted, tokens=tokens, block_size=block_size)
    first = next(found, None)
    return None if first is None else str(first)


# ---- pairs and their verdict ----------------------------------------------------------------------------------------


def paired_delta(arm: float, opening: float, closing: float) -> float:
    """How much faster an arm is than its own repeat's classic brackets: arm / mean(brackets) - 1."""
    return arm / ((opening + closing) / 2) - 1


def null_delta(opening: float, closing: float) -> float:
    """Classic against classic: closing / opening - 1, the noise of the same repeat."""
    return closing / opening - 1


def null_range(nulls: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest null delta."""
    if not nulls:
        raise ValueError("a null range needs at least one null delta")
    return min(nulls), max(nulls)


@dataclass(frozen=True)
class VerdictResult:
    """A verdict with the sentence that explains it; the interval only from six pairs on."""

    verdict: Verdict
    reason: str
    interval: tuple[float, float] | None = None


def bootstrap_interval(deltas: Sequence[float], *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % BCa bootstrap interval of the mean delta, fixed seed: the rule of records whose lines name no process."""
    if len(deltas) < 2:
        raise ValueError(f"a bootstrap interval needs at least 2 deltas, got {len(deltas)}")
    if max(deltas) - min(deltas) <= 1e-12 * max(1.0, abs(deltas[0])):
        return min(deltas), max(deltas)  # no spread: BCa divides by it
    import numpy as np
    from scipy import stats

    result = stats.bootstrap(
        (np.asarray(deltas, dtype=float),),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=resamples,
        method="BCa",
        rng=np.random.default_rng(SEED),
        vectorized=True,
    )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    if math.isnan(low) or math.isnan(high):  # a jackknife without spread: fall back to what was seen
        return min(deltas), max(deltas)
    return low, high


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def judge_deltas(
    deltas: Sequence[float],
    nulls: Sequence[float],
    smallest_effect: float,
    *,
    processes: Sequence[int] | None = None,
    null_blocks: Sequence[float] = (),
    discarded: int = 0,
    resamples: int = RESAMPLES,
) -> VerdictResult:
    """The verdict on paired deltas against their null deltas and those of null blocks.

    Fewer than six pairs: every delta must lie beyond the largest |null|. Six or more: the 95 % interval of the deltas
    must lie beyond both the smallest effect of interest and |mean null|. Equivalent needs a wider interval
    (`resample.wide_tail`) inside +- the smallest effect. Everything else is unresolved, never "equal". `processes`
    gives each pair's process: the interval then draws processes before pairs. More than a fifth of the pairs
    `discarded` voids the run.
    """
    if (deltas and not nulls) or len(deltas) % max(len(nulls), 1):
        raise ValueError(f"{len(deltas)} deltas and {len(nulls)} null deltas do not pair")
    if not deltas and not discarded:
        raise ValueError("no deltas and no null deltas do not pair")
    count = len(deltas)
    if discarded > MAX_DISCARDED * (count + discarded):
        limit = f"more than {100 * MAX_DISCARDED:.0f} % voids the run"
        return VerdictResult("unresolved", f"{discarded} of {count + discarded} pairs were discarded; {limit}")
    if count < MIN_PAIRS:
        return VerdictResult("unresolved", f"{count} pairs are too few; a verdict needs at least {MIN_PAIRS}")
    noise = (*nulls, *null_blocks)
    if count < INTERVAL_PAIRS:
        floor = max(abs(null) for null in noise)
        if min(deltas) > floor:
            return VerdictResult("faster", f"all {count} deltas lie above {100 * floor:.1f} %, the largest |null|")
        if max(deltas) < -floor:
            return VerdictResult(
                "slower", f"all {count} deltas lie below minus the largest |null| of {100 * floor:.1f} %"
            )
        reason = f"not every delta lies beyond ±{100 * floor:.1f} %, the largest |null|"
        return VerdictResult("unresolved", reason + _advice(deltas, nulls, smallest_effect))
    if processes is None:
        interval = wide = bootstrap_interval(deltas, resamples=resamples)
    else:
        interval, wide = resample.interval(deltas, processes, resamples=resamples)
    low, high = interval
    floor = max(smallest_effect, abs(statistics.fmean(noise)))
    words = f"95 % interval {_percent(low)} to {_percent(high)}"
    if low > floor:
        return VerdictResult("faster", f"{words} lies above {100 * floor:.1f} %", interval)
    if high < -floor:
        return VerdictResult("slower", f"{words} lies below {-100 * floor:.1f} %", interval)
    if -smallest_effect < wide[0] and wide[1] < smallest_effect:
        return VerdictResult("equivalent", f"{words} lies within ±{100 * smallest_effect:.1f} %", interval)
    reason = f"{words} does not clear {100 * floor:.1f} % on either side"
    return VerdictResult("unresolved", reason + _advice(deltas, nulls, smallest_effect), interval)


def _advice(deltas: Sequence[float], nulls: Sequence[float], smallest_effect: float) -> str:
    """How many repeats would resolve an effect of the size seen, when that is larger than the smallest of interest."""
    effect, noise = statistics.fmean(deltas), statistics.pstdev(nulls, mu=0.0) / math.sqrt(2)
    if abs(effect) <= smallest_effect or noise == 0.0:
        return ""
    count = repeats_needed(noise, effect, smallest_effect)
    return f"; an effect of {_percent(effect)} would take about {count} repeats" if count > len(deltas) else ""


def repeats_needed(noise: float, effect: float, smallest_effect: float = 0.0) -> int:
    """Repeats to resolve `effect` with 80 % power, from the relative noise of one generation; never below six.

    A delta is one arm over the mean of two brackets, so its spread is noise * sqrt(1.5).
    """
    margin = abs(effect) - smallest_effect
    if margin <= 0:
        raise ValueError(f"an effect of {effect:g} does not exceed the smallest effect of {smallest_effect:g}")
    return max(INTERVAL_PAIRS, math.ceil(((1.960 + 0.842) * noise * math.sqrt(1.5) / margin) ** 2))


def bracket_drift(rates: Sequence[float]) -> float:
    """Spearman correlation of classic's rates with time: near +-1 the machine drifted during the run."""
    if len(rates) < 3:
        raise ValueError(f"drift needs at least 3 rates, got {len(rates)}")
    if len(set(rates)) == 1:
        return 0.0
    return statistics.correlation([float(i) for i in range(len(rates))], _ranks(rates))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; ties share the mean of their places."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


# ---- the cost model -------------------------------------------------------------------------------------------------


def median_ms(seconds: Sequence[float]) -> float:
    """Median of step times, in ms."""
    if not seconds:
        raise ValueError("a median needs at least one time")
    return 1000 * statistics.median(seconds)


def round_ms(verify_ms: float, draft_step_ms: float, block_size: int) -> float:
    """Cost of one round in ms: one verify and block_size - 1 draft steps."""
    return verify_ms + (block_size - 1) * draft_step_ms


def predicted_speedup(
    length: float, classic_step_ms: float, verify_ms: float, draft_step_ms: float, block_size: int
) -> float:
    """Speed-up that step times and an acceptance length predict: length * classic / round."""
    return length * classic_step_ms / round_ms(verify_ms, draft_step_ms, block_size)


def break_even_length(classic_step_ms: float, verify_ms: float, draft_step_ms: float, block_size: int) -> float:
    """Acceptance length at which MTP costs exactly what classic does."""
    return round_ms(verify_ms, draft_step_ms, block_size) / classic_step_ms


def break_even_acceptance(classic_step_ms: float, verify_ms: float, draft_step_ms: float, block_size: int) -> float:
    """Acceptance rate at break-even; above 1 no drafter can win, at or below 0 every one does."""
    if block_size < 2:
        raise ValueError("a block of one row drafts nothing")
    return (break_even_length(classic_step_ms, verify_ms, draft_step_ms, block_size) - 1) / (block_size - 1)


def ceiling_problem(speedup: float, block_size: int) -> str | None:
    """A speed-up above the block size is impossible, since a round emits at most block_size tokens per verify."""
    if speedup <= block_size:
        return None
    return f"a speed-up of {speedup:.2f} is impossible: a round emits at most block_size = {block_size} tokens"
