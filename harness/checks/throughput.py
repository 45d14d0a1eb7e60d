"""`throughput`: paired deltas against classic brackets with a null arm; acceptance; verdict.

Outputs are compared first, in the same children and on the same prompts: where tokens differ, no speed is stated.
Then each repeat runs classic, every arm, classic again on one prompt; the brackets of a repeat are its null arm.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness import gate, stats
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
from harness.record.lines import AnyLine, ArmLine, CheckLine, DecisionLine, Outcome, Verdict
from harness.spec.model import Arm, Throughput

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case

CLASSIC = "classic"
STEP_SAMPLES = 40
DRIFT, DRIFT_BRACKETS = 0.9, 6
WORST_FIRST: tuple[Verdict, ...] = ("slower", "unresolved", "equivalent", "faster")


def measure(case: Case, context: RunContext) -> None:
    """Decide, compare outputs, warm up, run the repeats, then time single steps."""
    check = case.check
    assert isinstance(check, Throughput)
    prompts = prompt_inputs(check.prompts, case.folder)
    with context.measuring(case):
        for arm in check.arms:
            if not context.job(case, "generate", env=arm.env, mode="decide", block_size=arm.block_size)["engaged"]:
                return
        total = len(prompts) * (1 + len(check.arms)) + check.repeats * (2 + len(check.arms))
        if not _outputs_agree(case, context, check, prompts, total):
            return
        for extra in range(1, check.warmup):
            for chosen in (None, *check.arms):
                _generate(case, context, check, prompts[extra % len(prompts)], chosen)
        done = len(prompts) * (1 + len(check.arms))
        prompt_tokens = 0
        slots: list[tuple[str, Arm | None]] = [("open", None), *(("arm", arm) for arm in check.arms), ("close", None)]
        for repeat in range(check.repeats):
            prompt = prompts[repeat % len(prompts)]
            for slot, timed in slots:
                context.progress(case, done, total, f"repeat {repeat + 1} {slot}")
                data = _generate(case, context, check, prompt, timed)
                context.emit(_arm_line(case, repeat, slot, timed, prompt["name"], data))
                prompt_tokens, done = data["prompt_tokens"], done + 1
        context.job(
            case,
            "steps",
            prompt=prompts[(check.repeats - 1) % len(prompts)],
            context_tokens=prompt_tokens + check.max_tokens // 2,
            block_sizes=sorted({arm.block_size for arm in check.arms if arm.block_size is not None}),
            samples=STEP_SAMPLES,
        )


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


def _arm_line(case: Case, repeat: int, slot: str, arm: Arm | None, prompt: str, data: Mapping[str, Any]) -> ArmLine:
    fields = {name: data[name] for name in ("prompt_tokens", "tokens", "sha256", "distinct_tokens", "ttft_s")}
    fields |= {name: data[name] for name in ("decode_s", "accepted_per_round", "drafted_per_round")}
    return ArmLine.model_validate(
        {
            **fields,
            "case": case.id,
            "repeat": repeat,
            "slot": slot,
            "arm": arm.name if arm is not None else CLASSIC,
            "block_size": (arm.block_size if arm is not None else 1) or case.block_size,
            "prompt": prompt,
            "verify_s": data["verify_s"],
            "draft_s": data["draft_s"],
            "load1": gate.load1(),
        }
    )


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
    problem = counters_problem(arms)
    if problem:
        return Judgement("error", problem)
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
    outcome: Outcome = "unresolved" if worst == "unresolved" else "pass"
    return Judgement(outcome, "; ".join(reasons) + acceptance_note(arms) + inexact_note(decisions), worst)


def _judge_arm(arm: Arm, lines: Sequence[ArmLine], check: Throughput) -> stats.VerdictResult | Judgement:
    """The verdict on one arm, or the judgement that it cannot have one."""
    deltas: list[float] = []
    nulls: list[float] = []
    ratios: list[float] = []
    for repeat in range(check.repeats):
        chosen = {line.slot: line for line in lines if line.repeat == repeat and line.arm in (CLASSIC, arm.name)}
        if set(chosen) != {"open", "arm", "close"}:
            return Judgement("error", f"repeat {repeat + 1} of {check.repeats} is not complete for arm {arm.name}")
        if chosen["arm"].tokens > 1 and not chosen["arm"].accepted_per_round:
            return Judgement("fail", f"arm {arm.name}, repeat {repeat + 1}: no round ran")
        try:
            rate = {slot: stats.decode_tok_s(line.tokens, line.decode_s) for slot, line in chosen.items()}
        except ValueError as error:
            return Judgement("error", f"repeat {repeat + 1}: {error}; ask for more tokens or set ignore_stop")
        deltas.append(stats.paired_delta(rate["arm"], rate["open"], rate["close"]))
        nulls.append(stats.null_delta(rate["open"], rate["close"]))
        ratios.append(1 + deltas[-1])
    impossible = stats.ceiling_problem(statistics.fmean(ratios), arm.block_size or 1)
    if impossible:
        return Judgement("fail", f"arm {arm.name}: {impossible}")
    return stats.judge_deltas(deltas, nulls, check.smallest_effect)


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
