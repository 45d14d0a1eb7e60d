"""`row_identity` without a pair: every op of the verify path at a geometry's shapes, with random weights.

The comparison is that of `row_identity`: M rows against one-row calls, other slots, NaN beside, on bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from harness.worker import kernel_api
from harness.worker.bench import Bench, Output
from harness.worker.kernel_attention import MARGIN
from harness.worker.kernel_geometry import GEOMETRIES, KernelGeometry, KernelLayer
from harness.worker.kernel_qmv import random_codes
from harness.worker.row_identity import Subject, compare, send_difference
from kernels import MAX_ROWS

EPS = 1e-6
CAP = 30.0
FULL_CONTEXT = 1020  # rows on both sides of an edge of blocks and chunks of keys
PAST = 60  # rows past the window: its ring has wrapped, and they lie on both sides of an edge too
SPLIT = 2  # partial sums that a fused op reads; the bytes that go in are all that matters


@dataclass(frozen=True)
class Setting:
    """What the subjects are built from."""

    geometry: KernelGeometry
    backend: str
    device: str
    generator: torch.Generator

    def random(self, *size: int) -> Tensor:
        """fp32 normals on the device."""
        return torch.randn(size, generator=self.generator, device=self.device)

    def weight(self, *size: int) -> Tensor:
        """A norm's weight, fp32."""
        return torch.rand(size, generator=self.generator, device=self.device) + 0.5

    def kernels(self, name: str) -> ModuleType:
        """The module of the backend's op of that name."""
        if self.backend == "reference":
            from kernels import reference

            return reference
        kernel_api.use_interpreter(self.device)
        import importlib

        return importlib.import_module(f"kernels.{name}")

    @property
    def fused(self) -> bool:
        """Whether the backend has the fused ops."""
        return self.backend == "triton"


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: geometry, backend, ops, rows, seed. Sends a statement per op and shape."""
    device = bench.device
    generator = torch.Generator(device).manual_seed(args["seed"])
    setting = Setting(GEOMETRIES[args["geometry"]], args["backend"], device, generator)
    rows: list[int] = sorted(set(args["rows"]))
    for done, op in enumerate(args["ops"]):
        for subject in SUBJECTS[op](setting):
            out.progress(done, len(args["ops"]), f"{op}: {subject.name}")
            x = setting.random(MAX_ROWS, *subject.shape).to(torch.bfloat16)
            send_difference(out, f"{op}: {subject.name}", compare(subject, x, rows))
    return {}


# ---- the ops --------------------------------------------------------------------------------------------------------


def _subject(name: str, shape: tuple[int, ...], call: Callable[[Tensor, int], Tensor]) -> Subject:
    """A subject whose row does not depend on its place: call(x, rows) for blocks and one-row calls alike."""

    def run_(x: Tensor, order: Sequence[int]) -> Tensor:
        return call(x, len(order))

    return Subject(name, shape, run_, run_)


def _placed(name: str, shape: tuple[int, ...], call: Callable[[Tensor, int, int], Tensor]) -> Subject:
    """A subject whose row's place is its position: call(x, first row, rows) sees the rows in their own order."""

    def run_(x: Tensor, order: Sequence[int]) -> Tensor:
        first = min(order)
        at = [row - first for row in order]
        placed = torch.full_like(x, float("nan"))
        placed[at] = x[: len(order)]
        return call(placed, first, len(order))[at]

    return Subject(name, shape, run_, run_)


def as_rows(rows: Any) -> Tensor:
    """A row's bytes of everything that `Rows` holds, uint8 [8, ...]."""
    parts = [rows.values, rows.sums.t()] + ([rows.scales.t()] if rows.bits == 8 else [])
    return torch.cat([part.contiguous().view(torch.uint8).reshape(MAX_ROWS, -1) for part in parts], 1)


