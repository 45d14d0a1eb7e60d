"""The records of a spec over time, newest first: one line each, from record.json as it stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from harness.record.model import Record
from harness.record.store import RECORD, RUNS
from harness.record.table import cell, factor, percent_range, share, table

NOT_RENDERED = "not rendered: run `harness report`"


@dataclass(frozen=True)
class Entry:
    """One record; `record` is None where record.json is missing or of another format."""

    stem: str
    record: Record | None

    @property
    def started(self) -> str:
        """When it began; what is not rendered sorts last."""
        return self.record.started_utc if self.record is not None else ""


def history(out: Path, spec_name: str | None = None) -> tuple[Entry, ...]:
    """Every record under `out`, or those of one spec, newest first.

    A record that cannot be read is listed where its stem begins with the spec's name.
    """
    found = [entry for entry in _entries(out) if spec_name is None or _belongs(entry, spec_name)]
    return tuple(sorted(found, key=lambda entry: (entry.started, len(entry.stem), entry.stem), reverse=True))


def _entries(out: Path) -> Iterator[Entry]:
    for folder in sorted(path.parent for path in (out / "data").glob(f"*/{RUNS}")):
        try:
            yield Entry(folder.name, Record.model_validate_json((folder / RECORD).read_bytes()))
        except (OSError, ValidationError):
            yield Entry(folder.name, None)


def _belongs(entry: Entry, spec_name: str) -> bool:
    if entry.record is not None:
        return entry.record.spec_name == spec_name
    return entry.stem.startswith(spec_name.replace("_", "-"))


def headline_figure(record: Record) -> str:
    """The figure that the record is about, or why it has none."""
    if record.tokens_identical is False:
        return "none: tokens differ"
    arms = [arm for case in record.cases for arm in case.arms if arm.delta]
    if arms:
        return ", ".join(f"{percent_range(arm.delta)} ({arm.verdict}, {factor(arm.speedup)})" for arm in arms)
    kernels = [case.kernel for case in record.cases if case.kernel is not None and not case.kernel.withheld]
    kernels = [kernel for kernel in kernels if kernel.op == "qmv"] or kernels
    shares = [kernel.stream_share for kernel in kernels if kernel.stream_share is not None]
    if shares:
        eights = [kernel.m8_over_m1 for kernel in kernels if kernel.m8_over_m1 is not None]
        words = f"{share(min(shares))} to {share(max(shares))} of the stream over {len(shares)} shapes"
        return f"{words}, 8 rows in {factor(max(eights))} at most" if eights else words
    return "none: not measured"


def history_rows(entries: tuple[Entry, ...], spec_sha256: str | None = None) -> list[dict[str, str]]:
    """Each record as words; `spec_sha256` is that of the spec as it is today."""
    return [_row(entry, spec_sha256) for entry in entries]


def _row(entry: Entry, spec_sha256: str | None) -> dict[str, str]:
    record = entry.record
    if record is None:
        return {"record": entry.stem, "outcome": NOT_RENDERED}
    same = record.spec_sha256 == spec_sha256
    state = "" if spec_sha256 is None else " (as it is now)" if same else " (changed since)"
    return {
        "started": record.started_utc,
        "record": entry.stem,
        "device": record.device,
        "commit": record.host.get("Commit", "not recorded"),
        "spec": (record.spec_sha256[:12] or "not recorded") + state,
        "outcome": record.outcome if record.complete else f"{record.outcome}, partial",
        "figure": headline_figure(record),
    }


def history_table(rows: list[dict[str, str]]) -> str:
    """The rows as markdown."""
    names = ("started", "record", "device", "outcome", "figure", "commit", "spec")
    heads = ("Started", "Record", "Device", "Outcome", "Headline figure", "Commit", "Spec SHA-256")
    return table(heads, [[cell(row.get(name, "unknown")) for name in names] for row in rows])
