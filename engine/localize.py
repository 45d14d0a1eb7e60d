"""Names the first op whose bytes differ between a verify block and the classic chain.

Runs a failing probe case again, block by block, with capture points in both arms, and compares
the captures in execution order. The caches are compared after every block, so that a bad
rollback is named where it happens and not where a later query trips over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.capture import Capture, CaptureEntry
from engine.compare import differing_bytes, snapshot_difference
from engine.protocols import TargetLike

CACHE_OP = "K/V cache"
"""Op name of a divergence that shows in the caches after a rollback and in no capture point."""

STATE_OP = "state"
"""The same for a layer that keeps a state in place of K/V."""


@dataclass(frozen=True)
class Block:
    """One verify forward of a probe case: it starts at row `start` of the chain and keeps `kept` rows."""

    start: int
    tokens: tuple[int, ...]
    kept: int


@dataclass(frozen=True)
class ProbeCase:
    """A prompt, the tokens committed after it, and the blocks that must reproduce their rows."""

    name: str
    prompt: tuple[int, ...]
    committed: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Divergence:
    """The first tensor row, in execution order, whose bytes differ.

    `position` counts rows from the end of the draw's prompt; `layer` is the number of layers for
    the ops after the last one, whose `kind` is "final".
    """

    layer: int
    kind: str
    op: str
    position: int
    differing_bytes: int
    total_bytes: int
    draw: str = ""

    def describe(self) -> str:
        """One line, such as `layer 3 (sliding) q_rope at position 2, 12 of 512 bytes differ`."""
        return (
            f"layer {self.layer} ({self.kind}) {self.op} at position {self.position}, "
            f"{self.differing_bytes} of {self.total_bytes} bytes differ"
        )


class TraceError(ValueError):
    """Two captures cannot be compared; such a trace never counts as equal."""


def compare_captures(chain: Sequence[Capture], block: Capture, start: int, draw: str = "") -> Divergence | None:
    """First differing row of a block against its chain steps, one capture a step.

    Stage by stage in execution order, row by row within a stage; rows of the block past the
    chain's are drafts that were not kept. Raises TraceError for traces that do not line up.
    """
    if not chain or not block.entries or any(not step.entries for step in chain):
        raise TraceError("probe trace is empty")
    stages = [entry.stage for entry in block.entries]
    for step in chain:
        if [entry.stage for entry in step.entries] != stages:
            raise TraceError("probe trace stages differ between the arms")
    for index, entry in enumerate(block.entries):
        for row, step in enumerate(chain):
            found = _compare_row(step.entries[index], entry, row, start, draw)
            if found:
                return found
    return None


def _compare_row(single: CaptureEntry, block: CaptureEntry, row: int, start: int, draw: str) -> Divergence | None:
    """Row `row` of the block against the only row of a chain step."""
    if single.rows.shape[0] != 1 or block.rows.shape[0] <= row or single.rows.shape[1:] != block.rows.shape[1:]:
        raise TraceError(f"probe trace rows differ in shape at layer {block.layer} {block.op}")
    ours = block.rows[row]
    differing = differing_bytes(single.rows[0], ours)
    if not differing:
        return None
    total = ours.numel() * ours.element_size()
    return Divergence(block.layer, block.kind, block.op, start + row, differing, total, draw)


def localize(target: TargetLike, case: ProbeCase, caches: Any) -> Divergence | None:
    """Walk both arms of a case from prefilled caches until a capture or a cache differs.

    Returns None when nothing does, which leaves the verdict on the logits as it is. Raises
    TraceError for traces that cannot be compared.
    """
    chain_caches, block_caches = caches.clone(), caches.clone()
    for block in case.blocks:
        steps: list[Capture] = []
        for token in case.committed[block.start : block.start + block.kept]:
            steps.append(Capture())
            target.step([token], chain_caches, "classic", capture=steps[-1])
        captured = Capture()
        target.step(list(block.tokens), block_caches, "verify", capture=captured)
        block_caches.rollback(len(block.tokens) - block.kept)
        found = compare_captures(steps, captured, block.start, case.name)
        if found:
            return found
        found = _compare_caches(chain_caches, block_caches, _layer_kinds(captured), block, case.name)
        if found:
            return found
    return None


def _layer_kinds(capture: Capture) -> dict[int, str]:
    return {entry.layer: entry.kind for entry in capture.entries}


def _compare_caches(
    chain_caches: Any, block_caches: Any, kinds: dict[int, str], block: Block, draw: str
) -> Divergence | None:
    """First layer whose K/V bytes differ after a block and its rollback."""
    if hasattr(chain_caches, "first_difference") and chain_caches.first_difference(block_caches)[0] is None:
        return None  # compared where they lie; at the real sizes a copy to the host takes seconds a block
    position = block.start + block.kept - 1
    for layer, (ours, theirs) in enumerate(
        zip(chain_caches.snapshot_bytes(), block_caches.snapshot_bytes(), strict=True)
    ):
        differing, total = snapshot_difference(ours, theirs)
        if differing:
            kind = kinds.get(layer, "unknown")
            op = STATE_OP if kind == "linear" else CACHE_OP
            return Divergence(layer, kind, op, position, differing, total, draw)
    return None
