"""Synthetic runs of the nano spec as raw lines: every kind of ending that a record must be able to tell.

Nothing here is measured: rates come from `Speed`, bytes from counters, hashes from names. Built from the line models,
so a change of the raw format breaks these functions first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from harness.record.build import build_record
from harness.record.lines import (
    AnyLine,
    ArmLine,
    CaseLine,
    CheckLine,
    ChildLine,
    ComparisonLine,
    DecisionLine,
    Divergence,
    DrawLine,
    EndLine,
    StartLine,
    StepLine,
)
from harness.record.model import Record
from harness.record.store import RecordStore

DATE = "2026-11-30"
SPEC_ID = "specs/gemma4_nano.yaml"
STAGES = ("base", "attention", "attention_mlp", "rowwise")
CELLS = tuple(product(("unset", "0"), ("unset", "0")))
PROMPTS = ("code", "docs", "list")
TOKENS = 256
SPEC_TEXT = """\
schema: 1
name: gemma4_nano
title: Nano pair
pair:
  target: {path: checkpoints/gemma4-nano-it-4bit}
  drafter: {path: checkpoints/gemma4-nano-it-assistant-4bit}
  block_size: 4
checks:
  - {kind: geometry, id: geometry, expect: {target: {sliding_window: 1024}}}
  - {kind: row_identity, id: rows}
  - {kind: exactness_probe, id: probe, draws: [8, 8, 8, 1056]}
  - kind: attribution
    id: attribution
    matrix:
      multirow: {env: MLXCEL_QMV_MULTIROW, values: [null, "0"]}
      large_d: {env: MLXCEL_SDPA_VECTOR_LARGE_D, values: [null, "0"]}
  - {kind: greedy_parity, id: parity, prompts: [{file: prompts/code.txt}], max_tokens: 256, block_sizes: [2, 4, 8]}
  - {kind: decline, id: decline, stage: base, expect_reason: differ}
  - {kind: throughput, id: decode, arms: [{name: mtp, block_size: 4}], repeats: 3, max_tokens: 256}
"""
ENV: dict[str, Any] = {
    "schema_version": 1,
    "command": "harness run specs/gemma4_nano.yaml",
    "started_utc": f"{DATE}T09:00:00Z",
    "device": "cpu",
    "spec": {"path": SPEC_ID, "sha256": hashlib.sha256(SPEC_TEXT.encode()).hexdigest()},
    "source": {"commit": "0ee13dfe45aa0b1c2d3e4f5061728394a5b6c7d8", "dirty": False, "source_sha256": "5" * 64},
    "host": {
        "cpu": "Example CPU 2.0 GHz",
        "cpu_flags": ["avx512f", "amx_bf16"],
        "cores": 2,
        "memory_gib": 15.6,
        "kernel": "Linux 6.1.0",
        "machine": "x86_64",
    },
    "versions": {"python": "3.11.9", "torch": "2.13.0", "numpy": "2.3.0", "safetensors": "0.6.2"},
    "gate": {"load1": 0.21, "cores": 2, "busy": False, "memory_available_gib": 14.0, "note": "quiet"},
    "fingerprint": "f" * 64,
}
ROUND = (3, 2, 0, 3, 1, 3, 0, 2, 3, 1)  # accepted drafts, repeated: 18 of 30 drafts, 2.8 tokens per verify
NOISE = ((0.000, 0.004), (-0.006, 0.009), (0.003, -0.004), (0.001, 0.002), (-0.002, 0.005), (0.004, -0.003))


def sha(*parts: object) -> str:
    """A hash that stands for an output; equal parts, equal output."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


def case_id(name: str) -> str:
    """The full id of a case of the nano spec."""
    return f"{SPEC_ID}::{name}"


