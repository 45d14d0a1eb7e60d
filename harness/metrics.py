"""Drafting counters as other engines print them: vLLM, SGLang and llama.cpp, as Prometheus text, log lines or JSON.

`read_counters` finds whatever it knows in a file, one `Counters` a source. Names and formats are those of the engines'
own metrics endpoints, server logs and responses; each reader says which. Our own runs.jsonl is read as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.counters import Counters, Stated
from harness.errors import Problem, SpecError
from harness.metrics_json import JSON_OBJECTS
from harness.metrics_log import LOG_LINES, NUMBER, percent

MAX_BYTES = 64 << 20
LARGEST = 1e15  # a count above it is damage
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?[0-9]+)?\s*$")
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_WANTED = re.compile(r"(?:vllm|llamacpp):spec_decode_|sglang:spec_")
_JSON = re.compile(r"\s*(?:\{|\[\s*[\[{\]])")  # log lines begin with a bracket too, but not with two
KNOWN = (
    "vllm:spec_decode_num_*_total, sglang:spec_accept_length and spec_accept_rate, llamacpp:spec_decode_num_*_total; "
    "log lines `SpecDecoding metrics:`, `accept len:`, `draft acceptance`, `statistics ...:`, `n_drafted =`; "
    "JSON with spec_verify_ct or draft_n; our runs.jsonl"
)


class BadMetrics(SpecError):
    """A file of metrics that cannot be read: every fault with its line, exit code 2 like any other input."""


def read_counters(path: Path) -> list[Counters]:
    """Every source of drafting counters in a file. BadMetrics for an unreadable or damaged file, or one without any."""
    shown = path.as_posix()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadMetrics([Problem(shown, 1, 1, f"cannot read it: {error.strerror or error}")]) from None
    if len(data) > MAX_BYTES:
        raise BadMetrics([Problem(shown, 1, 1, f"{len(data)} bytes; at most {MAX_BYTES}")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadMetrics([Problem(shown, line, 1, f"byte 0x{data[error.start]:02x} is not UTF-8")]) from None
    reader = _Reader(shown)
    found = reader.json_text(text) if _JSON.match(text) else reader.lines(text)
    if reader.problems:
        raise BadMetrics(reader.problems)
    if not found:
        raise BadMetrics([Problem(shown, 1, 1, f"no drafting counters; known are {KNOWN}")])
    return found


class _Reader:
    """One file; faults are collected with their lines."""

    def __init__(self, shown: str) -> None:
        self.shown, self.name = shown, shown.rpartition("/")[2]
        self.problems: list[Problem] = []

    def fault(self, line: int, col: int, message: str) -> None:
        """Note what is wrong, and where."""
        self.problems.append(Problem(self.shown, line, col, message))

    # ---- Prometheus text and logs ------------------------------------------------------------------------------------

    def lines(self, text: str) -> list[Counters]:
        """Log lines in their order, then what the samples of a metrics endpoint add up to."""
        samples: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[float, str]] = {}
        found: list[Counters] = []
        block: dict[str, tuple[int, str]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if _WANTED.match(line):
                self._sample(number, line, samples)
                continue
            for words, read in LOG_LINES.items():
                if words in line:
                    try:
                        counters = read(f"{self.name}:{number}", line)
                    except (ValueError, OverflowError) as error:
                        self.fault(number, line.find(words) + 1, f"`{words}`: {error}")
                    else:
                        found += [counters] if counters is not None else []
                    break
            match = re.search(r"\b(n_draft|n_predict|n_drafted|n_accept|accept)\s+=\s+(\S+)", line)
            if match:
                block[match[1]] = (number, match[2])
                if match[1] == "accept" and "n_drafted" in block:
                    found += self._example(block)
                    block = {}
        return found + self._families(samples)

    def _sample(self, number: int, line: str, samples: dict[Any, tuple[float, str]]) -> None:
        match = _SAMPLE.match(line)
        labels = _labels(match["labels"] or "") if match else None
        if match is None or labels is None:
            self.fault(number, 1, 'not a Prometheus sample: NAME{LABEL="VALUE",...} NUMBER')
            return
        if match["name"].endswith("_created"):
            return
        if re.fullmatch(NUMBER, match["value"]) is None or abs(float(match["value"])) >= LARGEST:
            self.fault(number, match.start("value") + 1, f"{match['name']} is {match['value']}, which is no number")
            return
        key = (match["name"], tuple(sorted(labels.items())))
        if key in samples:
            self.fault(number, 1, f"{match['name']} with these labels is here a second time; give one scrape")
        samples[key] = (number, match["value"])

    def _families(self, samples: Mapping[Any, tuple[float, str]]) -> list[Counters]:
        """One source per engine and set of labels; the position is no label of a source."""
        groups: dict[tuple[str, str], dict[str, tuple[int, str]]] = {}
        for (name, labels), (number, value) in samples.items():
            engine, _, metric = name.partition(":")
            position = next((text for key, text in labels if key in ("position", "pos")), None)
            rest = ", ".join(f"{key} {text}" for key, text in labels if key not in ("position", "pos"))
            metric = metric.removesuffix("_total").removeprefix("spec_decode_num_")
            if metric == "accepted_tokens_per_pos":
                if position is None or re.fullmatch("[0-9]{1,4}", position) is None:
                    self.fault(int(number), 1, f"{name} has no whole number as its position")
                    continue
                metric = f"at {int(position)}"
            groups.setdefault((engine, rest), {})[metric] = (int(number), value)
        return [self._family(engine, rest, values) for (engine, rest), values in groups.items()]

    def _family(self, engine: str, rest: str, values: Mapping[str, tuple[int, str]]) -> Counters:
        source = f"{engine} {rest}".strip()
        if engine == "sglang":
            stated = {name: Stated.parse(text) for name, (_, text) in values.items()}
            return Counters(
                source,
                acceptance_length=stated.get("spec_accept_length"),
                acceptance_rate=stated.get("spec_accept_rate"),
            )
        at = {int(name[3:]): self._whole(number, text) for name, (number, text) in values.items() if name[:3] == "at "}
        missing = [position for position in range(max(at, default=-1) + 1) if position not in at]
        if missing:
            self.fault(min(n for n, _ in values.values()), 1, f"{source}: draft position {missing[0]} is missing")
            return Counters(source)
        count = {
            name: self._whole(*values[name]) for name in ("drafts", "draft_tokens", "accepted_tokens") if name in values
        }
        return Counters(
            source,
            rounds=count.get("drafts"),
            drafted=count.get("draft_tokens"),
            accepted=count.get("accepted_tokens"),
            accepted_at=tuple(at[position] for position in sorted(at)) if at else None,
            max_drafts=len(at) or None,
        )

    def _whole(self, number: int, text: str) -> int:
        value = float(text)
        if value != int(value):
            self.fault(number, 1, f"a counter is {text}; counts are whole numbers")
        return int(value)

    def _example(self, block: Mapping[str, tuple[int, str]]) -> list[Counters]:
        """llama.cpp's speculative example: n_draft, n_predict, n_drafted, n_accept, accept."""
        values: dict[str, int] = {}
        for name, (number, text) in block.items():
            if name != "accept":
                if re.fullmatch("-?[0-9]{1,15}", text) is None:
                    self.fault(number, 1, f"{name} is {text}, which is no whole number")
                    return []
                values[name] = int(text)
        number, text = block["accept"]
        rate = percent(text)
        if rate is None and values.get("n_drafted"):
            self.fault(number, 1, f"accept is {text}, which is no percentage")
        return [
            Counters(
                f"llama.cpp example, {self.name}:{number}",
                drafted=values.get("n_drafted"),
                accepted=values.get("n_accept"),
                emitted=values.get("n_predict"),
                acceptance_rate=rate,
            )
        ]

    # ---- JSON --------------------------------------------------------------------------------------------------------

    def json_text(self, text: str) -> list[Counters]:
        """One document, or one a line."""
        try:
            return list(self._documents([(1, json.loads(text))]))
        except RecursionError:
            self.fault(1, 1, "nested too deeply")
            return []
        except ValueError as error:
            whole = error
        documents: list[tuple[int, Any]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    documents.append((number, json.loads(line)))
                except (ValueError, RecursionError) as error:
                    one = whole if number == 1 else error
                    place = getattr(one, "lineno", 1) if number == 1 else number
                    self.fault(place, getattr(one, "colno", 1), f"not JSON: {getattr(one, 'msg', one)}")
                    return []
        return list(self._documents(documents))

    def _documents(self, documents: list[tuple[int, Any]]) -> Iterator[Counters]:
        for number, document in documents:
            for place, item in _objects(document, ""):
                read = next((read for key, read in JSON_OBJECTS.items() if key in item), None)
                if read is None:
                    continue
                try:
                    counters = read(f"{self.name}:{number}{place and f' {place}'}", item)
                except (ValueError, OverflowError) as error:
                    self.fault(number, 1, f"{place or 'the object'}: {error}")
                    continue
                if counters is not None:
                    yield counters


def _labels(text: str) -> dict[str, str] | None:
    found: dict[str, str] = {}
    place = 0
    while place < len(text):
        match = _LABEL.match(text, place)
        if match is None:
            return None
        found[match[1]] = match[2]
        place = match.end()
    return found


def _objects(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in a document, with its place, outermost first."""
    if isinstance(value, dict):
        yield place, value
        for key, inner in value.items():
            yield from _objects(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _objects(inner, f"{place}[{number}]")
