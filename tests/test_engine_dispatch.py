"""Dispatch: the table of stages, and what it does to the bytes of classic decode and of a verify block."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_engine import TINY, TINY_31B, make_pair
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention import attend_prefill
from engine.cache import LinearCache, RingCache
from engine.capture import OPS, Capture
from engine.dispatch import STAGES, DispatchPolicy, Stage
from engine.errors import EngineError
from engine.flags import Flags
from engine.target import Target
from kernels import Kernels
from kernels.testing import same_bytes

LARGE_D_OFF = Flags(sdpa_large_d=False)
OPS_MLP = Flags(compiled_mlp=False)
PER_ROW = Flags(qmv_multirow=False)
PROMPT = [(7 * i + 1) % 512 for i in range(21)]
TOKENS = [(13 * i + 3) % 512 for i in range(40)]
UNPADDED_TOLERANCE = 0.05  # bf16 logits up to 30: one-row products may round other last bits


@pytest.fixture(scope="module")
def target() -> Target:
    """A tiny 12B-like target."""
    return make_pair(TINY).target


@pytest.mark.parametrize(
    ("stage", "rows", "kind", "flags", "expected"),
    [
        ("base", 1, "sliding", Flags(), "row"),
        ("base", 3, "sliding", Flags(), "row"),
        ("base", 4, "sliding", Flags(), "unfused_block"),
        ("base", 1, "full", Flags(), "row"),
        ("base", 2, "full", Flags(), "unfused_block"),
        ("base", 1, "sliding", LARGE_D_OFF, "unfused_row"),
        ("base", 2, "sliding", LARGE_D_OFF, "unfused_block"),
        ("base", 2, "full", LARGE_D_OFF, "unfused_block"),
        ("base", 1, "full", LARGE_D_OFF, "row"),
        *((stage, 8, kind, Flags(), "row") for stage in STAGES[1:] for kind in ("sliding", "full")),
        *((stage, 8, "sliding", LARGE_D_OFF, "unfused_row") for stage in STAGES[1:]),
        *((stage, 8, "full", LARGE_D_OFF, "row") for stage in STAGES[1:]),
    ],
)
def test_attention_kernel(stage: Stage, rows: int, kind: Any, flags: Flags, expected: str) -> None:
    """The verify block's kernel; decode's is the one-row answer, whatever the stage."""
    assert DispatchPolicy(stage, flags).attention(rows, kind, decode=False) == expected
    one_row = DispatchPolicy("rowwise", flags).attention(1, kind, decode=False)
    assert DispatchPolicy(stage, flags).attention(1, kind, decode=True) == one_row


def test_geglu_rope_and_linear_kernels() -> None:
    """Which stage repairs which op, that 4-bit MLPs are fused always, and what the flags move."""
    fused = {stage: DispatchPolicy(stage).geglu(4, 8, decode=False) for stage in STAGES}
    assert fused == {"base": "ops", "attention": "ops", "attention_mlp": "fused", "rowwise": "fused"}
    rope = {stage: DispatchPolicy(stage).rope(4, decode=False) for stage in STAGES}
    assert rope == {"base": "general", "attention": "general", "attention_mlp": "general", "rowwise": "row"}
    for stage in STAGES:
        policy = DispatchPolicy(stage)
        assert policy.geglu(4, 4, decode=False) == policy.geglu(1, 8, decode=False) == "fused"
        assert policy.geglu(1, 8, decode=True) == "fused"
        assert policy.rope(1, decode=False) == policy.rope(1, decode=True) == "row"
        assert DispatchPolicy(stage, OPS_MLP).geglu(1, 4, decode=True) == "ops"
        assert policy.linear(8) == "multirow"
        assert DispatchPolicy(stage, PER_ROW).linear(2) == "per_row"
    narrow = DispatchPolicy(flags=Flags(qmv_multirow_max_rows=3))
    assert [narrow.linear(rows) for rows in (1, 3, 4)] == ["multirow", "multirow", "per_row"]
    with pytest.raises(ValueError, match="'row_wise'; known stages: base, attention"):
        DispatchPolicy("row_wise")  # type: ignore[arg-type]


def chain(target: Target, count: int = 16) -> tuple[list[Tensor], Any]:
    """Logits of `count` tokens one at a time after a prompt that wraps the ring, and the caches."""
    caches = target.new_caches()
    target.prefill(PROMPT, caches)
    return [target.step([token], caches, "classic").logits[0] for token in TOKENS[:count]], caches


def block(target: Target, rows: int, count: int = 16) -> tuple[list[Tensor], Any]:
    """The same in verify blocks of `rows` rows."""
    caches = target.new_caches()
    target.prefill(PROMPT, caches)
    logits: list[Tensor] = []
    for start in range(0, count, rows):
        logits += target.step(TOKENS[start : min(start + rows, count)], caches, "verify").logits
    return logits, caches


def equal(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    """Row by row, on bytes."""
    return [same_bytes(a, b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("flags", [Flags(), LARGE_D_OFF, OPS_MLP, PER_ROW], ids=["plain", "large_d0", "ops", "per_row"])
@pytest.mark.parametrize("geometry", [TINY, TINY_31B], ids=lambda g: g.name)
def test_rowwise_verify_equals_classic(geometry: Any, flags: Flags) -> None:
    """The contract: at every block size a verify row has classic decode's bytes, past the window, caches included."""
    target = make_pair(geometry, policy=DispatchPolicy("rowwise", flags)).target
    expected, caches = chain(target)
    for rows in range(1, 9):
        found, blocks = block(target, rows)
        assert all(equal(found, expected)), rows
        assert blocks.snapshot_bytes() == caches.snapshot_bytes(), rows


