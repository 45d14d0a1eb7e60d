"""Draft tokens that are still on the device: a verify step takes them there, and the host looks once, afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload


class Drafts(Sequence[int]):
    """`count` draft tokens after `carried`, which stands at `position`.

    The first look at a token waits for the device; so does `seconds`, the device's time for the chain.
    """

    def __init__(
        self, carried: int, position: int, count: int, read: Callable[[], list[int]], elapsed: Callable[[], float]
    ) -> None:
        self.carried, self.position, self._count = carried, position, count
        self._read, self._elapsed = read, elapsed
        self._tokens: list[int] | None = None
        self._seconds = 0.0

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.tokens[index]

    @property
    def tokens(self) -> list[int]:
        """The tokens, on the host."""
        self.settle()
        assert self._tokens is not None
        return self._tokens

    @property
    def seconds(self) -> float:
        """Seconds that the device took for the chain."""
        self.settle()
        return self._seconds

    def settle(self) -> None:
        """Fetch what nobody has looked at: another chain or step is about to take the words where it stands."""
        if self._tokens is None:
            self.found(self._read())

    def found(self, tokens: list[int]) -> None:
        """Take the tokens from a verify step that brought them to the host beside its own; the first ones count."""
        if self._tokens is None:
            self._tokens, self._seconds = tokens, self._elapsed()


class DraftedBlock(Sequence[int]):
    """The rows of a verify step: the carried token and its drafts, wherever those are."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts

    def __len__(self) -> int:
        return 1 + len(self.drafts)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return [self.drafts.carried, *self.drafts.tokens][index]
