"""`row_identity`: an op at M rows equals M one-row calls, byte for byte.

The child runs each op on the pair's real weights and shapes, or on random ones of a geometry, with NaN in the rows
around and with rows in other slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.checks.base import Judgement, of_type
from harness.record.lines import AnyLine, CheckLine
from harness.spec.model import RowIdentity

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case


def measure(case: Case, context: RunContext) -> None:
    """The child compares and sends one statement per op and shape."""
    check = case.check
    assert isinstance(check, RowIdentity)
    args: dict[str, Any] = {"ops": list(check.ops), "rows": list(check.rows), "seed": check.seed}
    if check.geometry is None:
        context.job(case, "row_identity", **args)
    else:
        context.job(case, "kernel_rows", geometry=check.geometry, backend=check.backend, **args)


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Every op that the spec names must have been compared, and none may differ."""
    assert isinstance(case.check, RowIdentity)
    checks = of_type(lines, CheckLine)
    for op in case.check.ops:
        if not any(line.name.split(":")[0] == op for line in checks):
            return Judgement("error", f"op {op} was not compared")
    failed = [line for line in checks if not line.passed]
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return Judgement("fail", f"{first.name}: {first.found}{more}")
    rows = case.check.rows
    return Judgement("pass", f"{len(checks)} ops and shapes equal their one-row calls at M = {min(rows)}..{max(rows)}")
