"""Loads a target and its drafter from checkpoint folders and checks that they belong together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import reading
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import config_role, parse_drafter_config, parse_target_config
from engine.dispatch import DispatchPolicy
from engine.drafter import Drafter
from engine.errors import PairError
from engine.target import Target
from engine.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Pair:
    """A target, its drafter and tokenizer where there are any, what identifies the checkpoints, and load times."""

    target: Target
    drafter: Drafter | None
    tokenizer: Tokenizer | None
    info: dict[str, Any]

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
        torch.zeros(1, device=device)  # the driver's context: seconds that belong to no checkpoint
    clock.lap("device")
    checkpoint = _open(target_dir, "target")
    draft_checkpoint = None if drafter_dir is None else _open(drafter_dir, "drafter")
    config = parse_target_config(checkpoint.config, f"{checkpoint.name}/config.json")
    clock.lap("open")
    target = Target(checkpoint, config, policy, device, dtype)
    clock.lap("prepare")
    clock.split("prepare", "read", checkpoint.meter.seconds)
    info: dict[str, Any] = {"target": _describe(checkpoint, target.nbytes), "drafter": None}
    drafter = None
    if draft_checkpoint is not None:
        draft_config = parse_drafter_config(draft_checkpoint.config, f"{draft_checkpoint.name}/config.json")
        drafter = Drafter(draft_checkpoint, draft_config, policy, device, dtype)
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
    return Pair(target, drafter, tokenizer, info)


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


def _open(path: Path, role: str) -> Checkpoint:
    """Open a folder that must hold a `role`; PairError when it holds the other one."""
    checkpoint = open_checkpoint(path)
    found = config_role(checkpoint.config, f"{checkpoint.name}/config.json")
    if found != role:
        raise PairError(f"{checkpoint.name}: this is a {found}; give it as {found}, not as {role}")
    return checkpoint


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
    return described
