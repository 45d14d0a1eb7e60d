"""The byte floor, the bars on steps, and what a child's start went into: from raw lines to the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support_harness import ROOT, SPEC_TEXT, write_spec
from support_record import ENV, Scenario, case_id, child_line, record_of, run_lines
from support_record import SPEC_TEXT as RECORD_SPEC

from harness.checks.registry import get
from harness.record.build import build_record
from harness.record.lines import AnyLine, ArmLine, CaseLine, ChildLine, DecisionLine, FloorLine, StepLine
from harness.record.model import Record
from harness.record.report import record_json
from harness.record.sections.context import host
from harness.record.sections.speed import steps
from harness.record.sections.summary import summary
from harness.spec import load_spec, plan
from harness.spec.speed_model import StepBars
from harness.step_bars import StepBar, step_bars

BARS = "bars: {min_floor_share: 0.55, max_verify_over_classic: 1.06, min_speedup_per_length: 0.4}"
FLOOR = {"weight_bytes": 9 * 10**9, "kv_bytes": 10**9, "stream_bytes": 2 * 10**12, "stream_s": (0.5, 1.0, 0.6)}


def with_floor(lines: list[AnyLine], **changes: Any) -> list[AnyLine]:
    """The lines of a run, with the floor's inputs before its first step."""
    place = next(i for i, line in enumerate(lines) if isinstance(line, StepLine))
    step = lines[place]
    assert isinstance(step, StepLine)
    floor = FloorLine.model_validate({**FLOOR, **changes, "case": step.case, "context_tokens": step.context_tokens})
    return [*lines[:place], floor, *lines[place:]]


def test_the_floor_is_bytes_over_the_streams_rate() -> None:
    """Guards the figure that speed is judged by: 10 GB at 3,333 GB/s (median of three) are 3 ms."""
    record = record_of(with_floor(list(run_lines(Scenario()))))
    (figures, *_) = next(case.steps for case in record.cases if case.steps)
    assert figures.floor is not None
    assert figures.floor.floor_ms == pytest.approx(3.0)
    assert figures.floor.stream_gb_per_s == pytest.approx(2000 / 0.6, rel=1e-5)
    assert figures.classic_step_ms is not None
    assert figures.floor.floor_share == pytest.approx(3.0 / figures.classic_step_ms, rel=1e-5)
    first = (
        f"- **Steps.** classic {figures.classic_step_ms:.2f} ms at {figures.context_tokens} tokens of context, of which"
    )
    assert f"{first} {figures.floor.floor_share:.2f} is its byte floor at 3,333 GB/s." in summary(record, "stem")
    page = steps(record, "stem")
    assert "| Matrices GB | Keys and values GB | Stream GB/s | Byte floor ms | Classic step ms | Floor / step |" in page
    assert f"| 9.00 | 1.000 | 3,333 | 3.00 | {figures.classic_step_ms:.2f} |" in page


def test_records_without_these_lines_keep_their_bytes() -> None:
    """Guards committed records: a figure that came later is left out of their record.json and their pages."""
    record = record_of(run_lines(Scenario()))
    text = record_json(record)
    assert not any(f'"{name}":' in text for name in ("floor", "bars", "decode", "engines", "load_phases"))
    assert "Byte floor" not in steps(record, "stem")
    assert "Of it" not in host(record, "stem")
    assert "**Steps.**" not in summary(record, "stem")
    assert "**Other engines.**" not in summary(record, "stem")
    full = record_of(with_floor(list(run_lines(Scenario()))))
    assert Record.model_validate_json(record_json(full)) == full


def test_a_childs_phases_stand_beside_its_start() -> None:
    """Guards the load time of a large pair: a record shows where it went."""
    child = child_line().model_copy(update={"load_phases": {"read": 1.234, "prepare": 0.5, "tokenizer": 0.001}})
    lines = [
        child if isinstance(line, ChildLine) and line.child == "default" else line for line in run_lines(Scenario())
    ]
    page = host(record_of(lines), "stem")
    assert "| read 1.23, prepare 0.50 |" in page
    assert "| not recorded |" in page


