"""The record as data (`record.json`): every figure a page shows, under fixed names.

Built by `harness.record.build.build_record` from raw lines alone; rendered by `harness.record.render.render`.
Units live in the names (`_ms`, `_s`, `_bytes`); shares and deltas are parts of one.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from harness.record.lines import Divergence, Outcome, Verdict
from harness.record.part import Figure, Part, later
from harness.record.speed_model import AcceptanceFigures, ArmFigures, BarFigures, OracleFigures, StepFigures

SCHEMA_VERSION = 1


class CertificateFigures(Part):
    """One exactness certificate: what was compared, what it is bound to, and which arms it covers."""

    sha256: str
    case: str
    stage: str
    block_size: int
    flags: dict[str, str]
    inputs: tuple[str, ...]
    rows: int
    total_bytes: int
    walk_reach: int  # furthest position of a walk, which accepts and rolls back
    identity: dict[str, str | int]
    covers: tuple[str, ...]


class LedgerFigures(Part):
    """One setting: asked for against in force, and where that holds (children, or checks)."""

    name: str
    requested: str | None
    effective: str
    source: str
    read: str
    note: str
    differs: str | None
    where: tuple[str, ...]


class DrawFigures(Part):
    """One draw or walk of the probe."""

    draw: str
    prompt_tokens: int
    block_size: int
    positions: int
    passed: bool
    differing_bytes: int
    total_bytes: int
    first_position: int | None
    seconds: Figure


class ComparisonFigures(Part):
    """MTP against classic for one prompt and block size."""

    prompt: str
    form: str
    prompt_tokens: int
    block_size: int
    tokens: int
    identical: bool
    text_identical: bool
    first_difference: int | None
    classic_sha256: str
    mtp_sha256: str
    finish_reason: str
    distinct_tokens: int
    acceptance: AcceptanceFigures | None


class CheckFigures(Part):
    """One yes-or-no statement."""

    name: str
    passed: bool
    expected: str
    found: str
    differing_bytes: int | None


class RollbackFigures(Part):
    """Scripted rounds of one block size around the ring's edge, and which cells of the enumeration they visited."""

    block_size: int
    window: int
    ring_slots: int
    runs: int
    rounds: int  # each compared with classic decode's caches
    cells: int  # prompt lengths x states x accepted drafts
    reachable: int
    covered: int
    coverage: Figure  # covered / reachable
    missing: tuple[str, ...]  # reachable cells that no round visited
    unreachable: dict[str, int]  # why -> cells
    states: dict[str, tuple[int, int]]  # state -> cells covered, reachable
    prompts: tuple[str, ...]
    differing_bytes: int
    first_difference: str | None


class PeerFigures(Part):
    """A peer beside our kernel. `ratio` is our time over its own, by rows; below 1 ours is faster."""

    peer: str
    reason: str | None  # why it was not measured
    version: str
    note: str
    clock: str | None
    us: dict[str, Figure]  # per call, by rows
    gb_per_s: dict[str, Figure]  # on its own bytes
    ratio: dict[str, Figure]
    rel_error: Figure | None  # of its rounded output


class KernelFigures(Part):
    """One op at one shape, medians over repeats. No time stands here when `withheld`: a row's bytes differ."""

    op: str
    name: str
    shape: str
    bits: int | None
    nbytes: int  # read by one call of ours
    copies: int
    backend: str
    config: str
    compared: int  # statements about bytes
    differing_bytes: int
    withheld: bool
    clock: str | None
    us: dict[str, Figure]  # per call, by rows
    gb_per_s: dict[str, Figure]
    stream_gb_per_s: Figure | None  # the read-only stream, in the same repeats
    stream_share: Figure | None  # at one row
    m4_over_m1: Figure | None
    m8_over_m1: Figure | None
    four_over_one: Figure | None  # four one-row launches, each on its own weights, over one four-row launch
    rel_error: Figure | None
    null_range: tuple[Figure, Figure] | None
    null_spread: Figure | None
    peers: tuple[PeerFigures, ...]


