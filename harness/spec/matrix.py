"""Axes -> cells: the product in declaration order, minus `exclude`, plus `include`. Pure.

Problems come back as (path inside the check, message), so that the loader can point at them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.spec.model import Attribution, CheckBase, EnvAxis, KernelThroughput, Scalar
from harness.spec.yaml12 import Loc

MAX_CELLS = 64
_LABEL = re.compile(r"[A-Za-z0-9_.-]+")
Finding = tuple[Loc, str]
Cell = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True)
class Expansion:
    """The cells of a check in order, and what is wrong with its matrix."""

    cells: tuple[Cell, ...]
    findings: tuple[Finding, ...]


def label(value: Scalar) -> str:
    """A value as it stands in an id: `unset` for null, `true` and `false` for switches."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def cell_name(cell: Cell) -> str:
    """`[axis:value+axis:value]`, nothing for a check without axes."""
    return "[" + "+".join(f"{axis}:{label(value)}" for axis, value in cell) + "]" if cell else ""


def own_axes(check: CheckBase) -> dict[str, tuple[str, tuple[Scalar, ...]]]:
    """The axes that a kind brings along: name -> the key they are written under, and their values."""
    if isinstance(check, Attribution):
        return {"stage": ("stages", check.stages)}
    if isinstance(check, KernelThroughput):
        if check.op == "qmv":
            return {"shape": ("shapes", tuple(shape.label for shape in check.shapes))}
        return {
            "geometry": ("geometries", check.geometries),
            "layer": ("layers", check.layers),
            "context": ("contexts", check.contexts),
        }
    return {}


def axes_of(check: CheckBase) -> dict[str, tuple[Scalar, ...]]:
    """The axes of a check in order; those that its kind brings along come first."""
    axes = {name: values for name, (_, values) in own_axes(check).items()}
    for name, axis in check.matrix.items():
        axes.setdefault(name, axis.values)
    return axes


def expand(check: CheckBase) -> Expansion:
    """All cells of a check and all findings about its matrix."""
    axes = axes_of(check)
    findings = _axis_findings(check, axes)
    cells: list[Cell] = [tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for index, pattern in enumerate(check.exclude):
        kept = [cell for cell in cells if not _matches(cell, pattern)]
        if unknown := [name for name in pattern if name not in axes]:
            findings.append((("exclude", index), f"exclude names no axis: {', '.join(unknown)}; axes: {_list(axes)}"))
        elif len(kept) == len(cells) or not pattern:
            findings.append((("exclude", index), "exclude matches no cell; write values as the axes have them"))
        else:
            cells = kept
    for index, entry in enumerate(check.include):
        findings += [(("include", index, *loc), text) for loc, text in _include_findings(check, axes, entry)]
        if set(entry) == set(axes) and axes:
            cell: Cell = tuple((name, entry[name]) for name in axes)
            if cell_name(cell) in {cell_name(other) for other in cells}:
                findings.append((("include", index), f"duplicate cell {cell_name(cell)}"))
            else:
                cells.append(cell)
    findings += _count_findings(check, axes, len(cells))
    return Expansion(tuple(cells), tuple(findings))


def _axis_findings(check: CheckBase, axes: Mapping[str, Sequence[Scalar]]) -> list[Finding]:
    findings: list[Finding] = []
    targets: dict[str, str] = {}
    own = {name: key for name, (key, _) in own_axes(check).items()}
    for name, axis in check.matrix.items():
        if name in own:
            message = f"the axis '{name}' is already there (key `{own[name]}`); choose another name"
            findings.append((("matrix", name), message))
        target = axis.env if isinstance(axis, EnvAxis) else axis.field
        if target in targets:
            findings.append((("matrix", name), f"'{target}' is already set by axis '{targets[target]}'"))
        targets[target] = name
    for name, values in axes.items():
        base: Loc = ("matrix", name, "values") if name in check.matrix else (own[name],)
        seen: set[str] = set()
        for index, value in enumerate(values):
            text = label(value)
            if not _LABEL.fullmatch(text):
                findings.append(((*base, index), f"{value!r} cannot stand in a case id; use letters, digits, _ . -"))
            if text in seen:
                findings.append(((*base, index), f"duplicate cell: the value '{text}' is already in axis '{name}'"))
            seen.add(text)
    return findings


def _include_findings(
    check: CheckBase, axes: Mapping[str, Sequence[Scalar]], entry: Mapping[str, Scalar]
) -> list[Finding]:
    missing = [name for name in axes if name not in entry]
    unknown = [name for name in entry if name not in axes]
    findings: list[Finding] = []
    if missing or unknown or not entry:
        said = [f"missing {_list(missing)}"] * bool(missing) + [f"unknown {_list(unknown)}"] * bool(unknown)
        detail = "; ".join(said) or "it is empty"
        findings.append(((), f"include takes complete cells, a value for every axis: {detail}"))
    for name, value in entry.items():
        axis = check.matrix.get(name)
        if isinstance(axis, EnvAxis) and value is not None and not isinstance(value, str):
            findings.append(((name,), f'expected text, found {value!r}; quote it: "{label(value)}"'))
        elif not _LABEL.fullmatch(label(value)):
            findings.append(((name,), f"{value!r} cannot stand in a case id; use letters, digits, _ . -"))
    return findings


def _count_findings(check: CheckBase, axes: Mapping[str, Sequence[Scalar]], count: int) -> list[Finding]:
    empty = next((name for name, values in axes.items() if not values), None)
    place: Loc = ("matrix",) if check.matrix else ()
    if empty is not None:
        place = ("matrix", empty, "values") if empty in check.matrix else (own_axes(check)[empty][0],)
    if count == 0:
        return [(place, "matrix expands to 0 cells")]
    if count > MAX_CELLS:
        return [(place, f"matrix expands to {count} cells; a check has at most {MAX_CELLS}")]
    if check.expect_cells is not None and check.expect_cells != count:
        return [(("expect_cells",), f"expect_cells is {check.expect_cells}, but the matrix has {count} cells")]
    return []


def _matches(cell: Cell, pattern: Mapping[str, Scalar]) -> bool:
    values = dict(cell)
    return bool(pattern) and all(
        name in values and type(values[name]) is type(value) and values[name] == value
        for name, value in pattern.items()
    )


def _list(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(names) or "none"
