"""Decode and verify attention: rows on bytes against their one-row call over cut keys, values against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_kernels_sdpa import DEVICE, NAN, Scene, mutant, relative_error, row_difference, scene
from torch import Tensor

from kernels import MAX_ROWS, reference, sdpa_plan, sdpa_vector
from kernels.rows import pack_rows
from kernels.testing import same_bytes
from tools import tune_sdpa

# ||found - exact|| / ||exact||, of which the rounding of the output is 1.7e-3 and that of the weights to bf16 the rest
ATTENTION_ERROR = 4e-3

SLIDING = scene(heads=2, groups=1, width=16, window=40, length=112, seed=1)
GROUPS = scene(heads=4, groups=2, width=16, window=40, length=112, seed=2)
TWO_TILES = scene(heads=4, groups=1, width=32, window=None, length=80, seed=3)
ODD_GROUP = scene(heads=3, groups=1, width=16, window=None, length=80, seed=4)
WIDE = scene(heads=2, groups=1, width=64, window=None, length=140, seed=5)
SPLIT = scene(heads=3, groups=1, width=16, window=40, length=112, seed=7)
"""Three heads to a KV head: the weights of a block have a launch of their own."""
SCALED_PLAN = sdpa_plan.Plan(
    16, chunk=64, inner=16, warps=4, stages=2, block=32, step=16, part=16, scaled=True, registers=128
)
SCALED = dataclasses.replace(SPLIT, plan=SCALED_PLAN)
"""Weights of blocks that differ by powers of two: chunks of two blocks."""
SCALED_TILES = dataclasses.replace(
    TWO_TILES, plan=dataclasses.replace(SCALED_PLAN, chunk=32, block=16, step=16, part=16, block_stages=3)
)
"""A block in two steps, a head in two parts."""
SCALED_SMALL_TILES = dataclasses.replace(
    SPLIT, plan=dataclasses.replace(SCALED_PLAN, slots=32, block_slots=16, ahead=2)
)
"""Weights of five rows a tile, values of ten: a tile of values has rows that see blocks which others do not."""
LONG = dataclasses.replace(
    scene(heads=2, groups=1, width=16, window=None, length=1044, seed=6),
    plan=sdpa_plan.Plan(16, chunk=16, inner=16, warps=4, stages=1),
)
"""More than 64 chunks: the combine takes two tiles of them from position 1024 on."""

FULL_PLANS = [sdpa_plan.PLANS[512, 16, 1], sdpa_plan.PLANS[512, 32, 4]]

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
nan_arithmetic = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


POSITIONS = {4: (30, 91), 8: (0, 26, 57, 89)}
"""Over chunk edges (32, 64, 96), the window's edge (40), the ring's wrap (47, 94) and the first keys."""


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_a_row_has_the_bytes_of_its_one_row_call(rows: int) -> None:
    """A row of a block, over the block's cache, against classic decode's call over its own keys alone."""
    for position in POSITIONS.get(rows, (57,)):
        assert row_difference(SLIDING, position, rows) is None


OTHERS = {
    "groups": (GROUPS, 61, 4),
    "two-tiles": (TWO_TILES, 28, 8),
    "second-tile-of-one": (TWO_TILES, 60, 5),
    "odd-group": (ODD_GROUP, 27, 8),
    "wide": (WIDE, 126, 3),
    "split": (SPLIT, 57, 8),
    "split-window-edge": (SPLIT, 38, 4),
    "split-wrap": (SPLIT, 91, 5),
    "scaled": (SCALED, 58, 4),
    "scaled-window-edge": (SCALED, 38, 3),
    "scaled-wrap": (SCALED, 91, 5),
    "scaled-two-tiles": (SCALED_TILES, 28, 6),
    "scaled-small-tiles": (SCALED_SMALL_TILES, 58, 8),
    "scaled-small-tiles-window-edge": (SCALED_SMALL_TILES, 38, 8),
    "scaled-small-tiles-wrap": (SCALED_SMALL_TILES, 91, 8),
    "long": (LONG, 1023, 2),
}


@pytest.mark.parametrize(("history", "position", "rows"), OTHERS.values(), ids=OTHERS)
def test_rows_of_other_shapes(history: Scene, position: int, rows: int) -> None:
    """Grouped heads, rows over two tiles, a group that is no power of two, chunk numbers over the combine's tile."""
    assert row_difference(history, position, rows) is None


