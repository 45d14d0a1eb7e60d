"""A spec -> the list of cases, in order. Pure: CLI, pytest, JSON and record all walk this one list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.spec import model as m
from harness.spec.load import LoadedSpec
from harness.spec.matrix import Cell, cell_name, expand, label, own_axes
from harness.spec.pair_model import Pair
from harness.spec.resolve import prompt_label
from harness.spec.rules import with_fields


@dataclass(frozen=True)
class Case:
    """A check at one cell: one pytest item, one row of the record."""

    id: str
    name: str
    spec_path: str
    line: int
    check: m.CheckKind  # with this cell's fields and every default filled in
    kind: str
    claim: str
    env: Mapping[str, str | None]  # flags of the cell; None means not set
    fields: Mapping[str, m.Scalar]  # what the other axes set, e.g. stage
    cell: tuple[tuple[str, str], ...]  # axis, value as the id shows it
    pair: Pair | None  # None: the check is about kernels alone
    folder: Path
    requires: tuple[m.Requires, ...]
    skip: str | None
    xfail: m.XFail | None
    slow: bool
    marks: tuple[str, ...]

    @property
    def declared_decline(self) -> bool:
        """Whether the outcome `declined` is what the spec asked for."""
        if isinstance(self.check, m.Attribution):
            return self.fields["stage"] not in self.check.must_pass
        return isinstance(self.check, m.Decline)

    @property
    def block_size(self) -> int:
        """The pair's block size; the loader has seen to it that a check that asks for it has a pair."""
        return self.pair.block_size if self.pair is not None else Pair.model_fields["block_size"].default

    @property
    def child_env(self) -> dict[str, str]:
        """Flags that the child process gets; cells with the same ones share a child."""
        return {name: value for name, value in sorted(self.env.items()) if value is not None}


def child_key(env: Mapping[str, str | None]) -> tuple[tuple[str, str], ...]:
    """What tells children apart: the flags that are set (null and absent are the same)."""
    return tuple((name, value) for name, value in sorted(env.items()) if value is not None)


def is_timed(case: Case) -> bool:
    """Whether a case measures time, so that nothing may run beside it."""
    return "bench" in case.marks


def plan(loaded: LoadedSpec) -> tuple[Case, ...]:
    """Every case of a spec, in file order, then matrix order."""
    cases: list[Case] = []
    for check, line in zip(loaded.spec.checks, loaded.check_lines, strict=True):
        cases += [_case(loaded, check, line, cell) for cell in expand(check).cells]
    return tuple(cases)


def _case(loaded: LoadedSpec, check: m.CheckKind, line: int, cell: Cell) -> Case:
    env: dict[str, str | None] = {}
    fields: dict[str, m.Scalar] = {}
    for name, value in cell:
        axis = check.matrix.get(name)
        if isinstance(axis, m.EnvAxis):
            env[axis.env] = value if isinstance(value, str) else None
        else:
            fields[axis.field if axis else name] = value
    own = own_axes(check)
    narrowed = _narrow(check, {name: value for name, value in fields.items() if name in own})
    set_by_axis = {k: v for k, v in fields.items() if k in type(check).model_fields and k not in own}
    filled = _fill(with_fields(narrowed, set_by_axis), loaded.spec)
    requires = tuple(part for part in (loaded.spec.requires, check.requires) if part is not None)
    name = check.id + cell_name(cell)
    marks = {
        "gpu": any(part.cuda for part in requires),
        "slow": check.slow,
        "bench": isinstance(check, m.Throughput | m.KernelThroughput | m.PeerDecode),
        "weights": not loaded.local_pair,
    }
    return Case(
        id=f"{loaded.id_path}::{name}",
        name=name,
        spec_path=loaded.id_path,
        line=line,
        check=filled,
        kind=check.kind,
        claim=check.claim,
        env=env,
        fields=fields,
        cell=tuple((axis, label(value)) for axis, value in cell),
        pair=loaded.spec.pair,
        folder=loaded.folder,
        requires=requires,
        skip=check.skip,
        xfail=check.xfail,
        slow=check.slow,
        marks=tuple(mark for mark, wanted in marks.items() if wanted),
    )


def _narrow(check: m.CheckKind, cell: Mapping[str, m.Scalar]) -> m.CheckKind:
    """A kernel check at one shape: the lists that its axes come from hold one entry, the shape's bars are merged in."""
    if not isinstance(check, m.KernelThroughput):
        return check
    if check.op == "qmv":
        shape = next(shape for shape in check.shapes if shape.label == cell["shape"])
        bars = shape.bars.over(check.bars) if shape.bars is not None else check.bars
        return check.model_copy(update={"shapes": (shape,), "bars": bars})
    update = {key: (cell[name],) for name, (key, _) in own_axes(check).items()}
    return check.model_copy(update=update)


def _fill(check: m.CheckKind, spec: m.Spec) -> m.CheckKind:
    """Every default that depends on the rest of the spec, written out."""
    size = spec.pair.block_size if spec.pair is not None else None
    update: dict[str, Any] = {}
    match check:
        case m.ExactnessProbe() | m.GreedyParity() | m.Rollback():
            update["block_sizes"] = check.block_sizes or (size,)
        case m.Attribution() | m.Decline():
            update["block_size"] = check.block_size or size
        case m.Throughput():
            arms = (arm.model_copy(update={"block_size": arm.block_size or size}) for arm in check.arms)
            update["arms"] = tuple(arms)
        case _:
            pass
    if isinstance(check, m.GreedyParity | m.Throughput | m.Decline | m.PeerDecode):
        prompts = check.prompts or next((c.prompts for c in spec.checks if isinstance(c, m.GreedyParity)), ())
        prompts = prompts[:1] if isinstance(check, m.PeerDecode) else prompts
        named = (prompt.model_copy(update={"name": prompt_label(prompt, i)}) for i, prompt in enumerate(prompts))
        update["prompts"] = tuple(named)
    return check.model_copy(update=update)
