"""Grow the nano pair into the geometry of Gemma 4 12B or 31B: its text and acceptance, the real model's cost.

Writes a target and a drafter folder in MLX format, deterministic from the seed. Seconds on a GPU; needs no download.
The result is grown from nano, not Google's weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tools.grow.errors import GrowError
from tools.grow.geometry import GEOMETRIES
from tools.grow.pair import NOTICE, grow_pair

ROOT = Path(__file__).resolve().parent.parent
EXIT_FAILED = 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="grow_pair.py", description=__doc__)
    parser.add_argument(
        "--geometry", required=True, choices=sorted(GEOMETRIES), help="12b, 31b; small and small4 are for tests"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for the two checkpoint folders")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random layers (default: %(default)s)")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument(
        "--nano",
        type=Path,
        default=ROOT / "specs" / "checkpoints",
        help="folder of the nano pair (default: the committed one)",
    )
    return parser.parse_args(arguments)


def check_device(name: str | None) -> str:
    """The device to build on; GrowError for one that is not there."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise GrowError(f"--device {name}: no such device; use cuda or cpu") from error
    if kind not in ("cuda", "cpu"):
        raise GrowError(f"--device {name}: not supported; use cuda or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise GrowError(f"--device {name}: this machine has no CUDA device; use --device cpu")
    return name


class Meter:
    """Prints progress a few times per checkpoint."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}

    def __call__(self, role: str, done: int, total: int) -> None:
        """A line at every tenth."""
        tenth = 10 * done // total
        if tenth > self.last.get(role, 0):
            self.last[role] = tenth
            print(f"{role} {10 * tenth} % of {total / 1e9:.2f} GB", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Grow a pair; 0, or an exit code with one line on stderr."""
    options = parse(arguments)
    began = time.monotonic()
    try:
        device = check_device(options.device)
        folders = grow_pair(
            GEOMETRIES[options.geometry], options.nano, options.out, seed=options.seed, device=device, progress=Meter()
        )
    except GrowError as error:
        print(f"grow_pair.py: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED
    names = " and ".join(folder.name for folder in folders)
    print(f"{names} on {device} in {time.monotonic() - began:.1f} s. {NOTICE}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
