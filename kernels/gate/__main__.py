"""Compile gate: builds the verify path's kernels for a GPU that need not be there and reads their machine code.

    python -m kernels.gate [--arch 90] [--json] [--only WORD] [--skip WORD] [--module NAME] [--jobs 2]

Exit status: 0 when every kernel is as expected, 1 when one is not, 2 when the gate cannot run, 3 when the
architecture was skipped because this Triton or its assembler cannot build for it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from typing import Any

import triton

from kernels.gate.entry import Entry
from kernels.gate.judge import Binary, collect, compile_all, judge, too_large

CASES = "kernels.gate.cases"
"""The module whose `gate_entries()` are compiled when no other is named."""


def unsupported(arch: int) -> str | None:
    """Why this Triton cannot build for an architecture; None when it can."""
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        import subprocess

        path = get_ptxas(arch).path
        known = subprocess.run([path, "--help"], capture_output=True, text=True, check=True).stdout
    except Exception as error:
        return f"no assembler for sm_{arch}: {error}"
    return None if f"sm_{arch}" in known else f"the assembler of triton {triton.__version__} does not know sm_{arch}"


def report(binary: Binary) -> dict[str, Any]:
    """A variant as JSON."""
    head: dict[str, Any] = {
        "kernel": binary.variant.kernel,
        "entries": list(binary.uses),
        "variant": binary.variant.describe(),
    }
    head["seconds"] = binary.seconds
    return {**head, **(asdict(binary.code) if binary.code else {"failure": binary.failure})}


def line(binary: Binary) -> str:
    """A variant as a line of text."""
    if binary.code is None:
        return f"{next(iter(binary.uses))}: {binary.variant.kernel}: {binary.failure}"
    code = binary.code
    parts = [
        f"{'+'.join(code.mma) or 'no MMA'}",
        f"{code.registers} registers",
        f"{code.shared_bytes} B shared",
        f"{code.async_copies} async copies",
        f"{code.barriers} barriers",
        f"loop of {code.loop_instructions} ({code.loop_plain_loads} plain loads)",
        *([f"{code.per_weight} instructions per weight"] if _streams_weights(binary) else []),
        f"float sequence {code.float_sequence}",
        f"{binary.seconds} s",
    ]
    return f"{next(iter(binary.uses))}: {binary.variant.kernel}: {', '.join(parts)}"


def _streams_weights(binary: Binary) -> bool:
    return any(expect.per_weight is not None for expect in binary.uses.values())


def main(arguments: list[str] | None = None) -> int:
    """Run the gate; see the module's text for the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gate", description=__doc__, add_help=True)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", type=int, default=90, help="compute capability without the dot, 90 or 120")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--only", default="", help="only entries whose name contains this")
    parser.add_argument("--skip", default="", help="no entry whose name contains this")
    parser.add_argument("--module", action="append", help="module that offers gate_entries(); default: all kernels")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    if triton.knobs.runtime.interpret:
        sys.stderr.write("kernels.gate: TRITON_INTERPRET is set, nothing would be compiled; unset it\n")
        return 2
    head = {"triton": triton.__version__, "arch": options.arch}
    if reason := unsupported(options.arch):
        sys.stdout.write(json.dumps({**head, "skipped": reason}) if options.json else f"skipped: {reason}")
        sys.stdout.write("\n")
        return 3
    entries: list[Entry] = []
    for name in options.module or [CASES]:
        entries += importlib.import_module(name).gate_entries()
    skips = [options.skip] if options.skip else []
    entries = [entry for entry in entries if options.only in entry.name and not any(w in entry.name for w in skips)]
    if not entries:
        but = f" and not {options.skip!r}" if skips else ""
        sys.stderr.write(f"kernels.gate: no entry's name contains {options.only!r}{but}\n")
        return 2
    binaries, errors = collect(entries, options.arch)
    compile_all(binaries, options.arch, options.jobs)
    skipped = []
    for binary in binaries:
        if reason := too_large(binary, options.arch):
            skipped.append(reason)
        else:
            errors += judge(binary, options.arch)
    seconds = round(time.perf_counter() - started, 1)
    if options.json:
        body = {"entries": [x.name for x in entries], "variants": list(map(report, binaries))}
        verdict = {"skipped_variants": skipped, "errors": errors, "seconds": seconds}
        sys.stdout.write(json.dumps({**head, **body, **verdict}) + "\n")
    else:
        for binary in binaries:
            sys.stdout.write(line(binary) + "\n")
        for reason in skipped:
            sys.stdout.write(f"skipped: {reason}\n")
        for error in errors:
            sys.stdout.write(f"error: {error}\n")
        summary = f"{len(errors)} errors" if errors else "all as expected"
        counts = f"{len(entries)} entries, {len(binaries)} variants"
        sys.stdout.write(f"sm_{options.arch}, triton {triton.__version__}: {counts}, {summary}, {seconds} s\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
