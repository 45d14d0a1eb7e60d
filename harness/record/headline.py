"""The results table of the project's README: the newest complete record of each spec, between markers.

A partial record has not asked every question: it never takes the place of one that has, whose answers may be worse.

Only a README that already has the block is touched, and nothing in it but that block.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from harness.record.finding import short
from harness.record.model import Record
from harness.record.page import block_differences, replace_block
from harness.record.sections import Block
from harness.record.speed_model import ArmFigures
from harness.record.store import DEFAULT_OUT, RUNS
from harness.record.table import cell, percent_range, share, table
from harness.record.textfile import read_text, write_text

BLOCK = "results"
README = "README.md"


def readme_of(out: Path) -> Path | None:
    """The README above a `docs/benchmark_results` folder; None for records kept elsewhere."""
    folder = out.resolve()
    depth = len(DEFAULT_OUT.parts)
    return folder.parents[depth - 1] / README if folder.parts[-depth:] == DEFAULT_OUT.parts else None


def write_headlines(out: Path) -> None:
    """Renew the results block of the README that belongs to `out`, if there is one."""
    path = readme_of(out)
    if path is not None and path.is_file():
        old, newline = read_text(path)
        new = replace_block(old, headlines(out))
        if new != old:
            write_text(path, new, newline)


def headline_differences(out: Path) -> list[str]:
    """Where the README's results are not what the newest records say."""
    path = readme_of(out)
    if path is None or not path.is_file():
        return []
    return [f"{path}:{problem}" for problem in block_differences(read_text(path)[0], headlines(out))]


def headlines(out: Path) -> Block:
    """The table: one row a spec."""
    rows = []
    for stem, record in _newest(out):
        arms = [arm for case in record.cases for arm in case.arms]
        rows.append(
            [
                cell(record.spec_name),
                f"[{cell(record.title)}]({DEFAULT_OUT.as_posix()}/{stem}.md)",
                cell(record.device),
                cell(record.date),
                _acceptance(arms),
                cell(_speed(record, arms)),
            ]
        )
    if not rows:
        return Block(BLOCK, "No records yet: `harness run SPEC` writes one.")
    return Block(BLOCK, table(["Spec", "Finding", "Device", "Date", ">Tokens per verify", "MTP vs classic"], rows))


def _newest(out: Path) -> list[tuple[str, Record]]:
    found: dict[str, tuple[str, Record]] = {}
    for folder in sorted(path.parent for path in (out / "data").glob(f"*/{RUNS}")):
        try:
            record = Record.model_validate_json((folder / "record.json").read_bytes())
        except (OSError, ValidationError):
            continue  # not rendered, or of another format: `harness report` renders it
        known = found.get(record.spec_name)
        if known is None or _rank(folder.name, record) >= _rank(*known):
            found[record.spec_name] = (folder.name, record)
    return [found[name] for name in sorted(found)]


def _rank(stem: str, record: Record) -> tuple[bool, str, int]:
    """What the later of two records is told by; complete ones come after all others."""
    return record.complete, record.started_utc, len(stem)


def _acceptance(arms: Iterable[ArmFigures]) -> str:
    lengths = [share(arm.acceptance.acceptance_length) for arm in arms if arm.acceptance]
    return ", ".join(dict.fromkeys(lengths)) or "not measured"


def _speed(record: Record, arms: Iterable[ArmFigures]) -> str:
    """The range of deltas with its verdict, or why there is none."""
    if record.tokens_identical is False:
        return "none: tokens differ"
    measured = [f"{percent_range(arm.delta)} ({arm.verdict})" for arm in arms if arm.delta]
    if measured:
        return ", ".join(measured)
    case = next(iter(record.of_kind("throughput")), None)
    return f"none: {short(case.reason)}" if case is not None and case.reason else "none: not measured"
