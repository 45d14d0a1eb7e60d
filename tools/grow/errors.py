"""The one error of this package."""

from __future__ import annotations


class GrowError(ValueError):
    """Why a pair cannot be grown: one line for a person, saying where, what and what to do."""
