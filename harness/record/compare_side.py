"""One side of a comparison, and what must be alike before anything of both sides may be compared. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from harness.record.finding import short
from harness.record.model import CaseRecord, Record
from harness.record.spec_view import SpecView
from harness.spec.model import CHECK_MODELS

Status = Literal["regressed", "improved", "same", "not comparable"]
Aspect = Literal["bytes", "outcome", "speed"]
Judged = tuple[Status, str]
ALL = "all"  # the figure of a row that stands for a whole case

# What a check says about itself: never a reason why two runs of it differ.
_NEVER = {"id", "kind", "skip", "xfail", "requires", "slow", "matrix", "exclude", "include", "expect_cells"}
# Lists whose entries are cases or arms of their own; they are matched by name.
_AXES = {"stages", "shapes", "geometries", "layers", "contexts", "arms"}
# What decides an outcome but no figure.
_JUDGES = {"bars", "min_acceptance", "min_distinct_tokens", "must_pass", "peers", "peer_rows", "expect_reason"}
_JUDGES |= {"repeats", "warmup", "smallest_effect", "repeat_calls"}
_JUDGES |= {"order", "null_blocks", "processes", "discard"}
_PROMPTED = ("greedy_parity", "throughput", "decline")


@dataclass(frozen=True)
class Row:
    """One figure of one case in both records; A and B in words, the status, and why."""

    check: str
    case: str
    aspect: Aspect
    figure: str
    status: Status
    reason: str
    a: str = ""
    b: str = ""
    lost: bool = False  # it held in A and has no result in B


@dataclass(frozen=True)
class Ended:
    """A case with how it ended, as a reader counts it."""

    case: CaseRecord

    @property
    def is_good(self) -> bool:
        """It holds: passed, or declined where the spec asks for it."""
        return self.case.outcome == "pass" or (self.case.outcome == "declined" and self.case.declared)

    @property
    def is_bad(self) -> bool:
        """It was measured and does not hold."""
        return self.case.outcome == "fail" or (self.case.outcome == "declined" and not self.case.declared)

    @property
    def words(self) -> str:
        """The outcome with its reason."""
        case = self.case
        if not case.finished:
            return "unfinished"
        if case.outcome == "declined" and case.declared:
            return "declined as declared"
        return case.outcome if case.outcome == "pass" else f"{case.outcome}: {short(case.reason)}"


@dataclass(frozen=True)
class Side:
    """A record with what lies beside it; without a copy of its spec only the spec's hash can be compared."""

    stem: str
    record: Record
    env: Mapping[str, Any] = field(default_factory=dict)
    spec: SpecView | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every planned case by its name, in order."""
        return tuple(dict.fromkeys([*(c.name for c in self.record.cases), *map(case_name, self.record.not_run)]))

    def case(self, name: str) -> Ended | None:
        """A case by its name, wherever the spec lies; None when it has no lines."""
        return next((Ended(case) for case in self.record.cases if case.name == name), None)

    def checkpoint(self, role: str) -> dict[str, Any]:
        """What identifies a role's weights, whatever its folder is called; empty when nothing was read."""
        stored = self.env.get("checkpoints")
        found = stored.get(role) if isinstance(stored, Mapping) else None
        if not isinstance(found, Mapping):
            read = (getattr(child, role).get("fingerprint") for child in self.record.children)
            found = next((data for data in read if isinstance(data, Mapping)), {})
        return {key: value for key, value in found.items() if key != "name"}


def case_name(case_id: str) -> str:
    """`check[cell]` of a case id."""
    return case_id.rpartition("::")[2]


def case_block(a: Side, b: Side, old: Ended, new: Ended) -> str | None:
    """Why nothing of this case may be compared, or None."""
    if a.record.device != b.record.device:
        return f"other device: {a.record.device} against {b.record.device}"
    if old.case.kind != new.case.kind:
        return f"other kind: {old.case.kind} against {new.case.kind}"
    for role in ("target", "drafter"):
        mine, theirs = a.checkpoint(role), b.checkpoint(role)
        if changed := [key for key in mine if key in theirs and mine[key] != theirs[key]]:
            return f"other weights: {changed[0]} of the {role} differs"
    if not old.case.finished or not new.case.finished:
        if old.case.finished == new.case.finished:
            return None
        return f"unfinished in {'B' if old.case.finished else 'A'}: the run stopped before this case ended"
    return None


def speed_block(a: Side, b: Side, old: CaseRecord, new: CaseRecord) -> str | None:
    """Why speeds of this case may not be compared although its outcomes may, or None."""
    for where, case in (("A", old), ("B", new)):
        if case.inexact:
            return f"inexact in {where}: engaged by override"
    return machine_block(a, b)


def machine_block(a: Side, b: Side) -> str | None:
    """What of the machine differs that makes another speed, or None."""
    cuda = a.record.device != "CPU"
    for key in ("GPU",) if cuda else ("CPU", "Threads of the child"):
        mine, theirs = _alike(*(_without_driver(side.record.host.get(key, "")) for side in (a, b)))
        if mine != theirs:
            return f"other {key if key.isupper() else key[0].lower() + key[1:]}: {mine} against {theirs}"
    return None


LATER = "power limit"
"""What of a GPU's row older records do not have."""


def _alike(mine: str, theirs: str) -> tuple[str, str]:
    """Both rows, without what only a later record says."""
    both = [row.split(", ") for row in (mine, theirs)]
    if len({any(part.startswith(LATER) for part in row) for row in both}) > 1:
        both = [[part for part in row if not part.startswith(LATER)] for row in both]
    return ", ".join(both[0]), ", ".join(both[1])


