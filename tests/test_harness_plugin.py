"""The pytest plugin: what is collected, how outcomes map, and that collecting is fast and loads no engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support_spec import HEAD, MATRIX, PARITY, PROBE, ROOT, write

from harness.spec import load_spec, plan

pytest_plugins = ["pytester"]

CONFTEST = """\
import contextlib
import pytest
from harness.record.lines import CaseLine, DecisionLine, Divergence

pytest_plugins = ["harness.pytest_plugin"]
OUTCOMES = {outcomes}


class Context:
    def __init__(self, folder):
        self.lines, self.log_dir = [], folder

    def of(self, loaded):
        return self

    def lease(self, case):
        return contextlib.nullcontext()

    def run(self, case):
        outcome = OUTCOMES.get(case.name, "pass")
        if outcome == "crash":
            raise ZeroDivisionError("a bug")
        divergence = Divergence(
            layer=3, layer_kind="sliding", op="q_rope", position=2, differing_bytes=12, total_bytes=512
        )
        self.lines.append(
            DecisionLine(
                case=case.id, engaged=False, inexact=False, reason="r", log_line="l", first_divergence=divergence
            )
        )
        return CaseLine(case=case.id, kind=case.kind, outcome=outcome, reason="because", seconds=1.0, log="child.log")


@pytest.fixture(scope="session")
def spec_contexts(tmp_path_factory):
    return Context(tmp_path_factory.mktemp("logs"))
