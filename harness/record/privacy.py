"""Keeps personal paths out of records: what is replaced on writing, and what `harness report --check` refuses.

Only paths are touched: replacing bare words would corrupt data (a user may be called `code`, like a prompt).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# A home folder of anybody, on any system, in plain text or in JSON.
PERSONAL_PATH = re.compile(r"(?<![\w.-])(?:(?:/home/|/Users/|[A-Za-z]:\\+Users\\+)[A-Za-z0-9._-]+|/root(?=/))")


@dataclass(frozen=True)
class Scrubber:
    """Replaces the repository's folder by nothing and the home folder by `~`; then any other home folder too."""

    root: str
    home: str

    @classmethod
    def here(cls) -> Scrubber:
        """For this process: the working directory is the repository."""
        return cls(str(Path.cwd()), str(Path.home()))

    def scrub(self, text: str) -> str:
        """`text` with personal path prefixes replaced."""
        if len(self.root) > 1:
            text = re.sub(re.escape(self.root) + r"/", "", text)
            text = re.sub(re.escape(self.root) + r"(?![\w.-])", ".", text)
        if len(self.home) > 1:
            text = re.sub(re.escape(self.home) + r"(?![\w.-])", "~", text)
        return PERSONAL_PATH.sub("~", text)


def leaks(text: str) -> list[str]:
    """Personal paths that a text still holds, each once, in order."""
    return list(dict.fromkeys(match.group(0) for match in PERSONAL_PATH.finditer(text)))
