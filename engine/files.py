"""Reading a checkpoint's text files: whatever is wrong with one is a CheckpointError with its folder and name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError


def where(file: Path) -> str:
    """A file as messages name it: with its folder, without the rest of its path."""
    return f"{file.parent.name}/{file.name}"


def read_text(file: Path) -> str:
    """The file's text, UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where(file)}: byte {error.start} is not UTF-8; fetch the file again") from error
    except OSError as error:
        raise CheckpointError(f"{where(file)}: cannot be read ({error.strerror})") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        value = json.loads(read_text(file))
    except RecursionError as error:
        raise CheckpointError(f"{where(file)}: not valid JSON (nested too deeply)") from error
    except ValueError as error:
        raise CheckpointError(f"{where(file)}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where(file)}: expected a JSON object, found {type(value).__name__}")
    return value