@pytest.mark.parametrize(("history", "position"), [(SCALED, 30), (ODD_GROUP, 46)], ids=["scaled", "split"])
def test_a_row_whose_last_block_was_not_launched_is_nan(history: Scene, position: int) -> None:
    """Its chunk was: weights that nobody wrote must not pass for attention, and the rows before it are whole."""
    full = dataclasses.replace(history, window=None)
    found = full.call(position, 4, max_keys=position + 2)
    assert same_bytes(found[:2], full.call(position, 2)[:2])
    assert found[2:4].isnan().all()


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(position=st.integers(0, 104), rows=st.integers(1, 8), slack=st.integers(0, 200))
def test_rows_anywhere(position: int, rows: int, slack: int) -> None:
    """Any position, number of rows and length bucket."""
    assert row_difference(SLIDING, position, rows, max_keys=position + rows + slack) is None


@pytest.mark.parametrize("history", [SLIDING, ODD_GROUP, SCALED], ids=["sliding", "full", "scaled"])
def test_ghost_chunks_do_not_reach_the_bytes(history: Scene) -> None:
    """A graph is captured for the longest context of its bucket: chunks that nobody sees must weigh nothing."""
    position, rows = 62, 4
    expected = history.call(position, rows)
    first, end = history.first_visible(position), position + rows
    cache = history.cache(first, end)
    ring = history.ring
    if history.window is None:  # room for the longest context, as a graph's cache has
        cache = torch.nn.functional.pad(torch.stack(cache), (0, 0, 0, 700), value=NAN).unbind()
        ring += 700
    where = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    for max_keys in (96, 700):
        q = history.queries(position, rows)
        found = sdpa_vector.sdpa_vector(q, *cache, where, rows, history.window, ring, max_keys, plan=history.plan)
        assert same_bytes(found[:rows], expected[:rows]), max_keys


def test_too_few_chunks_give_nan() -> None:
    """A row beyond max_keys must not pass for attention over the keys that were visited."""
    found = SLIDING.call(20, 8, max_keys=21)
    assert not found[:1].isnan().any()
    assert found[1:8].isnan().all()  # positions 21..27 are in chunk 0 as well, but nobody asked for their keys
    where = torch.tensor([29], dtype=torch.int32, device=DEVICE)
    cache = ODD_GROUP.cache(0, 37)
    found = sdpa_vector.sdpa_vector(ODD_GROUP.queries(29, 8), *cache, where, 8, None, ODD_GROUP.ring, 32)
    assert not found[:3].isnan().any()
    assert found[3:].isnan().all()


@nan_arithmetic
@pytest.mark.parametrize(
    ("history", "position", "what"),
    [(SLIDING, 60, "kv"), (SLIDING, 57, "k"), (SLIDING, 57, "v"), (TWO_TILES, 29, "kv"), (SCALED, 58, "kv")],
    ids=["key-and-value", "key", "value", "two-tiles", "scaled"],
)
def test_a_neighbours_nan_stays_there(history: Scene, position: int, what: str) -> None:
    """A draft row whose key and value are NaN is in the cache while the rows before it attend."""
    bad = position + 5
    k, v = history.k.clone(), history.v.clone()
    if "k" in what:
        k[:, bad] = NAN
    if "v" in what:
        v[:, bad] = NAN
        v[:, bad + 1, 3] = float("-inf")
    found = dataclasses.replace(history, k=k, v=v).call(position, 8)
    for row in range(5):
        assert same_bytes(found[row], history.alone(position + row)), row
    assert found[5:].isnan().all()


@nan_arithmetic
def test_a_nan_that_left_the_window_stays_out() -> None:
    """The oldest keys of a block are seen by its first rows alone."""
    position = 70
    oldest = SLIDING.first_visible(position)
    k, v = SLIDING.k.clone(), SLIDING.v.clone()
    v[:, oldest + 2] = NAN
    found = dataclasses.replace(SLIDING, k=k, v=v).call(position, 8)
    assert found[:3].isnan().all()
    for row in range(3, 8):
        assert same_bytes(found[row], SLIDING.alone(position + row)), row


