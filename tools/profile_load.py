"""Where a child's start goes: loads a pair as a child does, in a fresh process, and prints the seconds of each phase.

Run it twice: the first run fills the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

EXIT_FAILED = 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="profile_load.py", description=__doc__)
    parser.add_argument("target", type=Path, help="folder of the target")
    parser.add_argument("--drafter", type=Path, help="folder of its drafter")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--backend", choices=("reference", "triton"), help="kernels (default: triton on cuda)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Seconds by phase of a load in this process; "start" is interpreter and imports."""
    began = time.perf_counter()
    import torch

    from engine.dispatch import DispatchPolicy
    from engine.pair import load_pair

    imported = time.perf_counter()
    backend = options.backend or ("triton" if options.device.startswith("cuda") else "reference")
    pair = load_pair(options.target, options.drafter, DispatchPolicy(backend=backend), device=options.device)
    found = {"import": imported - began, **pair.info["phases"]}
    if options.device.startswith("cuda"):
        found["peak GB on the device"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the phases; 0, or an exit code with one line on stderr."""
    options = parse(arguments)
    if options.inside:
        from engine.errors import EngineError

        try:
            print(json.dumps(measure(options)))
        except (EngineError, RuntimeError, ValueError) as error:
            print(" ".join(str(error).split()), file=sys.stderr)
            return EXIT_FAILED
        return 0
    words = list(sys.argv[1:] if arguments is None else arguments)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, *words, "--inside"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    whole = time.perf_counter() - began
    if done.returncode != 0:
        last = done.stderr.strip().splitlines() or ["no message"]
        print(f"profile_load.py: {last[-1]}", file=sys.stderr)
        return EXIT_FAILED
    phases = json.loads(done.stdout.strip().splitlines()[-1])
    if options.json:
        print(json.dumps({**phases, "whole": whole}))
        return 0
    size = sum(file.stat().st_size for file in options.target.glob("*.safetensors"))
    for phase, seconds in phases.items():
        rate = f"  {size / seconds / 1e9:.1f} GB/s" if phase == "read" and seconds > 0 else ""
        print(f"{phase:>22}  {seconds:8.3f}{rate}")
    print(f"{'whole process':>22}  {whole:8.3f}  for {size / 1e9:.2f} GB of target")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
