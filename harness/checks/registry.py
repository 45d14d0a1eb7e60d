"""The registry of check kinds: adding one is a module and a line here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.checks import (
    attribution,
    decline,
    exactness_probe,
    geometry,
    greedy_parity,
    kernel_throughput,
    peer_decode,
    rollback,
    row_identity,
    throughput,
)
from harness.checks.base import Judge, Measure
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.record.lines import CaseLine
    from harness.spec.plan import Case


@dataclass(frozen=True)
class CheckKind:
    """One kind: how it measures and how it judges."""

    name: str
    measure: Measure
    judge: Judge
    seconds: float  # what a case takes on the nano pair on two cores; the dry run's estimate starts from it

    def run_case(self, case: Case, context: RunContext) -> CaseLine:
        """Run one case to its end; never raises for what a case can do wrong."""
        return context.run(case)


KINDS: dict[str, CheckKind] = {
    kind.name: kind
    for kind in (
        CheckKind("geometry", geometry.measure, geometry.judge, 1),
        CheckKind("row_identity", row_identity.measure, row_identity.judge, 5),
        CheckKind("exactness_probe", exactness_probe.measure, exactness_probe.judge, 8),
        CheckKind("attribution", attribution.measure, attribution.judge, 10),
        CheckKind("greedy_parity", greedy_parity.measure, greedy_parity.judge, 25),
        CheckKind("throughput", throughput.measure, throughput.judge, 60),
        CheckKind("kernel_throughput", kernel_throughput.measure, kernel_throughput.judge, 10),
        CheckKind("peer_decode", peer_decode.measure, peer_decode.judge, 60),
        CheckKind("decline", decline.measure, decline.judge, 5),
        CheckKind("rollback", rollback.measure, rollback.judge, 15),
    )
}


def get(kind: str) -> CheckKind:
    """The check kind of that name."""
    if kind not in KINDS:
        raise UsageError(f"unknown check kind {kind!r}; known kinds: {', '.join(KINDS)}")
    return KINDS[kind]
