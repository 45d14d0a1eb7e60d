"""Sums over a row that a cluster of programs shares, as one written-down tree, for kernels in Gluon.

A wide row is [CLUSTER, elements of a program], one line to a program, eight neighbouring elements to a thread. The
programs of a cluster run side by side and write into each other's shared memory, so that adding up a row costs one
barrier: they meet there, not in the L2, where what else is read would be in the way. Every step of a sum adds two
numbers, neighbours first, as `kernels.tree` does, so that the bytes are the same.

The language has no word for another program's shared memory, so these sums are inline PTX: each takes a thread's eight
elements and gives the result to all eight.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CLUSTER = 8
"""Programs of a row: as many as every card with clusters takes."""

EACH = 8
"""Elements of a thread."""


@triton.constexpr_function
def whole_row(warps: int, first: bool) -> str:
    """PTX that adds up a row: a thread's elements, a warp's threads, then all warps of the cluster.

    Each warp puts its sum into the shared memory of every program. The first meeting also waits until all programs have
    begun, without which they have no shared memory; `begin` says so.
    """
    count = warps * CLUSTER
    lines = [
        "{",
        f".shared .align 16 .b32 sums[{count}];",
        ".reg .pred writes;",
        ".reg .b32 lane, place, there, own;",
        f".reg .f32 x<{EACH}>, other, s<{count}>;",
        *_thread_sum("add.rn.f32"),
        *_across("add.rn.f32", (1, 2, 4, 8, 16)),
        "mov.u32 lane, %tid.x;",
        "shr.u32 place, lane, 5;",
        "and.b32 lane, lane, 31;",
        f"setp.lt.u32 writes, lane, {CLUSTER};",
        "mov.u32 own, %cluster_ctarank;",
        f"mad.lo.u32 place, own, {warps}, place;",
        "shl.b32 place, place, 2;",
        "mov.u32 own, sums;",
        "add.u32 place, place, own;",
        *(["barrier.cluster.wait.aligned;"] if first else []),
        "@writes mapa.shared::cluster.u32 there, place, lane;",
        "@writes st.shared::cluster.f32 [there], x0;",
        "barrier.cluster.arrive.release.aligned;",
        "barrier.cluster.wait.acquire.aligned;",
    ]
    for at in range(0, count, 4):
        lines.append(f"ld.shared.v4.f32 {{s{at}, s{at + 1}, s{at + 2}, s{at + 3}}}, [own+{4 * at}];")
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


OPERANDS = gl.constexpr(",".join(["=r"] * EACH + ["r"] * EACH))
BEGIN = gl.constexpr("barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;")
ADD, LARGER = gl.constexpr("add.rn.f32"), gl.constexpr("max.u32")


@gluon.jit
def begin():
    """Say that this program has begun; a kernel does so once, before its first `row_sum`, which waits for all."""
    gl.inline_asm_elementwise(BEGIN, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def row_sum(x, FIRST: gl.constexpr):
    """The sum of all of x fp32 [CLUSTER, n], in every element; FIRST: the kernel's first."""
    ASM: gl.constexpr = whole_row(gl.num_warps(), FIRST)
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
