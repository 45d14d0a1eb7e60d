"""Scenes for the attention tests: a history of keys, the caches that hold part of it, and calls over them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import MAX_ROWS, sdpa_kernels, sdpa_queries, sdpa_scaled, sdpa_vector
from kernels.sdpa_plan import Plan
from kernels.testing import same_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
MARGIN = 7


@dataclass(frozen=True, eq=False)
class Scene:
    """Queries, keys and values at positions start..start+length-1 of one layer; q [length, H, D], k, v likewise."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: int | None
    start: int = 0
    plan: Plan | None = None

    @property
    def ring(self) -> int:
        """Slots of this layer's cache."""
        return self.start + self.k.shape[1] if self.window is None else self.window + MARGIN

    def first_visible(self, position: int) -> int:
        """Oldest key that a query at this position sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def cache(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """k and v with the keys of positions first..end-1 in their slots, and NaN in every other slot."""
        slots = torch.arange(first, end) % self.ring
        held = []
        for x in (self.k, self.v):
            full = torch.full((x.shape[0], self.ring, x.shape[2]), NAN, dtype=x.dtype, device=x.device)
            full[:, slots] = x[:, first - self.start : end - self.start]
            held.append(full)
        return held[0], held[1]

    def queries(self, position: int, rows: int) -> Tensor:
        """q [8, H, D] of a call: the real rows first, NaN in the others."""
        q = torch.full((MAX_ROWS, *self.q.shape[1:]), NAN, dtype=self.q.dtype, device=self.q.device)
        q[:rows] = self.q[position - self.start : position - self.start + rows]
        return q

    def call(
        self,
        position: int,
        rows: int,
        max_keys: int | None = None,
        module: Any = sdpa_vector,
        cache: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Rows position..position+rows-1 in one call, over a cache that holds what they see and nothing else."""
        k, v = cache or self.cache(self.first_visible(position), position + rows)
        where = torch.tensor([position], dtype=torch.int32, device=self.q.device)
        keys = max_keys or position + rows
        operands = (self.queries(position, rows), k, v, where, rows, self.window, self.ring, keys)
        heads, width = self.q.shape[1:]
        scratch = module.allocate_scratch(heads, k.shape[0], width, self.window, keys, self.q.device, self.plan)
        for held in (scratch.block_state, scratch.weights, scratch.chunk_state, scratch.acc):
            held.fill_(NAN)  # what is read although no launch of this call wrote it
        return module.sdpa_vector(*operands, scratch=scratch, plan=self.plan)

    def alone(self, position: int, module: Any = sdpa_vector) -> Tensor:
        """The one-row call of classic decode at this position [H, D], computed once per kernel."""
        return _alone(self, position, module)

    def exact(self, position: int) -> Tensor:
        """float64 attention at this position [H, D]."""
        first, end = self.first_visible(position) - self.start, position + 1 - self.start
        repeats = self.q.shape[1] // self.k.shape[0]
        k, v = (x[:, first:end].double().repeat_interleave(repeats, 0) for x in (self.k, self.v))
        weights = torch.einsum("hd,hkd->hk", self.q[position - self.start].double(), k).softmax(-1)
        return torch.einsum("hk,hkd->hd", weights, v)


@functools.cache
def _alone(scene: Scene, position: int, module: Any) -> Tensor:
    return scene.call(position, 1, module=module)[0].clone()


def scene(heads: int, groups: int, width: int, window: int | None, length: int, start: int = 0, seed: int = 0) -> Scene:
    """A seeded history with the spread that normed queries and keys have."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(*shape, generator=generator) * scale
        for shape, scale in (
            ((length, heads, width), width**-0.25),
            ((groups, length, width), 1.0),
            ((groups, length, width), 1.0),
        )
    )
    return Scene(*(x.bfloat16().to(DEVICE) for x in (q, k, v)), window, start)


def row_difference(
    scene: Scene, position: int, rows: int, max_keys: int | None = None, module: Any = sdpa_vector
) -> str | None:
    """The first row of a call whose bytes are not those of its one-row call, as text; None when all agree."""
    found = scene.call(position, rows, max_keys, module)
    for row in range(rows):
        if not same_bytes(found[row], scene.alone(position + row, module)):
            return f"row {row} of {rows} at position {position}"
    return None


def relative_error(found: Tensor, exact: Tensor) -> float:
    """||found - exact|| / ||exact||."""
    return float((found.double() - exact).norm() / exact.norm())


def mutant(folder: Path, name: str, changes: list[tuple[str, str]]) -> ModuleType:
    """The wrappers over kernels with some text replaced everywhere; each old text has to be in one of the files."""
    sources = [Path(module.__file__).read_text() for module in (sdpa_queries, sdpa_kernels, sdpa_scaled, sdpa_vector)]
    for old, new in changes:
        assert old in "".join(sources), f"{name}: {old!r} is no longer in the kernel, plant the fault anew"
        sources = [source.replace(old, new) for source in sources]
    for module in ("sdpa_queries", "sdpa_kernels", "sdpa_scaled"):
        sources = [source.replace(f"from kernels.{module}", f"from {module}_{name}") for source in sources]
    queries, kernels, scaled, wrappers = sources
    _module(folder, f"sdpa_queries_{name}", queries)
    _module(folder, f"sdpa_kernels_{name}", kernels)
    _module(folder, f"sdpa_scaled_{name}", scaled)
    return _module(folder, f"sdpa_{name}", wrappers)


def _module(folder: Path, name: str, source: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
