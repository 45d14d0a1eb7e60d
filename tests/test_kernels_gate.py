"""The compile gate: our kernels pass it, planted faults do not, and it reads machine code as it should.

The gate runs in its own processes, without the interpreter that the rest of the suite needs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not built for this platform")
pytest.importorskip("triton.backends.nvidia", reason="this triton cannot compile for CUDA")

from support_kernel_source import launched_kernels, violations

from kernels.gate import machine_code

ROOT = Path(__file__).parent.parent
KERNELS = sorted((ROOT / "kernels").glob("*.py"))


def start_gate(*arguments: str) -> subprocess.Popen[str]:
    """`python -m kernels.gate --json` in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kernels.gate", "--json", *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(gate: subprocess.Popen[str], status: int) -> dict[str, Any]:
    """The gate's report, once it ended with this status."""
    out, err = gate.communicate(timeout=600)
    assert gate.returncode == status, err or out
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.fixture(scope="module")
def faults() -> dict[str, Any]:
    """Report on the planted faults."""
    return finish(start_gate("--module", "support_kernel_faults"), 1)


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    """Report on every kernel of the verify path at Gemma's shapes, sm_90."""
    gate = start_gate("--skip", "qwen35")
    out, err = gate.communicate(timeout=900)
    assert gate.returncode in (0, 1), err or out
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.fixture(scope="module", params=["12b sliding", pytest.param("", marks=pytest.mark.slow)], ids=["some", "all"])
def sm_120(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Report on some kernels, or slowly on all, for sm_120."""
    gate = start_gate("--arch", "120", "--only", request.param)
    out, err = gate.communicate(timeout=900)
    if gate.returncode == 3:
        pytest.skip(reason=json.loads(out)["skipped"])
    assert gate.returncode in (0, 1), err or out
    report: dict[str, Any] = json.loads(out)
    return report


def test_our_kernels_are_as_expected(ours: dict[str, Any]) -> None:
    """One variant over M = 1..8, one MMA family, no spills, no float atomics, few instructions per weight."""
    assert ours["errors"] == []
    assert ours["arch"] == 90
    assert len(ours["entries"]) >= 40


@pytest.mark.slow
def test_the_second_familys_kernels_are_as_expected() -> None:
    """The same kernels with Qwen's constants, and its own; that the list is whole is tested where it is launched."""
    found = finish(start_gate("--only", "qwen35"), 0)
    assert found["errors"] == []
    assert len(found["entries"]) >= 20


def test_every_launched_kernel_is_compiled(ours: dict[str, Any]) -> None:
    """A kernel that no entry of the gate reaches would be guarded by nothing."""
    launched = set().union(*(launched_kernels(path.read_text()) for path in KERNELS)) - NOT_OF_THE_VERIFY_PATH
    assert launched == {variant["kernel"] for variant in ours["variants"]}


def test_products_ask_for_room_that_spreads_them_evenly(ours: dict[str, Any]) -> None:
    """The constant alone spreads nothing: the binary has to ask for that much, and only a head's for more."""
    found = [x for x in ours["variants"] if x["kernel"] == "_qmv_ahead"]
    rooms = [(int(room[1]), x) for x in found if (room := re.search(r"ROOM=(\d+)", x["variant"]))]
    assert len(rooms) == len(found) >= 20
    for room, variant in rooms:
        assert variant["shared_bytes"] >= room
        assert variant["shared_bytes"] == room or all("x262144" in name for name in variant["entries"]), variant


def test_both_forms_of_the_product_do_the_same_operations() -> None:
    """What the interpreter shows is said of `kernels.qmv` alone, and bytes are compared on a GPU: without this, a term
    that only one form has would pass on every machine without one."""
    report = finish(start_gate("--module", "support_kernel_twins"), 0)
    floats = {variant["entries"][0]: variant["loop_floats"] for variant in report["variants"]}
    assert len(floats) == 6
    for bits in (4, 8, 16):
        assert floats[f"ahead {bits}"] == floats[f"plain {bits}"], bits
        assert any(name.startswith("HMMA") for name, _ in floats[f"ahead {bits}"])


NOT_OF_THE_VERIFY_PATH = {"_stream", "_qmv"}
"""A kernel that only measures, and the product that the interpreter runs."""

ONE_FAULT = {
    "M specialized by Triton": r"expected one variant over M = 1..8, found 2 \(M=1: M=1, .*; M=2,3,4,5,6,7,8: ROWS=8",
    "M a constant": r"expected one variant over M = 1..8, found 8 \(M=1: M=1, .*; M=8: M=8, ",
    "another kernel at M = 3": r"honest: expected a launch at every M, found M=1,2,4,5,6,7,8 only",
    "a tile of 16 rows": r"expected MMA family HMMA, found HGMMA",
    "a tile of 16 rows, 2 warps": r"expected 8 rows as the n operand, found \[16\]",
    "an atomic reduction": r"expected no float atomics, found \d+ instructions",
    "a costly unpack": r"expected at most 2.8 lane-instructions per weight, found \d",
    "too few registers": r"expected no spills, found \d+ bytes of local memory, \d+ spill instructions",
    "contraction on": r"expected enable_fp_fusion=False, found contraction left to the compiler",
    "fp32 operands": r"expected products of bf16 or fp16, found \['f32'\]",
    "few loads on their way": r"expected at least 32 loads before the first addition, found \d",
    "a late release": r"expected consumers released right after the wait, found later or not at all",
    "a release before the reads": r"expected consumers released later or not at all, found right after the wait",
    "a release after the wait": r"expected consumers released before the wait, found later or not at all",
    "nothing asked for ahead": r"expected at least 1 asynchronous copies before the wait, found 0",
    "shared memory beside a meeting's": r"expected 64 bytes of shared memory, found \d+",
    "a kernel that is not launched": r"expects other, which it never launches",
    "no kernel at all": r"launches no kernel",
}


@pytest.mark.parametrize("fault", ONE_FAULT)
def test_a_fault_is_refused(faults: dict[str, Any], fault: str) -> None:
    """Each planted fault makes a line that names the entry, what was expected and what was found."""
    lines = [line for line in faults["errors"] if line.startswith(f"{fault}: ")]
    assert any(re.search(ONE_FAULT[fault], line) for line in lines), faults["errors"]


def test_the_honest_kernel_is_not_refused(faults: dict[str, Any]) -> None:
    """The faults differ from it in one thing each; without this the refusals would say nothing."""
    assert not [line for line in faults["errors"] if line.startswith("honest")]
    assert "honest" in faults["entries"]
    assert {line.split(": ")[0] for line in faults["errors"]} == set(ONE_FAULT)


def test_figures_are_read_from_the_code(faults: dict[str, Any]) -> None:
    """What the report says about the honest kernel can be checked by hand: 2 x 4 steps of 256 weights a group of 64."""
    honest = next(variant for variant in faults["variants"] if "honest" in variant["entries"])
    assert honest["mma"] == ["HMMA"]
    assert honest["dots"] == [[8, "bf16"]]
    assert honest["per_weight"] == round(honest["loop_instructions"] * 32 / (honest["loop_mma"] * 256), 3)
    assert honest["loop_mma"] % 4 == 0
    assert honest["loop_plain_loads"] > 0
    assert 16 <= honest["registers"] <= 255
    assert (honest["local_bytes"], honest["float_atomics"]) == (0, 0)


def test_the_tuner_compiles_without_a_gpu() -> None:
    """Before it times anything: one binary for each tile and room, shared by matrices that differ in K alone."""
    code = """
from kernels.launch import LaunchShape
from tools.tune_qmv import compile_all
shapes = [LaunchShape(64, 1, 2, 2, 4), LaunchShape(64, 1, 2, 2, 8)]
print(compile_all([((width, 1024, 4), shape) for width in (1024, 2048) for shape in shapes], 2))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, text=True, capture_output=True)
    assert done.stdout == "1\n", done.stderr  # 64 or 128 programs: one to a multiprocessor either way


def test_the_interpreter_is_refused() -> None:
    """Under TRITON_INTERPRET nothing would be compiled, and every check would pass."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.gate"], env=environment, cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


