"""`harness compare` and `harness list --history` as commands: pages, JSON, exit codes, records over time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support_compare import KERNELS, NANO, OUT, against, base, drop, pair

from harness.cli import run_cli
from harness.record.compare_load import load_side
from harness.record.compare_page import as_json, headline, markdown
from harness.record.history import headline_figure, history
from harness.record.store import RecordPaths

# ---- pages and commands ----------------------------------------------------------------------------------------------


def test_the_page_leads_with_the_answer_and_takes_cells_together() -> None:
    """The headline, both runs, the checks, then only what is not the same; with `every` all of it."""
    found = against("slower arm")
    short, whole = markdown(found), markdown(found, every=True)
    assert short.startswith("# Regressed: 2 regressed, 0 improved, 0 not comparable, ")
    assert "## Same" not in short
    assert short.count("\n| decode |") == 1 + len(found.of("regressed"))
    assert whole.count("\n| ") > len(found.rows)
    other = against("other device")
    assert "| attribution (16 cases) |" in markdown(other)
    gone = pair(NANO, drop(lambda x: "::attribution[" in getattr(x, "case", "")))
    assert "Held in A, without a result in B: attribution (16 cases). " in markdown(gone)
    assert headline(other) == "Nothing regressed: 0 regressed, 0 improved, 23 not comparable, 0 same"


def test_json_has_every_row_and_the_counts() -> None:
    """For programs: nothing is taken together, and the numbers agree."""
    found = against("skipped")
    data = json.loads(as_json(found))
    assert len(data["rows"]) == len(found.rows) == sum(data["counts"].values())
    assert data["lost"] == ["decode"]
    assert data["a"]["record"] == NANO.stem
    assert {"check", "case", "aspect", "figure", "status", "reason", "a", "b", "lost"} == set(data["rows"][0])


def _copy(folder: Path, paths: RecordPaths) -> Path:
    """A committed record in a folder of its own."""
    shutil.copytree(paths.data, folder / "data" / paths.stem)
    shutil.copy(paths.page, folder / paths.page.name)
    return folder / "data" / paths.stem


def test_the_command_takes_pages_folders_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page against a data folder; a lone record.json; a changed record exits 1."""
    data = _copy(tmp_path, KERNELS)
    assert run_cli(["compare", str(KERNELS.page), str(data)]) == 0
    assert capsys.readouterr().out.startswith("# Nothing regressed: 0 regressed, 0 improved, 0 not comparable, ")
    alone = tmp_path / "kernels.json"
    shutil.copy(KERNELS.record, alone)
    assert run_cli(["compare", str(alone), str(data / "record.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["a"]["record"] == "kernels"
    text = (data / "runs.jsonl").read_text(encoding="utf-8")
    (data / "runs.jsonl").write_text(text.replace('"outcome":"pass"', '"outcome":"fail"', 1), encoding="utf-8")
    assert run_cli(["compare", str(KERNELS.data), str(data), "--markdown"]) == 1
    assert "# Regressed: 1 regressed" in capsys.readouterr().out
    assert load_side(data).stem == KERNELS.stem


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nope.md", "nope.md"], "no such record"),
        ([str(NANO.page), str(KERNELS.page)], "share no case"),
        ([str(NANO.page), str(OUT / "README.md")], "no raw lines"),
        ([str(KERNELS.page), str(KERNELS.page), "--json", "--markdown"], "exclude each other"),
        ([str(NANO.page)], "Missing argument 'B'"),
    ],
)
def test_what_cannot_be_compared_at_all_is_usage(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, one message."""
    assert run_cli(["compare", *arguments]) == 2
    assert part in capsys.readouterr().err


def test_a_json_that_is_no_record_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another program's file, or a cut one."""
    for text in ("{}", "[", '{"schema_version": 1}'):
        (tmp_path / "x.json").write_text(text, encoding="utf-8")
        assert run_cli(["compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
        assert "not a record.json of this format" in capsys.readouterr().err


# ---- history ---------------------------------------------------------------------------------------------------------


def test_history_lists_a_specs_records_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outcome, headline figure and commit of each; of other specs none; an unreadable one is named, never skipped."""
    _copy(tmp_path, NANO)
    _copy(tmp_path, KERNELS)
    for stem, started in (("gemma4-nano-cpu-2026-12-01", "2026-12-01T00:00:00Z"), ("gemma4-nano-cpu-2026-12-02", "")):
        folder = tmp_path / "data" / stem
        shutil.copytree(NANO.data, folder)
        stored = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        stored |= {"started_utc": started, "tokens_identical": False}
        (folder / "record.json").write_text(json.dumps(stored) if started else "{", encoding="utf-8")
    entries = history(tmp_path, "gemma4_nano")
    assert [entry.stem[-10:] for entry in entries] == ["2026-12-01", "2026-11-30", "2026-12-02"]
    assert len(history(tmp_path)) == 4
    assert run_cli(["list", "--history", "specs/gemma4_nano.yaml", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gemma4_nano: 3 records"
    assert "none: tokens differ" in lines[3]
    assert "+63.0% to +118.8% (faster, 1.92x) | bdd549d65770 (clean)" in lines[4]
    assert "not rendered: run `harness report`" in lines[5]
    assert run_cli(["list", "--history", "other", "--out", str(tmp_path)]) == 0
    assert "no records of other" in capsys.readouterr().out
    assert run_cli(["list", "--history", "kernels_gemma4", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "fail, partial"


def test_history_says_whether_the_spec_is_still_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure of an older spec stands beside today's only with a mark."""
    _copy(tmp_path, NANO)
    spec = tmp_path / "gemma4_nano.yaml"
    for text, part in ((NANO.spec.read_bytes(), "(as it is now)"), (b"other", "(changed since)")):
        spec.write_bytes(text)
        assert run_cli(["list", "--history", str(spec), "--out", str(tmp_path)]) == 0
        assert part in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--history", "--only", "x"], ["--history", "-v"], ["--out", "x"], ["--history", "--out", "no/such/folder"]],
)
def test_history_refuses_what_does_not_go_with_it(arguments: list[str]) -> None:
    """Exit 2, not a list of something else."""
    assert run_cli(["list", *arguments]) == 2


def test_the_headline_figure_of_kernels_is_about_products() -> None:
    """Attention's rows cost more by design; the page's title is about products too."""
    assert headline_figure(base(KERNELS).record) == (
        "0.17 to 0.91 of the stream over 28 shapes, 8 rows in 1.04x at most"
    )
    empty = base(KERNELS).record.model_copy(update={"cases": ()})
    assert headline_figure(empty) == "none: not measured"
