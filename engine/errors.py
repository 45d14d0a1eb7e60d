"""What the engine raises; every message is one line: where, what, what to do.

EngineError
  +-- ConfigError      a config.json that is incomplete, contradictory or not supported
  +-- CheckpointError  files that are missing, broken or at odds with their config
  +-- PairError        a drafter and a target that do not belong together
  +-- RequestError     a prompt or an option that cannot be run
"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST_MESSAGE = 400


class EngineError(Exception):
    """Base of everything that the engine raises on purpose."""

    def __str__(self) -> str:
        """One line of bounded length, whatever a damaged file put into it."""
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in super().__str__())
        if len(text) <= LONGEST_MESSAGE:
            return text
        return f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 2 :]}"


class ConfigError(EngineError):
    """A config.json is incomplete, contradicts itself or asks for a feature that is not supported."""


class CheckpointError(EngineError):
    """A checkpoint file is missing, truncated, or does not hold what its config says."""


class PairError(EngineError):
    """A drafter does not fit its target, or was given in the other's place."""


def refuse_other_target(statements: Iterable[tuple[str, object, object]]) -> None:
    """PairError for the first (text with two places, drafter's value, target's value) whose values differ."""
    for text, own, other in statements:
        if own != other:
            raise PairError(f"{text.format(own, other)}: this drafter was made for another target")


class RequestError(EngineError):
    """A prompt or an option cannot be run: empty prompt, temperature above 0, batch above 1."""
