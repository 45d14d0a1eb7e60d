"""Two records of one spec against each other: what regressed, what improved, what cannot be said. Pure.

`compare(a, b)` takes A as the baseline. Each row carries the reason for its word; a speed is judged by the intervals
and null ranges that the two records hold themselves. Bytes come before outcomes, outcomes before speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.record.compare_bytes import byte_rows, outcome_row
from harness.record.compare_kernel import kernel_rows
from harness.record.compare_side import (
    ALL,
    Ended,
    Row,
    Side,
    Status,
    case_block,
    machine_block,
    notes_between,
    settings_difference,
)
from harness.record.compare_speed import acceptance_rows, arm_rows
from harness.record.model import CaseRecord

_FIGURES = ("arms", "comparisons", "kernel", "outcome", "inexact", "outputs")
STATUSES: tuple[Status, ...] = ("regressed", "improved", "not comparable", "same")  # as a page shows them


@dataclass(frozen=True)
class Comparison:
    """A against B; `notes` says what else differs between the runs."""

    a: Side
    b: Side
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    def of(self, status: Status) -> tuple[Row, ...]:
        """Rows of one status, in the order of the spec."""
        return tuple(row for row in self.rows if row.status == status)

    @property
    def counts(self) -> dict[Status, int]:
        """How many rows of each status."""
        return {status: len(self.of(status)) for status in STATUSES}

    @property
    def lost(self) -> tuple[str, ...]:
        """Cases that held in A and have no result in B: no regression, but nothing to rely on either."""
        return tuple(dict.fromkeys(row.case for row in self.rows if row.lost))

    @property
    def checks(self) -> dict[str, dict[Status, int]]:
        """Check -> rows of each status."""
        found: dict[str, dict[Status, int]] = {}
        for row in self.rows:
            found.setdefault(row.check, dict.fromkeys(STATUSES, 0))[row.status] += 1
        return found

    def exit_code(self, strict: bool = False) -> int:
        """0 nothing regressed, 1 something did; with `strict` also for a case of A without a result in B."""
        return int(bool(self.of("regressed")) or (strict and bool(self.lost)))


def compare(a: Side, b: Side) -> Comparison:
    """B against the baseline A: a row per case and figure, in A's order, then what only B has."""
    names = dict.fromkeys((*a.names, *b.names))
    rows = tuple(row for name in names for row in _case(name, a, b))
    return Comparison(a, b, notes_between(a, b), rows)


def _case(name: str, a: Side, b: Side) -> Iterator[Row]:
    old, new = a.case(name), b.case(name)
    draft = Row(name.partition("[")[0], name, "outcome", ALL, "not comparable", "")
    if old is None or new is None:
        yield _one_sided(draft, old, new, a, b)
        return
    if block := case_block(a, b, old, new):
        yield replace(draft, reason=block, lost=old.is_good and not new.is_good and not new.case.finished)
        return
    difference = settings_difference(a, b, old.case, judged=False)
    yield from byte_rows(old.case, new.case, difference)
    yield outcome_row(a, b, old, new)
    yield from _speed(a, b, old.case, new.case, difference)


def _one_sided(draft: Row, old: Ended | None, new: Ended | None, a: Side, b: Side) -> Row:
    """A case that one record lacks, or both."""
    if old is None and new is None:
        return replace(draft, status="same", reason="ran in neither")
    where, present, absent = ("A", old, b) if old is not None else ("B", new, a)
    other = "B" if where == "A" else "A"
    assert present is not None
    planned = draft.case in absent.names
    reason = f"planned in {other}, but it did not run there" if planned else f"only in {where}"
    words = ("none", present.words)[:: 1 if where == "B" else -1]
    return replace(draft, reason=reason, lost=where == "A" and present.is_good, a=words[0], b=words[1])


def _speed(a: Side, b: Side, old: CaseRecord, new: CaseRecord, difference: str | None) -> Iterator[Row]:
    """Figures of speed and acceptance; where the check reads otherwise they are about something else."""
    figures = bool(old.comparisons or old.arms or old.kernel) and bool(new.comparisons or new.arms or new.kernel)
    if not figures:
        return
    if difference is not None:
        yield Row(old.check, old.name, "speed", ALL, "not comparable", difference)
        return
    alike = a.record.spec_sha256 == b.record.spec_sha256 and machine_block(a, b) is None
    alike = alike and all(getattr(old, key) == getattr(new, key) for key in _FIGURES)
    for row in (*acceptance_rows(a, b, old, new), *arm_rows(a, b, old, new), *kernel_rows(a, b, old, new)):
        if alike and row.status == "not comparable":  # withheld, inexact, too few: it is so in both, to the digit
            yield replace(row, status="same", reason=f"alike in both: {row.reason}")
        else:
            yield row
