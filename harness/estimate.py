"""How long a run will take, for `--dry-run`: from the last record of the spec, else from nominal step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.record.lines import CaseLine
from harness.spec import model as m
from harness.spec.plan import Case, child_key

WALK_STEPS = 2 * 128
PEER_S = 45.0  # another engine: its imports, the same weights once more, a few tokens
KERNEL_CASE_S = 8.0  # a shape on an H200, mostly the compilation of ours and the peers' kernels


@dataclass(frozen=True)
class Rates:
    """Seconds of a classic step, of a prompt's token, of a child's start, of growing the pair; and whose they are."""

    step_s: float
    prefill_s: float
    child_s: float
    grow_s: float
    words: str


NANO = Rates(0.008, 0.0005, 6.0, 0.0, "as the nano pair takes on 2 cores; a larger pair takes longer")
GROWN = {
    "12b": Rates(0.0042, 0.0002, 4.0, 15.0, "as the grown pair takes on an H200"),
    "31b": Rates(0.0064, 0.0002, 5.0, 20.0, "as the grown pair takes on an H200"),
}
"""By the geometry that a spec's pair is grown to where it is not here."""


def rates_of(case: Case) -> Rates:
    """What a case is estimated with."""
    growing = case.pair.target.otherwise if case.pair is not None else None
    return GROWN[growing.grow] if growing is not None else NANO


@dataclass(frozen=True)
class Estimate:
    """What a dry run says."""

    children: int
    seconds: float
    basis: str
    cases: Mapping[str, float]


def estimate(
    cases: Sequence[Case], measured: Sequence[CaseLine] = (), record: str = "", *, growing: bool = False
) -> Estimate:
    """Children and seconds for these cases; `measured` are case lines of an earlier `record` of the same spec.

    `growing`: their pair is not here and is built first.
    """
    rates = rates_of(cases[0]) if cases else NANO
    known = {line.case: line.seconds for line in measured if line.outcome not in ("skipped", "error")}
    per_case = {case.id: known.get(case.id, nominal_seconds(case)) for case in cases}
    keys = {child_key(env) for case in cases if case.skip is None for env in child_environments(case)}
    seconds = sum(per_case.values()) + rates.child_s * len(keys) + (rates.grow_s if growing else 0.0)
    used = sum(case.id in known for case in cases)
    fresh = sum(
        case.check.processes * len({child_key(env) for env in child_environments(case)})
        for case in cases
        if isinstance(case.check, m.Throughput) and case.check.processes > 1 and case.skip is None
    )
    nominal = f"{1000 * rates.step_s:g} ms a step, {rates.words}"
    if used == len(cases) and cases:
        basis = f"the times in {record}"
    elif used:
        basis = f"the times in {record} for {used} of {len(cases)} cases, else {nominal}"
    else:
        basis = nominal
    if growing:
        basis += f"; the pair is not here and is grown first, about {rates.grow_s:g} s"
    return Estimate(len(keys) + fresh, seconds, basis, per_case)


def child_environments(case: Case) -> list[Mapping[str, str | None]]:
    """The flag settings that a case starts children with."""
    arms = case.check.arms if isinstance(case.check, m.Throughput) else ()
    return [case.env, *({**case.env, **arm.env} for arm in arms if arm.env)]


def nominal_seconds(case: Case) -> float:
    """Seconds of one case by its steps, without the start of its child; 0 for a case that is skipped by its spec."""
    check, rates = case.check, rates_of(case)
    if case.skip is not None:
        return 0.0
    match check:
        case m.ExactnessProbe():
            return len(check.block_sizes or (4,)) * _probe_seconds(rates, check.draws, check.walk)
        case m.Attribution():
            return 1.5 * _probe_seconds(rates, check.draws, check.walk)  # a failing cell runs once more to localize
        case m.GreedyParity():
            sizes = len(check.block_sizes or (4,))
            tokens = len(check.prompts) * (1 + sizes) * check.max_tokens
            return sizes * _probe_seconds(rates, (8, 8, 8), True) + tokens * rates.step_s
        case m.Throughput():
            arms, turns = len(check.arms), 2 if check.order == "abba" else 1
            runs = len(check.prompts or ()) * (1 + arms) + check.repeats * (2 + turns * arms)
            runs += 2 * check.null_blocks * check.processes * (2 + turns)
            passes = max(check.warmup - 1, 0) + (check.processes - 1) * max(check.warmup, 1)
            fresh = rates.child_s + _probe_seconds(rates, (8, 8, 8), True)
            steps = (runs + passes * (1 + arms)) * check.max_tokens
            contexts = sum(check.step_contexts) * (rates.step_s / 2 + rates.prefill_s)
            return check.processes * fresh - rates.child_s + steps * rates.step_s + contexts + 10.0
        case m.KernelThroughput():
            return KERNEL_CASE_S
        case m.PeerDecode():
            return max(check.contexts) * (rates.step_s + rates.prefill_s) + PEER_S * len(check.peers)
        case m.Decline():
            tokens = 2 * len(check.prompts or ()) * check.max_tokens
            return _probe_seconds(rates, check.draws, False) + tokens * rates.step_s
        case _:
            return 5.0


def _probe_seconds(rates: Rates, draws: Sequence[int], walk: bool) -> float:
    steps = 10 * len(draws) + (2 * WALK_STEPS if walk else 0)
    return steps * rates.step_s + sum(draws) * rates.prefill_s
