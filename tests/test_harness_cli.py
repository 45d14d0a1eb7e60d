"""The command line: verbs, exit codes, and that no error is ever a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from support_spec import HEAD, MATRIX, PARITY, PROBE, ROOT, write

from harness import run as run_module
from harness.cli import run_cli
from harness.cli.common import select
from harness.cli.progress import Bars, Json, Plain, Quiet
from harness.cli.run import duration
from harness.errors import UsageError
from harness.events import RunEvent
from harness.record.lines import CaseLine
from harness.spec import load_spec, plan

GOOD = HEAD + PROBE + PARITY + MATRIX


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository with one good spec, as working folder."""
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "locks").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "locks"))  # a measuring run elsewhere is not in the way
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = run_cli(arguments)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def case_line(name: str, outcome: str, verdict: str | None = None) -> CaseLine:
    """A case's last line."""
    return CaseLine.model_validate(
        {
            "case": f"specs/tiny.yaml::{name}",
            "kind": "k",
            "outcome": outcome,
            "reason": "why",
            "verdict": verdict,
            "seconds": 1,
        }
    )


def test_list_shows_ids_children_and_what_is_missing(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`list` is what a reader trusts before a long run."""
    code, out, _ = call(capsys, "list")
    assert code == 0
    assert out.startswith("specs/tiny.yaml: A tiny pair (10 cases, 4 child processes)\n")
    assert "would skip: needs checkpoint target" in out
    assert "  specs/tiny.yaml::attribution[stage:rowwise+multirow:0+large_d:unset]  [weights]\n" in out


def test_list_json_and_pytest_agree_on_ids(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One list of cases, everywhere."""
    code, out, _ = call(capsys, "list", "--json", "specs/tiny.yaml")
    data = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [entry["id"] for entry in data] == [case.id for case in plan(load_spec("specs/tiny.yaml"))]
    assert data[-1]["env"] == {"MLXCEL_QMV_MULTIROW": "0", "MLXCEL_SDPA_VECTOR_LARGE_D": "0"}


def test_list_verbose_shows_filled_in_defaults(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was not written must be readable somewhere."""
    _, out, _ = call(capsys, "list", "-v", "--only", "parity")
    assert "block_sizes:\n        - 4\n" in out.replace("      - 4", "        - 4")
    assert "name: text1" in out
    assert "::probe" not in out


def test_check_good_and_bad(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All problems at once on stderr, exit 2."""
    code, out, _ = call(capsys, "check")
    assert (code, out) == (0, "specs/tiny.yaml: ok, 3 checks, 10 cases\n")
    write(repo, GOOD.replace("title", "titel").replace("MULTIROW", "MULTIROWS"))
    code, out, err = call(capsys, "check", "specs/tiny.yaml")
    assert (code, out) == (2, "")
    assert [line.split(": ")[0] for line in err.splitlines()] == [
        f"specs/tiny.yaml:{x}" for x in ("1:1", "3:1", "14:23")
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["lst"], 2, "Did you mean 'list'?"),
        (["list", "--verbos"], 2, "Did you mean '--verbose'?"),
        (["run"], 2, "Missing argument 'SPEC'"),
        (["run", "nope.yaml"], 2, "nope.yaml:1:1: no such file"),
        (["list", "nope"], 2, "nope:1:1: no such file"),
        (["list", "--only", "zzz"], 2, "--only zzz: no case has that in its id"),
        (["run", "specs/tiny.yaml", "--only", "zzz"], 2, "--only zzz: no case has that in its id"),
        (["run", "specs/tiny.yaml", "--device", "gpu"], 2, "'gpu' is no device; use cpu, cuda or cuda:N"),
        (["run", "specs/tiny.yaml", "--require", "cuda,wheels"], 2, "--require wheels: known words: cuda, weights"),
        (["run", "specs/tiny.yaml", "--record", "x"], 2, "--record names what --resume finishes"),
        (["run", "specs/tiny.yaml", "--resume"], 2, "nothing to resume"),
        (["try", "specs/tiny.yaml"], 2, "give the prompt with --prompt TEXT or --file PATH"),
        (["try", "specs/tiny.yaml", "--prompt", " "], 2, "the prompt is empty"),
        (["try", "specs/tiny.yaml", "--file", "no.txt"], 2, "--file no.txt: No such file or directory"),
        (["try", "specs/tiny.yaml", "--prompt", "a", "--temperature", "0.7"], 2, "temperature 0.7 is refused"),
        (["try", "specs/tiny.yaml", "--prompt", "a", "--batch", "4"], 2, "batch 4 is refused"),
        (["try", "specs/tiny.yaml", "--prompt", "a", "--block-size", "9"], 2, "9 is not in the range 2<=x<=8"),
        (["try", "specs/tiny.yaml", "--prompt", "a"], 3, "needs checkpoint target"),
        (["new", "Bad Name"], 2, "'Bad Name' is no spec name"),
        (["new", "tiny"], 2, "specs/tiny.yaml is there already"),
        (["new", "ok", "--dir", "nowhere"], 2, "no folder nowhere"),
        (["new", "ok", "--target", "a: b"], 2, "--target 'a: b'"),
        (["new", "tin"], 2, "begins the name of tiny.yaml"),
        (["schema", "--dir", "nowhere"], 2, "no folder nowhere"),
        (["report", "nowhere"], 3, "nowhere"),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_use_is_one_message(
    repo: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    """Never a traceback, always the right exit code and what to do."""
    got, _, err = call(capsys, *arguments)
    assert words in err
    assert got == code


def test_unfinished_new_leaves_no_file(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused scaffold must not break the next `harness check`."""
    call(capsys, "new", "tin")
    assert [path.name for path in (repo / "specs").iterdir()] == ["tiny.yaml"]


def test_new_writes_a_spec_that_checks(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scaffold with an error in it teaches errors."""
    code, out, _ = call(capsys, "new", "my_pair", "--target", "big", "--drafter", "small")
    assert (code, out.split(";")[0]) == (0, "wrote specs/my_pair.yaml")
    code, out, _ = call(capsys, "check", "specs/my_pair.yaml")
    assert (code, out) == (0, "specs/my_pair.yaml: ok, 3 checks, 3 cases\n")


def test_schema_writes_and_checks(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drift exits 1 and names the file."""
    code, _, err = call(capsys, "schema", "--check")
    assert code == 1
    assert "specs/spec.schema.json is out of date; run `harness schema`" in err
    assert call(capsys, "schema")[0] == 0
    assert call(capsys, "schema", "--check") == (0, "", "")
    code, out, _ = call(capsys, "schema", "--print")
    assert json.loads(out)["title"] == "Spec"


def test_env_names_flags_and_machine(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table that a spec author looks things up in."""
    code, out, _ = call(capsys, "env", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["flags"]["MLXCEL_PREFILL_CHUNK"]["default"] == "2048"
    assert data["machine"]["host"]["cores"] >= 1
    assert "MLXCEL_QMV_MULTIROW" in call(capsys, "env")[1]


def test_stray_flags_warn_in_list_and_stop_a_run(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag in the shell never reaches a child; whoever set it would believe otherwise."""
    monkeypatch.setenv("MLXCEL_QMV_MULTIROW", "0")
    code, _, err = call(capsys, "list")
    assert code == 0
    assert err.startswith("warning: MLXCEL_QMV_MULTIROW set in the shell has no effect")
    code, _, err = call(capsys, "run", "specs/tiny.yaml", "--out", "out")
    assert code == 2
    assert "MLXCEL_QMV_MULTIROW=0 is set in the shell" in err
    assert not (repo / "out").exists()


def test_dry_run_counts_and_writes_nothing(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Children, time and its basis, before anything starts."""
    for name in ("target", "drafter"):
        (repo / "specs" / name).mkdir()
    code, out, _ = call(capsys, "run", "specs/tiny.yaml", "--dry-run")
    assert code == 0
    assert "10 cases in 4 child processes, about " in out
    assert "(basis: " in out
    code, out, _ = call(capsys, "run", "specs/tiny.yaml", "--dry-run", "--json", "--only", "probe")
    assert list(json.loads(out)["cases"]) == ["specs/tiny.yaml::probe"]
    assert sorted(path.name for path in repo.iterdir()) == ["locks", "pyproject.toml", "specs"]


@pytest.mark.parametrize(
    ("arguments", "code", "outcome"),
    [([], 0, "skipped"), (["--require", "weights"], 1, "fail")],
    ids=["skip", "require"],
)
def test_missing_checkpoint_skips_or_fails(
    repo: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, outcome: str
) -> None:
    """A lane that skips everything must not be green when it insists on weights."""
    got, out, _ = call(capsys, "run", "specs/tiny.yaml", "--only", "probe", "--out", "out", "--json", *arguments)
    case, end = (json.loads(line) for line in out.splitlines())
    assert (got, end["exit_code"], case["outcome"]) == (code, code, outcome)
    assert "needs checkpoint target" in case["reason"]
    assert Path(end["page"]).exists()


def test_second_run_of_a_day_keeps_the_first(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first record must survive."""
    pages = set()
    for _ in range(2):
        _, out, _ = call(capsys, "run", "specs/tiny.yaml", "--only", "probe", "--out", "out", "--quiet")
        pages.add(out.splitlines()[-1].removeprefix("record: "))
    assert len(pages) == 2
    assert all(Path(page).exists() for page in pages)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyError("oops"), 3, "internal error: KeyError: 'oops' (run `harness --traceback ...` to see where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["crash", "ctrl-c"],
)
def test_unexpected_errors(
    repo: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    """A bug in the harness is one line, and its traceback is there for who asks."""

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(run_module, "run_spec", fail)
    got, out, err = call(capsys, "run", "specs/tiny.yaml")
    assert (got, out, err.strip()) == (code, "", words)
    run_cli(["--traceback", "run", "specs/tiny.yaml"])
    assert ("Traceback" in capsys.readouterr().err) == (code == 3)


def test_interrupted_run_says_how_to_finish(
    repo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C keeps the record; the next command must be on the screen."""
    outcome = SimpleNamespace(
        cases=(case_line("probe", "pass"),), exit_code=130, page=Path("out/x.md"), interrupted=True, failed=()
    )
    monkeypatch.setattr(run_module, "run_spec", lambda *args: outcome)
    code, out, err = call(capsys, "run", "specs/tiny.yaml")
    assert code == 130
    assert out == "1 cases: 1 pass\nrecord: out/x.md\n"
    assert "finish it with `harness run specs/tiny.yaml --resume`" in err


def test_only_prefers_the_exact_case() -> None:
    """`--only parity` must not also run parity-past-window."""
    cases = plan(load_spec(ROOT / "specs" / "gemma4_nano.yaml"))
    assert [case.name for case in select(cases, ["parity"])] == ["parity"]
    assert {case.kind for case in select(cases, ["multirow:0", "probe"])} == {"attribution", "exactness_probe"}
    with pytest.raises(UsageError):
        select(cases, ["parity", "zzz"])


def test_watchers(capsys: pytest.CaptureFixture[str]) -> None:
    """Each shows a bad end; a reason with brackets must not be eaten as markup."""
    line = case_line("attribution[stage:base]", "fail", "slower").model_copy(update={"reason": "[bold] differs"})
    events = (
        RunEvent("case_start", "claim", line.case, 0, 2),
        RunEvent("child", "starting child default", line.case),
        RunEvent("progress", "walk", line.case, 3, 9),
        RunEvent("note", "MTP declined"),
        RunEvent("case_end", "why", line.case, 1, 2, line),
    )
    shown = {}
    for watch in (Quiet(), Json(), Plain(), Bars()):
        for event in events:
            watch.see(event)
        out, err = capsys.readouterr()
        shown[type(watch).__name__] = out + err
    assert shown["Quiet"] == "specs/tiny.yaml::attribution[stage:base]: fail: [bold] differs\n"
    assert json.loads(shown["Json"])["outcome"] == "fail"
    assert "[1/2] attribution[stage:base]\n" in shown["Plain"]
    assert "fail (slower): [bold] differs (1.0 s)" in shown["Plain"]
    assert "attribution[stage:base]: [bold] differs" in shown["Bars"]


@pytest.mark.parametrize(("seconds", "text"), [(4.4, "4 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_duration(seconds: float, text: str) -> None:
    """Hours in seconds are not read."""
    assert duration(seconds) == text


def test_module_entry_point_and_import_weight() -> None:
    """`python -m harness list` must work, and must not load torch or numpy."""
    code = (
        "import sys, harness.cli as c; rc = c.run_cli(['list']); "
        "sys.exit(rc or [m for m in ('torch', 'numpy', 'matplotlib', 'scipy', 'rich') if m in sys.modules] or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "specs/gemma4_nano.yaml::probe" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "harness", "-h"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "Usage: harness" in done.stdout