def _matrix(s: Setting, name: str, k: int, n: int, bits: int) -> Subject:
    weight = random_codes(n, k, bits, s.generator, s.device)
    ours = kernel_api.product(s.backend, weight.codes, weight.scales, weight.biases, bits, 1)
    return _subject(
        f"{name} {k}x{n}, {bits} bits", (k,), lambda x, rows: ours.run(ours.pack(x), 0, rows).transpose(0, 1)
    )


def _linears(s: Setting) -> Iterator[Subject]:
    seen: set[tuple[int, int, int]] = set()
    for name, k, n, bits in s.geometry.matrices:
        if (k, n, bits) not in seen:
            seen.add((k, n, bits))
            yield _matrix(s, name, k, n, bits)


def _norms(s: Setting) -> Iterator[Subject]:
    norms, fused, width = s.kernels("rmsnorm"), s.kernels("fused_norms"), s.geometry.hidden
    weight, after = s.weight(width), s.weight(width)
    yield _subject(f"hidden {width}", (width,), lambda x, rows: norms.rmsnorm(x, weight, EPS))
    for layer in s.geometry.layers:
        heads = s.weight(layer.heads, layer.width)
        shape = (layer.heads, layer.width)
        yield _subject(f"{layer.kind} {layer.heads} heads x {layer.width}", shape, _norm_call(norms.rmsnorm, heads))
    if not s.fused:
        return
    scalar = torch.full((1,), 0.75, dtype=torch.bfloat16, device=s.device)
    for bits in (4, 8):
        yield _subject(f"norm and pack {width}, {bits} bits", (width,), _pack_call(fused, weight, bits))

        def between(x: Tensor, rows: int, bits: int = bits) -> Tensor:
            h, packed = fused.residual_norm_rows(_partials(x), x, weight, scalar, after, EPS, rows, bits)
            return torch.cat((h.view(torch.uint8).reshape(MAX_ROWS, -1), as_rows(packed)), 1)

        yield _subject(f"residual, norms and pack {width}, {bits} bits", (width,), between)


def _norm_call(norm: Any, weight: Tensor) -> Callable[[Tensor, int], Tensor]:
    return lambda x, rows: norm(x, weight, EPS)


def _pack_call(fused: Any, weight: Tensor, bits: int) -> Callable[[Tensor, int], Tensor]:
    return lambda x, rows: as_rows(fused.norm_rows(x, weight, EPS, rows, bits))


def _partials(x: Tensor) -> Tensor:
    """x as partial sums fp32 [SPLIT, 8, N] of one another's rows."""
    wide = x.float()
    return torch.stack([wide * (0.75 - 0.5 * part) for part in range(SPLIT)]).contiguous()


def _ropes(s: Setting) -> Iterator[Subject]:
    rope = s.kernels("rope")
    for layer in s.geometry.layers:
        cos, sin = s.random(MAX_ROWS, 1, layer.width), s.random(MAX_ROWS, 1, layer.width)
        count = layer.heads + layer.groups
        name = f"{layer.kind} {count} heads x {layer.width}"
        yield _placed(name, (count, layer.width), _rope_call(rope.rope_row, cos, sin))
        if s.fused:
            yield _head_norms(s, rope, layer)


def _rope_call(rope: Any, cos: Tensor, sin: Tensor) -> Callable[[Tensor, int, int], Tensor]:
    return lambda x, first, rows: rope(x, cos.roll(-first, 0).contiguous(), sin.roll(-first, 0).contiguous())


