"""What became of every case: one row per check, and one per case folded below it."""

from __future__ import annotations

from collections import Counter

from harness.record.model import CaseRecord, Record
from harness.record.sections.common import outcome_words
from harness.record.table import cell, seconds, table


def result(record: Record, stem: str) -> str:
    """The verdict tables."""
    if not record.cases and not record.not_run:
        return ""
    planned = len(record.cases) + len(record.not_run)
    parts = ["## Result", _by_check(record)]
    if planned > len(_checks(record)):
        parts.append(f"<details>\n<summary>Every case ({planned})</summary>\n\n{_by_case(record)}\n\n</details>")
    return "\n\n".join(parts)


def _checks(record: Record) -> dict[str, list[CaseRecord]]:
    found: dict[str, list[CaseRecord]] = {}
    for case in record.cases:
        found.setdefault(case.check, []).append(case)
    return found


def _by_check(record: Record) -> str:
    rows = []
    for check, cases in _checks(record).items():
        words = Counter(outcome_words(case) for case in cases)
        outcome = next(iter(words)) if len(cases) == 1 else ", ".join(f"{n} {word}" for word, n in words.items())
        worst = _telling(cases)
        verdicts = dict.fromkeys(case.verdict for case in cases if case.verdict)
        rows.append(
            [
                cell(check),
                cell(cases[0].kind),
                cell(outcome),
                ", ".join(verdicts) or "none due",
                cell(_reason(worst, named=len(cases) > 1)),
                seconds(sum(case.seconds for case in cases)),
            ]
        )
    missing = Counter(name.rpartition("::")[2].partition("[")[0] for name in record.not_run)
    for check, number in missing.items():
        rows.append([cell(check), "not run", f"{number} not run", "none due", "the run stopped before", "not run"])
    return table(["Check", "Kind", "Outcome", "Verdict", "Reason", ">Seconds"], rows)


def _reason(case: CaseRecord, named: bool) -> str:
    """A case's reason; for one of several, after the cell it belongs to."""
    reason = case.reason or "no reason given"
    return f"{case.name.partition('[')[2].rstrip(']')}: {reason}" if named and case.cell else reason


def _telling(cases: list[CaseRecord]) -> CaseRecord:
    """The case whose reason says most: a failure before a pass, a pass before a declared decline."""
    order = ("fail", "error", "unresolved", "skipped", "pass", "declined")
    return min(
        cases, key=lambda case: -1 if case.outcome == "declined" and not case.declared else order.index(case.outcome)
    )


def _by_case(record: Record) -> str:
    rows = [
        [cell(case.name), cell(outcome_words(case)), cell(case.reason or "no reason given"), seconds(case.seconds)]
        for case in record.cases
    ]
    rows += [
        [cell(name.rpartition("::")[2]), "not run", "the run stopped before", "not run"] for name in record.not_run
    ]
    return table(["Case", "Outcome", "Reason", ">Seconds"], rows)
