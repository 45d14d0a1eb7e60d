"""Reads the nano pair: matrices as codes, vectors in fp32, by the loader's names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import DrafterConfig, TargetConfig, parse_drafter_config, parse_target_config
from engine.errors import EngineError
from engine.quantize import GROUP_SIZE
from engine.weights import drafter_tensors, target_tensors
from tools.grow.codes import Codes, from_packed
from tools.grow.errors import GrowError

TARGET_NAME, DRAFTER_NAME = "gemma4-nano-it-4bit", "gemma4-nano-it-assistant-4bit"


@dataclass(frozen=True)
class Source:
    """One opened nano checkpoint; matrices come out on `device`."""

    checkpoint: Checkpoint
    device: str

    def codes(self, module: str) -> Codes:
        """A module's matrix as codes."""
        section = self.checkpoint.quantization
        spec = None if section is None else section.of(module)
        if spec is None or spec[1] != GROUP_SIZE:
            raise GrowError(f"{self.checkpoint.name}: {module} is not quantized in groups of {GROUP_SIZE}")
        words, scales, biases = (self.checkpoint.tensor(f"{module}.{part}") for part in ("weight", "scales", "biases"))
        return from_packed(words, scales, biases, spec[0], self.device)

    def vector(self, name: str) -> Tensor:
        """A stored vector, fp32."""
        return self.checkpoint.tensor(name).float().to(self.device)


@dataclass(frozen=True)
class Nano:
    """The nano pair."""

    target: Source
    drafter: Source
    target_config: TargetConfig
    drafter_config: DrafterConfig
    sha256: str


def open_nano(folder: Path, device: str) -> Nano:
    """The pair under `folder`, verified; GrowError says in one line what is wrong with it."""
    try:
        target, drafter = (open_checkpoint(folder / name) for name in (TARGET_NAME, DRAFTER_NAME))
        target_config = parse_target_config(target.config, f"{target.name}/config.json")
        drafter_config = parse_drafter_config(drafter.config, f"{drafter.name}/config.json")
        target.verify(target_tensors(target_config), "target")
        drafter.verify(drafter_tensors(drafter_config), "drafter")
    except EngineError as error:
        raise GrowError(f"the nano pair cannot be read: {error}") from error
    digest = hashlib.sha256((target.content_sha256() + drafter.content_sha256()).encode()).hexdigest()
    return Nano(Source(target, device), Source(drafter, device), target_config, drafter_config, digest)
