"""What the gate compiles: every public op of the verify path at the shapes of Gemma 4 12B, 31B and the 12B's drafter,
and the second family's (`qwen35`).

Tensors are uninitialised CPU memory: wrappers check them, Triton specializes on them, nobody touches their bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels import (
    argmax,
    cluster,
    draft_rows,
    embed,
    fused_norms,
    gated_qmv,
    geglu,
    qmv,
    rmsnorm,
    rope,
    rows,
    screened_head,
    sdpa_vector,
)
from kernels.gate import qwen35
from kernels.gate.entry import PRODUCT, Entry, Expect, product
from kernels.jit import GROUP, SLOTS, Release
from kernels.launch import TABLE, LaunchShape, launch_shape
from kernels.repack import PackedWeight
from kernels.sdpa_plan import Plan
from kernels.sdpa_queries import QueryHeads
from kernels.triton_backend import STEPS

WINDOW, RING, MAX_KEYS = 1024, 1031, 8192
VOCABULARY = 262144
EPS = 1e-6
SPLIT = 4
PLAIN = Expect()
MEETS = Expect(shared_bytes=cluster.SHARED_BYTES)
"""Of a wide row's programs: nothing may lie where they meet."""
RESIDUAL, SUM_NORM = "_residual_norm_cluster", "_sum_norm_cluster"
GATED = Expect(mma="HMMA", rows=SLOTS, per_weight=3.0)
"""GeGLU over all threads of a program of four warps; where each warp makes all of it, a weight costs 6.2 to 6.6."""
SLIDING_ATTENTION = {"attend": Expect(mma="HMMA")}
SPLIT_PLAN = Plan(64, 512, 64, 4, 3, block=64, step=64, part=128)
"""A plan whose blocks keep their own maxima, as the default plans of shapes that nobody tuned."""
FULL_ATTENTION = {"scores_of": Expect(mma="any"), "scaled_values": Expect(mma="any")}


@dataclass(frozen=True)
class Attention:
    """Attention of one kind of layer: query heads, KV heads, head_dim, window, whether v is k."""

    name: str
    heads: int
    kv_heads: int
    width: int
    window: int | None
    k_eq_v: bool = False


@dataclass(frozen=True)
class Geometry:
    """One model: hidden size, MLP width, bits of the attention's and of the MLP's matrices, kinds of layer; `split` is
    the most parts that a product of this hidden size leaves."""

    name: str
    hidden: int
    inner: int
    bits: int
    mlp_bits: int
    layers: tuple[Attention, ...]

    @property
    def split(self) -> int:
        return max((shape.split for (_, n, _), shape in TABLE.items() if n == self.hidden), default=SPLIT)


GEOMETRIES = (
    Geometry(
        "12b", 3840, 15360, 4, 8, (Attention("sliding", 16, 8, 256, WINDOW), Attention("full", 16, 1, 512, None, True))
    ),
    Geometry(
        "31b", 5376, 21504, 4, 4, (Attention("sliding", 32, 16, 256, WINDOW), Attention("full", 32, 4, 512, None, True))
    ),
    Geometry(
        "drafter", 1024, 8192, 4, 4, (Attention("sliding", 16, 0, 256, WINDOW), Attention("full", 16, 0, 512, None))
    ),
)


def floats(*shape: int) -> Tensor:
    """fp32 of a shape."""
    return torch.empty(*shape, dtype=torch.float32)


def halves(*shape: int) -> Tensor:
    """bf16 of a shape."""
    return torch.empty(*shape, dtype=torch.bfloat16)


def position() -> Tensor:
    """Where row 0 stands, int32 [1]."""
    return torch.empty(1, dtype=torch.int32)


def gate_entries() -> list[Entry]:
    """All entries; a kernel that only one shape needs appears with that shape."""
    own = _products(), _row_ops(), _draft_ops(), _early_ops(), _plain_ops(), _attention()
    return [*itertools.chain.from_iterable(own), *qwen35.entries()]


def _products() -> Iterator[Entry]:
    """qmv at every shape of the launch table and at the default's; one launch for all rows and one for each; and a
    bf16 drafter's `down` on gate_up's sums."""
    for (width, features, bits), shape in TABLE.items():
        call = partial(_multiply, width, features, bits, shape)
        yield Entry(f"qmv {width}x{features} {bits} bits", call, {"_qmv_ahead": product(bits)})
    for width, features, bits in ((256, 512, 4), (4096, 4096, 4), (256, 512, 8), (3840, 15360, 16)):
        shape = launch_shape(width, features, bits)
        call = partial(_multiply, width, features, bits, shape)
        yield Entry(f"qmv default {width}x{features} {bits} bits", call, {"_qmv_ahead": PRODUCT})
    width, features = GEOMETRIES[-1].inner, GEOMETRIES[-1].hidden
    call = partial(_multiply_gated, width, features, launch_shape(width, features, 16))
    yield Entry(f"gated_qmv {width}x{features} 16 bits", call, {"_gated_qmv": GATED})


