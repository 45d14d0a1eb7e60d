"""One generation request, and what is refused before any model work.

The checks are the same for classic decode and for rounds, so that a bad request reads alike
in both. Decoding is greedy and takes one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import RequestError
from engine.protocols import ConfigLike


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: prompt ids, budget, and when to stop.

    `history_boundary` is the length of a chat prompt without its generation part; both modes
    prefill up to it in one piece.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    ignore_stop: bool = False
    history_boundary: int | None = None
    temperature: float = 0.0
    batch: int = 1

    def stops_at(self, token: int) -> bool:
        """Whether the output ends with this token."""
        return not self.ignore_stop and token in self.stop_ids

    def cut(self, emitted: Sequence[int], already: int) -> tuple[tuple[int, ...], bool]:
        """The part of new tokens that classic decode would emit after `already` tokens.

        Returns that part, a stop token included, and whether it ends with a stop token. A stop
        token beyond the budget does not count.
        """
        kept = tuple(emitted[: max(self.max_tokens - already, 0)])
        for index, token in enumerate(kept):
            if self.stops_at(token):
                return kept[: index + 1], True
        return kept, False


def validate_request(request: GenerationRequest, config: ConfigLike) -> None:
    """Raise RequestError for a request that cannot be served exactly."""
    if request.temperature != 0:
        raise RequestError(
            f"temperature {request.temperature:g}: decoding is greedy only, because the byte-identity contract "
            "holds at temperature 0; use 0"
        )
    if request.batch != 1:
        raise RequestError(f"batch {request.batch}: one sequence at a time; send the prompts one after another")
    if not request.tokens:
        raise RequestError("prompt: no tokens; give a prompt with at least one token")
    if request.max_tokens < 0:
        raise RequestError(f"max_tokens {request.max_tokens}: must be 0 or more")
    for index, token in enumerate(request.tokens):
        if not 0 <= token < config.vocab_size:
            raise RequestError(
                f"prompt: token {token} at index {index} is outside the vocabulary of {config.vocab_size}; "
                "tokenize with the target's own tokenizer"
            )
    boundary = request.history_boundary
    if boundary is not None and not 0 <= boundary <= len(request.tokens):
        raise RequestError(
            f"history boundary {boundary}: outside the prompt of {len(request.tokens)} tokens; "
            "it is the prompt's length without its generation part"
        )
    limit = getattr(config, "max_position_embeddings", None)
    needed = len(request.tokens) + max(request.max_tokens - 1, 0)
    if limit is not None and needed > limit:
        raise RequestError(
            f"context: {len(request.tokens)} prompt tokens and max_tokens {request.max_tokens} need {needed} "
            f"positions, the model has {limit} (max_position_embeddings); shorten the prompt or lower max_tokens"
        )