class DecodeFigures(Part):
    """One engine after one context; ours, or a peer on the same checkpoint. No time where the run's tokens differ."""

    arm: str
    context_tokens: int
    ms_per_token: Figure | None  # median
    min_ms: Figure | None
    max_ms: Figure | None
    n: int
    speedup: Figure | None  # its time over ours: above 1 ours is faster
    same_tokens: int | None  # first tokens of its text that are ours
    tokens: int
    rows: int  # of the block
    rows_equal: int | None  # rows of its block that have its own chain's bytes
    differing_bytes: int | None
    total_bytes: int | None
    argmax_equal: int | None
    repeatable: bool | None  # its chain twice: the same bytes
    block_ms: Figure | None  # median time of the block
    block_over_token: Figure | None  # block_ms / ms_per_token: what a verify costs there


class EngineFigures(Part):
    """A peer of a `peer_decode` case."""

    peer: str
    reason: str | None  # why it was not measured
    version: str
    note: str


class CaseRecord(Part):
    """One case: how it ended, and the figures of its kind."""

    id: str
    name: str
    check: str
    kind: str
    cell: dict[str, str]
    flag_cell: str
    outcome: Outcome
    reason: str
    declared: bool  # a `declined` outcome is what the spec asks for
    verdict: Verdict | None
    finished: bool
    child: str | None
    seconds: Figure
    log: str | None
    engaged: bool | None = None
    inexact: bool | None = None
    decision_reason: str | None = None
    log_lines: tuple[str, ...] = ()
    classic_sha256: str | None = None
    first_divergence: Divergence | None = None
    first_divergence_text: str | None = None
    differing_bytes: int | None = None
    draws: tuple[DrawFigures, ...] = ()
    comparisons: tuple[ComparisonFigures, ...] = ()
    checks: tuple[CheckFigures, ...] = ()
    arms: tuple[ArmFigures, ...] = ()
    steps: tuple[StepFigures, ...] = ()
    kernel: KernelFigures | None = None
    bars: tuple[BarFigures, ...] = later(())
    decode: tuple[DecodeFigures, ...] = later(())
    engines: tuple[EngineFigures, ...] = later(())
    rollback: tuple[RollbackFigures, ...] = later(())
    outputs: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # prompt -> distinct output hashes
    bracketed: bool = True
    oracle: tuple[OracleFigures, ...] = later(())
    abandoned: int = later(0)  # repeats timed before an interruption; the case was timed anew and they count nowhere
    kernels_sha256: str | None = later()  # fingerprint of a probe's kernels


class ChildRecord(Part):
    """One child process: the flags asked for and the flags it read."""

    child: str
    device: str
    threads: int
    ready_s: Figure
    env_requested: dict[str, str | None]
    flags_effective: dict[str, str]
    versions: dict[str, str]
    target: dict[str, Any]
    drafter: dict[str, Any]
    peak_memory_bytes: int | None
    load_phases: dict[str, Figure] = later({})  # seconds by phase of ready_s


class Record(Part):
    """One run of one spec."""

    schema_version: int = SCHEMA_VERSION
    title: str  # states the finding
    subject: str
    spec: str
    spec_name: str
    spec_sha256: str
    command: str
    device: str
    date: str
    started_utc: str
    ended_utc: str | None
    resumed: int  # times the run was taken up again
    complete: bool
    exit_code: int | None
    outcome: Outcome
    verdict: Verdict | None
    negative: bool
    inexact: bool
    tokens_identical: bool | None  # None: no case compared tokens
    counts: dict[str, int]
    cases: tuple[CaseRecord, ...]
    not_run: tuple[str, ...]
    children: tuple[ChildRecord, ...]
    contradictions: tuple[str, ...]  # outcomes that the raw lines do not bear out
    host: dict[str, str]
    certificates: tuple[CertificateFigures, ...] = later(())  # absent in older records
    ledger: tuple[LedgerFigures, ...] = later(())
    sources: dict[str, str] = Field(default_factory=dict)  # sha256 of runs.jsonl, env.json, spec.yaml

    @property
    def prompts(self) -> tuple[str, ...]:
        """Every prompt that some case generated from, in order of appearance."""
        names = [c.prompt for case in self.cases for c in case.comparisons]
        names += [p for case in self.cases for arm in case.arms for r in arm.repeats for p in r.prompts]
        return tuple(dict.fromkeys(names))

    def of_kind(self, kind: str) -> tuple[CaseRecord, ...]:
        """Cases of one check kind, in planned order."""
        return tuple(case for case in self.cases if case.kind == kind)
