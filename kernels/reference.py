"""The reference backend: plain torch, on CPU or CUDA, the truth that other backends are compared with.

Row independence comes from fixed shapes: products always see 8 rows, elementwise ops a width that
leaves no scalar tail (or one row at a time), attention one row over physically cut keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import MAX_ROWS, Kernels, Linear, Weight
from kernels.testing import slot_independent

LANES = 64
"""Elements that one step of torch's vector loops covers at most; a multiple of it leaves no scalar tail."""

GRAIN = 32768
"""Elements above which torch may split an elementwise op over threads, at points that depend on their number."""

FP32_LIMIT = 1 << 24
"""Elements up to which a CPU without bf16 instructions keeps a matrix in fp32: twice the memory, half the time."""

_VERDICTS: dict[tuple[str, int, int, str, str, int], bool] = {}
"""What `slot_independent` found for (route, N, K, dtype, device, threads): a memo, since layers repeat shapes."""


def prepare(weight: Weight) -> Linear:
    """Choose the first way of computing an 8-row product whose rows do not depend on their slot or neighbours.

    bf16 on CPU: oneDNN's packed product, then plain `F.linear`, then weights as the left operand, then fp32
    products; the last resort, a call per row with the row always in slot 0, holds by construction.
    """
    data = weight.data.contiguous()
    out_features, in_features = data.shape
    for route in _routes(data):
        operand = _operand(route, data)
        if operand is None:
            continue
        linear = Linear(out_features, in_features, weight.bits, data.dtype, route, operand)
        if route == "single" or _holds(linear, data.device):
            return linear
    raise AssertionError("the single-row route is always there")


def linear(x: Tensor, w: Linear, rows: int = MAX_ROWS) -> Tensor:
    """x [8, K] times w [N, K] transposed -> [8, N]; fp32 accumulation, one rounding."""
    if w.route == "single":
        return linear_rows(x, w, rows)
    return _product(x, w)


def linear_rows(x: Tensor, w: Linear, rows: int = MAX_ROWS) -> Tensor:
    """The same product with a launch per real row, each alone in slot 0 of 8; padding rows come out as zeros."""
    alone = x.new_zeros(MAX_ROWS, w.in_features)
    out = x.new_zeros(MAX_ROWS, w.out_features)
    for row in range(rows):
        alone[0] = x[row]
        out[row] = _product(alone, w)[0]
    return out


def linear_any(x: Tensor, w: Linear) -> Tensor:
    """x [n, K] times w transposed -> [n, N] for any n; its bytes may depend on n."""
    return _product(x, w)


