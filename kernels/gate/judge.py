"""Compiles every variant of the entries and holds its machine code to what the entries expect."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from kernels import MAX_ROWS
from kernels.gate.entry import Entry, Expect
from kernels.gate.machine_code import MachineCode, read
from kernels.gate.record import Variant, recorded_launches

TUNED = 90
"""The architecture that tiles are chosen for."""

SHARED_BYTES = {90: 232448, 120: 101376}
"""Shared memory a program may have, by architecture."""


WHEN = {"first": "before the wait", "early": "right after the wait", "late": "later or not at all"}
"""The words for each release."""


@dataclass
class Binary:
    """One variant of a kernel, what each entry that runs it expects, and what its code shows or why there is none."""

    variant: Variant
    uses: dict[str, Expect] = field(default_factory=dict)
    code: MachineCode | None = None
    failure: str | None = None
    seconds: float = 0.0


def collect(entries: Sequence[Entry], arch: int) -> tuple[list[Binary], list[str]]:
    """Run every entry for M = 1..8 without compiling: the binaries it needs, and errors for kernels with several.

    Of several variants only the first is kept: that there are others is the finding.
    """
    binaries: dict[Variant, Binary] = {}
    errors: list[str] = []
    with recorded_launches(arch) as launches:
        for entry in entries:
            rows_of: dict[str, dict[Variant, list[int]]] = {}
            for rows in range(1, MAX_ROWS + 1):
                launches.clear()
                entry.call(rows)
                for variant in dict.fromkeys(launches):
                    rows_of.setdefault(variant.kernel, {}).setdefault(variant, []).append(rows)
            errors += _several_variants(entry.name, rows_of)
            if not rows_of:
                errors.append(f"{entry.name}: launches no kernel")
            errors += [
                f"{entry.name}: expects {name}, which it never launches" for name in entry.expects.keys() - rows_of
            ]
            for kernel, variants in rows_of.items():
                variant = next(iter(variants))
                uses = binaries.setdefault(variant, Binary(variant)).uses
                uses[entry.name] = entry.expects.get(kernel, Expect())
    return list(binaries.values()), errors


def _several_variants(entry: str, rows_of: dict[str, dict[Variant, list[int]]]) -> list[str]:
    errors = []
    everywhere = list(range(1, MAX_ROWS + 1))
    for kernel, variants in rows_of.items():
        if len(variants) > 1:
            shown = "; ".join(f"M={_ranges(rows)}: {variant.describe()}" for variant, rows in variants.items())
            errors.append(f"{entry}: {kernel}: expected one variant over M = 1..8, found {len(variants)} ({shown})")
        for rows in variants.values():
            if len(variants) == 1 and rows != everywhere:
                errors.append(f"{entry}: {kernel}: expected a launch at every M, found M={_ranges(rows)} only")
    return errors


def _ranges(rows: list[int]) -> str:
    return ",".join(map(str, rows))


_WORK: list[Binary] = []
_ARCH = 0


def _compile(index: int) -> tuple[MachineCode | None, str | None, float]:
    started = time.perf_counter()
    code, failure = None, None
    try:
        code = read(_WORK[index].variant.compile(_ARCH))
    except Exception as error:  # a compiler error of any kind is a finding about this kernel
        lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        failure = " ".join(lines[:6])[:500]
    return code, failure, round(time.perf_counter() - started, 2)


def compile_all(binaries: list[Binary], arch: int, jobs: int) -> None:
    """Fill in `code` or `failure` of each; with jobs > 1 in forked processes, which inherit the recorded variants."""
    global _WORK, _ARCH
    _WORK, _ARCH = binaries, arch
    if jobs > 1 and len(binaries) > 1:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
            results = list(pool.map(_compile, range(len(binaries))))
    else:
        results = [_compile(index) for index in range(len(binaries))]
    for binary, result in zip(binaries, results, strict=True):
        binary.code, binary.failure, binary.seconds = result


def too_large(binary: Binary, arch: int) -> str | None:
    """Why a variant that is tuned for another architecture is not judged on this one; None when it is."""
    room = SHARED_BYTES.get(arch, min(SHARED_BYTES.values()))
    if arch == TUNED or binary.code is None:
        return None
    if binary.code.shared_bytes > room:
        needed = f"needs {binary.code.shared_bytes} bytes of shared memory, sm_{arch} has {room}"
    elif binary.code.local_bytes:
        needed = f"spills {binary.code.local_bytes} bytes on sm_{arch}"
    else:
        return None
    return f"{next(iter(binary.uses))}: {binary.variant.kernel}: {needed}; its tile is chosen for sm_{TUNED}"


def judge(binary: Binary, arch: int) -> list[str]:
    """What is wrong with a compiled variant, a line each; entries that expect the same share their lines."""
    groups: dict[Expect, list[str]] = {}
    for entry, expect in binary.uses.items():
        groups.setdefault(expect, []).append(entry)
    described = binary.variant.describe()
    errors = []
    for expect, entries in groups.items():
        others = f" (and {len(entries) - 1} more)" if len(entries) > 1 else ""
        where = f"{entries[0]}{others}: {binary.variant.kernel}"
        if binary.code is None:
            errors.append(f"{where}: does not compile for sm_{arch}: {binary.failure} ({described})")
            continue
        for fits, wanted, found in _demands(binary, binary.code, expect, arch):
            if not fits:
                errors.append(f"{where}: expected {wanted}, found {found} ({described})")
    return errors


def _demands(binary: Binary, code: MachineCode, expect: Expect, arch: int) -> Iterator[tuple[bool, str, object]]:
    """(whether it holds, what was expected, what was found) of every demand on a binary."""
    contracted = binary.variant.options.enable_fp_fusion
    yield not contracted, "enable_fp_fusion=False", "contraction left to the compiler"
    spills = f"{code.local_bytes} bytes of local memory, {code.spill_instructions} spill instructions"
    yield code.local_bytes == 0 and code.spill_instructions == 0, "no spills", spills
    yield code.float_atomics == 0, "no float atomics", f"{code.float_atomics} instructions"
    room = SHARED_BYTES.get(arch, min(SHARED_BYTES.values()))
    yield code.shared_bytes <= room, f"at most {room} bytes of shared memory", code.shared_bytes
    if (exact := expect.shared_bytes) is not None:
        yield code.shared_bytes == exact, f"{exact} bytes of shared memory", code.shared_bytes
    family = " and ".join(code.mma) or "none"
    yield len(code.mma) <= 1, "one MMA family", family
    yield _mma_fits(code, expect), f"MMA family {expect.mma}", family
    types = sorted({kind for _, kind in code.dots})
    yield set(types) <= {"bf16", "f16"}, "products of bf16 or fp16", types
    if expect.rows is not None:
        found = sorted({rows for rows, _ in code.dots})
        yield found == [expect.rows], f"{expect.rows} rows as the n operand", found
    if expect.per_weight is not None:
        fits = code.per_weight is not None and code.per_weight <= expect.per_weight
        figure = "no loop of HMMA steps" if code.per_weight is None else code.per_weight
        fits = fits or (arch != TUNED and code.per_weight is not None)  # the ceiling is a budget of the tuned card's
        yield fits, f"at most {expect.per_weight} lane-instructions per weight", figure
        yield code.loop_plain_loads == 0, "no plain load in the main loop", code.loop_plain_loads
    if expect.loads_ahead is not None:
        fits = code.loads_ahead >= expect.loads_ahead
        yield fits, f"at least {expect.loads_ahead} loads before the first addition", code.loads_ahead
    fits = code.copies_ahead >= expect.copies_ahead
    yield fits, f"at least {expect.copies_ahead} asynchronous copies before the wait", code.copies_ahead
    yield code.release == expect.release, f"consumers released {WHEN[expect.release]}", WHEN[code.release]


def _mma_fits(code: MachineCode, expect: Expect) -> bool:
    if expect.mma == "any":
        return set(code.mma) <= {"HMMA", "HGMMA"} and bool(code.mma)
    return code.mma == (() if expect.mma == "none" else (expect.mma,))
