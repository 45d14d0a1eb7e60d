"""The index of a folder of records: `README.md` with one row each, newest first, generated between markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.record.page import differences, splice, wrap
from harness.record.sections import Block
from harness.record.store import RUNS
from harness.record.table import cell, table
from harness.record.textfile import read_text, write_text

INDEX = "README.md"
BLOCK = "index"
INTRO = """# Benchmark records

One page a run: what was asked, what came out, and the raw lines it was computed from. A page's title states the
finding, also when it is bad news. `harness report --check` recomputes every figure and fails on a changed digit.
"""


def index_block(out: Path) -> Block:
    """The generated table of all records under `out`."""
    rows = []
    for folder in sorted((path.parent for path in (out / "data").glob(f"*/{RUNS}")), key=_newest_first):
        record = _stored(folder / "record.json")
        stem = folder.name
        rows.append(
            [
                cell(record.get("date") or "not rendered"),
                f"[{cell(record.get('title') or stem)}]({stem}.md)",
                cell(record.get("device") or "not rendered"),
                cell(str(record.get("host", {}).get("Commit") or "not recorded")),
                cell(record.get("outcome") or "not rendered"),
                cell(record.get("verdict") or "none due"),
            ]
        )
    if not rows:
        return Block(BLOCK, "No records yet: `harness run SPEC` writes one.")
    return Block(BLOCK, table(["Date", "Finding", "Device", "Commit", "Outcome", "Verdict"], rows))


def write_index(out: Path) -> Path:
    """Write the index again; what stands outside its block survives."""
    path = out / INDEX
    block = index_block(out)
    if path.is_file():
        old, newline = read_text(path)
        write_text(path, splice(old, "", [block]), newline)
    else:
        out.mkdir(parents=True, exist_ok=True)
        write_text(path, f"{INTRO}\n{wrap(block)}\n")
    return path


def index_differences(out: Path) -> list[str]:
    """Where the index on disk is not what the records say."""
    path = out / INDEX
    if not path.is_file():
        has_records = any((out / "data").glob(f"*/{RUNS}"))
        return [f"{path}: missing; `harness report` writes it"] if has_records else []
    return [f"{path}:{problem}" for problem in differences(read_text(path)[0], "", [index_block(out)])]


def _newest_first(folder: Path) -> tuple[list[int], str]:
    date = str(_stored(folder / "record.json").get("started_utc") or "")
    return [-ord(letter) for letter in date], folder.name


def _stored(path: Path) -> dict[str, Any]:
    """record.json as it stands; an index never fails on a page that still has to be rendered."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
