"""Figures of speed in a record: arms, steps, byte floor, oracle, bars. Units live in the names."""

from __future__ import annotations

from harness.record.lines import Verdict
from harness.record.part import Figure, Part, later


class AcceptanceFigures(Part):
    """Drafting counted over whole rounds; the bonus token counts in `acceptance_length`."""

    num_rounds: int
    num_drafted: int
    num_accepted: int
    acceptance_rate: Figure  # accepted / drafted
    acceptance_length: Figure  # tokens per verify, 1 + accepted / rounds
    accepted_per_round: Figure  # the same without the bonus: other projects' "mean accepted"
    accepted_at: tuple[Figure, ...]  # by draft position; denominator: rounds that offered that draft


class RepeatFigures(Part):
    """One repeat: classic opens, the arm runs, classic closes. Rates are withheld (null) when tokens differ."""

    repeat: int
    prompts: tuple[str, ...]
    identical: bool
    open_tok_s: Figure | None
    arm_tok_s: Figure | None
    close_tok_s: Figure | None
    delta: Figure | None
    null: Figure | None
    acceptance: AcceptanceFigures | None
    distinct_tokens: int
    process: int | None = later()


class DiscardFigures(Part):
    """Why a pair does not count."""

    repeat: int
    cause: str
    detail: str


class ArmFigures(Part):
    """One arm over all repeats. No figure here compares speed when `identical` is false."""

    arm: str
    block_size: int
    identical: bool
    tokens: int  # generated in one timed run, largest over runs
    n: int  # paired deltas
    speedup: Figure | None  # arm's decode rate over that of its brackets, tokens and seconds pooled
    speedup_geomean: Figure | None  # geometric mean of the paired ratios
    delta: tuple[Figure, ...]
    null: tuple[Figure, ...]
    null_range: tuple[Figure, Figure] | None
    interval: tuple[Figure, Figure] | None
    smallest_effect: Figure
    verdict: Verdict
    verdict_reason: str
    acceptance: AcceptanceFigures | None
    distinct_tokens: int  # smallest over the timed runs
    ttft_ms: Figure | None  # median
    verify_ms: Figure | None  # in the timed runs: per round, accept and rollback included
    draft_step_ms: Figure | None  # in the timed runs: per drafted token
    classic_step_ms: Figure | None  # in the brackets: per token
    round_ms: Figure | None  # in the timed runs: per round, everything included
    repeats: tuple[RepeatFigures, ...]
    processes: tuple[int, ...] = later(())  # of each delta
    null_block: tuple[Figure, ...] = later(())  # deltas of classic in the arm's place
    discarded: tuple[DiscardFigures, ...] = later(())


class StepTime(Part):
    """Times of one kind of step, milliseconds."""

    median_ms: Figure
    min_ms: Figure
    max_ms: Figure
    n: int
    rows: int
    context_tokens: int


class StepFigures(Part):
    """What single steps cost, and what that predicts for the arm of the same block size."""

    context_tokens: int
    block_size: int
    times: dict[str, StepTime]  # by step: classic, classic_unpadded, verify, draft
    classic_step_ms: Figure | None
    unpadded_step_ms: Figure | None
    verify_ms: Figure | None
    draft_step_ms: Figure | None
    predicted_speedup: Figure | None
    predicted_speedup_unpadded: Figure | None  # against the unpadded classic step
    measured_speedup: Figure | None
    break_even_acceptance: Figure | None  # acceptance rate at which both arms take the same time
    floor: FloorFigures | None = later()


class FloorFigures(Part):
    """The least time of a classic step: what it must read over the measured stream's rate."""

    weight_bytes: int
    kv_bytes: int
    stream_gb_per_s: Figure  # median over repeats
    floor_ms: Figure
    floor_share: Figure | None  # floor / classic step


class OraclePoint(Part):
    """What one block size costs and is predicted to give; `harness.oracle` says how."""

    block_size: int
    verify_ms: Figure
    draft_step_ms: Figure
    round_ms: Figure
    break_even_acceptance: Figure
    acceptance_rate: Figure | None
    acceptance_length: Figure | None
    basis: str | None  # where the acceptance comes from: measured, positions, extrapolated
    predicted_speedup: Figure | None
    measured_speedup: Figure | None


class OracleFigures(Part):
    """Costs C(1..K) at one context, and the block size they speak for."""

    context_tokens: int
    classic_step_ms: Figure
    one_row_verify_ms: Figure | None
    best_block_size: int | None  # 1: classic decode
    advice: str
    points: tuple[OraclePoint, ...]


class BarFigures(Part):
    """One bar of a throughput case."""

    what: str
    value: Figure | None
    limit: Figure
    highest: bool  # the limit is a maximum
    met: bool | None  # None: not measured