def test_an_unknown_architecture_is_skipped() -> None:
    """Skipped with the reason, never silently passed."""
    skipped = finish(start_gate("--arch", "77"), 3)
    assert skipped["skipped"].endswith("does not know sm_77")


def test_sm_120(sm_120: dict[str, Any]) -> None:
    """The same kernels for a consumer card: warp-level MMA alone, and what is too large for it is named."""
    assert sm_120["errors"] == []
    families = {family for variant in sm_120["variants"] for family in variant["mma"]}
    assert families == {"HMMA"}
    assert all(": needs " in line or ": spills " in line for line in sm_120["skipped_variants"])
    assert len(sm_120["skipped_variants"]) <= 5


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;       /* 0x00 */
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;                /* 0x00 */
        /*0030*/              @!P1 BRA 0x20 ;                             /* 0x00 */
        /*0040*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ; /* 0x00 */
        /*0050*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;   /* 0x00 */
        /*0060*/                   FFMA R9, R9, R10, R8 ;                 /* 0x00 */
        /*0070*/               @P0 BRA 0x40 ;                             /* 0x00 */
        /*0080*/                   REDUX.SUM UR4, R2 ;                    /* 0x00 */
        /*0090*/                   RED.E.ADD.STRONG.GPU desc[UR4][R2.64], R4 ; /* 0x00 */
        /*00a0*/                   RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4 ; /* 0x00 */
        /*00b0*/                   STL [R1], R4 ;                         /* 0x00 */
        /*00c0*/                   BRA 0xc0 ;                             /* 0x00 */
