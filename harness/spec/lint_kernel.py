"""The rules about kernels timed on their own: a ceiling beside them, exact rows, bytes that come from memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from harness.spec import model as m
from harness.spec.lint_rules import Finding, Subject
from harness.spec.yaml12 import Loc

CALLS = 100  # identical calls below which a race that shows once in a thousand is likely missed
ROTATION_MB = 256  # several times the largest L2 cache, 50 MB on an H200
OPS = {"qmv": "linear", "attention": "attention"}


def kernel_findings(subject: Subject) -> Iterator[Finding]:
    """Every finding about the kernel_throughput checks of a spec."""
    identities = [(case, case.check) for _, case in subject.of(m.RowIdentity) if isinstance(case.check, m.RowIdentity)]
    for index, check in enumerate(subject.loaded.spec.checks):
        if not isinstance(check, m.KernelThroughput) or check.skip:
            continue
        at: Loc = ("checks", index)
        yield from _measurement(check, at)
        op = OPS[check.op]
        covering = [found for _, found in identities if op in found.ops and found.backend == check.backend]
        if not covering:
            what = f"kernels are timed, and no row_identity check covers `{op}` on {check.backend}"
            yield Finding("no-byte-check", at, what, "add a row_identity check")
            continue
        shapes = {found.geometry for found in covering}
        missing = [name for name in check.geometries if name not in shapes and None not in shapes]
        if missing:
            what = f"attention of {', '.join(missing)} is timed, and no row_identity check has that geometry"
            yield Finding(
                "no-byte-check", (*at, "geometries"), what, "add it to the geometries of a row_identity check"
            )


def _measurement(check: m.KernelThroughput, at: Loc) -> Iterator[Finding]:
    if "stream" not in check.peers:
        what = "without the stream nobody can tell a slow card from a slow kernel, in this record or against another"
        yield Finding("no-stream", (*at, "peers"), what, "add stream to `peers`")
    if check.repeat_calls < CALLS:
        what = f"{check.repeat_calls} identical calls hardly show a race"
        yield Finding("few-calls", (*at, "repeat_calls"), what, f"take {CALLS} or more")
    if check.rotate_mb < ROTATION_MB:
        what = f"copies over {check.rotate_mb} MB may stay in the L2 cache, so times would not be memory's"
        yield Finding("small-rotation", (*at, "rotate_mb"), what, f"rotate over {ROTATION_MB} MB or more")
    if 1 not in check.rows or max(check.rows) == 1:
        what = "one row and more than one must both be timed to say what more rows cost"
        yield Finding("rows", (*at, "rows"), what, "time 1, 4 and 8 rows")
