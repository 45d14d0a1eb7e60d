"""What another engine must offer to stand beside ours: the same checkpoint loaded, text continued, a block compared.

`tools/peers/decode_<name>.py` offers `available(device)` (None, or why not), `version()` and `load(folder, device)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

BLOCK_RUNS = 6
"""Times that the block is run; the first warms up."""

Rows = npt.NDArray[np.uint8]
"""Logits as bytes [rows, bytes of a row]."""


@dataclass(frozen=True)
class BlockRows:
    """The same tokens after the same context: as one block, one at a time, and one at a time once more.

    block_s: seconds of the block's forward, a value for each time that it was run after a first one.
    """

    block: Rows
    chain: Rows
    chain_again: Rows
    block_ids: tuple[int, ...]
    chain_ids: tuple[int, ...]
    block_s: tuple[float, ...]


class Decoder(Protocol):
    """A checkpoint loaded in another engine."""

    note: str
    """What a reader must know of its figures."""

    def generate(self, ids: Sequence[int], count: int) -> Iterator[int]:
        """`count` greedy tokens after a prompt, each given out when the host has it; stop tokens do not end it."""

    def block_rows(self, ids: Sequence[int], block: Sequence[int]) -> BlockRows:
        """Logits of the block's tokens after the prompt, in both ways."""
