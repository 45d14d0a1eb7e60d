"""Typed reads from a config.json, for every model family: a missing or wrong field is one ConfigError that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError


def text_section(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The text model's part of a config.json: its text_config, or the whole."""
    text = raw.get("text_config", raw)
    if not isinstance(text, Mapping):
        raise ConfigError(f"{where}: text_config must be an object, found {type(text).__name__}")
    return text


@dataclass(frozen=True)
class ConfigReader:
    """Reads fields of `text`, a section of the config `top`; `where` names the file in errors."""

    text: Mapping[str, Any]
    top: Mapping[str, Any]
    where: str

    def fail(self, message: str) -> ConfigError:
        """The error to raise."""
        return ConfigError(f"{self.where}: {message}")

    def get(self, key: str) -> Any:
        """A field that must be there."""
        if key not in self.text:
            raise self.fail(f"{key} is missing; the geometry is never guessed, add it")
        return self.text[key]

    def positive(self, key: str) -> int:
        """A positive integer."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key} must be a positive integer, found {value!r}")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, found {value!r}")
        return value

    def number(self, source: Mapping[str, Any], key: str, path: str, default: float | None = None) -> float:
        """A positive number of `source`, which errors call `path`."""
        value = source.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.fail(f"{path}{key} must be a positive number, found {value!r}")
        return float(value)

    def eos(self) -> tuple[int, ...]:
        """Stop ids: the top level's, or the text section's."""
        value = self.top.get("eos_token_id", self.text.get("eos_token_id"))
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.fail(f"eos_token_id must be token ids, found {value!r}")
        return tuple(ids)