def _matrix(width: int, features: int, bits: int, shape: LaunchShape) -> PackedWeight:
    tiles, groups = -(-features // shape.tile), width // GROUP
    if bits == 16:
        codes = halves(tiles, groups, shape.tile, GROUP)
    else:
        codes = torch.empty(tiles, groups, shape.tile, GROUP * bits // 8, dtype=torch.uint8)
    scales = torch.empty((tiles, groups, shape.tile) if bits < 16 else (0,), dtype=torch.int32)
    return PackedWeight(codes, scales, features, width, bits, shape)


def _multiply(width: int, features: int, bits: int, shape: LaunchShape, m: int) -> None:
    x = rows.new_rows(width, bits, torch.device("cpu"))
    weight = _matrix(width, features, bits, shape)
    qmv.qmv(x, weight, m)
    qmv.qmv_rows(x, weight, m)


def _multiply_gated(width: int, features: int, shape: LaunchShape, m: int) -> None:
    gated_qmv.gated_qmv(floats(1, SLOTS, 2 * width), _matrix(width, features, 16, shape), m)


def _row_ops() -> Iterator[Entry]:
    """Between two products: sums of partials, norms, RoPE, GeGLU, the head's argmax; a target's as its steps launch
    them, a drafter's in the form that starts nothing early."""
    for model in GEOMETRIES:
        yield Entry(f"{model.name} norm_rows", partial(_norm, model), {"_norm_cluster": MEETS})
        for what, bits in (("attention", model.bits), ("mlp", model.mlp_bits)):
            call = partial(_residual, model, bits)
            name = f"residual_norm_rows to {what}"
            yield _in_steps(model, name, "residual", RESIDUAL, call, replace(MEETS, loads_ahead=model.split))
        yield _in_steps(model, "last residual", "residual", RESIDUAL, partial(_residual, model, None), MEETS)
        for layer in model.layers:
            name, call = f"{layer.name} head_norms_rope", partial(_head_norms, layer)
            yield _in_steps(model, name, "heads", "_head_norms_rope", call)
        yield _in_steps(model, "geglu_rows", "geglu", "_geglu_rows", partial(_geglu_rows, model))
    narrow = replace(GEOMETRIES[-1], hidden=fused_norms.WHOLE)
    yield Entry("norm_rows, narrow", partial(_norm, narrow))
    yield Entry("sum_norm_rows, narrow", partial(_sum_norm, narrow.hidden, SPLIT, 4))
    yield Entry("residual_norm_rows, narrow", partial(_residual, narrow, 4))
    model = GEOMETRIES[0]
    yield Entry("sum_partials", partial(_sum_partials, model))
    for bits in (4, 8):
        yield Entry(f"pack_rows {bits} bits", partial(_pack, model, bits))
        yield Entry(f"embed_rows {bits} bits", partial(_embed, model, bits))
    yield Entry("head_argmax capped", partial(_head_argmax, 30.0))
    yield Entry("head_argmax plain", partial(_head_argmax, None))


def _in_steps(
    model: Geometry, name: str, op: str, kernel: str, call: Callable[..., None], expect: Expect = PLAIN
) -> Entry:
    """An op's launch as classic and verify steps of a target make it."""
    release: Release = STEPS.get(op, "late") if model.name != "drafter" else "late"
    return Entry(f"{model.name} {name}", partial(call, release=release), {kernel: replace(expect, release=release)})


def _draft_ops() -> Iterator[Entry]:
    """How a draft step begins, over the tables of both targets and into `pre` and the first layer as its drafter
    stores them; the place of an id, like a number of rows, must not choose a binary."""
    drafter = GEOMETRIES[-1]
    for model, bits in zip(GEOMETRIES[:-1], (4, 16), strict=True):
        yield Entry(f"{model.name} join_rows, first step", partial(_join, model, bits, True))
        yield Entry(f"{model.name} join_rows, later steps", partial(_join, model, bits, False))
        yield Entry(f"{model.name} join_accepted_rows", partial(_join_accepted, model, bits))
    for bits in (4, 16):
        split = launch_shape(2 * GEOMETRIES[0].hidden, drafter.hidden, bits).split
        expects = {SUM_NORM: replace(MEETS, loads_ahead=split)}
        yield Entry(f"sum_norm_rows to {bits} bits", partial(_sum_norm, drafter.hidden, split, bits), expects)
    yield Entry("sum_norm_rows, wide", partial(_sum_norm, GEOMETRIES[0].hidden, SPLIT, 4), {SUM_NORM: MEETS})
    yield Entry("write_best", _write_best)
    screened = partial(_screened, drafter.hidden, VOCABULARY)
    yield Entry("31b drafter's head, screened", screened, {"_recheck": Expect(mma="HMMA", rows=8)})


def _early_ops() -> Iterator[Entry]:
    """What a draft step launches in the form that lets the next launch start early."""
    model, drafter = GEOMETRIES[0], GEOMETRIES[-1]
    split = launch_shape(2 * model.hidden, drafter.hidden, 4).split
    calls: list[tuple[str, str, Callable[..., None], Expect]] = [
        ("join_rows", "_join", partial(_join, model, 4, False), Expect()),
        ("join_accepted_rows", "_join_accepted", partial(_join_accepted, model, 4), Expect()),
        (
            "sum_norm_rows",
            SUM_NORM,
            partial(_sum_norm, drafter.hidden, split, 4),
            replace(MEETS, loads_ahead=split),
        ),
        (
            "residual_norm_rows",
            RESIDUAL,
            partial(_residual, drafter, drafter.bits),
            replace(MEETS, loads_ahead=drafter.split),
        ),
        ("geglu_rows", "_geglu_rows", partial(_geglu_rows, drafter), Expect()),
        ("pack_rows", "_pack", partial(_pack, drafter, 4), Expect()),
    ]
    for name, kernel, call, expect in calls:
        yield Entry(f"{name}, early", partial(call, release="early"), {kernel: replace(expect, release="early")})


def _ids() -> Tensor:
    return torch.empty(SLOTS, dtype=torch.int32)


def _join(model: Geometry, bits: int, first: bool, m: int, release: Release = "late") -> None:
    table, keys, state = _table(model), argmax.head_keys(VOCABULARY, torch.device("cpu")), halves(SLOTS, model.hidden)
    if first:
        draft_rows.join_rows(table, _ids(), m - 1, None, halves(1), state, bits, release)
    else:
        sums = floats(launch_shape(GEOMETRIES[-1].hidden, model.hidden, bits).split, SLOTS, model.hidden)
        draft_rows.join_rows(table, _ids(), m - 1, keys, halves(1), sums, bits, release)


def _join_accepted(model: Geometry, bits: int, m: int, release: Release = "late") -> None:
    operands = _table(model), _ids(), _ids(), halves(SLOTS, model.hidden), position(), position(), m, halves(1), bits
    draft_rows.join_accepted_rows(*operands, release)


def _write_best(m: int) -> None:
    argmax.write_best(argmax.head_keys(VOCABULARY, torch.device("cpu")), _ids(), m - 1)


def _screened(width: int, features: int, m: int) -> None:
    head, copy = (_matrix(width, features, bits, launch_shape(width, features, bits)) for bits in (16, 8))
    sums = floats(copy.shape.split, SLOTS, features)
    screened_head.screened_best(sums, halves(SLOTS, width), head, copy, floats(1))


def _sum_norm(width: int, split: int, bits: int, m: int, release: Release = "late") -> None:
    fused_norms.sum_norm_rows(floats(split, SLOTS, width), floats(width), EPS, m, bits, release)


def _norm(model: Geometry, m: int) -> None:
    fused_norms.norm_rows(halves(SLOTS, model.hidden), floats(model.hidden), EPS, m, model.bits)


def _residual(model: Geometry, bits: int | None, m: int, release: Release = "late") -> None:
    n = model.hidden
    sums, weight = floats(model.split, SLOTS, n), None if bits is None else floats(n)
    operands = sums, halves(SLOTS, n), floats(n), halves(1), weight, EPS, m, bits or 4
    fused_norms.residual_norm_rows(*operands, release=release)


def _head_norms(layer: Attention, m: int, release: Release = "late") -> None:
    heads = layer.heads + layer.kv_heads * (1 if layer.k_eq_v else 2)
    ring = MAX_KEYS if layer.window is None else RING
    cache = halves(layer.kv_heads, ring, layer.width) if layer.kv_heads else None
    rope.head_norms_rope(
        floats(SPLIT, SLOTS, heads * layer.width),
        floats(heads, layer.width),
        floats(MAX_KEYS, layer.width),
        floats(MAX_KEYS, layer.width),
        position(),
        m,
        layer.heads,
        layer.kv_heads,
        layer.k_eq_v,
        EPS,
        cache,
        cache,
        ring,
        settled=True,
        release=release,
    )


def _geglu_rows(model: Geometry, m: int, release: Release = "late") -> None:
    geglu.geglu_rows(floats(1, SLOTS, 2 * model.inner), m, model.mlp_bits, fused=True, release=release)


def _sum_partials(model: Geometry, m: int) -> None:
    rows.sum_partials(floats(SPLIT, SLOTS, model.hidden), m)


def _pack(model: Geometry, bits: int, m: int, release: Release = "late") -> None:
    rows.pack_rows(halves(SLOTS, model.hidden), bits, m, release=release)


def _embed(model: Geometry, bits: int, m: int) -> None:
    embed.embed_rows(_table(model, bits), _ids(), halves(1), m)


def _table(model: Geometry, bits: int = 4) -> PackedWeight:
    return _matrix(model.hidden, VOCABULARY // 64, bits, LaunchShape(256, 2, 3, 4, 1))


def _head_argmax(cap: float | None, m: int) -> None:
    argmax.head_argmax(floats(1, SLOTS, VOCABULARY), m, cap)


def _plain_ops() -> Iterator[Entry]:
    """The ops of the bundle as they are called alone."""
    yield Entry("rmsnorm", partial(_rmsnorm, (3840,), (3840,)))
    yield Entry("rmsnorm per head", partial(_rmsnorm, (16, 256), (16, 256)))
    yield Entry("rope_row", partial(_turn, rope.rope_row))
    yield Entry("rope_general", partial(_turn, rope.rope_general))
    yield Entry("geglu_fused", partial(_gate, geglu.geglu_fused))
    yield Entry("geglu_ops", partial(_gate, geglu.geglu_ops))
    yield Entry("softcap", lambda m: argmax.softcap(halves(m, VOCABULARY), 30.0))
    yield Entry("argmax", lambda m: argmax.argmax(halves(m, VOCABULARY)))


def _rmsnorm(shape: tuple[int, ...], weight: tuple[int, ...], m: int) -> None:
    rmsnorm.rmsnorm(halves(m, *shape), floats(*weight), EPS)


def _turn(function: Callable[[Tensor, Tensor, Tensor], Tensor], m: int) -> None:
    function(halves(m, 16, 256), floats(m, 1, 256), floats(m, 1, 256))


def _gate(function: Callable[[Tensor, Tensor], Tensor], m: int) -> None:
    function(halves(m, 15360), halves(m, 15360))


def _attention() -> Iterator[Entry]:
    """The kernels of attention, at several context lengths: a length must not choose a binary either."""
    for model in GEOMETRIES:
        for layer in model.layers:
            if layer.kv_heads:
                expects = SLIDING_ATTENTION if layer.window else FULL_ATTENTION
                yield Entry(f"{model.name} {layer.name} attention", partial(_attend, layer, None), expects)
                name = f"{model.name} {layer.name} attention to {model.bits} bits"
                expects = {**expects, "combine": Expect(release=STEPS["attend"])}
                yield Entry(name, partial(_attend, layer, model.bits), expects)
    for model, bits in zip(GEOMETRIES[:-1], (4, 16), strict=True):
        layer, name = model.layers[0], f"{model.name} drafter's sliding attention from sums"
        split = launch_shape(GEOMETRIES[-1].hidden, layer.heads * layer.width, bits).split
        from_sums = {"attend": Expect(mma="HMMA", loads_ahead=5 + split)}  # position, weights, cos and sin; the sums
        yield Entry(name, partial(_attend_sums, layer, split, bits), from_sums)
    expects = {"scores_of": Expect(mma="any"), "values_of": Expect(mma="any")}
    yield Entry("12b full attention, split", partial(_attend, GEOMETRIES[0].layers[1], None, plan=SPLIT_PLAN), expects)


def _attend(layer: Attention, bits: int | None, m: int, plan: Plan | None = None) -> None:
    q = halves(SLOTS, layer.heads, layer.width)
    for keys in (8, 1040, MAX_KEYS, 32768):
        ring = keys if layer.window is None else RING
        cache = halves(layer.kv_heads, ring, layer.width)
        if bits is None:
            sdpa_vector.sdpa_vector(q, cache, cache, position(), m, layer.window, ring, keys, plan=plan, settled=True)
        else:
            place = position(), m, layer.window, ring, keys
            sdpa_vector.sdpa_vector_rows(q, cache, cache, *place, bits, settled=True, release=STEPS["attend"])


def _attend_sums(layer: Attention, split: int, bits: int, m: int) -> None:
    sums = floats(split, SLOTS, layer.heads * layer.width)
    tables = floats(layer.heads, layer.width), floats(MAX_KEYS, layer.width), floats(MAX_KEYS, layer.width)
    cache = halves(layer.kv_heads, RING, layer.width)
    for keys in (8, MAX_KEYS):
        operands = (sums, cache, cache, position(), m, layer.window, RING, keys, bits)
        sdpa_vector.sdpa_vector_rows(*operands, settled=True, query_heads=QueryHeads(*tables, EPS))
