"""A record of kernels: figures from raw lines, its page and plot, and that no changed digit goes unseen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import support_kernel_record as support
import support_record
from markdown_it import MarkdownIt
from pytest_regressions.file_regression import FileRegressionFixture

from harness.record import kernel_plot
from harness.record.build import build_record
from harness.record.lines import AnyLine, CaseLine, CheckLine, KernelLine
from harness.record.model import KernelFigures, Record
from harness.record.plot import draw_plots, stale_plots
from harness.record.render import render
from harness.record.report import check, regenerate
from harness.record.store import RecordStore

ENV = {
    **support_record.ENV,
    "command": f"harness run {support.SPEC_ID}",
    "device": "cuda",
    "spec": {"path": support.SPEC_ID, "sha256": "0" * 64},
    "gpu": {"name": "NVIDIA H200", "compute_capability": "9.0"},
}
GOLDEN = Path(__file__).parent / "golden" / "record_kernels.md"
STEM = "kernels-tiny-cuda-2026-11-30"


def record_of(lines: list[AnyLine]) -> Record:
    return build_record(lines, ENV, support.SPEC_TEXT)


def kernel_of(record: Record, place: int = 0) -> KernelFigures:
    found = [case.kernel for case in record.cases if case.kernel is not None][place]
    return found


def written(out: Path, lines: list[AnyLine]) -> RecordStore:
    """A record on disk as a run leaves it."""
    store = RecordStore.create(out, "kernels_tiny", "cuda", support.DATE, support.SPEC_TEXT)
    store.write_env(ENV)
    for line in lines:
        store.append(line)
    store.finish()
    return store


def test_figures_come_from_medians_of_raw_lines() -> None:
    """By hand: 66.36 MB in 20 us, the stream 2 GiB in 490 us."""
    kernel = kernel_of(record_of(support.good_run()))
    assert kernel.us == {"1": 20.0, "4": 20.2, "8": 20.4}
    assert kernel.gb_per_s["1"] == pytest.approx(66.3552e6 / 20.0 / 1e3, rel=1e-5)
    assert kernel.stream_gb_per_s == pytest.approx(2**31 / 490.0 / 1e3, rel=1e-5)
    assert kernel.stream_share == pytest.approx(kernel.gb_per_s["1"] / 4382.62, rel=1e-4)
    assert kernel.m8_over_m1 == pytest.approx(1.02)
    assert kernel.four_over_one == pytest.approx(79.0 / 20.2, rel=1e-5)
    assert kernel.rel_error == pytest.approx(4.8e-7)
    assert kernel.null_range is not None
    assert kernel.null_range[0] == pytest.approx(0.001, rel=1e-2)
    tinygemm, marlin = kernel.peers
    assert tinygemm.ratio == {"1": pytest.approx(20 / 34, rel=1e-5), "4": pytest.approx(20.2 / 45, rel=1e-5)}
    assert marlin.reason is not None
    assert marlin.ratio == {}


def test_fixed_names_stand_in_record_json(tmp_path: Path) -> None:
    """Other tools read these names."""
    store = written(tmp_path, support.good_run())
    stored = json.loads(store.paths.record.read_text(encoding="utf-8"))
    case = stored["cases"][1]
    assert case["differing_bytes"] == 0
    assert {"stream_share", "m8_over_m1", "gb_per_s", "differing_bytes", "null_range"} <= set(case["kernel"])
    assert stored["cases"][0]["kernel"] is None


def test_the_title_states_the_finding() -> None:
    """Bytes first, then what it reached; a difference and a miss are bad news."""
    good = record_of(support.good_run())
    assert good.title == (
        "Kernels in small: 0 differing bytes over 3 shapes, products at 0.75 to 0.76 of the read-only stream, "
        "8 rows in 1.02x the time of 1 at most (NVIDIA H200, 2026-11-30)"
    )
    assert not good.negative
    differing = support.ended(support.qmv_lines(differing=12), "fail", "M = 1..8: 12 of 4096 bytes differ")
    bad = record_of(support.run_lines(differing))
    assert bad.negative
    assert "1 of 2 cases fails, first qmv[shape:3840x30720-4bit]: M = 1..8: 12 of 4096 bytes differ" in bad.title
    noisy = record_of(support.run_lines(support.ended(support.qmv_lines(), "unresolved", "M = 8 over M = 1 1.045")))
    assert "(unresolved)" in noisy.title


def test_no_time_stands_where_a_byte_differs() -> None:
    """Not on the page, not in record.json, not in the plot; even when the lines hold times."""
    timed = support.qmv_lines()
    place = next(i for i, line in enumerate(timed) if isinstance(line, CheckLine))
    spoiled = support.statement(support.case_id("qmv[shape:3840x30720-4bit]"), "M = 1..8 against one-row calls", 3)
    lines = [*timed[:place], spoiled, *timed[place + 1 :]]
    record = record_of(support.run_lines(support.ended(lines, "fail", "bytes differ")))
    kernel = kernel_of(record)
    assert kernel.withheld
    assert kernel.differing_bytes == 3
    assert kernel.us == kernel.gb_per_s == {}
    assert kernel.stream_share is kernel.m8_over_m1 is kernel.rel_error is None
    assert draw_plots(record) == {}
    page = render(record, STEM)
    assert "withheld" in page
    assert "20.00" not in page


def test_a_pass_that_the_lines_do_not_bear_out_is_named() -> None:
    """An edited outcome, times without checks, and a peer that has a voice but no time."""
    differing = support.ended(support.qmv_lines(differing=12))
    (first, *_) = record_of(support.run_lines(differing)).contradictions
    assert "outcome pass, but M = 1..8 against one-row calls does not hold" in first
    unchecked = [line for line in support.ended(support.qmv_lines()) if not isinstance(line, CheckLine)]
    assert any("no row was compared" in text for text in record_of(support.run_lines(unchecked)).contradictions)
    silent = [
        line
        for line in support.ended(support.qmv_lines())
        if not (isinstance(line, KernelLine) and line.arm == "tinygemm")
    ]
    assert any("tinygemm is said to have run" in text for text in record_of(support.run_lines(silent)).contradictions)
    assert record_of(support.good_run()).contradictions == ()


def test_golden_page(file_regression: FileRegressionFixture) -> None:
    """The whole page of a good run."""
    file_regression.check(render(record_of(support.good_run()), STEM), extension=".md", fullpath=GOLDEN)


def test_every_table_is_a_table_and_no_cell_is_empty() -> None:
    """GitHub shows a broken table as text; a blank cell leaves the reader guessing."""
    body = render(record_of(support.good_run()), STEM).split("\n---\n", 1)[1]
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    assert not [t.content for t in tokens if t.type == "inline" and re.match(r"\s*\|", t.content)]
    cells = [tokens[place + 1].content for place, t in enumerate(tokens) if t.type in ("td_open", "th_open")]
    assert cells
    assert all(cell.strip() for cell in cells)
    assert not re.search(r"\b(nan|inf|None|Traceback)\b", body)


def test_the_first_screen_has_bytes_ceiling_noise_and_peers() -> None:
    """In that order, before any table."""
    page = render(record_of(support.good_run()), STEM)
    screen = page[: page.index("## Result")]
    names = re.findall(r"- \*\*([A-Za-z ]+)\.\*\*", screen)
    assert names[:5] == ["Differing bytes", "Answer", "Ceiling", "Noise", "Peers"]
    assert "**0** over 6 statements about rows" in screen
    assert "marlin not measured ($HARNESS_MARLIN_LIBRARY is not set" in screen
    assert "MTP" not in screen


def test_a_changed_digit_is_found_and_repaired(tmp_path: Path) -> None:
    """On the page and in the raw lines."""
    store = written(tmp_path, support.good_run())
    page = store.paths.page
    assert check(page) == []
    text = page.read_text(encoding="utf-8")
    assert "| 3318 |" in text
    page.write_text(text.replace("| 3318 |", "| 3319 |"), encoding="utf-8")
    (problem,) = check(page)
    assert "block 'kernels'" in problem
    assert "column 'GB/s'" in problem
    regenerate(page)
    assert check(page) == []
    runs = store.paths.runs.read_text(encoding="utf-8")
    store.paths.runs.write_text(runs.replace("20.4,", "21.9,", 1), encoding="utf-8")
    assert any("m8_over_m1" in problem for problem in check(page))


def test_the_plot_shows_ours_the_peers_and_the_ceiling() -> None:
    """One point a shape and series, drawn again byte for byte, and stale when a figure moves."""
    record = record_of(support.good_run())
    data = kernel_plot.plot_data(record)
    assert [series["label"] for series in data["series"]] == ["ours, 4 bits", "ours, 8 bits", "tinygemm, 4 bits"]
    assert data["ceiling"] == pytest.approx(4382.62, rel=1e-4)
    drawn = draw_plots(record)
    assert list(drawn) == ["bandwidth.svg"]
    assert "read-only stream 4383 GB/s" in drawn["bandwidth.svg"]
    assert draw_plots(record_of(support.good_run())) == drawn
    assert stale_plots(record, dict(drawn)) == []
    moved = record_of(support.run_lines(support.ended(support.qmv_lines(one=21.0))))
    assert stale_plots(moved, dict(drawn)) == ["bandwidth.svg: drawn from other figures than the raw lines give"]


def test_attention_alone_has_no_bandwidth_plot() -> None:
    """Nothing to draw, so nothing is referred to."""
    record = record_of(support.run_lines(support.ended(support.attention_lines())))
    assert draw_plots(record) == {}
    page = render(record, STEM)
    assert "### Attention" in page
    assert "### Products" not in page
    assert ".svg" not in page


def test_a_run_that_was_killed_says_so(tmp_path: Path) -> None:
    """The raw lines that there are, and no outcome made of them."""
    lines = [line for line in support.good_run()[:-1] if not (isinstance(line, CaseLine) and "attention" in line.case)]
    store = written(tmp_path, lines)
    assert check(store.paths.page) == []
    page = store.paths.page.read_text(encoding="utf-8")
    assert "Partial record" in page
    assert "partial record, 3 of 4 cases finished" in page
