"""Raw lines of a run (`runs.jsonl`): the only source of every figure in a record.

One JSON object per line, appended and flushed as things happen, so a killed run keeps what it had.
`harness.record.model.build_record` turns lines into a `Record`; nothing on a page comes from anywhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

SCHEMA_VERSION = 1

Outcome = Literal["pass", "fail", "declined", "skipped", "unresolved", "error"]
Verdict = Literal["faster", "slower", "equivalent", "unresolved"]


class Line(BaseModel):
    """Base of all raw lines; unknown keys are refused so that a typo cannot become a silent gap."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Divergence(Line):
    """First tensor, in execution order, whose bytes differ between the block and the chain."""

    layer: int
    layer_kind: str  # "sliding", "full" or "final"
    op: str
    position: int
    differing_bytes: int
    total_bytes: int
    draw: str = ""

    def describe(self) -> str:
        """The divergence in words, as logs, tests and pages show it."""
        where = self.op if self.layer_kind == "final" else f"layer {self.layer} ({self.layer_kind}) {self.op}"
        return f"{where} at position {self.position}, {self.differing_bytes} of {self.total_bytes} bytes differ"


class StartLine(Line):
    """First line of a run, and again at each `--resume`."""

    line: Literal["start"] = "start"
    schema_version: int = SCHEMA_VERSION
    spec: str
    spec_sha256: str
    started_utc: str
    command: str
    resumed: bool = False
    cases: tuple[str, ...]  # every planned id, in order: what a partial record misses is computed from this


class ChildLine(Line):
    """A child process became ready: what it really runs with."""

    line: Literal["child"] = "child"
    child: str  # short name: the flag cell, e.g. "multirow:0+large_d:unset", or "default"
    env_requested: dict[str, str | None]
    flags_effective: dict[str, str]
    ready_s: float
    device: str  # "cpu" or the GPU's name
    threads: int
    versions: dict[str, str]
    target: dict[str, Any] = Field(default_factory=dict)  # checkpoint name, fingerprint, bytes
    drafter: dict[str, Any] = Field(default_factory=dict)
    peak_memory_bytes: int | None = None


class DrawLine(Line):
    """One draw or walk of the exactness probe."""

    line: Literal["draw"] = "draw"
    case: str
    draw: str  # "draw 0 (8 tokens)", "walk (160 + 128 tokens)", ...
    prompt_tokens: int
    block_size: int
    positions: int  # logits rows compared
    passed: bool
    differing_bytes: int
    total_bytes: int
    first_position: int | None = None
    seconds: float


class DecisionLine(Line):
    """What the gate decided, in the engine's own log words."""

    line: Literal["decision"] = "decision"
    case: str
    engaged: bool
    inexact: bool
    reason: str
    log_line: str
    classic_sha256: str | None = None  # of the classic chain's logits bytes: equal across stages of a flag cell
    first_divergence: Divergence | None = None


class ComparisonLine(Line):
    """MTP against classic for one prompt and one block size."""

    line: Literal["comparison"] = "comparison"
    case: str
    prompt: str
    form: str  # "chat" or "raw"
    prompt_tokens: int
    block_size: int
    tokens: int
    identical: bool
    text_identical: bool
    first_difference: int | None = None
    margin: float | None = None  # classic's best logit minus its second best, at the first difference
    classic_sha256: str
    mtp_sha256: str
    finish_reason: str
    distinct_tokens: int
    accepted_per_round: tuple[int, ...]
    drafted_per_round: tuple[int, ...]
    decode_s: float
    classic_decode_s: float


class ArmLine(Line):
    """One timed generation: one arm, in one repeat, for one prompt."""

    line: Literal["arm"] = "arm"
    case: str
    repeat: int
    slot: Literal["open", "arm", "close"]
    arm: str  # "classic" for brackets, else the arm's name
    block_size: int
    prompt: str
    prompt_tokens: int
    tokens: int
    sha256: str
    distinct_tokens: int
    ttft_s: float
    decode_s: float  # first token excluded, so decode_tok_s = (tokens - 1) / decode_s
    accepted_per_round: tuple[int, ...] = ()
    drafted_per_round: tuple[int, ...] = ()
    verify_s: float = 0.0
    draft_s: float = 0.0
    load1: float | None = None


