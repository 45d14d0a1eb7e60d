"""`throughput`: paired deltas against classic brackets with a null arm; acceptance; verdict.

Outputs are compared first, in the same children and on the same prompts: where tokens differ, no speed is stated.
Then each repeat runs classic, every arm, classic again on one prompt; the brackets of a repeat are its null arm.
ABBA blocks run the arms once more in reverse; null blocks run classic in the arms' place; fresh processes share the
repeats. All of that stands in the spec, so a resumed run neither adds a repeat nor takes one away.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness import coverage, disturbance, stats
from harness.checks.base import (
    Judgement,
    acceptance_note,
    acceptance_problem,
    counters_problem,
    inexact_note,
    not_engaged,
    of_type,
    prompt_inputs,
)
from harness.pairs import CLASSIC, NULL, Pair, judge_pairs, pairs_of
from harness.record import telemetry
from harness.record.lines import AnyLine, ArmLine, CheckLine, DecisionLine, FloorLine, Outcome, StepLine, Verdict
from harness.record.speed import arm_figures, step_figures
from harness.spec.model import Arm, Throughput
from harness.steadiness import unsteady_counters
from harness.step_bars import StepBar, step_bars

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case

STEP_SAMPLES = 40
COST_WIDTHS = 8  # block sizes whose cost is measured, at least
DRIFT, DRIFT_BRACKETS = 0.9, 6
WORST_FIRST: tuple[Verdict, ...] = ("slower", "unresolved", "equivalent", "faster")


@dataclass(frozen=True)
class Block:
    """One repeat or one null block of the schedule."""

    repeat: int  # its number in the record; null blocks follow the repeats
    process: int
    prompt: int
    null: bool = False


def schedule(check: Throughput, prompts: int) -> list[Block]:
    """Every block in the order it runs: each process opens and closes with its null blocks, repeats in between."""
    blocks: list[Block] = []
    nulls = check.repeats  # number of the next null block
    for process in range(check.processes):
        first, last = (share * check.repeats // check.processes for share in (process, process + 1))
        repeats = [Block(repeat, process, repeat % prompts) for repeat in range(first, last)]
        around = [
            Block(nulls + place, process, (nulls + place) % prompts, null=True)
            for place in range(2 * check.null_blocks)
        ]
        nulls += len(around)
        blocks += [*around[: check.null_blocks], *repeats, *around[check.null_blocks :]]
    return blocks


def slots(check: Throughput, null: bool) -> list[tuple[str, Arm | None]]:
    """What runs in one block, in order; None is classic."""
    arms: list[Arm | None] = [None] if null else [*check.arms]
    middle = [*arms, *reversed(arms)] if check.order == "abba" else arms
    return [("open", None), *(("arm", arm) for arm in middle), ("close", None)]


def measure(case: Case, context: RunContext) -> None:
    """Decide, compare outputs, warm up, run the blocks, then time single steps."""
    check = case.check
    assert isinstance(check, Throughput)
    prompts = prompt_inputs(check.prompts, case.folder)
    blocks = schedule(check, len(prompts))
    flags = [{}, *(arm.env for arm in check.arms)]
    with context.measuring(case):
        if check.processes > 1:
            context.renew(case, flags)
        if not _may_time(case, context, check, prompts):
            return
        done = len(prompts) * (1 + len(check.arms))
        total = done + sum(len(slots(check, block.null)) for block in blocks)
        if not _outputs_agree(case, context, check, prompts, total):
            return
        _warm_up(case, context, check, prompts, check.warmup - 1)  # comparing outputs was a pass
        prompt_tokens = process = 0
        for block in blocks:
            if block.process != process:
                process = block.process
                context.renew(case, flags)
                if not _may_time(case, context, check, prompts):
                    return
                _warm_up(case, context, check, prompts, max(check.warmup, 1))
            for slot, timed in slots(check, block.null):
                context.progress(case, done, total, f"{_block_words(block, check)} {slot}")
                line = _timed(case, context, block, slot, timed, prompts[block.prompt])
                context.emit(line)
                prompt_tokens, done = line.prompt_tokens, done + 1
        widest = max(COST_WIDTHS, *(arm.block_size or 1 for arm in check.arms))
        context.job(
            case,
            "steps",
            prompt=prompts[blocks[-1].prompt],
            contexts=check.step_contexts or (prompt_tokens + check.max_tokens // 2,),
            block_sizes=list(range(1, widest + 1)),
            samples=STEP_SAMPLES,
        )


def _may_time(case: Case, context: RunContext, check: Throughput, prompts: Sequence[Mapping[str, str]]) -> bool:
    """Whether every arm's process engages MTP on kernels that a certificate covers; each process states its own."""
    for arm in check.arms:
        asked = {"mode": "decide", "block_size": arm.block_size, "arm": arm.name, "prompts": prompts}
        if not context.job(case, "generate", env=arm.env, **asked)["engaged"]:
            return False
    return _refusal(check, case.id, context.lines) is None


def _block_words(block: Block, check: Throughput) -> str:
    if block.null:
        return f"null block {block.repeat - check.repeats + 1}"
    return f"repeat {block.repeat + 1}"


