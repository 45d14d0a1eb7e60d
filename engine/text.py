"""Text of a token stream while it grows, for `harness try`.

A byte-level token may end inside a character; such a tail is held back until it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class TextStream:
    """Turns tokens into text pieces whose concatenation equals decoding all tokens at once.

    `decode` is the tokenizer's function from ids to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(REPLACEMENT) or not text.startswith(self._shown):
            return ""
        piece = text[len(self._shown) :]
        self._shown = text
        return piece

    def finish(self) -> str:
        """What was held back, as the tokenizer renders it."""
        text = self._decode(self._tokens)
        piece = text[len(self._shown) :] if text.startswith(self._shown) else ""
        self._shown = text
        return piece
