"""What the tests of row-wise kernels share: seeded operands, the exact ops, and the plain ops in a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import MAX_ROWS, geglu, rmsnorm, rope
from kernels.jit import GROUP, INTERPRETED
from kernels.rows import Rows, pack_rows, sum_partials
from kernels.testing import RowOp, poison, same_bytes

DEVICE = "cpu" if INTERPRETED.value else "cuda"
EPS = 1e-6
REPEATS = 100

# As in test_kernels_reference: one bf16 rounding, and how many results may differ from the exact value's own rounding.
BF16_ONE_ROUNDING = 1.01 * 2**-8
ONE_ROUNDING_SHARE = 0.01


def random(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Seeded normal values on the device the kernels run on."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(DEVICE)


def halves(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Seeded normal bf16 values."""
    return random(*shape, seed=seed, scale=scale, dtype=torch.bfloat16)


def weight(*shape: int, seed: int = 0) -> Tensor:
    """A norm's weight: fp32 around 1."""
    return 1 + 0.3 * random(*shape, seed=seed)


def rounded_once(found: Tensor, exact: Tensor) -> bool:
    """Close, and all but a few ties equal to the exact value's rounding."""
    found, exact = found.cpu(), exact.cpu()
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    share = float((found != exact.to(found.dtype)).double().mean())
    return error < BF16_ONE_ROUNDING and share < ONE_ROUNDING_SHARE


def every_bf16() -> Tensor:
    """Every bf16 number from 2^-100 on, and zeros: smaller ones meet subnormals, which the interpreter reads wrong."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.where((bits.abs() < 2**-100) & (bits != 0), torch.zeros_like(bits), bits).view(MAX_ROWS, -1).to(DEVICE)


def unpacked(x: Rows) -> Tensor:
    """The bf16 values [8, K] that `Rows` stand for."""
    if x.bits == 4:
        return x.values.view(MAX_ROWS, -1, 2, GROUP // 2).transpose(2, 3).reshape(MAX_ROWS, -1).contiguous()
    if x.bits == 8:
        wide = x.values.float().view(MAX_ROWS, -1, GROUP) * x.scales.T[:, :, None]
        return wide.reshape(MAX_ROWS, -1).to(torch.bfloat16)
    return x.values


def same_rows(found: Rows, expected: Rows, rows: int) -> bool:
    """Whether the first `rows` rows have the same bytes in every part."""
    same = [same_bytes(found.values[:rows], expected.values[:rows])]
    same.append(same_bytes(found.sums[:, :rows], expected.sums[:, :rows]))
    if found.bits == 8:
        same.append(same_bytes(found.scales[:, :rows], expected.scales[:, :rows]))
    return all(same) and found.bits == expected.bits


def by_row(x: Rows) -> list[Tensor]:
    """`Rows` as tensors whose first dim is the row, for a row check."""
    parts = [x.values, x.sums.T.contiguous()]
    return [*parts, x.scales.T.contiguous()] if x.bits == 8 else parts


def rows_hold(op: RowOp, inputs: list[Tensor]) -> None:
    """`row_difference` with a quarter of its programs, as a launch here costs 30 ms a row: rows alone, in order, moved
    by 3, and every second one among NaN."""

    def call(arranged: list[Tensor], rows: int) -> list[Tensor]:
        result = op(*arranged, rows)
        return [result] if isinstance(result, Tensor) else list(result)

    full = call([x.clone() for x in inputs], MAX_ROWS)
    for r in (0, 6):
        for out, expected in zip(call([only(x, [r]).roll(-r, 0) for x in inputs], 1), full, strict=True):
            assert same_bytes(out[0], expected[r]), f"row {r} alone"
    for out, expected in zip(call([x.roll(3, 0) for x in inputs], MAX_ROWS), full, strict=True):
        assert same_bytes(out.roll(-3, 0), expected), "moved by 3"
    for kept in ([0, 2, 4, 6], [1, 3, 5, 7]):
        for out, expected in zip(call([only(x, kept) for x in inputs], MAX_ROWS), full, strict=True):
            assert same_bytes(out[kept], expected[kept]), f"rows {kept} among NaN"


def holds_in_a_graph(op: Callable[[], list[Tensor]]) -> None:
    """The same bytes from a hundred replays of a captured launch as from an eager one."""
    expected = [out.clone() for out in op()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = op()
    for _ in range(REPEATS):
        for out in found:
            poison(out)
        graph.replay()
        for out, wanted in zip(found, expected, strict=True):
            assert same_bytes(out, wanted)


def only(x: Tensor, kept: list[int]) -> Tensor:
    """x with NaN in all other rows."""
    out = torch.full_like(x, float("nan"))
    out[kept] = x[kept]
    return out


def partials_of(x: Tensor) -> Tensor:
    """[8, split, N] -> [split, 8, N]: what a row check moves by rows, as a product leaves it."""
    return x.transpose(0, 1).contiguous()


def residual_ops(
    partials: Tensor, residual: Tensor, post: Tensor, scalar: Tensor | None, following: Tensor, bits: int
) -> tuple[Tensor, Tensor, Rows]:
    """`residual_norm_rows` as single ops: new residual, its norm, the norm packed."""
    h = residual + rmsnorm.rmsnorm(sum_partials(partials), post, EPS)
    h = h if scalar is None else h * scalar
    normed = rmsnorm.rmsnorm(h, following, EPS)
    return h, normed, pack_rows(normed, bits)


def head_ops(
    partials: Tensor, norms: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, k_eq_v: bool, general: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`head_norms_rope` as single ops, in the order of `engine.layers`; cos and sin [8, 1, D] of the rows."""
    raw = sum_partials(partials).view(MAX_ROWS, -1, norms.shape[-1])
    normed = rmsnorm.rmsnorm(raw, norms, EPS)
    turn = rope.rope_general if general else rope.rope_row
    q, k = turn(normed[:, : heads + kv_heads], cos, sin).tensor_split((heads,), 1)
    v = rmsnorm.rmsnorm(raw[:, heads:], None, EPS) if k_eq_v else normed[:, heads + kv_heads :]
    return q.contiguous(), k.contiguous(), v.contiguous()


def geglu_composed(partials: Tensor, bits: int, fused: bool) -> Rows:
    """`geglu_rows` as single ops."""
    gate, up = sum_partials(partials).chunk(2, -1)
    return pack_rows(geglu.geglu_fused(gate, up) if fused else geglu.geglu_ops(gate, up), bits)
