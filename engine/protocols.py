"""What the round loop and the probe need from a target, its caches and a drafter.

Structural types only: the targets and drafters of every family in `engine.pair.FAMILIES` fit them, and so
do the small deterministic fakes that the tests drive the loop with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.capture import Capture

StepMode = Literal["classic", "verify"]


class ConfigLike(Protocol):
    """The part of a target's config that the loop reads."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def sliding_window(self) -> int | None:
        """Keys that a sliding layer sees, the query's own included; None in a family without such layers."""


class CachesLike(Protocol):
    """K/V rows, or states, of all layers; `length` counts rows by absolute position."""

    @property
    def length(self) -> int:
        """Rows held, from position 0."""

    def rollback(self, n: int, /) -> None:
        """Drop the newest n rows of every layer."""

    def clone(self) -> CachesLike:
        """An independent copy."""

    def snapshot_bytes(self) -> Sequence[Any]:
        """The logical bytes, one item a layer, in a form that `==` can compare."""


class StepOutputLike(Protocol):
    """What one forward of M rows gives back."""

    @property
    def logits(self) -> Tensor:
        """Logits, after the soft cap where there is one, [M, V]."""

    @property
    def hidden(self) -> Tensor:
        """Last layer's output after the final norm, [M, H]."""

    @property
    def argmax(self) -> Sequence[int]:
        """The greedy token of each row, M of them; ties go to the lowest id."""


class TargetLike(Protocol):
    """The model whose output is the law."""

    @property
    def config(self) -> ConfigLike:
        """Its geometry."""

    def new_caches(self) -> Any:
        """Empty caches."""

    def prefill(self, tokens: Sequence[int], caches: Any, /) -> Tensor:
        """Append one range of the prompt; the last row's hidden state [H], final norm applied."""

    def logits(self, hidden: Tensor, /) -> Tensor:
        """The head over rows [r, H] -> [r, V]."""

    def step(
        self, tokens: Sequence[int], caches: Any, mode: StepMode, capture: Capture | None = None
    ) -> StepOutputLike:
        """Append M rows and give their logits; `classic` takes one row, `verify` up to eight."""

    def shared_kv(self, caches: Any, /) -> Any:
        """What the drafter reads after the rollback: the last layers' committed K/V, or tapped hidden states."""


class DrafterLike(Protocol):
    """Proposes tokens from the target's hidden state and what `shared_kv` hands it."""

    def draft(self, token: int, hidden: Tensor, shared: Any, count: int) -> Sequence[int]:
        """`count` proposals that follow `token`."""


class PairLike(Protocol):
    """A target with its drafter, as `engine.pair.load_pair` returns it."""

    @property
    def target(self) -> Any:
        """The target."""

    @property
    def drafter(self) -> Any:
        """The drafter, or None."""