"""


def prepare(pytester: pytest.Pytester, checks: str, outcomes: dict[str, str] | None = None) -> Path:
    """A small repository whose cases end as scripted."""
    pytester.makeconftest(CONFTEST.replace("{outcomes}", repr(outcomes or {})))
    markers = ", ".join(f'"{mark}: of a spec"' for mark in ("gpu", "slow", "bench", "weights"))
    (pytester.path / "pyproject.toml").write_text(
        f'[tool.pytest]\nstrict = true\naddopts = ["-ra"]\nmarkers = [{markers}]\n'
    )
    return write(pytester.path, HEAD + checks)


def test_items_have_the_plan_ids(pytester: pytest.Pytester) -> None:
    """A second list of cases would drift from the first."""
    path = prepare(pytester, PROBE + MATRIX)
    result = pytester.runpytest_inprocess("--collect-only", "-q", "specs")
    assert [line for line in result.outlines if "::" in line] == [case.id for case in plan(load_spec(path))]


def test_yaml_elsewhere_is_ignored_unless_named(pytester: pytest.Pytester) -> None:
    """A folder of stray YAML is no spec; a file named on the command line is."""
    prepare(pytester, PROBE)
    other = pytester.mkdir("other") / "mine.yaml"
    other.write_text(HEAD.replace("name: tiny", "name: mine") + PROBE)
    (pytester.path / "specs" / "deeper").mkdir()
    (pytester.path / "specs" / "deeper" / "x.yaml").write_text("nonsense")
    assert pytester.runpytest_inprocess("-q", ".").parseoutcomes() == {"passed": 1}
    assert pytester.runpytest_inprocess("-q", "other/mine.yaml").parseoutcomes() == {"passed": 1}


def test_k_and_m_select(pytester: pytest.Pytester) -> None:
    """The words of the ids and the marks must work as documented."""
    arm = "  - {kind: throughput, id: t, arms: [{name: mtp}], repeats: 1, max_tokens: 9}\n"
    prepare(pytester, PROBE + PARITY + MATRIX + arm)
    for words, count in (
        (("-k", "tiny"), 11),
        (("-k", "multirow:0"), 4),
        (("-k", "attribution[stage:base+multirow:0+large_d:0]"), 1),
        (("-m", "not slow"), 10),
        (("-m", "bench"), 1),
        (("specs/tiny.yaml::attribution[stage:base+multirow:unset+large_d:0]",), 1),
    ):
        assert pytester.runpytest_inprocess("-q", *words).parseoutcomes()["passed"] == count, words


def test_outcomes_map_to_pytest(pytester: pytest.Pytester) -> None:
    """A decline that nobody declared must fail; one that was asked for must not."""
    outcomes = {
        "probe": "declined",
        "parity": "unresolved",
        "attribution[stage:base+multirow:unset+large_d:unset]": "declined",
        "attribution[stage:base+multirow:unset+large_d:0]": "skipped",
        "attribution[stage:rowwise+multirow:unset+large_d:unset]": "declined",
        "attribution[stage:rowwise+multirow:0+large_d:0]": "error",
    }
    prepare(pytester, PROBE + PARITY + MATRIX, outcomes)
    result = pytester.runpytest_inprocess("specs", "-v")
    assert result.parseoutcomes() == {"passed": 6, "failed": 3, "skipped": 1}
    for name in ("tiny.yaml::probe FAILED", "large_d:0] SKIPPED", "tiny.yaml::parity PASSED"):
        result.stdout.fnmatch_lines([f"*{name.replace('[', '[[]')}*"])
    result.stdout.fnmatch_lines(["SKIPPED*tiny.yaml*because"])


def test_skips_for_the_same_reason_are_one_line_under_their_spec(pytester: pytest.Pytester) -> None:
    """A hundred lines of the same reason hide the one that is new; the spec, the number and the reason stay."""
    outcomes = {
        f"attribution[stage:{stage}+multirow:{rows}+large_d:unset]": "skipped"
        for stage in ("base", "rowwise")
        for rows in ("unset", "0")
    }
    prepare(pytester, PROBE + MATRIX, outcomes)
    result = pytester.runpytest_inprocess("specs")
    assert result.parseoutcomes()["skipped"] == 4
    assert [line for line in result.outlines if line.startswith("SKIPPED")] == [
        "SKIPPED [4] specs/tiny.yaml:1: because"
    ]


def test_two_workers_find_the_same(pytester: pytest.Pytester) -> None:
    """`make test` runs with two: every worker has a context of its own, outcomes and failure texts arrive unchanged."""
    outcomes = {"probe": "fail", "parity": "declined", "attribution[stage:rowwise+multirow:0+large_d:0]": "skipped"}
    prepare(pytester, PROBE + PARITY + MATRIX, outcomes)
    write(pytester.path, HEAD.replace("name: tiny", "name: second") + PROBE, "second")
    alone, both = (
        pytester.runpytest_inprocess("-q", "specs", *words)
        for words in (("-p", "no:xdist"), ("-n", "2", "--dist", "loadfile"))
    )
    assert both.parseoutcomes() == alone.parseoutcomes()
    assert both.parseoutcomes()["failed"] == 3
    kept = ("SKIPPED", "FAILED", "specs/", "  claim", "  reason", "  rerun")
    found = [sorted(line for line in result.outlines if line.startswith(kept)) for result in (alone, both)]
    assert found[0] == found[1]


def test_failure_text_has_all_that_a_reader_needs(pytester: pytest.Pytester) -> None:
    """Place, claim, reason, first divergence, log and the command; no traceback."""
    prepare(pytester, PROBE, {"probe": "fail"})
    result = pytester.runpytest_inprocess("specs")
    text = result.stdout.str()
    for words in (
        "specs/tiny.yaml:8: probe: fail",
        "claim: block equals chain on every draw; the log says engaged",
        "reason: because",
        "first divergence: layer 3 (sliding) q_rope at position 2, 12 of 512 bytes differ",
        "/child.log",
        "rerun: harness run specs/tiny.yaml --only 'probe'",
    ):
        assert words in text
    assert "Traceback" not in text
    assert "pytest_plugin.py" not in text


def test_a_bug_keeps_its_traceback(pytester: pytest.Pytester) -> None:
    """Hiding an internal error's place would make it unfindable."""
    prepare(pytester, PROBE, {"probe": "crash"})
    pytester.runpytest_inprocess("specs").stdout.fnmatch_lines(["*ZeroDivisionError: a bug*"])


