"""The round loop: draft, verify, accept, roll back.

A round always runs `block_size` rows, whatever the budget leaves, so that no row count which
the probe did not compare ever decides a token. The drafter only chooses which rows are tried;
every emitted token is the target's own argmax.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.decode import OnToken
from engine.drafts import DraftedBlock, Drafts
from engine.errors import EngineError, RequestError
from engine.prefill import run_prefill
from engine.protocols import DrafterLike, TargetLike
from engine.requests import GenerationRequest, validate_request
from engine.rounds import Round, can_run_ahead, rounds
from engine.stats import FinishReason, Generation, RoundStats, Timing

MAX_BLOCK_SIZE = 8
"""Rows that the row contract covers."""


@dataclass(frozen=True)
class RoundEvent:
    """One finished round: what was tried, what came out, and the caches after the rollback."""

    index: int
    draft_tokens: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]
    caches: Any


OnRound = Callable[[RoundEvent], None]
Accept = Callable[[Sequence[int], Sequence[int]], int]


def check_block_size(block_size: int, drafter: DrafterLike | None) -> None:
    """Raise RequestError for a block size outside 1..8, or above 1 without a drafter."""
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise RequestError(f"block_size {block_size}: must be 1 to {MAX_BLOCK_SIZE}, the rows that verify may take")
    if block_size > 1 and drafter is None:
        raise RequestError(f"block_size {block_size}: needs a drafter; load one, or decode without drafts")


def accepted_prefix(draft_tokens: Sequence[int], argmax: Sequence[int]) -> int:
    """Length of the longest prefix of the drafts that equals the target's argmax."""
    accepted = 0
    for draft, token in zip(draft_tokens, argmax, strict=False):
        if draft != token:
            break
        accepted += 1
    return accepted


def speculative_decode(
    target: TargetLike,
    drafter: DrafterLike | None,
    request: GenerationRequest,
    block_size: int,
    prefill_chunk: int,
    on_round: OnRound | None = None,
    on_token: OnToken | None = None,
    accept: Accept = accepted_prefix,
) -> Generation:
    """Generate by rounds; tokens, finish reason and caches equal classic decode's.

    After every round the caches hold the prompt and all emitted tokens but the last, as they do in classic decode.
    Where a round ran ahead of a stop token, a ring has lost rows for it, and refuses them. Raises RequestError for a
    bad request or block size, EngineError for a drafter that breaks its contract.
    """
    validate_request(request, target.config)
    check_block_size(block_size, drafter)
    if request.max_tokens == 0:
        return Generation((), "length", Timing(0.0, 0.0), rounds=RoundStats(block_size, (), 0, 0.0, 0.0))
    caches = target.new_caches()
    prefill = run_prefill(target, request.tokens, request.history_boundary, prefill_chunk, caches)
    began = time.perf_counter()
    tokens = [prefill.first_token]
    if on_token:
        on_token(prefill.first_token)
    hidden, stopped = prefill.hidden, request.stops_at(prefill.first_token)
    accepted_per_round: list[int] = []
    draft_s = verify_s = 0.0
    carried, size = prefill.first_token, block_size
    if accept is accepted_prefix and on_round is None and can_run_ahead(target, drafter, caches, size):
        source = rounds(target, drafter, caches, carried, hidden, size, lambda: request.max_tokens - len(tokens))
    else:
        source = _rounds(target, drafter, caches, carried, hidden, size)
    while not stopped and len(tokens) < request.max_tokens:
        mark = time.perf_counter()
        done = next(source)
        accepted = accept(done.draft_tokens, done.argmax)
        bonus_token = done.argmax[accepted]
        emitted, stopped = request.cut([*done.draft_tokens[:accepted], bonus_token], len(tokens))
        # The carried row stays, and a row for each emitted token but the newest, which is carried next.
        caches.rollback(block_size - len(emitted))
        tokens.extend(emitted)
        accepted_per_round.append(accepted)
        draft_s += done.draft_s
        verify_s += time.perf_counter() - mark - done.draft_s
        if on_token:
            for token in emitted:
                on_token(token)
        if on_round:
            on_round(RoundEvent(len(accepted_per_round) - 1, done.draft_tokens, accepted, emitted, caches))
    source.close()
    finish: FinishReason = "stop" if stopped else "length"
    return Generation(
        tuple(tokens),
        finish,
        Timing(prefill.seconds, time.perf_counter() - began),
        rounds=RoundStats(block_size, tuple(accepted_per_round), len(tokens) - 1, draft_s, verify_s),
    )


def _rounds(
    target: TargetLike, drafter: DrafterLike | None, caches: Any, carried: int, hidden: Any, block_size: int
) -> Generator[Round]:
    """A round each time one is asked for; what the caller keeps of its rows decides where the next one goes on."""
    while True:
        mark = time.perf_counter()
        first = caches.length
        drafts: Sequence[int] = ()
        if drafter is not None and block_size > 1:
            drafts = drafter.draft(carried, hidden, target.shared_kv(caches), block_size - 1)
        block: Sequence[int]
        if isinstance(drafts, Drafts):  # on the device: verify takes them from there, and the host looks once
            block = DraftedBlock(drafts)
        else:
            drafts = tuple(drafts)
            _check_drafts(drafts, block_size - 1, target.config.vocab_size)
            block = [carried, *drafts]
        drafted = time.perf_counter()
        output = target.step(block, caches, "verify")
        spent = drafts.seconds if isinstance(drafts, Drafts) else drafted - mark
        yield Round(tuple(drafts), list(output.argmax), spent)
        accepted = caches.length - first - 1
        carried, hidden = output.argmax[accepted], output.hidden[accepted].clone()


def _check_drafts(draft_tokens: Sequence[int], count: int, vocab_size: int) -> None:
    """Raise EngineError unless there are `count` ids inside the vocabulary."""
    if len(draft_tokens) != count:
        raise EngineError(f"drafter: returned {len(draft_tokens)} tokens where {count} were asked for")
    for token in draft_tokens:
        if not 0 <= token < vocab_size:
            raise EngineError(f"drafter: token {token} is outside the target's vocabulary of {vocab_size}")
