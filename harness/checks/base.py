"""What the check modules share: the judgement, the pieces of a measurement, and thresholds that several apply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from harness import stats
from harness.record.lines import AnyLine, ArmLine, ComparisonLine, DecisionLine, Outcome, Verdict
from harness.spec.model import Prompt
from harness.spec.resolve import prompt_text

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case

LineT = TypeVar("LineT", bound=AnyLine)


@dataclass(frozen=True)
class Judgement:
    """What became of a case, in one of six words, and why."""

    outcome: Outcome
    reason: str
    verdict: Verdict | None = None


class Measure(Protocol):
    """Runs what a case needs in its child; raw lines go out through the context."""

    def __call__(self, case: Case, context: RunContext) -> None:
        """Measure."""


class Judge(Protocol):
    """Turns raw lines into a judgement, and nothing but raw lines: a record can be judged again."""

    def __call__(self, case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
        """`lines` are the case's own, `others` all lines of the run."""


def of_type(lines: Iterable[AnyLine], kind: type[LineT]) -> tuple[LineT, ...]:
    """The lines of one type, in order."""
    return tuple(line for line in lines if isinstance(line, kind))


def prompt_inputs(prompts: Sequence[Prompt] | None, folder: Path) -> list[Mapping[str, str]]:
    """Prompts as a child takes them; their text is read in the parent, so that its hash is the spec's."""
    return [{"name": p.name or "", "form": p.form, "text": prompt_text(p, folder)} for p in prompts or ()]


def not_engaged(decisions: Sequence[DecisionLine]) -> DecisionLine | None:
    """The first decision that declined, or None."""
    return next((line for line in decisions if not line.engaged), None)


def inexact_note(decisions: Sequence[DecisionLine]) -> str:
    """A warning for a reason line when the override engaged MTP."""
    return "; INEXACT: engaged by MLXCEL_MTP_ALLOW_INEXACT" if any(line.inexact for line in decisions) else ""


def counters_problem(lines: Sequence[ArmLine | ComparisonLine]) -> str | None:
    """The first generation whose counters contradict each other, with the identity that they break, or None.

    Nothing can be read from such counts, so a case that holds them is an error, neither a pass nor a failure.
    """
    for line in lines:
        problem = stats.counter_problem(
            line.accepted_per_round, line.drafted_per_round, tokens=line.tokens, block_size=line.block_size
        )
        if problem is None and any(drafted != line.block_size - 1 for drafted in line.drafted_per_round):
            found = min(line.drafted_per_round)
            problem = f"drafted = rounds x (block size - 1): rounds drafted {found} tokens, so another block size ran"
        if problem:
            return f"prompt {line.prompt}, block size {line.block_size}: {problem}"
    return None


def acceptance_note(lines: Sequence[ArmLine | ComparisonLine]) -> str:
    """A warning for a reason line when rounds ran and not one draft was accepted: such text proves little."""
    drafted = sum(sum(line.drafted_per_round) for line in lines)
    if not drafted or any(count for line in lines for count in line.accepted_per_round):
        return ""
    return f"; NOTE: none of {drafted} drafts was accepted, so only the rejecting path ran; set min_acceptance"


def acceptance_problem(lines: Sequence[ArmLine | ComparisonLine], block_size: int, minimum: float | None) -> str | None:
    """Why the acceptance rate at the pair's block size is too low, or None."""
    chosen = [line for line in lines if line.block_size == block_size and line.drafted_per_round]
    if minimum is None or not chosen:
        return None
    accepted = [count for line in chosen for count in line.accepted_per_round]
    drafted = [count for line in chosen for count in line.drafted_per_round]
    rate = stats.acceptance_rate(accepted, drafted)
    if rate >= minimum:
        return None
    return f"acceptance rate {rate:.3f} at block size {block_size} is below min_acceptance {minimum:g}"
