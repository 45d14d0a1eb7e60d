"""What a child holds between jobs: the loaded pair, the flags it read, and the decisions it made.

A job names its stage; the pair's weights are shared by all four, so a flag cell needs one child.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from engine.decision import Decision, DecisionMemo, Gate, prepare_mtp
from engine.decode import classic_decode
from engine.dispatch import DispatchPolicy, Stage
from engine.errors import EngineError
from engine.flags import read_flags
from engine.pair import load_pair
from engine.probe import SHORT_DRAWS, ProbeResult
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode
from engine.stats import Generation
from harness.protocol import Progress, RawLine, Ready, Setup, Text
from harness.record.lines import DecisionLine, Divergence, DrawLine, Identity, Line
from harness.worker import identity
from harness.worker.channel import Channel, as_line

DEFAULT_STAGE: Stage = "rowwise"
PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers")


@dataclass(frozen=True)
class PromptInput:
    """A prompt after tokenizing."""

    name: str
    form: str
    tokens: tuple[int, ...]
    history_boundary: int | None


@dataclass(frozen=True)
class Output:
    """How a job reports while it runs."""

    channel: Channel
    job: int
    case: str

    def line(self, line: Line) -> None:
        """Send one raw line."""
        self.channel.emit(RawLine(job=self.job, line=as_line(line)))

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Say how far the job is."""
        self.channel.emit(Progress(job=self.job, done=done, total=total, note=note))

    def text(self, text: str) -> None:
        """Send a piece of generated text."""
        self.channel.emit(Text(job=self.job, text=text))