def _head_norms(s: Setting, rope: Any, layer: KernelLayer) -> Subject:
    """Head norms, RoPE and the write into the caches; what is compared holds the cache slots of the row as well."""
    count = layer.heads + layer.groups * (1 if layer.k_eq_v else 2)
    weight = s.weight(count, layer.width)
    cos, sin = s.random(2 * MAX_ROWS, layer.width), s.random(2 * MAX_ROWS, layer.width)
    ring = MAX_ROWS + MARGIN

    def call(x: Tensor, first: int, rows: int) -> Tensor:
        caches = [torch.zeros(layer.groups, ring, layer.width, dtype=torch.bfloat16, device=s.device) for _ in "kv"]
        position = torch.full((1,), first, dtype=torch.int32, device=s.device)
        q = rope.head_norms_rope(
            _partials(x),
            weight,
            cos,
            sin,
            position,
            rows,
            layer.heads,
            layer.groups,
            layer.k_eq_v,
            EPS,
            caches[0],
            caches[1],
            ring,
        )
        slots = [(first + row) % ring for row in range(MAX_ROWS)]
        written = [cache[:, slots].transpose(0, 1) for cache in caches]
        return torch.cat((q, *written), 1)

    return _placed(f"{layer.kind} head norms, RoPE and cache", (count * layer.width,), call)


def _geglus(s: Setting) -> Iterator[Subject]:
    geglu, width = s.kernels("geglu"), s.geometry.intermediate

    def plain(x: Tensor, rows: int) -> Tensor:
        gate, up = x.chunk(2, -1)
        out: Tensor = geglu.geglu_fused(gate.contiguous(), up.contiguous())
        return out

    yield _subject(f"{width} wide", (2 * width,), plain)
    for bits in (4, 8) if s.fused else ():
        yield _subject(f"{width} wide and pack, {bits} bits", (2 * width,), _geglu_call(geglu, bits))


def _geglu_call(geglu: Any, bits: int) -> Callable[[Tensor, int], Tensor]:
    return lambda x, rows: as_rows(geglu.geglu_rows(_partials(x), rows, bits, True))


def _attentions(s: Setting) -> Iterator[Subject]:
    for layer in s.geometry.layers:
        yield _attention(s, layer)


def _attention(s: Setting, layer: KernelLayer) -> Subject:
    """Over a filled cache that a sliding layer's ring has wrapped."""
    context = FULL_CONTEXT if layer.window is None else layer.window + PAST
    capacity = context + 2 * MAX_ROWS
    ring = capacity if layer.window is None else layer.window + MARGIN
    k, v = (s.random(layer.groups, ring, layer.width).to(torch.bfloat16) for _ in range(2))
    ours = kernel_api.attention(
        s.backend, layer.heads, layer.groups, layer.width, layer.window, ring, capacity, s.device
    )

    # Once: our attention reads a position ahead, when the launch before the call may still be running.
    places = [torch.tensor([place], dtype=torch.int32, device=s.device) for place in range(context, capacity)]

    def call(q: Tensor, first: int, rows: int) -> Tensor:
        return ours.run((q * layer.width**-0.5).contiguous(), k, v, places[first], context + first, rows)

    return _placed(
        f"{layer.kind} {layer.heads} heads x {layer.width} over {context} keys", (layer.heads, layer.width), call
    )


def _heads(s: Setting) -> Iterator[Subject]:
    """The head's matrix, and with the fused ops the soft cap and the argmax behind it."""
    k, n = s.geometry.hidden, s.geometry.vocabulary
    yield _matrix(s, "head", k, n, 4)
    if s.fused:
        argmax = s.kernels("argmax")

        def call(x: Tensor, rows: int) -> Tensor:
            logits = torch.zeros(MAX_ROWS, n, dtype=torch.bfloat16, device=s.device)
            ids, _ = argmax.head_argmax(_partials(x), rows, CAP, logits=logits)
            return torch.cat((logits.view(torch.uint8), ids.view(torch.uint8).reshape(MAX_ROWS, -1)), 1)

        yield _subject(f"sum, soft cap and argmax of {n}", (n,), call)


SUBJECTS: dict[str, Callable[[Setting], Iterator[Subject]]] = {
    "linear": _linears,
    "rmsnorm": _norms,
    "rope": _ropes,
    "geglu": _geglus,
    "attention": _attentions,
    "lm_head": _heads,
}