def _warm_up(
    case: Case, context: RunContext, check: Throughput, prompts: Sequence[Mapping[str, str]], passes: int
) -> None:
    """Untimed passes over classic and all arms."""
    for extra in range(passes):
        for chosen in (None, *check.arms):
            _generate(case, context, check, prompts[(extra + 1) % len(prompts)], chosen)


def _timed(
    case: Case, context: RunContext, block: Block, slot: str, arm: Arm | None, prompt: Mapping[str, str]
) -> ArmLine:
    """One timed generation with what the machine did meanwhile."""
    check = case.check
    assert isinstance(check, Throughput)
    before = context.telemetry(case)
    data = _generate(case, context, check, prompt, arm)
    after = context.telemetry(case)
    foreign, held = telemetry.foreign_cores(before, after), telemetry.throttled(before, after)
    found = disturbance.disturbances(check.discard, foreign, held)
    name = arm.name if arm is not None else NULL if slot == "arm" else CLASSIC
    fields = {key: data[key] for key in ("prompt_tokens", "tokens", "sha256", "distinct_tokens", "ttft_s", "decode_s")}
    fields |= {key: data[key] for key in ("accepted_per_round", "drafted_per_round", "verify_s", "draft_s")}
    return ArmLine.model_validate(
        {
            **fields,
            "case": case.id,
            "repeat": block.repeat,
            "slot": slot,
            "arm": name,
            "block_size": (arm.block_size if arm is not None else 1) or case.block_size,
            "prompt": prompt["name"],
            "load1": after.load1,
            "process": block.process,
            "disturbed": found,
            "before": before,
            "after": after,
        }
    )


def _refusal(check: Throughput, case: str, lines: Sequence[AnyLine]) -> Judgement | None:
    """Why these arms are not timed: two are one, or no certificate covers one. None for lines without statements."""
    paths = coverage.arm_paths(lines, case)
    if not paths:
        return None
    identical = coverage.identical_arms(lines, case)
    if identical:
        return Judgement("fail", f"{identical}; nothing was timed")
    longest = {name: path.longest_prompt for name, path in paths.items()}
    reach = {arm.name: longest.get(arm.name, 0) + check.max_tokens for arm in check.arms}
    refused = coverage.refusals(lines, case, reach)
    arm, reason = next(iter(refused.items()), ("", ""))
    return Judgement("declined", f"{arm}: {reason}; no speed is stated") if refused else None


def _generate(
    case: Case, context: RunContext, check: Throughput, prompt: Mapping[str, str], arm: Arm | None
) -> dict[str, Any]:
    """One generation: classic, or an arm in the child of its flags."""
    return context.job(
        case,
        "generate",
        env=arm.env if arm is not None else {},
        mode="mtp" if arm is not None else "classic",
        block_size=arm.block_size if arm is not None else 1,
        prompt=prompt,
        max_tokens=check.max_tokens,
        ignore_stop=check.ignore_stop,
    )


def _outputs_agree(
    case: Case, context: RunContext, check: Throughput, prompts: Sequence[Mapping[str, str]], total: int
) -> bool:
    """Every prompt once per arm, untimed; a statement per arm and prompt. This is also the first warm-up pass."""
    agree, done = True, 0
    for prompt in prompts:
        context.progress(case, done, total, f"comparing outputs: {prompt['name']}")
        classic = _generate(case, context, check, prompt, None)
        for arm in check.arms:
            data = _generate(case, context, check, prompt, arm)
            same = (data["sha256"], data["tokens"]) == (classic["sha256"], classic["tokens"])
            agree = agree and same
            context.emit(
                CheckLine(
                    case=case.id,
                    name=f"{prompt['name']}: output of {arm.name}",
                    passed=same,
                    expected=f"{classic['tokens']} tokens, sha256 {classic['sha256'][:12]}",
                    found=f"{data['tokens']} tokens, sha256 {data['sha256'][:12]}",
                )
            )
        done += 1 + len(check.arms)
    return agree


