"""Shapes of the Gemma 4 family as constants, for kernels that are checked and timed without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelLayer:
    """Attention shape of a layer kind; window None: all keys."""

    kind: str
    heads: int
    groups: int
    width: int
    window: int | None
    k_eq_v: bool


@dataclass(frozen=True)
class KernelGeometry:
    """One model: widths, layers, and matrices as (name, K, N, bits)."""

    hidden: int
    intermediate: int
    vocabulary: int
    layers: tuple[KernelLayer, ...]
    matrices: tuple[tuple[str, int, int, int], ...]


def _target(
    hidden: int,
    intermediate: int,
    heads: int,
    groups: tuple[int, int],
    widths: tuple[int, int] = (256, 512),
    window: int = 1024,
    vocabulary: int = 262144,
) -> KernelGeometry:
    sliding = KernelLayer("sliding", heads, groups[0], widths[0], window, False)
    full = KernelLayer("full", heads, groups[1], widths[1], None, True)
    matrices = []
    for layer in (sliding, full):
        count = layer.heads + layer.groups * (1 if layer.k_eq_v else 2)
        matrices.append((f"{layer.kind} qkv", hidden, count * layer.width, 4))
        matrices.append((f"{layer.kind} o", layer.heads * layer.width, hidden, 4))
    for bits in (4, 8):
        matrices.append(("gate+up", hidden, 2 * intermediate, bits))
        matrices.append(("down", intermediate, hidden, bits))
    return KernelGeometry(hidden, intermediate, vocabulary, (sliding, full), tuple(matrices))


def _drafter(hidden: int, intermediate: int, target: KernelGeometry) -> KernelGeometry:
    """Query-only layers over the target's K/V, and the matrices between the two hidden widths."""
    matrices = []
    for layer in target.layers:
        matrices.append((f"{layer.kind} q", hidden, layer.heads * layer.width, 4))
        matrices.append((f"{layer.kind} o", layer.heads * layer.width, hidden, 4))
    matrices += [("gate+up", hidden, 2 * intermediate, 4), ("down", intermediate, hidden, 4)]
    matrices += [("pre", 2 * target.hidden, hidden, 4), ("post", hidden, target.hidden, 4)]
    return KernelGeometry(hidden, intermediate, target.vocabulary, target.layers, tuple(matrices))


_12B = _target(3840, 15360, 16, (8, 1))
_31B = _target(5376, 21504, 32, (16, 4))
GEOMETRIES: dict[str, KernelGeometry] = {
    "12b": _12B,
    "31b": _31B,
    "drafter_12b": _drafter(1024, 8192, _12B),
    "drafter_31b": _drafter(1024, 8192, _31B),
    "tiny": _target(128, 128, 4, (2, 1), widths=(32, 64), window=32, vocabulary=128),
}


def layer_of(geometry: str, kind: str) -> KernelLayer:
    """The layer of a kind in a geometry."""
    return next(layer for layer in GEOMETRIES[geometry].layers if layer.kind == kind)
