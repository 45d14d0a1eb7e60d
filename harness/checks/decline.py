"""`decline`: it declines with the stated reason, and classic output is unchanged.

Its good outcome is `declined`: the word in the table says what happened, and the spec declared it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.checks.base import Judgement, of_type, prompt_inputs
from harness.record.lines import AnyLine, CheckLine, DecisionLine
from harness.spec.model import Decline

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case


def measure(case: Case, context: RunContext) -> None:
    """The child probes the stage, then serves each prompt and compares it with plain classic decode."""
    check = case.check
    assert isinstance(check, Decline)
    context.job(
        case,
        "decline",
        stage=check.stage,
        block_size=check.block_size,
        draws=list(check.draws),
        gate=check.gate,
        expect_reason=check.expect_reason,
        prompts=prompt_inputs(check.prompts, case.folder),
        max_tokens=check.max_tokens,
        ignore_stop=check.ignore_stop,
    )


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Declined, for the stated reason, with classic's own text and not one round."""
    check = case.check
    assert isinstance(check, Decline)
    decisions, checks = of_type(lines, DecisionLine), of_type(lines, CheckLine)
    if len(decisions) != 1:
        return Judgement("error", f"{len(decisions)} decisions for one case")
    failed = next((line for line in checks if not line.passed), None)
    if failed:
        return Judgement("fail", f"{failed.name}: expected {failed.expected}, found {failed.found}")
    outputs = sum(line.name.endswith(": output") for line in checks)
    if outputs != len(check.prompts or ()):
        return Judgement("error", f"{outputs} of {len(check.prompts or ())} outputs were compared")
    return Judgement("declined", f"{decisions[0].reason}; classic output of {outputs} prompts is unchanged")
