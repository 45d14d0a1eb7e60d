"""Every figure goes round: a digit changed on the page or in record.json is found, a changed raw number shows.

The first half holds the check, the second half the page: a raw number that nothing shows is listed here, with why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support_kernel_record as kernel_support
import support_record as support
import test_harness_peer_decode as peer_support
from test_certificate import certified_lines
from test_harness_oracle import with_curve
from test_record_floor import with_floor

from harness.pairs import NULL
from harness.record.build import build_record
from harness.record.lines import (
    LINE_ADAPTER,
    AnyLine,
    ArmLine,
    CaseLine,
    ChildLine,
    EndLine,
    GateLine,
    RollbackLine,
    StartLine,
    StepLine,
)
from harness.record.model import Record
from harness.record.page import differences
from harness.record.render import front, render
from harness.record.report import _json_differences, check, record_json, regenerate
from harness.record.sections import blocks
from harness.record.telemetry import Telemetry
from harness.rollback import Grid

ROLLBACK_SPEC = support.SPEC_TEXT.replace(
    "  - {kind: row_identity, id: rows}\n", "  - {kind: rollback, id: rollback}\n"
)


def rollback_run() -> list[AnyLine]:
    """A run of a rollback case alone, block size 2 on a ring of 23 slots."""
    grid, case = Grid(2, 16, 23), support.case_id("rollback")
    lines: list[AnyLine] = [support.start_line([case]), support.child_line()]
    for label, length in grid.prompts.items():
        for script in grid.scripts(length):
            found = {
                "case": case, "block_size": 2, "window": 16, "ring_slots": 23, "prompt": label, "prompt_tokens": length,
                "script": script, "accepted_per_round": script, "tokens": 1 + sum(script) + len(script),
                "identical": True, "rounds_compared": len(script), "differing_bytes": 0, "seconds": 0.1,
            }  # fmt: skip
            lines.append(RollbackLine.model_validate(found))
    lines.append(support.case_line("rollback", "rollback", "pass", "all cells equal"))
    return [*lines, EndLine(ended_utc=f"{support.DATE}T10:00:00Z", exit_code=0)]


def todays_lines() -> list[AnyLine]:
    """The pair's run with all that came later: certificate, null block, processes, telemetry, floor, step curve."""
    curve = [line for line in with_curve() if isinstance(line, StepLine)]
    case, clock = support.case_id("decode"), 100.0
    found: list[AnyLine] = []

    def reading() -> Telemetry:
        nonlocal clock
        clock += 5.0
        counted = {"cpu_busy_s": 3.0 * clock, "own_cpu_s": 2.0 * clock, "cpu_throttles": 0, "cores": 8}
        gpu = {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "temperature_c": 40, "power_w": 300.0}
        gpu["memory_temperature_c"] = 51
        held = {"utilisation": 90, "power_held_ms": clock * 1e-3, "thermal_held_ms": 0.0}
        return Telemetry.model_validate({"at_s": clock, "load1": 1.0, "cpu_mhz": 2000.0, **counted, **gpu, **held})

    def timed(line: ArmLine, **changes: Any) -> ArmLine:
        before = reading()
        return line.model_copy(update={"process": 0, "before": before, "after": reading(), **changes})

    lines = certified_lines()
    whole = [line for line in lines if isinstance(line, ArmLine)]
    opening, closing = (next(line for line in whole if line.slot == slot) for slot in ("open", "close"))
    for line in lines:
        if isinstance(line, StepLine):
            found += curve
            curve = []
            continue
        if isinstance(line, ArmLine):
            if not any(isinstance(one, GateLine) for one in found):
                found.append(GateLine(case=case, when="before", waited_s=2.5, note="busy", telemetry=reading()))
            found.append(timed(line))
            if line is whole[-1]:
                for slot, one in (("open", opening), ("arm", opening), ("close", closing)):
                    found.append(timed(one, repeat=3, slot=slot, arm=NULL if slot == "arm" else "classic"))
                found.append(GateLine(case=case, when="after", telemetry=reading()))
            continue
        found.append(line.model_copy(update={"load_phases": {"read": 0.5}}) if isinstance(line, ChildLine) else line)
    return with_floor(found)


def engines_run() -> list[AnyLine]:
    """A run of a peer_decode case alone."""
    case = SimpleNamespace(id="specs/tiny.yaml::engines")  # all of a case that its lines name
    ended = CaseLine(case=case.id, kind="peer_decode", outcome="pass", reason="as the lines say", seconds=1.0)
    lines = peer_support.lines_for(case, transformers="is not installed")  # type: ignore[arg-type]
    end = EndLine(ended_utc=f"{support.DATE}T10:00:00Z", exit_code=0)
    return [support.start_line([case.id]), *lines, ended, end]


@dataclass(frozen=True)
class Run:
    """Lines of a run and the spec that they are read with."""

    lines: Callable[[], list[AnyLine]]
    spec: str

    def record(self, lines: list[AnyLine] | None = None) -> Record:
        return build_record(self.lines() if lines is None else lines, support.ENV, self.spec)


