"""Pages with generated blocks: markers, splicing, and finding what somebody changed inside them.

A block is all that stands between its BEGIN and END marker, and is rewritten alone; prose outside survives.
Line endings, blank lines and the padding of table cells are not changes; every other character is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.errors import RecordError
from harness.record.sections import Block

BEGIN = "<!-- BEGIN generated: {name} (harness report; do not edit) -->"
END = "<!-- END generated: {name} -->"
MARKER = re.compile(r"^<!-- (BEGIN|END) generated: (.+?)(?: \(.*\))? -->$")
FRONT = "front matter"
PROSE_HINT = "<!-- What you write outside the generated blocks survives `harness report`. -->"
RULE_CELL = re.compile(r"^(:?)-+(:?)$")


@dataclass(frozen=True)
class Span:
    """A block as it stands in a page: first and last line of its text, counting from 1."""

    name: str
    first: int
    last: int
    lines: tuple[str, ...]


def front_matter(keys: Mapping[str, str]) -> str:
    """Flat YAML between two rules; values that YAML would read as something else are quoted."""
    return "\n".join(["---", *(f"{key}: {_scalar(value)}" for key, value in keys.items()), "---"])


def _scalar(value: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_./+-]*( [A-Za-z0-9_./+-]+)*", value) and value.lower() not in (
        "yes",
        "no",
        "on",
        "off",
    ):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def wrap(block: Block) -> str:
    """A block with its markers."""
    return f"{BEGIN.format(name=block.name)}\n{block.text}\n{END.format(name=block.name)}"


def compose(front: str, blocks: Sequence[Block]) -> str:
    """A new page."""
    return "\n\n".join([*([front] if front else []), *map(wrap, blocks), PROSE_HINT]) + "\n"


def spans(text: str) -> dict[str, Span]:
    """The blocks of a page by name, the front matter among them; RecordError when markers do not pair."""
    lines = text.splitlines()
    found: dict[str, Span] = {}
    if lines and lines[0].strip() == "---":
        close = next((place for place, line in enumerate(lines[1:], start=1) if line.strip() == "---"), None)
        if close is not None:
            found[FRONT] = Span(FRONT, 1, close + 1, tuple(lines[: close + 1]))
    opened: tuple[str, int] | None = None
    for number, line in enumerate(lines, start=1):
        match = MARKER.match(line.strip())
        if match is None:
            continue
        kind, name = match.groups()
        if kind == "BEGIN":
            if opened is not None:
                raise RecordError(
                    f"line {number}: block '{name}' begins inside block '{opened[0]}'; restore its END marker"
                )
            if name in found:
                raise RecordError(f"line {number}: block '{name}' stands twice; remove one of them")
            opened = (name, number)
        else:
            if opened is None or opened[0] != name:
                raise RecordError(f"line {number}: block '{name}' ends without having begun; restore its BEGIN marker")
            found[name] = Span(name, opened[1] + 1, number - 1, tuple(lines[opened[1] : number - 1]))
            opened = None
    if opened is not None:
        raise RecordError(f"line {opened[1]}: block '{opened[0]}' never ends; restore its END marker")
    return found


def splice(text: str, front: str, blocks: Sequence[Block]) -> str:
    """`text` with every generated block renewed, obsolete ones removed, missing ones put after their predecessor."""
    lines = text.splitlines()
    old = spans(text)
    fresh = {block.name: block for block in blocks}
    order = [block.name for block in blocks]
    replaced: dict[int, tuple[int, list[str]]] = {}  # first line of the old text -> (last line, new lines)
    missing_after: dict[str | None, list[str]] = {}
    anchor: str | None = None
    for name in order:
        if name in old:
            anchor = name
        else:
            missing_after.setdefault(anchor, []).append(name)
    for name, span in old.items():
        if name == FRONT:
            replaced[span.first] = (span.last, front.splitlines())
            continue
        new = wrap(fresh[name]).splitlines() if name in fresh else []
        for extra in missing_after.get(name, []):
            new += ["", *wrap(fresh[extra]).splitlines()]
        replaced[span.first - 1] = (span.last + 1, new)
    out: list[str] = [] if FRONT in old or not front else [*front.splitlines(), ""]
    number = 1
    head = [line for extra in missing_after.get(None, []) for line in (*wrap(fresh[extra]).splitlines(), "")]
    if FRONT not in old:
        out += head
    while number <= len(lines):
        if number in replaced:
            last, new = replaced[number]
            out += new
            if not new and out and not out[-1] and last < len(lines) and not lines[last]:
                out.pop()  # a removed block leaves one blank line, not two
            if number == 1 and FRONT in old:
                out += ["", *head[:-1]] if head else []  # the blank line after the front matter follows
            number = last + 1
        else:
            out.append(lines[number - 1])
            number += 1
    return "\n".join(out).rstrip("\n") + "\n"


def replace_block(text: str, block: Block) -> str:
    """`text` with one block renewed and nothing else touched; a text without that block comes back as it is."""
    span = spans(text).get(block.name)
    if span is None:
        return text
    lines = text.splitlines()
    return "\n".join([*lines[: span.first - 1], *block.text.splitlines(), *lines[span.last :]]) + "\n"


def block_differences(text: str, block: Block) -> list[str]:
    """Like `differences`, for one block of a page that others own; a page without it has none."""
    try:
        span = spans(text).get(block.name)
    except RecordError as error:
        return [str(error)]
    return _block_differences(span, block.text.splitlines()) if span is not None else []


def differences(text: str, front: str, blocks: Sequence[Block]) -> list[str]:
    """Each place where a page's generated parts are not what the raw lines give, as `line: block, place: what`."""
    try:
        old = spans(text)
    except RecordError as error:
        return [str(error)]
    fresh = [*([Block(FRONT, front)] if front else []), *blocks]
    problems: list[str] = []
    for block in fresh:
        span = old.get(block.name)
        if span is None:
            problems.append(f"block '{block.name}' is missing")
        else:
            problems += _block_differences(span, block.text.splitlines())
    known = {block.name for block in fresh}
    problems += [
        f"{span.first}: block '{span.name}' is not generated any more"
        for span in old.values()
        if span.name not in known
    ]
    return problems


