"""What a spec may say: strict, frozen pydantic models, one class per check kind.

A field's docstring is at once the editor's hover text, the row in specs/README.md and the JSON schema's description.
Rules that need two fields, other files or the flag registry are in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag

from harness.spec.base import Count, Model
from harness.spec.kernel_model import Backend, Bars, Context, GeometryName, KernelOp, LayerKind, MatrixShape, Peer
from harness.spec.pair_model import MtpBlockSize, Pair
from harness.spec.speed_model import DecodePeer, PeerSpeedups, StepBars

Stage = Literal["base", "attention", "attention_mlp", "rowwise"]
Op = Literal["linear", "rmsnorm", "rope", "geglu", "attention", "lm_head", "swiglu", "output_gate", "delta_rule"]
GEMMA_OPS: tuple[Op, ...] = ("linear", "rmsnorm", "rope", "geglu", "attention", "lm_head")
Gate = Literal["measured", "hazard"]
Identifier = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
Reason = Annotated[str, Field(min_length=3)]
Scalar = str | int | float | bool | None
BlockSize = Annotated[int, Field(ge=1, le=8)]
DrawLength = Annotated[int, Field(ge=1, le=131072)]
Tokens = Annotated[int, Field(ge=2, le=32768)]
DeclinedBlockSize = Annotated[int, Field(ge=2, le=16)]


class Requires(Model):
    """What the machine must have; a case that lacks it is skipped, or fails under `--require`."""

    cuda: bool = False
    """A CUDA device."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Free memory in GiB on the device (on a CPU: in the machine)."""
    compute_capability: Annotated[str, Field(pattern=r"^>=[0-9]+\.[0-9]+$")] | None = None
    """Lowest CUDA compute capability, written like ">=9.0"."""


class XFail(Model):
    """A failure that is known; an unexpected pass then fails."""

    reason: Reason
    """Why it fails today."""
    issue: Annotated[str, Field(min_length=1)]
    """Where it is tracked."""


class Prompt(Model):
    """One prompt: a file beside the spec, or text in place."""

    file: Annotated[str, Field(min_length=1)] | None = None
    """Text file, relative to the spec's folder and inside it; read as UTF-8, nothing stripped."""
    text: str | None = None
    """The prompt itself. Exactly one of file and text."""
    form: Literal["chat", "raw"] = "chat"
    """`chat` puts the text into the chat template as the user's turn, `raw` continues it."""
    name: Identifier | None = None
    """Short name in tables. Default: the file's stem, or `text` with its number."""


class EnvAxis(Model):
    """A matrix axis that sets an environment flag of the child process."""

    env: Annotated[str, Field(min_length=1)]
    """Flag to set; `harness env` lists them."""
    values: tuple[str | None, ...]
    """Values in quotes; null means not set."""


class FieldAxis(Model):
    """A matrix axis that sets a field of the check."""

    field: Annotated[str, Field(min_length=1)]
    """Name of the check's field."""
    values: tuple[Scalar, ...]
    """Values of that field."""


def _axis_tag(value: Any) -> str:
    if isinstance(value, dict):
        return "field_axis" if "field" in value and "env" not in value else "env_axis"
    return "field_axis" if isinstance(value, FieldAxis) else "env_axis"


Axis = Annotated[
    Annotated[EnvAxis, Tag("env_axis")] | Annotated[FieldAxis, Tag("field_axis")], Discriminator(_axis_tag)
]


class CheckBase(Model):
    """What every check has. `kind` picks the claim."""

    claim: ClassVar[str] = ""

    id: Identifier
    """Name of the check in this spec: lower case letters, digits and _ . - only."""
    skip: Reason | None = None
    """Do not run it, for this reason."""
    xfail: XFail | None = None
    """It is known to fail; an unexpected pass fails."""
    requires: Requires | None = None
    """What this check needs beyond the spec's own `requires`."""
    max_peak_gib: Annotated[float, Field(gt=0)] | None = None
    """Most memory in GiB that a child may have held, on the GPU or else resident; above it the case fails."""
    slow: bool = False
    """Left out of the short test run (pytest mark `slow`)."""
    matrix: dict[Identifier, Axis] = Field(default_factory=dict)
    """Axes, in order; the check becomes one case per combination."""
    exclude: tuple[dict[str, Scalar], ...] = ()
    """Cells to drop, by partial match; each entry must match a cell."""
    include: tuple[dict[str, Scalar], ...] = ()
    """Complete cells to append, a value for every axis."""
    expect_cells: Count | None = None
    """How many cells there must be; a pin against a filter that drops too much."""


