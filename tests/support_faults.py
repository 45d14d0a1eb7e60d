"""Seams through which a fault enters the real engine, and the sound tiny target that it is compared with.

Nothing here patches a module: a fault is a kernel bundle with one callable replaced, a cache class,
or a target that sends verify to another target than classic decode.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support_engine import make_pair
from torch import Tensor

from engine.cache import CacheSet, RingCache
from engine.capture import Capture
from engine.pair import Pair
from engine.probe import ExactnessProbe, ProbeResult
from engine.target import SharedKV, StepOutput, Target


@functools.cache
def pair() -> Pair:
    """The tiny pair: window 16, 5 sliding layers and a full one, 4-bit with an 8-bit MLP."""
    return make_pair()


def target() -> Target:
    """Its target, sound."""
    return pair().target


def probe(faulty: Any, block_size: int = 4, walk: bool = True) -> ProbeResult:
    """Three short draws, and a short walk that goes round the ring of 23 slots."""
    return ExactnessProbe(faulty, block_size, walk_prompt=40, walk_length=32).run((8, 8, 8), walk=walk)


@functools.cache
def sound_probe(block_size: int = 4) -> ProbeResult:
    """The same probe without a fault."""
    return probe(target(), block_size)


def passed(result: ProbeResult) -> list[bool]:
    """Verdict of each draw and of the walk."""
    return [outcome.passed for outcome in result.outcomes]


def place(result: ProbeResult) -> tuple[int, str, str, int] | None:
    """Where the first divergence is."""
    found = result.first_divergence
    return found and (found.layer, found.kind, found.op, found.position)


class Delegate:
    """A target that is another one in everything that a subclass does not change."""

    def __init__(self, base: Target | None = None) -> None:
        self.base = base or target()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


class VerifyBy(Delegate):
    """Classic decode by the sound target, verify by another one."""

    def __init__(self, other: Target) -> None:
        super().__init__()
        self.other = other

    def step(self, tokens: Sequence[int], caches: Any, mode: Any, capture: Capture | None = None) -> StepOutput:
        """One forward by whichever target the mode belongs to."""
        chosen = self.other if mode == "verify" else self.base
        return chosen.step(tokens, caches, mode, capture)


def with_kernels(**replaced: Callable[..., Any]) -> Target:
    """The tiny target with some kernels replaced, in both modes."""
    return target().with_kernels(dataclasses.replace(target().kernels, **replaced))


def linear_fault(name: str, change: Callable[[Tensor, int], None]) -> Target:
    """The tiny target with one matrix whose product [8, N] is changed in place, given the real rows."""
    wanted = dict(target().linear_weights())[name]
    sound = target().kernels.linear

    def linear(x: Tensor, w: Any, rows: int = 8) -> Tensor:
        out = sound(x, w, rows)
        if w is wanted:
            out = out.clone()
            change(out, rows)
        return out

    return with_kernels(linear=linear)


def flip_last_bits(row: Tensor) -> None:
    """Change the last bit of each bf16 element of a row in place."""
    row.view(torch.int16).bitwise_xor_(1)


class WithRing(Delegate):
    """The sound target over rings of another class, built with the same sizes."""

    def __init__(self, ring: type[RingCache]) -> None:
        super().__init__()
        self.ring = ring

    def new_caches(self) -> CacheSet:
        """Caches whose sliding layers have the faulty ring."""
        layers = [
            self.ring(layer.kv.shape[1], layer.kv.shape[3], layer.window, layer.kv.dtype)
            if isinstance(layer, RingCache)
            else layer
            for layer in self.base.new_caches().layers
        ]
        return CacheSet(layers)


class ShiftedTable:
    """Rotary rows of the positions one further on."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def rows(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of start + 1 and on."""
        return self.table.rows(start + 1, count)


class FrozenTable(ShiftedTable):
    """Rotary rows that all belong to the block's first position."""

    def rows(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of start, repeated."""
        cos, sin = self.table.rows(start, 1)
        return cos.expand(count, -1, -1), sin.expand(count, -1, -1)


def with_rope(table: type[ShiftedTable], kind: str) -> Target:
    """A copy of the tiny target whose layers of one kind look positions up in another table."""
    other = copy.copy(target())
    other._tables = {name: table(own) if name == kind else own for name, own in target()._tables.items()}
    return other


def shared_with(change: Callable[[Target, Any, SharedKV], SharedKV]) -> Delegate:
    """The sound target that hands a changed K/V to the drafter."""

    class Changed(Delegate):
        def shared_kv(self, caches: Any) -> SharedKV:
            return change(self.base, caches, self.base.shared_kv(caches))

    return Changed()