def test_skip_and_xfail_of_the_spec(pytester: pytest.Pytester) -> None:
    """Reasons must show; an unexpected pass fails; an error is no expected failure."""
    known = "xfail: {reason: known here, issue: '#7'}"
    checks = "".join(
        f"  - {{kind: exactness_probe, id: {name}, {extra}}}\n"
        for name, extra in (("off", "skip: not today"), ("red", known), ("green", known), ("broken", known))
    )
    prepare(pytester, checks, {"red": "fail", "broken": "error"})
    result = pytester.runpytest_inprocess("specs")
    assert result.parseoutcomes() == {"skipped": 1, "xfailed": 1, "failed": 2}
    result.stdout.fnmatch_lines(["SKIPPED*not today*", "XFAIL*red*known here (#7)*"])


def test_bad_spec_is_every_problem_and_exit_2(pytester: pytest.Pytester) -> None:
    """pytest's own way is thirty lines of traceback for the first problem."""
    prepare(pytester, PROBE.replace("probe}", "probe, drawz: [8]}") + "  - {kind: nope, id: x}\n")
    result = pytester.runpytest_inprocess("specs")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["*specs/tiny.yaml:8:40: unknown key 'drawz'*", "*specs/tiny.yaml:9:12: unknown check*"]
    )
    assert "Traceback" not in result.stdout.str()


def test_require_refuses_an_unknown_word(pytester: pytest.Pytester) -> None:
    """`--require weight` would require nothing."""
    prepare(pytester, PROBE)
    result = pytester.runpytest_inprocess("specs", "--require", "weight")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--require weight: known words: cuda, weights, memory*"])


@pytest.mark.parametrize(("words", "outcome"), [((), "skipped"), (("--require", "weights"), "failed")])
def test_missing_weights_skip_or_fail(pytester: pytest.Pytester, words: tuple[str, ...], outcome: str) -> None:
    """The real context, no scripted one: a lane without weights must not be green when it insists."""
    prepare(pytester, PROBE)
    pytester.makeconftest('pytest_plugins = ["harness.pytest_plugin"]\n')
    result = pytester.runpytest_inprocess("specs", "-rsf", *words)
    assert result.parseoutcomes() == {outcome: 1}
    assert "needs checkpoint target beside the spec or under $HARNESS_MODELS" in result.stdout.str()


# ---- the real specs, in processes of their own -------------------------------------------------------------------

BLOCK = """\
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "kernels", "safetensors", "tokenizers", "transformers", "scipy"):
            raise ImportError(f"{name} was imported while collecting")

sys.meta_path.insert(0, Blocker())
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def collect(
    *arguments: str, code: str | None = None, folder: Path = ROOT
) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Seconds and result of a pytest process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "pytest"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return time.perf_counter() - start, done


def test_collecting_never_imports_torch() -> None:
    """Importing torch takes seconds and may start CUDA in the parent."""
    _, done = collect("specs", code=BLOCK)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = [line for line in done.stdout.splitlines() if "::" in line]
    specs = sorted((ROOT / "specs").glob("*.yaml"))
    assert listed == [case.id for path in specs for case in plan(load_spec(path))]


def test_collecting_is_fast(tmp_path: Path) -> None:
    """Under 2 s; on a machine where a bare pytest takes longer than that, at most 1.5 s on top of it."""
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = ("--collect-only", "-q", "-p", "no:cacheprovider")
    found = []
    for _ in range(3):  # another process may take this one's core for a while
        bare = collect(*arguments, "-c", os.devnull, ".", folder=empty)[0]
        took = collect(*arguments, "specs")[0]
        if took < max(2.0, bare + 1.5):
            return
        found.append(f"collecting took {took:.2f} s, a bare pytest {bare:.2f} s")
    pytest.fail("; ".join(found))


def test_real_weights_specs_fail_with_reasons_under_require(tmp_path: Path) -> None:
    """The weights' absence is a failure with its reason under --require; without, this suite itself shows the skips."""
    common = ("-k", "gemma4_12b and (probe or geometry)", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}")
    assert "HARNESS_MODELS" not in os.environ
    _, done = collect(*common, "--require", "weights", "specs")
    assert done.returncode == 1, done.stdout
    assert "2 failed" in done.stdout
    assert "needs checkpoint gemma-4-12b-it-4bit" in done.stdout
    assert "(--require weights)" in done.stdout
