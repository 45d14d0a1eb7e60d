"""The base of every part of a spec, and the small types that several parts use."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0)]


class Model(BaseModel):
    """Base of every part of a spec: unknown keys refused, no conversions, no changes afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
