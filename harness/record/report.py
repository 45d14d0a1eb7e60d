"""`harness report`: render pages again from raw lines, or check that nobody changed a figure.

`regenerate` and `check` work on one record, `regenerate_all` and `check_all` on a folder of them and its index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.errors import RecordError
from harness.record.build import build_record
from harness.record.headline import headline_differences, write_headlines
from harness.record.index import index_differences, write_index
from harness.record.model import Record
from harness.record.page import differences
from harness.record.plot import draw_plots, stale_plots
from harness.record.privacy import leaks
from harness.record.render import front, render, renew
from harness.record.sections import blocks
from harness.record.store import DEFAULT_OUT, RUNS, RecordPaths, read_env, read_lines
from harness.record.textfile import read_text, write_text

CHECKED_SUFFIXES = {".md", ".json", ".jsonl", ".yaml", ".log", ".svg"}


def load_record(paths: RecordPaths) -> Record:
    """The record that the raw lines on disk give now; nothing else on disk is believed."""
    spec_text = _spec_text(paths)
    sources = {path.name: _digest(path) for path in (paths.runs, paths.env, paths.spec) if path.is_file()}
    return build_record(read_lines(paths.runs).lines, read_env(paths.env), spec_text, sources)


def regenerate(path: Path) -> Path:
    """Write record.json, plots and page of one record again; prose outside the blocks stays. Returns the page."""
    paths = RecordPaths.locate(path)
    record = load_record(paths)
    write_text(paths.record, record_json(record))
    drawn = draw_plots(record)
    for stale in sorted(paths.data.glob("*.svg")):
        if stale.name not in drawn:
            stale.unlink()
    for name, svg in drawn.items():
        write_text(paths.data / name, svg)
    if paths.page.is_file():
        old, newline = read_text(paths.page)
        try:
            write_text(paths.page, renew(old, record, paths.stem), newline)
        except RecordError as error:
            raise RecordError(f"{paths.page}: {error}") from None
    else:
        write_text(paths.page, render(record, paths.stem))
    return paths.page


def check(path: Path) -> list[str]:
    """Everything in one record that its raw lines do not give, one line each; empty when it is sound."""
    paths = RecordPaths.locate(path)
    try:
        record = load_record(paths)
    except RecordError as error:
        return [str(error)]
    problems = [f"{paths.runs}: {problem}" for problem in record.contradictions]
    problems += _spec_problems(paths, record)
    problems += [f"{paths.record}: {problem}" for problem in _json_problems(paths, record)]
    if paths.page.is_file():
        text, _ = read_text(paths.page)
        found = differences(text, front(record, paths.stem), blocks(record, paths.stem))
        problems += [f"{paths.page}:{problem}" for problem in found]
    else:
        problems.append(f"{paths.page}: missing; `harness report {paths.data}` writes it")
    on_disk = {file.name: file.read_text(encoding="utf-8") for file in sorted(paths.data.glob("*.svg"))}
    problems += [f"{paths.data}/{problem}" for problem in stale_plots(record, dict(on_disk))]
    problems += _leak_problems(paths)
    return problems


def record_json(record: Record) -> str:
    """record.json as text; absent figures are null, never left out."""
    return json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def records_in(out: Path) -> list[RecordPaths]:
    """Every record under an output folder, by stem."""
    folders = sorted(folder.parent for folder in (out / "data").glob(f"*/{RUNS}"))
    return [RecordPaths(out, folder.name) for folder in folders]


def regenerate_all(out: Path = DEFAULT_OUT) -> list[Path]:
    """Render every record of a folder again, its index, and the table of results in the project's README."""
    pages = [regenerate(paths.page) for paths in records_in(out)]
    write_index(out)
    write_headlines(out)
    return pages


def check_all(out: Path = DEFAULT_OUT) -> list[str]:
    """Problems of every record of a folder, of pages without data, of the index and the README's results."""
    known = records_in(out)
    problems = [problem for paths in known for problem in check(paths.page)]
    pages = {paths.page.name for paths in known} | {"README.md"}
    orphans = [page for page in sorted(out.glob("*.md")) if page.name not in pages]
    problems += [f"{page}: no raw lines under {out / 'data' / page.stem}" for page in orphans]
    return problems + index_differences(out) + headline_differences(out)


def _spec_text(paths: RecordPaths) -> str:
    if not paths.spec.is_file():
        raise RecordError(f"{paths.spec}: missing; a record keeps a copy of the spec that ran")
    return read_text(paths.spec)[0]


def _digest(path: Path) -> str:
    """SHA-256 with line endings normalised, so that a checkout on another system changes nothing."""
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def _spec_problems(paths: RecordPaths, record: Record) -> list[str]:
    raw = hashlib.sha256(paths.spec.read_bytes()).hexdigest()
    if not record.spec_sha256 or record.spec_sha256 in (raw, _digest(paths.spec)):
        return []
    return [f"{paths.spec}: SHA-256 {_digest(paths.spec)[:16]}, but the run read a spec of {record.spec_sha256[:16]}"]


def _json_problems(paths: RecordPaths, record: Record) -> list[str]:
    if not paths.record.is_file():
        return ["missing"]
    try:
        stored = json.loads(paths.record.read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"not valid JSON: {error}"]
    return list(_json_differences(stored, json.loads(record_json(record)), ""))


def _json_differences(old: Any, new: Any, place: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*new, *old)):
            where = f"{place}.{key}" if place else str(key)
            if key not in old:
                yield f"{where} is missing"
            elif key not in new:
                yield f"{where} does not belong there"
            else:
                yield from _json_differences(old[key], new[key], where)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from _json_differences(*pair, f"{place}[{number}]")
    elif old != new or type(old) is not type(new):
        yield f"{place} is {json.dumps(old)}, the raw lines give {json.dumps(new)}"


def _leak_problems(paths: RecordPaths) -> list[str]:
    files = [paths.page, *sorted(paths.data.rglob("*"))]
    problems = []
    for file in files:
        if file.is_file() and file.suffix in CHECKED_SUFFIXES:
            found = leaks(file.read_text(encoding="utf-8", errors="replace"))
            problems += [f"{file}: holds the personal path {path}" for path in found]
    return problems
