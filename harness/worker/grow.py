"""Runs `tools/grow_pair.py` as a child that ends with its parent; arguments and exit code are the tool's."""

from __future__ import annotations

import runpy
from pathlib import Path

from harness.worker.channel import die_with_parent

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "grow_pair.py"


def main() -> None:
    """Run the tool in this process."""
    die_with_parent()
    runpy.run_path(str(TOOL), run_name="__main__")


if __name__ == "__main__":
    main()
