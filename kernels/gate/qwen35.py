"""What the gate compiles for the second family: the plain ops at the shapes of Qwen 3.5 4B and its DFlash drafter.

This family's steps are launched op by op, so the entries call the bundle as the engine does. Its own ops
(`kernels.delta`) are plain torch and have nothing to compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels import Linear
from kernels.argmax import argmax
from kernels.embed import dense_rows
from kernels.gate.entry import PRODUCT, Entry, Expect
from kernels.jit import GROUP, SLOTS
from kernels.launch import launch_shape
from kernels.repack import PackedWeight
from kernels.triton_backend import KERNELS

EPS = 1e-6
HIDDEN, VOCABULARY = 2560, 248320
HEADS, KV_HEADS, WIDTH, TURNED = 16, 4, 256, 64
DRAFTER_HEADS, DRAFTER_KV_HEADS, DRAFTER_WIDTH = 32, 8, 128
CONTEXTS = (8, 129, 640, 8192)
TARGET = ((2560, 12352), (4096, 2560), (2560, 10240), (2560, 18432), (9216, 2560), (2560, VOCABULARY))
"""(K, N) of the 4-bit matrices: a linear layer's inputs, an output, q with its gate, k and v, the MLP, the head."""

DRAFTER = ((12800, 2560), (2560, 4096), (2560, 2048), (4096, 2560), (2560, 18432), (9216, 2560))
"""(K, N) of the bf16 matrices: five tapped layers joined, q, k and v, an output, the MLP."""

PRODUCTS = {"_qmv_ahead": PRODUCT}
ATTENTION = {"scores_of": Expect(mma="any"), "values_of": Expect(mma="any")}


def entries() -> Iterator[Entry]:
    """All entries of this family."""
    for bits, matrices in ((4, TARGET), (16, DRAFTER)):
        for width, features in matrices:
            name = f"qwen35 linear {width}x{features} {bits} bits"
            yield Entry(name, partial(_linear, matrix(width, features, bits)), PRODUCTS)
    yield Entry("qwen35 embed", partial(_embed, matrix(HIDDEN, VOCABULARY, 4)))
    for bits in (4, 16):
        yield Entry(f"qwen35 prefill {bits} bits", partial(_dense, matrix(HIDDEN, 4096, bits)))
    norms = ((HIDDEN,), (HEADS + KV_HEADS, WIDTH), (DRAFTER_HEADS, DRAFTER_WIDTH), (DRAFTER_KV_HEADS, DRAFTER_WIDTH))
    for shape in norms:
        weight = shape if shape[-1] == WIDTH else shape[-1:]  # the drafter's heads share theirs
        yield Entry(f"qwen35 rmsnorm {shape}", partial(_rmsnorm, shape, weight))
    for general in (False, True):
        yield Entry(f"qwen35 rope{' general' * general}", partial(_turn, HEADS + KV_HEADS, TURNED, general))
    for heads in (DRAFTER_HEADS, DRAFTER_KV_HEADS):
        yield Entry(f"qwen35 drafter rope {heads}", partial(_turn, heads, DRAFTER_WIDTH, False))
    yield Entry("qwen35 attention", _attend, ATTENTION)
    yield Entry("qwen35 argmax", lambda m: argmax(meta(m, VOCABULARY)))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory; bf16 where nothing else is asked for."""
    return torch.empty(shape, dtype=dtype, device="meta")


def matrix(width: int, features: int, bits: int) -> Linear:
    """A matrix [N, K] as the backend holds it, in the launch shape that it gets."""
    shape, groups = launch_shape(width, features, bits), width // GROUP
    tiles = -(-features // shape.tile)
    if bits == 16:
        codes = meta(tiles, groups, shape.tile, GROUP)
    else:
        codes = meta(tiles, groups, shape.tile, GROUP * bits // 8, dtype=torch.uint8)
    scales = meta(*((tiles, groups, shape.tile) if bits < 16 else (0,)), dtype=torch.int32)
    packed = PackedWeight(codes, scales, features, width, bits, shape)
    return Linear(features, width, bits, torch.bfloat16, "qmv", packed)


def _linear(weight: Linear, m: int) -> None:
    x = meta(SLOTS, weight.in_features)
    KERNELS.linear(x, weight, m)
    KERNELS.linear_rows(x, weight, m)


def _embed(head: Linear, m: int) -> None:
    KERNELS.embed(head.operand, meta(m, dtype=torch.int64), meta())


def _dense(weight: Linear, m: int) -> None:
    dense_rows(weight.operand)


def _rmsnorm(shape: tuple[int, ...], weight: tuple[int, ...], m: int) -> None:
    KERNELS.rmsnorm(meta(m, *shape), meta(*weight, dtype=torch.float32), EPS)


def _turn(heads: int, width: int, general: bool, m: int) -> None:
    rotate = KERNELS.rope_general if general else KERNELS.rope_row
    rotate(meta(m, heads, width), meta(m, 1, width, dtype=torch.float32), meta(m, 1, width, dtype=torch.float32))


def _attend(m: int) -> None:
    q = meta(SLOTS, HEADS, WIDTH)
    for context in CONTEXTS:
        keys = meta(2, KV_HEADS, context + SLOTS, WIDTH)  # a view of a buffer that has room, as the cache gives it
        k, v = keys[:, :, : context + m]
        KERNELS.sdpa_rows(q, k, v, [(0, context + row + 1) for row in range(m)], 0)