@pytest.mark.parametrize("flags", [Flags(), LARGE_D_OFF], ids=["plain", "large_d0"])
def test_classic_bytes_are_the_same_in_every_stage(target: Target, flags: Flags) -> None:
    """A stage moves the verify block, never decode."""
    expected, caches = chain(target.with_policy(DispatchPolicy("rowwise", flags)))
    for stage in STAGES[:-1]:
        found, others = chain(target.with_policy(DispatchPolicy(stage, flags)))
        assert all(equal(found, expected)), stage
        assert others.snapshot_bytes() == caches.snapshot_bytes(), stage


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_every_stage_below_rowwise_differs(target: Target, stage: Stage) -> None:
    """A stage that happened to be exact would show nothing in the attribution table."""
    staged = target.with_policy(DispatchPolicy(stage))
    assert not all(equal(block(staged, 4)[0], chain(staged)[0]))
    assert all(equal(block(staged, 1)[0], chain(staged)[0]))


def test_flags_change_classic_bytes_where_they_should(target: Target) -> None:
    """LARGE_D=0 and the op-by-op MLP move decode too; the multirow switch moves nothing."""
    plain = chain(target)[0]
    for flags, same in ((LARGE_D_OFF, False), (OPS_MLP, False), (PER_ROW, True)):
        assert all(equal(chain(target.with_policy(DispatchPolicy(flags=flags)))[0], plain)) == same
    per_row = target.with_policy(DispatchPolicy(flags=Flags(qmv_multirow_max_rows=2)))
    assert all(equal(block(per_row, 4)[0], plain))


