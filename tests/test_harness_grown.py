"""`otherwise: {grow: ...}`: when a pair is grown, where it is kept, what a reader is told. Nothing large is built.

The tool is a scripted one but for one test, which grows the small geometry on the CPU.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support_harness import ROOT, SPEC_TEXT, gone, worker, write_spec
from support_record import record_of, run_lines

from harness import grown, provenance
from harness.context import RunContext
from harness.errors import GateError, RunError
from harness.grown import Grower
from harness.needs import Needs
from harness.record.model import Record
from harness.record.sections.context import host, not_covered
from harness.record.sections.summary import summary
from harness.run import RunOptions, dry_run, run_spec
from harness.spec import Case, load_spec, plan
from harness.spec.resolve import growable, missing_checkpoints, pair_folders

GROWING = SPEC_TEXT.replace("path: target}", "path: real-target, otherwise: {grow: 12b}}").replace(
    "path: drafter}", "path: real-drafter, otherwise: {grow: 12b}}"
)
GPU = {"cuda": True, "reason": "", "gpus": [{"name": "GPU", "compute_capability": "9.0", "free_gib": 100.0}]}
TOOL = """
import pathlib, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, name = pathlib.Path(words["--out"]), words["--geometry"]
with open({count!r}, "a") as file:
    file.write("built\\n")
{middle}
for part in ("", "-assistant"):
    folder = out / f"gemma4-{{name}}-grown-it{{part}}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{{}}")
print("100 %", flush=True)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; disk enough for anything."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(grown, "NEEDED_GB", {"12b": 0.001})
    return tmp_path / "cache"


def builds(folder: Path) -> int:
    """How often the scripted tool ran."""
    file = folder / "count.txt"
    return len(file.read_text(encoding="ascii").splitlines()) if file.exists() else 0


def tool(folder: Path, middle: str = "") -> Grower:
    """A grower whose tool writes two empty folders; `middle` runs before that."""
    text = TOOL.format(count=str(folder / "count.txt"), middle=middle)
    return Grower(command=(sys.executable, "-c", text))


def cases_of(tmp_path: Path, text: str = GROWING) -> tuple[Case, ...]:
    """The plan of a spec whose pair is nowhere."""
    return plan(load_spec(write_spec(tmp_path, text)))


def context(tmp_path: Path, machine: dict[str, Any] = GPU, **options: Any) -> RunContext:
    """A context with scripted children on a machine that says it has a GPU."""
    made = RunContext(
        log_dir=tmp_path / "logs",
        command=worker(tmp_path),
        lock_dir=tmp_path,
        job_timeout_s=20,
        **{"device": "cuda", "grower": tool(tmp_path), **options},
    )
    made._needs._machine = machine
    return made


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_a_real_tool_fills_the_cache_once(tmp_path: Path, cache: Path) -> None:
    """The whole way with the small geometry on the CPU: built in a child, found again, not built again."""
    said: list[str] = []
    log = tmp_path / "logs" / "grow.log"
    assert grown.existing("small") is None
    folders = Grower().grow("small", "cpu", log, said.append)
    assert [folder.name for folder in folders] == ["gemma4-small-grown-it", "gemma4-small-grown-it-assistant"]
    assert all((folder / "config.json").is_file() for folder in folders)
    assert folders[0].is_relative_to(cache / "grown")
    assert said[0] == "growing the small pair from nano (not Google's weights) on cpu"
    assert "target 50 % of" in " ".join(said)
    never = Grower(command=(sys.executable, "-c", "raise SystemExit(9)"))
    assert never.grow("small", "cpu", log, said.append) == folders == grown.existing("small")


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        ("sys.exit('grow_pair.py: no room')", "failed: grow_pair.py: no room; see logs/grow.log"),
        ("import os; os.kill(os.getpid(), 9)", "failed: SIGKILL"),
        ("sys.exit(0)", "ended well and left no pair"),
    ],
)
def test_a_tool_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path, middle: str, expected: str) -> None:
    """A half-written pair must not be found by the next run."""
    with pytest.raises(RunError, match=expected) as caught:
        tool(tmp_path, middle).grow("12b", "cuda", tmp_path / "logs" / "grow.log", lambda _: None)
    assert "\n" not in str(caught.value)
    assert grown.existing("12b") is None


