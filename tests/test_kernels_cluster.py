"""Sums that a cluster of programs shares: their PTX, followed thread by thread, for which no GPU is needed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not built for this platform")

from kernels.cluster import CLUSTER, EACH, group, whole_row

LANES = 32
STATEMENT = re.compile(r"(?:@writes )?([a-z0-9.:_]+) (.+)")


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
        elif operation == "st.shared::cluster.f32":
            shared[:] = registers[operands[1]][:, 0]  # lanes 0 to 7, which hold the same, write to a program each
        elif operation == "ld.shared.v4.f32":
            first = int(operands[4].split("+")[1].rstrip("]")) // 4
            for at, name in enumerate(operands[:4]):
                registers[name] = np.broadcast_to(shared[first + at], x.shape[:2])
    return np.stack([registers[f"${at}"] for at in range(EACH)], -1)


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
@pytest.mark.parametrize("first", [True, False])
def test_a_row_is_summed_as_the_tree(warps: int, first: bool) -> None:
    """Neighbours first, over threads, warps and programs: the bytes of `kernels.tree`, in every element."""
    x = elements(warps)
    expected = tree(x.reshape(-1))
    found = run(whole_row(warps, first), x)
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()
    assert tree(x.reshape(-1)[::-1].copy()) == expected  # mirrored is the same tree
    assert x.reshape(-1).cumsum()[-1] != expected


@pytest.mark.parametrize("first", [True, False])
def test_programs_wait_for_one_another(first: bool) -> None:
    """A sum that is written before its target runs, or read before it is written, is lost."""
    text = whole_row(2, first)
    order = [text.index("st.shared::cluster"), text.index("arrive.release"), text.index("wait.acquire")]
    order.append(text.index("ld.shared"))
    assert order == sorted(order)
    begun = text.find("barrier.cluster.wait.aligned")
    assert (0 <= begun < order[0]) if first else begun < 0


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