RUNS = {
    "pair": Run(support.run_lines, support.SPEC_TEXT),
    "differing pair": Run(lambda: support.run_lines(support.SCENARIOS["differs"]), support.SPEC_TEXT),
    "pair of today": Run(todays_lines, support.SPEC_TEXT),
    "kernels": Run(kernel_support.good_run, kernel_support.SPEC_TEXT),
    "engines": Run(engines_run, peer_support.SPEC_TEXT + peer_support.CHECK),
    "rollback": Run(rollback_run, ROLLBACK_SPEC),
}


@pytest.mark.parametrize("name", RUNS)
def test_these_runs_are_sound(name: str) -> None:
    """The base of every change below: a run that contradicts itself would hide what a change adds."""
    assert RUNS[name].record().contradictions == ()
    arms = {line.arm for line in RUNS[name].lines() if isinstance(line, ArmLine)}
    assert (NULL in arms) == (name == "pair of today")


@pytest.mark.parametrize("name", RUNS)
def test_every_digit_of_a_page_is_checked(name: str) -> None:
    """Guards a figure outside the generated blocks, in a title, a caption or a link: none may be changed unseen."""
    record = RUNS[name].record()
    text = render(record, "stem")
    head, made = front(record, "stem"), blocks(record, "stem")
    assert list(differences(text, head, made)) == []
    places = [match.start() for match in re.finditer(r"\d", text)]
    assert len(places) > 100
    for place in places if name == "pair" else places[::7]:
        changed = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
        assert list(differences(changed, head, made)), text[max(0, place - 40) : place + 20]


def numbers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], float]]:
    """Every number in a JSON value, truth values included, with its path."""
    if isinstance(value, bool | int | float):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from numbers(inner, (*path, place))


