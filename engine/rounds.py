"""Rounds over a room: draft and verify as two recordings, and the next round on its way before the host has looked.

What a round accepts is worked out on the device as well as here, so the device need not wait for this process. A round
that ran ahead of the end of a generation is nobody's: its rows lie behind the last one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kv import LentKV
from engine.room import BEST, IDS, Room


@dataclass(frozen=True)
class Round:
    """A finished round: its drafts, the target's greedy tokens, the device's seconds for drafting."""

    draft_tokens: tuple[int, ...]
    argmax: list[int]
    draft_s: float


def can_run_ahead(target: Any, drafter: Any, caches: Any, block_size: int) -> bool:
    """Whether rounds over these caches are recordings from end to end."""
    if getattr(caches, "room", None) is None or block_size < 2 or not hasattr(drafter, "recording"):
        return False
    return hasattr(target, "runs_ahead") and bool(target.runs_ahead(caches, block_size))


def rounds(
    target: Any, drafter: Any, caches: Any, token: int, hidden: Tensor, block_size: int, wanted: Callable[[], int]
) -> Generator[Round]:
    """Rounds behind `token`, whose state is hidden [H].

    After each one the caches hold the whole block; the caller drops what was not accepted, and nothing more unless it
    asks for no other round (EngineError if it does). `wanted` says how many tokens are still to come before the round
    that is being read; the next one starts early only where this one cannot be the last for its length. Once the
    generator is closed, the rings say that rows are gone which a round that ran ahead may have written over.
    """
    room: Room = caches.room
    slot, running = 0, False
    follows = written = turn = 0  # where the round ahead starts; no launched one writes at `written` or later
    try:
        while True:
            if running:
                room.check_ahead(caches, follows, turn)
            first = caches.length
            shared: LentKV = target.shared_kv(caches)
            with torch.inference_mode():
                if not running:
                    max_keys = room.fit(caches, first + 2 * block_size)
                    room.send([token], first)  # before anything is recorded: that runs it once, where the words say
                    turn, written = room.turn, first + block_size
                    room.vector[0].copy_(hidden)
                    _draft(room, drafter.recording(shared, block_size - 1, max_keys), slot)
                    # Recorded behind the drafts: rows of another block may lie over a row that the drafter reads.
                    verify, found = target.recorded_verify(caches, block_size, max_keys)
                    verify()
                    room.fetch(slot)
                running = wanted() > block_size and first + 3 * block_size <= max_keys
                if running:
                    written = first + 2 * block_size
                    _draft(room, drafter.recording(shared, block_size - 1, max_keys, found.hidden), 1 - slot)
                    verify()
                    room.fetch(1 - slot)
                words = room.wait(slot)
                if not running:
                    kept = found.hidden.clone()
            caches.reserve(block_size)
            drafts = tuple(words[IDS + 1 : IDS + block_size])
            best = words[BEST : BEST + block_size]
            if running:  # by the rule that the device went on by
                follows = first + 1 + next((at for at in range(block_size - 1) if drafts[at] != best[at]), len(drafts))
                written = follows + block_size
            yield Round(drafts, best, room.span(slot))
            slot = 1 - slot
            if not running:
                accepted = caches.length - first - 1
                token, hidden = best[accepted], kept[accepted]
    finally:
        for layer in caches.layers:
            layer.touched(written - layer.length)


def _draft(room: Room, draft: Callable[[], None], slot: int) -> None:
    """Launch a draft chain between two marks."""
    room.mark(0, slot)
    draft()
    room.mark(1, slot)
