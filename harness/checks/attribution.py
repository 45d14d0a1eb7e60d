"""`attribution`: stages that must pass are exact; every other cell shows its first divergence.

The probe over dispatch stages and flags. A stage is an argument, so the stages of a flag cell share its child, and
their classic chains must have the same bytes: the fix moves the verify block, never decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.checks.base import Judgement, inexact_note, of_type
from harness.record.lines import AnyLine, CheckLine, DecisionLine, DrawLine
from harness.spec.model import Attribution

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case


OPS_STATEMENT = "ops that differ on their own"
NO_OPS = "none"


def measure(case: Case, context: RunContext) -> None:
    """One probe at the cell's stage, then each op on its own: the probe shows only the first one in execution order."""
    check = case.check
    assert isinstance(check, Attribution)
    data = context.job(
        case,
        "probe",
        stage=case.fields["stage"],
        block_sizes=[check.block_size],
        draws=list(check.draws),
        walk=check.walk,
        ops=True,
    )
    must, differing = case.fields["stage"] in check.must_pass, data["differing_ops"]
    context.emit(
        CheckLine(
            case=case.id,
            name=OPS_STATEMENT,
            passed=not (must and differing),
            expected=NO_OPS if must else "any, at this stage",
            found=", ".join(differing) or NO_OPS,
        )
    )


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Exact, or declined as the picture asked for, or failed where the stage must pass; classic never moves."""
    check = case.check
    assert isinstance(check, Attribution)
    draws, decisions = of_type(lines, DrawLine), of_type(lines, DecisionLine)
    if len(decisions) != 1:
        return Judgement("error", f"{len(decisions)} decisions for one cell")
    decision = decisions[0]
    if not draws:
        return Judgement("error", f"nothing was compared: {decision.reason}")
    if not decision.classic_sha256:
        return Judgement("error", "the probe gave no hash of the classic chain, so the stages cannot be compared")
    for name, hash_ in _classic_hashes(case, others).items():
        if hash_ != decision.classic_sha256:
            return Judgement("fail", f"classic bytes differ from those of {name}; stages must not touch decode")
    statement = next((line for line in of_type(lines, CheckLine) if line.name == OPS_STATEMENT), None)
    if statement is None:
        return Judgement("error", "the ops were not compared on their own")
    exact = all(draw.passed and draw.positions for draw in draws)
    if exact:
        if not decision.engaged:
            return Judgement("fail", f"every draw is exact, yet {decision.log_line}")
        if not statement.passed:
            return Judgement("fail", f"every draw is exact, yet {OPS_STATEMENT}: {statement.found}")
        return Judgement("pass", f"exact on {len(draws)} draws and walks; engaged")
    divergence = decision.first_divergence
    failing = next(draw for draw in draws if not draw.passed or not draw.positions)
    what = f"first divergence: {divergence.describe()}" if divergence else f"{failing.draw} differs, not localized"
    if statement.found != NO_OPS:
        what += f"; {OPS_STATEMENT}: {statement.found}"
    must = case.fields["stage"] in check.must_pass
    return Judgement("fail" if must else "declined", what + inexact_note(decisions))


def _classic_hashes(case: Case, others: Sequence[AnyLine]) -> dict[str, str]:
    """Classic hashes of the other stages in this flag cell, by case id; the latest of each."""
    prefix = case.id.split("[")[0] + "["
    cell = _without_stage(case.id)
    found: dict[str, str] = {}
    for line in of_type(others, DecisionLine):
        sibling = line.case != case.id and line.case.startswith(prefix) and _without_stage(line.case) == cell
        if sibling and line.classic_sha256:
            found[line.case] = line.classic_sha256
    return found


def _without_stage(case_id: str) -> tuple[str, ...]:
    """The axes of an id's bracket that are not the stage; two stages of one flag cell have the same."""
    inside = case_id.partition("[")[2].rstrip("]")
    return tuple(part for part in inside.split("+") if not part.startswith("stage:"))
