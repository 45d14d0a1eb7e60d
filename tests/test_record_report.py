"""`harness report`: everything that can be recomputed is, and whatever does not match is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import support_record as support

from harness.errors import RecordError
from harness.record.model import Record
from harness.record.plot import draw_plots
from harness.record.report import check, check_all, load_record, regenerate, regenerate_all
from harness.record.store import RecordPaths


@pytest.fixture
def paths(tmp_path: Path) -> RecordPaths:
    """A sound record on disk."""
    return support.write_record(tmp_path / "out", support.run_lines()).paths


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize("name", support.SCENARIOS)
def test_a_fresh_record_of_every_ending_is_sound(name: str, tmp_path: Path) -> None:
    """Good or bad, skipped or failed: one path writes and checks them all."""
    store = support.write_record(tmp_path, support.run_lines(support.SCENARIOS[name]))
    assert check(store.paths.page) == []
    assert check_all(tmp_path) == []
    assert Record.model_validate(support.stored_json(store)) == load_record(store.paths)


def test_a_changed_digit_on_the_page_fails_and_report_repairs_it(paths: RecordPaths) -> None:
    """The promise of the check, end to end."""
    before = paths.page.read_bytes()
    edit(paths.page, "| 196.94 |", "| 196.95 |")
    (problem,) = check(paths.page)
    assert re.search(r"\.md:\d+: block 'throughput', row '1', column 'mtp tok/s'", problem)
    regenerate(paths.page)
    assert check(paths.page) == []
    assert paths.page.read_bytes() == before


@pytest.mark.parametrize("key", ["speedup", "delta", "acceptance_length", "verify_ms", "differing_bytes", "title"])
def test_a_changed_figure_in_record_json_is_named(paths: RecordPaths, key: str) -> None:
    """Other tools read record.json; a page that is right beside a JSON that is wrong is half a check."""
    text = paths.record.read_text(encoding="utf-8")
    match = re.search(rf'"{key}": \[?\s*"?[^\n"]*?(\d)', text)
    assert match is not None
    place = match.start(1)
    changed = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
    paths.record.write_text(changed, encoding="utf-8")
    problems = check(paths.page)
    assert any(f"{key}" in problem and "the raw lines give" in problem for problem in problems), problems


def test_missing_and_foreign_keys_of_record_json_are_named(paths: RecordPaths) -> None:
    """A figure that is simply taken out is also a change."""
    stored = json.loads(paths.record.read_text(encoding="utf-8"))
    del stored["verdict"]
    stored["mine"] = 1
    stored["cases"].pop()
    paths.record.write_text(json.dumps(stored), encoding="utf-8")
    found = " ".join(check(paths.page))
    assert "verdict is missing" in found
    assert "mine does not belong there" in found
    assert "cases is" in found


@pytest.mark.parametrize(
    ("file", "old", "new", "part"),
    [
        ("runs", '"decode_s":1.8', '"decode_s":1.7', "block 'throughput'"),
        ("runs", '"outcome":"pass"', '"outcome":"fail"', "block 'result'"),
        ("env", "Example CPU", "Better CPU", "block 'host'"),
        ("spec", "title: Nano pair", "title: Nano peer", "but the run read a spec of"),
        ("runs", '"load1":1.1', '"load1":1.2', "sources.runs.jsonl"),
    ],
)
def test_edited_raw_data_no_longer_gives_the_page(paths: RecordPaths, file: str, old: str, new: str, part: str) -> None:
    """Changing the source instead of the page must fail as loudly; even what no figure uses is under the hash."""
    edit(getattr(paths, file), old, new)
    assert any(part in problem for problem in check(paths.page))


@pytest.mark.parametrize(
    ("remove", "part"),
    [("page", r"\.md: missing"), ("record", "record.json: missing"), ("spec", "spec.yaml: missing")],
)
def test_missing_files_are_named(paths: RecordPaths, remove: str, part: str) -> None:
    """A half-committed record must not pass."""
    getattr(paths, remove).unlink()
    assert any(re.search(part, problem) for problem in check(paths.data))


def test_broken_files_are_problems_and_never_tracebacks(paths: RecordPaths) -> None:
    """A merge conflict inside JSON is ordinary."""
    paths.record.write_text("<<<<<<< mine", encoding="utf-8")
    assert any("record.json: not valid JSON" in problem for problem in check(paths.page))
    paths.env.write_text("[]", encoding="utf-8")
    assert any("env.json: expected a JSON object" in problem for problem in check(paths.page))
    edit(paths.page, "<!-- END generated: probe -->", "")
    with pytest.raises(RecordError, match="expected a JSON object"):
        regenerate(paths.page)


def test_prose_and_line_endings_survive_a_report(paths: RecordPaths) -> None:
    """A checkout with CRLF and a reviewer's section: the report renews figures and touches nothing else."""
    edit(paths.page, "## Probe", "## Probe ")
    text = paths.page.read_text(encoding="utf-8") + "\n## Reading the result\n\nDrafts help on code | prose less.\n"
    paths.page.write_bytes(text.replace("\n", "\r\n").encode())
    edit_line = text.replace("## Probe ", "## Probe")
    regenerate(paths.page)
    assert paths.page.read_bytes() == edit_line.replace("\n", "\r\n").encode()
    assert check(paths.page) == []


