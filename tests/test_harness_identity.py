"""What a child binds a certificate to: one changed byte of code or weights gives another identity."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_engine import copy_of, random_pair_dirs
from support_harness import IDENTITY

import kernels
from engine.decision import Decision
from engine.dispatch import DispatchPolicy
from engine.flags import read_flags
from engine.probe import LONG_DRAW_EXTRA, DrawResult, ProbeResult
from harness import certificate
from harness.record.lines import Identity
from harness.worker import identity


def test_one_byte_of_a_kernel_is_another_source(tmp_path: Path) -> None:
    """Guards against a proof that outlives an edit: content, a file's name, a new file, and nothing but code."""
    folder = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = identity.source_sha256([folder])
    assert before == identity.source_sha256([folder])
    (folder / "README.md").write_text("words", encoding="utf-8")
    assert identity.source_sha256([folder]) == before
    file = folder / "gate" / "cases.py"
    text = file.read_bytes()
    file.write_bytes(text[:-1] + b" ")
    assert identity.source_sha256([folder]) != before
    file.write_bytes(text)
    assert identity.source_sha256([folder]) == before
    file.rename(folder / "gate" / "other.py")
    assert identity.source_sha256([folder]) != before


def test_the_engine_and_the_kernels_are_the_source(tmp_path: Path) -> None:
    """Guards against a hash over a folder that nobody imports."""
    root = Path(kernels.__file__).parent.parent
    assert identity.source_sha256() == identity.source_sha256([root / "engine", root / "kernels"])


@pytest.mark.parametrize("whole", [True, False])
def test_other_files_are_another_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Guards against other weights, shapes or tokens under a known name; a sample says that it is one."""
    if not whole:
        monkeypatch.setattr(identity, "WHOLE_BYTES", 1)
        monkeypatch.setattr(identity, "SAMPLE_BYTES", 64)
    folder = copy_of(random_pair_dirs().target, tmp_path / "target")
    before = identity.checkpoint_sha256(folder)
    assert before.endswith(identity.SAMPLED) != whole
    assert identity.checkpoint_sha256(random_pair_dirs().target) == before
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        file = next(iter(sorted(folder.glob(name.replace("model", "model*")))))
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert identity.checkpoint_sha256(folder) != before, name
        file.write_bytes(content)
    assert identity.checkpoint_sha256(folder) == before
    if whole:
        shard = sorted(folder.glob("*.safetensors"))[0]
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        assert identity.checkpoint_sha256(folder) != before


def test_what_a_cpu_is_bound_to() -> None:
    """A CPU has no driver and no compute capability, but torch picks other kernels by its instruction set."""
    assert identity.capability("cpu").isupper() or identity.capability("cpu")[0].isalpha()
    assert identity.driver_version()
    assert certificate.LONG_DRAW_EXTRA == LONG_DRAW_EXTRA


def test_only_a_probe_that_passed_and_engaged_is_certified() -> None:
    """Guards against a proof by override: a failed probe, one that did not run, and MLXCEL_MTP_ALLOW_INEXACT."""
    walk = DrawResult("walk of 128 from 160 tokens", 160, 4, 128, True, 0, 512, None, 0.1)
    result = ProbeResult((walk,), None, 0.1, chain_sha256="c" * 64)
    pair = SimpleNamespace(target=SimpleNamespace(policy=DispatchPolicy("rowwise")))
    stated = Identity.model_validate(IDENTITY)
    bench: Any = SimpleNamespace(at=lambda stage: pair, identity=stated, reading=read_flags({}))
    made = identity.certificate_line(bench, "x", "rowwise", Decision(True, "exact"), result)
    assert made is not None
    assert (made.block_size, made.inputs[0].rows, made.classic_sha256) == (4, 128, "c" * 64)
    failed = dataclasses.replace(result, outcomes=(dataclasses.replace(walk, passed=False, differing_bytes=1),))
    for decision, probed in (
        (Decision(True, "differs", inexact=True), failed),
        (Decision(True, "exact", inexact=True), result),
        (Decision(False, "no drafter"), result),
        (Decision(True, "exact"), failed),
        (Decision(True, "exact"), None),
        (Decision(True, "exact"), dataclasses.replace(result, not_run="an exception")),
    ):
        assert identity.certificate_line(bench, "x", "rowwise", decision, probed) is None
