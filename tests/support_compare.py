"""Pairs of records for tests of `harness compare`: the committed ones, and the same with raw lines changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from harness.record.build import build_record
from harness.record.compare import Comparison, compare
from harness.record.compare_side import Row, Side
from harness.record.lines import (
    AnyLine,
    ArmLine,
    CaseLine,
    CheckLine,
    ChildLine,
    ComparisonLine,
    DecisionLine,
    DrawLine,
    KernelLine,
)
from harness.record.spec_view import SpecView
from harness.record.store import RecordPaths, read_env, read_lines

OUT = Path(__file__).resolve().parent.parent / "docs" / "benchmark_results"
NANO = RecordPaths(OUT, "gemma4-nano-cpu-2026-11-30")
KERNELS = RecordPaths(OUT, "kernels-gemma4-cuda-2026-11-30")
REPEATS = "    repeats: 6\n    max_tokens: "
GATE_UP = "qmv4[shape:3840x30720-4bit]"
Change = Callable[[AnyLine], AnyLine | None]


@cache
def raw(paths: RecordPaths) -> tuple[tuple[AnyLine, ...], str, str]:
    """Lines, env.json and spec of a committed record, read once."""
    return read_lines(paths.runs).lines, json.dumps(read_env(paths.env)), paths.spec.read_text(encoding="utf-8")


def side(
    paths: RecordPaths,
    *changes: Change,
    env: Callable[[dict[str, Any]], None] | None = None,
    spec: tuple[str, str] | None = None,
) -> Side:
    """A committed record with its raw lines changed (None drops a line), or its env, or its spec."""
    lines, stored, text = raw(paths)
    found = json.loads(stored)
    if env is not None:
        env(found)
    if spec is not None:
        assert spec[0] in text
        text = text.replace(*spec)
        sha = {"spec_sha256": "0" * 64}
        changes = (*changes, lambda line: line.model_copy(update=sha) if line.line == "start" else line)
    kept: list[AnyLine] = []
    for line in lines:
        new: AnyLine | None = line
        for change in changes:
            new = change(new) if new is not None else None
        if new is not None:
            kept.append(new)
    return Side(paths.stem, build_record(kept, found, text), found, SpecView.parse(text))


@cache
def base(paths: RecordPaths) -> Side:
    """A committed record as it is."""
    return side(paths)


def of(case: str, kind: type[Any], **update: Any) -> Change:
    """Changes every line of one kind in one case; a callable value gets the line."""

    def change(line: AnyLine) -> AnyLine:
        if not isinstance(line, kind) or getattr(line, "case", f"::{case}").rpartition("::")[2] != case:
            return line
        values = {key: value(line) if callable(value) else value for key, value in update.items()}
        return line.model_copy(update=values)  # type: ignore[no-any-return]

    return change


def where(accept: Callable[[Any], bool], change: Change) -> Change:
    """The change, for lines that `accept` takes."""
    return lambda line: change(line) if accept(line) else line


def drop(accept: Callable[[Any], bool]) -> Change:
    """Takes lines out."""
    return lambda line: None if accept(line) else line


def timed(factor: float) -> Change:
    """Makes MTP slower by a factor, classic as before."""
    slower = of("decode", ArmLine, decode_s=lambda x: x.decode_s * factor, verify_s=lambda x: x.verify_s * factor)
    return where(lambda x: getattr(x, "slot", "") == "arm", slower)


def ended(case: str, outcome: str, reason: str = "because") -> Change:
    """Another end of a case."""
    return of(case, CaseLine, outcome=outcome, reason=reason)


def ours(factor: float, rows: Iterable[int] = (1, 4, 8), case: str = GATE_UP, arm: str = "ours") -> Change:
    """Makes our kernel of one shape, or another arm of it, slower by a factor."""
    slower = of(case, KernelLine, us=lambda x: tuple(value * factor for value in x.us))
    return where(lambda x: getattr(x, "arm", "") == arm and getattr(x, "rows", -1) in (*rows, 0), slower)


def rows_of(found: Comparison, figure: str, case: str = "decode") -> Row:
    """The one row of a figure."""
    (row,) = [row for row in found.rows if row.case == case and row.figure == figure]
    return row


def pair(paths: RecordPaths, *changes: Change, **more: Any) -> Comparison:
    """The committed record against itself with changes."""
    return compare(base(paths), side(paths, *changes, **more))


FAILING_DRAW: tuple[Change, ...] = (
    where(
        lambda x: isinstance(x, DrawLine) and x.draw.startswith("draw 3"),
        of("probe", DrawLine, passed=False, differing_bytes=77, first_position=3),
    ),
    of("probe", DecisionLine, engaged=False, reason="differs"),
    ended("probe", "declined", "draw 3 differs"),
)
OTHER_TEXT: tuple[Change, ...] = (
    *(of(name, ComparisonLine, classic_sha256="a" * 64, mtp_sha256="a" * 64) for name in ("parity", "decode")),
    of("decode", ArmLine, sha256="a" * 64),
)
WRONG_TEXT = where(
    lambda x: isinstance(x, ComparisonLine) and x.prompt == "docs" and x.block_size == 4,
    of("parity", ComparisonLine, identical=False, text_identical=False, first_difference=17, mtp_sha256="b" * 64),
)
CHANGES: dict[str, tuple[RecordPaths, tuple[Change, ...]]] = {
    "nothing": (NANO, ()),
    "slower arm": (NANO, (timed(1.6),)),
    "hardly slower": (NANO, (timed(1.02),)),
    "much slower": (NANO, (timed(3.0),)),
    "draw fails": (NANO, FAILING_DRAW),
    "text differs": (NANO, (WRONG_TEXT, ended("parity", "fail"))),
    "other text": (NANO, OTHER_TEXT),
    "inexact": (NANO, (of("decode", DecisionLine, inexact=True),)),
    "skipped": (NANO, (ended("decode", "skipped"),)),
    "cut": (NANO, (drop(lambda x: getattr(x, "case", "").endswith("::decode")),)),
    "two pairs": (NANO, (drop(lambda x: isinstance(x, ArmLine) and x.repeat > 1),)),
    "four pairs": (NANO, (drop(lambda x: isinstance(x, ArmLine) and x.repeat > 3), timed(2.5))),
    "other device": (NANO, (lambda x: x.model_copy(update={"device": "GPU"}) if isinstance(x, ChildLine) else x,)),
    "slow kernel": (KERNELS, (ours(1.2),)),
    "slow card": (KERNELS, (ours(1.05), ours(1.05, (), arm="stream"))),
    "differing byte": (KERNELS, (of(GATE_UP, CheckLine, passed=False, differing_bytes=1, found="1 byte"),)),
    "no null arm": (KERNELS, (drop(lambda x: isinstance(x, KernelLine) and x.again), ours(1.5))),
    "no stream": (KERNELS, (drop(lambda x: isinstance(x, KernelLine) and x.arm == "stream"), ours(1.5))),
}


@cache
def changed(name: str) -> Side:
    """A committed record after one of the changes."""
    paths, changes = CHANGES[name]
    return side(paths, *changes)


def against(name: str) -> Comparison:
    """A committed record against itself after one of the changes."""
    return compare(base(CHANGES[name][0]), changed(name))


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets one entry of env.json."""

    def change(env: dict[str, Any]) -> None:
        for key in keys[:-1]:
            env = env[key]
        env[keys[-1]] = value

    return change
