"""Sections of the page, in order: each is a pure function from a record to markdown, or to nothing.

A section that has nothing to say returns an empty string and leaves no heading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.record.model import Record
from harness.record.sections import context, engines, exactness, kernels, result, rollback, speed, summary, trust

Section = Callable[[Record, str], str]


@dataclass(frozen=True)
class Block:
    """A generated part of a page, between its markers."""

    name: str
    text: str


SECTIONS: dict[str, Section] = {
    "title": summary.title,
    "summary": summary.summary,
    "result": result.result,
    "kernels": kernels.kernels,
    "throughput": speed.throughput,
    "steps": speed.steps,
    "engines": engines.engines,
    "probe": exactness.probe,
    "certificates": trust.certificates,
    "attribution": exactness.attribution,
    "parity": exactness.parity,
    "rollback": rollback.rollback,
    "checks": exactness.other_checks,
    "host": context.host,
    "ledger": trust.ledger,
    "reproduce": context.reproduce,
    "not covered": context.not_covered,
}


def blocks(record: Record, stem: str) -> list[Block]:
    """Every block of the page that is not empty; `stem` names the data folder that links point into."""
    made = [Block(name, section(record, stem).strip()) for name, section in SECTIONS.items()]
    return [block for block in made if block.text]
