"""`greedy_parity`: MTP token ids and text equal classic for each prompt; a round really ran.

Each prompt is decoded once classically and once per block size by rounds, in one child.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from harness.record.lines import AnyLine, ComparisonLine, DecisionLine
from harness.spec.model import GreedyParity

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case


def measure(case: Case, context: RunContext) -> None:
    """One job: the child probes each block size, then compares each prompt."""
    check = case.check
    assert isinstance(check, GreedyParity)
    context.job(
        case,
        "parity",
        stage=check.stage,
        block_sizes=list(check.block_sizes or ()),
        prompts=prompt_inputs(check.prompts, case.folder),
        max_tokens=check.max_tokens,
        ignore_stop=check.ignore_stop,
    )


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Every prompt and block size compared, all identical, with rounds, and within the spec's floors."""
    check = case.check
    assert isinstance(check, GreedyParity)
    decisions, comparisons = of_type(lines, DecisionLine), of_type(lines, ComparisonLine)
    differing = next((line for line in comparisons if not (line.identical and line.text_identical)), None)
    if differing:
        where = f"prompt {differing.prompt}, block size {differing.block_size}"
        if differing.first_difference is not None:
            what = f"token {differing.first_difference} of {differing.tokens} differs from classic"
            what += "".join(f"; {hint}" for hint in (margin_hint(differing), pattern_hint(comparisons)) if hint)
        else:
            what = "text or finish reason differs from classic"
        return Judgement("fail", f"{where}: {what}{inexact_note(decisions)}")
    declined = not_engaged(decisions)
    if declined:
        return Judgement("declined", declined.log_line)
    wanted = len(check.prompts) * len(check.block_sizes or ())
    if len(comparisons) != wanted:
        return Judgement("error", f"{len(comparisons)} of {wanted} comparisons were made")
    idle = next((line for line in comparisons if not line.accepted_per_round and line.tokens > 1), None)
    if idle:
        return Judgement("fail", f"prompt {idle.prompt}, block size {idle.block_size}: no round ran")
    if not any(line.accepted_per_round for line in comparisons):
        return Judgement("error", "no round ran: every prompt ended with its first token")
    if broken := counters_problem(comparisons):
        return Judgement("error", broken)
    if low := acceptance_problem(comparisons, case.block_size, check.min_acceptance):
        return Judgement("fail", low)
    floor = check.min_distinct_tokens
    looping = next((line for line in comparisons if floor is not None and line.distinct_tokens < floor), None)
    if looping:
        found = looping.distinct_tokens
        return Judgement("fail", f"prompt {looping.prompt}: {found} distinct tokens, min_distinct_tokens is {floor}")
    tokens = sum(line.tokens for line in comparisons)
    sizes = ", ".join(str(size) for size in check.block_sizes or ())
    what = f"{len(check.prompts)} prompts byte-identical at block sizes {sizes} ({tokens} tokens)"
    return Judgement("pass", what + acceptance_note(comparisons) + inexact_note(decisions))


TIE = 0.25  # logits; engine.margin.TIE_MARGIN, which the parent cannot import without torch


def margin_hint(line: ComparisonLine) -> str:
    """Whether rounding can have turned the first differing token."""
    if line.margin is None:
        return ""
    apart = f"classic's two best logits are {line.margin:.3f} apart there"
    if line.margin <= TIE:
        return f"{apart}: a near tie, which rounding can turn"
    return f"{apart}: too far for rounding, look at keys, positions and rollback"


def pattern_hint(comparisons: Sequence[ComparisonLine]) -> str:
    """What the places of the first difference say, where a prompt differs at several block sizes."""
    places: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for line in comparisons:
        if line.first_difference is not None:
            places[line.prompt][line.block_size] = line.first_difference
    for prompt, found in places.items():
        if len(found) < 2:
            continue
        if len(set(found.values())) == 1:
            sizes = ", ".join(map(str, found))
            return f"prompt {prompt} differs at the same token at block sizes {sizes}, which points at numerics"
        where = ", ".join(f"{at} at {size}" for size, at in found.items())
        return f"prompt {prompt}'s first difference moves with the block size (token {where}): accept or rollback"
    return ""
