"""Acceptance and paired speeds of one case in two records, judged by their own intervals and null ranges. Pure.

Every rule reads the same from both sides: swapping A and B swaps regressed and improved and nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from harness.record.compare_bytes import text_difference
from harness.record.compare_side import ALL, Judged, Row, Side, speed_block
from harness.record.finding import only_bars
from harness.record.model import CaseRecord
from harness.record.speed_model import AcceptanceFigures, ArmFigures
from harness.record.table import ms, percent, percent_range, share
from harness.stats import INTERVAL_PAIRS, MIN_PAIRS

MEASURED = ("pass", "unresolved")
NO_VERDICT = "unresolved"
ORDER = {"slower": 0, "equivalent": 1, "faster": 2}


def moved(a: float, b: float, floor: float, *, higher_is_better: bool, within: str) -> Judged:
    """Whether B differs from A by a factor beyond 1 + floor; `within` names what the floor is."""
    if a == b:
        return "same", "equal"
    if a <= 0 or b <= 0:
        return "not comparable", "a figure that is not positive has no ratio"
    change = percent(b / a - 1)
    if abs(math.log(b / a)) <= math.log1p(floor):
        return "same", f"{change} is within {100 * floor:.1f} %, {within}"
    better = (b > a) == higher_is_better
    return "improved" if better else "regressed", f"{change} is beyond {100 * floor:.1f} %, {within}"


# ---- acceptance -----------------------------------------------------------------------------------------------------


def acceptance_rows(a: Side, b: Side, old: CaseRecord, new: CaseRecord) -> Iterator[Row]:
    """Tokens per verify of a parity check, by block size, over the generations that both records hold."""
    mine, theirs = ({(c.prompt, c.block_size): c for c in case.comparisons} for case in (old, new))
    both = [key for key in mine if key in theirs]
    for size in sorted({size for _, size in both}):
        keys = [key for key in both if key[1] == size]
        one, two = (pooled([side[key].acceptance for key in keys]) for side in (mine, theirs))
        if one is not None and two is not None:
            yield _acceptance(a, b, old, new, f"acceptance_length, block size {size}", one, two)


def pooled(parts: Sequence[AcceptanceFigures | None]) -> float | None:
    """Tokens per verify over several generations; None when one of them has no rounds."""
    found = [part for part in parts if part is not None]
    if not found or len(found) != len(parts):
        return None
    return 1 + sum(part.num_accepted for part in found) / sum(part.num_rounds for part in found)


def _acceptance(
    a: Side, b: Side, old: CaseRecord, new: CaseRecord, figure: str, one: float, two: float, effect: float | None = None
) -> Row:
    """Counted, not timed: on the same text it has no noise, so the smallest effect of interest alone decides."""
    draft = Row(old.check, old.name, "speed", figure, "not comparable", "", share(one), share(two))
    if block := inexact_block(old, new) or text_difference(old, new):
        return replace(draft, reason=block)
    if effect is None:
        effect = max(side.spec.smallest_effect(old.check) if side.spec is not None else 0.02 for side in (a, b))
    status, reason = moved(one, two, effect, higher_is_better=True, within="the smallest effect of interest")
    return replace(draft, status=status, reason=reason)


def inexact_block(old: CaseRecord, new: CaseRecord) -> str | None:
    """Acceptance of wrong text says nothing."""
    for where, case in (("A", old), ("B", new)):
        wrong = any(not (one.identical and one.text_identical) for one in case.comparisons)
        if case.inexact or wrong or any(not arm.identical for arm in case.arms):
            return f"inexact in {where}: MTP's text is not classic's"
    return None


# ---- arms -----------------------------------------------------------------------------------------------------------


def arm_rows(a: Side, b: Side, old: CaseRecord, new: CaseRecord) -> Iterator[Row]:
    """Every arm of a throughput case: acceptance, verdict, paired delta, and what its steps cost."""
    if not (old.arms or new.arms):
        return
    draft = Row(old.check, old.name, "speed", ALL, "not comparable", "")
    for where, case in (("A", old), ("B", new)):
        if case.outcome not in MEASURED and not only_bars(case):
            yield replace(draft, reason=f"outcome {case.outcome} in {where}: its deltas decide nothing")
            return
    mine, theirs = ({arm.arm: arm for arm in case.arms} for case in (old, new))
    for name in dict.fromkeys((*mine, *theirs)):
        if name not in mine or name not in theirs:
            where = "A" if name in mine else "B"
            yield replace(draft, figure=f"{name}: {ALL}", reason=f"the arm is only in {where}")
        else:
            yield from _arm(a, b, old, new, mine[name], theirs[name])


def _arm(a: Side, b: Side, old: CaseRecord, new: CaseRecord, one: ArmFigures, two: ArmFigures) -> Iterator[Row]:
    draft = Row(old.check, old.name, "speed", f"{one.arm}: {ALL}", "not comparable", "")
    if one.block_size != two.block_size:
        yield replace(draft, reason=f"other block size: {one.block_size} against {two.block_size}")
        return
    if (mine := arm_flags(a, old, one.arm)) != (theirs := arm_flags(b, new, two.arm)):
        yield replace(draft, reason=f"other flags: {mine} against {theirs}")
        return
    effect = max(one.smallest_effect, two.smallest_effect)
    if one.acceptance is not None and two.acceptance is not None:
        lengths = (one.acceptance.acceptance_length, two.acceptance.acceptance_length)
        yield _acceptance(a, b, old, new, f"{one.arm}: acceptance_length", *lengths, effect)
    block = speed_block(a, b, old, new) or inexact_block(old, new)
    if block is None and not (one.delta and two.delta):
        block = f"no figure of speed in {'A' if not one.delta else 'B'}: {(two if one.delta else one).verdict_reason}"
    delta = replace(draft, figure=f"{one.arm}: delta", a=percent_range(one.delta), b=percent_range(two.delta))
    if block:
        yield replace(delta, reason=block)
        return
    if other := text_difference(old, new):
        yield replace(delta, reason=other)
        yield from _costs(draft, one, two)  # a step takes as long for other tokens
        return
    status, reason = judge_verdicts(one, two)
    yield replace(draft, figure=f"{one.arm}: verdict", status=status, reason=reason, a=one.verdict, b=two.verdict)
    status, reason = judge_arms(one, two)
    yield replace(delta, status=status, reason=reason)
    yield from _costs(draft, one, two)


def arm_flags(side: Side, case: CaseRecord, arm: str) -> Mapping[str, str | None]:
    """The flags that the spec sets for one arm; none without a copy of the spec."""
    arms = side.spec.setting(case.check, "arms", ()) if side.spec is not None else ()
    entry = next((entry for entry in arms if isinstance(entry, Mapping) and entry.get("name") == arm), {})
    return dict(entry.get("env") or {})


def judge_verdicts(one: ArmFigures, two: ArmFigures) -> Judged:
    """Verdict against verdict; unresolved decides nothing on either side."""
    if one.verdict == two.verdict:
        return "same", f"{one.verdict} in both"
    if NO_VERDICT in (one.verdict, two.verdict):
        where = "A" if one.verdict == NO_VERDICT else "B"
        return "not comparable", f"unresolved in {where}: {(one if where == 'A' else two).verdict_reason}"
    better = ORDER[two.verdict] > ORDER[one.verdict]
    return "improved" if better else "regressed", f"{one.verdict} in A, {two.verdict} in B"


def judge_arms(one: ArmFigures, two: ArmFigures) -> Judged:
    """Paired deltas of two runs. Six pairs and more on both sides: their 95 % intervals must not overlap, and the means
    must be apart by more than the smallest effect of interest and both mean nulls. Fewer: every delta of one run must
    lie beyond every delta of the other by more than the largest null. Below three pairs nothing is said.
    """
    if one.delta == two.delta:
        return "same", "equal"
    if min(one.n, two.n) < MIN_PAIRS:
        where = "A" if one.n < MIN_PAIRS else "B"
        return "not comparable", f"no interval in {where}: {min(one.n, two.n)} pairs are too few"
    if one.interval is None or two.interval is None or min(one.n, two.n) < INTERVAL_PAIRS:
        floor = max(abs(null) for null in (*one.null, *two.null))
        up, down = min(two.delta) - max(one.delta), min(one.delta) - max(two.delta)
        words = f"{percent_range(one.delta)} and {percent_range(two.delta)}"
        if max(up, down) > floor:
            reason = f"{words} lie apart by more than {100 * floor:.1f} %, the largest |null| of both"
            return "improved" if up > down else "regressed", reason
        return "same", f"{words} do not lie apart by more than {100 * floor:.1f} %: within the null range"
    words = f"intervals {percent_range(one.interval)} and {percent_range(two.interval)}"
    if one.interval[0] <= two.interval[1] and two.interval[0] <= one.interval[1]:
        return "same", f"{words} overlap"
    effect = max(one.smallest_effect, two.smallest_effect)
    floor = max(effect, *(abs(statistics.fmean(arm.null)) for arm in (one, two)))
    name = "the smallest effect of interest" if floor == effect else "the larger |mean null|"
    before, after = (1 + statistics.fmean(arm.delta) for arm in (one, two))
    status, reason = moved(before, after, floor, higher_is_better=True, within=name)
    return status, f"{words} are apart, and {reason}"


def _costs(draft: Row, one: ArmFigures, two: ArmFigures) -> Iterator[Row]:
    """Classic's step on its own, and the others over it, since a slower machine slows all of them alike."""
    parts = (
        ("classic_step_ms", one.classic_step_ms, two.classic_step_ms, ms),
        ("verify_ms / classic_step_ms", _over(one.verify_ms, one), _over(two.verify_ms, two), share),
        ("draft_step_ms / classic_step_ms", _over(one.draft_step_ms, one), _over(two.draft_step_ms, two), share),
    )
    null = max((abs(null) for null in (*one.null, *two.null)), default=0.0)
    effect = max(one.smallest_effect, two.smallest_effect)
    floor = max(null, effect)
    within = "the largest |null| of both" if floor == null else "the smallest effect of interest"
    for name, mine, theirs, written in parts:
        if mine is None or theirs is None:
            continue
        row = replace(draft, figure=f"{one.arm}: {name}", a=written(mine), b=written(theirs))
        if min(len(one.null), len(two.null)) < MIN_PAIRS and mine != theirs:
            yield replace(row, reason=f"no null range: fewer than {MIN_PAIRS} null deltas")
            continue
        status, reason = moved(mine, theirs, floor, higher_is_better=False, within=within)
        yield replace(row, status=status, reason=reason)


def _over(cost: float | None, arm: ArmFigures) -> float | None:
    return cost / arm.classic_step_ms if cost is not None and arm.classic_step_ms else None
