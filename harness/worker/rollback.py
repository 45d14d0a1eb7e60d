"""Scripted rounds over the real target: after every rollback the caches must hold classic decode's own bytes.

The drafter is scripted: it proposes classic's continuation up to where the script wants a rejection, and wrong tokens
from there on, so that rejected rows leave bytes that do not belong. The loop, its accept and its rollback are real.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.cache import LayerCache, RingCache
from engine.compare import differing_bytes
from engine.decode import classic_decode
from engine.errors import EngineError
from engine.prefill import plan_prefill
from engine.probe import Draw
from engine.requests import GenerationRequest
from engine.speculative import RoundEvent, speculative_decode
from harness.record.lines import RollbackLine
from harness.rollback import Grid
from harness.worker.bench import Bench, Output, send_decision


def run(bench: Bench, args: dict[str, Any], out: Output) -> dict[str, Any]:
    """Args: stage, block_sizes. Sends the decision per block size and, where it engaged, a line per generation."""
    target = bench.at(args["stage"]).target
    for block_size in args["block_sizes"]:
        decision, result = bench.decide(args["stage"], block_size)
        send_decision(out, decision, result)
        if not decision.engaged:
            continue
        grid = grid_of(target, block_size)
        total = sum(len(grid.scripts(length)) for length in grid.prompts.values())
        done = 0
        shared: Prefilled | None = None
        for label, length in grid.prompts.items():
            prefix = shared_prefix(grid, length)
            if shared is None or len(shared.tokens) != prefix:
                shared = Prefilled(target, tokens_of(target, prefix), prefix, chunk=0)  # a history is one piece
            prompt = Prefilled(target, tokens_of(target, length), prefix, bench.prefill_chunk, shared)
            subject = Subject(prompt, grid, bench.prefill_chunk)
            for script in grid.scripts(length):
                out.progress(done, total, f"block size {block_size}, prompt {label}")
                out.line(subject.play(script, out.case, label))
                done += 1
    return {}


def grid_of(target: Any, block_size: int) -> Grid:
    """The cells of this target's rings; EngineError for a target without sliding layers, where nothing wraps."""
    ring = next((layer for layer in layers_of(target.new_caches()) if isinstance(layer, RingCache)), None)
    if ring is None:
        raise EngineError("rollback: this target has no ring cache, so there is no edge to roll back over")
    return Grid(block_size, ring.window, ring.slots)


def layers_of(caches: Any) -> list[LayerCache]:
    """The caches of all layers; EngineError for some that hold no K/V rows by position."""
    layers = list(caches.layers)
    if not all(isinstance(layer, LayerCache) for layer in layers):
        raise EngineError("rollback: some layers of this target hold no rows by position, which is what it compares")
    return layers


def tokens_of(target: Any, length: int) -> tuple[int, ...]:
    """The prompt of that length; a shorter one is a prefix of a longer one."""
    return Draw(length, 0).prompt(target.config.vocab_size)


def shared_prefix(grid: Grid, length: int) -> int:
    """How much of a prompt, at least one token, is prefilled once for all prompts that are hardly longer."""
    starts = (grid.window - grid.block_size - 1, 2 * grid.slots - 3)
    return max((start for start in starts if 1 <= start < length), default=1)


class Prefilled:
    """A target that has run a prompt: its new caches hold the prompt, and its prefill answers from memory.

    The ranges are those of `plan_prefill` with the shared prefix as history, so both modes see the same bytes.
    """

    def __init__(
        self, target: Any, tokens: tuple[int, ...], boundary: int, chunk: int, start: Prefilled | None = None
    ) -> None:
        self.target, self.tokens, self.boundary = target, tokens, boundary
        self._caches: Any = start._caches.clone() if start is not None else target.new_caches()
        self._hidden: Any = start._hidden if start is not None else None
        for part in plan_prefill(len(tokens), boundary, chunk):
            if part.stop > self._caches.length:
                self._hidden = target.prefill(tokens[part.start : part.stop], self._caches).clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def new_caches(self) -> Any:
        """A copy of the caches after the prompt."""
        return self._caches.clone()

    def prefill(self, tokens: Sequence[int], caches: Any) -> Any:
        """The remembered result; only the last range's is ever used."""
        return self._hidden


class Tracked:
    """A target that remembers the caches it handed out last."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.caches: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def new_caches(self) -> Any:
        """The target's own."""
        self.caches = self.target.new_caches()
        return self.caches