class GeometryExpect(Model):
    """Expected shapes, with config.json's names, and predicates."""

    target: dict[str, Scalar] = Field(default_factory=dict)
    """Fields of the target's text config, e.g. {sliding_window: 1024}."""
    drafter: dict[str, Scalar] = Field(default_factory=dict)
    """Fields of the drafter's text config."""
    full_layers: Annotated[int, Field(ge=0)] | None = None
    """Number of full-attention layers of the target."""
    linear_singleton_cpu: bool | None = None
    """Whether MTP needs one sequence and a plain chain on a CPU."""
    linear_singleton_cuda: bool | None = None
    """Whether MTP needs one sequence and a plain chain on CUDA."""


class Geometry(CheckBase):
    """The pair's shapes and predicates."""

    claim: ClassVar[str] = "predicates and shapes are what they should be for this pair"
    kind: Literal["geometry"]
    """`geometry`: predicates and shapes are what they should be for this pair."""
    expect: GeometryExpect
    """What must hold; what is not written is not checked."""


class RowIdentity(CheckBase):
    """Ops on their own, on the pair's real shapes, or without a pair on those of a geometry."""

    claim: ClassVar[str] = "an op at M rows equals M one-row calls, byte for byte"
    kind: Literal["row_identity"]
    """`row_identity`: an op at M rows equals M one-row calls, byte for byte."""
    ops: Annotated[tuple[Op, ...], Field(min_length=1)] = GEMMA_OPS
    """Ops to compare; default: Gemma 4's. A Qwen 3.5 pair has no geglu; swiglu, output_gate, delta_rule are its own."""
    rows: Annotated[tuple[BlockSize, ...], Field(min_length=1)] = (1, 2, 3, 4, 5, 6, 7, 8)
    """Numbers of rows M."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the random inputs."""
    geometry: GeometryName | None = None
    """Shapes to take, with random weights; for a spec without a pair."""
    backend: Backend = "triton"
    """Kernels to compare on a geometry; a pair brings its own."""


class Probing(CheckBase):
    """What the probe's kinds share."""

    draws: Annotated[tuple[DrawLength, ...], Field(min_length=1)] = (8, 8, 8)
    """Prompt lengths of the draws, in tokens; one longer than the window wraps the ring."""
    walk: bool = True
    """Also walk many blocks with partial accepts and rollbacks, from 160 tokens and from the longest draw."""


class ExactnessProbe(Probing):
    """The start-up probe."""

    claim: ClassVar[str] = "block equals chain on every draw; the log says engaged"
    kind: Literal["exactness_probe"]
    """`exactness_probe`: block equals chain on every draw; the log says engaged."""
    block_sizes: tuple[MtpBlockSize, ...] | None = None
    """Block sizes to probe; default: the pair's."""
    stage: Stage = "rowwise"
    """Dispatch stage of the verify forward."""


class Attribution(Probing):
    """The probe over dispatch stages and flags, to find which op diverges."""

    claim: ClassVar[str] = "stages that must pass are exact; every other cell shows its first divergence"
    kind: Literal["attribution"]
    """`attribution`: the probe over stages x flags; the first divergence of each failing cell."""
    stages: tuple[Stage, ...] = get_args(Stage)
    """Dispatch stages, the first axis of the table."""
    must_pass: tuple[Stage, ...] = ("rowwise",)
    """Stages whose divergence fails the case. In any other stage a divergence is the picture asked for: declined."""
    block_size: MtpBlockSize | None = None
    """Block size to probe; default: the pair's."""


class Generating(CheckBase):
    """What the kinds that generate text share."""

    max_tokens: Tokens
    """Tokens to generate for each prompt."""
    ignore_stop: bool = False
    """Go on past stop tokens, so that every prompt yields max_tokens."""
    temperature: float = 0
    """Only 0: byte identity says nothing about sampled text."""
    batch: int = 1
    """Only 1: one sequence at a time."""


class Speculating(Generating):
    """What the kinds that run MTP rounds share."""

    min_acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lowest acceptance rate (accepted / drafted) at the pair's block size; below it the case fails."""


