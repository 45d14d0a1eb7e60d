"""Markdown: cells that cannot break their row, numbers in one form, blocks renewed while prose stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import support_record as support
from markdown_it import MarkdownIt
from pytest_regressions.file_regression import FileRegressionFixture
from support_record import record_of

from harness.errors import RecordError
from harness.record import table as words
from harness.record.lines import AnyLine, CaseLine, CheckLine
from harness.record.page import compose, differences, front_matter, spans, splice
from harness.record.render import front, render, renew
from harness.record.sections import Block, blocks

STEM = "gemma4-nano-cpu-2026-11-30"
Edit = Callable[[str], str]
GOLDEN = Path(__file__).parent / "golden"


def page_of(name: str) -> str:
    return render(record_of(support.run_lines(support.SCENARIOS[name])), STEM)


# ---- numbers and cells ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (words.percent(1.169), "+116.9%"),
        (words.percent(-0.051), "-5.1%"),
        (words.percent(-0.0004), "0.0%"),
        (words.percent(None), "not measured"),
        (words.percent_range((0.479, 0.412)), "+41.2% to +47.9%"),
        (words.percent_range((0.01, 0.0101)), "+1.0%"),
        (words.percent_range((), "no pair"), "no pair"),
        (words.rate(28.734), "28.73"),
        (words.rate(None, "withheld"), "withheld"),
        (words.ms(0.9999), "1.00"),
        (words.share(0.626), "0.63"),
        (words.factor(1.4478), "1.45x"),
        (words.count(1048576), "1,048,576"),
        (words.seconds(48.04), "48.0"),
        (words.plural(1, "case"), "1 case"),
        (words.plural(0, "case"), "0 cases"),
    ],
)
def test_each_kind_of_number_has_one_form(written: str, expected: str) -> None:
    """Signed deltas, two decimals for rates, words for what is absent; -0.0% would be a sign without a size."""
    assert written == expected


@pytest.mark.parametrize(
    "text",
    [
        "a|b",
        "two\nlines",
        "a\\|b",
        "tail\\",
        "<script>x</script>",
        "`tick` | `tock`",
        "tab\tand\r\nCRLF",
        "||",
        "",
        "| |",
    ],
    ids=["pipe", "lines", "escaped", "backslash", "html", "ticks", "crlf", "pipes", "empty", "spaces"],
)
def test_any_text_stays_in_its_cell(text: str) -> None:
    """A reason with a pipe or a line break moved every later figure one column to the left."""
    made = words.table(["Case", ">Figure"], [[words.cell(text), "1.23"], [words.code(text), "4.56"]])
    tokens = MarkdownIt("commonmark").enable("table").parse(made)
    rows = [t for t in tokens if t.type == "tr_open"]
    cells = [t.content for place, t in enumerate(tokens) if tokens[place - 1].type == "td_open"]
    assert len(rows) == 3
    assert len(cells) == 4
    assert (cells[1], cells[3]) == ("1.23", "4.56")
    assert "<script>" not in MarkdownIt("commonmark").enable("table").render(made)


def test_a_row_of_another_width_is_refused() -> None:
    """Markdown would silently drop or invent cells."""
    with pytest.raises(ValueError, match="3 cells under 2 headers"):
        words.table(["a", ">b"], [["1", "2", "3"]])


# ---- whole pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["faster", "differs"])
def test_golden_pages(name: str, file_regression: FileRegressionFixture) -> None:
    """The pages as a reader sees them; `pytest --force-regen` after a wanted change, then read the diff."""
    file_regression.check(page_of(name), extension=".md", fullpath=GOLDEN / f"record_{name}.md")


@pytest.mark.parametrize("name", support.SCENARIOS)
def test_every_table_is_a_table_and_no_cell_is_empty(name: str) -> None:
    """GitHub shows a broken table as text; a blank cell leaves the reader guessing."""
    page = page_of(name)
    body = page.split("\n---\n", 1)[1]
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    assert not [t.content for t in tokens if t.type == "inline" and re.match(r"\s*\|", t.content)]
    cells = [tokens[place + 1].content for place, t in enumerate(tokens) if t.type in ("td_open", "th_open")]
    assert cells
    assert all(cell.strip() for cell in cells)
    assert not re.search(r"\b(nan|inf|None|Traceback)\b", body)


@pytest.mark.parametrize("name", support.SCENARIOS)
def test_front_matter_is_flat_and_short(name: str) -> None:
    """GitHub lays front matter out as one wide table row."""
    import yaml

    page = page_of(name)
    keys = yaml.safe_load(page.split("---\n")[1])
    assert 0 < len(keys) <= 8
    assert all(isinstance(value, str | bool) for value in keys.values())
    assert keys["date"] == support.DATE


def test_front_matter_quotes_what_yaml_would_change() -> None:
    """`no` would become false, a date a date, a colon a mapping."""
    import yaml

    values = {"a": "no", "b": "2026-11-30", "c": "x: y", "d": '"quoted" \\ slash', "e": "plain words", "f": "1e5"}
    assert yaml.safe_load(front_matter(values).replace("---", "")) == values


def test_headings_come_in_reading_order() -> None:
    """The finding first, the reservations last."""
    titles = [line for line in page_of("faster").splitlines() if line.startswith("#")]
    assert titles[0].startswith("# Nano pair: ")
    assert [title.removeprefix("## ") for title in titles[1:]] == [
        "Result",
        "Throughput",
        "Steps",
        "Probe",
        "Attribution",
        "Parity",
        "Other checks",
        "Host and provenance",
        "Reproduce",
        "Not covered here",
    ]


def test_the_first_screen_has_what_a_reviewer_needs() -> None:
    """Null range, one hash, host, commit, command, gaps: all before the first table."""
    head = page_of("faster").partition("## Result")[0]
    for part in (
        "-0.4% to +0.9%",
        "5694d08a2e",
        "Example CPU",
        "0ee13dfe45aa (clean)",
        "`harness run specs/",
        "Left out",
    ):
        assert part in head, part


def test_dead_flags_are_named() -> None:
    """An axis that changes no cell is a switch that does nothing, and the reader should not have to compare rows."""
    assert "Changed no cell: multirow." in page_of("faster")


def test_skipped_cases_stand_with_their_reason() -> None:
    """A skip without its reason reads like a pass."""
    page = page_of("skipped")
    assert page.count("no checkpoint gemma-4-12b-it-4bit under $HARNESS_MODELS") > 22
    assert "no case compared outputs" in page


# ---- splicing -------------------------------------------------------------------------------------------------------

A, B, C = Block("a", "alpha 1"), Block("b", "beta 2"), Block("c", "gamma 3")


def test_prose_outside_the_blocks_survives() -> None:
    """Before, between and after: what a person wrote stays where it was."""
    old = compose("---\nx: 1\n---", [A, B])
    edited = old.replace("<!-- BEGIN generated: a", "Before.\n\n<!-- BEGIN generated: a").replace(
        "<!-- END generated: a -->", "<!-- END generated: a -->\n\nBetween, with a | and alpha 1."
    )
    edited += "\n## After\n\nText.\n"
    new = splice(edited, "---\nx: 2\n---", [Block("a", "alpha 9"), B])
    assert new == edited.replace("\nalpha 1\n", "\nalpha 9\n").replace("x: 1", "x: 2")
    assert splice(new, "---\nx: 2\n---", [Block("a", "alpha 9"), B]) == new


def test_new_blocks_land_behind_their_predecessor_and_old_ones_go() -> None:
    """A resumed run gains a throughput section; the page must not need to be written anew."""
    text = splice(compose("", [A, C]), "", [A, B, C])
    assert list(spans(text)) == ["a", "b", "c"]
    assert text == compose("", [A, B, C])
    assert splice(text, "", [A, C]) == compose("", [A, C])
    assert list(spans(splice(compose("", [B]), "", [A, B, C]))) == ["a", "b", "c"]
    assert splice(compose("---\nx: 1\n---", [B]), "---\nx: 1\n---", [A, B]) == compose("---\nx: 1\n---", [A, B])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- BEGIN generated: a (harness report; do not edit) -->\nx\n", "line 1: block 'a' never ends"),
        ("x\n<!-- END generated: a -->\n", "line 2: block 'a' ends without having begun"),
        ("<!-- BEGIN generated: a -->\n<!-- BEGIN generated: b -->\n", "line 2: block 'b' begins inside block 'a'"),
        (
            "<!-- BEGIN generated: a -->\n<!-- END generated: a -->\n<!-- BEGIN generated: a -->\n",
            "line 3: block 'a' stands twice",
        ),
    ],
)
def test_broken_markers_are_errors_with_their_line(text: str, problem: str) -> None:
    """Guessing where a block ends would eat somebody's prose."""
    with pytest.raises(RecordError, match=re.escape(problem)):
        splice(text, "", [A])
    assert problem in differences(text, "", [A])[0]


