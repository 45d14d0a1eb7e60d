"""What a compiled kernel's machine code says: MMA family, registers, spills, atomics, copies and its main loop."""

from __future__ import annotations

import hashlib
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from kernels.jit import Release

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z0-9_.]+)([^;]*);")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_DOT = re.compile(
    r"(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b.*?: "
    r"(?:tensor|!ttg\.memdesc)<([\dx]+)x(\w+)[,>].*? \* (?:tensor|!ttg\.memdesc)<([\dx]+)x(\w+)[,>]"
)
_MMA = ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "DMMA", "QGMMA", "IGMMA")
_ATOMICS = ("RED", "ATOM", "ATOMG", "ATOMS")
_FLOAT_TYPES = ("F16", "F32", "F64", "BF16")
_FLOAT_OPS = ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "MUFU", "HADD2", "HMUL2", "HFMA2", "F2F", "F2FP", "I2F", *_MMA)


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: address, opcode with its dotted modifiers, operands."""

    address: int
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes; None for other instructions."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands.strip()) if self.base == "BRA" else None
        return int(found[1], 16) if found else None


@dataclass(frozen=True)
class MachineCode:
    """Figures of one kernel. Instruction counts are per warp; shared_bytes and local_bytes per program and thread.

    loop_*: the main loop, one pass of its body; loop_floats is how often each floating-point operation stands there.
    per_weight: lane-instructions per weight of a product whose rows are one n8 operand, so that each m16n8k16 step
    consumes 256 weights of its warp; None without a loop of such steps. dots: (rows of the second operand, operand
    type) of every product in Triton's own intermediate form. loads_ahead: loads of global memory before the first
    addition, so those that are on their way at once. copies_ahead: asynchronous copies before the wait. release: when
    consumers are released; early is after the wait with no load in between.
    """

    mma: tuple[str, ...]
    dots: tuple[tuple[int, str], ...]
    registers: int
    local_bytes: int
    spill_instructions: int
    shared_bytes: int
    float_atomics: int
    async_copies: int
    barriers: int
    loop_instructions: int
    loop_mma: int
    loop_plain_loads: int
    loop_floats: tuple[tuple[str, int], ...]
    per_weight: float | None
    loads_ahead: int
    copies_ahead: int
    release: Release
    float_sequence: str


def _tool(name: str, *arguments: str) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def parse(text: str) -> list[Instruction]:
    """The instructions of a `cuobjdump -sass` listing of one kernel."""
    return [Instruction(int(line[1], 16), line[3], line[4]) for line in _LINE.finditer(text)]


def main_loop(instructions: list[Instruction]) -> list[Instruction]:
    """The innermost loop with the most MMA steps, or without any the longest innermost loop; empty when none."""
    bodies = []
    for end in instructions:
        if end.target is not None and end.target < end.address:
            bodies.append([x for x in instructions if end.target <= x.address <= end.address])
    spans = [(body[0].address, body[-1].address) for body in bodies if body]
    innermost = [
        body
        for body, (start, stop) in zip(bodies, spans, strict=True)
        if not any((a, b) != (start, stop) and start <= a and b <= stop for a, b in spans)
    ]
    return max(innermost, key=lambda body: (_mma_steps(body), len(body)), default=[])


def _mma_steps(body: list[Instruction]) -> int:
    return sum(x.base in _MMA for x in body)


def _weights_per_step(instruction: Instruction) -> int:
    """Elements of the m16 operand that one warp-level step consumes: HMMA.16816 takes 16 x 16."""
    return 256 if ".16816" in instruction.opcode else 128 if ".1688" in instruction.opcode else 0


def _release(instructions: list[Instruction]) -> Release:
    """Where the trigger, PREEXIT, stands among the wait, ACQBULK, and the loads."""
    marks = [x.base for x in instructions if x.base in ("ACQBULK", "PREEXIT", "LDG", "LDGSTS")]
    if "PREEXIT" in itertools.takewhile(lambda mark: mark != "ACQBULK", marks):
        return "first" if "ACQBULK" in marks else "late"
    return "early" if ("ACQBULK", "PREEXIT") in itertools.pairwise(marks) else "late"


def _is_float_atomic(instruction: Instruction) -> bool:
    return instruction.base in _ATOMICS and any(part in _FLOAT_TYPES for part in instruction.opcode.split("."))


def read(compiled: Any) -> MachineCode:
    """Disassemble a compiled kernel with the tools that Triton brings along."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _USAGE.search(_tool("cuobjdump", "-res-usage", str(cubin)))
        instructions = parse(_tool("cuobjdump", "-sass", str(cubin)))
    if usage is None or not instructions:
        raise RuntimeError(f"{compiled.metadata.name}: cuobjdump shows no code; its output has another form")
    return figures(instructions, usage, compiled.asm["ttgir"], compiled.metadata.shared)


def figures(instructions: list[Instruction], usage: re.Match[str], ttgir: str, shared_bytes: int) -> MachineCode:
    """The figures of a listing."""
    loop = main_loop(instructions)
    weights = sum(_weights_per_step(x) for x in loop if x.base == "HMMA")
    floats = " ".join(x.opcode for x in instructions if x.base in _FLOAT_OPS)
    return MachineCode(
        mma=tuple(sorted({x.base for x in instructions if x.base in _MMA})),
        dots=tuple((int(dot[3].split("x")[-1]), dot[2]) for dot in _DOT.finditer(ttgir)),
        registers=int(usage[1]),
        local_bytes=int(usage[2]) + int(usage[4]),
        spill_instructions=sum(x.base in ("LDL", "STL") for x in instructions),
        shared_bytes=shared_bytes,
        float_atomics=sum(_is_float_atomic(x) for x in instructions),
        async_copies=sum(x.base == "LDGSTS" for x in instructions),
        barriers=sum(x.base == "BAR" for x in instructions),
        loop_instructions=len(loop),
        loop_mma=_mma_steps(loop),
        loop_plain_loads=sum(x.base == "LDG" for x in loop),
        loop_floats=tuple(sorted(Counter(x.opcode for x in loop if x.base in _FLOAT_OPS).items())),
        per_weight=round(len(loop) * 32 / weights, 3) if weights else None,
        loads_ahead=sum(x.base == "LDG" for x in itertools.takewhile(lambda x: x.base != "FADD", instructions)),
        copies_ahead=sum(x.base == "LDGSTS" for x in itertools.takewhile(lambda x: x.base != "ACQBULK", instructions)),
        release=_release(instructions),
        float_sequence=hashlib.sha256(floats.encode()).hexdigest()[:16],
    )
