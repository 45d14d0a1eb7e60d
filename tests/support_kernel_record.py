"""Synthetic raw lines of a `kernel_throughput` case: the good one, and ways to spoil it. Nothing here is measured."""

from __future__ import annotations

from collections.abc import Sequence

from harness.record.lines import (
    AnyLine,
    CaseLine,
    CheckLine,
    ChildLine,
    EndLine,
    KernelLine,
    KernelShapeLine,
    PeerLine,
    StartLine,
)

DATE = "2026-11-30"
SPEC_ID = "specs/kernels_tiny.yaml"
REPEATS = 5
SPEC_TEXT = """\
schema: 1
name: kernels_tiny
title: Kernels in small
requires: {cuda: true}
checks:
  - {kind: row_identity, id: rows, geometry: tiny}
  - kind: kernel_throughput
    id: qmv
    op: qmv
    peers: [stream, tinygemm, marlin]
    repeats: 5
    bars:
      min_stream_share: 0.6
      max_m8_over_m1: 1.04
      min_four_over_one: 3.6
      max_rel_error: 2e-6
      max_peer_ratio: {tinygemm: {m1: 0.65, m4: 0.5}}
    shapes:
      - {name: gate+up, k: 3840, n: 30720, bits: 4}
      - {name: down, k: 15360, n: 3840, bits: 8, bars: {min_stream_share: 0.7, max_rel_error: 5e-7}}
  - kind: kernel_throughput
    id: attention
    op: attention
    geometries: [12b]
    layers: [full]
    contexts: [2048]
    repeats: 5
    bars: {max_m4_over_m1: 1.35}
"""
NOISE = (1.0, 1.004, 0.997, 1.002, 0.999)
SHAPES = {"3840x30720-4bit": ("gate+up", 66_355_200), "15360x3840-8bit": ("down", 62_668_800)}


def case_id(name: str) -> str:
    """The full id of a case."""
    return f"{SPEC_ID}::{name}"


def us(middle: float, count: int = REPEATS) -> tuple[float, ...]:
    """Repeats around a median."""
    return tuple(round(middle * factor, 4) for factor in NOISE[:count])


def statement(case: str, name: str, differing: int = 0) -> CheckLine:
    """One statement about bytes."""
    return CheckLine(
        case=case,
        name=name,
        passed=not differing,
        expected="0 of 4096 bytes differ",
        found=f"{differing} of 4096 bytes differ" + (", first M = 4, row 2" if differing else ""),
        differing_bytes=differing,
    )


def qmv_lines(
    shape: str = "3840x30720-4bit",
    *,
    one: float = 20.0,
    four: float = 20.2,
    eight: float = 20.4,
    four_launches: float = 79.0,
    stream: float = 490.0,
    tinygemm: float = 34.0,
    tinygemm_four: float = 45.0,
    again: float = 20.02,
    error: float = 4.8e-7,
    differing: int = 0,
    tinygemm_reason: str | None = None,
) -> list[AnyLine]:
    """The raw lines of one product, up to its case line."""
    case = case_id(f"qmv[shape:{shape}]")
    name, nbytes = SHAPES[shape]

    def arm(arm: str, rows: int, middle: float, **more: object) -> KernelLine:
        fields = {"nbytes": nbytes, "calls": 16, "clock": "graph", "us": us(middle), **more}
        return KernelLine.model_validate({"case": case, "arm": arm, "rows": rows, **fields})

    lines: list[AnyLine] = [
        KernelShapeLine(
            case=case,
            op="qmv",
            name=name,
            shape=shape,
            nbytes=nbytes,
            copies=8,
            backend="triton",
            config="tile 64, split 2",
        ),
        statement(case, "M = 1..8 against one-row calls", differing),
        statement(case, "each row in each slot"),
    ]
    if differing:
        return lines
    lines += [
        PeerLine(case=case, peer="stream"),
        PeerLine(case=case, peer="tinygemm", version="torch 2.11.0", reason=tinygemm_reason),
        PeerLine(case=case, peer="marlin", reason="$HARNESS_MARLIN_LIBRARY is not set; it names vLLM's _C.abi3.so"),
        arm("ours", 1, one, rel_error=error),
        arm("ours", 4, four, rel_error=error),
        arm("ours", 8, eight, rel_error=error),
        arm("ours", 1, four_launches, launches=4, nbytes=4 * nbytes),
        arm("stream", 0, stream, nbytes=2 << 30, calls=1),
    ]
    if tinygemm_reason is None:
        lines += [arm("tinygemm", 1, tinygemm, rel_error=2e-3), arm("tinygemm", 4, tinygemm_four, rel_error=2e-3)]
    return [*lines, arm("ours", 1, again, again=True)]