@pytest.mark.parametrize("history", [SLIDING, GROUPS, TWO_TILES, ODD_GROUP, WIDE, LONG, SCALED, SCALED_TILES])
def test_attention_is_close_to_float64(history: Scene) -> None:
    """Scale 1, query heads grouped in order, keys up to the row's own and within the window."""
    rows = 3
    position = history.start + history.q.shape[0] - rows
    found = history.call(position, rows)[:rows]
    exact = torch.stack([history.exact(position + row) for row in range(rows)])
    assert relative_error(found, exact) < ATTENTION_ERROR
    for row in range(rows):
        assert relative_error(found[row], exact[row]) < 2 * ATTENTION_ERROR, row


def test_the_combines_tiles_are_a_rows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that began at the call's first chunk would add a row's chunks in another order than its one-row call: two
    chunks of values that cancel show it, where bf16 would hide it."""
    monkeypatch.setattr(sdpa_vector, "COMBINE_CHUNKS", 2)
    history = scene(heads=2, groups=1, width=16, window=70, length=96, seed=8)
    v = history.v.clone()
    v[:, 32:48], v[:, 48:64] = 2.0**16, -(2.0**16)
    plan = sdpa_plan.Plan(16, chunk=16, inner=16, warps=4, stages=1)
    assert row_difference(dataclasses.replace(history, q=torch.zeros_like(history.q), v=v, plan=plan), 80, 8) is None


def test_large_scores_do_not_overflow() -> None:
    """The maximum is taken out first: scores of +-400 whose exponentials fp32 cannot hold."""
    loud = dataclasses.replace(SLIDING, q=SLIDING.q * 64)
    exact = torch.stack([loud.exact(60 + row) for row in range(4)])
    assert relative_error(loud.call(60, 4)[:4], exact) < ATTENTION_ERROR


def test_rows_beyond_the_real_ones_are_left_alone() -> None:
    """`out` belongs to the caller: a launch of 3 rows writes 3."""
    out = torch.full_like(SLIDING.queries(0, 0), 7.0)
    where = torch.tensor([50], dtype=torch.int32, device=DEVICE)
    cache = SLIDING.cache(11, 53)
    q, scratch = SLIDING.queries(50, 3), sdpa_plan.allocate_scratch(2, 1, 16, 40, 112, DEVICE)
    found = sdpa_vector.sdpa_vector(q, *cache, where, 3, 40, SLIDING.ring, 60, out=out, scratch=scratch)
    assert found is out
    assert same_bytes(out[:3], SLIDING.call(50, 3)[:3])
    assert (out[3:] == 7).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rows_ready_for_a_product(bits: int) -> None:
    """The fused output has the bytes of packing the plain one."""
    position, rows = 125, 2
    q, cache = WIDE.queries(position, rows), WIDE.cache(0, position + rows)
    where = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    operands = (q, *cache, where, rows, None, WIDE.ring, 140)
    plain = pack_rows(sdpa_vector.sdpa_vector(*operands).flatten(1), bits, rows)
    fused = sdpa_vector.sdpa_vector_rows(*operands, bits)
    assert same_bytes(fused.values[:rows], plain.values[:rows])
    assert same_bytes(fused.sums[:, :rows], plain.sums[:, :rows])
    if bits == 8:
        assert same_bytes(fused.scales[:, :rows], plain.scales[:, :rows])
    assert (fused.width, fused.bits) == (128, bits)


@pytest.mark.parametrize("position", [20, 33, 62])
def test_bundle_op(position: int) -> None:
    """Keys cut as the engine cuts them: chunks stay at absolute positions when told where the keys begin."""
    rows, window = 8, 40
    first = SLIDING.first_visible(position)
    spans = [(SLIDING.first_visible(p) - first, p + 1 - first) for p in range(position, position + rows)]
    cut = [x[:, first : position + rows] for x in (SLIDING.k, SLIDING.v)]  # views, as from a linear cache
    found = sdpa_vector.sdpa_rows(SLIDING.queries(position, rows), *cut, spans, first)
    assert same_bytes(found, SLIDING.call(position, rows))
    expected = reference.sdpa_rows(SLIDING.queries(position, rows), *cut, spans)
    assert relative_error(found, expected.double()) < ATTENTION_ERROR
    row = 5
    start = SLIDING.first_visible(position + row)
    one = [x[:, start : position + row + 1] for x in (SLIDING.k, SLIDING.v)]
    seen = min(window, position + row + 1)
    alone = sdpa_vector.sdpa_rows(SLIDING.queries(position + row, 1), *one, [(0, seen)], start)
    assert same_bytes(alone[0], found[row])
    assert (alone[1:] == 0).all()


@pytest.mark.parametrize(
    ("spans", "first"),
    [([], 0), ([(0, 5), (0, 7)], 0), ([(0, 5), (1, 6), (3, 7)], 0), ([(0, 0)], 0), ([(0, 5)], -1), ([(0, 30)], 0)],
)
def test_spans_that_are_refused(spans: list[tuple[int, int]], first: int) -> None:
    """Rows that skip a position, two windows, no key, keys that are not there."""
    with pytest.raises(ValueError, match="attention: "):
        sdpa_vector.sdpa_rows(SLIDING.queries(0, 8), SLIDING.k[:, :20], SLIDING.v[:, :20], spans, first)


def refused(change: Callable[[dict], object]) -> str:
    """The message with which a call is refused after one change to its arguments."""
    k, v = SLIDING.cache(11, 53)
    where = torch.tensor([50], dtype=torch.int32, device=DEVICE)
    call = {"q": SLIDING.queries(50, 3), "k": k, "v": v, "position": where}
    call |= {"rows": 3, "window": 40, "ring": 47, "max_keys": 60}
    change(call)
    with pytest.raises(ValueError, match="attention: ") as caught:
        sdpa_vector.sdpa_vector(**call)
    return str(caught.value)


def test_bad_operands_are_refused() -> None:
    """Another dtype, layout or alignment compiles another kernel; a ring too small holds too few keys."""
    wide = SLIDING.k.float()
    assert "q: expected torch.bfloat16" in refused(lambda c: c.update(q=c["q"].float()))
    assert "k: expected torch.bfloat16" in refused(lambda c: c.update(k=wide, v=wide))
    assert "v: expected torch.bfloat16" in refused(lambda c: c.update(v=c["v"][:, :-1]))
    assert "one after another" in refused(lambda c: c.update(k=c["k"].flip(0)[:, ::2], v=c["v"][:, ::2]))
    assert "no multiple of 2 KV heads" in refused(
        lambda c: c.update(k=c["k"].repeat(2, 1, 1), v=c["v"].repeat(2, 1, 1), q=c["q"][:, :1].contiguous())
    )
    assert "int32 tensor of one element" in refused(lambda c: c.update(position=c["position"].long()))
    assert "9 rows asked for" in refused(lambda c: c.update(rows=9))
    assert "0 rows asked for" in refused(lambda c: c.update(rows=0))
    assert "window 0" in refused(lambda c: c.update(window=0))
    assert "max_keys 0" in refused(lambda c: c.update(max_keys=0))
    assert "a ring of 41 slots cannot hold" in refused(lambda c: c.update(ring=41))
    assert "cannot hold what 3 rows see" in refused(lambda c: c.update(window=None))
    assert "47 slots cannot hold" in refused(lambda c: c.update(window=None, ring=60))
    assert "16 slots or more, got 10" in refused(lambda c: c.update(window=3, ring=10))
    assert "head_dim 24" in refused(lambda c: c.update({n: c[n].new_zeros(*c[n].shape[:2], 24) for n in "qkv"}))
    small = sdpa_plan.allocate_scratch(2, 1, 16, 40, 32, DEVICE)
    assert "scratch for 1 chunks" in refused(lambda c: c.update(scratch=small))
    with pytest.raises(ValueError, match="64 slots"):
        sdpa_plan.plan_for(64, 65, 1)
    operands = (SLIDING.queries(50, 3), *SLIDING.cache(11, 53), torch.tensor([50], dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="would span two heads"):
        sdpa_vector.sdpa_vector_rows(*operands, 3, 40, 47, 60, 4)


def test_plans_are_launchable() -> None:
    """A chunk is whole blocks, a tile holds a group, and no plan depends on anything but the shape."""
    shapes = [(width, group, 1) for width in (16, 32, 64, 128, 256, 512) for group in (1, 2, 3, 8, 16, 17, 64)]
    for width, heads, groups in [*shapes, *sdpa_plan.PLANS]:
        plan, group = sdpa_plan.plan_for(width, heads, groups), heads // groups
        assert plan.chunk % plan.inner == 0
        assert plan.inner >= 16
        assert min(plan.slots, plan.block_slots or plan.slots) >= group
        if plan.block:
            assert plan.chunk % plan.block == plan.block % plan.inner == 0
            assert min(plan.step, plan.part) >= 16
    plan = sdpa_plan.Plan(16, chunk=64, inner=32, warps=4, stages=2, block=32, step=32, part=32)
    assert [sdpa_plan.chunks_for(*keys, plan) for keys in ((1024, None), (32768, 1024), (100, 1024))] == [16, 18, 2]
    assert [sdpa_plan.blocks_for(*keys, plan) for keys in ((1024, None), (32768, 1024), (100, 1024))] == [32, 34, 4]
    assert sdpa_plan.blocks_for(1024, None, dataclasses.replace(plan, block=0)) == 0


RELATIVE_CHUNKS = [
    ("(first_of(base, window, CHUNK) + tl.program_id(2)) * CHUNK", "oldest + tl.program_id(2) * CHUNK"),
    ("        return  # no row", "        end = 0  # no row"),
    ("    stored = first_of(base, window, CHUNK)", "    stored = 0"),
    ("    first = tl.maximum(base + row - window + 1, 0) // CHUNK", "    first = 0"),
    ("    last = (base + row) // CHUNK", "    last = chunks - 1"),
]
RELATIVE_BLOCKS = [
    ("(first_of(base, window, BLOCK) + tl.program_id(2)) * BLOCK", "oldest + tl.program_id(2) * BLOCK"),
    ("(first_of(base, window, CHUNK) + tl.program_id(2)) * CHUNK", "oldest + tl.program_id(2) * CHUNK"),
    (
        "first_block = begin // BLOCK - first_of(base, window, BLOCK)",
        "first_block = tl.program_id(2) * (CHUNK // BLOCK)",
    ),
    ("    stored = first_of(base, window, CHUNK)", "    stored = 0"),
    ("    first = tl.maximum(base + row - window + 1, 0) // CHUNK", "    first = 0"),
    (
        "    last = (base + row) // CHUNK",
        "    last = (base + row - tl.maximum(base - window + 1, 0)) // CHUNK",
    ),
]
BOTH = {
    "value_times_zero": [("mask=(held & ~broken)[:, None]", "mask=held[:, None]")],
    "window_of_the_first_row": [("> positions[:, None] - window", "> base - window")],
    "newest_keys_of_the_block": [("(keys[None, :] <= positions[:, None])", "(keys[None, :] <= newest)")],
    "neighbours_query": [
        ("row = tile * PER_TILE + slot // GROUP", "row = tile * PER_TILE + tl.minimum(slot // GROUP, 3)")
    ],
}
FAULTS = {
    **BOTH,
    "chunks_from_the_first_key": RELATIVE_CHUNKS,
    "chunk_chosen_by_rows": [("CHUNK=plan.chunk,", "CHUNK=plan.chunk * (2 if rows > 4 else 1),")],
    "masked_block_forgets": [
        (
            "alpha = tl.exp2(m - top)\n        weights = tl.exp2(scores",
            "alpha = tl.exp2(m - top) * tl.max(seen.to(tl.float32), 1)\n        weights = tl.exp2(scores",
        )
    ],
    "weights_times_zero": [
        ('tl.where(seen, scores, float("-inf"))', "scores * seen.to(tl.float32)"),
        ("weights = tl.exp2(scores - top[:, None])", "weights = tl.exp2(scores - top[:, None]) * seen.to(tl.float32)"),
    ],
}
SPLIT_FAULTS = {
    **BOTH,
    "blocks_from_the_first_key": RELATIVE_BLOCKS,
    "block_chosen_by_rows": [
        (
            "    plan = plan or plan_for(width, heads, groups)\n",
            "    plan = plan or plan_for(width, heads, groups)\n"
            "    if rows > 4:\n        plan, scratch = type(plan)(**{**vars(plan), 'block': 2 * plan.block}), None\n",
        ),
    ],
    "one_maximum_for_the_tile": [
        (
            "m = tl.maximum(tl.max(scores, 1), -1e30)",
            "m = tl.maximum(tl.max(scores, 1) * 0 + tl.max(tl.max(scores, 1), 0), -1e30)",
        )
    ],
    "weights_times_zero": [
        ('tl.where(seen, scores, float("-inf"))', "scores * seen.to(tl.float32)"),
        (
            "weights = to_bf16(tl.exp2(scores - m[:, None]))",
            "weights = to_bf16(tl.exp2(scores - m[:, None]) * seen.to(tl.float32))",
        ),
    ],
}
SCALED_FAULTS = {
    "neighbours_query": BOTH["neighbours_query"],
    "stops_with_the_first_row": [
        ("stop = tl.minimum(tl.minimum(newest + 1,", "stop = tl.minimum(tl.minimum(eldest + 1,")
    ],
    "whole_maxima_chosen_by_rows": [("WHOLE=plan.scaled", "WHOLE=plan.scaled and place[0] <= 4")],
    "nan_for_the_whole_tile": [("(eldest + 1 + eighth <= positions[:, None])", "(eldest + 1 + eighth <= newest)")],
}
WHOLE_FAULTS = {
    "whole_blocks_of_the_last_row": [("tl.minimum(eldest + 1 - begin, ring", "tl.minimum(newest + 1 - begin, ring")],
}
PLACES = {"whole_blocks_of_the_last_row": 40}
"""The last row sees its block to the end, the others of its tile do not."""
NAMES = {id(SLIDING): "fused", id(SPLIT): "split", id(SCALED): "scaled", id(SCALED_TILES): "scaled-tiles"}
PLANTED = [(SLIDING, name, changes) for name, changes in FAULTS.items()]
PLANTED += [(SPLIT, name, changes) for name, changes in SPLIT_FAULTS.items()]
PLANTED += [(SCALED, name, changes) for name, changes in SCALED_FAULTS.items()]
PLANTED += [(SCALED_TILES, name, changes) for name, changes in WHOLE_FAULTS.items()]


@nan_arithmetic
@pytest.mark.parametrize(
    ("history", "fault", "changes"),
    PLANTED,
    ids=[f"{NAMES[id(history)]}-{name}" for history, name, _ in PLANTED],
)
def test_planted_faults_are_caught(history: Scene, fault: str, changes: list[tuple[str, str]], tmp_path: Path) -> None:
    """Each of these computes the right attention for one row at a time, and something else in a block."""
    module = mutant(tmp_path, fault, changes)
    position = PLACES.get(fault, 44)  # rows 0 to 3 see nothing of the last block, though it lies in their last chunk
    assert relative_error(history.alone(position, module), history.exact(position)) < ATTENTION_ERROR
    k, v = history.k.clone(), history.v.clone()
    k[:, position + 7] = v[:, position + 7] = NAN
    found = dataclasses.replace(history, k=k, v=v).call(position, 8, module=module)
    order = (6, 3, 0, 1, 2, 4, 5)
    assert any(not same_bytes(found[row], history.alone(position + row, module)) for row in order), "not caught"


@nan_arithmetic
@pytest.mark.parametrize(
    ("history", "change"),
    [
        (SLIDING, ("held = (keys >= oldest) & (keys <= newest)", "held = keys >= 0")),
        (SPLIT, ("held = (keys >= oldest) & (keys <= newest)", "held = keys >= 0")),
        (SPLIT, ("mask=known[:, None]", "mask=real[:, None]")),
    ],
    ids=["slots", "split-slots", "split-blocks"],
)
def test_a_read_of_what_nobody_wrote_is_caught(history: Scene, change: tuple[str, str], tmp_path: Path) -> None:
    """Slots that no visible key is in, and blocks without a visible key, hold NaN: reading one shows at once."""
    module = mutant(tmp_path, "stale", [change])
    assert history.alone(44, module).isnan().any()


def test_the_unchanged_copy_passes(tmp_path: Path) -> None:
    """The faults' harness itself: without a change every row agrees."""
    module = mutant(tmp_path, "unchanged", [])
    assert row_difference(SLIDING, 59, 8, module=module) is None
    assert row_difference(SPLIT, 59, 5, module=module) is None


