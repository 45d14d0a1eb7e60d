"""Finishing a record that a run left unfinished: only of the same spec, on the same machine, code and weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import RecordError, UsageError
from harness.provenance import changed_parts
from harness.record.lines import AnyLine, CaseLine, StartLine
from harness.record.spec_view import SpecView
from harness.record.store import RecordStore, read_env, read_lines, slug
from harness.record.textfile import read_text
from harness.spec.load import LoadedSpec


@dataclass(frozen=True)
class Resumed:
    """A record that a run continues: what it planned, and which cases it need not run again."""

    store: RecordStore
    planned: frozenset[str]
    done: dict[str, CaseLine]
    env: dict[str, Any]

    @classmethod
    def open(cls, path: Path, loaded: LoadedSpec) -> Resumed:
        """Open a record of this very spec. Raises UsageError for another or a changed spec."""
        store = RecordStore.resume(path)
        starts = [line for line in store.lines if isinstance(line, StartLine)]
        name = store.paths.stem
        if not starts:
            raise UsageError(f"{name}: the run was stopped before its first line; start a new one")
        if starts[0].spec != loaded.id_path:
            raise UsageError(f"{name} is a record of {starts[0].spec}, not of {loaded.id_path}")
        if any(start.spec_sha256 != loaded.sha256 for start in starts):
            if more := _changed_repeats(store.paths.spec, loaded):
                raise UsageError(f"{name}: {more}; a run is not extended once its figures can be seen, start a new run")
            raise UsageError(f"{name}: {loaded.id_path} has changed since; a record holds one spec, start a new run")
        planned = frozenset(case for start in starts for case in start.cases)
        return cls(store, planned, finished_cases(store.lines), read_env(store.paths.env))

    def check(self, now: dict[str, Any]) -> None:
        """Raise UsageError when machine, code or weights are not those that the record began with."""
        if self.env and self.env.get("fingerprint") != now["fingerprint"]:
            changed = ", ".join(changed_parts(self.env, now)) or "the environment"
            name = self.store.paths.stem
            raise UsageError(
                f"{name}: {changed} changed since it began; a record holds one environment, start a new run"
            )


def _changed_repeats(copy: Path, loaded: LoadedSpec) -> str:
    """Which checks now ask for another number of repeats than the record's copy of the spec, in words."""
    try:
        old = SpecView.parse(read_text(copy)[0])
    except (OSError, RecordError):
        return ""
    asked = {check.id: getattr(check, "repeats", None) for check in loaded.spec.checks}
    moved = [
        f"{name} had {old.setting(name, 'repeats', count)} repeats and now has {count}"
        for name, count in asked.items()
        if count is not None and old.setting(name, "repeats", count) != count
    ]
    return ", ".join(moved)


def finished_cases(lines: Sequence[AnyLine]) -> dict[str, CaseLine]:
    """Each case's last line, unless that says error: such a case runs again."""
    last = {line.case: line for line in lines if isinstance(line, CaseLine)}
    return {case: line for case, line in last.items() if line.outcome != "error"}


def find_unfinished(loaded: LoadedSpec, out: Path) -> Path:
    """The latest record of this spec with cases left to run; UsageError when there is none."""
    for data in records_of(loaded, out):
        lines = read_lines(data / "runs.jsonl").lines
        planned = {case for line in lines if isinstance(line, StartLine) for case in line.cases}
        if planned - set(finished_cases(lines)):
            return data
    raise UsageError(f"nothing to resume: no unfinished record of {loaded.id_path} in {out.as_posix()}")


def records_of(loaded: LoadedSpec, out: Path) -> list[Path]:
    """Data folders of this spec's records, the latest first; unreadable ones are left out."""
    found: list[tuple[str, Path]] = []
    for runs in sorted((out / "data").glob(f"{slug(loaded.spec.name)}-*/runs.jsonl")):
        with contextlib.suppress(RecordError):
            start = next((line for line in read_lines(runs).lines if isinstance(line, StartLine)), None)
            if start is not None and start.spec == loaded.id_path and start.spec_sha256 == loaded.sha256:
                found.append((start.started_utc, runs.parent))
    return [data for _, data in sorted(found, key=lambda item: item[0], reverse=True)]
