"""Does the drafter read the right K/V? An assertion on bytes, since the text cannot show it.

A drafter that reads another layer's K/V, a rescaled copy or rejected rows still gives exact text,
only slower. The check compares what it is handed with what the target's layers produced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.capture import Capture
from engine.compare import differing_bytes

if TYPE_CHECKING:
    from engine.target import Target


def shared_kv_problem(target: Target, tokens: Sequence[int], block: Sequence[int] = (1, 2, 3, 4)) -> str | None:
    """What is wrong with the K/V handed to a drafter, or None.

    Prefills `tokens`, verifies `block` and rolls all of it back but one row, then compares with the
    captured K (after RoPE) and V (after its norm) of the last layer of each kind, byte by byte.
    """
    shared, made_by = after_rollback(target, tokens, block)
    committed = len(tokens) + 1
    if shared.length != committed:
        return f"shared K/V: length {shared.length}, but {committed} rows are committed"
    for kind, pair, limit in (
        ("sliding", shared.sliding, target.config.sliding_window),
        ("full", shared.full, committed),
    ):
        layer = max(index for index, shape in enumerate(target.config.layers) if shape.kind == kind)
        for name, op, found in (("K", "k_rope", pair[0]), ("V", "v_norm", pair[1])):
            made = made_by(layer, op)[-limit:].transpose(0, 1)
            if found.shape != made.shape:
                return f"shared {kind} {name}: shape {tuple(found.shape)}, layer {layer} made {tuple(made.shape)}"
            differing = differing_bytes(found, made)
            if differing:
                total = made.numel() * made.element_size()
                return f"shared {kind} {name}: {differing} of {total} bytes differ from what layer {layer} made"
    return None


def after_rollback(
    target: Any, tokens: Sequence[int], block: Sequence[int]
) -> tuple[Any, Callable[[int, str], torch.Tensor]]:
    """What a drafter is handed after a prompt and a block of which one row is kept, and what made it.

    The second is (layer, op) -> the captured rows [n + 1, ...] of all committed positions.
    """
    caches: Any = target.new_caches()
    prefilled, verified = Capture(), Capture()
    target.prefill(list(tokens), caches, prefilled)
    target.step(list(block), caches, "verify", capture=verified)
    caches.rollback(len(block) - 1)

    def made_by(layer: int, op: str) -> torch.Tensor:
        before, block_rows = (
            next(entry.rows for entry in capture.entries if (entry.layer, entry.op) == (layer, op))
            for capture in (prefilled, verified)
        )
        return torch.cat((before, block_rows[:1]))

    return target.shared_kv(caches), made_by
