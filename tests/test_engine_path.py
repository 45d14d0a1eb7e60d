"""The kernels that a flag or a stage comes to: what the path names is what runs, and every flag is accounted for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support_engine import TINY, make_pair
from support_qwen35 import qwen_pair
from test_engine_dispatch import counting
from torch.utils._python_dispatch import TorchDispatchMode

import engine
from engine.dispatch import DispatchPolicy, Stage
from engine.flags import Flags
from engine.path import LAUNCHING, NOT_REACHING, REACHING, config_words, effect_note, kernel_path
from engine.target import Target

LONG = ((5000, None),)


@pytest.fixture(scope="module")
def target() -> Target:
    """A tiny random target."""
    return make_pair(TINY).target


def path(flags: Flags = Flags(), rows: int = 4, stage: Stage = "rowwise", **more: Any) -> dict[str, str]:
    settings: dict[str, Any] = {"prompts": LONG, "cuda": True, "dtype": "float32", "fused": False, **more}
    return kernel_path(DispatchPolicy(stage, flags), rows, (8,), **settings)


def test_every_flag_is_accounted_for() -> None:
    """Guards against a new flag that no fingerprint sees: it must reach a kernel, or be listed with a reason."""
    listed = [*REACHING, *LAUNCHING, *NOT_REACHING]
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(Flags))


@pytest.mark.parametrize("field", sorted(REACHING))
def test_a_flag_that_reaches_a_kernel_moves_the_path(field: str) -> None:
    """Guards against two arms that differ and are called identical."""
    value = getattr(Flags(), field)
    other = not value if isinstance(value, bool) else 3
    assert path(dataclasses.replace(Flags(), **{field: other})) != path()


class Products(TorchDispatchMode):
    """Notes the dtypes of batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["gemma4", "qwen35"])
def test_prefill_of_a_bf16_pair_multiplies_in_fp32(family: str, target: Target) -> None:
    """So the TF32 flag moves K/V and states of every pair on CUDA; a ledger that says otherwise misleads."""
    loaded = target if family == "gemma4" else qwen_pair().target
    assert loaded.dtype is torch.bfloat16
    with Products() as seen:
        loaded.prefill([5, 6, 7, 8], loaded.new_caches())
    assert seen.dtypes == {torch.float32}
    assert path(dtype="bfloat16")["tf32"] == "true"


def test_graphs_move_launches_and_no_kernel() -> None:
    """Guards both readings of the flag: a benchmark may compare its values, and no certificate's bytes rest on it."""
    off = dataclasses.replace(Flags(), use_cuda_graphs=False)
    moved = dict(path(off, fused=True).items() ^ path(fused=True).items())
    assert set(moved) == {"verify launches", "classic launches"}
    assert path(fused=True)["classic launches"] == "recorded"
    assert path(off, fused=True, cuda=False) == path(fused=True, cuda=False)


def test_attention_apart_is_never_recorded() -> None:
    """Guards the word for a step that mixes few launches with attention op by op."""
    off = dataclasses.replace(Flags(), sdpa_large_d=False)
    assert path(off, fused=True)["classic launches"] == "few"
    assert path(off, stage="base", fused=True)["verify launches"] == "one per op"


def test_what_reaches_nothing_is_not_read_by_the_engine() -> None:
    """Guards the list of flags without effect: one that the engine begins to read fails until the path holds it."""
    folder = Path(engine.__file__).parent
    for field in NOT_REACHING:
        readers = {file.name for file in folder.rglob("*.py") if f".{field}" in file.read_text(encoding="utf-8")}
        assert readers <= {"decision.py"}, field


@pytest.mark.parametrize(
    ("one", "two", "settings"),
    [
        ({"qmv_multirow_max_rows": 4}, {"qmv_multirow_max_rows": 8}, {}),
        ({"qmv_multirow": False}, {"qmv_multirow": False, "qmv_multirow_max_rows": 2}, {}),
        ({"qmv_multirow": False}, {"qmv_multirow_max_rows": 1}, {}),
        ({"prefill_chunk": 512}, {"prefill_chunk": 2048}, {"prompts": ((300, 120),)}),
        ({"enable_tf32": False}, {"enable_tf32": True}, {"cuda": False}),
        ({"use_cuda_graphs": False}, {}, {}),
        ({"allow_inexact": True}, {}, {}),
    ],
)
def test_flags_that_differ_in_name_only_have_one_path(
    one: dict[str, Any], two: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Guards against a comparison of a thing with itself that reads as a result."""
    assert path(Flags(**one), **settings) == path(Flags(**two), **settings)


def test_a_flag_without_effect_here_says_why() -> None:
    """The ledger's remark; a flag that has an effect has none."""
    policy = DispatchPolicy(flags=Flags(qmv_multirow=False))
    assert effect_note("qmv_multirow_max_rows", policy, cuda=True, dtype="bfloat16").startswith("no effect: MLXCEL_QMV")
    assert "a CPU" in effect_note("enable_tf32", policy, cuda=False, dtype="bfloat16")
    assert effect_note("enable_tf32", policy, cuda=True, dtype="bfloat16") == ""
    assert effect_note("use_cuda_graphs", policy, cuda=True, dtype="bfloat16") == "reaches speed, no byte"
    assert effect_note("use_cuda_graphs", policy, cuda=False, dtype="bfloat16").startswith("no effect")
    assert effect_note("sdpa_large_d", policy, cuda=False, dtype="bfloat16") == ""


KERNELS = {
    "linear": {"multirow": "linear", "per_row": "linear_rows"},
    "rope": {"row": "rope_row", "general": "rope_general"},
    "geglu, 8 bits": {"fused": "geglu_fused", "ops": "geglu_ops"},
}


@pytest.mark.parametrize("stage", ["base", "attention", "rowwise"])
@pytest.mark.parametrize("flags", [Flags(), Flags(qmv_multirow=False, compiled_mlp=False)])
def test_the_path_names_what_runs(target: Target, stage: Stage, flags: Flags) -> None:
    """Guards against a fingerprint of intentions: the ops that a step really calls are those that its path names."""
    policy = DispatchPolicy(stage, flags)
    named = kernel_path(policy, 4, (8,), cuda=False, dtype="bfloat16", fused=False)
    for mode, tokens in (("verify", [1, 2, 3, 4]), ("classic", [1])):
        kernels, seen = counting(target.kernels)
        staged = target.with_policy(policy).with_kernels(kernels)
        caches = staged.new_caches()
        staged.prefill([5, 6, 7], caches)
        seen.clear()
        staged.step(tokens, caches, mode)  # type: ignore[arg-type]
        for op, names in KERNELS.items():
            called = {name for name in names.values() if seen[name]}
            assert called == {names[named[f"{mode} {op}"]]}, (mode, op)
        unfused = [kind for kind in ("sliding", "full") if named[f"{mode} attention, {kind}"] != "row"]
        assert bool(seen["sdpa_unfused"]) == bool(unfused), mode


def test_a_config_in_words_tells_geometries_apart(target: Target) -> None:
    """Guards the certificate's geometry against one that reads alike for two pairs."""
    words = config_words(target.config)
    assert "window 16" in words
    for name in ("hidden_size", "intermediate_size", "head_dim", "sliding_window", "num_key_value_heads", "vocab_size"):
        other = dataclasses.replace(target.config, **{name: getattr(target.config, name) * 2})
        assert config_words(other) != words, name
