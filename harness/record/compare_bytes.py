"""Bytes and outcomes of one case in two records: exactness is yes or no, and lost exactness is a regression. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.record.compare_side import Ended, Judged, Row, Side, settings_difference
from harness.record.model import CaseRecord
from harness.record.table import count, plural

STATEMENTS = "statements"
DIVERGENCE = "first_divergence"
CLASSIC_TEXT = "classic's text"


@dataclass(frozen=True)
class Statement:
    """One thing that was compared as bytes, or one yes-or-no statement."""

    holds: bool
    detail: str


def byte_rows(old: CaseRecord, new: CaseRecord, difference: str | None = None) -> Iterator[Row]:
    """Every statement that changed, what only one record compared, and one row for all that did not change.

    With a `difference` between the two checks a change cannot be laid at anybody's door.
    """
    draft = Row(old.check, old.name, "bytes", STATEMENTS, "same", "")
    mine, theirs = statements(old), statements(new)
    both = [name for name in mine if name in theirs]
    unchanged: list[str] = []
    for name in both:
        one, two = mine[name], theirs[name]
        if (one.holds and two.holds) or one == two:
            unchanged.append(name)
            continue
        row = replace(draft, figure=name, a=one.detail, b=two.detail)
        status, reason = _changed(one, two)
        yield replace(row, status="not comparable" if difference else status, reason=difference or reason)
    if unchanged:
        holding = sum(mine[name].holds for name in unchanged)
        rest = len(unchanged) - holding
        said = [f"{plural(holding, 'statement')} {'holds' if holding == 1 else 'hold'} in both"] * bool(holding)
        said += [f"{plural(rest, 'statement')} fail{'s' * (rest == 1)} alike in both"] * bool(rest)
        words = f"{holding} of {len(unchanged)}"
        yield replace(draft, reason=", ".join(said), a=words, b=words)
    for where, own, other in (("A", mine, theirs), ("B", theirs, mine)):
        if lonely := [name for name in own if name not in other]:
            more = f" and {len(lonely) - 1} more" if len(lonely) > 1 else ""
            yield replace(draft, status="not comparable", reason=f"compared in {where} alone: {lonely[0]}{more}")
    yield from _divergence(draft, old, new)
    yield from _classic(draft, old, new)


def statements(case: CaseRecord) -> dict[str, Statement]:
    """What a case compared, by name. A `decline` wants its draws to differ, so its outcome speaks for them."""
    found: dict[str, Statement] = {}
    for draw in case.draws if case.kind != "decline" else ():
        at = "" if draw.first_position is None else f" from position {draw.first_position} on"
        exact = draw.passed and not draw.differing_bytes
        detail = "exact" if exact else f"{count(draw.differing_bytes)} bytes differ{at}"
        found[f"{draw.draw}, block size {draw.block_size}"] = Statement(exact, detail)
    for one in case.comparisons:
        exact = one.identical and one.text_identical
        at = "" if one.first_difference is None else f" from token {one.first_difference} on"
        name = f"{one.prompt} ({one.form}), block size {one.block_size}"
        found[name] = Statement(exact, "identical" if exact else f"differs{at}")
    for check in case.checks:
        found[check.name] = Statement(check.passed and not check.differing_bytes, check.found)
    for prompt, hashes in case.outputs.items():
        exact = len(hashes) == 1
        found[f"timed outputs of {prompt}"] = Statement(exact, "one text" if exact else f"{len(hashes)} texts")
    return found


def _changed(one: Statement, two: Statement) -> Judged:
    if one.holds:
        return "regressed", "it held in A and does not in B"
    if two.holds:
        return "improved", "it did not hold in A and does in B"
    return "not comparable", "it holds in neither, and a count of differing bytes is no measure of how wrong it is"


def _divergence(draft: Row, old: CaseRecord, new: CaseRecord) -> Iterator[Row]:
    one, two = old.first_divergence_text, new.first_divergence_text
    if one is None or two is None:
        return  # the draws of this case have said so
    if one == two:
        yield replace(draft, figure=DIVERGENCE, reason="the same tensor in both", a=one, b=two)
        return
    reason = "both diverge, at another place; neither is better"
    yield replace(draft, figure=DIVERGENCE, status="not comparable", reason=reason, a=one, b=two)


def classic_hashes(case: CaseRecord) -> dict[str, str]:
    """What classic decode gave on its own: by prompt, and of the probe's logits."""
    found = {prompt: hashes[0] for prompt, hashes in case.outputs.items() if len(hashes) == 1}
    found |= {one.prompt: one.classic_sha256 for one in case.comparisons}
    if case.classic_sha256:
        found["logits of the probe"] = case.classic_sha256
    return found


def text_difference(old: CaseRecord, new: CaseRecord) -> str | None:
    """The first classic output that is another one in B; acceptance and speed-up then belong to other text."""
    mine, theirs = classic_hashes(old), classic_hashes(new)
    for name in mine:
        if name in theirs and mine[name] != theirs[name]:
            return f"other text: classic's own output of {name} changed"
    return None


def _classic(draft: Row, old: CaseRecord, new: CaseRecord) -> Iterator[Row]:
    mine, theirs = classic_hashes(old), classic_hashes(new)
    both = [name for name in mine if name in theirs]
    moved = [name for name in both if mine[name] != theirs[name]]
    if not both:
        return
    if not moved:
        reason = f"{plural(len(both), 'output')} with the same hash"
        yield replace(draft, figure=CLASSIC_TEXT, reason=reason)
        return
    first = moved[0]
    more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    reason = f"classic's own output of {first}{more} changed: other kernels, other weights or another machine"
    row = replace(draft, figure=CLASSIC_TEXT, a=mine[first][:10], b=theirs[first][:10])
    yield replace(row, status="not comparable", reason=reason)


def outcome_row(a: Side, b: Side, old: Ended, new: Ended) -> Row:
    """How the case ended in both records."""
    draft = Row(old.case.check, old.case.name, "outcome", "outcome", "same", "", old.words, new.words)
    if difference := settings_difference(a, b, old.case, judged=True):
        if (old.is_good and new.is_good) or old.case.outcome == new.case.outcome == "skipped":
            return replace(draft, reason=f"holds in both, though the check changed ({difference})")
        lost = old.is_good and not (new.is_good or new.is_bad)
        return replace(draft, status="not comparable", reason=difference, lost=lost)
    if old.is_good and new.is_good:
        return replace(draft, reason="holds in both")
    if old.is_bad and new.is_bad:
        alike = "for the same reason" if old.case.reason == new.case.reason else "for another reason"
        return replace(draft, reason=f"does not hold in either, {alike}")
    if old.is_good and new.is_bad:
        return replace(draft, status="regressed", reason="it held in A and does not in B")
    if old.is_bad and new.is_good:
        return replace(draft, status="improved", reason="it did not hold in A and does in B")
    if old.case.outcome == new.case.outcome:
        return replace(draft, reason=f"{old.case.outcome} in both")
    missing = [f"outcome {end.case.outcome} in {where}" for where, end in (("A", old), ("B", new))]
    said = [text for text, end in zip(missing, (old, new), strict=True) if not (end.is_good or end.is_bad)]
    lost = old.is_good and not (new.is_good or new.is_bad)
    return replace(draft, status="not comparable", reason=f"{' and '.join(said)}: it decides nothing", lost=lost)
