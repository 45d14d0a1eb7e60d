"""How long a run will take, for `--dry-run`: from the last record of the spec, else from nominal step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.record.lines import CaseLine
from harness.spec import model as m
from harness.spec.plan import Case, child_key

STEP_S = 0.008  # a classic step of the nano pair on two cores
TOKEN_PREFILL_S = 0.0005
CHILD_S = 6.0  # interpreter, torch, weights
WALK_STEPS = 2 * 128
KERNEL_CASE_S = 8.0  # a shape on an H200, mostly the compilation of ours and the peers' kernels


@dataclass(frozen=True)
class Estimate:
    """What a dry run says."""

    children: int
    seconds: float
    basis: str
    cases: Mapping[str, float]


def estimate(cases: Sequence[Case], measured: Sequence[CaseLine] = (), record: str = "") -> Estimate:
    """Children and seconds for these cases; `measured` are case lines of an earlier `record` of the same spec."""
    known = {line.case: line.seconds for line in measured if line.outcome not in ("skipped", "error")}
    per_case = {case.id: known.get(case.id, nominal_seconds(case)) for case in cases}
    keys = {child_key(env) for case in cases if case.skip is None for env in child_environments(case)}
    seconds = sum(per_case.values()) + CHILD_S * len(keys)
    used = sum(case.id in known for case in cases)
    fresh = sum(
        case.check.processes * len({child_key(env) for env in child_environments(case)})
        for case in cases
        if isinstance(case.check, m.Throughput) and case.check.processes > 1 and case.skip is None
    )
    nominal = f"{1000 * STEP_S:g} ms a step, as the nano pair takes on 2 cores; a larger pair takes longer"
    if used == len(cases) and cases:
        basis = f"the times in {record}"
    elif used:
        basis = f"the times in {record} for {used} of {len(cases)} cases, else {nominal}"
    else:
        basis = nominal
    return Estimate(len(keys) + fresh, seconds, basis, per_case)


def child_environments(case: Case) -> list[Mapping[str, str | None]]:
    """The flag settings that a case starts children with."""
    arms = case.check.arms if isinstance(case.check, m.Throughput) else ()
    return [case.env, *({**case.env, **arm.env} for arm in arms if arm.env)]


def nominal_seconds(case: Case) -> float:
    """Seconds of one case by its steps, without the start of its child; 0 for a case that is skipped by its spec."""
    check = case.check
    if case.skip is not None:
        return 0.0
    match check:
        case m.ExactnessProbe():
            return len(check.block_sizes or (4,)) * _probe_seconds(check.draws, check.walk)
        case m.Attribution():
            return 1.5 * _probe_seconds(check.draws, check.walk)  # a failing cell runs once more to localize
        case m.GreedyParity():
            sizes = len(check.block_sizes or (4,))
            tokens = len(check.prompts) * (1 + sizes) * check.max_tokens
            return sizes * _probe_seconds((8, 8, 8), True) + tokens * STEP_S
        case m.Throughput():
            arms, turns = len(check.arms), 2 if check.order == "abba" else 1
            runs = len(check.prompts or ()) * (1 + arms) + check.repeats * (2 + turns * arms)
            runs += 2 * check.null_blocks * check.processes * (2 + turns)
            passes = max(check.warmup - 1, 0) + (check.processes - 1) * max(check.warmup, 1)
            fresh = CHILD_S + _probe_seconds((8, 8, 8), True)
            steps = (runs + passes * (1 + arms)) * check.max_tokens
            return check.processes * fresh - CHILD_S + steps * STEP_S + 10.0
        case m.KernelThroughput():
            return KERNEL_CASE_S
        case m.Decline():
            return _probe_seconds(check.draws, False) + 2 * len(check.prompts or ()) * check.max_tokens * STEP_S
        case _:
            return 5.0


def _probe_seconds(draws: Sequence[int], walk: bool) -> float:
    steps = 10 * len(draws) + (2 * WALK_STEPS if walk else 0)
    return steps * STEP_S + sum(draws) * TOKEN_PREFILL_S
