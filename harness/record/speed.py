"""Figures of speed from arm and step lines: repeats, paired deltas, verdict, cost model. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from harness import stats
from harness.record.lines import ArmLine, StepLine
from harness.record.model import AcceptanceFigures, ArmFigures, RepeatFigures, StepFigures, StepTime

WITHHELD = "withheld: MTP's tokens differ from classic's in this run"
UNFINISHED = "the run stopped before all repeats were measured, and stopping early would pick the result"
NOT_JUDGED = "the case did not pass, so its deltas decide nothing"


def acceptance_figures(accepted: Iterable[Sequence[int]], drafted: Iterable[Sequence[int]]) -> AcceptanceFigures | None:
    """Acceptance over the rounds of several generations, pooled; None without a consistent round.

    Counts that contradict each other give None here and a named problem in `harness.record.evidence`.
    """
    taken = [count for rounds in accepted for count in rounds]
    offered = [count for rounds in drafted for count in rounds]
    if not taken or stats.counter_problem(taken, offered):
        return None
    return AcceptanceFigures(
        num_rounds=len(taken),
        num_drafted=sum(offered),
        num_accepted=sum(taken),
        acceptance_rate=stats.acceptance_rate(taken, offered),
        acceptance_length=stats.acceptance_length(taken),
        accepted_per_round=sum(taken) / len(taken),
        accepted_at=stats.accepted_at(taken, offered),
    )


def outputs_by_prompt(lines: Iterable[ArmLine]) -> dict[str, tuple[str, ...]]:
    """Distinct output hashes of each prompt over all arms and repeats; one hash means one text."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        found.setdefault(line.prompt, {})[line.sha256] = None
    return {prompt: tuple(hashes) for prompt, hashes in found.items()}


def is_bracketed(lines: Sequence[ArmLine]) -> bool:
    """Whether every repeat ran as open, arms, close, and repeats did not mix: what makes a delta paired."""
    order = {"open": 0, "arm": 1, "close": 2}
    places = [(line.repeat, order[line.slot]) for line in lines]
    return places == sorted(places)


def pooled_rate(lines: Sequence[ArmLine]) -> float | None:
    """Decode tokens over decode seconds of several generations; None when there is nothing to divide."""
    tokens = sum(line.tokens - 1 for line in lines)
    seconds = sum(line.decode_s for line in lines)
    return stats.decode_tok_s(tokens + 1, seconds) if tokens > 0 and seconds > 0 else None


def arm_figures(
    lines: Sequence[ArmLine], smallest_effect: float, *, withhold: bool, no_verdict: str | None = None
) -> tuple[ArmFigures, ...]:
    """Figures of each arm, in order of appearance; with a reason for `no_verdict` it keeps its deltas, no more."""
    arms = dict.fromkeys(line.arm for line in lines if line.slot == "arm")
    return tuple(one_arm(arm, lines, smallest_effect, withhold, no_verdict) for arm in arms)


def one_arm(
    arm: str, lines: Sequence[ArmLine], smallest_effect: float, withhold: bool, no_verdict: str | None
) -> ArmFigures:
    """One arm against its brackets. Only whole repeats count: open, arm and close all there."""
    own = [line for line in lines if line.arm == arm and line.slot == "arm"]
    repeats: list[RepeatFigures] = []
    paired: list[tuple[float, float]] = []
    for number in sorted({line.repeat for line in own}):
        rows = [line for line in lines if line.repeat == number]
        mine = [line for line in own if line.repeat == number]
        opening, running, closing = (
            pooled_rate(found)
            for found in ([r for r in rows if r.slot == "open"], mine, [r for r in rows if r.slot == "close"])
        )
        if opening is None or running is None or closing is None:
            continue
        delta, null = stats.paired_delta(running, opening, closing), stats.null_delta(opening, closing)
        paired.append((delta, null))
        outputs = outputs_by_prompt([line for line in rows if line.slot != "arm" or line.arm == arm])
        repeats.append(
            RepeatFigures(
                repeat=number,
                prompts=tuple(outputs),
                identical=all(len(hashes) == 1 for hashes in outputs.values()),
                open_tok_s=None if withhold else opening,
                arm_tok_s=None if withhold else running,
                close_tok_s=None if withhold else closing,
                delta=None if withhold else delta,
                null=null,
                acceptance=acceptance_figures(
                    [m.accepted_per_round for m in mine], [m.drafted_per_round for m in mine]
                ),
                distinct_tokens=min(line.distinct_tokens for line in mine),
            )
        )
    deltas, nulls = tuple(delta for delta, _ in paired), tuple(null for _, null in paired)
    if withhold:
        judged = stats.VerdictResult("unresolved", WITHHELD)
    elif not paired:
        judged = stats.VerdictResult("unresolved", "no whole repeat was measured")
    elif no_verdict is not None:
        judged = stats.VerdictResult("unresolved", no_verdict)
    else:
        judged = stats.judge_deltas(deltas, nulls, smallest_effect)
    whole = {repeat.repeat for repeat in repeats}
    brackets = pooled_rate([line for line in lines if line.slot != "arm" and line.repeat in whole])
    used = [line for line in own if line.repeat in whole]
    rate = pooled_rate(used)
    costs = {} if withhold else run_costs(used, [o for o in lines if o.slot != "arm" and o.repeat in whole])
    shown = bool(paired) and not withhold
    final = shown and no_verdict is None
    return ArmFigures(
        arm=arm,
        block_size=own[0].block_size,
        identical=all(repeat.identical for repeat in repeats),
        tokens=max(line.tokens for line in own),
        n=len(paired),
        speedup=rate / brackets if final and rate and brackets else None,
        speedup_geomean=math.exp(statistics.fmean(math.log1p(delta) for delta in deltas)) if final else None,
        delta=deltas if shown else (),
        null=nulls,
        null_range=stats.null_range(nulls) if nulls else None,
        interval=judged.interval,
        smallest_effect=smallest_effect,
        verdict=judged.verdict,
        verdict_reason=judged.reason,
        acceptance=acceptance_figures([o.accepted_per_round for o in own], [o.drafted_per_round for o in own]),
        distinct_tokens=min(line.distinct_tokens for line in own),
        ttft_ms=stats.median_ms([line.ttft_s for line in own]),
        verify_ms=costs.get("verify_ms"),
        draft_step_ms=costs.get("draft_step_ms"),
        classic_step_ms=costs.get("classic_step_ms"),
        round_ms=costs.get("round_ms"),
        repeats=tuple(repeats),
    )