"""
USAGE = machine_code._USAGE.search("REG:40 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:560")
DOT_IR = (
    "%d = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<64x32xbf16, #ttg.dot_op<{opIdx = 0}>> * "
    "tensor<32x8xbf16, #ttg.dot_op<{opIdx = 1}>> -> tensor<64x8xf32, #mma>\n"
    "%e = ttng.warp_group_dot %f, %g, %h : tensor<64x64xf16, #x> * !ttg.memdesc<64x16xf16, #y> -> tensor<64x16xf32>"
)


def test_a_listing_is_read() -> None:
    """Loops, integer against float atomics, spills and copies, each by an instruction that is easy to mistake."""
    assert USAGE is not None
    code = machine_code.figures(machine_code.parse(LISTING), USAGE, DOT_IR, 1024)
    assert (code.loop_instructions, code.loop_mma, code.loop_plain_loads, code.per_weight) == (4, 1, 0, 0.5)
    assert code.loop_floats == (("FFMA", 1), ("HMMA.16816.F32.BF16", 1))
    assert code.loads_ahead == 1
    assert (code.float_atomics, code.spill_instructions, code.local_bytes) == (1, 1, 24)
    assert (code.async_copies, code.registers, code.mma) == (1, 40, ("HMMA",))
    assert code.dots == ((8, "bf16"), (16, "f16"))


@pytest.mark.parametrize(
    ("order", "release", "ahead"),
    [
        ("LDG ACQBULK IADD3 PREEXIT LDG", "early", 0),
        ("ACQBULK LDG PREEXIT", "late", 0),
        ("LDGSTS LDGSTS ACQBULK LDGSTS PREEXIT", "late", 2),
        ("ACQBULK LDG", "late", 0),
        ("PREEXIT IADD3 LDGSTS ACQBULK LDG", "first", 1),
        ("PREEXIT LDG", "late", 0),
        ("LDG", "late", 0),
    ],
)
def test_releases_are_told_from_one_another(order: str, release: str, ahead: int) -> None:
    """Which of them a kernel has decides how the next launch's programs are spread, and what it reads before its wait
    whether its own have something to do meanwhile."""
    assert USAGE is not None
    lines = [f"/*{16 * at:04x}*/ {opcode} R2, R3 ;" for at, opcode in enumerate([*order.split(), "EXIT"])]
    code = machine_code.figures(machine_code.parse("\n".join(lines)), USAGE, "", 0)
    assert (code.release, code.copies_ahead) == (release, ahead)


def test_a_listing_without_loops() -> None:
    """No backward branch, no main loop, no figure per weight; the trap at the end is not a loop."""
    assert USAGE is not None
    text = "/*0000*/  HMMA.16816.F32 R8, R4, R6, R8 ;\n/*0010*/  EXIT ;\n/*0020*/  BRA 0x20 ;"
    code = machine_code.figures(machine_code.parse(text), USAGE, "", 0)
    assert (code.loop_instructions, code.per_weight, code.mma) == (0, None, ("HMMA",))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_source_rules(path: Path) -> None:
    """No float atomics, no autotune, no tl.dot outside its helper, dependent launches in order, M never specialised."""
    launched = set().union(*(launched_kernels(other.read_text()) for other in KERNELS))
    assert violations(path.name, path.read_text(), launched) == []


GOOD = """
@triton.jit(do_not_specialize=["rows"])
def _kernel(x_ptr, weight_ptr, rows, K: tl.constexpr):
    w = tl.load(weight_ptr)
    wait_for_producers()
    w = dot(w, w, w)
    release_consumers()
    tl.store(x_ptr, w)

