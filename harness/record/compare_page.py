"""A comparison as markdown, for a terminal or a pull request, and as JSON. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from harness.record.compare import STATUSES, Comparison
from harness.record.compare_side import Row, Side, Status
from harness.record.table import cell, plural, table

HEADINGS: dict[Status, str] = {
    "regressed": "Regressed",
    "improved": "Improved",
    "not comparable": "Not comparable",
    "same": "Same",
}
LEGEND = (
    "B against the baseline A. *Same* means equal, or no difference that these two records can resolve; the reason "
    "says which. Speeds are judged by the records' own intervals and null ranges."
)


def markdown(comparison: Comparison, *, every: bool = False) -> str:
    """The comparison for people; with `every` also what is the same, and no cells taken together."""
    parts = [f"# {headline(comparison)}", _runs(comparison), LEGEND]
    if comparison.notes:
        parts.append("\n".join(f"- {cell(note)}" for note in comparison.notes))
    parts.append(_checks(comparison))
    for status in STATUSES:
        rows = comparison.of(status)
        if rows and (every or status != "same"):
            parts += [f"## {HEADINGS[status]} ({len(rows)})", _rows(rows, every)]
    if comparison.lost:
        checks = Counter(name.partition("[")[0] for name in comparison.lost)
        names = ", ".join(name if number == 1 else f"{name} ({number} cases)" for name, number in checks.items())
        parts.append(
            f"Held in A, without a result in B: {names}. That shows no regression, and not that there is none."
        )
    return "\n\n".join(parts) + "\n"


def headline(comparison: Comparison) -> str:
    """The answer in one line."""
    counts = comparison.counts
    said = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    start = "Regressed" if counts["regressed"] else "Nothing regressed"
    return f"{start}: {said}"


def _runs(comparison: Comparison) -> str:
    return table(
        ["", "Record", "Date", "Device", "Commit", "Outcome", "Verdict"],
        [_run("A", comparison.a), _run("B", comparison.b)],
    )


def _run(name: str, side: Side) -> list[str]:
    record = side.record
    facts = (side.stem, record.date or "no date", record.device, record.host.get("Commit") or "not recorded")
    return [name, *(cell(fact) for fact in facts), record.outcome, record.verdict or "none due"]


def _checks(comparison: Comparison) -> str:
    rows = [[cell(check), *(str(counts[status]) for status in STATUSES)] for check, counts in comparison.checks.items()]
    return table(["Check", *(f">{HEADINGS[status]}" for status in STATUSES)], rows)


def _rows(rows: Sequence[Row], every: bool) -> str:
    shown = [
        [cell(name), row.aspect, cell(row.figure), cell(row.a or "none"), cell(row.b or "none"), cell(row.reason)]
        for name, row in (((row.case, row) for row in rows) if every else _together(rows))
    ]
    return table(["Case", "Aspect", "Figure", "A", "B", "Why"], shown)


def _together(rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    """Cells of one check that say the same, as one row."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.check, row.figure, row.reason, row.a, row.b), []).append(row)
    for group in groups.values():
        first = group[0]
        yield (first.case if len(group) == 1 else f"{first.check} ({plural(len(group), 'case')})"), first


def as_json(comparison: Comparison) -> str:
    """The comparison for programs: every row, nothing taken together."""
    sides = {
        name: {
            "record": side.stem,
            "spec": side.record.spec_name,
            "spec_sha256": side.record.spec_sha256,
            "started_utc": side.record.started_utc,
            "device": side.record.device,
            "commit": side.record.host.get("Commit", ""),
            "outcome": side.record.outcome,
            "verdict": side.record.verdict,
        }
        for name, side in (("a", comparison.a), ("b", comparison.b))
    }
    data = {
        "schema_version": 1,
        **sides,
        "notes": comparison.notes,
        "counts": comparison.counts,
        "lost": comparison.lost,
        "checks": comparison.checks,
        "rows": [asdict(row) for row in comparison.rows],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
