"""Counts the launches of a draft chain at real shapes: launches are noted, nothing is compiled or run.

A process of its own, since Triton decides at import whether it interprets. Prints {geometry: [after 1, 2, 3 steps]}.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.config import LayerShape
from engine.fused_draft import DraftWeights, fused_draft
from engine.layers import LayerWeights
from kernels import Linear
from kernels.gate.cases import EPS, GEOMETRIES, MAX_KEYS, RING, SLOTS, WINDOW, _matrix, floats, halves, position
from kernels.gate.record import recorded_launches
from kernels.launch import launch_shape
from kernels.triton_backend import FUSED

VOCABULARY = 262144
KINDS = ("sliding", "sliding", "sliding", "full")


def linear(width: int, features: int, bits: int) -> Linear:
    """A matrix that nobody reads."""
    packed = _matrix(width, features, bits, launch_shape(width, features, bits))
    return Linear(features, width, bits, torch.bfloat16, "qmv", packed)


def layer(kind: str, heads: int, bits: int) -> tuple[LayerShape, LayerWeights]:
    """One of the drafter's: queries alone."""
    model = GEOMETRIES[-1]
    width = 256 if kind == "sliding" else 512
    shape: Any = LayerShape(kind, heads, 0, width, False)  # type: ignore[arg-type]
    weights: Any = SimpleNamespace(
        qkv=linear(model.hidden, heads * width, bits),
        o=linear(heads * width, model.hidden, bits),
        gate_up=linear(model.hidden, 2 * model.inner, bits),
        down=linear(model.inner, model.hidden, bits),
        norm_heads=floats(heads, width),
        layer_scalar=halves(1),
        **dict.fromkeys(
            ("input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm"), floats(model.hidden)
        ),
    )
    return shape, weights


def count(target: Any, bits: int, steps: int) -> int:
    """Launches of a chain of so many steps behind a verify step, the drafter's matrices at so many bits."""
    sliding, full = target.layers
    layers = [layer(kind, sliding.heads, bits) for kind in KINDS]
    hidden = GEOMETRIES[-1].hidden
    weights = DraftWeights(
        shapes=tuple(shape for shape, _ in layers),
        layers=tuple(w for _, w in layers),
        embedding=linear(target.hidden, VOCABULARY, 4),
        embed_scale=halves(1),
        pre=linear(2 * target.hidden, hidden, bits),
        post=linear(hidden, target.hidden, bits),
        head=linear(hidden, VOCABULARY, bits),
        final_norm=floats(hidden),
        window=WINDOW,
        eps=EPS,
        fused_geglu={bits: True},
    )
    ids, best = torch.empty(SLOTS, dtype=torch.int32), torch.empty(SLOTS, dtype=torch.int32)
    kv: dict[Any, Tensor] = {
        "sliding": halves(2, sliding.kv_heads, RING, sliding.width),
        "full": halves(2, full.kv_heads, MAX_KEYS, full.width),
    }
    tables: dict[Any, tuple[Tensor, Tensor]] = {
        name: (floats(MAX_KEYS, 1, width), floats(MAX_KEYS, 1, width))
        for name, width in (("sliding", 256), ("full", 512))
    }
    with recorded_launches(90) as launches:
        joined = FUSED.join_accepted(
            weights.embedding, ids, best, halves(SLOTS, target.hidden), position(), position(), steps + 1,
            weights.embed_scale, weights.pre,
        )  # fmt: skip
        fused_draft(FUSED, weights, joined, ids, position(), kv, tables, MAX_KEYS, steps)
        return len(launches)


if __name__ == "__main__":
    models = {model.name: model for model in GEOMETRIES}
    found = {
        f"{name}, {bits} bits": [count(models[name], bits, steps) for steps in (1, 2, 3)]
        for name, bits in (("12b", 4), ("31b", 4), ("31b", 16))
    }
    sys.stdout.write(json.dumps(found))