class Bench:
    """The pair of one child, loaded once."""

    def __init__(self, setup: Setup) -> None:
        began = time.perf_counter()
        self.setup = setup
        self.reading = read_flags()
        self.device = setup.device
        if ":" in self.device:  # launches, streams, events and graphs go to the current device, not to a tensor's
            torch.cuda.set_device(self.device)
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self.pair: Any = None
        self._stages: dict[str, Any] = {}
        self._memo = DecisionMemo()
        if setup.target is not None:
            drafter = Path(setup.drafter) if setup.drafter is not None else None
            self.pair = load_pair(Path(setup.target), drafter, self.policy, device=setup.device)
            _check_kind(setup.kind, self.pair)
            _check_flags(self.reading.requested, self.pair)
            self._stages[DEFAULT_STAGE] = self.pair
        self.load_s = time.perf_counter() - began

    def ready(self) -> Ready:
        """What this child really runs with."""
        info = self.pair.info if self.pair is not None else {}
        return Ready(
            flags_requested=self.reading.requested,
            flags_effective=self.reading.effective,
            device=device_name(self.device),
            threads=torch.get_num_threads(),
            versions=versions(),
            target=info.get("target") or {},
            drafter=info.get("drafter") or {},
            load_s=self.load_s,
            load_phases={phase: round(seconds, 3) for phase, seconds in (info.get("phases") or {}).items()},
            peak_memory_bytes=peak_memory_bytes(),
            settings=identity.settings_of(self),
        )

    @functools.cached_property
    def identity(self) -> Identity:
        """What decides the bytes of this process; computed once, when a probe or an arm first asks."""
        return identity.identity_of(self)

    @property
    def policy(self) -> DispatchPolicy:
        """The default stage under this child's flags."""
        return self._policy(DEFAULT_STAGE)

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens per prefill forward."""
        return self.reading.values.prefill_chunk

    def at(self, stage: str) -> Any:
        """The pair under a dispatch stage; weights are shared."""
        if self.pair is None:
            raise EngineError("this child was started without a pair; give it a target")
        if stage not in self._stages:
            self._stages[stage] = self.pair.with_policy(self._policy(stage))
        return self._stages[stage]

    def _policy(self, stage: str) -> DispatchPolicy:
        """A stage with this child's flags, on the device's own kernels."""
        backend = "triton" if self.device.startswith("cuda") else "reference"
        return DispatchPolicy(stage=stage, flags=self.reading.values, backend=backend)  # type: ignore[arg-type]

    def decide(
        self,
        stage: str,
        block_size: int,
        draws: Sequence[int] = SHORT_DRAWS,
        walk: bool = True,
        *,
        afresh: bool = False,
        gate: Gate = "measured",
    ) -> tuple[Decision, ProbeResult | None]:
        """Probe once per stage, block size and draws, afterwards answer from memory; `afresh` probes again."""
        memo = DecisionMemo() if afresh else self._memo
        return prepare_mtp(self.at(stage), block_size, tuple(draws), walk=walk, memo=memo, gate=gate)

    def prompt(self, data: dict[str, Any]) -> PromptInput:
        """Tokenize a prompt given as {name, form, text}."""
        tokenizer = self.at(DEFAULT_STAGE).tokenizer
        if tokenizer is None:
            raise EngineError("the target's folder has no tokenizer.json; text prompts need one")
        if data["form"] == "chat":
            chat = tokenizer.encode_chat([{"role": "user", "content": data["text"]}])
            return PromptInput(data["name"], "chat", tuple(chat.ids), chat.history_boundary)
        return PromptInput(data["name"], "raw", tuple(tokenizer.encode_raw(data["text"])), None)

    def request(self, prompt: PromptInput, max_tokens: int, ignore_stop: bool) -> GenerationRequest:
        """A greedy request for one prompt."""
        return GenerationRequest(
            tokens=prompt.tokens,
            max_tokens=max_tokens,
            stop_ids=tuple(self.at(DEFAULT_STAGE).tokenizer.stop_ids),
            ignore_stop=ignore_stop,
            history_boundary=prompt.history_boundary,
        )

    def classic(
        self, request: GenerationRequest, stage: str = DEFAULT_STAGE, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Classic decode."""
        return classic_decode(self.at(stage).target, request, self.prefill_chunk, on_token=on_token)

    def mtp(
        self,
        request: GenerationRequest,
        block_size: int,
        stage: str = DEFAULT_STAGE,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Decode by rounds. The caller has asked `decide` first."""
        pair = self.at(stage)
        return speculative_decode(pair.target, pair.drafter, request, block_size, self.prefill_chunk, on_token=on_token)

    def serve(self, request: GenerationRequest, decision: Decision, block_size: int, stage: str) -> Generation:
        """What a user gets: rounds when engaged, classic decode when declined."""
        return self.mtp(request, block_size, stage) if decision.engaged else self.classic(request, stage)

    def text(self, tokens: Sequence[int]) -> str:
        """Token ids as text."""
        return str(self.at(DEFAULT_STAGE).tokenizer.decode(list(tokens)))


# ---- values that several jobs send ----------------------------------------------------------------------------------


def _check_kind(kind: str | None, pair: Any) -> None:
    """The spec says how its drafter proposes; a pair of another kind is another question."""
    found = pair.family.draft_kind
    if kind not in (None, found) and pair.drafter is not None:
        raise EngineError(f"pair.kind is {kind}, but these checkpoints draft by {found}; write kind: {found}")


def _check_flags(requested: Mapping[str, str | None], pair: Any) -> None:
    """A flag that reaches nothing in this family would make a cell that looks like a result."""
    for name, reason in pair.family.without_flags.items():
        if requested.get(name) is not None:
            raise EngineError(f"{name} has no counterpart in family {pair.family.name}: {reason}; unset it")


def sha256_ids(tokens: Sequence[int]) -> str:
    """One hash of a token id sequence; only true ids are hashed, never re-tokenized text."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()


def rounds_of(generation: Generation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Accepted and drafted counts per round; both empty for classic decode."""
    rounds = generation.rounds
    if rounds is None:
        return (), ()
    return rounds.accepted_per_round, (rounds.block_size - 1,) * rounds.num_rounds


def divergence_of(result: ProbeResult | None) -> Divergence | None:
    """The probe's first divergence as a raw line holds it."""
    found = result.first_divergence if result is not None else None
    if found is None:
        return None
    return Divergence(
        layer=found.layer,
        layer_kind=found.kind,
        op=found.op,
        position=found.position,
        differing_bytes=found.differing_bytes,
        total_bytes=found.total_bytes,
        draw=found.draw,
    )


def send_probe(out: Output, decision: Decision, result: ProbeResult | None) -> None:
    """The draws and the decision of one probe, as raw lines."""
    for draw in result.outcomes if result is not None else ():
        out.line(
            DrawLine(
                case=out.case,
                draw=draw.name,
                prompt_tokens=draw.prompt_length,
                block_size=draw.block_size,
                positions=draw.positions,
                passed=draw.passed,
                differing_bytes=draw.differing_bytes,
                total_bytes=draw.total_bytes,
                first_position=draw.first_position,
                seconds=draw.seconds,
            )
        )
    send_decision(out, decision, result)


def send_decision(out: Output, decision: Decision, result: ProbeResult | None) -> None:
    """The decision of one probe as a raw line."""
    out.line(
        DecisionLine(
            case=out.case,
            engaged=decision.engaged,
            inexact=decision.inexact,
            reason=decision.reason,
            log_line=decision.log_line,
            classic_sha256=(result.chain_sha256 or None) if result is not None else None,
            first_divergence=divergence_of(result),
        )
    )


def device_name(device: str) -> str:
    """ "cpu", or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_peak_bytes(device: str) -> int:
    """The most memory that this process has held so far: what torch took of the GPU, or its resident size."""
    return torch.cuda.max_memory_reserved(device) if device.startswith("cuda") else peak_memory_bytes()


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far; what the kernel counts as usage includes whoever started it."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line for line in status if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
