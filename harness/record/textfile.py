"""Text files that keep their own line endings, and that a kill cannot leave half written."""

from __future__ import annotations

from pathlib import Path

from harness.errors import RecordError


def read_text(path: Path) -> tuple[str, str]:
    """A file's text with `\\n` line ends, and the line end it uses; RecordError when it cannot be read."""
    try:
        raw = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not UTF-8 text (byte {error.start})") from None
    newline = "\r\n" if "\r\n" in raw else "\n"
    return raw.replace("\r\n", "\n"), newline


def write_text(path: Path, text: str, newline: str = "\n") -> None:
    """Write beside the file, then rename over it."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(text.replace("\n", newline).encode("utf-8"))
        part.replace(path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None