@pytest.fixture
def barred(tmp_path: Path) -> Any:
    """A throughput case with bars."""
    text = SPEC_TEXT.replace("arms: [{name: mtp}], repeats: 3", f"arms: [{{name: mtp}}], {BARS}, repeats: 3")
    return next(case for case in plan(load_spec(write_spec(tmp_path, text))) if case.kind == "throughput")


def judged(case: Any, classic_s: float = 0.005, verify_s: float = 0.005, floor: bool = True) -> Any:
    """The judgement on a run whose arm is twice as fast as classic, with these steps."""
    ratio = {"decode_s": 0.1, "accepted_per_round": (3, 3), "drafted_per_round": (3, 3)}
    lines: list[AnyLine] = [
        DecisionLine(case=case.id, engaged=True, inexact=False, reason="x", log_line="MTP engaged: x")
    ]
    for repeat in range(3):
        for slot in ("open", "arm", "close"):
            arm: dict[str, Any] = {"case": case.id, "repeat": repeat, "slot": slot, "prompt": "p", "sha256": "a"}
            arm |= {"arm": "mtp" if slot == "arm" else "classic", "block_size": 4, "prompt_tokens": 3, "tokens": 9}
            arm |= {"distinct_tokens": 9, "ttft_s": 0.01, "decode_s": 0.2} | (ratio if slot == "arm" else {})
            lines.append(ArmLine.model_validate(arm))
    if floor:
        given = {**FLOOR, "case": case.id, "context_tokens": 512}
        lines.append(FloorLine.model_validate(given))
    for step, rows, seconds in (("classic", 1, classic_s), ("verify", 4, verify_s), ("draft", 1, 0.0001)):
        shape = {"case": case.id, "step": step, "rows": rows, "context_tokens": 512, "seconds": (seconds,) * 3}
        lines.append(StepLine.model_validate(shape))
    return get("throughput").judge(case, lines, lines)


def test_bars_on_steps_are_judged(barred: Any) -> None:
    """Guards against a bar that is written down and never held against anything."""
    good = judged(barred)
    assert good.outcome == "pass", good.reason
    assert "3 bars met" in good.reason
    slow = judged(barred, classic_s=0.006, verify_s=0.006)
    assert slow.outcome == "fail"
    assert slow.reason.startswith("byte floor over classic step at 512 tokens is 0.5, bar at least 0.55; mtp: faster")
    wide = judged(barred, verify_s=0.006)
    assert (wide.outcome, "verify over classic step at 512 tokens is 1.2" in wide.reason) == ("fail", True)
    blind = judged(barred, floor=False)
    assert blind.outcome == "unresolved"
    assert "byte floor over classic step at 512 tokens was not measured, bar at least 0.55" in blind.reason


def test_steps_that_are_slower_in_the_runs_miss_a_bar() -> None:
    """Guards against a slow state of the runs that steps alone do not show: it lengthens both sides of the speed-up."""

    def bars(limit: float, **changes: float) -> dict[str, StepBar]:
        alone = [x.model_copy(update=changes) for x in figures]
        found = step_bars(StepBars(max_runs_over_alone=limit), 4, arms, alone)
        return {bar.what.partition(" ")[0]: bar for bar in found}

    record = record_of(run_lines(Scenario()))
    case = next(case for case in record.cases if case.steps)
    arms, figures = case.arms, case.steps
    arm = next(arm for arm in arms if arm.block_size == 4)
    assert arm.classic_step_ms is not None
    assert arm.verify_ms is not None
    level = {"classic_step_ms": arm.classic_step_ms, "verify_ms": arm.verify_ms}
    assert [bar.met for bar in bars(1.0, **level).values()] == [True, True]
    slow = bars(1.05, **level | {"classic_step_ms": arm.classic_step_ms / 1.1})
    assert {what: bar.met for what, bar in slow.items()} == {"classic": False, "verify": True}
    assert slow["classic"].words == "classic step in the timed runs over alone is 1.1, bar at most 1.05"
    assert [bar.met for bar in step_bars(StepBars(max_runs_over_alone=1), 4, (), ())] == [None, None]