def rounds(tokens: int, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Accepted and drafted counts of a generation of `tokens`, the last round cut by the limit where need be."""
    accepted: list[int] = []
    while 1 + sum(accepted) + len(accepted) < tokens:
        accepted.append(min(ROUND[len(accepted) % len(ROUND)], block_size - 1))
    return tuple(accepted), (block_size - 1,) * len(accepted)


@dataclass(frozen=True)
class Speed:
    """What the throughput case measures: the ratio of the arm in each repeat over a classic rate."""

    ratios: tuple[float, ...] = (1.412, 1.453, 1.479)
    classic_tok_s: float = 139.2
    verdict: str = "faster"
    outcome: str = "pass"
    reason: str = "mtp: faster, all 3 deltas lie above 1.5 %, the largest |null|"


@dataclass(frozen=True)
class Scenario:
    """A run to synthesize; the default is the good one."""

    speed: Speed | None = Speed()
    differs: str | None = None  # prompt whose MTP text leaves classic's
    rowwise_diverges: bool = False
    inexact: bool = False
    skip: str | None = None
    error: str | None = None  # the throughput case ends with this error


def divergence(stage: str, large_d: str) -> Divergence | None:
    """First divergence of an attribution cell, as the reference record's picture has it."""
    where = {
        ("base", "unset"): (0, "sliding", "attention core", 0, 123),
        ("base", "0"): (0, "sliding", "MLP output", 0, 270),
        ("attention", "unset"): (0, "sliding", "MLP output", 0, 301),
        ("attention", "0"): (2, "sliding", "MLP output", 1, 288),
        ("attention_mlp", "unset"): (5, "full", "q_rope", 3, 12),
        ("attention_mlp", "0"): (6, "sliding", "q_rope", 2, 9),
    }.get((stage, large_d))
    if where is None:
        return None
    layer, kind, op, position, differing = where
    return Divergence(
        layer=layer,
        layer_kind=kind,
        op=op,
        position=position,
        differing_bytes=differing,
        total_bytes=512,
        draw="draw 0",
    )


def start_line(cases: Sequence[str], resumed: bool = False) -> StartLine:
    """The first line of a run."""
    return StartLine(
        spec=SPEC_ID,
        spec_sha256=hashlib.sha256(SPEC_TEXT.encode()).hexdigest(),
        started_utc=f"{DATE}T09:0{int(resumed)}:00Z",
        command="harness run specs/gemma4_nano.yaml" + (" --resume" if resumed else ""),
        resumed=resumed,
        cases=tuple(cases),
    )


def child_line(name: str = "default", **flags: str | None) -> ChildLine:
    """A ready child; flags as `multirow="0"`."""
    long = {"multirow": "MLXCEL_QMV_MULTIROW", "large_d": "MLXCEL_SDPA_VECTOR_LARGE_D"}
    asked = {long[key]: value for key, value in flags.items()}
    return ChildLine(
        child=name,
        env_requested=asked,
        flags_effective={flag: asked.get(flag) or "1" for flag in long.values()},
        ready_s=2.42,
        device="cpu",
        threads=2,
        versions={"python": "3.11.9", "torch": "2.13.0"},
        target={"name": "gemma4-nano-it-4bit", "bytes": 24_400_000, "fingerprint": {"config_sha256": "a" * 64}},
        drafter={
            "name": "gemma4-nano-it-assistant-4bit",
            "bytes": 2_700_000,
            "fingerprint": {"config_sha256": "b" * 64},
        },
        peak_memory_bytes=512 * 2**20,
    )


def draw_line(case: str, name: str, prompt: int, positions: int, differing: int = 0, block_size: int = 4) -> DrawLine:
    """One draw; rows are 4,096 logits of two bytes."""
    return DrawLine(
        case=case,
        draw=name,
        prompt_tokens=prompt,
        block_size=block_size,
        positions=positions,
        passed=not differing,
        differing_bytes=differing,
        total_bytes=positions * 8192,
        first_position=1 if differing else None,
        seconds=0.4,
    )


def decision_line(case: str, found: Divergence | None, classic: str, inexact: bool = False) -> DecisionLine:
    """Engaged without a divergence or by override, else declined with it."""
    engaged = found is None or inexact
    reason = "every draw is exact" if found is None else found.describe()
    log = f"MTP engaged: {reason}" if engaged else f"MTP declined: {reason}"
    return DecisionLine(
        case=case,
        engaged=engaged,
        inexact=inexact,
        reason=reason,
        log_line=log,
        classic_sha256=sha(classic),
        first_divergence=found,
    )


def case_line(name: str, kind: str, outcome: str, reason: str, **more: Any) -> CaseLine:
    """The end of a case."""
    return CaseLine.model_validate(
        {"case": case_id(name), "kind": kind, "outcome": outcome, "reason": reason, "seconds": 3.2, "child": "default"}
        | more
    )


def attribution_lines(stage: str, multirow: str, large_d: str, diverges: bool = False) -> list[AnyLine]:
    """One cell of the stages x flags table."""
    name = f"attribution[stage:{stage}+multirow:{multirow}+large_d:{large_d}]"
    case = case_id(name)
    found = divergence("base", large_d) if diverges and stage == "rowwise" else divergence(stage, large_d)
    bytes_differing = found.differing_bytes * 7 if found else 0
    if found is None:
        outcome, reason = "pass", "exact on 4 draws and walks; engaged"
    else:
        outcome, reason = ("fail" if stage == "rowwise" else "declined"), f"first divergence: {found.describe()}"
    return [
        draw_line(case, "draw 0 (8 tokens)", 8, 4, bytes_differing),
        decision_line(case, found, f"classic large_d={large_d}"),
        case_line(name, "attribution", outcome, reason, child=f"multirow:{multirow}+large_d:{large_d}"),
    ]


def probe_lines(inexact: bool = False) -> list[AnyLine]:
    """The start-up probe at its default."""
    case = case_id("probe")
    draws = [(f"draw {index} ({size:,} tokens)", size, 4) for index, size in enumerate((8, 8, 8, 1056))]
    draws += [("walk (160 + 128 tokens)", 160, 128), ("walk (1,056 + 128 tokens)", 1056, 128)]
    found = divergence("base", "unset") if inexact else None
    lines: list[AnyLine] = [draw_line(case, *draw, differing=99 if inexact else 0) for draw in draws]
    lines.append(decision_line(case, found, "probe", inexact))
    if inexact:
        return [*lines, case_line("probe", "exactness_probe", "fail", "draw 0 (8 tokens): 99 of 32768 bytes differ")]
    reason = "6 draws and walks equal the chain in every byte of 272 rows; engaged"
    return [*lines, case_line("probe", "exactness_probe", "pass", reason)]


def parity_lines(differs: str | None) -> list[AnyLine]:
    """3 prompts x 3 block sizes; `differs` names a prompt that leaves classic at token 17, at block size 4."""
    lines: list[AnyLine] = []
    for prompt, block_size in product(PROMPTS, (2, 4, 8)):
        wrong = prompt == differs and block_size == 4
        accepted, drafted = rounds(TOKENS, block_size)
        lines.append(
            ComparisonLine(
                case=case_id("parity"),
                prompt=prompt,
                form="raw" if prompt == "list" else "chat",
                prompt_tokens=180 + len(prompt),
                block_size=block_size,
                tokens=TOKENS,
                identical=not wrong,
                text_identical=not wrong,
                first_difference=17 if wrong else None,
                classic_sha256=sha(prompt),
                mtp_sha256=sha(prompt, "wrong") if wrong else sha(prompt),
                finish_reason="length",
                distinct_tokens=96 + len(prompt),
                accepted_per_round=accepted,
                drafted_per_round=drafted,
                decode_s=1.3,
                classic_decode_s=1.8,
            )
        )
    if differs is None:
        end = case_line("parity", "greedy_parity", "pass", "9 of 9 outputs equal classic")
    else:
        reason = f"prompt {differs}, block size 4: token 17 of {TOKENS} differs from classic"
        end = case_line("parity", "greedy_parity", "fail", reason)
    return [*lines, end]


def statement_lines() -> list[AnyLine]:
    """Geometry, row identity and the pair that must decline."""
    decline = case_id("decline")
    found = divergence("base", "unset")
    return [
        CheckLine(case=case_id("geometry"), name="target.sliding_window", passed=True, expected="1024", found="1024"),
        case_line("geometry", "geometry", "pass", "all 1 shapes and predicates are as expected", seconds=0.1),
        CheckLine(
            case=case_id("rows"),
            name="linear 256 -> 768, 1..8 rows",
            passed=True,
            expected="0 bytes differ",
            found="0 bytes differ",
            differing_bytes=0,
        ),
        case_line("rows", "row_identity", "pass", "1 op equals its one-row calls", seconds=1.4),
        decision_line(decline, found, "classic large_d=unset"),
        CheckLine(case=decline, name="code: output", passed=True, expected="classic's ids", found="classic's ids"),
        case_line("decline", "decline", "declined", "declined as stated; classic output of 1 prompts is unchanged"),
    ]


def arm_line(repeat: int, slot: str, rate: float, prompt: str, output: str, block_size: int = 4) -> ArmLine:
    """One timed generation at a decode rate in tokens/s."""
    mtp = slot == "arm"
    accepted, drafted = rounds(TOKENS, block_size) if mtp else ((), ())
    return ArmLine.model_validate(
        {
            "case": case_id("decode"),
            "repeat": repeat,
            "slot": slot,
            "arm": "mtp" if mtp else "classic",
            "block_size": block_size if mtp else 1,
            "prompt": prompt,
            "prompt_tokens": 184,
            "tokens": TOKENS,
            "sha256": output,
            "distinct_tokens": 96 + len(prompt),
            "ttft_s": 0.21,
            "decode_s": (TOKENS - 1) / rate,
            "accepted_per_round": accepted,
            "drafted_per_round": drafted,
            "verify_s": 0.0086 * len(accepted),
            "draft_s": 0.0010 * sum(drafted),
            "load1": 1.1,
        }
    )


def repeat_lines(repeat: int, ratio: float, classic_tok_s: float, differs: str | None = None) -> list[AnyLine]:
    """Open, arm, close of one repeat."""
    prompt = PROMPTS[repeat % len(PROMPTS)]
    opening = classic_tok_s * (1 + NOISE[repeat % len(NOISE)][0])
    closing = opening * (1 + NOISE[repeat % len(NOISE)][1])
    output = sha(prompt)
    return [
        arm_line(repeat, "open", opening, prompt, output),
        arm_line(
            repeat, "arm", ratio * (opening + closing) / 2, prompt, sha(prompt, "x") if prompt == differs else output
        ),
        arm_line(repeat, "close", closing, prompt, output),
    ]


def step_lines() -> list[AnyLine]:
    """Step times around medians that a two-core machine gives."""
    times = {"classic": (1, 0.0072), "classic_unpadded": (1, 0.00665), "verify": (4, 0.0086), "draft": (1, 0.0010)}
    return [
        StepLine.model_validate(
            {
                "case": case_id("decode"),
                "step": step,
                "rows": rows,
                "context_tokens": 312,
                "seconds": tuple(middle * (1 + 0.01 * place) for place in (-1, 0, 1, 0, 2)),
            }
        )
        for step, (rows, middle) in times.items()
    ]


def throughput_lines(scenario: Scenario) -> list[AnyLine]:
    """The throughput case."""
    speed = scenario.speed
    if scenario.error:
        return [case_line("decode", "throughput", "error", scenario.error)]
    if speed is None:
        return []
    lines: list[AnyLine] = []
    for repeat, ratio in enumerate(speed.ratios):
        lines += repeat_lines(repeat, ratio, speed.classic_tok_s, scenario.differs)
    if scenario.differs:
        reason = f"prompt {scenario.differs}: tokens differ between timed runs, so no speed is stated"
        return [*lines, case_line("decode", "throughput", "fail", reason)]
    end = case_line("decode", "throughput", speed.outcome, speed.reason, verdict=speed.verdict, seconds=48.0)
    return [*lines, *step_lines(), end]


def all_ids() -> list[str]:
    """Every case of the nano spec, in planned order."""
    cells = [f"attribution[stage:{s}+multirow:{m}+large_d:{d}]" for s in STAGES for m, d in CELLS]
    return [case_id(name) for name in ("geometry", "rows", "probe", *cells, "parity", "decline", "decode")]


def run_lines(scenario: Scenario = Scenario()) -> list[AnyLine]:
    """A whole run, from its start line to its end line."""
    start = start_line(all_ids())
    end = EndLine(ended_utc=f"{DATE}T09:07:30Z", exit_code=0)
    if scenario.skip is not None:
        kinds = {"rows": "row_identity", "probe": "exactness_probe", "parity": "greedy_parity", "decode": "throughput"}
        names = [name.partition("::")[2] for name in start.cases]
        skipped = [
            case_line(
                name,
                kinds.get(name, name.partition("[")[0]),
                "skipped",
                scenario.skip,
                child=None,
                seconds=0.0,
            )
            for name in names
        ]
        return [start, *skipped, end]
    lines: list[AnyLine] = [start, child_line(), *statement_lines()[:4], *probe_lines(scenario.inexact)]
    for multirow, large_d in CELLS:
        flags = {"multirow": multirow, "large_d": large_d}
        asked = {key: None if value == "unset" else value for key, value in flags.items()}
        lines.append(child_line(f"multirow:{multirow}+large_d:{large_d}", **asked))
        for stage in STAGES:
            lines += attribution_lines(stage, multirow, large_d, scenario.rowwise_diverges)
    lines += [*parity_lines(scenario.differs), *statement_lines()[4:], *throughput_lines(scenario)]
    outcomes = {line.outcome for line in lines if isinstance(line, CaseLine)}
    code = 1 if "fail" in outcomes else 3 if "error" in outcomes else 0
    return [*lines, end.model_copy(update={"exit_code": code})]


SCENARIOS: dict[str, Scenario] = {
    "faster": Scenario(),
    "slower": Scenario(
        speed=Speed((0.88, 0.893, 0.881), verdict="slower", reason="mtp: slower, all 3 deltas lie below the floor")
    ),
    "unresolved": Scenario(
        speed=Speed((1.004, 0.996, 1.021), verdict="unresolved", outcome="unresolved", reason="mtp: unresolved")
    ),
    "differs": Scenario(differs="docs"),
    "declined": Scenario(rowwise_diverges=True),
    "inexact": Scenario(inexact=True),
    "skipped": Scenario(skip="no checkpoint gemma-4-12b-it-4bit under $HARNESS_MODELS | set it"),
    "error": Scenario(error="child default died (signal 9)\nlast log line: out of memory"),
}


def killed_lines() -> list[AnyLine]:
    """The lines of a run that was killed in its second repeat: no case line for `decode`, no end line."""
    lines = run_lines()
    cut = next(place for place, line in enumerate(lines) if isinstance(line, ArmLine) and line.repeat == 1)
    return lines[: cut + 2]


def write_record(out: Path, lines: Iterable[AnyLine], *, torn: str = "", finish: bool = True) -> RecordStore:
    """A record on disk as a run leaves it; `torn` is appended raw, without a line end."""
    store = RecordStore.create(out, "gemma4_nano", "cpu", DATE, SPEC_TEXT)
    store.write_env(ENV)
    for line in lines:
        store.append(line)
    store.close()
    if torn:
        with store.paths.runs.open("a", encoding="utf-8") as file:
            file.write(torn)
    (store.logs / "default.log").write_text("MTP engaged: every draw is exact\n", encoding="utf-8")
    if finish:
        store.finish()
    return store


def stored_json(store: RecordStore) -> dict[str, Any]:
    """record.json as it stands on disk."""
    loaded: dict[str, Any] = json.loads(store.paths.record.read_text(encoding="utf-8"))
    return loaded


def record_of(lines: list[AnyLine], spec_text: str = SPEC_TEXT) -> Record:
    """The record that lines give, in the nano spec's environment."""
    return build_record(lines, ENV, spec_text)


def change(lines: list[AnyLine], pick: Callable[[AnyLine], bool], **update: object) -> list[AnyLine]:
    """The lines with the first that `pick` accepts changed."""
    place = next(place for place, line in enumerate(lines) if pick(line))
    return [*lines[:place], lines[place].model_copy(update=update), *lines[place + 1 :]]
