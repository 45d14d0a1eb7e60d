"""A record as a markdown page. Pure: the same record and stem give the same bytes."""

from __future__ import annotations

from harness.record.model import Record
from harness.record.page import compose, front_matter, splice
from harness.record.sections import blocks


def front(record: Record, stem: str) -> str:
    """At most eight flat keys: GitHub shows them as a table above the page."""
    return front_matter(
        {
            "spec": record.spec_name,
            "date": record.date or "not started",
            "device": record.device,
            "commit": record.host.get("Commit", "not recorded"),
            "outcome": record.outcome,
            "verdict": record.verdict or "none due",
            "complete": "true" if record.complete else "false",
            "data": f"data/{stem}/record.json",
        }
    )


def render(record: Record, stem: str) -> str:
    """The page of a new record; `stem` names its data folder."""
    return compose(front(record, stem), blocks(record, stem))


def renew(text: str, record: Record, stem: str) -> str:
    """An existing page with its generated blocks renewed and its prose kept."""
    return splice(text, front(record, stem), blocks(record, stem))
