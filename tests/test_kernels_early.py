"""Ops that let the next launch start early: the bytes of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not built for this platform")

from support_rowops import DEVICE, EPS, by_row, halves, random, weight

from kernels import FusedOps, Linear
from kernels.argmax import head_best
from kernels.jit import Release
from kernels.launch import LaunchShape
from kernels.repack import pack_dense
from kernels.rows import Rows, pack_rows
from kernels.testing import same_bytes
from kernels.triton_backend import (
    EARLY_IN_DRAFTS,
    FUSED_DRAFT,
    KERNELS,
    LATE,
    ROW_WISE,
    STEPS,
    draft_ops,
    releasing,
)
from tools import time_draft

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

WIDTH = 64
HEADS = SimpleNamespace(num_heads=2, num_kv_heads=0, head_dim=64, k_eq_v=False)
SCALE = torch.tensor(8.0, dtype=torch.bfloat16, device=DEVICE)


def matrix(width: int = WIDTH) -> Linear:
    """A matrix of 64 rows that a product would take as bf16."""
    packed = pack_dense(halves(64, width, seed=1), LaunchShape(32, 1, 2, 2, 1))
    return Linear(64, width, 16, torch.bfloat16, "qmv", packed)


def word(*values: int) -> Tensor:
    """int32 [n]."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sums(columns: int, seed: int) -> Tensor:
    """Two partial sums of eight rows."""
    return random(2, 8, columns, seed=seed)


def join(ops: FusedOps) -> Any:
    ids, pick = word(*range(8)), head_best(sums(64, 2), 1, None)
    return ops.join(matrix(), ids, 3, pick, SCALE, sums(WIDTH, 3), matrix(2 * WIDTH)), ids


def join_accepted(ops: FusedOps) -> Any:
    words = word(7, 41, 42, 43, 44, 45, 46, 47), word(41, 42, 43, 44, 45, 46, 47, 48), word(9), word(8)
    ids, best, position, draft_position = words
    hidden = halves(8, WIDTH, seed=4)
    found = ops.join_accepted(matrix(), ids, best, hidden, position, draft_position, 4, SCALE, matrix(2 * WIDTH))
    return found, *words


def heads(ops: FusedOps) -> Any:
    tables = random(12, 1, 64, seed=5), random(12, 1, 64, seed=6)
    return ops.heads(sums(128, 7), weight(2, 64, seed=8), *tables, word(9), 1, HEADS, None, EPS)


def attend(ops: FusedOps) -> Any:
    q, cache = halves(8, 2, 64, seed=9), halves(2, 1, 16, 64, seed=10)
    return ops.attend(q, cache, word(9), 1, 8, 12, matrix(128))


def residual(ops: FusedOps) -> Any:
    h, normed = halves(8, WIDTH, seed=11), torch.zeros(8, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    norms = weight(WIDTH, seed=12), SCALE.view(1), weight(WIDTH, seed=13)
    return *ops.residual(sums(WIDTH, 14), h, *norms, EPS, 1, matrix(), normed), normed


def reuse(ops: FusedOps) -> Any:
    x = halves(8, WIDTH, seed=15)
    return ops.reuse(pack_rows(x, 4, 1), x, matrix())


CALLS: dict[str, tuple[Callable[[FusedOps], Any], ...]] = {
    "join_accepted": (join_accepted,),
    "join": (join,),
    "enter": (lambda ops: ops.enter(sums(WIDTH, 17), weight(WIDTH, seed=18), EPS, matrix()),),
    "heads": (heads,),
    "attend": (attend,),
    "residual": (residual,),
    "geglu": (lambda ops: ops.geglu(sums(2 * WIDTH, 18), 1, matrix(), True),),
    "gated": (lambda ops: ops.gated(sums(2 * WIDTH, 19), matrix(), 1, True),),
    "reuse": (reuse,),
}


def first_rows(found: Any) -> Iterator[Tensor]:
    """Row 0 of every tensor inside a result, all of a vector; nothing else is written."""
    for part in found if isinstance(found, tuple) else (found,):
        for x in by_row(part) if isinstance(part, Rows) else (part,):
            yield x[:1] if x.dim() > 1 else x


@pytest.mark.parametrize("release", ["early", "first"])
@pytest.mark.parametrize("name", ROW_WISE)
def test_an_early_op_has_the_bytes_of_the_other(name: str, release: Release) -> None:
    """An argument that went astray on its way to the launch would be another drafter's op."""
    for call in CALLS[name]:
        expected, found = list(first_rows(call(LATE))), list(first_rows(call(releasing({name: release}))))
        assert expected
        assert all(same_bytes(own, other) for own, other in zip(found, expected, strict=True))


def changed(ops: FusedOps) -> set[str]:
    """Names of the ops that are not the late ones."""
    return {x.name for x in fields(FusedOps) if getattr(ops, x.name) is not getattr(LATE, x.name)}


def test_only_the_named_ops_release_early() -> None:
    """Products release first whoever calls, and a draft's few programs want other ops to than a verify step's many."""
    for names in (set(ROW_WISE), {"gated"}, set()):
        assert changed(releasing(dict.fromkeys(names, "early"))) == names
    assert KERNELS.fused is not None
    assert changed(KERNELS.fused) == set(STEPS)
    assert KERNELS.fused_draft is FUSED_DRAFT
    assert changed(FUSED_DRAFT) == {*EARLY_IN_DRAFTS, "attend_sums"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: launches overlap only there")
@pytest.mark.parametrize("model", time_draft.MODELS)
def test_an_early_chain_has_the_bytes_of_the_other(model: str) -> None:
    """A launch that read before its producer had written, or whose programs got no room, shows here if anywhere: all
    products of a recorded chain at Gemma's shapes, again and again."""
    table = time_draft.Chain(*time_draft.MODELS[model], "cuda", {})
    late = draft_ops(())
    found: list[list[Tensor]] = []
    for chain in (table.with_ops(late), table.with_ops(FUSED_DRAFT)):
        kept: list[Tensor] = []
        chain.ops = replace(chain.ops, product=keeping(chain.ops.product, kept))
        replay = time_draft.recorded(chain, 3)
        recorded = kept[len(kept) // 2 :]  # behind those of the run before the recording
        for _ in range(20):
            time_draft.tokens(chain, replay)
            found.append([x[:, 0].clone() for x in recorded])
    assert len(found[0]) == 3 * 15 - 1  # the last step's state feeds no other
    assert all(same_bytes(*pair) for again in found[1:] for pair in zip(again, found[0], strict=True))


def keeping(product: Callable[..., Tensor], kept: list[Tensor]) -> Callable[..., Tensor]:
    """The product, whose results stay."""

    def call(*operands: Any) -> Tensor:
        kept.append(product(*operands))
        return kept[-1]

    return call
