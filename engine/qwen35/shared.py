"""Does the drafter get the right hidden states? An assertion on bytes, since the text cannot show it.

A drafter that reads another layer, or rows that were rejected, still gives exact text, only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.compare import differing_bytes
from engine.errors import EngineError
from engine.shared import after_rollback

if TYPE_CHECKING:
    from engine.qwen35.target import Qwen35Target


def tapped_context_problem(
    target: Qwen35Target, tokens: Sequence[int], block: Sequence[int] = (1, 2, 3, 4)
) -> str | None:
    """What is wrong with the hidden states handed to a drafter, or None.

    Prefills `tokens`, verifies `block` and rolls all of it back but one row, then compares the taps that wait for the
    drafter with what the tapped layers gave, byte by byte.
    """
    shared, made_by = after_rollback(target, tokens, block)
    committed = len(tokens) + 1
    if shared.length != committed:
        return f"tapped hidden states: length {shared.length}, but {committed} rows are committed"
    try:
        found = shared.context.take(committed)
    except EngineError as error:
        return str(error)
    made = torch.cat([made_by(layer, "layer output") for layer in target.tapped], -1)
    if found is None or found.shape != made.shape:
        return f"tapped hidden states: shape {None if found is None else tuple(found.shape)}, made {tuple(made.shape)}"
    differing = differing_bytes(found, made)
    if differing:
        total = made.numel() * made.element_size()
        layers = ", ".join(map(str, target.tapped))
        return f"tapped hidden states: {differing} of {total} bytes differ from what layers {layers} gave"
    return None