def changed(value: Any, path: tuple[str | int, ...]) -> Any:
    """A copy with one number changed: a truth turned, a count one more, a time or a large count over a third more."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for part in path[:-1]:
        inner = inner[part]
    old = inner[path[-1]]
    more = old + 1 + (old // 3 if old > 1000 else 0) if isinstance(old, int) else old * 1.37 + 0.01
    inner[path[-1]] = not old if isinstance(old, bool) else more
    return copy


@pytest.mark.parametrize("name", RUNS)
def test_every_number_of_record_json_is_checked(name: str) -> None:
    """Guards the file that other programs read, number by number."""
    stored = json.loads(record_json(RUNS[name].record()))
    paths = [path for path, _ in numbers(stored)]
    for path in paths[:: max(1, len(paths) // 150)]:
        found = list(_json_differences(changed(stored, path), stored, ""))
        assert len(found) == 1, path
        assert str(path[-1]) in found[0]


NOT_SHOWN = {
    ("arm", "load1"): "telemetry of the host, for whoever looks into a run; no figure uses it",
    ("arm:classic", "load1"): "the same",
    ("arm:classic", "ttft_s"): "the page shows the arm's time to the first token, classic's is the same prefill",
    ("comparison", "decode_s"): "nothing brackets these runs, so a rate from them would mean nothing",
    ("comparison", "classic_decode_s"): "the same",
    ("start", "certified"): "of a run that has certificates, or times no arm; elsewhere every speed-up shows it",
    (
        "path",
        "longest_prompt",
    ): "how far an arm may go, asked before it is timed; its own lines say how far it went",
    ("gate", "waited_s"): "how long a case waited for a quiet CPU; the page says whether it was quiet then",
    ("telemetry", "at_s"): "counts only where the pair of readings crosses the limit of *busy* or *throttled*",
    ("telemetry", "cores"): "the same",
    ("telemetry", "power_held_ms"): "the same",
    ("telemetry", "thermal_held_ms"): "the same",
    ("telemetry", "utilisation"): "a reading between two arms, where nothing runs; for whoever looks into a run",
    ("kernel", "calls"): "how many calls one timed sequence held; times are a call's share of it",
    ("rollback", "seconds"): "how long one generation took; the case's seconds are shown",
}
"""Raw numbers that no page and no record.json shows, each with its reason."""


def field_of(line: AnyLine, path: tuple[str | int, ...]) -> tuple[str, ...]:
    """The kind of line and the field, places in lists left out; classic's arm lines apart from the others.

    Readings of telemetry are one kind, wherever they stand.
    """
    if {"before", "after", "telemetry"} & set(path):
        return ("telemetry", str(path[-1]))
    kind = "arm:classic" if getattr(line, "arm", "") == "classic" else line.line
    return (kind, *(str(part) for part in path if isinstance(part, str)))


@cache
def raw_effects(name: str) -> dict[tuple[str, ...], str]:
    """For every numeric field of a run's raw lines: where a change of it shows: `page`, `record.json` or `nothing`.

    One value is changed first, up to three in turn; where that shows nothing, all of them at once, for a median.
    """
    run = RUNS[name]
    lines = run.lines()
    sound = run.record()
    page = shown(sound)
    data = [line.model_dump(mode="json") for line in lines]
    places: dict[tuple[str, ...], list[tuple[int, tuple[str | int, ...]]]] = {}
    for place, line in enumerate(lines):
        for path, _ in numbers(data[place]):
            places.setdefault(field_of(line, path), []).append((place, path))

    def effect(changes: list[tuple[int, tuple[str | int, ...]]]) -> str:
        other = dict(enumerate(data))
        for place, path in changes:
            other[place] = changed(other[place], path)
        touched = {place for place, _ in changes}
        made = [LINE_ADAPTER.validate_python(other[at]) if at in touched else line for at, line in enumerate(lines)]
        record = run.record(made)
        return "page" if shown(record) != page else "record.json" if record != sound else "nothing"

    found: dict[tuple[str, ...], str] = {}
    for field, where in places.items():
        tries = [[one] for one in where[:3]] + [where[:200]]
        found[field] = next((seen for one in tries if (seen := effect(one)) != "nothing"), "nothing")
    return found


def shown(record: Record) -> list[str]:
    """What a page says, links and all."""
    return [front(record, "stem"), *(block.text for block in blocks(record, "stem"))]


RAW = [name for name in RUNS if name != "differing pair"]  # there speeds are withheld, so their numbers show nothing


@pytest.mark.parametrize("name", RAW)
def test_every_raw_number_shows_or_is_listed_with_its_reason(name: str) -> None:
    """Guards raw numbers that could be changed, and the record rendered anew, without a word on the page."""
    effects = raw_effects(name)
    assert len(effects) > 15
    silent = {field for field, seen in effects.items() if seen == "nothing"}
    assert silent <= set(NOT_SHOWN), sorted(silent - set(NOT_SHOWN))


def test_the_list_of_what_is_not_shown_is_not_stale() -> None:
    """Guards a reason that outlives its field."""
    silent = {field for name in RAW for field, seen in raw_effects(name).items() if seen == "nothing"}
    assert silent == set(NOT_SHOWN)


def test_a_raw_number_that_is_changed_on_disk_fails_the_check_and_shows_in_the_new_page(tmp_path: Path) -> None:
    """Guards the whole way: raw file, check, report, page."""
    paths = support.write_record(tmp_path, support.run_lines()).paths
    before = paths.page.read_text(encoding="utf-8")
    text = paths.runs.read_text(encoding="utf-8")
    paths.runs.write_text(text.replace('"distinct_tokens":100', '"distinct_tokens":10', 1), encoding="utf-8")
    assert check(paths.page)
    regenerate(paths.page)
    after = paths.page.read_text(encoding="utf-8")
    assert after != before
    assert paths.page.name


DISAGREEMENTS: dict[str, tuple[Callable[[AnyLine], bool], dict[str, object], str]] = {
    "classic with rounds": (
        lambda line: getattr(line, "arm", "") == "classic", {"block_size": 4}, "the rounds or the block size of an arm"
    ),
    "classic that drafted": (
        lambda line: getattr(line, "arm", "") == "classic", {"draft_s": 0.1}, "the rounds or the block size of an arm"
    ),
    "one output, two counts": (
        lambda line: getattr(line, "slot", "") == "close", {"distinct_tokens": 7}, "one output of code is said to have"
    ),
    "one prompt, two lengths": (
        lambda line: getattr(line, "slot", "") == "arm" and getattr(line, "repeat", 0) == 0,
        {"prompt_tokens": 9},
        "prompt code is said to have 9 and 184 tokens",
    ),
    "another format": (lambda line: isinstance(line, StartLine), {"schema_version": 2}, "raw lines of format 2"),
    "another exit code": (lambda line: isinstance(line, EndLine), {"exit_code": 1}, "exit code 1, but the outcomes"),
    "a failure that ended well": (
        lambda line: isinstance(line, CaseLine) and line.kind == "geometry",
        {"outcome": "fail"},
        "exit code 0, but the outcomes of the cases make it 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_what_raw_lines_say_twice_must_agree(name: str) -> None:
    """Guards fields that no figure of their own holds in place."""
    pick, update, words = DISAGREEMENTS[name]
    sound = support.run_lines()
    assert support.record_of(sound).contradictions == ()
    found = support.record_of(support.change(sound, pick, **update)).contradictions
    assert any(words in problem for problem in found), found


def test_a_scripted_token_that_differs_withholds_every_speed() -> None:
    """Guards a headline beside a rollback that changed the text: one differing token anywhere is enough."""
    pair, scripted = support.run_lines(), rollback_run()
    wrong = next(line for line in scripted if isinstance(line, RollbackLine)).model_copy(update={"identical": False})
    sound = support.record_of([*pair[:-1], *scripted[2:-1], pair[-1]])
    assert sound.tokens_identical is True
    record = support.record_of([*pair[:-1], wrong, pair[-1]])
    assert record.tokens_identical is False
    assert all(arm.speedup is None for case in record.cases for arm in case.arms)
    assert "differs" in record.title
