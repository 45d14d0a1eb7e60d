"""The finding in one line: what a record's title says, good or bad. Pure.

Order of importance: wrong text, a declined pair, an override, failures, speed, a cut run, errors, skips; a cut run says
so behind what it found. A title never holds a speed-up unless every output was compared and equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness.record.lines import Verdict
from harness.record.model import CaseRecord
from harness.record.speed_model import ArmFigures
from harness.record.table import percent, percent_range, plural, share

LONGEST_REASON = 110
BAR = ", bar at least"
"""In what a judge of other engines says of a bar that was missed."""


@dataclass(frozen=True)
class Finding:
    """A title and whether it is bad news."""

    title: str
    negative: bool


def state_finding(
    *,
    subject: str,
    device: str,
    date: str,
    cases: Sequence[CaseRecord],
    not_run: Sequence[str],
    complete: bool,
    tokens_identical: bool | None,
    known_failures: Collection[str] = (),
) -> Finding:
    """The title of a run."""
    cut = _cut(cases, not_run) if not complete else None
    speed = _speed(cases, tokens_identical)
    told = {case.name for case in cases if speed and _rivals_bars(case)}
    bad = _bad_news(cases, tokens_identical, known_failures, told)
    kernels = _kernels(cases)
    mark: str | None
    if bad:
        text, mark = (f"{bad}, {cut}" if cut else bad), "negative"
    elif speed:
        text, mark = f"{speed[0]}, {cut}" if cut else speed[0], speed[1]
    elif cut:
        text, mark = cut, None
    elif kernels:
        text, mark = kernels
    else:
        text, mark = _without_speed(cases, tokens_identical), None
    where = ", ".join(part for part in (device, date) if part)
    title = f"{subject}: {text}{f' ({mark})' if mark else ''}{f' ({where})' if where else ''}"
    return Finding(" ".join(title.split()), mark == "negative")


def short(reason: str) -> str:
    """A reason for a title: one line, cut at a word."""
    flat = " ".join(reason.split()).rstrip(".")
    return flat if len(flat) <= LONGEST_REASON else flat[:LONGEST_REASON].rsplit(" ", 1)[0] + " ..."


def _bad_news(
    cases: Sequence[CaseRecord], tokens_identical: bool | None, known_failures: Collection[str], told: Collection[str]
) -> str | None:
    if tokens_identical is False:
        return _difference(cases)
    declined = next((case for case in cases if case.outcome == "declined" and not case.declared), None)
    if declined is not None:
        if declined.kind == "throughput" and declined.engaged:
            return f"no speed is stated, {short(declined.reason)}"
        return f"MTP declines, {short(declined.first_divergence_text or declined.decision_reason or declined.reason)}"
    if any(case.inexact for case in cases):
        return "MTP engaged inexact, by override"
    failed = [c for c in cases if c.outcome == "fail" and c.check not in known_failures and not only_bars(c)]
    failed = [case for case in failed if case.name not in told]
    if failed:
        first = failed[0]
        what = short(first.first_divergence_text or first.reason)
        verb = "fails" if len(failed) == 1 else "fail"
        return f"{len(failed)} of {plural(len(cases), 'case')} {verb}, first {first.name}: {what}"
    return None


def only_bars(case: CaseRecord) -> bool:
    """Whether a case failed on its bars alone: its text is right and its speed-up was judged."""
    return case.outcome == "fail" and case.verdict is not None and any(bar.met is False for bar in case.bars)


def _rivals_bars(case: CaseRecord) -> tuple[str, ...]:
    """Of a case of other engines that failed on its bars alone, each bar that was missed; else nothing."""
    if case.kind != "peer_decode" or case.outcome != "fail":
        return ()
    parts = tuple(case.reason.split("; "))
    return parts if all(BAR in part for part in parts) else ()


def _difference(cases: Sequence[CaseRecord]) -> str:
    for case in cases:
        for one in case.comparisons:
            if not (one.identical and one.text_identical):
                at = "" if one.first_difference is None else f" from token {one.first_difference} on"
                return f"MTP text differs from classic{at}, prompt {one.prompt}, block size {one.block_size}"
        failed = next((check for check in case.checks if not check.passed), None)
        if case.kind == "throughput" and failed is not None:
            return f"MTP text differs from classic, {failed.name}"
        for prompt, hashes in case.outputs.items():
            if len(hashes) > 1:
                return f"MTP text differs from classic, prompt {prompt}, in the timed runs"
    return "MTP text differs from classic"


def _cut(cases: Sequence[CaseRecord], not_run: Sequence[str]) -> str:
    total = len(cases) + len(not_run)
    return f"partial record, {sum(case.finished for case in cases)} of {plural(total, 'case')} finished"


def _speed(cases: Sequence[CaseRecord], tokens_identical: bool | None) -> tuple[str, str | None] | None:
    arms = [arm for case in cases if case.finished for arm in case.arms if arm.delta]
    if not arms or tokens_identical is not True:
        return None
    words = [arm_words(arm, named=len(arms) > 1) for arm in arms]
    found: set[Verdict] = {arm.verdict for arm in arms}
    mark = "negative" if "slower" in found else "unresolved" if "unresolved" in found else None
    missed = [f"{bar.what} {bar.value:.3g}" for case in cases for bar in case.bars if bar.met is False]
    missed += [part.partition(BAR)[0] for case in cases for part in _rivals_bars(case)]
    if missed:
        bars = f"{plural(len(missed), 'bar')} missed, first {missed[0]}"
        return f"{'; '.join(words)}, byte-identical, {bars}", "negative"
    return f"{'; '.join(words)}, byte-identical", mark


def arm_words(arm: ArmFigures, named: bool = False) -> str:
    """What one arm's verdict says, with its range of deltas."""
    who = f"MTP ({arm.arm})" if named else "MTP"
    if arm.verdict == "faster":
        return f"{who} decodes {percent_range(arm.delta)} faster than classic"
    if arm.verdict == "slower":
        losses = sorted(-delta for delta in arm.delta)
        low, high = (percent(loss).lstrip("+") for loss in (losses[0], losses[-1]))
        return f"{who} decodes {low if low == high else f'{low} to {high}'} slower than classic"
    null = percent_range((*arm.null, *arm.null_block))
    if arm.verdict == "equivalent":
        return (
            f"{who} decodes as fast as classic, deltas {percent_range(arm.delta)} within {percent(arm.smallest_effect)}"
        )
    return f"{who} against classic is unresolved, deltas {percent_range(arm.delta)}, null {null}"


