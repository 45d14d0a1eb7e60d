"""Loads a target and its drafter from checkpoint folders and checks that they belong together.

A family is what a config.json names: `FAMILIES` says which of them loads a target, which a drafter, and how. All that
comes after loading goes through `engine.protocols` and does not know the family.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engine import reading
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import DRAFTER_TYPES, TARGET_TYPES, parse_drafter_config, parse_target_config
from engine.dispatch import DispatchPolicy
from engine.drafter import Drafter
from engine.errors import ConfigError, PairError
from engine.path import kernel_path
from engine.qwen35 import config as qwen35
from engine.qwen35 import path as qwen35_path
from engine.qwen35.drafter import DFlashDrafter
from engine.qwen35.shared import tapped_context_problem
from engine.qwen35.target import Qwen35Target
from engine.shared import shared_kv_problem
from engine.target import Target
from engine.tokenizer import Tokenizer, load_tokenizer

Role = Literal["target", "drafter"]


@dataclass(frozen=True)
class Family:
    """One model family: what its config.json files say, and what loads them.

    `draft_kind` is the spec's word for how its drafters propose. `shared_problem(target, tokens)` says what is wrong
    with what a drafter is handed after these prompt tokens, or None; `shared_claim` is what holds then.
    `without_flags` are flags that reach nothing in this family, with the reason: set, they are refused.
    `kernel_path` names the kernels of a block and of classic decode, as `engine.path.kernel_path` does.
    """

    name: str
    draft_kind: str
    target_types: tuple[str, ...]
    is_drafter: Callable[[Mapping[str, Any]], bool]
    target_config: Callable[[Mapping[str, Any], str], Any]
    drafter_config: Callable[[Mapping[str, Any], str], Any]
    target: Callable[..., Any]
    drafter: Callable[..., Any]
    shared_problem: Callable[[Any, Sequence[int]], str | None]
    shared_claim: str
    without_flags: Mapping[str, str]
    kernel_path: Callable[..., dict[str, str]]


def _is_gemma_drafter(raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") in DRAFTER_TYPES


def _is_dflash_drafter(raw: Mapping[str, Any]) -> bool:
    architectures = raw.get("architectures")
    named = isinstance(architectures, Sequence) and qwen35.DRAFTER_ARCHITECTURE in architectures
    return named or "dflash_config" in raw


FAMILIES: tuple[Family, ...] = (
    Family(
        "gemma4",
        "mtp",
        TARGET_TYPES,
        _is_gemma_drafter,
        parse_target_config,
        parse_drafter_config,
        Target,
        Drafter,
        shared_kv_problem,
        "the drafter reads the last layers' K/V",
        {},
        kernel_path,
    ),
    Family(
        "qwen35",
        "dflash",
        qwen35.TARGET_TYPES,
        _is_dflash_drafter,
        qwen35.parse_target_config,
        qwen35.parse_drafter_config,
        Qwen35Target,
        DFlashDrafter,
        tapped_context_problem,
        "the drafter reads the tapped layers' hidden states",
        {
            "MLXCEL_COMPILED_QGELU_MLP": "its MLP is a SwiGLU with one kernel",
            "MLX_USE_CUDA_GRAPHS": "its steps are launched op by op",
        },
        qwen35_path.kernel_path,
    ),
)
"""The known families."""


def family_of(raw: Mapping[str, Any], where: str = "config.json") -> tuple[Family, Role]:
    """Whose config.json this is, and whether it describes a target or a drafter; ConfigError for an unknown one.

    Drafters first: a DFlash drafter says the model type of a plain Qwen.
    """
    for family in FAMILIES:
        if family.is_drafter(raw):
            return family, "drafter"
    for family in FAMILIES:
        if raw.get("model_type") in family.target_types:
            return family, "target"
    targets = (name for family in FAMILIES for name in family.target_types)
    known = ", ".join((*targets, *DRAFTER_TYPES, f"architectures [{qwen35.DRAFTER_ARCHITECTURE}]"))
    raise ConfigError(f"{where}: unknown model_type {raw.get('model_type')!r}; known: {known}")


@dataclass(frozen=True)
class Pair:
    """A target, its drafter and tokenizer where there are any, what identifies the checkpoints, and load times."""

    target: Any
    drafter: Any
    tokenizer: Tokenizer | None
    info: dict[str, Any]
    family: Family = FAMILIES[0]

    def with_policy(self, policy: DispatchPolicy) -> Pair:
        """The same weights under another policy."""
        target = self.target.with_policy(policy)
        drafter = self.drafter and self.drafter.with_policy(policy)
        if drafter is not None:
            drafter.bind(target)
        return dataclasses.replace(self, target=target, drafter=drafter)


def load_pair(
    target_dir: Path,
    drafter_dir: Path | None = None,
    policy: DispatchPolicy | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Pair:
    """Load a pair; CheckpointError, ConfigError or PairError say what is wrong with which folder."""
    policy = policy or DispatchPolicy()
    clock = _Clock(device)
    if device.startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = policy.flags.enable_tf32
        torch.backends.cuda.enable_cudnn_sdp(False)  # torch prefers it on sm_90, and it plans anew for every length
        torch.zeros(1, device=device)  # the driver's context: seconds that belong to no checkpoint
    clock.lap("device")
    checkpoint, family = _open(target_dir, "target")
    draft_checkpoint = None
    if drafter_dir is not None:
        draft_checkpoint, draft_family = _open(drafter_dir, "drafter")
        if draft_family is not family:
            raise PairError(
                f"{draft_checkpoint.name}: a drafter of family {draft_family.name}, but {checkpoint.name} is a "
                f"{family.name} target; give the drafter that was made for it"
            )
    config = family.target_config(checkpoint.config, f"{checkpoint.name}/config.json")
    clock.lap("open")
    target = family.target(checkpoint, config, policy, device, dtype)
    clock.lap("prepare")
    clock.split("prepare", "read", checkpoint.meter.seconds)
    info: dict[str, Any] = {"target": _describe(checkpoint, target.nbytes), "drafter": None}
    drafter = None
    if draft_checkpoint is not None:
        draft_config = family.drafter_config(draft_checkpoint.config, f"{draft_checkpoint.name}/config.json")
        drafter = family.drafter(draft_checkpoint, draft_config, policy, device, dtype)
        drafter.bind(target)
        info["drafter"] = _describe(draft_checkpoint, drafter.nbytes)
        clock.lap("drafter")
    tokenizer = None
    if (target_dir / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(target_dir)
    reading.release()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # what repacking took; another child may need it
    clock.lap("tokenizer")
    info["phases"] = clock.phases
    return Pair(target, drafter, tokenizer, info, family)


class _Clock:
    """Seconds of each phase of a load, the device's work included."""

    def __init__(self, device: str) -> None:
        self.phases: dict[str, float] = {}
        self._cuda = device.startswith("cuda")
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """The time since the last lap belongs to this phase."""
        if self._cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.phases[phase] = now - self._last
        self._last = now

    def split(self, whole: str, part: str, seconds: float) -> None:
        """Some of the last phase's time was another phase, woven into it."""
        rest = self.phases.pop(whole) - seconds
        self.phases |= {part: seconds, whole: rest}