def attention_lines(four: float = 13.0) -> list[AnyLine]:
    """The raw lines of one attention case, up to its case line."""
    case = case_id("attention[geometry:12b+layer:full+context:2048]")
    shape = KernelShapeLine(
        case=case,
        op="attention",
        name="12b full",
        shape="16 heads on 1 x 512, 2048 keys",
        nbytes=4_196_352,
        copies=120,
        backend="triton",
        config="64 slots, chunks of 128",
    )
    lines: list[AnyLine] = [
        shape,
        statement(case, "M = 1..8 against one-row calls"),
        PeerLine(case=case, peer="stream"),
    ]
    for rows, middle, again in ((1, 10.0, False), (4, four, False), (8, 18.0, False), (1, 10.01, True)):
        lines.append(
            KernelLine(
                case=case,
                arm="ours",
                rows=rows,
                again=again,
                nbytes=4_196_352,
                calls=240,
                clock="graph",
                us=us(middle),
                rel_error=1.7e-3,
            )
        )
    stream = KernelLine(case=case, arm="stream", rows=0, nbytes=2 << 30, calls=1, clock="graph", us=us(490.0))
    return [*lines, stream]


def ended(lines: Sequence[AnyLine], outcome: str = "pass", reason: str = "rows exact") -> list[AnyLine]:
    """Those lines and the end of their case."""
    case = getattr(lines[0], "case", "")
    end = {"case": case, "kind": "kernel_throughput", "outcome": outcome, "reason": reason, "seconds": 6.5}
    return [*lines, CaseLine.model_validate({**end, "child": "default", "log": "default.log"})]


def run_lines(*cases: Sequence[AnyLine]) -> list[AnyLine]:
    """A whole run: row identity, then the cases."""
    rows = case_id("rows")
    parts = [list(case) for case in cases]
    ids = (rows, *(str(getattr(part[0], "case", "")) for part in parts))
    start = StartLine(
        spec=SPEC_ID,
        spec_sha256="",
        started_utc=f"{DATE}T10:00:00Z",
        command=f"harness run {SPEC_ID}",
        cases=ids,
    )
    child = ChildLine(
        child="default",
        env_requested={},
        flags_effective={},
        ready_s=3.5,
        device="NVIDIA H200",
        threads=8,
        versions={"python": "3.12.3", "torch": "2.11.0+cu130", "triton": "3.6.0"},
    )
    equal = CheckLine(
        case=rows, name="linear: down", passed=True, expected="equal bytes", found="equal bytes", differing_bytes=0
    )
    done = CaseLine(case=rows, kind="row_identity", outcome="pass", reason="all equal", seconds=2.0, child="default")
    end = EndLine(ended_utc=f"{DATE}T10:05:00Z", exit_code=0)
    return [start, child, equal, done, *(line for part in parts for line in part), end]


def good_run() -> list[AnyLine]:
    """Two products and one attention layer, all well."""
    second = qmv_lines(
        "15360x3840-8bit", one=19.0, four=19.1, eight=19.3, four_launches=75.5, again=19.01, error=2e-7,
        tinygemm_reason="has no 8-bit weights in groups",
    )  # fmt: skip
    return run_lines(ended(qmv_lines()), ended(second), ended(attention_lines()))
