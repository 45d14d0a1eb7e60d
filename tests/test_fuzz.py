"""2,000 damaged specs and 500 damaged checkpoints: what is wrong is said in a line with its place, never a traceback.

Seeded, so that a failure comes back; its number names the case.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import support_fuzz as fuzz
import torch
from support_engine import TINY, one_thread, random_pair_dirs

from engine import pair
from engine.checkpoint import open_checkpoint
from engine.config import config_role, parse_drafter_config
from engine.dispatch import DispatchPolicy
from engine.drafter import Drafter
from engine.errors import LONGEST_MESSAGE, EngineError
from engine.target import Target
from harness.cli import run_cli
from harness.errors import SpecError
from harness.spec import load_spec, plan
from harness.spec.lint import lint
from harness.spec.yaml12 import read_document

SPECS, LINT_EVERY, CLI_EVERY, CHECKPOINTS, SEED = 2000, 4, 50, 500, 20261130
ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"[^\x00-\x1f]+:[1-9][0-9]*:[1-9][0-9]*: .+")
COMMITTED = sorted((ROOT / "specs").glob("*.yaml"))
NAMES = re.compile("|".join(path.stem for path in COMMITTED))


@functools.cache
def sound_specs() -> tuple[list[str], list[object]]:
    """The committed specs under one name: their text without comments, and their values."""
    texts = [NAMES.sub("fuzz", re.sub(r"(?m)^\s*#.*\n", "", path.read_text(encoding="utf-8"))) for path in COMMITTED]
    values = [{**read_document(path, path.name).value, "name": "fuzz"} for path in COMMITTED]
    return texts, values


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where damaged specs lie: beside the committed prompts and checkpoints."""
    folder = tmp_path_factory.mktemp("fuzz") / "specs"
    folder.mkdir()
    (folder.parent / "pyproject.toml").touch()
    for name in ("prompts", "checkpoints"):
        (folder / name).symlink_to(ROOT / "specs" / name)
    return folder / "fuzz.yaml"


def test_2000_damaged_specs_load_or_say_where(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the loader, the plan and the linter: a spec is fine, or each of its problems has a line and a column."""
    rng = random.Random(SEED)
    texts, values = sound_specs()
    seen: Counter[str] = Counter()
    for number in range(SPECS):
        spec.write_bytes(fuzz.damaged_spec(texts, values, rng).encode("utf-8", "surrogatepass"))
        said = []
        try:
            loaded = load_spec(spec)
            plan(loaded)
            if number % LINT_EVERY == 0:
                lint(loaded)
            code = 0
        except SpecError as error:
            code, said = error.exit_code, str(error).split("\n")
        except Exception as error:
            raise AssertionError(f"spec {number} of seed {SEED}: {error!r}") from error
        assert all(PLACE.fullmatch(line) for line in said), f"spec {number}: {said}"
        assert sum(map(len, said)) < 100_000, f"spec {number}"
        seen[f"exit {code}"] += 1
        if number % CLI_EVERY == 0:
            assert run_cli(["check", str(spec)]) == code, f"spec {number}"
            out, err = capsys.readouterr()
            assert "Traceback" not in out + err
            assert "internal error" not in err
    assert seen["exit 2"] > SPECS / 2, "these damages are too mild to show anything"
    assert seen["exit 0"] > SPECS / 100, "nothing but noise: the parts behind the parser were never reached"


BOMBS = {
    "brackets": "[" * 100_000,
    "braces": "{a: " * 25_000,
    "dashes": "- " * 50_000,
    "one key many times": "a: 1\n" * 25_000,
    "many keys that are none": "[1]: 2\n" * 18_000,
    "many anchors": "a: &a [1]\n" * 12_000,
    "a long list": "checks: [" + "1," * 60_000 + "1]",
    "blank lines": "\n" * 130_000,
    "too long": "#" * 140_000,
}


@pytest.mark.parametrize("name", ["brackets", "braces", "dashes", "too long"])
def test_a_bomb_is_refused_at_once(name: str, spec: Path) -> None:
    """Guards the parser's time and stack, and a screen of a hundred thousand messages."""
    assert_refused(name, spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_every_bomb_is_refused(name: str, spec: Path) -> None:
    """Guards the same for those that take the parser seconds."""
    assert_refused(name, spec)


def assert_refused(name: str, spec: Path) -> None:
    """Refused, in at most a hundred lines and one."""
    spec.write_text(BOMBS[name], encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(spec)
    assert len(str(caught.value).split("\n")) <= 101


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Guards `harness check` on something that never ends."""
    import os

    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(SpecError, match="no regular file"):
        load_spec(pipe)


# ---- checkpoints ----------------------------------------------------------------------------------------------------

MICRO = replace(
    TINY,
    name="micro",
    num_hidden_layers=2,
    period=2,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    drafter_layers=2,
    drafter_intermediate_size=64,
)


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@functools.cache
def sound_target() -> Target:
    """The target that damaged drafters are held against."""
    return pair.load_pair(random_pair_dirs(geometry=MICRO).target).target


def use_target(folder: Path) -> None:
    """Load a target and run a few tokens."""
    target = pair.load_pair(folder).target
    caches = target.new_caches()
    target.logits(target.prefill([2, 9, 40], caches)[None])


def use_drafter(folder: Path) -> None:
    """Load a drafter and hold it against a sound target, as `load_pair` does."""
    checkpoint = open_checkpoint(folder)
    where = f"{checkpoint.name}/config.json"
    if config_role(checkpoint.config, where) != "drafter":
        return
    drafter = Drafter(
        checkpoint, parse_drafter_config(checkpoint.config, where), DispatchPolicy(), "cpu", torch.bfloat16
    )
    drafter.bind(sound_target())


def test_500_damaged_checkpoints_load_or_say_what_is_wrong(tmp_path: Path) -> None:
    """Guards the loader against downloads that broke, files that were edited, and configs of another model."""
    rng = random.Random(SEED)
    dirs = random_pair_dirs(geometry=MICRO)
    sources = {
        name: {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        for name, folder in (("target", dirs.target), ("drafter", dirs.drafter))
    }
    seen: Counter[str] = Counter()
    for number in range(CHECKPOINTS):
        role = "target" if rng.random() < 0.6 else "drafter"
        folder = tmp_path / role
        fuzz.restore(folder, sources[role])
        damage = rng.choice(fuzz.DAMAGES)
        damage(folder, rng)
        said = ""
        try:
            (use_target if role == "target" else use_drafter)(folder)
        except EngineError as error:
            said = str(error) or "(no word)\n"
        except Exception as error:
            raise AssertionError(f"{damage.__name__}, {role} {number} of seed {SEED}: {error!r}") from error
        seen["refused" if said else "loads"] += 1
        assert said.isprintable(), f"{damage.__name__} {number}: {said!r}"
        assert len(said) <= LONGEST_MESSAGE + 5, f"{damage.__name__} {number}"
        assert str(tmp_path) not in said, f"{damage.__name__} {number}: {said}"
    assert seen["refused"] > CHECKPOINTS / 2, "these damages are too mild to show anything"
    assert seen["loads"] > CHECKPOINTS / 20, "nothing but noise: what is behind the header was never reached"
