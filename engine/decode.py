"""Classic decode: one token per forward, greedy. The baseline that rounds must reproduce.

The first token comes from the prefill's last row; every later one from a one-row forward of
the token before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from engine.prefill import run_prefill
from engine.protocols import TargetLike
from engine.requests import GenerationRequest, validate_request
from engine.stats import FinishReason, Generation, Timing

OnToken = Callable[[int], None]


def classic_decode(
    target: TargetLike, request: GenerationRequest, prefill_chunk: int, on_token: OnToken | None = None
) -> Generation:
    """Generate up to `max_tokens` tokens; a stop token is the last one emitted.

    `on_token` is called with each token as it is emitted. Raises RequestError for a bad request.
    """
    validate_request(request, target.config)
    if request.max_tokens == 0:
        return Generation((), "length", Timing(0.0, 0.0))
    caches = target.new_caches()
    prefill = run_prefill(target, request.tokens, request.history_boundary, prefill_chunk, caches)
    began = time.perf_counter()
    tokens: list[int] = []
    token = prefill.first_token
    chain = _chain(target, token, caches, request.max_tokens - 1)
    while True:
        tokens.append(token)
        if on_token:
            on_token(token)
        if request.stops_at(token) or len(tokens) == request.max_tokens:
            break
        token = next(chain)
    chain.close()
    finish: FinishReason = "stop" if request.stops_at(token) else "length"
    return Generation(tuple(tokens), finish, Timing(prefill.seconds, time.perf_counter() - began))


def _chain(target: TargetLike, token: int, caches: Any, count: int) -> Generator[int]:
    """`count` greedy tokens after `token`, a step each time one is asked for; over a room the target runs ahead."""
    if getattr(caches, "room", None) is not None and hasattr(target, "chain"):
        yield from target.chain(token, caches, count)
        return
    for _ in range(count):
        token = target.step([token], caches, "classic").argmax[0]
        yield token