class GreedyParity(Speculating):
    """MTP's text against classic's."""

    claim: ClassVar[str] = "MTP token ids and text equal classic for each prompt; a round really ran"
    kind: Literal["greedy_parity"]
    """`greedy_parity`: MTP token ids and text equal classic for each prompt; a round really ran."""
    prompts: Annotated[tuple[Prompt, ...], Field(min_length=1)]
    """Prompts to continue."""
    stage: Stage = "rowwise"
    """Dispatch stage of the verify forward."""
    block_sizes: Annotated[tuple[MtpBlockSize, ...], Field(min_length=1)] | None = None
    """Block sizes, each against classic; default: the pair's."""
    min_distinct_tokens: Count | None = None
    """Lowest number of distinct tokens in a continuation; text that loops flatters acceptance."""


class Arm(Model):
    """One configuration measured against classic."""

    name: Identifier
    """Name in tables; classic and null are taken."""
    block_size: MtpBlockSize | None = None
    """Block size; default: the pair's."""
    env: dict[str, str | None] = Field(default_factory=dict)
    """Environment flags of this arm; null means not set."""


class Discard(Model):
    """Which pairs do not count. Telemetry decides, before anyone looks at a time; both sides go."""

    throttled: bool = True
    """Drop a pair while the device reported throttling."""
    foreign_cores: Annotated[float, Field(gt=0, le=1024)] | None = None
    """Drop a pair while other processes kept more than this many cores busy; null counts none. Linux only."""


class Throughput(Speculating):
    """MTP's speed against classic, in pairs."""

    claim: ClassVar[str] = "paired deltas against classic brackets with a null arm; acceptance; verdict"
    kind: Literal["throughput"]
    """`throughput`: paired deltas against classic brackets with a null arm; acceptance; verdict."""
    prompts: Annotated[tuple[Prompt, ...], Field(min_length=1)] | None = None
    """Prompts, one after another over the repeats; default: those of the first greedy_parity check."""
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]
    """Configurations to measure; a classic null arm is always added."""
    repeats: Annotated[int, Field(ge=1, le=1000)]
    """Passes over all arms, each opened and closed by a classic arm; `harness power` proposes a number."""
    order: Literal["bracket", "abba"] = "bracket"
    """Order inside a repeat: `bracket` runs classic, arms, classic; `abba` runs the arms once more in reverse."""
    null_blocks: Annotated[int, Field(ge=0, le=8)] = 0
    """Repeats with classic in the arms' place, that many first and that many last in each process."""
    processes: Annotated[int, Field(ge=1, le=32)] = 1
    """Fresh processes that share the repeats; one process cannot see what differs between processes."""
    discard: Discard = Discard()
    """Which pairs do not count."""
    warmup: Annotated[int, Field(ge=0)] = 1
    """Passes to throw away first."""
    smallest_effect: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Smallest change of interest, as a share (0.02 is 2 %)."""
    step_contexts: tuple[Context, ...] = ()
    """Contexts, in tokens, at which single steps are timed; default: the middle of the timed runs."""
    bars: StepBars = StepBars()
    """What the figures must reach; without bars a case only measures."""
    slow: bool = True
    """Left out of the short test run; a measurement is slow unless you say otherwise."""


class KernelThroughput(CheckBase):
    """One op of the verify path on its own, against other kernels."""

    claim: ClassVar[str] = "rows are exact; time and bandwidth of one op against peers in the same run"
    kind: Literal["kernel_throughput"]
    """`kernel_throughput`: time and bandwidth of one op against peers in the same run, on exact rows."""
    op: KernelOp
    """`qmv`, a quantized matrix times 1 to 8 rows, or `attention` over a filled cache."""
    shapes: tuple[MatrixShape, ...] = ()
    """qmv: matrices, the first axis of the table."""
    geometries: tuple[GeometryName, ...] = ()
    """attention: whose heads and widths, the first axis."""
    layers: tuple[LayerKind, ...] = ("sliding", "full")
    """attention: layer kinds, the second axis."""
    contexts: tuple[Context, ...] = ()
    """attention: keys before the block's first row, the third axis."""
    rows: Annotated[tuple[BlockSize, ...], Field(min_length=1)] = (1, 4, 8)
    """Numbers of rows M that are timed; byte checks always run M = 1 to 8."""
    peers: tuple[Peer, ...] = ("stream",)
    """Kernels timed beside ours: `stream` reads memory and nothing else; the others are skipped where not installed."""
    peer_rows: Annotated[tuple[BlockSize, ...], Field(min_length=1)] = (1, 4)
    """Numbers of rows at which peers are timed."""
    repeats: Annotated[int, Field(ge=3, le=1000)] = 30
    """Passes over all arms, in turns; figures are medians."""
    repeat_calls: Annotated[int, Field(ge=1, le=100000)] = 1000
    """Identical calls whose outputs must all have the same bytes."""
    rotate_mb: Annotated[int, Field(ge=1, le=16384)] = 512
    """Megabytes over which copies of the weights are rotated, well beyond the L2 cache."""
    bars: Bars = Bars()
    """What the figures must reach; without bars a case only measures."""
    backend: Backend = "triton"
    """Our kernels: `triton`, or the plain `reference`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of codes, scales and activations."""
    slow: bool = True
    """Left out of the short test run; a measurement is slow unless you say otherwise."""


