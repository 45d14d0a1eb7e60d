"""Grown pairs for tests, built once per test run, and what compares one with nano."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from support_engine import scratch_folder
from torch import Tensor

from engine.pair import Pair, load_pair
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode
from tools.grow.geometry import GEOMETRIES, Geometry
from tools.grow.pair import grow_pair
from tools.grow.source import DRAFTER_NAME, TARGET_NAME

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "specs" / "checkpoints"
PREFILL_CHUNK = 512


class Folders(NamedTuple):
    """Of a grown target and its drafter."""

    target: Path
    drafter: Path


class Run(NamedTuple):
    """A short run: tokens, accepted drafts per round, logits of the prompt's last rows and of two draft steps there."""

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    logits: Tensor
    draft_logits: Tensor

    @property
    def acceptance(self) -> float:
        """Accepted over drafted."""
        return sum(self.accepted) / (3 * len(self.accepted))


def build(geometry: Geometry, floats: bool, seed: int = 0, shard_bytes: int = 30_000_000) -> Folders:
    """A fresh grown pair."""
    folder = Path(tempfile.mkdtemp(prefix=f"grown-{geometry.name}-", dir=scratch_folder()))
    return Folders(*grow_pair(geometry, NANO, folder, seed=seed, floats=floats, shard_bytes=shard_bytes))


@functools.cache
def grown(name: str, floats: bool) -> Folders:
    """The pair of a geometry, built on first use: read it, never change it."""
    return build(GEOMETRIES[name], floats)


@functools.cache
def loaded(name: str, floats: bool, dtype: torch.dtype = torch.float32) -> Pair:
    """The same, loaded; computes in `dtype`."""
    return load_pair(*grown(name, floats), dtype=dtype)


@functools.cache
def nano_pair(dtype: torch.dtype = torch.float32) -> Pair:
    """The committed nano pair."""
    return load_pair(NANO / TARGET_NAME, NANO / DRAFTER_NAME, dtype=dtype)


@functools.cache
def prompt(name: str) -> tuple[int, ...]:
    """Ids of one of the committed prompts, raw."""
    tokenizer = nano_pair().tokenizer
    assert tokenizer is not None
    text = (ROOT / "specs" / "prompts" / f"{name}.txt").read_text(encoding="utf-8")
    return tokenizer.encode_raw(text)


@torch.inference_mode()
def run(pair: Pair, ids: tuple[int, ...], count: int) -> Run:
    """Rounds of four rows after a prompt; logits over nano's vocabulary."""
    request = GenerationRequest(ids, count, ignore_stop=True)
    out = speculative_decode(pair.target, pair.drafter, request, 4, PREFILL_CHUNK)
    assert out.rounds is not None
    logits, draft_logits = forward(pair, ids)
    return Run(out.tokens, out.rounds.accepted_per_round, logits[:, :4096].float(), draft_logits[:, :4096].float())


@torch.inference_mode()
def forward(pair: Pair, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits of the last four rows [4, V], and of two chained draft steps after them [2, V]."""
    assert pair.drafter is not None
    caches = pair.target.new_caches()
    pair.target.prefill(ids[:-4], caches)
    out = pair.target.step(ids[-4:], caches, "verify")
    shared = pair.target.shared_kv(caches)
    first, vector = pair.drafter.draft_step(out.argmax[3], out.hidden[3], shared, len(ids) - 1)
    second, _ = pair.drafter.draft_step(int(first.argmax()), vector, shared, len(ids) - 1)
    return out.logits, torch.stack((first, second))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Mean difference."""
    return (ours - theirs).abs().mean().item()


@functools.cache
def nano_run(name: str, count: int) -> Run:
    """What nano does in fp32."""
    return run(nano_pair(), prompt(name), count)