def test_an_interrupt_ends_the_tool(tmp_path: Path) -> None:
    """No orphan: whatever ends the parent's wait ends the tool's whole group."""
    pids: list[int] = []

    def stop(text: str) -> None:
        if text.startswith("growing 12b: pid"):
            pids.append(int(text.rpartition(" ")[2]))
            raise KeyboardInterrupt

    grower = tool(tmp_path, "import os; print('pid', os.getpid(), flush=True); time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        grower.grow("12b", "cuda", tmp_path / "grow.log", stop)
    assert gone(pids[0])
    assert grown.existing("12b") is None


def test_the_second_of_two_processes_waits_and_takes_the_firsts_pair(tmp_path: Path, cache: Path) -> None:
    """The lock: two runs that both miss the pair build it once."""
    said: list[str] = []
    log = tmp_path / "grow.log"
    first = threading.Thread(target=lambda: tool(tmp_path, "time.sleep(1)").grow("12b", "cuda", log, lambda _: None))
    first.start()
    deadline = time.monotonic() + 10
    while builds(tmp_path) == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    folders = tool(tmp_path).grow("12b", "cuda", log, said.append)
    first.join(20)
    assert folders == grown.existing("12b")
    assert builds(tmp_path) == 1
    assert said == ["another process is growing the 12b pair: waiting for it"]
    with (
        FileLock(cache / "grown" / "31b.lock"),
        pytest.raises(GateError, match="has been growing the 31b pair for 0 s"),
    ):
        Grower(lock_timeout_s=0.1).grow("31b", "cuda", log, said.append)


def test_the_cache_follows_source_and_nano_and_keeps_one_build(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of other source, other weights or another seed is another pair; the old one makes room."""
    tree = tmp_path / "tree"
    for folder in ("tools/grow", "engine", "specs/checkpoints"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tools" / "grow_pair.py", tree / "tools")
    monkeypatch.setattr(grown, "_ROOT", tree)
    monkeypatch.setattr(grown, "_NANO", tuple(tree / folder.relative_to(ROOT) for folder in grown._NANO))

    def fresh() -> str:
        grown.build_hash.cache_clear()
        return grown.build_hash("12b")

    seen = [fresh()]
    assert fresh() == seen[0] != grown.build_hash("12b", 1) != grown.build_hash("31b")
    old = tool(tmp_path).grow("12b", "cuda", tmp_path / "grow.log", lambda _: None)
    (grown._NANO[0] / "README.md").write_text("other words", encoding="utf-8")
    assert fresh() == seen[0]
    changes: tuple[Path, ...] = (
        tree / "tools" / "grow" / "noise.py",
        tree / "tools" / "grow_pair.py",
        grown._NANO[1] / "model-00001-of-00001.safetensors",
        grown._NANO[0] / "tokenizer.json",
    )
    for file in changes:
        file.write_bytes(file.read_bytes() + b"\n")
        assert fresh() not in seen
        seen.append(fresh())
    assert grown.existing("12b") is None
    tool(tmp_path).grow("12b", "cuda", tmp_path / "grow.log", lambda _: None)
    assert not old[0].exists()
    assert len(list((cache / "grown").glob("12b-*"))) == 1
    grown.build_hash.cache_clear()


def test_an_unusable_cache_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the folder should be."""
    (tmp_path / "file").write_text("", encoding="ascii")
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "file"))
    with pytest.raises(GateError, match=r"cannot write under \$HARNESS_CACHE"):
        tool(tmp_path).grow("12b", "cuda", tmp_path / "grow.log", lambda _: None)


def test_cache_folder_comes_from_the_variable_or_the_home() -> None:
    """Empty counts as not set."""
    assert grown.cache_root({"HARNESS_CACHE": "/x"}) == Path("/x/grown")
    assert grown.cache_root({"HARNESS_CACHE": ""}) == Path("~/.cache/mtp-harness/grown").expanduser()


# ---- when a run grows -----------------------------------------------------------------------------------------------


