"""Every error that a user may see, drawn once. Each says where, what, and what to do next.

HarnessError           exit 3
+-- UsageError         exit 2   the command line asks for something that does not exist
+-- SpecError          exit 2   a spec is wrong; carries every `Problem`, sorted by place
+-- GateError          exit 3   the machine is not fit to measure on (lock, load, memory, device)
+-- RunError           exit 3   a child died, hung, or said something that is not the protocol
+-- RecordError        exit 3   a record is missing or unreadable, or may not be overwritten
+-- CheckFailed        exit 1   a check measured, and its claim does not hold
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class HarnessError(Exception):
    """Base of all: `str(error)` is what the user reads, `exit_code` what the process returns."""

    exit_code = 3


class UsageError(HarnessError):
    """The command line names something that does not exist or does not fit together."""

    exit_code = 2


class GateError(HarnessError):
    """The machine is not fit to measure on."""


class RunError(HarnessError):
    """A child process died, hung or broke the protocol."""


class RecordError(HarnessError):
    """A record is missing or unreadable, or may not be overwritten."""


class CheckFailed(HarnessError):
    """A check measured, and its claim does not hold."""

    exit_code = 1


MAX_SHOWN = 100  # problems of one error that are printed; a damaged file can have as many as it has lines


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong in one file; lines and columns count from 1."""

    file: str
    line: int
    col: int
    message: str

    def __str__(self) -> str:
        return one_line(f"{self.file}:{self.line}:{self.col}: {self.message}")


def one_line(text: str) -> str:
    """The text with line breaks, control and other unprintable characters written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class SpecError(HarnessError):
    """One or more problems in spec files; `str()` prints one per line, sorted, duplicates dropped, the first 100."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(set(problems)))
        if not self.problems:
            raise ValueError("a SpecError needs at least one Problem")
        lines = [str(problem) for problem in self.problems[:MAX_SHOWN]]
        if (more := len(self.problems) - MAX_SHOWN) > 0:
            lines.append(f"{self.problems[MAX_SHOWN]} (and {more - 1} more problems after it)")
        super().__init__("\n".join(lines))