def counting(kernels: Kernels) -> tuple[Kernels, Counter[str]]:
    """The same kernels, counting calls by name."""
    calls: Counter[str] = Counter()

    def wrap(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            calls[name] += 1
            return op(*args)

        return counted

    names = [f.name for f in dataclasses.fields(Kernels) if f.name not in ("backend", "prepare", "fused")]
    return dataclasses.replace(kernels, **{name: wrap(name, getattr(kernels, name)) for name in names}), calls


def test_the_named_kernels_are_the_ones_that_run(target: Target) -> None:
    """A stage whose name and kernels come apart would put a wrong cause into a record."""
    seen = {}
    for stage in STAGES:
        kernels, calls = counting(target.kernels)
        staged = target.with_policy(DispatchPolicy(stage)).with_kernels(kernels)
        caches = staged.new_caches()
        staged.prefill(PROMPT, caches)
        calls.clear()
        staged.step(TOKENS[:4], caches, "verify")
        seen[stage] = {name for name in calls if name.startswith(("rope", "geglu", "sdpa"))}
        assert calls["linear"] == 4 * TINY.num_hidden_layers + 1
        assert calls["linear_any"] == calls["linear_rows"] == 0
    assert seen == {
        "base": {"rope_general", "geglu_ops", "sdpa_unfused"},
        "attention": {"rope_general", "geglu_ops", "sdpa_rows"},
        "attention_mlp": {"rope_general", "geglu_fused", "sdpa_rows"},
        "rowwise": {"rope_row", "geglu_fused", "sdpa_rows"},
    }


def test_capture_names_every_op_in_order(target: Target) -> None:
    """Localization walks these; a missing one would blame the op after it."""
    capture, caches = Capture(), target.new_caches()
    target.step(TOKENS[:3], caches, "verify", capture)
    per_layer = list(OPS[:12])
    assert [entry.op for entry in capture.entries] == per_layer * TINY.num_hidden_layers + list(OPS[12:])
    assert {entry.rows.shape[0] for entry in capture.entries} == {3}
    assert [entry.kind for entry in capture.entries[::12]] == ["sliding"] * 5 + ["full", "final"]
    assert capture.entries[-1].layer == TINY.num_hidden_layers
    by_op = {entry.op: entry.rows for entry in capture.entries[-14:-2]}
    assert same_bytes(by_op["v_proj"], by_op["k_proj"])  # a full layer's value is its raw key
    assert not same_bytes(by_op["k_norm"], by_op["v_norm"])


def test_unpadded_step_is_the_same_function(target: Target) -> None:
    """The honest one-row step must be the classic step but for its last bits, and append its row."""
    caches, other = target.new_caches(), target.new_caches()
    for caches_of in (caches, other):
        target.prefill(PROMPT, caches_of)
    for token in TOKENS[:8]:
        logits = target.step([token], caches, "classic").logits[0].float()
        chosen = target.unpadded_step(token, other)
        assert float(logits.max() - logits[chosen]) <= UNPADDED_TOLERANCE * 30
    assert caches.length == other.length == len(PROMPT) + 8


def test_bad_steps_are_refused(target: Target) -> None:
    """A width that the row contract does not cover must never run."""
    caches = target.new_caches()
    for tokens, mode in (([], "verify"), ([1] * 9, "verify"), ([1, 2], "classic"), ([], "classic")):
        with pytest.raises(EngineError, match=f"{len(tokens)} rows in mode {mode}"):
            target.step(tokens, caches, mode)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="no tokens"):
        target.prefill([], caches)
    assert caches.length == 0
    with pytest.raises(EngineError, match="backend reference"):
        target.with_policy(DispatchPolicy(backend="triton"))


def test_prefill_in_pieces_sees_the_same_keys(target: Target) -> None:
    """A range after the ring has wrapped attends the rows before it: in fp32 pieces and whole agree."""
    wide = make_pair(TINY, dtype=torch.float32).target
    whole, pieces = wide.new_caches(), wide.new_caches()
    tokens = PROMPT + TOKENS
    expected = wide.prefill(tokens, whole)
    for start, end in ((0, 5), (5, 6), (6, 44), (44, len(tokens))):
        found = wide.prefill(tokens[start:end], pieces)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def prefill_peaks() -> Iterator[tuple[str, int, int]]:
    """(cache, rows, largest tensor) for two prompt lengths."""
    for rows in (2048, 4096):
        for name, cache in (
            ("linear", LinearCache(1, 16, torch.bfloat16)),
            ("ring", RingCache(1, 16, 64, torch.bfloat16)),
        ):
            q, k, v = torch.randn(3, rows, 1, 16).bfloat16()
            with LargestTensor() as largest:
                attend_prefill(cache, q, k, v)
            yield name, rows, largest.elements


def test_prefill_memory_is_linear_in_the_prompt() -> None:
    """A whole score matrix would be 16 million elements at 4,096 rows, and four times that at twice the length."""
    peaks = {(name, rows): elements for name, rows, elements in prefill_peaks()}
    assert peaks["linear", 4096] <= 2 * peaks["linear", 2048] <= 2 * 128 * 2048
    assert peaks["ring", 4096] <= 2 * peaks["ring", 2048] <= 4 * 2048 * 16