def test_a_checkout_with_crlf_passes(paths: RecordPaths) -> None:
    """git may rewrite every text file of the record; no figure changes by that."""
    for file in (paths.page, paths.record, paths.runs, paths.env, paths.spec):
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert check(paths.page) == []


def test_personal_paths_in_a_committed_record_fail_the_check(paths: RecordPaths) -> None:
    """Prose and logs are written by people and programs that do not scrub."""
    edit(paths.page, "<!-- What you write", "Run in /home/user/models.\n\n<!-- What you write")
    (paths.logs / "more.log").write_text("/Users/bob/x\n", encoding="utf-8")
    problems = check(paths.page)
    assert [problem.rsplit(" ", 1)[1] for problem in problems] == ["/home/user", "/Users/bob"]


# ---- plots ----------------------------------------------------------------------------------------------------------


def test_plots_are_byte_stable_between_processes(paths: RecordPaths) -> None:
    """Dates, hash seeds and ids in an SVG make every report a diff."""
    code = (
        "import sys; from pathlib import Path; from harness.record.report import load_record;"
        "from harness.record.plot import draw_plots; from harness.record.store import RecordPaths;"
        "[sys.stdout.write(text) for text in draw_plots(load_record(RecordPaths.locate(Path(sys.argv[1])))).values()]"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1", "TZ": "Asia/Tokyo"}
    root = Path(__file__).parent.parent
    run = [sys.executable, "-c", code, str(paths.page)]
    other = subprocess.run(run, capture_output=True, text=True, check=True, env=environment, cwd=root).stdout
    drawn = draw_plots(load_record(paths))
    assert "".join(drawn.values()) == other
    assert {name: (paths.data / name).read_text(encoding="utf-8") for name in drawn} == drawn
    assert list(drawn) == ["decode-deltas.svg", "decode-acceptance.svg"]
    assert all("<dc:date>" not in text for text in drawn.values())
    assert "+41.2% to +47.9%" in drawn["decode-deltas.svg"]


def test_stale_edited_and_missing_plots_are_told_apart(paths: RecordPaths) -> None:
    """A plot is evidence too; with another matplotlib only its figures can be compared."""
    deltas, acceptance = paths.data / "decode-deltas.svg", paths.data / "decode-acceptance.svg"
    sound = deltas.read_text(encoding="utf-8")
    deltas.write_text(sound.replace("+41.2%", "+51.2%"), encoding="utf-8")
    acceptance.unlink()
    assert [problem.rsplit("/", 1)[1] for problem in check(paths.page)] == [
        "decode-deltas.svg: not what these figures draw",
        "decode-acceptance.svg: missing",
    ]
    regenerate(paths.page)
    older = re.sub(r"Matplotlib v[0-9.]+", "Matplotlib v3.0.0", sound).replace("<path", "<path ")
    deltas.write_text(older, encoding="utf-8")
    assert check(paths.page) == []
    deltas.write_text(re.sub(r"(figures sha256 )\w{4}", r"\g<1>0000", older), encoding="utf-8")
    assert any("drawn from other figures" in problem for problem in check(paths.page))


def test_a_withheld_speed_leaves_no_plot_behind(paths: RecordPaths) -> None:
    """After a resume that finds a wrong token, yesterday's plot must not keep the claim alive."""
    lines = support.run_lines(support.SCENARIOS["differs"])
    paths.runs.write_text("".join(line.model_dump_json() + "\n" for line in lines), encoding="utf-8")
    assert any("decode-deltas.svg: belongs to no figure" in problem for problem in check(paths.page))
    regenerate(paths.page)
    assert not (paths.data / "decode-deltas.svg").exists()
    assert check(paths.page) == []


# ---- folders of records ---------------------------------------------------------------------------------------------


def test_the_index_lists_every_finding_newest_first(tmp_path: Path) -> None:
    """One row a record, linked, with good and bad news in the same columns."""
    for name in ("faster", "slower", "differs"):
        support.write_record(tmp_path, support.run_lines(support.SCENARIOS[name]))
    later = support.run_lines()
    start = later[0].model_copy(update={"started_utc": "2026-12-05T08:00:00Z"})
    support.write_record(tmp_path, [start, *later[1:]])
    index = (tmp_path / "README.md").read_text(encoding="utf-8")
    rows = [line for line in index.splitlines() if line.startswith("| 2026")]
    assert len(rows) == 4
    assert rows[0].startswith("| 2026-12-05 |")
    assert any("(negative)" in row and "| fail | unresolved |" in row for row in rows)
    for link in re.findall(r"\]\(([^)]+)\)", index):
        assert (tmp_path / link).is_file()
    assert check_all(tmp_path) == []


def test_an_edited_or_stale_index_fails(tmp_path: Path) -> None:
    """The README of the records is what most readers see."""
    support.write_record(tmp_path, support.run_lines())
    index = tmp_path / "README.md"
    edit(index, "+47.9%", "+87.9%")
    assert any("block 'index'" in problem and "column 'Finding'" in problem for problem in check_all(tmp_path))
    index.write_text(index.read_text(encoding="utf-8") + "\nMy note.\n", encoding="utf-8")
    assert len(regenerate_all(tmp_path)) == 1
    assert index.read_text(encoding="utf-8").endswith("My note.\n")
    assert check_all(tmp_path) == []
    index.unlink()
    assert check_all(tmp_path) == [f"{index}: missing; `harness report` writes it"]


def test_the_readme_shows_the_newest_record_of_each_spec(tmp_path: Path) -> None:
    """The first thing a visitor reads must not be last month's number, nor anybody else's block be touched."""
    out, readme = tmp_path / "docs" / "benchmark_results", tmp_path / "README.md"
    other = "<!-- BEGIN generated: flags -->\nold flags\n<!-- END generated: flags -->"
    block = "<!-- BEGIN generated: results -->\nnothing yet\n<!-- END generated: results -->"
    readme.write_text(f"# Project\n\n{block}\n\nProse.\n\n{other}\n", encoding="utf-8")
    support.write_record(out, support.run_lines())
    first = readme.read_text(encoding="utf-8")
    assert "](docs/benchmark_results/gemma4-nano-cpu-2026-11-30.md) | CPU | 2026-11-30 | 2.81 | +41.2% to +" in first
    assert first.endswith(f"\n\nProse.\n\n{other}\n")
    support.write_record(out, support.run_lines(support.SCENARIOS["differs"]))
    text = readme.read_text(encoding="utf-8")
    assert "| none: tokens differ |" in text
    assert "+41.2%" not in text
    assert check_all(out) == []
    edit(readme, "| 2.81 |", "| 3.81 |")
    assert any("README.md:" in problem and "column 'Tokens per verify'" in problem for problem in check_all(out))
    regenerate_all(out)
    assert readme.read_text(encoding="utf-8") == text


def test_a_partial_record_does_not_replace_a_complete_one_in_the_readme(tmp_path: Path) -> None:
    """A run that was stopped before its last case would hide what that case said the time before."""
    out, readme = tmp_path / "docs" / "benchmark_results", tmp_path / "README.md"
    readme.write_text("<!-- BEGIN generated: results -->\n<!-- END generated: results -->\n", encoding="utf-8")
    stopped = [support.killed_lines()[0].model_copy(update={"started_utc": "2026-12-05T08:00:00Z"})]
    support.write_record(out, [*stopped, *support.killed_lines()[1:]], finish=False)
    regenerate_all(out)
    assert "partial record" in readme.read_text(encoding="utf-8")  # nothing else is there
    support.write_record(out, support.run_lines(support.SCENARIOS["differs"]))
    text = readme.read_text(encoding="utf-8")
    assert "| none: tokens differ |" in text
    assert "partial record" not in text
    assert check_all(out) == []


def test_a_readme_without_the_block_is_left_alone(tmp_path: Path) -> None:
    """Not every README wants a table."""
    readme = tmp_path / "README.md"
    readme.write_text("# Mine\r\n", encoding="utf-8", newline="")
    support.write_record(tmp_path / "docs" / "benchmark_results", support.run_lines(support.SCENARIOS["skipped"]))
    assert readme.read_bytes() == b"# Mine\r\n"


def test_a_page_without_raw_lines_fails(tmp_path: Path) -> None:
    """A page nobody can recompute is a claim, not a record."""
    support.write_record(tmp_path, support.run_lines())
    (tmp_path / "by-hand.md").write_text("# 10x faster\n", encoding="utf-8")
    assert any("by-hand.md: no raw lines under" in problem for problem in check_all(tmp_path))


def test_an_empty_or_absent_folder_is_sound(tmp_path: Path) -> None:
    """A fresh clone without records passes the check."""
    assert check_all(tmp_path) == []
    assert check_all(tmp_path / "absent") == []


def test_a_killed_run_without_a_page_is_rendered_by_report(tmp_path: Path) -> None:
    """SIGKILL leaves raw lines and nothing else; `harness report` makes them readable."""
    store = support.write_record(tmp_path, support.killed_lines(), torn='{"line":"a', finish=False)
    assert any("missing" in problem for problem in check_all(tmp_path))
    regenerate_all(tmp_path)
    assert "Partial record" in store.paths.page.read_text(encoding="utf-8")
    assert check_all(tmp_path) == []


def test_reading_and_rendering_import_no_plotting_or_engine() -> None:
    """`harness list` imports this package; matplotlib and torch would cost it seconds."""
    code = (
        "import sys, harness.record.render, harness.record.store, harness.record.report;"
        "heavy = ('matplotlib', 'torch', 'numpy', 'scipy', 'engine.target');"
        "print(','.join(name for name in heavy if name in sys.modules))"
    )
    root = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert run.stdout.strip() == ""
