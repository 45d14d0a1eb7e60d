"""Counters in our terms: what a source says, and what follows from its counts, as a table or as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from harness.counters import Counters, applicable, violations
from harness.record.table import cell, table

ABSENT = "not stated"


@dataclass(frozen=True)
class Normalized:
    """The three figures under our names; from counts where there are any, else as the source printed them."""

    acceptance_rate: float | None
    acceptance_length: float | None  # tokens per verify, the bonus included
    accepted_at: tuple[float, ...]  # share of rounds that accepted draft i


def normalized(c: Counters) -> Normalized:
    """The figures of one source."""
    rate = c.acceptance_rate.value if c.acceptance_rate is not None else None
    length = c.acceptance_length.value if c.acceptance_length is not None else None
    if c.accepted is not None and c.drafted:
        rate = c.accepted / c.drafted
    if c.accepted is not None and c.rounds:
        length = 1 + c.accepted / c.rounds
    at = tuple(share.value for share in c.rates_at)
    if c.accepted_at is not None and c.rounds:
        at = tuple(count / c.rounds for count in c.accepted_at)
    return Normalized(rate, length, at)


def as_table(found: Sequence[Counters]) -> str:
    """One row a source."""
    rows = []
    for one in found:
        figures = normalized(one)
        rows.append(
            [
                cell(one.source),
                *(ABSENT if value is None else f"{value:,}" for value in (one.rounds, one.drafted, one.accepted)),
                ABSENT if figures.acceptance_rate is None else f"{figures.acceptance_rate:.3f}",
                ABSENT if figures.acceptance_length is None else f"{figures.acceptance_length:.2f}",
                " / ".join(f"{share:.2f}" for share in figures.accepted_at) or ABSENT,
                str(applicable(one)),
                str(len(violations(one))),
            ]
        )
    columns = ["Source", ">rounds", ">drafted", ">accepted", ">acceptance_rate", ">acceptance_length", ">accepted_at"]
    return table([*columns, ">Identities checked", ">Violated"], rows)


def as_json_lines(found: Sequence[Counters]) -> str:
    """One object a line."""
    return "\n".join(json.dumps(_object(one), ensure_ascii=False) for one in found)


def _object(one: Counters) -> dict[str, object]:
    figures = normalized(one)
    return {
        "source": one.source,
        "rounds": one.rounds,
        "drafted": one.drafted,
        "accepted": one.accepted,
        "acceptance_rate": figures.acceptance_rate,
        "acceptance_length": figures.acceptance_length,
        "accepted_at": list(figures.accepted_at),
        "identities_checked": applicable(one),
        "violated": [{"identity": found.identity, "text": found.text} for found in violations(one)],
    }