def _without_driver(text: str) -> str:
    """A GPU's row without its driver, whose change is a thing to measure."""
    return ", ".join(part for part in text.split(", ") if not part.startswith("driver"))


def notes_between(a: Side, b: Side) -> tuple[str, ...]:
    """What a reader must know of the two runs, in sentences."""
    return tuple(_notes(a, b))


def _notes(a: Side, b: Side) -> Iterator[str]:
    one, two = a.record, b.record
    if one.device != two.device:
        yield f"Other device: {one.device} against {two.device}; nothing is compared across devices."
    if one.spec_name != two.spec_name:
        yield f"Other spec: {one.spec_name} against {two.spec_name}; checks are matched by their ids."
    if one.spec_sha256 != two.spec_sha256:
        hashes = f"{one.spec_sha256[:12] or 'none'} against {two.spec_sha256[:12] or 'none'}"
        yield f"Other spec hash: {hashes}; only checks that read the same are compared."
    for key in ("Commit", "Versions", "OS"):
        mine, theirs = one.host.get(key, ""), two.host.get(key, "")
        if mine != theirs:
            yield f"{key}: {mine or 'not recorded'} against {theirs or 'not recorded'}."
    if one.started_utc > two.started_utc:
        yield f"B is older than A ({two.started_utc} against {one.started_utc})."
    for where, side in (("A", a), ("B", b)):
        record = side.record
        gate = side.env.get("gate")
        if isinstance(gate, Mapping) and gate.get("busy"):
            yield f"{where}: {gate.get('note') or 'the machine was busy'}."
        if not record.complete:
            yield f"{where} is a partial record."
        if record.inexact:
            yield f"{where} is inexact: MTP engaged by override."
        if record.tokens_identical is False:
            yield f"{where}: MTP's tokens differ from classic's; it holds no figure of speed."
        yield from (f"{where} claims more than it holds: {problem}." for problem in record.contradictions)


def settings_difference(a: Side, b: Side, case: CaseRecord, *, judged: bool) -> str | None:
    """The first setting in which a case's check reads otherwise in B; `judged` includes what only decides outcomes."""
    if a.record.spec_sha256 and a.record.spec_sha256 == b.record.spec_sha256:
        return _prompt_difference(a, b, case)
    if a.spec is None or b.spec is None:
        return "other spec hash, and no copy of the spec to see what changed"
    one, two = a.spec.checks.get(case.check, {}), b.spec.checks.get(case.check, {})
    for axis in case.cell:
        mine, theirs = (_axis(check, axis) for check in (one, two))
        if mine != theirs:
            return f"other spec: axis {axis} sets {mine} against {theirs}"
    left_out = _NEVER | _AXES | (set() if judged else _JUDGES)
    extra = ("prompts",) if case.kind in _PROMPTED else ()
    for key in dict.fromkeys((*one, *two, *extra)):
        if key not in left_out and (mine := _value(a.spec, one, key)) != (theirs := _value(b.spec, two, key)):
            return f"other spec: {key} {_brief(mine)} against {_brief(theirs)}"
    if judged and _shape_bars(one, case) != _shape_bars(two, case):
        return "other spec: other bars at this shape"
    return _prompt_difference(a, b, case)


def _axis(check: Mapping[str, Any], axis: str) -> str:
    """What an axis sets; an axis that the kind brings along sets itself."""
    matrix = check.get("matrix")
    entry = matrix.get(axis) if isinstance(matrix, Mapping) else None
    return str(entry.get("env") or entry.get("field")) if isinstance(entry, Mapping) else axis


def _value(spec: SpecView, check: Mapping[str, Any], key: str) -> Any:
    """A setting with its default written out."""
    if key in check and check[key] is not None:
        return check[key]
    if key == "prompts":
        return _first_parity(spec)
    if key in ("block_size", "block_sizes"):
        return spec.block_size if key == "block_size" else [spec.block_size]
    model = CHECK_MODELS.get(str(check.get("kind")))
    info = model.model_fields.get(key) if model is not None else None
    return _plain(info.get_default(call_default_factory=True)) if info is not None else None


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if value is PydanticUndefined:
        return None
    return list(value) if isinstance(value, tuple) else value


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _shape_bars(check: Mapping[str, Any], case: CaseRecord) -> Any:
    """Bars that a kernel check writes at this case's shape."""
    label = case.cell.get("shape")
    for shape in check.get("shapes") or ():
        if isinstance(shape, Mapping) and f"{shape.get('k')}x{shape.get('n')}-{shape.get('bits')}bit" == label:
            return shape.get("bars")
    return None


def _prompt_difference(a: Side, b: Side, case: CaseRecord) -> str | None:
    """A prompt file whose content changed under the same name."""
    if case.kind not in _PROMPTED or a.spec is None:
        return None
    mine, theirs = (side.env.get("prompts") or {} for side in (a, b))
    entries = a.spec.setting(case.check, "prompts", None) or _first_parity(a.spec)
    for entry in entries:
        name = entry.get("file") if isinstance(entry, Mapping) else None
        if name in mine and name in theirs and mine[name] != theirs[name]:
            return f"other prompt: the content of {name} changed"
    return None


def _first_parity(spec: SpecView) -> list[Any]:
    for check in spec.checks.values():
        if check.get("kind") == "greedy_parity":
            return list(check.get("prompts") or [])
    return []