def run_costs(arm: Sequence[ArmLine], brackets: Sequence[ArmLine]) -> dict[str, float]:
    """Where the time of the timed runs went, ms; a cost without its counter is absent."""
    totals = {
        "verify_ms": (sum(line.verify_s for line in arm), sum(len(line.accepted_per_round) for line in arm)),
        "draft_step_ms": (sum(line.draft_s for line in arm), sum(sum(line.drafted_per_round) for line in arm)),
        "classic_step_ms": (sum(line.decode_s for line in brackets), sum(line.tokens - 1 for line in brackets)),
        "round_ms": (sum(line.decode_s for line in arm), sum(len(line.accepted_per_round) for line in arm)),
    }
    return {name: 1000 * seconds / times for name, (seconds, times) in totals.items() if times > 0 and seconds > 0}


def step_figures(lines: Sequence[StepLine], arms: Sequence[ArmFigures], withhold: bool) -> tuple[StepFigures, ...]:
    """Step times by context length and verify width, each with what they predict."""
    found: list[StepFigures] = []
    for context in sorted({line.context_tokens for line in lines}):
        here = [line for line in lines if line.context_tokens == context and line.seconds]
        widths = sorted({line.rows for line in here if line.step == "verify"})
        for width in widths or [1]:
            usable = [line for line in here if _of_width(line, width)]
            found.append(one_step(context, width, usable, arms, withhold))
    return tuple(found)


def _of_width(line: StepLine, width: int) -> bool:
    """Whether a step line speaks about this block size; a drafter that proposes a block at once has a line for each."""
    if line.step == "verify":
        return line.rows == width
    return line.step != "draft" or line.rows in (1, width)


def one_step(
    context: int, width: int, lines: Sequence[StepLine], arms: Sequence[ArmFigures], withhold: bool
) -> StepFigures:
    """Step times at one context and one block size."""
    times = {line.step: step_time(line) for line in lines}
    medians = {step: time.median_ms for step, time in times.items()}
    classic, unpadded = medians.get("classic"), medians.get("classic_unpadded")
    verify, draft = medians.get("verify"), medians.get("draft")
    arm = next((arm for arm in arms if arm.block_size == width), None)
    predicted = predicted_unpadded = break_even = None
    if verify is not None and draft is not None and classic is not None and width > 1:
        break_even = stats.break_even_acceptance(classic, verify, draft, width)
        if arm is not None and arm.acceptance is not None and not withhold:
            length = arm.acceptance.acceptance_length
            predicted = stats.predicted_speedup(length, classic, verify, draft, width)
            if unpadded is not None:
                predicted_unpadded = stats.predicted_speedup(length, unpadded, verify, draft, width)
    return StepFigures(
        context_tokens=context,
        block_size=width,
        times=times,
        classic_step_ms=classic,
        unpadded_step_ms=unpadded,
        verify_ms=verify,
        draft_step_ms=draft,
        predicted_speedup=predicted,
        predicted_speedup_unpadded=predicted_unpadded,
        measured_speedup=arm.speedup if arm is not None else None,
        break_even_acceptance=break_even,
    )


def step_time(line: StepLine) -> StepTime:
    """Median and extremes of one step line."""
    return StepTime(
        median_ms=stats.median_ms(line.seconds),
        min_ms=1000 * min(line.seconds),
        max_ms=1000 * max(line.seconds),
        n=len(line.seconds),
        rows=line.rows,
        context_tokens=line.context_tokens,
    )