def call(x, rows):
    _kernel[(rows,)](x, rows, K=64)
"""
WAIT = "    wait_for_producers()"
BROKEN = {
    "two releases": (
        "    release_consumers()\n",
        "    release_consumers()\n" * 2,
        "release_consumers() may be called once",
    ),
    "a release too early": (
        f"{WAIT}\n    w = dot(w, w, w)\n    release_consumers()",
        f"    release_consumers()\n{WAIT}\n    w = dot(w, w, w)",
        "release_consumers() before the wait",
    ),
    "rows ahead of the wait": ("    w = tl.load(weight_ptr)\n", "    _copy_rows(w)\n", "reads rows before wait_for_"),
    "a producer's values": (
        "w = tl.load(weight_ptr)",
        "w = tl.load(x_ptr + K)",
        "reads x_ptr before wait_for_producers()",
    ),
    "a pointer of another name": (
        "w = tl.load(weight_ptr)",
        "x_at = x_ptr + K\n    w = tl.load(x_at)",
        "reads x_ptr before wait_for_producers()",
    ),
    "a helper's read": ("w = tl.load(weight_ptr)", "w = _angles(x_ptr)", "reads x_ptr before wait_for_producers()"),
    "no wait": (f"{WAIT}\n", "", "must be called once, outside loops and conditions: 0 found"),
    "a wait in a loop": (WAIT, f"    for _ in range(2):\n    {WAIT}", "must be called once, outside loops and cond"),
    "two waits": (WAIT, f"{WAIT}\n{WAIT}", "must be called once, outside loops and conditions: 2 found"),
    "an early store": ("w = tl.load(weight_ptr)", "tl.store(x_ptr, 0)", "stores before wait_for_producers()"),
    "an early return": ("w = tl.load(weight_ptr)", "if K:\n        return", "returns before wait_for_producers()"),
    "a bare dot": ("dot(w", "tl.dot(w", "tl.dot outside kernels.jit.dot"),
    "an atomic": ("tl.store(x_ptr, ", "tl.atomic_add(x_ptr, ", "tl.atomic_add: the order of float atomics"),
    "autotune": ("@triton.jit", "@triton.autotune([], [])\n@triton.jit", "triton.autotune: picks a configuration"),
    "specialized": ('(do_not_specialize=["rows"])', "", "rows reaches the compiler"),
    "a constant": ("rows, K:", "rows: tl.constexpr, K:", "rows reaches the compiler"),
    "a host sync": ("def call(x, rows):", "def call(x, rows):\n    rows = x.item()", "x.item() waits for the device"),
    "libdevice": ("dot(w", "tl.extra.cuda.libdevice.dot(w", "libdevice: does not run in the interpreter"),
}


def test_a_product_may_release_before_its_wait() -> None:
    """It alone, and in Gluon too its wait is looked for: what it writes and where its rows come from is older."""
    first = GOOD.replace("    release_consumers()\n", "").replace(
        "    w = tl.load", "    release_consumers()\n    w = tl.load"
    )
    product = first.replace("_kernel", "_qmv_ahead").replace("@triton.jit", "@gluon.jit")
    assert violations("good.py", product) == []
    assert len(violations("good.py", first)) == 1
    assert len(violations("good.py", product.replace(f"{WAIT}\n", ""))) == 1


def test_a_program_without_work_may_end_after_the_wait() -> None:
    """Its end releases the consumers."""
    source = GOOD.replace("    release_consumers()\n", "")
    early = source.replace(WAIT, f"{WAIT}\n    if K:\n        return\n    release_consumers()")
    assert violations("good.py", early) == []


@pytest.mark.parametrize("rule", BROKEN)
def test_source_rules_refuse(rule: str) -> None:
    """Every rule, on a module that breaks just that one."""
    assert violations("good.py", GOOD) == []
    old, new, message = BROKEN[rule]
    found = violations("good.py", GOOD.replace(old, new))
    assert len(found) == 1
    assert message in found[0]
