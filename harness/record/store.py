"""Where a record lives on disk, and how its raw lines get there and back.

`<out>/<stem>.md` is the page, `<out>/data/<stem>/` holds runs.jsonl, env.json, spec.yaml, record.json, plots and logs/.
Lines are appended, flushed and synced one by one, so a killed run keeps what it had; nothing is ever overwritten.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from harness.errors import RecordError
from harness.record.lines import AnyLine, ChildLine, StartLine, parse_line
from harness.record.privacy import Scrubber

DEFAULT_OUT = Path("docs/benchmark_results")
RUNS, ENV, SPEC, RECORD, LOGS = "runs.jsonl", "env.json", "spec.yaml", "record.json", "logs"
MAX_RECORDS_A_DAY = 1000


@dataclass(frozen=True)
class RecordPaths:
    """Every path of one record, from its output folder and stem."""

    out: Path
    stem: str

    @property
    def page(self) -> Path:
        return self.out / f"{self.stem}.md"

    @property
    def data(self) -> Path:
        return self.out / "data" / self.stem

    @property
    def runs(self) -> Path:
        return self.data / RUNS

    @property
    def env(self) -> Path:
        return self.data / ENV

    @property
    def spec(self) -> Path:
        return self.data / SPEC

    @property
    def record(self) -> Path:
        return self.data / RECORD

    @property
    def logs(self) -> Path:
        return self.data / LOGS

    @classmethod
    def locate(cls, path: Path) -> RecordPaths:
        """The record that a page, its data folder or a file in that folder belongs to; RecordError when it is none."""
        if path.suffix == ".md":
            found = cls(path.parent, path.stem)
        else:
            folder = path if path.is_dir() or not path.suffix else path.parent
            if folder.parent.name != "data":
                raise RecordError(f"{path}: not a record; give its page (<stem>.md) or its folder data/<stem>")
            found = cls(folder.parent.parent, folder.name)
        if not found.runs.is_file():
            raise RecordError(f"{path}: no raw lines at {found.runs}; a record is computed from that file")
        return found


@dataclass(frozen=True)
class RawLines:
    """What a runs.jsonl holds; `torn` is true when the last line was cut in the middle by a kill."""

    lines: tuple[AnyLine, ...]
    torn: bool
    sound_bytes: int  # length of the file up to the end of its last whole line


def slug(text: str) -> str:
    """Lower-case words joined by hyphens, as file stems and plot names need them."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "record"


def read_lines(path: Path) -> RawLines:
    """Read runs.jsonl; a torn last line is dropped and reported, a bad line elsewhere is a RecordError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    lines: list[AnyLine] = []
    sound = 0
    chunks = raw.splitlines(keepends=True)
    for number, chunk in enumerate(chunks, start=1):
        last = number == len(chunks)
        if chunk.strip():
            try:
                lines.append(parse_line(chunk.decode("utf-8")))
            except (ValidationError, UnicodeDecodeError) as error:
                if last and not chunk.endswith(b"\n"):
                    return RawLines(tuple(lines), torn=True, sound_bytes=sound)
                raise RecordError(f"{path}:{number}: not a raw line of this format: {first_line(error)}") from None
        sound += len(chunk)
    return RawLines(tuple(lines), torn=False, sound_bytes=sound)


def first_line(error: Exception) -> str:
    """One line of an exception that is safe to show: pydantic's place and message, without its URL."""
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        return f"{place}: {problem['msg']}" if place else str(problem["msg"])
    return str(error).splitlines()[0]


