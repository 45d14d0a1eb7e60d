"""A record on disk -> one side of a comparison: computed from its raw lines where they are, else taken as stored."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from harness.errors import RecordError, UsageError
from harness.record.compare_side import Side
from harness.record.model import Record
from harness.record.report import load_record
from harness.record.spec_view import SpecView
from harness.record.store import RecordPaths, first_line, read_env
from harness.record.textfile import read_text


def load_side(path: Path) -> Side:
    """The record that a page, a data folder or a record.json belongs to.

    Raises UsageError for a path that is no record, RecordError for a record that cannot be read.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such record; name a page (<stem>.md), its folder data/<stem> or a record.json")
    try:
        paths = RecordPaths.locate(path)
    except RecordError as error:
        if path.suffix == ".json":
            return _stored(path)
        raise UsageError(str(error)) from None
    record = load_record(paths)
    return Side(paths.stem, record, read_env(paths.env), SpecView.parse(read_text(paths.spec)[0]))


def _stored(path: Path) -> Side:
    """A record.json that lies alone: its figures as they stand, its spec known by hash only."""
    try:
        record = Record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{path}: not a record.json of this format: {first_line(error)}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    return Side(path.parent.name if path.stem == "record" and path.parent.name else path.stem, record)
