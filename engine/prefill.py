"""Prefill: how a prompt is cut into forwards, and running them.

The cut decides K/V bytes, so there is one plan and one function for classic decode and for
rounds. The history segment of a chat prompt is one piece; the rest goes chunk by chunk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.protocols import TargetLike

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PrefillResult:
    """The last prompt position's hidden state [H], the first token, and the seconds both took."""

    hidden: Tensor
    first_token: int
    seconds: float


def plan_prefill(n_tokens: int, boundary: int | None, chunk: int) -> tuple[range, ...]:
    """Ranges of the prompt, one forward each, in order.

    A boundary strictly inside the prompt makes the tokens before it one piece; the others are
    cut every `chunk` tokens (0: not cut). Raises ValueError for a negative count or chunk.
    """
    if n_tokens < 0 or chunk < 0:
        raise ValueError(f"plan_prefill: n_tokens {n_tokens} and chunk {chunk} must be 0 or more")
    ranges: list[range] = []
    start = 0
    if boundary is not None and 0 < boundary < n_tokens:
        ranges.append(range(0, boundary))
        start = boundary
    width = chunk or n_tokens
    while start < n_tokens:
        end = min(start + width, n_tokens)
        ranges.append(range(start, end))
        start = end
    return tuple(ranges)


def run_prefill(
    target: TargetLike, tokens: Sequence[int], boundary: int | None, chunk: int, caches: Any
) -> PrefillResult:
    """Run the plan over empty caches; only the last row goes through the head."""
    began = time.perf_counter()
    hidden: Tensor | None = None
    for part in plan_prefill(len(tokens), boundary, chunk):
        hidden = target.prefill(tokens[part.start : part.stop], caches)
    if hidden is None:
        raise ValueError("run_prefill: no tokens")
    hidden = hidden.clone()
    first_token = int(target.logits(hidden.unsqueeze(0))[0].argmax())
    return PrefillResult(hidden, first_token, time.perf_counter() - began)