@triton.jit
def _powers(out_ptr):
    zero = tl.load(out_ptr)
    tl.store(out_ptr + 1, tl.exp2(zero))
    tl.store(out_ptr + 2, tl.exp2(zero - 1e30))
    tl.store(out_ptr + 3, tl.exp2(zero + float("-inf")))


def test_exp2_of_nothing() -> None:
    """What is not seen weighs exactly 0 and what stays is multiplied by exactly 1."""
    out = torch.zeros(4, device=DEVICE)
    _powers[(1,)](out)
    assert out.tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", tune_sdpa.LAYERS)
def test_what_the_tuner_tries_can_be_launched(name: str) -> None:
    """Whole parts of a head, whole blocks to a chunk, a group in a tile, no plan twice, the one in use first."""
    layer = tune_sdpa.LAYERS[name]
    found = tune_sdpa.candidates(layer)
    assert found[0] == sdpa_plan.PLANS[layer.shape]
    assert len({tune_sdpa.words(plan) for plan in found}) == len(found) > 3
    for plan in found:
        assert plan.chunk % plan.inner == 0
        assert plan.slots >= layer.heads // layer.groups
        if plan.block:
            assert plan.chunk % plan.block == plan.block % plan.inner == 0
            assert layer.width % plan.part == layer.width % plan.step == 0
            assert plan.part >= sdpa_vector.COMBINE_WIDTH


