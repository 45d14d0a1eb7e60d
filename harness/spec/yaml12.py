"""YAML 1.2 with marks: text -> plain values plus the node tree that says where each one stands.

Differs from PyYAML where 1.1 surprises: `off` and `1:30` are text, `1e-3` is a number, a repeated key is an error.
Tags, anchors, aliases and merge keys are refused: a spec says everything in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.errors import Problem, SpecError

Loc = tuple[str | int, ...]
_MAX_BYTES = 1 << 17  # thirty times the longest spec here; the parser takes 25 s for a megabyte
_MAX_DEPTH = 20  # a spec needs 6; the parser's time grows with the square of the depth
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")


class _Replay(yaml.composer.Composer, yaml.resolver.Resolver):
    """Composes nodes from events that were parsed and checked before, so that a file is scanned once.

    Every plain scalar stays text until `_scalar` reads it by the 1.2 rules.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own class attribute)

    def __init__(self, events: list[yaml.Event]) -> None:
        yaml.composer.Composer.__init__(self)
        yaml.resolver.Resolver.__init__(self)
        self._events, self._next = events, 0

    def check_event(self, *choices: type[yaml.Event]) -> bool:
        """Whether the next event is one of these kinds."""
        return self._next < len(self._events) and isinstance(self._events[self._next], choices or yaml.Event)

    def peek_event(self) -> yaml.Event:
        """The next event."""
        return self._events[self._next]

    def get_event(self) -> yaml.Event:
        """The next event, taken."""
        self._next += 1
        return self._events[self._next - 1]


@dataclass(frozen=True)
class Document:
    """One YAML file: its values, and the nodes behind them."""

    file: str
    text: str
    value: Any
    root: yaml.Node

    def problem(self, loc: Loc, message: str, *, key: bool = False) -> Problem:
        """A Problem at the entry `loc`; with `key`, at the entry's key instead of its value."""
        mark = self._mark(loc, key=key)
        return Problem(self.file, mark.line + 1, mark.column + 1, message)

    def line(self, loc: Loc) -> int:
        """Line of the entry, from 1."""
        return int(self._mark(loc, key=False).line) + 1

    def _mark(self, loc: Loc, *, key: bool) -> Any:
        node, mark = self.root, self.root.start_mark
        for part in loc:
            found = _child(node, part)
            if found is None:  # a union tag of the validator, or an entry that is missing: stay at the parent
                continue
            key_node, node = found
            mark = key_node.start_mark if key and key_node is not None else node.start_mark
        return mark


def _child(node: yaml.Node, part: str | int) -> tuple[yaml.Node | None, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if key_node.value == part:
                return key_node, value_node
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return None, node.value[part]
    return None


def read_document(path: Path, shown: str) -> Document:
    """Read one YAML file; `shown` is its name in messages. Raises SpecError with every problem found."""
    text = _read_text(path, shown)
    root = _compose(text, shown)
    problems: list[Problem] = []
    value = _construct(root, shown, problems)
    if problems:
        raise SpecError(problems)
    return Document(shown, text, value, root)


def _read_text(path: Path, shown: str) -> str:
    try:
        if path.is_dir():
            raise SpecError([Problem(shown, 1, 1, "this is a folder; name a .yaml file")])
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            raise SpecError([Problem(shown, 1, 1, "this is no regular file; name a .yaml file")])
        data = path.read_bytes()
    except FileNotFoundError:
        raise SpecError([Problem(shown, 1, 1, "no such file")]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError([Problem(shown, 1, 1, f"cannot read it: {reason}")]) from None
    if len(data) > _MAX_BYTES:
        raise SpecError([Problem(shown, 1, 1, f"{len(data)} bytes; a spec is at most {_MAX_BYTES}")])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, col = before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1) + 1
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise SpecError([Problem(shown, line, col, message)]) from None


def _compose(text: str, shown: str) -> yaml.Node:
    problems: list[Problem] = []
    try:
        depth, events = 0, []
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            events.append(event)
            problems.extend(_refused(event, shown))
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                mark: Any = event.start_mark
                raise SpecError([*problems, Problem(shown, mark.line + 1, mark.column + 1, "nested too deeply")])
        if problems:
            raise SpecError(problems)
        root = _Replay(events).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, col = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise SpecError([*problems, Problem(shown, line, col, _syntax_message(error, text, line, col))]) from None
    except yaml.reader.ReaderError as error:
        position = error.position if isinstance(error.position, int) else 0
        line = text.count("\n", 0, position) + 1
        col = position - (text.rfind("\n", 0, position) + 1) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character[:1] or "\0")
        raise SpecError([Problem(shown, line, col, f"control character U+{code:04X} is not allowed")]) from None
    if root is None or (isinstance(root, yaml.ScalarNode) and _scalar(root) is None):
        raise SpecError([Problem(shown, 1, 1, "the file is empty; `harness new NAME` writes one to start from")])
    if not isinstance(root, yaml.MappingNode):
        mark = root.start_mark
        found = "a list" if isinstance(root, yaml.SequenceNode) else "plain text"
        message = f"expected keys and values (schema, name, title, pair, checks), found {found}"
        raise SpecError([Problem(shown, mark.line + 1, mark.column + 1, message)])
    return root


def _refused(event: Any, shown: str) -> Iterator[Problem]:
    mark = event.start_mark
    place = (shown, mark.line + 1, mark.column + 1)
    if isinstance(event, yaml.AliasEvent):
        yield Problem(*place, f"alias '*{event.anchor}' is not allowed; write the value out")
    elif isinstance(event, yaml.NodeEvent) and event.anchor:
        yield Problem(*place, f"anchor '&{event.anchor}' is not allowed; write the value where it is used")
    tag = getattr(event, "tag", None)
    if tag and not isinstance(event, yaml.AliasEvent):
        yield Problem(*place, f"tag '{tag.replace('tag:yaml.org,2002:', '!!')}' is not allowed; write a plain value")


def _syntax_message(error: yaml.MarkedYAMLError, text: str, line: int, col: int) -> str:
    rows = text.splitlines()
    row = rows[line - 1] if line <= len(rows) else ""
    if "\t" in row[: len(row) - len(row.lstrip())] or row[col - 1 : col] == "\t":
        return "a tab is not allowed here; indent with spaces"
    problem = (error.problem or "not valid YAML").strip()
    if "but found another document" in problem or "single document" in (error.context or ""):
        return "a second document starts here; one spec per file"
    context = f" ({error.context.strip()})" if error.context else ""
    return f"not valid YAML: {problem}{context}"


def _construct(node: yaml.Node, shown: str, problems: list[Problem]) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return tuple(_construct(item, shown, problems) for item in node.value)
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        mark = key_node.start_mark
        place = (shown, mark.line + 1, mark.column + 1)
        if not isinstance(key_node, yaml.ScalarNode) or not isinstance(_scalar(key_node), str):
            found = repr(_scalar(key_node)) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
            problems.append(Problem(*place, f"a key must be a word, found {found}"))
            continue
        key = key_node.value
        if key == "<<" and key_node.style is None:
            problems.append(Problem(*place, "merge key '<<' is not allowed; write the keys out"))
            continue
        value = _construct(value_node, shown, problems)
        if key in lines:
            problems.append(Problem(*place, f"duplicate key '{key}' (first at line {lines[key]})"))
            continue
        lines[key] = mark.line + 1
        values[key] = value
    return values


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """Value of a scalar by the YAML 1.2 core rules; quoted and block scalars are text."""
    text = str(node.value)
    if node.style is not None:
        return text
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text) and len(text) <= 300:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
