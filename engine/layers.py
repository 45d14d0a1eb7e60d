"""One Gemma 4 decoder layer, written once for classic decode, verify, prefill and the drafter.

A `Run` says how many rows there are and which kernel each op takes; the layer only knows the order of
the ops and where they are captured. Rotary tables are filled in fixed chunks, so a position's values never vary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.capture import Capture
from engine.config import Kind, LayerShape, RopeParameters, TextConfig
from engine.quantize import pack, unpack
from kernels import MAX_ROWS, Kernels, Linear, Stored, Weight

TABLE_STEP = 256


class RopeTable:
    """cos and sin by position, fp32 [positions, 1, D], sin with its first half negated."""

    def __init__(self, parameters: RopeParameters, head_dim: int, device: str = "cpu") -> None:
        self.inv_freq = inv_freq(parameters, head_dim).to(device)
        self.cos = torch.zeros(0, 1, head_dim, device=device)
        self.sin = self.cos

    def rows(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions start..start+count-1, each [count, 1, D]."""
        while self.cos.shape[0] < start + count:
            self._grow()
        return self.cos[start : start + count], self.sin[start : start + count]

    def _grow(self) -> None:
        """One more chunk of 256 positions: the same call with the same shape, whoever asks first."""
        begin = self.cos.shape[0]
        positions = torch.arange(begin, begin + TABLE_STEP, dtype=torch.float32, device=self.inv_freq.device)
        angles = positions[:, None] * self.inv_freq
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        self.cos = torch.cat((self.cos, torch.cat((cos, cos), -1)))
        self.sin = torch.cat((self.sin, torch.cat((-sin, sin), -1)))


def inv_freq(parameters: RopeParameters, head_dim: int) -> Tensor:
    """Inverse frequencies fp32 [D / 2]; a proportional embedding turns the first share of pairs and leaves the others.

    The exponent's denominator is the whole head_dim, not the rotated part.
    """
    half = head_dim // 2
    turned = int(parameters.partial_rotary_factor * head_dim) // 2
    exponents = torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim
    frequencies = torch.zeros(half)
    frequencies[:turned] = 1.0 / (parameters.rope_theta**exponents) / parameters.factor
    return frequencies


@dataclass(frozen=True)
class LayerWeights:
    """One layer, ready for a backend. `qkv` is q alone in a drafter, q and k where v is k, else q, k, v."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    norm_heads: Tensor
    input_norm: Tensor
    post_attention_norm: Tensor
    pre_feedforward_norm: Tensor
    post_feedforward_norm: Tensor
    layer_scalar: Tensor


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [n, H, D], k and v [n, Hkv, D]) -> [n, H, D]; k and v have no rows in a drafter."""


@dataclass(frozen=True)
class Run:
    """How one forward computes: its kernels, its rows (n computed, the first `rows` real), its attention."""

    kernels: Kernels
    rows: int
    linear: Callable[[Tensor, Linear], Tensor]
    geglu: Callable[[int], Literal["fused", "ops"]]
    rope: Literal["row", "general"]
    tables: dict[Kind, tuple[Tensor, Tensor]]
    attend: Attend
    capture: Capture | None = None


def run_layer(run: Run, index: int, shape: LayerShape, w: LayerWeights, eps: float, h: Tensor) -> Tensor:
    """One decoder layer over h [n, H] -> [n, H]; writes the cache through `run.attend`."""
    kernels, capture = run.kernels, run.capture
    q, k, v = _queries_keys_values(run, index, shape, w, eps, h)
    core = run.attend(index, q, k, v)
    if capture is not None:
        capture.record(index, shape.kind, "attention core", core[: run.rows])
    y = run.linear(core.reshape(core.shape[0], -1), w.o)
    if capture is not None:
        capture.record(index, shape.kind, "attention output", y[: run.rows])
    a = h + kernels.rmsnorm(y, w.post_attention_norm, eps)
    y = _mlp(run, w, kernels.rmsnorm(a, w.pre_feedforward_norm, eps))
    if capture is not None:
        capture.record(index, shape.kind, "MLP output", y[: run.rows])
    out = (kernels.rmsnorm(y, w.post_feedforward_norm, eps).add_(a)).mul_(w.layer_scalar)
    if capture is not None:
        capture.record(index, shape.kind, "layer output", out[: run.rows])
    return out


