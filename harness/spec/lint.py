"""What a valid spec may still get wrong: warnings that a reader of its record would raise. Reads the spec's own files.

`lint(loaded)` walks the resolved cases, so a rule sees defaults, axes and flags as a run would. A warning is answered
by a change, or by a comment on its line, above it, or at its check: `# lint: allow RULE: why`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import Problem
from harness.spec.lint_kernel import kernel_findings
from harness.spec.lint_rules import RULES, Finding, Subject, spec_findings
from harness.spec.load import LoadedSpec
from harness.spec.plan import plan
from harness.spec.yaml12 import Document, read_document

_ALLOW = re.compile(r"#\s*lint:\s*(?P<verb>\S*)\s*(?P<rules>[a-z0-9, -]*?)\s*(?::\s*(?P<why>.*))?$")


@dataclass(frozen=True)
class Allowance:
    """A comment that answers warnings of some rules, with its reason."""

    line: int
    col: int
    covers: tuple[int, ...]  # lines whose warnings it answers
    rules: tuple[str, ...]
    fault: str | None


def lint(loaded: LoadedSpec, models: Path | None = None) -> tuple[Problem, ...]:
    """Every warning of one spec, by place; `models` is the folder of real checkpoints."""
    document = read_document(loaded.path, loaded.id_path)
    subject = Subject(loaded, plan(loaded), models)
    allowances = _allowances(document)
    used: set[tuple[int, str]] = set()
    problems: list[Problem] = []
    for finding in (*spec_findings(subject), *kernel_findings(subject)):
        place = document.problem(finding.loc, _words(finding))
        head = document.line(finding.loc[:2]) if finding.loc[:1] == ("checks",) else place.line
        answers = [a for a in allowances if finding.rule in a.rules and not a.fault]
        answers = [a for a in answers if place.line in a.covers or head in a.covers]
        used.update((answer.line, finding.rule) for answer in answers)
        if not answers:
            problems.append(place)
    if subject.window is None:  # here `horizon` cannot speak, so a comment that answers it is not stale
        used.update((found.line, "horizon") for found in allowances)
    problems += _stale(document, allowances, used)
    return tuple(sorted(set(problems)))


def _words(finding: Finding) -> str:
    return f"warning: {finding.what}; {finding.todo} [{finding.rule}]"


def _allowances(document: Document) -> list[Allowance]:
    rows = document.text.splitlines()
    return [found for number, row in enumerate(rows, start=1) if (found := _allowance(rows, row, number)) is not None]


def _allowance(rows: list[str], row: str, number: int) -> Allowance | None:
    match = _ALLOW.search(row)
    if match is None:
        return None
    names = tuple(part.strip() for part in match["rules"].split(",") if part.strip())
    fault = None
    if match["verb"] != "allow" or not names:
        fault = "expected `# lint: allow RULE: why`"
    elif unknown := [name for name in names if name not in RULES]:
        fault = f"unknown rule '{unknown[0]}'; rules: {', '.join(sorted(RULES))}"
    elif not (match["why"] or "").strip():
        fault = f"no reason for allowing {', '.join(names)}; write `# lint: allow {names[0]}: why`"
    covers = [number]
    if not row[: match.start()].strip():  # on a line of its own: it speaks for the next line that is no comment
        below = (place for place in range(number, len(rows)) if rows[place].strip() and rows[place].strip()[0] != "#")
        covers.append(next(below, number - 1) + 1)
    return Allowance(number, match.start() + 1, tuple(covers), names, fault)


def _stale(document: Document, allowances: list[Allowance], used: set[tuple[int, str]]) -> Iterator[Problem]:
    """Comments that are malformed, or that answer no warning any more."""
    for found in allowances:
        if found.fault:
            yield Problem(document.file, found.line, found.col, f"warning: {found.fault} [allow]")
            continue
        for rule in found.rules:
            if (found.line, rule) not in used:
                text = f"warning: nothing here breaks {rule}; take the comment out [allow]"
                yield Problem(document.file, found.line, found.col, text)