def test_the_tuner_refuses_a_plan_that_rows_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast plan is worth nothing when a block's rows have other bytes: the check must pass what is right alone."""
    layer, plan = tune_sdpa.Layer(2, 1, 16, None, (20,)), sdpa_plan.Plan(16, chunk=16, inner=16, warps=4, stages=2)
    bench = tune_sdpa.Bench(layer, 20, rotated=0, device=DEVICE)
    found = bench.call(plan, bench.scratch(plan), 1, row=2)
    assert relative_error(found[0], bench.exact[2]) < ATTENTION_ERROR
    right = bench.exact.clone()
    cases = {
        "None": (1.0, 1.0),
        "of 8 at 16 has not its one-row call's bytes": (1.0, 1.01),
        "error 1.0e-02": (1.01, 1.01),
    }
    for message, factors in cases.items():

        def attention(*operands: Any, factors: tuple[float, float] = factors, **_: Any) -> Tensor:
            first, rows = int(operands[3]) - bench.first, operands[4]
            return (right.roll(-first, 0) * factors[rows == 8]).bfloat16()

        monkeypatch.setattr(tune_sdpa, "sdpa_vector", attention)
        assert message in str(bench.wrong(plan)), message


def test_the_tuners_bars() -> None:
    """0.6 of the stream at 32K for a full layer, 1.35 for M = 4 at 2K and 8K, both or no mark."""
    layer = tune_sdpa.LAYERS["12b-full"]
    bytes_of_32k = 32769 * 512 * 2 * 2
    us = {(context, rows): 10.0 for context in layer.contexts for rows in tune_sdpa.ROWS}
    us[32768, 1] = bytes_of_32k / 4400e3 / 0.61
    timed = tune_sdpa.Timed(sdpa_plan.PLANS[512, 16, 1], us)
    share, flat, met = tune_sdpa.judge(layer, timed, 4400.0)
    assert (round(share, 3), flat, met) == (0.61, 1.0, True)
    us[8192, 4] = 13.6
    assert tune_sdpa.judge(layer, timed, 4400.0)[2] is False
    us[8192, 4], us[32768, 1] = 13.4, us[32768, 1] * 1.03
    assert tune_sdpa.judge(layer, timed, 4400.0)[2] is False
    assert tune_sdpa.judge(dataclasses.replace(layer, window=1024), timed, 4400.0)[2] is True


