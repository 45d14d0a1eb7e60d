"""What a generation reports: tokens, why it ended, times, and how drafting went.

Values only; nothing here measures. Rates say what they count (`decode_tok_s` excludes the
prefill and the first token, which comes from it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one generation: `ttft_s` up to the first token, `decode_s` after it."""

    ttft_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """Prefill and decode together, seconds."""
        return self.ttft_s + self.decode_s


@dataclass(frozen=True)
class RoundStats:
    """Counts and times of the rounds of one generation.

    `accepted_per_round` counts the drafts that equal the target's argmax, whether or not a stop
    token or the budget cut the round's output; `num_emitted` counts what was left after the cut.
    """

    block_size: int
    accepted_per_round: tuple[int, ...]
    num_emitted: int
    draft_s: float
    verify_s: float

    @property
    def num_rounds(self) -> int:
        """Verify forwards."""
        return len(self.accepted_per_round)

    @property
    def drafted_per_round(self) -> tuple[int, ...]:
        """Tokens the drafter proposed, round by round: always a whole block's."""
        return (self.block_size - 1,) * self.num_rounds

    @property
    def num_drafted(self) -> int:
        """Tokens the drafter proposed."""
        return sum(self.drafted_per_round)

    @property
    def num_accepted(self) -> int:
        """Drafts that equal the target's argmax."""
        return sum(self.accepted_per_round)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted; 0 when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify, the bonus token included: 1 + accepted / rounds; 0 without a round."""
        return 1.0 + self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def accepted_at(self) -> tuple[float, ...]:
        """Share of rounds in which draft i was accepted, one value per draft position."""
        if not self.num_rounds:
            return ()
        return tuple(
            sum(accepted > position for accepted in self.accepted_per_round) / self.num_rounds
            for position in range(self.block_size - 1)
        )

    @property
    def verify_ms(self) -> float:
        """Milliseconds per verify forward, its accept and rollback included."""
        return 1e3 * self.verify_s / self.num_rounds if self.num_rounds else 0.0

    @property
    def draft_step_ms(self) -> float:
        """Milliseconds per draft step."""
        return 1e3 * self.draft_s / self.num_drafted if self.num_drafted else 0.0


@dataclass(frozen=True)
class Generation:
    """The outcome of one request; `rounds` is None for classic decode."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    timing: Timing
    text: str | None = None
    rounds: RoundStats | None = None

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first one; 0 when there is none."""
        later = len(self.tokens) - 1
        return later / self.timing.decode_s if later > 0 and self.timing.decode_s > 0 else 0.0

    @property
    def classic_step_ms(self) -> float:
        """Milliseconds per token after the first one: of a classic generation, per classic step."""
        later = len(self.tokens) - 1
        return 1e3 * self.timing.decode_s / later if later > 0 else 0.0

    @property
    def distinct_tokens(self) -> int:
        """Different token ids in the output; few of them mean a looping text."""
        return distinct_tokens(self.tokens)


def distinct_tokens(tokens: Sequence[int]) -> int:
    """Number of different token ids."""
    return len(set(tokens))
