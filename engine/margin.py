"""How far classic decode was from choosing another token: tells a near tie from a fault.

Rounding can turn a near tie. It cannot turn a token that leads by several logits; there something else is wrong:
a key, a position, a rollback.
"""

from __future__ import annotations

from typing import Any

from engine.prefill import run_prefill
from engine.protocols import TargetLike
from engine.requests import GenerationRequest

TIE_MARGIN = 0.25
"""Logits within which rounding may decide: two bf16 steps at the largest soft-capped logit, 16 to 32."""


def margin_at(
    target: TargetLike, request: GenerationRequest, tokens: tuple[int, ...], index: int, prefill_chunk: int
) -> float:
    """Classic decode's best logit minus its second best where it chose token `index` of its output `tokens`.

    Runs classic decode once more up to that token. ValueError for an index that is not in the output.
    """
    if not 0 <= index < len(tokens):
        raise ValueError(f"margin_at: index {index} is outside an output of {len(tokens)} tokens")
    caches: Any = target.new_caches()
    prefill = run_prefill(target, request.tokens, request.history_boundary, prefill_chunk, caches)
    logits = target.logits(prefill.hidden.unsqueeze(0))[0]
    for token in tokens[:index]:
        logits = target.step([token], caches, "classic").logits[0]
    best, second = logits.float().topk(2).values.tolist()
    return float(best - second)