def read_env(path: Path) -> dict[str, Any]:
    """env.json as a dict; an absent file (a run killed before it was written) is an empty one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class RecordStore:
    """The open record of a run: append lines, then `finish` to render what they say."""

    def __init__(self, paths: RecordPaths, lines: tuple[AnyLine, ...] = ()) -> None:
        self.paths = paths
        self.lines: list[AnyLine] = list(lines)
        self._scrubber = Scrubber.here()
        self._file: IO[str] | None = None

    @classmethod
    def create(cls, out: Path, topic: str, device: str, date: str, spec_text: str) -> RecordStore:
        """Claim a free stem `<topic>-<device>-<date>`, then `-2`, `-3`; an existing record is never touched."""
        base = f"{slug(topic)}-{slug(device)}-{date}"
        try:
            (out / "data").mkdir(parents=True, exist_ok=True)
            for number in range(1, MAX_RECORDS_A_DAY):
                paths = RecordPaths(out, base if number == 1 else f"{base}-{number}")
                if paths.page.exists():
                    continue
                try:
                    paths.data.mkdir()  # the claim: two runs that start together cannot both succeed
                except FileExistsError:
                    continue
                paths.logs.mkdir()
                paths.spec.write_bytes(spec_text.encode("utf-8"))
                paths.runs.touch()
                return cls(paths)
        except OSError as error:
            raise RecordError(f"{out}: cannot hold a record ({error.strerror}); choose another with --out") from None
        raise RecordError(f"{out}: {MAX_RECORDS_A_DAY} records named {base}; move some away")

    @classmethod
    def resume(cls, path: Path) -> RecordStore:
        """Open an existing record for more lines; a torn last line is cut off so that the next one starts clean."""
        paths = RecordPaths.locate(path)
        raw = read_lines(paths.runs)
        if raw.torn:
            with paths.runs.open("r+b") as file:
                file.truncate(raw.sound_bytes)
        elif raw.sound_bytes and not paths.runs.read_bytes().endswith(b"\n"):
            with paths.runs.open("ab") as file:
                file.write(b"\n")
        paths.logs.mkdir(exist_ok=True)
        return cls(paths, raw.lines)

    @property
    def logs(self) -> Path:
        """Folder for the children's logs."""
        return self.paths.logs

    def job_logs(self, number: int) -> Path:
        """Folder for the logs of one of several jobs: the record's own for the first.

        All are called alike, since they become one folder when the record is finished.
        """
        return self.logs if number == 0 else self.paths.data / f"job-{number + 1}" / LOGS

    def _merge_job_logs(self) -> None:
        """Append each further job's logs to the record's own of the same name."""
        for folder in sorted(self.paths.data.glob(f"job-*/{LOGS}")):
            for log in sorted(folder.glob("*.log")):
                with (self.logs / log.name).open("ab") as file:
                    file.write(log.read_bytes())
            shutil.rmtree(folder.parent)

    def put_in_order(self, cases: Sequence[str]) -> None:
        """Put the lines since the last start line in these cases' order: jobs side by side file them as they arise.

        A child's line goes before the case that started it. The file is replaced as a whole, so that a kill leaves it
        in one order or the other.
        """
        place = {case: number for number, case in enumerate(cases)}
        start = max((n for n, line in enumerate(self.lines) if isinstance(line, StartLine)), default=-1) + 1
        owners = [line.started_for if isinstance(line, ChildLine) else getattr(line, "case", "") for line in self.lines]
        ranks = [place.get(owner or "", -1) for owner in owners[start:]]
        if ranks == sorted(ranks):
            return
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        self.close()
        raw = self.paths.runs.read_bytes().splitlines(keepends=True)
        head, tail = raw[: len(raw) - len(ranks)], raw[len(raw) - len(ranks) :]
        temporary = self.paths.runs.with_suffix(".ordered")
        with temporary.open("wb") as file:
            file.writelines([*head, *(tail[n] for n in order)])
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.paths.runs)
        self.lines[start:] = [self.lines[start + n] for n in order]

    def append(self, line: AnyLine) -> None:
        """Write one line and wait until it is on disk."""
        if self._file is None:
            self._file = self.paths.runs.open("a", encoding="utf-8", newline="\n")
        self._file.write(self._scrubber.scrub(line.model_dump_json()) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines.append(line)

    def write_env(self, env: Mapping[str, Any]) -> None:
        """Write env.json, paths scrubbed."""
        text = json.dumps(env, indent=2, sort_keys=True, ensure_ascii=False)
        self.paths.env.write_text(self._scrubber.scrub(text) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Close the file of raw lines; appending opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def finish(self) -> Path:
        """Scrub the logs, render record.json, plots and page, refresh index and README; returns the page's path."""
        from harness.record.headline import write_headlines
        from harness.record.index import write_index
        from harness.record.report import regenerate

        self.close()
        self._merge_job_logs()
        for log in sorted(self.logs.rglob("*.log")):
            text = log.read_text(encoding="utf-8", errors="replace")
            clean = self._scrubber.scrub(text)
            if clean != text:
                log.write_text(clean, encoding="utf-8")
        regenerate(self.paths.page)
        write_index(self.paths.out)
        write_headlines(self.paths.out)
        return self.paths.page
