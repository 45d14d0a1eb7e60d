"""A small 8-bit product in Triton, honest and with one fault each, for the row check and the compile gate.

`gate_entries()` is what `python -m kernels.gate --module support_kernel_faults` compiles; `FAULTY_ROWS` holds the ops
that the row check has to refuse. All share one body, so a fault is the only difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gate.entry import Entry, Expect, product
from kernels.jit import SLOTS, dot, launch_options, release_consumers, wait_for_producers
from kernels.rows import pack_rows, sum_partials

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, FEATURES = 128, 64
BLOCK = 64


@triton.jit
def tile(x_ptr, w_ptr, out_ptr, M, K, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    """out[m, n] = sum over k of w[n, k] * x[m, k]; weights uint8 [N, K], x bf16 [ROWS, K], out fp32 [ROWS, N]."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, 64)
    source = m
    if FAULT == "neighbour":
        source = tl.where(m == 5, 4, m)
    groups = K // 64
    if FAULT == "atomic":
        groups = groups // 2
    first = tl.program_id(1) * groups
    acc = tl.zeros((BLOCK, ROWS), tl.float32)
    for group in tl.range(0, groups):
        at = (first + group) * 64 + k
        w = tl.load(w_ptr + n[:, None] * K + at[None, :]).to(tl.float32)
        x = tl.load(x_ptr + source[None, :] * K + at[:, None])
        if FAULT == "fp32":
            acc = tl.dot(w, x.to(tl.float32), acc)
        else:
            acc = dot(w.to(tl.bfloat16), x, acc)
    if FAULT == "leak":
        acc += 0.0 * tl.sum(acc, 1)[:, None]
    if FAULT == "slot":
        acc = tl.where((m == 0)[None, :], acc, acc * 1.0000002)
    to = out_ptr + m[None, :] * N + n[:, None]
    if FAULT == "atomic":
        tl.atomic_add(to, acc, mask=m[None, :] < M)
    else:
        tl.store(to, acc, mask=m[None, :] < M)


