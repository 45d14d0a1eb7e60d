"""What raw lines say more than once must agree, and what no figure shows must at least not be wrong. Pure.

A field that only one figure uses is held by that figure; these rules are for the others, so that no number of a
runs.jsonl can be changed and the record rendered anew without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.counters import generation_violations
from harness.pairs import CLASSIC, NULL
from harness.record.lines import SCHEMA_VERSION, AnyLine, ArmLine, ComparisonLine, EndLine, RollbackLine, StartLine
from harness.record.model import CaseRecord


def agreement_problems(events: Sequence[AnyLine]) -> Iterator[str]:
    """Every disagreement between the lines of one case."""
    yield from (problem for event in events if isinstance(event, RollbackLine) for problem in _rollback(event))
    arms = [event for event in events if isinstance(event, ArmLine)]
    for arm in arms:
        if arm.arm in (CLASSIC, NULL) and (arm.block_size != 1 or arm.verify_s or arm.draft_s or arm.drafted_per_round):
            yield f"{arm.arm} in repeat {arm.repeat} has the rounds or the block size of an arm"
    outputs: dict[tuple[str, str], tuple[int, int]] = {}
    for arm in arms:
        stated = (arm.tokens, arm.distinct_tokens)
        first = outputs.setdefault((arm.prompt, arm.sha256), stated)
        if stated != first:
            counts = f"{stated[0]} tokens, {stated[1]} distinct, and {first[0]} tokens, {first[1]} distinct"
            yield f"one output of {arm.prompt} is said to have {counts}"
    processes: dict[int, int | None] = {}
    for arm in arms:
        if arm.process != processes.setdefault(arm.repeat, arm.process):
            yield f"repeat {arm.repeat} is said to have run in processes {processes[arm.repeat]} and {arm.process}"
    lengths: dict[tuple[str, str], int] = {}
    for line in events:
        if isinstance(line, ArmLine | ComparisonLine):
            first_length = lengths.setdefault((line.prompt, line.case), line.prompt_tokens)
            if line.prompt_tokens != first_length:
                yield f"prompt {line.prompt} is said to have {line.prompt_tokens} and {first_length} tokens"


def _rollback(line: RollbackLine) -> Iterator[str]:
    where = f"prompt {line.prompt}, accepts {', '.join(map(str, line.script))}"
    if line.identical and not line.first_difference and line.script != line.accepted_per_round:
        yield f"{where}: another script was played"
    drafted = (line.block_size - 1,) * len(line.accepted_per_round)
    found = generation_violations(line.accepted_per_round, drafted, tokens=line.tokens, block_size=line.block_size)
    yield from (f"{where}: counters do not add up: {violation}" for violation in found)


def run_problems(
    starts: Iterable[StartLine], end: EndLine | None, cases: Sequence[CaseRecord], known_failures: Iterable[str]
) -> Iterator[str]:
    """What the run's own lines say that its cases do not bear out."""
    for start in starts:
        if start.schema_version != SCHEMA_VERSION:
            yield f"raw lines of format {start.schema_version}, and this program reads format {SCHEMA_VERSION}"
    if end is None or end.interrupted:
        return
    expected = expected_exit(cases, set(known_failures))
    if end.exit_code != expected:
        yield f"exit code {end.exit_code}, but the outcomes of the cases make it {expected}"


def expected_exit(cases: Sequence[CaseRecord], known_failures: set[str]) -> int:
    """The exit code that outcomes come to, by the rule of `harness run`."""
    failed = errors = False
    for case in (case for case in cases if case.finished):
        bad = case.outcome == "fail" or (case.outcome == "declined" and not case.declared)
        if case.check in known_failures:
            bad = not bad and case.outcome in ("pass", "declined", "unresolved")
        failed, errors = failed or bad, errors or case.outcome == "error"
    return 1 if failed else 3 if errors else 0
