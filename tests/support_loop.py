"""A tiny deterministic target and scripted drafters that drive the round loop without a model.

`FakeTarget` has the caches' shapes of the real one: a sliding ring of window + 7 slots and a
growing list. Its next token depends on every visible key, so a wrong slot shows in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.capture import FINAL_KIND, Capture
from engine.compare import snapshot_difference
from engine.decode import classic_decode
from engine.requests import GenerationRequest
from engine.speculative import Accept, RoundEvent, accepted_prefix, speculative_decode
from engine.stats import Generation
from harness.worker.rollback import Tracked

MARGIN = 7
PRIME = 1_000_003


@dataclass
class FakeCaches:
    """A ring of (position, key) slots and a list of running hashes; keys are token ids plus one."""

    window: int
    ring: list[tuple[int, int]] = field(default_factory=list)
    linear: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.ring:
            self.ring = [(-1, 0)] * (self.window + MARGIN)

    @property
    def length(self) -> int:
        """Rows held."""
        return len(self.linear)

    def append(self, token: int) -> None:
        """Write one row at its absolute position's slot."""
        position = self.length
        self.ring[position % len(self.ring)] = (position, token + 1)
        self.linear.append(((self.linear[-1] if self.linear else 7) * 31 + token + 1) % PRIME)

    def visible(self, position: int) -> list[int]:
        """Keys of the last `window` positions up to `position`, oldest first."""
        keys = []
        for at in range(max(0, position - self.window + 1), position + 1):
            keys.append(self.ring[at % len(self.ring)][1])
        return keys

    def rollback(self, n: int) -> None:
        """Forget the newest n rows."""
        if not 0 <= n <= self.length:
            raise ValueError(f"rollback of {n} from {self.length} rows")
        del self.linear[self.length - n :]

    def clone(self) -> FakeCaches:
        """An independent copy."""
        return type(self)(self.window, list(self.ring), list(self.linear))

    def snapshot_bytes(self) -> list[tuple[int, ...]]:
        """One item for the ring's visible keys, one for the list."""
        return [tuple(self.visible(self.length - 1)), tuple(self.linear)]


@dataclass(frozen=True)
class FakeOutput:
    """Logits [M, V], hidden [M, 2] and greedy tokens of one forward."""

    logits: Tensor
    hidden: Tensor
    argmax: list[int]