def test_bars_stand_on_the_page() -> None:
    """Guards the reader: each bar with what was measured, and whether it holds."""
    text = RECORD_SPEC.replace("repeats: 3", f"repeats: 3, {BARS}")
    record = build_record(with_floor(list(run_lines(Scenario()))), ENV, text)
    bars = next(case.bars for case in record.cases if case.id == case_id("decode"))
    assert [bar.what.partition(" at ")[0] for bar in bars] == [
        "byte floor over classic step",
        "verify over classic step",
        "speed-up over tokens per verify",
    ]
    page = steps(record, "stem")
    assert "| Bar | Measured | Limit | Outcome |" in page
    assert "at least 0.55 |" in page


def test_a_missed_bar_keeps_the_verdict_and_says_so_in_the_title() -> None:
    """Guards against a speed-up that a missed bar hides, and against a miss that the speed-up hides."""
    text = RECORD_SPEC.replace("repeats: 3", "repeats: 3, bars: {max_verify_over_classic: 0.5}")
    ended = {"outcome": "fail", "reason": "verify over classic step is 1.1, bar at most 0.5", "verdict": "faster"}
    lines = [
        line.model_copy(update=ended) if isinstance(line, CaseLine) and line.kind == "throughput" else line
        for line in run_lines(Scenario())
    ]
    lines[-1] = lines[-1].model_copy(update={"exit_code": 1})
    record = build_record(lines, ENV, text)
    arm = next(arm for case in record.cases for arm in case.arms)
    assert (record.outcome, arm.verdict, record.negative) == ("fail", "faster", True)
    assert "faster than classic, byte-identical, 1 bar missed, first verify over classic step" in record.title
    assert record.contradictions == ()


def test_bytes_of_a_step_are_those_of_its_tensors() -> None:
    """Guards the floor's numerator against the caches and packed matrices themselves, on both sides of the window."""
    import torch

    from engine.dispatch import DispatchPolicy
    from engine.pair import load_pair
    from harness.worker.floor import floor_line, kv_bytes

    folder = ROOT / "specs" / "checkpoints" / "gemma4-nano-it-4bit"
    target = load_pair(folder, None, DispatchPolicy(backend="triton")).target
    packed = [weight.operand for _, weight in target.linear_weights()]
    stored = sum(operand.codes.numel() + operand.scales.numel() * 4 for operand in packed)
    line = floor_line("c", target, 600, (100, (0.5,)))
    assert line.weight_bytes == target.nbytes
    assert line.weight_bytes <= stored <= 1.01 * line.weight_bytes  # tiles are filled up with rows of zeros
    for context in (600, 1500):
        caches = target.new_caches()
        for layer, shape in zip(caches.layers, target.config.layers, strict=True):
            rows = torch.zeros(shape.num_kv_heads, context + 1, shape.head_dim, dtype=torch.bfloat16)
            for first in range(0, context + 1, 256):
                layer.write(rows[:, first : first + 256], rows[:, first : first + 256])
        seen = sum(2 * k.numel() * k.element_size() for k, *_ in (layer.keys_upto(context) for layer in caches.layers))
        assert kv_bytes(target.config, context, 2) == seen


def test_a_stream_has_a_rate() -> None:
    """Guards the floor's denominator: every repeat reads the whole buffer."""
    from harness.worker.floor import REPEATS, STREAM_BYTES, stream_seconds

    nbytes, seconds = stream_seconds("cpu")
    assert nbytes == STREAM_BYTES["cpu"]
    assert len(seconds) == REPEATS
    assert all(0.0001 < value < 5 for value in seconds)
