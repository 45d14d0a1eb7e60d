"""Sums over a row that a cluster of programs shares, as one written-down tree, for kernels in Gluon.

A wide row is [CLUSTER, elements of a program], one line to a program, eight neighbouring elements to a thread. The
programs of a cluster run side by side and write into each other's shared memory, where a barrier counts the bytes that
have come: no fence, and no way through the L2, where what else is read would be in the way. Every step of a sum adds
two numbers, neighbours first, as `kernels.tree` does, so that the bytes are the same.

The language has no word for another program's shared memory, so these sums are inline PTX: each takes a thread's eight
elements and gives the result to all eight. `room` is where they meet; a kernel has no other shared memory, so that it
lies at the same place in all of them.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CLUSTER = 8
"""Programs of a row: as many as every card with clusters takes."""

EACH = 8
"""Elements of a thread."""


MEETINGS, MOST_WARPS = 2, 4
"""Sums over a row that a kernel may take, and warps of a program: what there is room for."""

ROOM = 128
"""Words of the room: a barrier of two for each meeting, then the sums that come to each; a power of two."""

SHARED_BYTES = 4 * 2 * ROOM
"""What a kernel with meetings takes, and no more: the room has to be the first thing in it."""


@triton.constexpr_function
def beginning(warps: int) -> str:
    """PTX that makes a barrier ready for each meeting, to be passed when every warp of the cluster has sent its sum,
    and waits until the other programs have done so: before that nothing can be sent to them."""
    lines = [
        "{",
        ".reg .pred first;",
        ".reg .b32 thread, here;",
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
        "mov.u32 here, global_smem;",
        *(f"@first mbarrier.init.shared::cta.b64 [here+{8 * at}], 1;" for at in range(MEETINGS)),
        "@first fence.mbarrier_init.release.cluster;",
    ]
    for at in range(MEETINGS):
        lines.append(f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [here+{8 * at}], {4 * warps * CLUSTER};")
    arrive = "barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.wait.aligned;"
    return "\n".join([*lines, *arrive, "mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def whole_row(warps: int, meeting: int) -> str:
    """PTX that adds up a row: a thread's elements, a warp's threads, then all warps of the cluster.

    Each warp sends its sum to every program; each program waits until all have come to it.
    """
    count = warps * CLUSTER
    barrier, sums = 8 * meeting, 8 * MEETINGS + 4 * MOST_WARPS * CLUSTER * meeting
    lines = [
        "{",
        ".reg .pred sends, come;",
        ".reg .b32 lane, place, there, at, here;",
        f".reg .f32 x<{EACH}>, other, s<{count}>;",
        *_thread_sum("add.rn.f32"),
        *_across("add.rn.f32", (1, 2, 4, 8, 16)),
        "mov.u32 here, global_smem;",
        "mov.u32 lane, %tid.x;",
        "shr.u32 at, lane, 5;",
        "and.b32 lane, lane, 31;",
        f"setp.lt.u32 sends, lane, {CLUSTER};",
        "mov.u32 place, %cluster_ctarank;",
        f"mad.lo.u32 place, place, {warps}, at;",
        "mad.lo.u32 place, place, 4, here;",
        f"add.u32 place, place, {sums};",
        f"add.u32 at, here, {barrier};",
        "@sends mapa.shared::cluster.u32 there, place, lane;",
        "@sends mapa.shared::cluster.u32 at, at, lane;",
        "@sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], x0, [at];",
        "waiting:",
        f"mbarrier.try_wait.parity.shared::cta.b64 come, [here+{barrier}], 0;",
        "@!come bra waiting;",
    ]
    for at in range(0, count, 4):
        lines.append(f"ld.shared.v4.f32 {{s{at}, s{at + 1}, s{at + 2}, s{at + 3}}}, [here+{sums + 4 * at}];")
    return "\n".join([*lines, *_tree("add.rn.f32", "s", count), *_to_all("s0"), "}"])


@triton.constexpr_function
def group(operation: str, magnitude: bool) -> str:
    """PTX that brings together a group of 64: a thread's elements, then eight threads'; `magnitude`: without signs."""
    kind = "b32" if magnitude else "f32"
    lines = ["{", f".reg .{kind} x<{EACH}>, other;", *_thread_sum(operation, magnitude)]
    return "\n".join([*lines, *_across(operation, (1, 2, 4)), *_to_all("x0"), "}"])


@triton.constexpr_function
def _thread_sum(operation: str, magnitude: bool = False) -> list[str]:
    """A thread's elements, the operands behind the eight results, into x0."""
    take = "and.b32 x{0}, ${1}, 0x7FFFFFFF;" if magnitude else "mov.b32 x{0}, ${1};"
    return [*(take.format(at, EACH + at) for at in range(EACH)), *_tree(operation, "x", EACH)]


