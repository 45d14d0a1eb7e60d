"""`geometry`: predicates and shapes are what they should be for this pair.

The child reads them back from the loaded pair; the spec says what they must be, in config.json's names.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.checks.base import Judgement, of_type
from harness.record.lines import AnyLine, CheckLine
from harness.spec.model import Geometry

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case


SHARED = "the same bytes"


def measure(case: Case, context: RunContext) -> None:
    """Ask the child for the pair's facts and hold each expectation against them."""
    assert isinstance(case.check, Geometry)
    facts = context.job(case, "geometry")
    for line in statements(case.id, case.check, facts):
        context.emit(line)


def statements(case: str, check: Geometry, facts: Mapping[str, Any]) -> list[CheckLine]:
    """One statement per expectation; a field that the pair does not have is a failed one with a suggestion."""
    lines: list[CheckLine] = []

    def state(name: str, expected: object, found: object) -> None:
        lines.append(
            CheckLine(case=case, name=name, passed=expected == found, expected=_shown(expected), found=_shown(found))
        )

    for role in ("target", "drafter"):
        fields: Mapping[str, Any] = facts.get(role) or {}
        for field, expected in getattr(check.expect, role).items():
            if field in fields:
                state(f"{role}.{field}", expected, fields[field])
                continue
            near = difflib.get_close_matches(field, fields, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            lines.append(
                CheckLine(
                    case=case,
                    name=f"{role}.{field}",
                    passed=False,
                    expected=_shown(expected),
                    found=f"no such field{hint}",
                )
            )
    for predicate in ("full_layers", "linear_singleton_cpu", "linear_singleton_cuda"):
        expected = getattr(check.expect, predicate)
        if expected is not None:
            state(predicate, expected, facts.get(predicate))
    if "shared_kv_problem" in facts:
        claim = facts.get("shared_claim", "the drafter reads the last layers' K/V")
        state(claim, SHARED, facts["shared_kv_problem"] or SHARED)
    return lines


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Every statement must hold, and there must be one."""
    checks = of_type(lines, CheckLine)
    failed = [line for line in checks if not line.passed]
    if not checks:
        return Judgement("error", "nothing was compared: `expect` names no field")
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return Judgement("fail", f"{first.name}: expected {first.expected}, found {first.found}{more}")
    return Judgement("pass", f"all {len(checks)} shapes and predicates are as expected")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