class FakeTarget:
    """Next-token rule over the visible keys; hidden rows carry (position, key hash)."""

    def __init__(self, vocab_size: int = 29, window: int = 16, seed: int = 0) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size, sliding_window=window)
        self.seed = seed
        self.caches: Any = None
        self.step_rows: list[tuple[str, int]] = []
        self.prefill_ranges: list[tuple[int, int]] = []

    def new_caches(self) -> FakeCaches:
        """Empty caches, remembered in `self.caches` for tests that look inside."""
        self.caches = FakeCaches(self.config.sliding_window)
        return self.caches

    def key_hash(self, caches: FakeCaches, position: int) -> int:
        """A number that changes with any visible key, its order, and the whole history."""
        total = self.seed * 977 + caches.linear[position] * 13
        for key in caches.visible(position):
            total = (total * 37 + key) % PRIME
        return total

    def row(self, number: int) -> Tensor:
        """Logits [V] of a key hash: all different, so that no tie decides."""
        return (torch.arange(self.config.vocab_size) * 7919 + number).remainder(1009).to(torch.float32)

    def prefill(self, tokens: Sequence[int], caches: FakeCaches) -> Tensor:
        """Append a range; the last row's hidden state [2]."""
        self.prefill_ranges.append((caches.length, caches.length + len(tokens)))
        for token in tokens:
            caches.append(token)
        position = caches.length - 1
        return torch.tensor([float(position), float(self.key_hash(caches, position))], dtype=torch.float64)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head over rows [r, 2]."""
        return torch.stack([self.row(int(row[1])) for row in hidden])

    def step(self, tokens: Sequence[int], caches: FakeCaches, mode: str, capture: Capture | None = None) -> FakeOutput:
        """Append the rows, then compute each row over its own visible keys."""
        assert mode in ("classic", "verify")
        assert mode == "verify" or len(tokens) == 1
        self.step_rows.append((mode, len(tokens)))
        start = caches.length
        for token in tokens:
            caches.append(token)
        hashes = [self.key_hash(caches, start + row) for row in range(len(tokens))]
        hidden = torch.tensor([[float(start + row), float(hashes[row])] for row in range(len(tokens))]).double()
        logits = self.perturb(torch.stack([self.row(number) for number in hashes]), start, mode)
        if capture is not None:
            rows = torch.tensor([[float(token)] for token in tokens])
            for layer, kind in enumerate(("sliding", "full")):
                capture.record(layer, kind, "q_proj", rows)
                capture.record(layer, kind, "attention core", hidden[:, 1:] * (layer + 1))
            capture.record(2, FINAL_KIND, "LM head", logits)
        return FakeOutput(logits, hidden, logits.argmax(1).tolist())

    def perturb(self, logits: Tensor, start: int, mode: str) -> Tensor:
        """Where a faulty subclass changes rows; the sound target does not."""
        return logits

    def shared_kv(self, caches: FakeCaches) -> SimpleNamespace:
        """What a scripted drafter needs: the committed length."""
        return SimpleNamespace(length=caches.length)


def last_bit(row: Tensor) -> Tensor:
    """The same row with the last bit of its first element flipped."""
    changed = row.clone()
    changed.view(torch.int32)[0] ^= 1
    return changed


class OneWidth(FakeTarget):
    """Row 2 of a verify block of exactly four rows is off by one bit; argmax never moves."""

    def perturb(self, logits: Tensor, start: int, mode: str) -> Tensor:
        if mode == "verify" and logits.shape[0] == 4:
            logits[2] = last_bit(logits[2])
        return logits


Corrupt = Callable[[int, int], bool]
"""(round, draft index) -> whether that draft is made wrong."""


class ScriptedDrafter:
    """Proposes the known continuation, wrong wherever the script says so.

    `sequence` is the prompt with classic decode's output; past its end it proposes token 0. A
    strict one checks what the loop of a fake target hands over: the carried token, the hidden row.
    """

    def __init__(self, sequence: Sequence[int], vocab_size: int, corrupt: Corrupt, strict: bool = True) -> None:
        self.sequence = list(sequence)
        self.vocab_size = vocab_size
        self.corrupt = corrupt
        self.strict = strict
        self.calls = 0

    def draft(self, token: int, hidden: Tensor, shared: Any, count: int) -> list[int]:
        """`count` proposals after the committed rows and the carried token."""
        if self.strict:
            assert token == self.sequence[shared.length], "carried token is not the newest emitted one"
            assert int(hidden[0]) == shared.length - 1, "hidden is not of the row that produced the carried token"
        drafts = []
        for index in range(count):
            at = shared.length + 1 + index
            right = self.sequence[at] if at < len(self.sequence) else 0
            drafts.append((right + 1) % self.vocab_size if self.corrupt(self.calls, index) else right)
        self.calls += 1
        return drafts


def oracle(_round: int, _index: int) -> bool:
    """Every draft is right."""
    return False


def hostile(_round: int, _index: int) -> bool:
    """Every draft is wrong."""
    return True


def script(pattern: str) -> Corrupt:
    """Drafts are right where the repeated pattern has a 1, counted over all drafts of all rounds."""

    def corrupt(round_index: int, index: int) -> bool:
        return pattern[(round_index * 7 + index) % len(pattern)] == "0"

    return corrupt


@dataclass(frozen=True)
class Parity:
    """Rounds against classic decode: the first token that differs, and the first cache rows and layer that do."""

    classic: Generation
    rounds: Generation
    first_token: int | None
    first_cache: tuple[int, int] | None

    @property
    def holds(self) -> bool:
        """Tokens, finish reason and the cache bytes after every round are classic decode's."""
        return (
            self.first_token is None
            and self.first_cache is None
            and self.classic.finish_reason == self.rounds.finish_reason
        )


def parity(
    classic_target: Any,
    rounds_target: Any,
    request: GenerationRequest,
    block_size: int,
    drafter: Any,
    rounds_request: GenerationRequest | None = None,
    accept: Accept = accepted_prefix,
    chunk: int = 0,
) -> Parity:
    """Run both modes and compare; `drafter` may be a function of classic decode's tokens."""
    tracked = Tracked(classic_target)
    snapshots: dict[int, Any] = {}
    classic = classic_decode(
        tracked, request, chunk, lambda _: snapshots.update({tracked.caches.length: tracked.caches.snapshot_bytes()})
    )
    differences: list[tuple[int, int]] = []

    def on_round(event: RoundEvent) -> None:
        length = event.caches.length
        if length not in snapshots:
            differences.append((length, -1))
            return
        pairs = zip(snapshots[length], event.caches.snapshot_bytes(), strict=True)
        differences.extend(
            (length, layer) for layer, (ours, theirs) in enumerate(pairs) if snapshot_difference(ours, theirs)[0]
        )

    rounds = speculative_decode(
        rounds_target,
        drafter(classic.tokens) if callable(drafter) else drafter,
        rounds_request or request,
        block_size,
        chunk,
        on_round,
        accept=accept,
    )
    longest = max(len(classic.tokens), len(rounds.tokens))
    first_token = next((at for at in range(longest) if classic.tokens[at : at + 1] != rounds.tokens[at : at + 1]), None)
    return Parity(classic, rounds, first_token, differences[0] if differences else None)


def scripted(
    request: GenerationRequest, vocab_size: int, corrupt: Corrupt
) -> Callable[[Sequence[int]], ScriptedDrafter]:
    """A drafter that follows classic decode's tokens, for `parity`."""
    return lambda tokens: ScriptedDrafter((*request.tokens, *tokens), vocab_size, corrupt, strict=False)
