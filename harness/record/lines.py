"""Raw lines of a run (`runs.jsonl`): the only source of every figure in a record.

One JSON object per line, appended and flushed as things happen, so a killed run keeps what it had.
`harness.record.model.build_record` turns lines into a `Record`; nothing on a page comes from anywhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from harness.record.telemetry import Telemetry

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
    gate_ignored: tuple[str, ...] | None = None  # with --no-gate: what the gate would have refused; None: it was on
    cases: tuple[str, ...]  # every planned id, in order: what a partial record misses is computed from this
    certified: bool = False  # speed-ups of this run need a certificate; false in records from before there were any


class Setting(Line):
    """One row of a child's ledger: what was asked for, what the child read or runs with, and from where."""

    name: str
    requested: str | None  # None: nobody asked
    effective: str  # read back in the child, never echoed
    source: str  # "default", "spec", "command line", "environment", "device"
    read: str  # when it is read
    note: str = ""  # why it has no effect here


class Identity(Line):
    """What decides the bytes of a child's arithmetic, apart from flags, stage and shapes: read in the child."""

    target: str  # SHA-256 over config, index, tokenizer and weights (of a large checkpoint a sample of its weights)
    drafter: str
    source: str  # SHA-256 over the code of kernels/ and engine/
    torch: str
    triton: str
    driver: str
    device: str  # the GPU's name, or the CPU's
    compute_capability: str  # "9.0"; of a CPU the instruction set that torch chose
    threads: int
    backend: str
    dtype: str
    geometry: str
    window: int  # 0: no layer has one


class ChildLine(Line):
    """A child process became ready: what it really runs with."""

    line: Literal["child"] = "child"
    child: str  # short name: the flag cell, e.g. "multirow:0+large_d:unset", or "default"
    started_for: str | None = None  # the case that needed it first
    env_requested: dict[str, str | None]
    flags_effective: dict[str, str]
    ready_s: float
    device: str  # "cpu" or the GPU's name
    threads: int
    versions: dict[str, str]
    target: dict[str, Any] = Field(default_factory=dict)  # checkpoint name, fingerprint, bytes
    drafter: dict[str, Any] = Field(default_factory=dict)
    peak_memory_bytes: int | None = None
    load_phases: dict[str, float] = Field(default_factory=dict)  # seconds by phase of ready_s, the pair's part
    settings: tuple[Setting, ...] = ()


class PathLine(Line):
    """What a probe, or an arm that is about to be timed, computes with: its kernels by name, and their fingerprint."""

    line: Literal["path"] = "path"
    case: str
    arm: str | None = None  # None: a probe of its own
    stage: str
    block_size: int
    identity: Identity
    flags: dict[str, str]
    path: dict[str, str]  # op -> kernel, for the block and for classic decode
    longest_prompt: int = 0  # tokens, of an arm's prompts
    fingerprint: str  # SHA-256 over identity, block size and path: equal for arms that differ in name only


class ProbeInput(Line):
    """One input that a certificate rests on."""

    name: str
    prompt_tokens: int
    rows: int  # logits rows compared
    total_bytes: int


class CertificateLine(Line):
    """What a passed probe proves, and for what alone: another value of any field is not covered."""

    line: Literal["certificate"] = "certificate"
    case: str
    identity: Identity
    flags: dict[str, str]
    stage: str
    block_size: int
    inputs: tuple[ProbeInput, ...]
    classic_sha256: str  # of the classic chain's logits
    sha256: str  # over all of the above but the case


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


class Disturbance(Line):
    """What the machine did while an arm ran, as its telemetry has it: never read off the arm's own time."""

    cause: Literal["throttled", "foreign_load"]
    detail: str  # with its figure and the limit


class ArmLine(Line):
    """One timed generation: one arm, in one repeat, for one prompt."""

    line: Literal["arm"] = "arm"
    case: str
    repeat: int
    slot: Literal["open", "arm", "close"]
    arm: str  # "classic" for brackets, "null" for classic in an arm's place, else the arm's name
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
    process: int | None = None  # which fresh process of the case; None in records older than this field
    disturbed: tuple[Disturbance, ...] = ()
    before: Telemetry | None = None
    after: Telemetry | None = None


class GateLine(Line):
    """The machine around a timed case, or what `--no-gate` let pass when a pair was loaded."""

    line: Literal["gate"] = "gate"
    case: str
    when: Literal["load", "before", "after"]
    waited_s: float = 0.0  # for a quiet CPU
    note: str = ""  # what else ran when the case began; empty: nothing that matters
    ignored: tuple[str, ...] = ()
    telemetry: Telemetry | None = None


class StepLine(Line):
    """Times of single steps, measured apart from the arms: the cost model's inputs."""

    line: Literal["step"] = "step"
    case: str
    step: Literal["classic", "classic_unpadded", "verify", "draft", "draft_round"]
    rows: int  # of a draft_round: its drafts, all of them in each time
    context_tokens: int
    seconds: tuple[float, ...]


class FloorLine(Line):
    """What a classic step must read at a context, and how long this card takes to read so much: the byte floor."""

    line: Literal["floor"] = "floor"
    case: str
    context_tokens: int
    weight_bytes: int  # every matrix once, the LM head among them, as the kernels read it
    kv_bytes: int  # keys and values that the new row sees, over all layers
    stream_bytes: int  # of the buffer that the stream reads
    stream_s: tuple[float, ...]  # seconds of one read of it, in the same run


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


class BlockLine(Line):
    """One engine's block of rows against its own chain, logits as bytes, after one context."""

    line: Literal["block"] = "block"
    case: str
    arm: str  # "ours" or a peer
    context_tokens: int
    rows: int
    rows_equal: int
    differing_bytes: int
    total_bytes: int
    argmax_equal: int  # rows whose greedy token is the chain's
    repeatable: bool  # the same chain twice gave the same bytes
    seconds: tuple[float, ...]  # of the block's forward, run a few times after a first one


class DecodeLine(Line):
    """Classic decode of one engine after one context: seconds from one token to the next, as its user gets them."""

    line: Literal["decode"] = "decode"
    case: str
    arm: str
    context_tokens: int
    tokens: tuple[int, ...]  # what it decoded, the untimed first ones included
    seconds: tuple[float, ...]


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
    | PathLine
    | CertificateLine
    | DrawLine
    | DecisionLine
    | ComparisonLine
    | ArmLine
    | GateLine
    | StepLine
    | FloorLine
    | CheckLine
    | RollbackLine
    | KernelShapeLine
    | PeerLine
    | KernelLine
    | BlockLine
    | DecodeLine
    | CaseLine
    | EndLine,
    Field(discriminator="line"),
]
LINE_ADAPTER: TypeAdapter[AnyLine] = TypeAdapter(AnyLine)


def parse_line(text: str) -> AnyLine:
    """Parse one line of `runs.jsonl`; raises pydantic's ValidationError on anything else."""
    return LINE_ADAPTER.validate_json(text)