def rmsnorm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last dim; fp32 inside, one rounding.

    x [..., D]; weight fp32, [D] or broadcastable to x, or None.
    """
    wide = x.float()
    squares = (wide * wide).sum(-1, keepdim=True)
    scale = torch.add(_constant(eps, x.device), squares, alpha=1.0 / x.shape[-1]).rsqrt_()
    out = wide * scale if wide is x else wide.mul_(scale)
    return (out if weight is None else out.mul_(weight)).to(x.dtype)


def rope_row(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) in fp32 with one rounding: decode's kernel.

    x [n, h, D]; cos and sin fp32 [n, 1, D], sin with the first half negated.
    """
    wide = x.float()
    return (wide * cos).add_(wide.roll(x.shape[-1] // 2, -1).mul_(sin)).to(x.dtype)


def rope_general(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same rotation in model dtype: cos and sin rounded first, then each product and the sum."""
    turned = x.roll(x.shape[-1] // 2, -1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


def geglu_fused(gate: Tensor, up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up in fp32 with one rounding; gate and up [n, I]."""
    return by_rows(_geglu_fused, gate, up)


def geglu_ops(gate: Tensor, up: Tensor) -> Tensor:
    """gelu_tanh(gate) rounded, times up rounded; gate and up [n, I]."""
    return by_rows(_geglu_ops, gate, up)


def sdpa_rows(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[tuple[int, int]], first: int = 0) -> Tensor:
    """One-row attention for each real row over its own keys, physically cut; scale 1, no mask.

    The position `first` of the first key changes nothing here: a row's keys are one product.

    q [n, H, D], k and v [Hkv, K, D], spans of key indices, one per real row -> [n, H, D]; rows past the spans
    are zero. Scores, softmax and sums in fp32, one rounding. ValueError for a span of keys that are not there.
    """
    n, heads, width = q.shape
    groups, count = k.shape[:2]
    for row, (start, end) in enumerate(spans):
        if not 0 <= start < end <= count:  # as many keys elsewhere would give numbers, and wrong ones
            raise ValueError(f"attention: row {row} sees keys {start}..{end - 1}, but 0..{count - 1} are there")
    queries = q.float().view(n, groups, heads // groups, width)
    keys, values = k.float().transpose(1, 2), v.float()
    out = torch.zeros(n, groups, heads // groups, width, dtype=torch.float32, device=q.device)
    for row, (start, end) in enumerate(spans):
        seen = end - start
        scores = torch.bmm(queries[row], keys if seen == count else keys.narrow(2, start, seen))
        weights = torch.softmax(scores, -1)
        torch.bmm(weights, values if seen == count else values.narrow(1, start, seen), out=out[row])
    return out.view(n, heads, width).to(q.dtype)


def sdpa_unfused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention op by op in model dtype: scores rounded, softmax in fp32 and rounded, sums rounded.

    q [H, M, D], k and v [Hkv, K, D], mask bool [M, K] (True: visible) or None -> [H, M, D]. ValueError for a mask of
    another shape, which might broadcast.
    """
    if mask is not None and mask.shape != (q.shape[1], k.shape[1]):
        raise ValueError(f"attention: mask {list(mask.shape)} does not fit {q.shape[1]} rows and {k.shape[1]} keys")
    repeats = q.shape[0] // k.shape[0]
    keys = k.repeat_interleave(repeats, 0)
    values = v.repeat_interleave(repeats, 0)
    scores = torch.matmul(q, keys.transpose(1, 2))
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores.float(), -1).to(q.dtype)
    return torch.matmul(weights, values)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """tanh(logits / cap) * cap with a rounding per op; logits [M, V]."""
    return by_rows(lambda z: (z / cap).float().tanh_().to(z.dtype).mul_(cap), logits)


def argmax(logits: Tensor) -> list[int]:
    """Index of the largest value of each row [M, V]; ties go to the lowest index."""
    values: list[int] = np.argmax(logits.float().cpu().numpy(), -1).tolist()
    return values


def table(weight: Weight, head: Linear) -> Tensor:
    """What `embed` reads: the matrix itself."""
    return weight.data


def embed(table: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
    """Rows of the table [V, H] for ids [n], times the scale (already rounded to model dtype), rounded -> [n, H]."""
    return table.index_select(0, ids).mul_(scale)


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    """A number as a tensor, made once: a python scalar costs an op of its own."""
    with torch.inference_mode(False):
        return torch.tensor(value, device=device)


def _geglu_fused(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate.float(), approximate="tanh").mul_(up).to(gate.dtype)


def _geglu_ops(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate.float(), approximate="tanh").to(gate.dtype).mul_(up)


def by_rows(op: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """One call where neither a scalar tail nor a thread boundary can fall inside a row, else a call per row."""
    rows, width = operands[0].shape
    if width % LANES == 0 and rows * width <= GRAIN:
        return op(*operands)
    return torch.cat([op(*(operand[row : row + 1] for operand in operands)) for row in range(rows)])


def _holds(w: Linear, device: torch.device) -> bool:
    """Whether this route keeps a row's bytes in any slot, for this shape on this machine."""
    key = (w.route, w.out_features, w.in_features, str(w.dtype), str(device), torch.get_num_threads())
    if key not in _VERDICTS:
        _VERDICTS[key] = slot_independent(lambda x: _product(x, w), w.in_features, w.dtype, device)
    return _VERDICTS[key]


def _routes(data: Tensor) -> tuple[str, ...]:
    """Ways to compute a product, fastest first."""
    if data.device.type != "cpu" or data.dtype != torch.bfloat16:
        return ("rows", "left", "single")
    if not _has_bf16_instructions() and data.numel() <= FP32_LIMIT:
        return ("fp32", "packed", "rows", "left", "single")
    return ("packed", "rows", "left", "fp32", "single")


def _has_bf16_instructions() -> bool:
    """Whether this CPU multiplies bf16 itself; where it does not, an fp32 product is twice as fast."""
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in names)


def _operand(route: str, data: Tensor) -> Tensor | None:
    """The matrix as a route wants it, or None where this build of torch has no such route."""
    if route == "packed":
        try:
            return torch.ops.mkldnn._reorder_linear_weight(data)
        except (AttributeError, RuntimeError):
            return None
    return data.float().t().contiguous() if route == "fp32" else data  # [K, N]: a third less time than F.linear


def _product(x: Tensor, w: Linear) -> Tensor:
    if w.route == "packed":
        return torch.ops.mkldnn._linear_pointwise(x, w.operand, None, "none", [], "")
    if w.route == "left":
        return torch.mm(w.operand, x.t()).t().contiguous()
    if w.route == "fp32":
        return torch.mm(x.float(), w.operand).to(x.dtype)
    return F.linear(x, w.operand)


KERNELS = Kernels(
    backend="reference",
    prepare=prepare,
    linear=linear,
    linear_rows=linear_rows,
    linear_any=linear_any,
    rmsnorm=rmsnorm,
    rope_row=rope_row,
    rope_general=rope_general,
    geglu_fused=geglu_fused,
    geglu_ops=geglu_ops,
    sdpa_rows=sdpa_rows,
    sdpa_unfused=sdpa_unfused,
    softcap=softcap,
    argmax=argmax,
    table=table,
    embed=embed,
)
