"""The triton backend: the `Kernels` bundle over packed matrices, for CUDA, and for the interpreter in tests.

Every op keeps a row's bytes by construction: one binary for M = 1..8. What has no row contract (prefill's products,
the op-by-op attention of stage `base`) is plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import MAX_ROWS, Kernels, Linear, Weight, reference
from kernels.argmax import argmax as argmax_ids
from kernels.argmax import softcap
from kernels.geglu import geglu_fused, geglu_ops
from kernels.qmv import qmv, qmv_rows
from kernels.repack import PackedWeight, dequantize_packed, pack_dense, pack_weight
from kernels.rmsnorm import rmsnorm
from kernels.rope import rope_general, rope_row
from kernels.rows import pack_rows, sum_partials
from kernels.sdpa_vector import sdpa_rows


def prepare(weight: Weight) -> Linear:
    """Repack a matrix tile-major: its own codes where it is stored in 4 or 8 bits with bf16 scales, bf16 otherwise."""
    data = weight.data
    if data.dtype != torch.bfloat16:
        raise ValueError(f"triton backend: model dtype {data.dtype}; the kernels take bfloat16")
    stored = weight.stored
    if stored is None or stored.scales.dtype != torch.bfloat16:
        packed = pack_dense(data)
    else:
        packed = pack_weight(stored.words, stored.scales, stored.biases, weight.bits)
    return Linear(packed.out_features, packed.in_features, weight.bits, data.dtype, "qmv", packed)


def linear(x: Tensor, w: Linear, rows: int = MAX_ROWS) -> Tensor:
    """x [8, K] times w [N, K] transposed -> [8, N] in one launch for all rows; rows past `rows` are zero."""
    packed: PackedWeight = w.operand
    return sum_partials(qmv(pack_rows(x.contiguous(), packed.bits, rows), packed, rows), rows)


def linear_rows(x: Tensor, w: Linear, rows: int = MAX_ROWS) -> Tensor:
    """The same bytes with a launch per row."""
    packed: PackedWeight = w.operand
    return sum_partials(qmv_rows(pack_rows(x.contiguous(), packed.bits, rows), packed, rows), rows)


def linear_any(x: Tensor, w: Linear) -> Tensor:
    """x [n, K] times w transposed -> [n, N]: up to 8 rows as `linear`, more by a library product of bf16 weights."""
    count = x.shape[0]
    if count <= MAX_ROWS:
        padded = x.new_zeros(MAX_ROWS, x.shape[1])
        padded[:count] = x
        return linear(padded, w, count)[:count]
    return F.linear(x, dequantize_packed(w.operand, torch.float32).to(x.dtype))


def argmax(logits: Tensor) -> list[int]:
    """Index of the largest value of each row [M, V]; ties go to the lowest index."""
    ids: list[int] = argmax_ids(logits).tolist()
    return ids


def sdpa(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[tuple[int, int]], first: int = 0) -> Tensor:
    """`sdpa_rows` over operands that may be views."""
    return sdpa_rows(q.contiguous(), k, v, spans, first)


KERNELS = Kernels(
    backend="triton",
    prepare=prepare,
    linear=linear,
    linear_rows=linear_rows,
    linear_any=linear_any,
    rmsnorm=rmsnorm,
    rope_row=rope_row,
    rope_general=rope_general,
    geglu_fused=geglu_fused,
    geglu_ops=geglu_ops,
    sdpa_rows=sdpa,
    sdpa_unfused=reference.sdpa_unfused,
    softcap=softcap,
    argmax=argmax,
    embed=reference.embed,
)