def _queries_keys_values(
    run: Run, index: int, shape: LayerShape, w: LayerWeights, eps: float, h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q after norm and RoPE [n, H, D], k likewise and v after its norm [n, Hkv, D]."""
    kernels, rows = run.kernels, run.rows
    raw = run.linear(kernels.rmsnorm(h, w.input_norm, eps), w.qkv)
    heads = raw.view(raw.shape[0], -1, shape.head_dim)
    queries, turned = shape.num_heads, min(heads.shape[1], shape.num_heads + shape.num_kv_heads)
    normed = kernels.rmsnorm(heads, w.norm_heads, eps)
    v = kernels.rmsnorm(heads[:, queries:], None, eps) if shape.k_eq_v else normed[:, turned:]
    rotate = kernels.rope_row if run.rope == "row" else kernels.rope_general
    rotated = rotate(normed[:, :turned], *run.tables[shape.kind])
    q, k = rotated.tensor_split((queries,), 1)
    if run.capture is not None:
        raw_k, raw_v = heads[:, queries:turned], heads[:, queries:] if shape.k_eq_v else heads[:, turned:]
        for op, rows_of in (
            ("q_proj", heads[:, :queries]),
            ("k_proj", raw_k),
            ("v_proj", raw_v),
            ("q_norm", normed[:, :queries]),
            ("k_norm", normed[:, queries:turned]),
            ("q_rope", q),
            ("k_rope", k),
            ("v_norm", v),
        ):
            run.capture.record(index, shape.kind, op, rows_of[:rows])
    return q, k, v


def _mlp(run: Run, w: LayerWeights, x: Tensor) -> Tensor:
    """down(gelu_tanh(gate(x)) * up(x)); x [n, H] -> [n, H]."""
    gate, up = run.linear(x, w.gate_up).chunk(2, -1)
    fused = run.geglu(w.gate_up.bits) == "fused"
    return run.linear(run.kernels.geglu_fused(gate, up) if fused else run.kernels.geglu_ops(gate, up), w.down)


def fuse(*weights: Weight) -> Weight:
    """Matrices over the same input as one [N1 + N2 + ..., K]; bits of the widest, whose codes hold the others' too."""
    bits = max(w.bits for w in weights)
    dtype = weights[0].dtype

    def data() -> Tensor:
        return torch.cat([w.data for w in weights])

    parts = [widen(w.stored, w.bits, bits) for w in weights if w.stored is not None]
    if len(parts) < len(weights):
        return Weight(data, bits, dtype=dtype)
    words, scales, biases = (torch.cat(same) for same in zip(*parts, strict=True))
    return Weight(data, bits, Stored(words.view(torch.uint32), scales, biases), dtype)


def widen(stored: Stored, bits: int, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same codes in words of more bits, as int32, with their scales and biases."""
    words = stored.words.view(torch.int32)
    if bits != wanted:
        words = pack(unpack(words, bits), wanted).view(torch.int32)
    return words, stored.scales, stored.biases


def padded_ids(tokens: list[int], device: str) -> Tensor:
    """Token ids padded with 0 to 8 rows."""
    return torch.tensor(tokens + [0] * (MAX_ROWS - len(tokens)), device=device)


def rope_tables(config: TextConfig, device: str) -> dict[Kind, RopeTable]:
    """A table for each layer kind."""
    kinds: tuple[Kind, ...] = ("sliding", "full")
    return {kind: RopeTable(config.rope(kind), config.layer_shape(kind).head_dim, device) for kind in kinds}
