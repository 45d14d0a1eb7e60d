"""What the parent and a child process say to each other: one JSON object per line, both ways.

Parent: one `Setup` line, then `Job` lines, one at a time; closing the pipe ends the child.
Child: `Ready` once, then for each job any `LogEvent`, `Progress` and `RawLine` events and one `Result` or `Failure`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from harness.record.lines import Setting

JobKind = Literal[
    "machine",
    "geometry",
    "row_identity",
    "kernel_rows",
    "kernel_throughput",
    "probe",
    "parity",
    "generate",
    "steps",
    "decode_ours",
    "decode_peer",
    "decline",
    "rollback",
    "try",
]
FailureKind = Literal["input", "memory", "internal"]


class Message(BaseModel):
    """Base of all messages; unknown keys are refused on both sides."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Setup(Message):
    """First line to a child: which pair to load, and how. Without a target it loads nothing.

    `kind` is the spec's word for how the drafter proposes; a pair of another kind is refused.
    """

    target: str | None = None
    drafter: str | None = None
    kind: str | None = None
    device: str = "cpu"
    threads: int | None = None


class Job(Message):
    """One piece of work; `case` is what the raw lines it causes are filed under."""

    id: int
    kind: JobKind
    case: str = ""
    args: dict[str, Any] = Field(default_factory=dict)


class Ready(Message):
    """The child loaded its pair: what it really runs with, read back, never echoed."""

    event: Literal["ready"] = "ready"
    flags_requested: dict[str, str | None] = Field(default_factory=dict)
    flags_effective: dict[str, str] = Field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1
    versions: dict[str, str] = Field(default_factory=dict)
    target: dict[str, Any] = Field(default_factory=dict)
    drafter: dict[str, Any] = Field(default_factory=dict)
    load_s: float = 0.0
    load_phases: dict[str, float] = Field(default_factory=dict)  # seconds by phase: device, open, read, prepare, ...
    peak_memory_bytes: int | None = None
    settings: tuple[Setting, ...] = ()


class LogEvent(Message):
    """A log line of the engine."""

    event: Literal["log"] = "log"
    level: str
    message: str


class Progress(Message):
    """How far a job is."""

    event: Literal["progress"] = "progress"
    job: int
    done: int
    total: int
    note: str = ""


class RawLine(Message):
    """A raw line for runs.jsonl; the parent checks that it belongs to the job's case."""

    event: Literal["line"] = "line"
    job: int
    line: dict[str, Any]


class Text(Message):
    """A piece of generated text, as it appears (`harness try`)."""

    event: Literal["text"] = "text"
    job: int
    text: str


class Result(Message):
    """The job is done; what it returns beside its raw lines."""

    event: Literal["result"] = "result"
    job: int
    data: dict[str, Any] = Field(default_factory=dict)
    peak_memory_bytes: int | None = None  # the most that the child has held so far, on the device that it computes on


class Failure(Message):
    """The job, or the load (job None), failed with one line of reason; the child may go on."""

    event: Literal["error"] = "error"
    job: int | None = None
    kind: FailureKind
    message: str


AnyEvent = Annotated[
    Ready | LogEvent | Progress | RawLine | Text | Result | Failure,
    Field(discriminator="event"),
]
EVENTS: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)


def parse_event(text: str | bytes) -> AnyEvent:
    """Parse one line of a child's stdout; raises pydantic's ValidationError on anything else."""
    return EVENTS.validate_json(text)
