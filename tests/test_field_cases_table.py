"""docs/field_cases.md: every case once, every outcome with what it needs, every named test there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "field_cases.md"
OUTCOMES = ("guarded", "fixed", "does not apply", "open")


class Row(NamedTuple):
    """One case of the page."""

    id: str
    reported: str
    outcome: str
    tests: tuple[str, ...]


def rows_of(text: str) -> list[Row]:
    """Every table row whose first cell is a case id."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"B\d+", cells[0]):
            assert len(cells) == 4, line
            found.append(Row(*cells[:3], tuple(re.findall(r"`(test_[^`]*)`", cells[3]))))
    return found


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file under tests/, read without importing it; empty for no such file."""
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def problems_of(text: str) -> list[str]:
    """What is wrong with the page, one sentence a case."""
    found: list[str] = []
    rows = rows_of(text)
    ids = [row.id for row in rows]
    found += [f"{name} stands {ids.count(name)} times" for name in sorted(set(ids)) if ids.count(name) > 1]
    for row in rows:
        word = next((word for word in OUTCOMES if row.outcome.startswith(word)), None)
        if word is None:
            found.append(f"{row.id}: outcome {row.outcome!r} is none of {', '.join(OUTCOMES)}")
        if word == "open" and not re.match(r"open \(issue [3-6]\): .*missing: ", row.outcome):
            found.append(f"{row.id}: an open case names its issue and what is missing")
        if word in ("fixed", "does not apply") and ": " not in row.outcome:
            found.append(f"{row.id}: {word} without a reason")
        if not row.reported or not row.tests:
            found.append(f"{row.id}: no report or no test")
        for test in row.tests:
            file, _, name = test.partition("::")
            if not name.startswith("test_") or name not in names_in(file):
                found.append(f"{row.id}: no test {test}")
    for word, count in re.findall(r"^\| ([a-z ]+) \| (\d+) \|", text, re.MULTILINE):
        actual = sum(row.outcome.startswith(word) for row in rows)
        if actual != int(count):
            found.append(f"{word}: {count} cases are said, {actual} are there")
    return found


def test_the_page_is_whole() -> None:
    """A renamed test would leave a case that nothing holds, with a page that says otherwise."""
    text = PAGE.read_text(encoding="utf-8")
    assert problems_of(text) == []
    assert f"\n{len(rows_of(text))} cases in all." in text
    assert len(rows_of(text)) == 80


FIRST = "| B1 | a gate written"
SPOILED = {
    "a case twice": (
        FIRST,
        "| B2 | x | guarded | `test_field_cases_table.py::test_the_page_is_whole` |\n" + FIRST,
        "B2 stands",
    ),
    "a test that is gone": (
        "test_parity_floors",
        "test_parity_floor",
        "no test test_harness_checks.py::test_parity_floor",
    ),
    "a file that is gone": ("test_spec_load.py", "test_spec_loads.py", "no test test_spec_loads.py"),
    "an open case without its issue": ("guarded: 49.5 by", "open: missing: 49.5 by", "B100: an open case names"),
    "an open case of no issue": ("guarded: 49.5 by", "open (issue 9): missing: 49.5 by", "B100: an open case names"),
    "an open case that lacks nothing": ("guarded: 49.5 by", "open (issue 5): 49.5 by", "B100: an open case names"),
    "a reason left out": ("does not apply: no grammars", "does not apply", "B85: does not apply without"),
    "another word": ("guarded: declined", "probably: declined", "B23: outcome"),
    "a wrong count": ("| guarded | ", "| guarded | 1", "guarded: 1"),
}


@pytest.mark.parametrize("name", SPOILED, ids=lambda name: name.replace(" ", "-"))
def test_a_page_that_lies_is_found(name: str) -> None:
    """The check above must be able to fail, for each thing that it holds."""
    old, new, words = SPOILED[name]
    text = PAGE.read_text(encoding="utf-8")
    assert old in text
    assert any(words in problem for problem in problems_of(text.replace(old, new)))
