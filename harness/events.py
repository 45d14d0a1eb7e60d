"""What a run tells whoever shows its progress: one small value per event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.record.lines import CaseLine


@dataclass(frozen=True)
class RunEvent:
    """One thing that happened; `done` of `total` counts cases for case events and steps for `progress`."""

    kind: Literal["case_start", "progress", "case_end", "child", "note"]
    text: str = ""
    case: str | None = None
    done: int = 0
    total: int = 0
    line: CaseLine | None = None