@triton.constexpr_function
def _tree(operation: str, name: str, count: int) -> list[str]:
    """Registers of a name, a power of two, into the first, neighbours first."""
    steps = [(at, 1 << level) for level in range(count.bit_length() - 1) for at in range(0, count, 2 << level)]
    return [f"{operation} {name}{at}, {name}{at}, {name}{at + far};" for at, far in steps]


@triton.constexpr_function
def _across(operation: str, lanes: tuple[int, ...]) -> list[str]:
    """x0 of threads that lie so far apart, by way of a register `other`."""
    return [f"shfl.sync.bfly.b32 other, x0, {far}, 31, 0xffffffff; {operation} x0, x0, other;" for far in lanes]


@triton.constexpr_function
def _to_all(name: str) -> list[str]:
    return [f"mov.b32 ${at}, {name};" for at in range(EACH)]


@triton.constexpr_function
def _plain() -> object:
    """Shared memory of which every program has its own."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], [[0], [0], [0]])


@triton.constexpr_function
def _anywhere(warps: int) -> object:
    return gl.BlockedLayout([1], [32], [warps], [0], [[0], [0], [0]])


OPERANDS = gl.constexpr(",".join(["=r"] * EACH + ["r"] * EACH))
ROOM_WORDS = gl.constexpr(ROOM)
ADD, LARGER = gl.constexpr("add.rn.f32"), gl.constexpr("max.u32")


@gluon.jit
def begin():
    """The room of a kernel's meetings, ready once all programs of the cluster have begun; `end` gives it up."""
    LAYOUT: gl.constexpr = _plain()
    ANYWHERE: gl.constexpr = _anywhere(gl.num_warps())
    ASM: gl.constexpr = beginning(gl.num_warps())
    room = gl.allocate_shared_memory(gl.int32, [2, ROOM_WORDS], LAYOUT)
    # A store beside the room: without any the compiler would drop the name by which the PTX finds it.
    room.index(1).store(gl.zeros([ROOM_WORDS], gl.int32, ANYWHERE))
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)
    return room


@gluon.jit
def end(room):
    """Nothing else may lie there before."""
    room._keep_alive()


@gluon.jit
def row_sum(x, MEETING: gl.constexpr):
    """The sum of all of x fp32 [CLUSTER, n], in every element; each of a kernel's has a number of its own, 0 or 1."""
    ASM: gl.constexpr = whole_row(gl.num_warps(), MEETING)
    return gl.inline_asm_elementwise(ASM, OPERANDS, [x], dtype=gl.float32, is_pure=False, pack=8)


@gluon.jit
def group_sums(x):
    """The sum of each 64 neighbours of x fp32 [CLUSTER, n], in every element."""
    ASM: gl.constexpr = group(ADD, False)
    return gl.inline_asm_elementwise(ASM, OPERANDS, [x], dtype=gl.float32, is_pure=False, pack=8)


@gluon.jit
def group_largest(x):
    """The bits of the largest magnitude of each 64 neighbours of x fp32 [CLUSTER, n], int32, in every element."""
    ASM: gl.constexpr = group(LARGER, True)
    return gl.inline_asm_elementwise(ASM, OPERANDS, [x], dtype=gl.int32, is_pure=False, pack=8)
