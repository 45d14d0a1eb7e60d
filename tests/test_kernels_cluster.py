"""Sums that a cluster of programs shares: their PTX, followed thread by thread, for which no GPU is needed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not built for this platform")

from kernels.cluster import CLUSTER, EACH, MEETINGS, MOST_WARPS, ROOM, beginning, group, whole_row

LANES = 32
STATEMENT = re.compile(r"(?:@sends )?([a-z0-9.:_]+) (.+)")


def run(text: str, x: np.ndarray) -> np.ndarray:
    """What the threads of a cluster give back: x and result [warps of the cluster, 32, 8], 32-bit words of float32."""
    warps = x.shape[0]
    registers = {f"${EACH + at}": x[..., at].copy() for at in range(EACH)}
    shared = np.zeros(warps, dtype=np.float32)
    for statement in filter(None, (part.strip() for part in text.replace("{\n", "").replace("\n}", "").split(";"))):
        found = STATEMENT.fullmatch(statement)
        if found is None or statement.startswith("."):
            continue
        operation, operands = found[1], re.findall(r"\[.*?\]|[^\s,{}]+", found[2])
        if operation == "add.rn.f32":
            registers[operands[0]] = registers[operands[1]] + registers[operands[2]]
        elif operation == "max.u32":
            words = [registers[name].view(np.uint32) for name in operands[1:]]
            registers[operands[0]] = np.maximum(*words).view(np.float32)
        elif operation == "mov.b32":
            registers[operands[0]] = registers[operands[1]]
        elif operation == "and.b32" and operands[2] == "0x7FFFFFFF":
            registers[operands[0]] = (registers[operands[1]].view(np.uint32) & 0x7FFFFFFF).view(np.float32)
        elif operation == "shfl.sync.bfly.b32":
            registers[operands[0]] = registers[operands[1]][:, np.arange(LANES) ^ int(operands[2])]
        elif operation.startswith("st.async"):
            shared[:] = registers[operands[1]][:, 0]  # lanes 0 to 7, which hold the same, send to a program each
        elif operation == "ld.shared.v4.f32":
            first = (int(operands[4].split("+")[1].rstrip("]")) - sums_at(text)) // 4
            for at, name in enumerate(operands[:4]):
                registers[name] = np.broadcast_to(shared[first + at], x.shape[:2])
    return np.stack([registers[f"${at}"] for at in range(EACH)], -1)


def sums_at(text: str) -> int:
    """Where in the room a sum's programs send to."""
    found = re.search(r"add\.u32 place, place, (\d+);", text)
    assert found
    return int(found[1])


def tree(x: np.ndarray) -> np.ndarray:
    """Sums over the last axis, a power of two, neighbours first."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def elements(warps: int) -> np.ndarray:
    """A row of squares of any size, so that another order of sums is another sum."""
    generator = torch.Generator().manual_seed(warps)
    x = torch.randn(warps * CLUSTER, LANES, EACH, generator=generator) * torch.logspace(-3, 3, EACH)
    return x.square().numpy()


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("meeting", range(MEETINGS))
def test_a_row_is_summed_as_the_tree(warps: int, meeting: int) -> None:
    """Neighbours first, over threads, warps and programs: the bytes of `kernels.tree`, in every element."""
    x = elements(warps)
    expected = tree(x.reshape(-1))
    found = run(whole_row(warps, meeting), x)
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()
    assert tree(x.reshape(-1)[::-1].copy()) == expected  # mirrored is the same tree
    assert x.reshape(-1).cumsum()[-1] != expected


def test_programs_wait_for_one_another() -> None:
    """A sum that is sent before its target is ready, or read before it has come, is lost."""
    text = beginning(2)
    order = [text.index(word) for word in ("mbarrier.init", "fence.mbarrier_init", "arrive.relaxed", "cluster.wait")]
    assert order == sorted(order)
    text = whole_row(2, 1)
    order = [text.index(word) for word in ("st.async", "waiting:", "try_wait", "bra waiting", "ld.shared")]
    assert order == sorted(order)


@pytest.mark.parametrize("warps", [1, 2, MOST_WARPS])
def test_a_meeting_has_its_own_room(warps: int) -> None:
    """Its barrier counts the bytes of one sum from each warp, and nobody else writes where they come to."""
    taken: set[int] = set()
    for meeting in range(MEETINGS):
        text = whole_row(warps, meeting)
        barrier, sums = re.search(r"\[here\+(\d+)\], 0;", text), sums_at(text)
        assert barrier
        assert f"[here+{barrier[1]}], {4 * warps * CLUSTER};" in beginning(warps)
        assert f"add.u32 at, here, {barrier[1]};" in text
        own = {*range(int(barrier[1]), int(barrier[1]) + 8), *range(sums, sums + 4 * warps * CLUSTER)}
        assert not own & taken
        assert max(own) < 4 * ROOM
        taken |= own


def test_a_group_is_summed_as_the_tree() -> None:
    """Sixty-four neighbours: eight threads of eight."""
    x = elements(2)
    expected = tree(x.reshape(-1, 64))
    found = run(group("add.rn.f32", False), x).reshape(-1, 64)
    assert (found.view(np.uint32) == expected.view(np.uint32)[:, None]).all()


def test_the_largest_magnitude_of_a_group() -> None:
    """Signs do not count."""
    x = elements(1) * np.where(np.arange(EACH) % 2, -1, 1).astype(np.float32)
    found = run(group("max.u32", True), x).reshape(-1, 64)
    assert (found == np.abs(x).reshape(-1, 64).max(1, keepdims=True)).all()
