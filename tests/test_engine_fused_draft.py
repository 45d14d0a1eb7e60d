"""The recorded draft chain against the drafter's plain steps, op by op, and how many launches it takes."""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support_engine import random_pair_dirs
from support_fused import TINIER

pytest.importorskip("triton", reason="triton is not built for this platform")

from support_rowops import DEVICE, same_rows

from engine.dispatch import DispatchPolicy
from engine.fused import tables_upto
from engine.fused_draft import fused_draft
from engine.pair import load_pair
from kernels import FusedOps
from kernels.launch import TABLE, LaunchShape
from kernels.rows import Rows, pack_rows
from kernels.triton_backend import attend_sums
from tools import time_draft

ROOT = Path(__file__).parent.parent
STEPS = 2


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("bits", "width", "form"),
    [
        (4, 64, "sums"),
        (None, 16, "screened"),
        pytest.param(4, 16, "", marks=pytest.mark.slow),
        pytest.param(None, 16, "", marks=pytest.mark.slow),
    ],
    ids=["4 bits, queries made in attention", "bf16, head screened", "4 bits", "bf16"],
)
def test_a_chain_has_the_bytes_of_plain_steps(
    bits: int | None, width: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every later step reads, and the tokens: another byte would be another drafter than the one that is measured.

    One layer, so that a step takes a second; other rows of the state and of the ids hold what must not count.
    """
    geometry = replace(TINIER, head_dim=width)
    if form == "screened":  # a launch shape that its head can be screened in, as the 31B's drafter has
        head = (geometry.drafter_hidden_size, geometry.vocab_size, 16)
        monkeypatch.setitem(TABLE, head, LaunchShape(64, 1, 2, 2, 1))
    dirs = random_pair_dirs(geometry=geometry, drafter_bits=bits)
    pair = load_pair(dirs.target, dirs.drafter, DispatchPolicy(backend="triton"), device=DEVICE)
    target, drafter = pair.target, copy.copy(pair.drafter)
    assert drafter is not None
    drafter._shapes, drafter._layers = drafter._shapes[:1], drafter._layers[:1]
    caches, generator = target.new_caches(), torch.Generator().manual_seed(1)
    for layer in caches.layers:
        shape = layer.kv.shape[1], 6, layer.kv.shape[3]
        layer.write(*(torch.randn(shape, generator=generator).to(layer.kv) for _ in range(2)))
    shared = target.shared_kv(caches)
    hidden = torch.randn(TINIER.hidden_size, generator=generator).to(torch.bfloat16).to(DEVICE)

    expected, vectors = [7], [hidden]
    for _ in range(STEPS):
        logits, vector = drafter.draft_step(expected[-1], vectors[-1], shared, 5)
        expected.append(int(logits.float().argmax()))
        vectors.append(vector)

    weights = drafter._fused(target)
    assert (weights.screen is not None) == (form == "screened")
    ids = torch.tensor([7, *range(300, 307)], dtype=torch.int32, device=DEVICE)
    position = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    state = torch.full((8, TINIER.hidden_size), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    state[0] = hidden
    ops, read = watched(target.kernels.fused)
    if form == "sums":
        ops = replace(ops, attend_sums=attend_sums, heads=refuse, attend=refuse)
    kv = {"sliding": caches[0].kv}
    joined = ops.join(weights.embedding, ids, 0, None, weights.embed_scale, state, weights.pre)
    tables = tables_upto(drafter._tables, 20)
    fused_draft(ops, weights, joined, ids, position, kv, tables, 20, STEPS)  # type: ignore[arg-type]
    assert ids.tolist() == [*expected, *range(300 + STEPS, 307)]
    assert len(set(expected)) > 2
    for own, token, vector in zip(read, expected, vectors, strict=False):
        row = torch.zeros(8, 2 * TINIER.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        row[0] = torch.cat((target.embed(torch.tensor([token], device=DEVICE))[0], vector))
        assert same_rows(own, pack_rows(row, own.bits, 1), 1)
    assert len(read) == STEPS


def refuse(*operands: Any) -> Any:
    """An op that must not be called."""
    raise AssertionError("queries have no launch of their own here")


def watched(ops: FusedOps | None) -> tuple[FusedOps, list[Rows]]:
    """The ops, and what each step begins with."""
    assert ops is not None
    read: list[Rows] = []

    def join(*operands: Any) -> Rows:
        read.append(ops.join(*operands))
        return read[-1]

    return replace(ops, join=join), read


COUNT = """
import json, sys
from kernels.triton_backend import FUSED_DRAFT, draft_ops
from tools.time_draft import GEOMETRIES, forms, launches
cases = {"12b": (0, 4), "31b": (1, 16), "31b in 4 bits": (1, 4)}
counts = {
    name: [len(launches(GEOMETRIES[at], bits, steps)) for steps in (1, 2, 3)] for name, (at, bits) in cases.items()
}
counts |= {
    f"{name}, {form}": len(launches(GEOMETRIES[at], bits, 2, ops))
    for name, (at, bits) in cases.items()
    for form, ops in forms(bits).items()
    if "apart" in form
}
chains = {
    which: [(x.kernel, x.describe()) for x in launches(GEOMETRIES[1], 4, 2, ops)]
    for which, ops in (("late", draft_ops(())), ("used", FUSED_DRAFT), ("gated", draft_ops(["gated"])))
}
sys.stdout.write(json.dumps({"counts": counts, "chains": chains}))
"""


@pytest.fixture(scope="module")
def noted() -> dict[str, Any]:
    """Launches at both models' shapes, in a process of its own: Triton decides at import whether it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", COUNT], env=environment, cwd=ROOT, text=True, capture_output=True)
    assert found.returncode == 0, found.stderr
    report: dict[str, Any] = json.loads(found.stdout)
    return report


def test_launches_of_a_step(noted: dict[str, Any]) -> None:
    """Each costs two to four microseconds of a step of 200 to 400."""
    counts = noted["counts"]
    for name in ("12b", "31b", "31b in 4 bits"):
        launches = counts[name]
        assert launches == [launches[0] * steps for steps in (1, 2, 3)], name
        assert 20 < launches[0] <= (41 if name == "31b" else 44), name  # of which one looks at what a screen leaves
        queries = 2 * time_draft.KINDS.count("sliding")
        gated = 2 * len(time_draft.KINDS) * (name == "31b")
        assert counts[f"{name}, queries apart"] == launches[1] + queries
        assert counts[f"{name}, GeGLU apart"] == launches[1] + gated
        assert counts[f"{name}, late, all apart"] == launches[1] + queries + gated


ATTENTION = {"attend", "scores_of", "scaled_values", "combine"}
STAY_LATE = {"_qmv_ahead", *ATTENTION, "_head_norms_rope", "_head_keys", "_largest"}
"""Release the next launch after their loop or by their end, or always before their wait."""


def test_early_launches_are_the_same_ones(noted: dict[str, Any]) -> None:
    """When consumers may start is all that may differ: another kernel, order or constant would be another drafter. An
    op whose launch did not say so would be timed as if it had."""
    late, used, geglu = (noted["chains"][which] for which in ("late", "used", "gated"))
    assert [(kernel, text.replace("RELEASE=early", "RELEASE=late")) for kernel, text in used] == [
        tuple(x) for x in late
    ]
    assert {kernel for kernel, _ in late} > STAY_LATE
    assert not [text for _, text in late if "RELEASE=early" in text]
    for kernel, text in used:
        assert ("RELEASE=early" in text) == (kernel not in STAY_LATE), kernel
    assert {kernel for kernel, text in geglu if "RELEASE=early" in text} == {"_geglu_rows"}


def test_launch_shapes_are_read_from_the_command_line() -> None:
    """A shape that the matrix cannot take would be timed as something else."""
    matrix, shape = time_draft.shape_of("8192x1024-4bit=64,2,4,2,16")
    assert (matrix, shape) == ((8192, 1024, 4), LaunchShape(64, 2, 4, 2, 16))
    for text in ("8192x1024-4bit", "8192x1024-4bit=64,1,4,2", "8192x1024-4bit=48,1,4,2,1", "64x64-4bit=64,2,4,2,1"):
        with pytest.raises(argparse.ArgumentTypeError, match="4bit"):
            time_draft.shape_of(text)