def _kernels(cases: Sequence[CaseRecord]) -> tuple[str, str | None] | None:
    """What a run of kernels found: bytes first, then the share of the stream and what more rows cost."""
    found = [case.kernel for case in cases if case.finished and case.kernel is not None and not case.kernel.withheld]
    if not found or any(case.outcome == "error" for case in cases):
        return None
    checks = [check for case in cases if case.kind == "row_identity" for check in case.checks]
    differing = sum(kernel.differing_bytes for kernel in found) + sum(check.differing_bytes or 0 for check in checks)
    words = [f"{differing} differing bytes over {plural(len(found), 'shape')}"]
    products = [kernel for kernel in found if kernel.op == "qmv"]
    shares = [kernel.stream_share for kernel in products if kernel.stream_share is not None]
    eights = [kernel.m8_over_m1 for kernel in products if kernel.m8_over_m1 is not None]
    if shares:
        low, high = share(min(shares)), share(max(shares))
        words.append(f"products at {low if low == high else f'{low} to {high}'} of the read-only stream")
    if eights:
        words.append(f"8 rows in {max(eights):.2f}x the time of 1 at most")
    return ", ".join(words), "unresolved" if any(case.outcome == "unresolved" for case in cases) else None


def _without_speed(cases: Sequence[CaseRecord], tokens_identical: bool | None) -> str:
    if not cases:
        return "nothing ran"
    errors = [case for case in cases if case.outcome == "error"]
    if errors:
        first = errors[0]
        which = f"{len(errors)} of {plural(len(cases), 'case')} could not be measured"
        return f"{which}, first {first.name}: {short(first.reason)}"
    skipped = [case for case in cases if case.outcome == "skipped"]
    if len(skipped) == len(cases):
        return f"nothing measured here, {short(skipped[0].reason)}"
    if tokens_identical is True:
        withheld = any(arm.verdict_reason.startswith("withheld") for case in cases for arm in case.arms)
        return f"MTP is byte-identical to classic, speed {'withheld' if withheld else 'not measured'}"
    ran = len(cases) - len(skipped)
    return f"{plural(ran, 'case')} ran as declared, text and speed not compared"