@triton.jit(do_not_specialize=["M", "K", "N"])
def honest(x_ptr, w_ptr, out_ptr, M, K, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    """The body as it should be launched: no runtime integer reaches the compiler."""
    wait_for_producers()
    tile(x_ptr, w_ptr, out_ptr, M, K, N, ROWS, BLOCK, FAULT)
    release_consumers()


@triton.jit(do_not_specialize=["K", "N"])
def specialized(x_ptr, w_ptr, out_ptr, M, K, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    """Triton makes M = 1 a constant of its own accord."""
    wait_for_producers()
    tile(x_ptr, w_ptr, out_ptr, M, K, N, ROWS, BLOCK, FAULT)
    release_consumers()


@triton.jit(do_not_specialize=["K", "N"])
def constant(
    x_ptr, w_ptr, out_ptr, M: tl.constexpr, K, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr
):
    """A binary for every M."""
    wait_for_producers()
    tile(x_ptr, w_ptr, out_ptr, M, K, N, ROWS, BLOCK, FAULT)
    release_consumers()


def launch(
    kernel: object,
    x: Tensor,
    w: Tensor,
    rows: int,
    fault: str = "",
    tile_rows: int = SLOTS,
    warps: int = 4,
    **more: int,
) -> Tensor:
    """x bf16 [8, K], w uint8 [N, K] -> fp32 [8, N], NaN in rows that nobody wrote."""
    (features, width), split = w.shape, 2 if fault == "atomic" else 1
    out = torch.full((tile_rows, features), 0.0 if fault == "atomic" else float("nan"), device=x.device)
    grid = (features // BLOCK, split)
    options = launch_options(x.device, warps)
    kernel[grid](x, w, out, rows, width, features, tile_rows, BLOCK, fault, **options, **more)  # type: ignore[index]
    return out[:SLOTS]


def weights(device: str = DEVICE) -> Tensor:
    """Seeded codes [N, K]."""
    codes = torch.randint(0, 256, (FEATURES, WIDTH), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return codes.to(device)


def activations() -> Tensor:
    """Seeded rows bf16 [8, K]."""
    return torch.randn(SLOTS, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)


Op = Callable[[Tensor, int], Tensor]


def op(fault: str) -> Op:
    """The product with a fault, as a function of (x, rows)."""
    w = weights()
    return lambda x, rows: launch(honest, x, w, rows, fault)


def shares_its_buffer(inner: Op) -> Op:
    """`inner`, always returned in the same tensor: whoever keeps a result keeps the next one's bytes."""
    buffer = torch.zeros(SLOTS, FEATURES, device=DEVICE)

    def shared(x: Tensor, rows: int) -> Tensor:
        return buffer.copy_(inner(x, rows))

    return shared


def answers_from_the_last_call(inner: Op) -> Op:
    """Computes once and hands out that buffer from then on, as if it had been asked the same again."""
    kept: list[Tensor] = []

    def lazy(x: Tensor, rows: int) -> Tensor:
        if not kept:
            kept.append(inner(x, SLOTS))
        return kept[0]

    return lazy


def forgets_a_column(inner: Op) -> Op:
    """Leaves the last column of its output buffer to whoever wrote there before."""
    buffer = torch.zeros(SLOTS, FEATURES, device=DEVICE)

    def partial(x: Tensor, rows: int) -> Tensor:
        buffer[:, :-1] = inner(x, rows)[:, :-1]
        return buffer

    return partial


def changes_with_the_number_of_rows(inner: Op) -> Op:
    """Takes another order of sums from five rows on."""
    return lambda x, rows: inner(x, rows) if rows < 5 else inner(x.flip(1), rows).nextafter(torch.tensor(0.0))


def drifts(inner: Op) -> Op:
    """Gives other bytes at every third call, as a race would."""
    calls = [0]

    def unsteady(x: Tensor, rows: int) -> Tensor:
        calls[0] += 1
        out = inner(x, rows)
        return out.nextafter(torch.tensor(0.0)) if calls[0] % 3 == 0 else out

    return unsteady


FAULTY_ROWS: dict[str, Callable[[], Op]] = {
    "right only in slot 0": lambda: op("slot"),
    "reads a neighbour's row": lambda: op("neighbour"),
    "a neighbour times zero": lambda: op("leak"),
    "right only in slot 0, in one shared buffer": lambda: shares_its_buffer(op("slot")),
    "hands out its first result": lambda: answers_from_the_last_call(op("")),
    "leaves a column unwritten": lambda: forgets_a_column(op("")),
    "another sum from five rows on": lambda: changes_with_the_number_of_rows(op("")),
    "other bytes now and then": lambda: drifts(op("")),
}


def gate_entries() -> list[Entry]:
    """The honest kernel, then one entry per fault; the name says which."""
    x = torch.empty(16, WIDTH, dtype=torch.bfloat16)
    w = weights("cpu")
    plain = Expect(mma="HMMA", rows=SLOTS)

    def entry(name: str, kernel: object, fault: str = "", expect: Expect = plain, **options: int) -> Entry:
        called = getattr(kernel, "__name__", "")
        return Entry(name, lambda rows: launch(kernel, x, w, rows, fault, **options), {called: expect})

    def contracted(rows: int) -> None:
        honest[(1, 1)](x, w, torch.empty(SLOTS, FEATURES), rows, WIDTH, FEATURES, SLOTS, BLOCK, "", num_warps=4)

    def switches(rows: int) -> None:
        launch(honest if rows != 3 else specialized, x, w, rows)

    def hesitates(rows: int) -> None:
        sum_partials(torch.empty(32, SLOTS, 1024), rows)

    def hurries(rows: int) -> None:
        pack_rows(torch.empty(SLOTS, 1024, dtype=torch.bfloat16), 4, rows, release="early")

    return [
        entry("honest", honest),
        entry("M specialized by Triton", specialized),
        entry("M a constant", constant),
        Entry("another kernel at M = 3", switches, {"honest": plain, "specialized": plain}),
        entry("a tile of 16 rows", honest, tile_rows=16),
        entry("a tile of 16 rows, 2 warps", honest, tile_rows=16, warps=2),
        entry("an atomic reduction", honest, "atomic"),
        entry("fp32 operands", honest, "fp32"),
        entry("a costly unpack", honest, expect=product(4)),
        entry("too few registers", honest, maxnreg=32),
        Entry("contraction on", contracted, {"honest": plain}),
        Entry(
            "a kernel that is not launched", lambda rows: launch(honest, x, w, rows), {"honest": plain, "other": plain}
        ),
        Entry("no kernel at all", lambda rows: None),
        Entry("few loads on their way", hesitates, {"_sum": Expect(loads_ahead=32)}),
        entry("a late release", honest, expect=replace(plain, release="early")),
        entry("a release after the wait", honest, expect=replace(plain, release="first")),
        entry("nothing asked for ahead", honest, expect=replace(plain, copies_ahead=1)),
        entry("shared memory beside a meeting's", honest, expect=replace(plain, shared_bytes=64)),
        Entry("a release before the reads", hurries),
    ]