GEMMA = {
    "12b-sliding": (16, 8, 256, 1024),
    "12b-full": (16, 1, 512, None),
    "31b-sliding": (32, 16, 256, 1024),
    "31b-full": (32, 4, 512, None),
    "nano-sliding": (4, 2, 64, 1024),
    "nano-full": (4, 1, 128, None),
}
CONTEXTS = [8, 1056, 2048, 8192]


@pytest.fixture(scope="module")
def histories() -> Callable[[str], Scene]:
    """One history per layer kind, as long as the longest context."""
    made: dict[str, Scene] = {}

    def history(layer: str) -> Scene:
        if layer not in made:
            heads, groups, width, window = GEMMA[layer]
            made[layer] = scene(heads, groups, width, window, max(CONTEXTS) + 16, seed=11)
        return made[layer]

    return history


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("layer", GEMMA)
def test_gemma_rows_on_the_device(layer: str, context: int, histories: Callable[[str], Scene]) -> None:
    """Every M at a context, with ghost chunks, NaN beside and in unwritten slots; close to float64."""
    history = histories(layer)
    for rows in range(1, MAX_ROWS + 1):
        for position in {max(0, context - 3), context - context % 64 - 2 if context > 64 else 0}:
            bucket = min(position + rows + 300, history.ring) if history.window is None else position + rows + 300
            assert row_difference(history, position, rows, bucket) is None
    found = history.call(context - 1, 8)
    exact = torch.stack([history.exact(context - 1 + row) for row in range(8)])
    assert relative_error(found, exact) < ATTENTION_ERROR


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("plan", [*FULL_PLANS, tune_sdpa.SMALL], ids=["12b", "31b", "one-tile"])
@pytest.mark.parametrize("layer", ["12b-full", "31b-full"])
def test_scaled_plans_on_the_device(layer: str, plan: sdpa_plan.Plan) -> None:
    """Every row's bytes on both sides of an edge of blocks, call after call, and close to float64."""
    for context in (704, 8192):
        assert tune_sdpa.Bench(tune_sdpa.LAYERS[layer], context, rotated=0).wrong(plan) is None


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("layer", GEMMA)
def test_gemma_neighbours_nan_on_the_device(layer: str, histories: Callable[[str], Scene]) -> None:
    """NaN keys and values of a later row, and a value that only the first rows still see."""
    history, position = histories(layer), 2045
    k, v = history.k.clone(), history.v.clone()
    k[:, position + 6] = NAN
    v[:, position + 6 :] = NAN
    if history.window is not None:
        v[:, history.first_visible(position)] = NAN
    found = dataclasses.replace(history, k=k, v=v).call(position, 8)
    for row in range(0 if history.window is None else 1, 6):
        assert same_bytes(found[row], history.alone(position + row)), row
    assert found[6:].isnan().all()


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("layer", GEMMA)
def test_gemma_repeats_and_graphs_on_the_device(layer: str, histories: Callable[[str], Scene]) -> None:
    """100 calls give one set of bytes, and a captured graph, replayed at other positions, gives the eager bytes."""
    history, rows, bucket = histories(layer), 4, 4096
    k, v = history.cache(history.first_visible(2045), 2049)
    where = torch.tensor([2045], dtype=torch.int32, device=DEVICE)
    q = history.queries(2045, rows)
    heads, groups = q.shape[1], k.shape[0]
    scratch = sdpa_plan.allocate_scratch(heads, groups, q.shape[2], history.window, bucket, DEVICE)
    out = torch.zeros_like(q)

    def step() -> Tensor:
        return sdpa_vector.sdpa_vector(
            q, k, v, where, rows, history.window, history.ring, bucket, out=out, scratch=scratch
        )

    expected = step().clone()
    for _ in range(100):
        assert same_bytes(step(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for position in (2045, 1022, 3000):
        for held, new in zip((k, v), history.cache(history.first_visible(position), position + rows), strict=True):
            held.copy_(new)
        q.copy_(history.queries(position, rows))
        where.fill_(position)
        out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bytes(out[:rows], history.call(position, rows)[:rows]), position
