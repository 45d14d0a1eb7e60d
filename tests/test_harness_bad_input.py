"""Bad input through the command line: one line with where, what and what to do, the right exit code, no traceback."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support_broken import (
    claim_bits,
    copy_pair,
    drop_tensor,
    edit_text_config,
    truncate_file,
)
from support_engine import NANO_SHAPED, PairDirs, random_pair_dirs, weight_files
from support_spec import HEAD, MATRIX, PARITY, PROBE, write

from harness.cli import run_cli

SPECS: dict[str, tuple[str, str]] = {
    "unknown key": (HEAD + PROBE.replace("}", ", drawz: [8]}"), "did you mean 'draws'"),
    "duplicate key": (HEAD.replace("schema: 1", "schema: 1\ntitle: Twice") + PROBE, "duplicate key 'title'"),
    "unquoted 0": (HEAD + MATRIX.replace('"0"', "0"), "quote it"),
    "unknown flag": (HEAD + MATRIX.replace("QMV_MULTIROW", "QMV_MULTIRWO"), "did you mean MLXCEL_QMV_MULTIROW?"),
    "flag without a counterpart": (
        HEAD + MATRIX.replace("MLXCEL_QMV_MULTIROW", "MLX_CUDA_USE_CUDNN_SDPA"),
        "MLX_CUDA_USE_CUDNN_SDPA",
    ),
    "matrix with zero cells": (HEAD + MATRIX.replace('values: [null, "0"]', "values: []", 1), "0 cells"),
    "duplicate cells": (HEAD + MATRIX.replace('[null, "0"]', '["0", "0"]', 1), "duplicate"),
    "duplicate ids": (HEAD + PROBE + PROBE, "probe"),
    "empty prompt": (HEAD + PARITY.replace("one two", '""'), "empty"),
    "prompt file missing": (HEAD + PARITY.replace("text: one two", "file: prompts/no.txt"), "prompts/no.txt"),
    "not YAML": ("schema: [1\n", "specs/tiny.yaml"),
    "empty file": ("", "empty"),
}


@dataclass(frozen=True)
class Result:
    """What a command line printed, and its exit code."""

    exit_code: int
    output: str


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command line as a shell would; its measuring lock is the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*args: str) -> Result:
        code = run_cli(args)
        out, err = capfd.readouterr()
        return Result(code, out + err)

    return run


def lines_of(result: Result) -> list[str]:
    """What was printed, without blank lines; never a traceback."""
    assert "Traceback" not in result.output
    assert "internal error" not in result.output
    return [line for line in result.output.splitlines() if line.strip()]


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("verb", ["check", "run", "list"])
def test_a_bad_spec_is_exit_2_and_says_where(invoke: Invoke, tmp_path: Path, verb: str, name: str) -> None:
    """A typo in a spec must not run something else, nor end in a traceback."""
    text, words = SPECS[name]
    path = write(tmp_path, text)
    result = invoke(verb, str(path), *(["--out", str(tmp_path / "out")] if verb == "run" else []))
    assert result.exit_code == 2
    lines = lines_of(result)
    assert any("tiny.yaml:" in line and words in line for line in lines), lines
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "words"), [("temperature: 0.7", "temperature"), ("batch: 2", "batch")], ids=["temperature", "batch"]
)
def test_sampling_and_batches_are_refused(invoke: Invoke, tmp_path: Path, key: str, words: str) -> None:
    """A sampled run under a greedy label, or one row of two, would pass for an exact one."""
    path = write(tmp_path, HEAD + PARITY.replace("max_tokens: 8}", f"max_tokens: 8, {key}}}"))
    result = invoke("check", str(path))
    assert result.exit_code == 2
    assert any(words in line and "tiny.yaml:8:" in line for line in lines_of(result))


def test_a_missing_spec_and_an_unknown_verb_are_usage_errors(invoke: Invoke, tmp_path: Path) -> None:
    """The two typos that everybody makes first."""
    missing = invoke("run", str(tmp_path / "no.yaml"))
    assert missing.exit_code == 2
    assert any("no.yaml" in line for line in lines_of(missing))
    assert invoke("rnu").exit_code == 2


def no_scales(pair: PairDirs) -> None:
    drop_tensor(pair.target, "language_model.model.layers.0.mlp.gate_proj.scales")


def truncated(pair: PairDirs) -> None:
    truncate_file(weight_files(pair.target)[0])


def wrong_bits(pair: PairDirs) -> None:
    claim_bits(pair.target, 8)


def other_width(pair: PairDirs) -> None:
    shutil.rmtree(pair.drafter)
    shutil.copytree(random_pair_dirs(geometry=NANO_SHAPED).drafter, pair.drafter)


def other_vocabulary(pair: PairDirs) -> None:
    edit_text_config(pair.drafter, vocab_size=300)


CHECKPOINTS: dict[str, tuple[Callable[[PairDirs], None], str]] = {
    "truncated safetensors": (truncated, "truncated"),
    "packed weight without scales": (no_scales, "scales"),
    "wrong bits": (wrong_bits, "bits"),
    "drafter of another width": (other_width, "backbone_hidden_size"),
    "drafter of another vocabulary": (other_vocabulary, "300"),
}


def run_pair(invoke: Invoke, tmp_path: Path, target: str, drafter: str, *args: str) -> Result:
    """`harness run` on one probe of a pair that lies beside the spec."""
    text = (HEAD + PROBE).replace("path: target", f"path: {target}").replace("path: drafter", f"path: {drafter}")
    path = write(tmp_path, text)
    return invoke("run", str(path), "--out", str(tmp_path / "out"), "--plain", *args)


ONCE = ("truncated safetensors", "drafter of another width")
"""Run by `make test`, one for each of the pair's folders; the loader's own tests have the others and many more."""


@pytest.mark.parametrize(
    "name", [name if name in ONCE else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS]
)
def test_a_broken_checkpoint_is_exit_3_with_one_line_and_a_record(invoke: Invoke, tmp_path: Path, name: str) -> None:
    """A checkpoint that cannot be loaded is an error of that case; the run still leaves its record."""
    spoil, words = CHECKPOINTS[name]
    pair = copy_pair(tmp_path / "specs")
    spoil(pair)
    result = run_pair(invoke, tmp_path, pair.target.name, pair.drafter.name)
    assert result.exit_code == 3, result.output
    said = [line for line in lines_of(result) if "error" in line and words in line]
    assert said, result.output
    assert str(tmp_path) not in said[0]
    assert list((tmp_path / "out").glob("*.md"))


def test_a_drafter_given_as_target_says_so(invoke: Invoke, tmp_path: Path) -> None:
    """Two folders with similar names are swapped sooner or later."""
    pair = copy_pair(tmp_path / "specs")
    result = run_pair(invoke, tmp_path, pair.drafter.name, pair.drafter.name)
    assert result.exit_code == 3
    assert any("give it as drafter" in line for line in lines_of(result)), result.output


@pytest.mark.parametrize(("require", "code"), [((), 0), (("--require", "weights"), 1)], ids=["skip", "require"])
def test_a_missing_checkpoint_skips_or_fails_when_required(
    invoke: Invoke, tmp_path: Path, require: tuple[str, ...], code: int
) -> None:
    """Missing weights are not a failure of the engine, unless a lane promised them."""
    result = run_pair(invoke, tmp_path, "nowhere-4bit", "nowhere-assistant", *require)
    assert result.exit_code == code, result.output
    assert any("nowhere-4bit" in line for line in lines_of(result))