def test_a_missing_pair_is_grown_where_there_is_a_gpu(tmp_path: Path) -> None:
    """Built once for all cases, and the children load the grown folders."""
    cases = cases_of(tmp_path)
    events: list[str] = []
    with context(tmp_path, on_event=lambda event: events.append(event.text)) as ctx:
        assert ctx.run(cases[0]).outcome == "pass"
        assert ctx.run(cases[1]).outcome != "skipped"
        assert "gemma4-12b-grown-it" in ctx.child_key(cases[0], {})[1]
        assert "gemma4-12b-grown-it-assistant" in ctx.child_key(cases[0], {})[2]
    assert builds(tmp_path) == 1
    assert "growing the 12b pair from nano (not Google's weights) on cuda" in events
    assert missing_checkpoints(cases[0].pair, cases[0].folder, None) == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"device": "cpu"}, "a machine with CUDA has it grown to 12b geometry from nano"),
        ({"machine": {"cuda": False, "reason": "no driver", "gpus": []}}, "no driver"),
        ({"require": ("weights",)}, "(--require weights)"),
        ({"grower": dataclasses.replace(Grower(), command=("none",))}, "cannot start"),
    ],
)
def test_a_pair_is_not_grown_without_a_gpu_or_where_weights_are_required(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    """Skipped with the reason, or failed; nothing is built."""
    spec = GROWING.replace("checks:", "requires: {cuda: true}\nchecks:") if "machine" in change else GROWING
    with context(tmp_path, **change) as ctx:
        line = ctx.run(cases_of(tmp_path, spec)[0])
    wanted = {"require": "fail", "grower": "error"}.get(next(iter(change)), "skipped")
    assert line.outcome == wanted, line.reason
    assert expected in line.reason
    assert builds(tmp_path) == 0


def test_required_weights_are_real_ones_even_beside_a_grown_pair(tmp_path: Path) -> None:
    """`--require weights` ignores the cache too."""
    tool(tmp_path).grow("12b", "cuda", tmp_path / "grow.log", lambda _: None)
    case = cases_of(tmp_path)[0]
    with context(tmp_path, require=("weights",)) as ctx:
        assert ctx.run(case).outcome == "fail"
    assert missing_checkpoints(case.pair, case.folder, None) == ()
    assert len(missing_checkpoints(case.pair, case.folder, None, real=True)) == 2


def test_too_little_disk_is_a_skip_with_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before anything is written."""
    monkeypatch.setattr(grown, "NEEDED_GB", {"12b": 1e9})
    with context(tmp_path) as ctx:
        line = ctx.run(cases_of(tmp_path)[0])
    assert line.outcome == "skipped"
    assert "of disk under $HARNESS_CACHE" in line.reason
    assert "GB are free" in line.reason


def test_a_failed_build_is_tried_once(tmp_path: Path) -> None:
    """Every case says why; none of them waits for another attempt."""
    cases = cases_of(tmp_path)
    with context(tmp_path, grower=tool(tmp_path, "sys.exit('grow_pair.py: broken')")) as ctx:
        lines = [ctx.run(case) for case in cases[:3]]
    assert {line.outcome for line in lines} == {"error"}
    assert all("grow_pair.py: broken" in line.reason for line in lines)
    assert builds(tmp_path) == 1


def test_a_real_checkpoint_gets_no_grown_mate(tmp_path: Path) -> None:
    """A real target with a grown drafter would be neither; and two refs must ask for the same geometry."""
    case = cases_of(tmp_path)[0]
    assert case.pair is not None
    assert growable(case.pair, case.folder, None) == "12b"
    (case.folder / "real-target").mkdir()
    assert growable(case.pair, case.folder, None) is None
    with context(tmp_path) as ctx:
        line = ctx.run(case)
    assert line.outcome == "skipped"
    assert "real-drafter" in line.reason
    assert builds(tmp_path) == 0
    (case.folder / "real-target").rmdir()
    other = plan(load_spec(write_spec(tmp_path, GROWING.replace("grow: 12b}", "grow: 31b}", 1))))[0]
    assert growable(other.pair, other.folder, None) is None


# ---- what a reader is told ------------------------------------------------------------------------------------------


def test_env_names_the_grown_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair is there before env.json is written, so a resume finds the same files; its name says what it is."""
    loaded = load_spec(write_spec(tmp_path, GROWING))
    monkeypatch.setattr(Needs, "machine", lambda _: GPU)
    monkeypatch.setattr("harness.context.Grower", lambda: tool(tmp_path))
    options = RunOptions(device="cuda", out=tmp_path / "out", lock_dir=tmp_path, worker=worker(tmp_path), command="x")
    run_spec(loaded, options)
    env = provenance.environment(loaded, plan(loaded), device="cuda", command="x")
    assert env["checkpoints"]["target"]["name"] == "gemma4-12b-grown-it"
    assert env["checkpoints"]["drafter"]["name"] == "gemma4-12b-grown-it-assistant"
    written = next((tmp_path / "out" / "data").glob("*/env.json")).read_text(encoding="utf-8")
    assert "gemma4-12b-grown-it-assistant" in written
    assert str(tmp_path) not in written


def test_a_record_says_that_the_pair_is_grown() -> None:
    """On the first screen, beside the target and among what is not covered."""
    record = record_of(run_lines())
    assert "Google" not in summary(record, "stem") + host(record, "stem") + not_covered(record, "stem")
    target = {**record.children[0].target, "origin": "Grown from nano, not Google's weights."}
    children = tuple(child.model_copy(update={"target": target}) for child in record.children)
    told: Record = record.model_copy(update={"children": children})
    parts: tuple[Callable[[Record, str], str], ...] = (summary, host, not_covered)
    for part in parts:
        assert "rown from nano, not Google's weights" in part(told, "stem")


def test_harness_without_a_cache_hashes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing specs stays fast: without a cache folder no checkpoint is read."""
    monkeypatch.setattr(grown, "build_hash", lambda *_: pytest.fail("hashed"))
    case = cases_of(tmp_path)[0]
    assert case.pair is not None
    assert pair_folders(case.pair, case.folder, None) == (None, None)


def test_a_dry_run_says_that_the_pair_is_grown_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "every case would be skipped" for a run that would build the pair and measure it."""
    loaded = load_spec(ROOT / "specs" / "gemma4_12b.yaml")
    options = RunOptions(out=tmp_path / "out")
    plan = dry_run(loaded, options)
    assert "the pair is not here and is grown first" in plan.basis
    assert plan.children > 0
    assert plan.seconds > sum(plan.cases.values())
    assert "every case would be skipped" in dry_run(loaded, dataclasses.replace(options, device="cpu")).basis
    demanded = dry_run(loaded, dataclasses.replace(options, require=("weights",)))
    assert "every case would fail: needs checkpoint" in demanded.basis
    monkeypatch.setattr(grown, "NEEDED_GB", {"12b": 1e9})
    assert "growing it takes 1e+09 GB of disk" in dry_run(loaded, options).basis
