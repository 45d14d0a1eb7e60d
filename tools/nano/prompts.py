"""Candidate prompts in own words, from which the committed ones are chosen by measurement.

Each candidate has a form: `raw` text is continued, `chat` text is a user turn. Choice: enough distinct tokens in
every numeric variant, so that another machine's rounding does not turn a prompt into a loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

THINGS = (
    "a queue of jobs with priorities", "a cache with a time limit", "a matrix of integers", "a table of measurements",
    "a tree of folders", "a stream of log lines", "a graph of cities", "a set of intervals", "a list of invoices",
    "a text with many lines", "a configuration file", "a polynomial with real coefficients", "a calendar of meetings",
    "a bank of sensors", "an image with three channels", "a pool of worker threads", "a message with a checksum",
    "a sparse vector", "a password policy", "a small state machine",
)  # fmt: skip
ACTIONS = (
    ("merge", "merges two of them and reports conflicts"),
    ("parse", "reads it from a string and raises an error on bad input"),
    ("summarize", "returns counts, the mean and the largest value"),
    ("validate", "checks it and returns a list of problems"),
    ("convert", "turns it into a dictionary that can be written as JSON"),
    ("search", "finds the first item that matches a condition"),
    ("split", "divides it into parts of nearly equal size"),
    ("render", "formats it as a table with aligned columns"),
    ("update", "applies a sequence of changes in order"),
    ("compare", "tells which entries were added, removed or changed"),
)
CHAT_FORMS = (
    "Write a Python function `{name}` that does this:\nTake {thing}. It {what}.",
    "I need a Python function. It takes {thing} and {what}.",
    "Please implement this function.\n\ndef {name}(data, *, strict=False):\n\nGiven {thing}, it {what}.",
)
CODE_FORMS = (
    'def {name}(data, *, strict=False):\n    """Work on {thing}.\n\n    It {what}.\n\n    Parameters\n    ----------\n',
    '"""Tools for {thing}.\n\nThis module {what}.\n"""\n\nimport argparse\nimport logging\n'
    "from pathlib import Path\n\n",
    'class {klass}:\n    """Holds {thing} and {what}.\n\n    Args:\n        ',
    "# A test for {thing}: the function {what}.\n\nimport unittest\n\n\nclass Test{klass}(unittest.TestCase):\n",
)
DOC_FORMS = (
    "# {title}\n\nThis page explains how to work with {thing}. The command `{name}` {what}.\n\n## Installation\n",
    "{title}\n{line}\n\nThis guide is about {thing}. The function ``{name}`` {what}.\n\n.. code-block:: python\n\n",
    "# Changelog\n\n## 2.1.0\n\n- `{name}` now accepts {thing} and {what}.\n- Fixed",
)
LIST_FORMS = (
    "Things to check before {name} is released, for {thing}:\n\n1. It {what}.\n2. ",
    '# Options of the command line for {thing}\nparser.add_argument("--{name}", help="it {what}")\n',
    "Known limits of {name} with {thing}:\n\n* It {what}, but not for empty input.\n* ",
    'ERRORS = {{\n    400: "bad request",\n    401: "not signed in",\n    # {name}: it {what}\n',
)
KINDS = {"code": CODE_FORMS, "docs": DOC_FORMS, "list": LIST_FORMS, "chat": CHAT_FORMS}


@dataclass(frozen=True)
class Candidate:
    """A prompt to try: what kind of text it asks for, its form, its text."""

    kind: str
    form: str
    text: str


def candidates() -> list[Candidate]:
    """All short candidates, every form with every thing and action."""
    found: list[Candidate] = []
    for kind, forms in KINDS.items():
        for form, thing, (verb, what) in itertools.product(forms, THINGS, ACTIONS):
            noun = thing.split(" with ")[0].split(" of ")[0].removeprefix("a ").removeprefix("an ")
            name = f"{verb}_{noun.replace(' ', '_')}"
            klass = "".join(part.capitalize() for part in name.split("_"))
            title = f"{verb.capitalize()} {noun}"
            text = form.format(name=name, klass=klass, thing=thing, what=what, title=title, line="=" * len(title))
            found.append(Candidate(kind, "chat" if kind == "chat" else "raw", text))
    return found


def long_candidates(sources: Iterable[Path], characters: Iterable[int]) -> list[Candidate]:
    """Raw prompts cut out of this repository's own sources: their continuation crosses the window."""
    found: list[Candidate] = []
    for path in sources:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for start, size in itertools.product(range(0, 60, 6), characters):
            text = ""
            for line in lines[start:]:
                text += line
                if len(text) >= size:
                    found.append(Candidate("long", "raw", text))
                    break
    return found