@dataclass
class Scripted:
    """Proposes what classic decode will say up to the script's count of accepts, and wrong tokens from there on."""

    sequence: tuple[int, ...]  # the prompt and classic's tokens
    script: tuple[int, ...]
    vocab_size: int
    calls: int = 0

    def draft(self, token: int, hidden: Any, shared: Any, count: int) -> list[int]:
        """`count` proposals after the committed rows and the carried token."""
        first = shared.length + 1
        accepted = self.script[self.calls] if self.calls < len(self.script) else 0  # more rounds: something differs
        self.calls += 1
        known = self.sequence[first : first + count] + (0,) * count
        return [known[at] if at < accepted else (known[at] + 1 + at) % self.vocab_size for at in range(count)]


class Classic:
    """Classic decode's K/V rows of all layers, by absolute position, from the oldest that a comparison may need."""

    def __init__(self, caches: Any) -> None:
        self.first = [layer.length - layer.committed().shape[2] for layer in layers_of(caches)]
        self.rows = [[layer.committed().clone()] for layer in layers_of(caches)]

    def add(self, caches: Any) -> None:
        """Keep the newest row of each layer."""
        for kept, layer in zip(self.rows, layers_of(caches), strict=True):
            kept.append(layer.rows(layer.length - 1, layer.length).clone())

    def join(self) -> None:
        """One tensor per layer, once all rows are in."""
        self.rows = [[torch.cat(kept, 2)] for kept in self.rows]

    def difference(self, caches: Any) -> tuple[int, int, int] | None:
        """The first layer that differs, with differing and total bytes; None when all rows are classic's."""
        for number, layer in enumerate(layers_of(caches)):
            theirs = layer.committed()
            start = layer.length - theirs.shape[2] - self.first[number]
            ours = self.rows[number][0][:, :, start : start + theirs.shape[2]]
            if ours.shape != theirs.shape:
                return number, theirs.nbytes, theirs.nbytes
            if not torch.equal(_bits(ours), _bits(theirs)):
                return number, differing_bytes(ours, theirs), theirs.nbytes
        return None


def _bits(x: Tensor) -> Tensor:
    """The same memory as whole numbers, so that equal means equal bytes."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


class Subject:
    """One prompt: classic decode's tokens and rows, and what scripts are compared with."""

    def __init__(self, target: Prefilled, grid: Grid, chunk: int) -> None:
        self.target, self.grid, self.chunk = target, grid, chunk
        longest = max((sum(script) + len(script) for script in grid.scripts(len(target.tokens))), default=0)
        tracked = Tracked(target)
        rows: Classic | None = None

        def on_token(_token: int) -> None:
            nonlocal rows
            if rows is None:
                rows = Classic(tracked.caches)
            else:
                rows.add(tracked.caches)

        self.classic = classic_decode(tracked, self._request(longest), chunk, on_token).tokens
        assert rows is not None
        rows.join()
        self.rows = rows

    def _request(self, emitted: int) -> GenerationRequest:
        """As many tokens as a script emits, and the one before them, past any stop token."""
        target = self.target
        return GenerationRequest(target.tokens, emitted + 1, ignore_stop=True, history_boundary=target.boundary)

    def play(self, script: tuple[int, ...], case: str, label: str) -> RollbackLine:
        """One generation by the script, compared after every round and at its end."""
        began = time.perf_counter()
        request = self._request(sum(script) + len(script))
        compared, differing, found = 0, 0, ""

        def on_round(event: RoundEvent) -> None:
            nonlocal compared, differing, found
            if found:
                return
            compared += 1
            difference = self.rows.difference(event.caches)
            if difference is not None:
                layer, differing, total = difference
                found = (
                    f"after round {event.index}, {event.num_accepted} of {len(event.draft_tokens)} drafts accepted, "
                    f"{differing} of {total} bytes of layer {layer}'s cache at {event.caches.length} rows differ"
                )

        drafter = Scripted(request.tokens + self.classic, script, self.target.config.vocab_size)
        rounds = speculative_decode(self.target, drafter, request, self.grid.block_size, self.chunk, on_round)
        expected = self.classic[: request.max_tokens]
        at = next((i for i, (a, b) in enumerate(zip(expected, rounds.tokens, strict=False)) if a != b), None)
        if not found and at is not None:
            found = f"token {at} of {len(expected)} differs"
        return RollbackLine(
            case=case,
            block_size=self.grid.block_size,
            window=self.grid.window,
            ring_slots=self.grid.slots,
            prompt=label,
            prompt_tokens=len(request.tokens),
            script=script,
            accepted_per_round=rounds.rounds.accepted_per_round if rounds.rounds else (),
            tokens=len(rounds.tokens),
            identical=rounds.tokens == expected,
            rounds_compared=compared,
            differing_bytes=differing,
            first_difference=found or None,
            seconds=time.perf_counter() - began,
        )