# ---- what counts as a change ----------------------------------------------------------------------------------------


def test_any_changed_digit_of_any_generated_block_is_found_and_placed() -> None:
    """Every digit of the page, one after another: each must be reported with its line and its block."""
    record = record_of(support.run_lines())
    page = render(record, STEM)
    made, top = blocks(record, STEM), front(record, STEM)
    assert differences(page, top, made) == []
    inside = {number for span in spans(page).values() for number in range(span.first, span.last + 1)}
    lines = page.splitlines(keepends=True)
    checked = 0
    for number, line in enumerate(lines, start=1):
        digits = [place for place, letter in enumerate(line) if letter.isdigit()]
        if number not in inside:
            assert not digits
            continue
        for place in digits[:: 1 if line.startswith("|") else 7]:
            changed = line[:place] + str((int(line[place]) + 1) % 10) + line[place + 1 :]
            found = differences("".join([*lines[: number - 1], changed, *lines[number:]]), top, made)
            assert len(found) == 1, (line, place)
            assert found[0].startswith(f"{number}: block '"), found
            checked += 1
    assert checked > 500


def test_a_changed_cell_is_named_by_row_and_column() -> None:
    """'Something differs' sends the reader hunting; the cell and both values do not."""
    record = record_of(support.run_lines())
    page = render(record, STEM).replace("| 201.95 |", "| 211.95 |")
    (problem,) = differences(page, front(record, STEM), blocks(record, STEM))
    assert re.match(r"\d+: block 'throughput', row '2', column 'mtp tok/s': ", problem)
    assert problem.endswith("the page says '211.95', the raw lines give '201.95'")


