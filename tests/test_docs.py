"""What the pages for readers point at: every link leads somewhere, every command and option exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from harness.cli import cli

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "benchmark_results"  # computed pages, which `harness report --check` holds
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "specs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"\bharness ([a-z]+)((?:\s+[^\s`#|;,()]+)*)")


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Each relative link of a page that leads nowhere."""
    for link in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{link}: no such heading"


def code_of(text: str) -> Iterator[str]:
    """Lines of code blocks and what stands between backticks."""
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    yield from (line for block in [*blocks, *indented] for line in block.splitlines())
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def unknown_commands(text: str) -> Iterator[str]:
    """Each `harness` command or option in a page's code that the command line does not have."""
    for line in code_of(text):
        for name, rest in COMMAND.findall(line):
            command = cli.commands.get(name)
            if command is None:
                yield f"harness {name}"
                continue
            known = {option for parameter in command.params for option in parameter.opts}
            with click.Context(command) as context:
                known |= set(command.get_help_option_names(context))
            for option in re.findall(r"(?<=\s)--?[a-z][a-z-]*", rest):
                if option not in known:
                    yield f"harness {name} {option}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent != RECORDS or page.name == "README.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_leads_where_it_says(page: Path) -> None:
    """A renamed heading, file, command or option leaves a page that sends its reader to nothing."""
    text = page.read_text(encoding="utf-8")
    assert list(broken_links(page, text)) == []
    assert list(unknown_commands(text)) == []


def test_what_leads_nowhere_is_found() -> None:
    """The check above must be able to fail, for each thing that it holds."""
    page = ROOT / "docs" / "method.md"
    assert (
        list(broken_links(page, "[a](glossary.md) [b](glossary.md#decoding) [c](#then-speed) [d](https://x.y/z)")) == []
    )
    assert list(broken_links(page, "[a](glosary.md)")) == ["glosary.md: no such file"]
    assert list(broken_links(page, "[a](glossary.md#x) [b](#no)")) == [
        "glossary.md#x: no such heading",
        "#no: no such heading",
    ]
    assert list(unknown_commands("`harness run SPEC --jobs N`\n```\n$ harness list -v specs/a.yaml\n```\n")) == []
    assert list(unknown_commands("`harness runs`, `harness run SPEC --job 2`")) == ["harness runs", "harness run --job"]
    assert list(unknown_commands("```\nharness power --noises 2%\n```")) == ["harness power --noises"]


def test_every_decision_is_listed() -> None:
    """A decision that the index leaves out is found by nobody."""
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    pages = sorted(page.name for page in folder.glob("0*.md"))
    assert [name for name in LINK.findall(index) if name.startswith("0")] == pages
