"""`kernel_throughput`: rows are exact; time and bandwidth of one op against peers in the same run.

The child first compares rows as bytes. Where any byte differs nothing is timed. Then every arm runs in turns, ours a
second time as the null arm, and the bars of the spec are held against medians.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.checks.base import Judgement, of_type
from harness.kernel_figures import OURS, STREAM, KernelTimes, kernel_times
from harness.record.lines import AnyLine, CheckLine, PeerLine
from harness.spec.model import KernelThroughput

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.spec.plan import Case

CACHED = 1.15  # a rate this far above the stream's did not come from memory


@dataclass(frozen=True)
class Bar:
    """One bar and what was measured; `value` None: it could not be."""

    what: str
    value: float | None
    limit: float
    highest: bool  # the limit is a maximum
    noisy: bool = True  # a time, so within the null spread it is undecided
    absent: str = "was not measured"

    def judge(self, spread: float) -> tuple[str, str]:
        """("pass" | "fail" | "unresolved", in words)."""
        side = "at most" if self.highest else "at least"
        if self.value is None:
            return "unresolved", f"{self.what} {self.absent} (bar: {side} {self.limit:g})"
        words = f"{self.what} {self.value:.3g}, bar {side} {self.limit:g}"
        miss = self.value / self.limit - 1 if self.highest else self.limit / self.value - 1 if self.value else 1.0
        if miss <= 0:
            return "pass", words
        if self.noisy and miss <= spread:
            return "unresolved", f"{words}: a miss of {100 * miss:.1f} % within the null spread of {100 * spread:.1f} %"
        return "fail", words


def measure(case: Case, context: RunContext) -> None:
    """One job does it all: checks, then times. The device's lock is held while it runs."""
    check = case.check
    assert isinstance(check, KernelThroughput)
    with context.measuring(case):
        context.job(case, "kernel_throughput", **job_args(check))


def job_args(check: KernelThroughput) -> dict[str, Any]:
    """What the child is told."""
    names = ("op", "rows", "peers", "peer_rows", "repeats", "repeat_calls", "rotate_mb", "backend", "seed")
    args = {name: getattr(check, name) for name in names}
    if check.op == "qmv":
        return args | {"shape": check.shapes[0].model_dump(include={"name", "k", "n", "bits"})}
    return args | {"geometry": check.geometries[0], "layer": check.layers[0], "context": check.contexts[0]}


def judge(case: Case, lines: Sequence[AnyLine], others: Sequence[AnyLine]) -> Judgement:
    """Bytes first; then that everything the spec names is there; then the bars."""
    check = case.check
    assert isinstance(check, KernelThroughput)
    statements = of_type(lines, CheckLine)
    if not statements:
        return Judgement("error", "no row was compared, so no time means anything")
    failed = next((line for line in statements if not line.passed or line.differing_bytes), None)
    if failed is not None:
        return Judgement("fail", f"{failed.name}: {failed.found}; no figure is stated")
    times = kernel_times(lines)
    problem = _incomplete(check, times, of_type(lines, PeerLine))
    if problem:
        return Judgement("error", problem)
    spread = times.null_spread or 0.0
    judged = [bar.judge(spread) for bar in _bars(check, times, of_type(lines, PeerLine))]
    for outcome in ("fail", "unresolved"):
        found = [words for verdict, words in judged if verdict == outcome]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            return Judgement("fail" if outcome == "fail" else "unresolved", found[0] + more)
    return Judgement("pass", _summary(check, times, len(judged)))


def _incomplete(check: KernelThroughput, times: KernelTimes, peers: Sequence[PeerLine]) -> str | None:
    """The first arm that the spec names and the lines lack, or None."""
    expected = [(OURS, rows, 1, False) for rows in check.rows] + [(OURS, check.rows[0], 1, True)]
    expected += [(STREAM, 0, 1, False)] * (STREAM in check.peers)
    expected += [(OURS, 1, 4, False)] * (check.op == "qmv" and {1, 4} <= set(check.rows))
    said = {line.peer: line for line in peers}
    for peer in check.peers:
        if peer == STREAM:
            continue
        if peer not in said:
            return f"peer {peer} was neither measured nor skipped"
        if said[peer].reason is None:
            expected += [(peer, rows, 1, False) for rows in check.peer_rows]
    for arm, rows, launches, again in expected:
        line = times.line(arm, rows, launches, again)
        what = f"{arm} at M = {rows}{', four launches' if launches > 1 else ''}{', again' if again else ''}"
        if line is None:
            return f"{what} was not timed"
        if len(line.us) != check.repeats:
            return f"{what}: {len(line.us)} of {check.repeats} repeats"
        if any(not value > 0 for value in line.us):
            return f"{what}: a time of {min(line.us):g} us cannot be"
    return _impossible(times)


def _impossible(times: KernelTimes) -> str | None:
    """A graph that reads faster than the stream by far was served from the cache, or skipped its work."""
    ceiling = times.stream
    for line in times.lines:
        rate = times.gb_per_s(line.arm, line.rows)
        if ceiling and rate and line.clock == "graph" and line.arm != STREAM and rate > CACHED * ceiling:
            return f"{line.arm} at M = {line.rows} reads {rate:.0f} GB/s, the stream {ceiling:.0f}: not from memory"
    return None


def _bars(check: KernelThroughput, times: KernelTimes, peers: Sequence[PeerLine]) -> Iterator[Bar]:
    bars = check.bars
    if bars.max_rel_error is not None:
        yield Bar("relative error", times.rel_error, bars.max_rel_error, highest=True, noisy=False)
    if bars.min_stream_share is not None:
        yield Bar("share of the stream", times.stream_share(), bars.min_stream_share, highest=False)
    for rows, limit in ((4, bars.max_m4_over_m1), (8, bars.max_m8_over_m1)):
        if limit is not None:
            yield Bar(f"M = {rows} over M = 1", times.over_one(rows), limit, highest=True)
    if bars.min_four_over_one is not None:
        yield Bar("four launches over one", times.four_over_one, bars.min_four_over_one, highest=False)
    for line in peers:
        row_bars = bars.max_peer_ratio.of(line.peer) if bars.max_peer_ratio is not None else None
        for rows in (1, 4, 8) if row_bars is not None else ():
            limit = row_bars.at(rows) if row_bars is not None else None
            if limit is not None:
                ratio = times.peer_ratio(line.peer, rows)
                absent = f"was not measured: {line.reason}" if line.reason else "was not measured"
                yield Bar(f"time over {line.peer}'s at M = {rows}", ratio, limit, highest=True, absent=absent)


def _summary(check: KernelThroughput, times: KernelTimes, bars: int) -> str:
    """What a passing case says."""
    parts = ["rows exact"]
    rate, share = times.gb_per_s(OURS, check.rows[0]), times.stream_share(check.rows[0])
    if rate is not None:
        of_stream = f", {share:.2f} of the stream" if share is not None else ""
        parts.append(f"{rate:.0f} GB/s at M = {check.rows[0]}{of_stream}")
    for rows in check.rows:
        ratio = times.over_one(rows)
        if rows != 1 and ratio is not None:
            parts.append(f"M = {rows} over M = 1 {ratio:.2f}")
    return "; ".join(parts) + (f"; {bars} bars met" if bars else "; no bars set")
