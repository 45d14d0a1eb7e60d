"""What every part of a record is made of: frozen models, rounded figures, fields that came later."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

SIGNIFICANT_DIGITS = 6  # below what a clock resolves, above what a page shows; equal on every machine


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


Figure = Annotated[float, AfterValidator(_rounded)]


def later(default: Any = None) -> Any:
    """A field that came after the first records: left out of record.json while empty, so old ones keep their bytes."""
    return Field(default=default, exclude_if=lambda value: value is None or value == default)


class Part(BaseModel):
    """Base of every part: unknown keys refused, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
