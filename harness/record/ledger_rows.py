"""The ledger of a whole run: settings of every child and of every job, alike ones in one row. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness import ledger
from harness.record.lines import AnyLine, ChildLine, PathLine, Setting
from harness.record.model import LedgerFigures
from harness.record.spec_view import CaseName, SpecView

ALL = "every child"
EACH_JOB = "at each job"


def ledger_rows(
    children: Sequence[ChildLine], cases: Mapping[str, Sequence[AnyLine]], spec: SpecView
) -> tuple[LedgerFigures, ...]:
    """A row for each setting and each way it was asked for and came out; empty where no child stated any."""
    told = [child for child in children if child.settings]
    where: dict[Setting, list[str]] = {}
    for child in told:
        for row in child.settings:
            where.setdefault(row, []).append(child.child)
    order = list(dict.fromkeys(row.name for row in where))
    rows = sorted(where, key=lambda row: order.index(row.name))
    found = [_figures(row, (ALL,) if len(where[row]) == len(told) else where[row]) for row in rows]
    return (*found, *_job_rows(cases, spec)) if told else ()


def _figures(row: Setting, where: Iterable[str]) -> LedgerFigures:
    return LedgerFigures(**row.model_dump(), differs=ledger.difference(row), where=tuple(where))


def _job_rows(cases: Mapping[str, Sequence[AnyLine]], spec: SpecView) -> list[LedgerFigures]:
    """Stage and block size of every probe and arm: what the spec asks for against what the target ran."""
    where: dict[Setting, dict[str, None]] = {}
    for case, events in cases.items():
        name = CaseName.parse(case)
        for line in events:
            if isinstance(line, PathLine):
                for row in (_stage(name, line, spec), _block_size(name, line, spec)):
                    where.setdefault(row, {})[f"{name.check}: {line.arm}" if line.arm else name.check] = None
    return [_figures(row, names) for row, names in sorted(where.items(), key=lambda item: item[0].name, reverse=True)]


def _setting(name: str, requested: Any, effective: object, source: str) -> Setting:
    asked = None if requested is None else str(requested)
    return Setting(name=name, requested=asked, effective=str(effective), source=source, read=EACH_JOB)


def _stage(name: CaseName, line: PathLine, spec: SpecView) -> Setting:
    asked = name.cell.get("stage") or spec.setting(name.check, "stage", None)
    return _setting("stage", asked, line.stage, "spec" if asked is not None else "default")


def _block_size(name: CaseName, line: PathLine, spec: SpecView) -> Setting:
    """The arm's own block size, one of the check's, the pair's, or the default, in this order."""
    cell = name.cell.get("block_size")
    arms = {str(arm.get("name")): arm.get("block_size") for arm in spec.setting(name.check, "arms", ())}
    own = cell or arms.get(line.arm or "") or spec.setting(name.check, "block_size", None)
    sizes = spec.setting(name.check, "block_sizes", ())
    if own is None and sizes:
        own = line.block_size if line.block_size in sizes else " or ".join(map(str, sizes))
    if own is not None or spec.states_block_size:
        return _setting("block size", own if own is not None else spec.block_size, line.block_size, "spec")
    return _setting("block size", None, line.block_size, "default")
