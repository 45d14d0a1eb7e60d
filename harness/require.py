"""`--require`: what must be there, for the command line and for pytest alike; a case that lacks it fails."""

from __future__ import annotations

from collections.abc import Iterable

from harness.errors import UsageError

REQUIREMENTS = ("cuda", "weights", "memory", "quiet")


def required(words: Iterable[str]) -> tuple[str, ...]:
    """Words of `--require`, given one by one or with commas. Raises UsageError for an unknown one."""
    found = [word.strip() for text in words for word in text.split(",") if word.strip()]
    for word in found:
        if word not in REQUIREMENTS:
            raise UsageError(f"--require {word}: known words: {', '.join(REQUIREMENTS)}")
    return tuple(dict.fromkeys(found))
