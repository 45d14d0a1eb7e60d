"""`exactness_probe`: block equals chain on every draw; the log says engaged.

The start-up probe itself, on the spec's draws and walks, for each block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.checks.base import Judgement, not_engaged, of_type
from harness.record.lines import AnyLine, DecisionLine, DrawLine
from harness.spec.model import ExactnessProbe

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case


def measure(case: Case, context: RunContext) -> None:
    """One probe per block size."""
    check = case.check
    assert isinstance(check, ExactnessProbe)
    context.job(
        case,
        "probe",
        stage=check.stage,
        block_sizes=list(check.block_sizes or ()),
        draws=list(check.draws),
        walk=check.walk,
    )


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Every draw of every block size passed, something was compared, and each decision engaged without the override."""
    check = case.check
    assert isinstance(check, ExactnessProbe)
    draws, decisions = of_type(lines, DrawLine), of_type(lines, DecisionLine)
    sizes = check.block_sizes or ()
    if len(decisions) != len(sizes):
        return Judgement("error", f"{len(decisions)} decisions for {len(sizes)} block sizes")
    declined = not_engaged(decisions)
    if declined:
        return Judgement("fail", declined.log_line)
    failed = next((draw for draw in draws if not draw.passed or not draw.positions), None)
    if failed:
        return Judgement("fail", f"{failed.draw}: {failed.differing_bytes} of {failed.total_bytes} bytes differ")
    for size in sizes:
        seen = sum(draw.block_size == size and not draw.draw.startswith("walk") for draw in draws)
        if seen < len(check.draws):
            return Judgement("error", f"block size {size}: {seen} of {len(check.draws)} draws were compared")
        if check.walk and not any(draw.block_size == size and draw.draw.startswith("walk") for draw in draws):
            return Judgement("error", f"block size {size}: no walk was compared")
    rows = sum(draw.positions for draw in draws)
    return Judgement("pass", f"{len(draws)} draws and walks equal the chain in every byte of {rows} rows; engaged")
