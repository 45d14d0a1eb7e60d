"""Does a case's outcome follow from its raw lines? A record that claims more than it holds must say so.

Written apart from the checks' own judgement on purpose: a mistake there, or an edited runs.jsonl, shows up here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.flags import FlagError, read_flags
from harness import ledger, stats
from harness.kernel_figures import OURS
from harness.record.agreement import agreement_problems
from harness.record.certified import Certified
from harness.record.lines import AnyLine, ArmLine, ChildLine, ComparisonLine
from harness.record.model import CaseRecord
from harness.steadiness import unsteady_counters

MEASURED = ("pass", "unresolved")


def contradictions_of(
    case: CaseRecord, events: Sequence[AnyLine], child: ChildLine | None, certified: Certified
) -> list[str]:
    """Every statement of this case that its raw lines do not bear out, as `name: what`."""
    problems: list[str] = []
    if case.finished:
        problems += OUTCOME_RULES.get(case.kind, _no_rule)(case)
    problems += _counters(events)
    problems += certified.problems(case.id, case.kind == "throughput" and case.outcome in MEASURED)
    problems += agreement_problems(events)
    unsteady = unsteady_counters(event for event in events if isinstance(event, ArmLine))
    if unsteady and case.outcome in MEASURED:
        problems.append(f"outcome {case.outcome}, but for {unsteady}")
    if child is not None and case.outcome in MEASURED:
        problems += _flags(child)
        problems += [text for row in child.settings if (text := ledger.difference(row)) is not None]
    return [f"{case.name}: {problem}" for problem in problems]


def _probe(case: CaseRecord) -> Iterator[str]:
    failing = [draw.draw for draw in case.draws if not draw.passed or draw.differing_bytes]
    empty = [draw.draw for draw in case.draws if draw.positions < 1 or draw.total_bytes < 1]
    if case.outcome == "pass":
        if not case.draws:
            yield "outcome pass, but no draw was recorded"
        if failing:
            yield f"outcome pass, but {failing[0]} differs"
        if empty:
            yield f"outcome pass, but {empty[0]} compared nothing"
        if not case.engaged:
            yield "outcome pass, but no decision says engaged"
        if case.first_divergence_text:
            yield f"outcome pass, but a divergence is recorded: {case.first_divergence_text}"
    if case.outcome == "declined" and case.engaged:
        yield "outcome declined, but the decision says engaged"


def _parity(case: CaseRecord) -> Iterator[str]:
    if case.outcome != "pass":
        return
    if not case.comparisons:
        yield "outcome pass, but nothing was compared"
    for one in case.comparisons:
        where = f"{one.prompt} at block size {one.block_size}"
        if not (one.identical and one.text_identical):
            yield f"outcome pass, but {where} differs"
        elif one.classic_sha256 != one.mtp_sha256:
            yield f"{where} is called identical, but its hashes differ"
        if one.tokens > 1 and one.acceptance is None:
            yield f"outcome pass, but no round ran for {where}"


def _throughput(case: CaseRecord) -> Iterator[str]:
    if case.outcome not in MEASURED:
        return
    if not case.arms:
        yield f"outcome {case.outcome}, but no arm was timed"
    for prompt, hashes in case.outputs.items():
        if len(hashes) > 1:
            yield f"outcome {case.outcome}, but the outputs of {prompt} differ between arms"
    if not case.bracketed:
        yield "arms were not interleaved: a repeat must run as classic, arms, classic"
    found = {arm.verdict for arm in case.arms}
    if case.verdict is not None and found and case.verdict not in found:
        yield f"verdict {case.verdict}, but the raw lines give {', '.join(sorted(found))}"
    for arm in case.arms:
        if arm.speedup is not None:
            problem = stats.ceiling_problem(arm.speedup, arm.block_size)
            if problem:
                yield f"{arm.arm}: {problem}"


def _statements(case: CaseRecord) -> Iterator[str]:
    if case.outcome != "pass":
        return
    if not case.checks:
        yield "outcome pass, but no statement was checked"
    for check in case.checks:
        if not check.passed or check.differing_bytes:
            yield f"outcome pass, but {check.name} does not hold"


def _decline(case: CaseRecord) -> Iterator[str]:
    if case.outcome not in ("pass", "declined"):
        return
    if case.engaged is not False:
        yield f"outcome {case.outcome}, but no decision says declined"
    for check in case.checks:
        if not check.passed:
            yield f"outcome {case.outcome}, but {check.name} does not hold"


def _rollback(case: CaseRecord) -> Iterator[str]:
    if case.outcome != "pass":
        return
    if not case.rollback:
        yield "outcome pass, but no round was scripted"
    for one in case.rollback:
        where = f"block size {one.block_size}"
        if one.differing_bytes or one.first_difference:
            yield f"outcome pass, but at {where} {one.first_difference or f'{one.differing_bytes} bytes'} differs"
        if one.covered != one.reachable:
            yield f"outcome pass, but at {where} {one.covered} of {one.reachable} cells were visited"


def _kernel(case: CaseRecord) -> Iterator[str]:
    if case.outcome not in MEASURED:
        return
    yield from (f"outcome {case.outcome}, but {check.name} does not hold" for check in case.checks if not check.passed)
    kernel = case.kernel
    if kernel is None or not kernel.compared:
        yield f"outcome {case.outcome}, but no row was compared"
        return
    if kernel.differing_bytes:
        yield f"outcome {case.outcome}, but {kernel.differing_bytes} bytes differ"
    elif not kernel.us:
        yield f"outcome {case.outcome}, but nothing was timed"
    for peer in kernel.peers:
        if peer.reason is None and not peer.ratio:
            yield f"outcome {case.outcome}, but {peer.peer} is said to have run and has no time"


def _peer_decode(case: CaseRecord) -> Iterator[str]:
    if case.outcome not in MEASURED:
        return
    ours = [line for line in case.decode if line.arm == OURS]
    if not ours:
        yield f"outcome {case.outcome}, but our own decode was not measured"
    for line in ours:
        if line.rows_equal != line.rows or line.differing_bytes:
            yield f"outcome {case.outcome}, but our block after {line.context_tokens} tokens is not our chain"
    timed = {line.arm for line in case.decode if line.n}
    for engine in case.engines:
        if engine.reason is None and engine.peer not in timed:
            yield f"outcome {case.outcome}, but {engine.peer} is said to have run and has no time"


def _no_rule(case: CaseRecord) -> Iterator[str]:
    if case.outcome == "pass":
        yield f"outcome pass of unknown kind {case.kind!r}; nothing here can confirm it"


OUTCOME_RULES = {
    "exactness_probe": _probe,
    "attribution": _probe,
    "greedy_parity": _parity,
    "throughput": _throughput,
    "geometry": _statements,
    "row_identity": _statements,
    "kernel_throughput": _kernel,
    "peer_decode": _peer_decode,
    "decline": _decline,
    "rollback": _rollback,
}


def _counters(events: Sequence[AnyLine]) -> Iterator[str]:
    """Counter identities of every generation that drafted."""
    for event in events:
        if not isinstance(event, ArmLine | ComparisonLine) or not (event.accepted_per_round or event.drafted_per_round):
            continue
        problem = stats.counter_problem(
            event.accepted_per_round, event.drafted_per_round, tokens=event.tokens, block_size=event.block_size
        )
        if problem:
            where = f"repeat {event.repeat}" if isinstance(event, ArmLine) else f"block size {event.block_size}"
            yield f"counters of {event.prompt} ({where}) do not add up: {problem}"


def _flags(child: ChildLine) -> Iterator[str]:
    """The child must run with what the cell asks for, values written as the registry writes them."""
    wanted = {name: value for name, value in child.env_requested.items() if value is not None}
    try:
        expected = read_flags(wanted).effective
    except FlagError as error:
        yield str(error)
        return
    for name in wanted:
        read = child.flags_effective.get(name)
        if name in expected and read != expected[name]:
            yield f"{name}={expected[name]} was asked for, but the child read {read}"