def _open(path: Path, role: Role) -> tuple[Checkpoint, Family]:
    """Open a folder that must hold a `role`; PairError when it holds the other one."""
    checkpoint = open_checkpoint(path)
    family, found = family_of(checkpoint.config, f"{checkpoint.name}/config.json")
    if found != role:
        raise PairError(f"{checkpoint.name}: this is a {found}; give it as {found}, not as {role}")
    return checkpoint, family


def _describe(checkpoint: Checkpoint, resident_bytes: int) -> dict[str, Any]:
    section = checkpoint.quantization
    quantization = "none"
    if section is not None:
        bits = {section.bits, *(entry[0] for entry in section.overrides.values() if entry)}
        quantization = "/".join(f"{b}-bit" for b in sorted(bits)) + f" affine, group {section.group_size}"
    described = {
        "name": checkpoint.name,
        "fingerprint": checkpoint.fingerprint(),
        "bytes": resident_bytes,
        "quantization": quantization,
    }
    origin = checkpoint.config.get("grown_from")
    if isinstance(origin, Mapping) and isinstance(origin.get("pair"), str):
        described["origin"] = origin["pair"]  # a record must say that these are nobody's released weights
    seeded = checkpoint.config.get("seeded_from")
    if isinstance(seeded, Mapping) and isinstance(seeded.get("seed"), int):
        described["seeded"] = f"random weights from seed {seeded['seed']}"
    return described