# ---- judging --------------------------------------------------------------------------------------------------------


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Outputs first, then counters and floors, then the verdict on each arm's paired deltas."""
    check = case.check
    assert isinstance(check, Throughput)
    decisions, arms = of_type(lines, DecisionLine), of_type(lines, ArmLine)
    differing = next((line for line in of_type(lines, CheckLine) if not line.passed), None)
    if differing:
        what = f"{differing.name}: expected {differing.expected}, found {differing.found}"
        return Judgement("fail", f"{what}; tokens differ, so no speed is stated")
    moved = _moved_output(arms)
    if moved:
        return Judgement("fail", f"{moved}, so no speed is stated")
    declined = not_engaged(decisions)
    if declined:
        return Judgement("declined", declined.log_line)
    refused = _refusal(check, case.id, others or lines)
    if refused:
        return refused
    problem = counters_problem(arms)
    if problem:
        return Judgement("error", problem)
    unsteady = unsteady_counters(arms)
    if unsteady:
        return Judgement("fail", unsteady)
    verdicts: list[Verdict] = []
    reasons: list[str] = []
    for arm in check.arms:
        judged = _judge_arm(arm, arms, check)
        if isinstance(judged, Judgement):
            return judged
        verdicts.append(judged.verdict)
        reasons.append(f"{arm.name}: {judged.verdict}, {judged.reason}")
    low = acceptance_problem(arms, case.block_size, check.min_acceptance)
    if low:
        return Judgement("fail", low)
    worst = min(verdicts, key=WORST_FIRST.index)
    drift = _drift(arms)
    if drift:
        reasons.append(drift)
    bars = _bars(case, check, lines)
    if missed := [bar.words for bar in bars if bar.met is False]:
        return Judgement("fail", "; ".join([*missed, *reasons]), worst)
    undecided = [bar.words for bar in bars if bar.met is None]
    outcome: Outcome = "unresolved" if worst == "unresolved" or undecided else "pass"
    met = [f"{len(bars)} bars met"] if bars and not undecided else undecided
    return Judgement(outcome, "; ".join([*reasons, *met]) + acceptance_note(arms) + inexact_note(decisions), worst)


def _bars(case: Case, check: Throughput, lines: Sequence[AnyLine]) -> tuple[StepBar, ...]:
    """The bars over the figures that the record will show."""
    arms = arm_figures(of_type(lines, ArmLine), check.smallest_effect, withhold=False)
    steps = step_figures(of_type(lines, StepLine), arms, False, of_type(lines, FloorLine))
    return step_bars(check.bars, case.block_size, arms, steps)


def _judge_arm(arm: Arm, lines: Sequence[ArmLine], check: Throughput) -> stats.VerdictResult | Judgement:
    """The verdict on one arm, or the judgement that it cannot have one."""
    runs = 2 if check.order == "abba" else 1
    for repeat in range(check.repeats):
        chosen = [line for line in lines if line.repeat == repeat and line.arm in (CLASSIC, arm.name)]
        if [line.slot for line in chosen] != ["open", *["arm"] * runs, "close"]:
            return Judgement("error", f"repeat {repeat + 1} of {check.repeats} is not complete for arm {arm.name}")
        if any(line.slot == "arm" and line.tokens > 1 and not line.accepted_per_round for line in chosen):
            return Judgement("fail", f"arm {arm.name}, repeat {repeat + 1}: no round ran")
        for line in chosen:
            try:
                stats.decode_tok_s(line.tokens, line.decode_s)
            except ValueError as error:
                return Judgement("error", f"repeat {repeat + 1}: {error}; ask for more tokens or set ignore_stop")
    pairs, blocks = pairs_of(lines, arm.name), pairs_of(lines, NULL)
    if len(blocks) != 2 * check.null_blocks * check.processes:
        asked = 2 * check.null_blocks * check.processes
        return Judgement("error", f"{len(blocks)} of {asked} null blocks are complete")
    impossible = stats.ceiling_problem(statistics.fmean(1 + pair.delta for pair in pairs), arm.block_size or 1)
    if impossible:
        return Judgement("fail", f"arm {arm.name}: {impossible}")
    judged = judge_pairs(pairs, blocks, check.smallest_effect)
    return replace(judged, reason=judged.reason + discard_note(pairs))


def discard_note(pairs: Sequence[Pair]) -> str:
    """How many pairs were left out, by cause; empty when none was."""
    causes = Counter(cause for pair in pairs for cause in sorted({found.cause for found in pair.disturbed}))
    dropped = sum(bool(pair.disturbed) for pair in pairs)
    words = ", ".join(f"{cause.replace('_', ' ')} {times}" for cause, times in causes.items())
    return f"; {dropped} of {len(pairs)} pairs discarded ({words})" if dropped else ""


def _drift(lines: Sequence[ArmLine]) -> str:
    """A note when classic's own rate rose or fell through the run; brackets cancel a steady drift, but say so."""
    rates = [stats.decode_tok_s(line.tokens, line.decode_s) for line in lines if line.arm == CLASSIC]
    if len(rates) < DRIFT_BRACKETS:
        return ""
    correlation = stats.bracket_drift(rates)
    return f"classic's rate drifted (rank correlation {correlation:+.2f})" if abs(correlation) > DRIFT else ""


def _moved_output(lines: Sequence[ArmLine]) -> str | None:
    """The first prompt whose timed runs did not all give the same ids, in words, or None.

    An arm that contradicts itself is not deterministic; that is another fault than an arm that contradicts classic.
    """
    outputs: dict[str, dict[str, list[tuple[str, int]]]] = {}
    for line in lines:
        outputs.setdefault(line.prompt, {}).setdefault(line.arm, []).append((line.sha256, line.tokens))
    for prompt, arms in outputs.items():
        if len({output for runs in arms.values() for output in runs}) == 1:
            continue
        words = f"prompt {prompt}: tokens differ between timed runs"
        for arm, runs in arms.items():
            if len(set(runs)) > 1:
                return f"{words}: {arm} is not deterministic, {len(set(runs))} outputs in {len(runs)} runs"
        return f"{words}: each arm repeats itself, but not classic"
    return None