EDITS: dict[str, tuple[Edit, str]] = {
    "widened row": (lambda page: page.replace("| 2 | docs |", "| 2 | docs | extra |"), "throughput"),
    "dropped row": (lambda page: re.sub(r"\n\| 2 \| docs .*", "", page), "line missing after this one: '| 2 | docs"),
    "added row": (
        lambda page: page.replace("\n| 2 | docs", "\n| 9 | mine |\n| 2 | docs"),
        "line added: '| 9 | mine |'",
    ),
    "heading": (lambda page: page.replace("## Steps", "## Stepps"), "block 'steps', the page says '## Stepps'"),
    "front matter": (lambda page: page.replace("verdict: faster", "verdict: slower"), "block 'front matter'"),
    "dropped block": (
        lambda page: re.sub(r"<!-- BEGIN generated: probe.*?END generated: probe -->", "", page, flags=re.S),
        "block 'probe' is missing",
    ),
    "added block": (
        lambda page: page + "<!-- BEGIN generated: mine -->\nx\n<!-- END generated: mine -->\n",
        "not generated any more",
    ),
    "title": (lambda page: page.replace("byte-identical", "byte identical", 1), "block 'title'"),
    "lost point": (lambda page: page.replace("| +41.2% | +0.4% |", "| +412% | +0.4% |"), "column 'mtp vs classic'"),
}


@pytest.mark.parametrize("name", EDITS)
def test_other_changes_are_found_too(name: str) -> None:
    """Rows dropped, added or widened, words changed, blocks removed: all of it is tampering."""
    change, expected = EDITS[name]
    record = record_of(support.run_lines())
    page = change(render(record, STEM))
    found = differences(page, front(record, STEM), blocks(record, STEM))
    assert any(expected in problem for problem in found), found


def padded(page: str) -> str:
    """The page as a formatter leaves it: padded cells, longer rules, blank lines around markers."""
    lines = []
    for line in page.splitlines():
        if line.startswith("|"):
            cells = [f" {cell.strip():<30} " for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            cells = [re.sub(r"-{3,} *$", "-" * 12, cell) if set(cell.strip()) <= set("-:") else cell for cell in cells]
            line = "|" + "|".join(cells) + "|"
        lines += ["", line, ""] if line.startswith("<!--") else [line]
    return "\n".join(lines) + "\n"


REFORMATS: dict[str, Edit] = {
    "padded": padded,
    "crlf": lambda page: page.replace("\n", "\r\n"),
    "trailing": lambda page: page.rstrip() + "\n\n\n",
}


@pytest.mark.parametrize("name", REFORMATS)
def test_reformatting_is_no_change(name: str) -> None:
    """Line endings and padding carry no figure; a check that trips over them gets switched off."""
    record = record_of(support.run_lines())
    page = REFORMATS[name](render(record, STEM))
    assert differences(page, front(record, STEM), blocks(record, STEM)) == []


def test_renewing_an_untouched_page_changes_nothing() -> None:
    """Otherwise every `make record` would be a diff."""
    for scenario in support.SCENARIOS.values():
        record = record_of(support.run_lines(scenario))
        page = render(record, STEM)
        assert renew(page, record, STEM) == page


def test_attribution_names_the_ops_that_differ_alone() -> None:
    """Where RoPE differs it hides what differs behind it; without this column three stages read the same."""
    lines: list[AnyLine] = []
    for line in support.run_lines():
        if isinstance(line, CaseLine) and "stage:base+" in line.case:
            found = "rope, geglu, attention"
            lines.append(
                CheckLine(case=line.case, name="ops that differ on their own", passed=True, expected="any", found=found)
            )
        lines.append(line)
    page = render(record_of(lines), "stem")
    assert "(alone: rope, geglu, attention)" in page
    attribution, _, rest = page.partition("## Attribution")[2].partition("## Parity")
    assert "| Alone |" in attribution
    assert "ops that differ on their own" not in rest
    assert "Alone" not in render(record_of(support.run_lines()), "stem")