class StepLine(Line):
    """Times of single steps, measured apart from the arms: the cost model's inputs."""

    line: Literal["step"] = "step"
    case: str
    step: Literal["classic", "classic_unpadded", "verify", "draft"]
    rows: int
    context_tokens: int
    seconds: tuple[float, ...]


class CheckLine(Line):
    """One named yes-or-no statement of `geometry`, `row_identity` or `decline`."""

    line: Literal["check"] = "check"
    case: str
    name: str
    passed: bool
    expected: str
    found: str
    differing_bytes: int | None = None


class RollbackLine(Line):
    """One scripted generation of `rollback`, its caches compared with classic decode's after every round."""

    line: Literal["rollback"] = "rollback"
    case: str
    block_size: int
    window: int
    ring_slots: int
    prompt: str  # "W-2", "S+1", ...: its length from the window or from the ring's edge
    prompt_tokens: int
    script: tuple[int, ...]  # drafts to be accepted, round by round
    accepted_per_round: tuple[int, ...]
    tokens: int
    identical: bool  # tokens are classic's
    rounds_compared: int
    differing_bytes: int
    first_difference: str | None = None
    seconds: float


class KernelShapeLine(Line):
    """What a `kernel_throughput` case runs: one op at one shape, on weights or caches rotated over many copies."""

    line: Literal["kernel_shape"] = "kernel_shape"
    case: str
    op: str
    name: str  # what it is in the model
    shape: str  # "3840x30720-8bit", "12b full, 8192 keys"
    nbytes: int  # what one call of our kernel must read
    copies: int  # of weights or caches, rotated
    backend: str
    config: str = ""  # our launch constants, in words


class PeerLine(Line):
    """Whether a peer takes part, and why not: a peer that the spec names is never silently absent."""

    line: Literal["peer"] = "peer"
    case: str
    peer: str
    reason: str | None = None  # None: it takes part
    version: str = ""
    note: str = ""  # what a reader must know of its figures


class KernelLine(Line):
    """Times of one kernel arm: a call's share of a timed sequence of calls, one value per repeat."""

    line: Literal["kernel"] = "kernel"
    case: str
    arm: str  # "ours", "stream", or a peer
    rows: int  # M; 0 for the stream
    launches: int = 1  # launches that make one call: 4 for four one-row launches
    again: bool = False  # the null arm: the same arm a second time in each repeat
    nbytes: int  # read by one call
    calls: int  # in one timed sequence
    clock: Literal["graph", "host"]  # replays of a CUDA graph; or the host's clock, launches included
    us: tuple[float, ...]  # per call
    rel_error: float | None = None  # ||out - ref|| / ||ref|| against float64 of the function that this arm computes


class CaseLine(Line):
    """How a case ended. Written once per case; a resumed run skips cases that have one (except `error`)."""

    line: Literal["case"] = "case"
    case: str
    kind: str
    outcome: Outcome
    reason: str
    verdict: Verdict | None = None
    child: str | None = None
    seconds: float
    log: str | None = None  # file under logs/


class EndLine(Line):
    """Last line of a run that was not killed."""

    line: Literal["end"] = "end"
    ended_utc: str
    exit_code: int
    interrupted: bool = False


AnyLine = Annotated[
    StartLine
    | ChildLine
    | DrawLine
    | DecisionLine
    | ComparisonLine
    | ArmLine
    | StepLine
    | CheckLine
    | RollbackLine
    | KernelShapeLine
    | PeerLine
    | KernelLine
    | CaseLine
    | EndLine,
    Field(discriminator="line"),
]
LINE_ADAPTER: TypeAdapter[AnyLine] = TypeAdapter(AnyLine)


def parse_line(text: str) -> AnyLine:
    """Parse one line of `runs.jsonl`; raises pydantic's ValidationError on anything else."""
    return LINE_ADAPTER.validate_json(text)