def _normal(line: str) -> tuple[str, ...]:
    """A line without what reformatting may change: a table row as its cells, other text with single spaces."""
    flat = " ".join(line.split())
    if not flat.startswith("|"):
        return (flat,)
    cells = [part.strip() for part in re.split(r"(?<!\\)\|", flat.strip("|"))]
    return tuple(RULE_CELL.sub(r"\1-\2", cell) for cell in cells)


def _block_differences(span: Span, fresh: Sequence[str]) -> list[str]:
    if list(span.lines) == list(fresh):
        return []
    have = [(span.first + place, line) for place, line in enumerate(span.lines) if line.strip()]
    want = [line for line in fresh if line.strip()]
    old_keys, new_keys = [_normal(line) for _, line in have], [_normal(line) for line in want]
    problems: list[str] = []
    matcher = difflib.SequenceMatcher(a=old_keys, b=new_keys, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        for place in range(max(i2 - i1, j2 - j1)):
            i, j = i1 + place, j1 + place
            if i < i2 and j < j2:
                problems.append(f"{have[i][0]}: block '{span.name}', {_changed(old_keys[i], new_keys, j)}")
            elif i < i2:
                problems.append(f"{have[i][0]}: block '{span.name}', line added: {have[i][1].strip()!r}")
            else:
                line = have[i2 - 1][0] if have and i2 else span.first
                problems.append(f"{line}: block '{span.name}', line missing after this one: {want[j].strip()!r}")
    return problems


def _changed(old: tuple[str, ...], keys: Sequence[tuple[str, ...]], j: int) -> str:
    new = keys[j]
    if len(new) < 2 or len(old) != len(new):
        return f"the page says {' | '.join(old)!r}, the raw lines give {' | '.join(new)!r}"
    first = j
    while first and len(keys[first - 1]) == len(new):
        first -= 1
    header = keys[first]
    place = next(place for place, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
    where = "header" if j == first else f"row {new[0]!r}"
    return f"{where}, column {header[place]!r}: the page says {old[place]!r}, the raw lines give {new[place]!r}"
