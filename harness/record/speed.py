"""Figures of speed from arm and step lines: repeats, paired deltas, verdict, cost model. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from harness import oracle, stats
from harness.pairs import NULL, Pair, arms_of, judge_pairs, pairs_of, pooled_rate
from harness.record.lines import ArmLine, FloorLine, StepLine
from harness.record.speed_model import (
    AcceptanceFigures,
    ArmFigures,
    DiscardFigures,
    FloorFigures,
    OracleFigures,
    OraclePoint,
    RepeatFigures,
    StepFigures,
    StepTime,
)

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


def arm_figures(
    lines: Sequence[ArmLine], smallest_effect: float, *, withhold: bool, no_verdict: str | None = None
) -> tuple[ArmFigures, ...]:
    """Figures of each arm, in order of appearance; with a reason for `no_verdict` it keeps its deltas, no more."""
    return tuple(one_arm(arm, lines, smallest_effect, withhold, no_verdict) for arm in arms_of(lines))


def one_arm(
    arm: str, lines: Sequence[ArmLine], smallest_effect: float, withhold: bool, no_verdict: str | None
) -> ArmFigures:
    """One arm against its brackets. Only whole repeats count, and of those the ones that telemetry does not discard."""
    own = [line for line in lines if line.arm == arm and line.slot == "arm"]
    whole, blocks = pairs_of(lines, arm), pairs_of(lines, NULL)
    pairs = [pair for pair in whole if not pair.disturbed]
    deltas, nulls = tuple(pair.delta for pair in pairs), tuple(pair.null for pair in pairs)
    null_blocks = tuple(block.delta for block in blocks if not block.disturbed)
    if withhold:
        judged = stats.VerdictResult("unresolved", WITHHELD)
    elif not whole:
        judged = stats.VerdictResult("unresolved", "no whole repeat was measured")
    elif no_verdict is not None:
        judged = stats.VerdictResult("unresolved", no_verdict)
    else:
        judged = judge_pairs(whole, blocks, smallest_effect)
    used = [line for pair in pairs for line in pair.own]
    opening = [line for pair in pairs for line in pair.lines if line.slot != "arm"]
    rate, brackets = pooled_rate(used), pooled_rate(opening)
    costs = {} if withhold else run_costs(used, opening)
    shown = bool(pairs) and not withhold
    final = shown and no_verdict is None
    processes = tuple(pair.process for pair in pairs if pair.process is not None)
    return ArmFigures(
        arm=arm,
        block_size=own[0].block_size,
        identical=all(_same_text(pair) for pair in whole),
        tokens=max(line.tokens for line in own),
        n=len(pairs),
        speedup=rate / brackets if final and rate and brackets else None,
        speedup_geomean=math.exp(statistics.fmean(math.log1p(delta) for delta in deltas)) if final else None,
        delta=deltas if shown else (),
        null=nulls,
        null_range=stats.null_range((*nulls, *null_blocks)) if nulls else None,
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
        repeats=tuple(_repeat(pair, withhold) for pair in pairs),
        processes=processes,
        null_block=null_blocks,
        discarded=tuple(
            DiscardFigures(repeat=pair.repeat, cause=found.cause, detail=found.detail)
            for pair in whole
            for found in pair.disturbed
        ),
    )


def _repeat(pair: Pair, withhold: bool) -> RepeatFigures:
    """One pair as a row."""
    own, outputs = pair.own, outputs_by_prompt(pair.lines)
    return RepeatFigures(
        repeat=pair.repeat,
        prompts=tuple(outputs),
        identical=_same_text(pair),
        open_tok_s=None if withhold else pair.opening,
        arm_tok_s=None if withhold else pair.running,
        close_tok_s=None if withhold else pair.closing,
        delta=None if withhold else pair.delta,
        null=pair.null,
        acceptance=acceptance_figures([m.accepted_per_round for m in own], [m.drafted_per_round for m in own]),
        distinct_tokens=min(line.distinct_tokens for line in own),
        process=pair.process,
    )


def _same_text(pair: Pair) -> bool:
    return all(len(hashes) == 1 for hashes in outputs_by_prompt(pair.lines).values())


def run_costs(arm: Sequence[ArmLine], brackets: Sequence[ArmLine]) -> dict[str, float]:
    """Where the time of the timed runs went, ms; a cost without its counter is absent."""
    totals = {
        "verify_ms": (sum(line.verify_s for line in arm), sum(len(line.accepted_per_round) for line in arm)),
        "draft_step_ms": (sum(line.draft_s for line in arm), sum(sum(line.drafted_per_round) for line in arm)),
        "classic_step_ms": (sum(line.decode_s for line in brackets), sum(line.tokens - 1 for line in brackets)),
        "round_ms": (sum(line.decode_s for line in arm), sum(len(line.accepted_per_round) for line in arm)),
    }
    return {name: 1000 * seconds / times for name, (seconds, times) in totals.items() if times > 0 and seconds > 0}


def step_figures(
    lines: Sequence[StepLine], arms: Sequence[ArmFigures], withhold: bool, floors: Sequence[FloorLine] = ()
) -> tuple[StepFigures, ...]:
    """Step times by context length and verify width, each with what they predict and the byte floor where known."""
    found: list[StepFigures] = []
    for context in sorted({line.context_tokens for line in lines}):
        here = [line for line in lines if line.context_tokens == context and line.seconds]
        floor = next((line for line in floors if line.context_tokens == context), None)
        widths = sorted({line.rows for line in here if line.step == "verify"})
        widths = [width for width in widths if width in {arm.block_size for arm in arms}] or widths[-1:]
        for width in widths or [1]:
            usable = [line for line in here if _of_width(line, width)]
            usable = [one_draft(line) if line.step == "draft_round" else line for line in usable]
            found.append(one_step(context, width, usable, arms, withhold, floor))
    return tuple(found)


def _of_width(line: StepLine, width: int) -> bool:
    """Whether a step line speaks about this block size; a one-pass drafter of older records has a line for each."""
    if line.step == "draft":
        return line.rows in (1, width)
    return line.rows == {"verify": width, "draft_round": width - 1}.get(line.step, line.rows)


def one_step(
    context: int,
    width: int,
    lines: Sequence[StepLine],
    arms: Sequence[ArmFigures],
    withhold: bool,
    floor: FloorLine | None = None,
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
        floor=floor_figures(floor, classic) if floor is not None else None,
    )


def floor_figures(line: FloorLine, classic_ms: float | None) -> FloorFigures | None:
    """The byte floor at one context; None for a stream that took no time."""
    seconds = stats.median_ms(line.stream_s) / 1000 if line.stream_s else 0.0
    if seconds <= 0:
        return None
    rate = line.stream_bytes / seconds
    floor_ms = 1000 * (line.weight_bytes + line.kv_bytes) / rate
    return FloorFigures(
        weight_bytes=line.weight_bytes,
        kv_bytes=line.kv_bytes,
        stream_gb_per_s=rate / 1e9,
        floor_ms=floor_ms,
        floor_share=floor_ms / classic_ms if classic_ms else None,
    )


def one_draft(line: StepLine) -> StepLine:
    """One draft of a round that was timed as a whole."""
    each = tuple(value / line.rows for value in line.seconds)
    return line.model_copy(update={"step": "draft", "rows": 1, "seconds": each})


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


def oracle_figures(lines: Sequence[StepLine], arms: Sequence[ArmFigures], withhold: bool) -> tuple[OracleFigures, ...]:
    """The break-even oracle at each context whose drafting was timed round by round; older records have none."""
    found = []
    for context in sorted({line.context_tokens for line in lines if line.step == "draft_round"}):
        here = [line for line in lines if line.context_tokens == context and line.seconds]
        classic = next((stats.median_ms(line.seconds) for line in here if line.step == "classic"), None)
        if classic is None:
            continue
        verify = {line.rows: stats.median_ms(line.seconds) for line in here if line.step == "verify"}
        drafting = {line.rows: stats.median_ms(line.seconds) for line in here if line.step == "draft_round"}
        measured: dict[int, ArmFigures] = {}
        for arm in arms:
            measured.setdefault(arm.block_size, arm)
        shares = {s: arm.acceptance.accepted_at for s, arm in measured.items() if arm.acceptance and not withhold}
        known = oracle.points(oracle.Costs(classic, verify, drafting), shares)
        found.append(
            OracleFigures(
                context_tokens=context,
                classic_step_ms=classic,
                one_row_verify_ms=verify.get(1),
                best_block_size=oracle.best_block_size(known),
                advice=oracle.advice(known),
                points=tuple(
                    OraclePoint(
                        **asdict(point),
                        measured_speedup=measured[point.block_size].speedup if point.block_size in measured else None,
                    )
                    for point in known
                ),
            )
        )
    return tuple(found)