class PeerDecode(CheckBase):
    """Other engines on the pair's target."""

    claim: ClassVar[str] = "rows are exact; time per token beside other engines on the same checkpoint and prompt"
    kind: Literal["peer_decode"]
    """`peer_decode`: time per token beside other engines, and whether each one's block equals its own chain."""
    peers: Annotated[tuple[DecodePeer, ...], Field(min_length=1)] = ("mlx_lm", "transformers")
    """Engines beside ours, each in a process of its own; one that is not installed is named with the reason."""
    prompts: Annotated[tuple[Prompt, ...], Field(min_length=1, max_length=1)] | None = None
    """One prompt, continued by our classic decode to the longest context; default: the first of greedy_parity's."""
    contexts: Annotated[tuple[Context, ...], Field(min_length=1)] = (512, 2048)
    """Contexts in tokens; every engine gets the same ids."""
    tokens: Annotated[int, Field(ge=2, le=1000)] = 20
    """Tokens that are decoded and timed one by one after each context."""
    min_speedup: PeerSpeedups = PeerSpeedups()
    """How many times as fast as a peer ours must be, at every context."""
    slow: bool = True
    """Left out of the short test run; a measurement is slow unless you say otherwise."""


class Decline(Generating):
    """A pair or stage that must not engage."""

    claim: ClassVar[str] = "it declines with the stated reason, and classic output is unchanged"
    kind: Literal["decline"]
    """`decline`: it declines with the stated reason, and classic output is unchanged."""
    prompts: Annotated[tuple[Prompt, ...], Field(min_length=1)] | None = None
    """Prompts whose classic text must not change; default: those of the first greedy_parity check."""
    max_tokens: Tokens = 32
    """Tokens to generate for each prompt."""
    stage: Stage = "base"
    """Dispatch stage that must decline."""
    expect_reason: Annotated[str, Field(min_length=1)]
    """Words that the decline reason must contain."""
    block_size: DeclinedBlockSize | None = None
    """Block size to probe; default: the pair's. Above 8 rows it can only decline."""
    draws: Annotated[tuple[DrawLength, ...], Field(min_length=1)] = (8,)
    """Prompt lengths of the probe's draws."""
    gate: Gate = "measured"
    """`measured`: the probe decides. `hazard`: before it, the reference system's static predicate for CUDA."""


class Rollback(CheckBase):
    """Scripted rounds around the window and the ring's edge."""

    claim: ClassVar[str] = "after every rollback around a ring's edge the caches hold classic's own bytes"
    kind: Literal["rollback"]
    """`rollback`: after every rollback around a ring's edge the caches hold classic's own bytes."""
    stage: Stage = "rowwise"
    """Dispatch stage of the verify forward."""
    block_sizes: Annotated[tuple[MtpBlockSize, ...], Field(min_length=1)] | None = None
    """Block sizes, each with cells of its own; default: the pair's."""


CheckKind = (
    Geometry
    | RowIdentity
    | ExactnessProbe
    | Attribution
    | GreedyParity
    | Throughput
    | KernelThroughput
    | PeerDecode
    | Decline
    | Rollback
)
Check = Annotated[CheckKind, Field(discriminator="kind")]
CHECK_MODELS: dict[str, type[CheckBase]] = {
    get_args(model.model_fields["kind"].annotation)[0]: model for model in get_args(CheckKind)
}


class Spec(Model):
    """One spec file: which pair or which kernels, on what machine, checked how."""

    schema_version: Literal[1] = Field(alias="schema")
    """Version of this format: 1."""
    name: Identifier
    """Name of the spec: the file's stem."""
    title: Annotated[str, Field(min_length=1)]
    """One line for people."""
    pair: Pair | None = None
    """The models under test; left out where every check is about kernels alone."""
    requires: Requires = Requires()
    """What the machine must have for any case of this spec."""
    checks: Annotated[tuple[Check, ...], Field(min_length=1)]
    """What to check, in order."""
