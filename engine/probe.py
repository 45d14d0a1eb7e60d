"""The exactness probe: is a verify block byte-identical to classic decode, on this machine, now?

Every case feeds the same tokens twice from the same prefilled caches: one at a time (the chain)
and in blocks. Full logits rows are compared as bytes, then the caches. A draw is one block after
a prompt; a walk is 128 tokens of blocks with full, partial and zero accepts and their rollbacks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.compare import differing_bytes, sha256_of, snapshot_difference
from engine.errors import EngineError
from engine.localize import Block, Divergence, ProbeCase, localize
from engine.prefill import plan_prefill
from engine.protocols import TargetLike

SHORT_DRAWS = (8, 8, 8)
"""Prompt lengths of the draws that every pair gets."""

LONG_DRAW_EXTRA = 32
"""The long draw is this much longer than the window, so that its ring has wrapped."""

WALK_PROMPT = 160
WALK_LENGTH = 128


@dataclass(frozen=True)
class Draw:
    """One probe input: its prompt's length, and its index, which salts the tokens.

    Tokens follow the reference system: (7i + 1 + salt) and (13i + 3 + salt) mod vocabulary, with
    salt = 977 * index + 1.
    """

    prompt_length: int
    index: int

    @property
    def salt(self) -> int:
        """Sets the tokens of one draw apart from the others'."""
        return 977 * self.index + 1

    def prompt(self, vocab_size: int) -> tuple[int, ...]:
        """Prompt token ids."""
        return tuple((7 * i + 1 + self.salt) % vocab_size for i in range(self.prompt_length))

    def following(self, count: int, vocab_size: int) -> tuple[int, ...]:
        """`count` token ids that are fed after the prompt, whatever the model would say."""
        return tuple((13 * i + 3 + self.salt) % vocab_size for i in range(count))


@dataclass(frozen=True)
class DrawResult:
    """One case: how many rows were compared, and the first that differed, if any.

    `differing_bytes` and `total_bytes` are of that row (of the first differing layer's K/V when
    `first_position` is None and the case failed); of a passed case, 0 and all bytes compared.
    """

    name: str
    prompt_length: int
    block_size: int
    positions: int
    passed: bool
    differing_bytes: int
    total_bytes: int
    first_position: int | None
    seconds: float
    cache_layer: int | None = None

    def describe(self) -> str:
        """One line about this case's verdict."""
        if self.passed:
            return f"{self.name}: verify block is byte-identical to the single-token chain over {self.positions} rows"
        if not self.positions:
            return f"{self.name}: no positions compared"
        if self.first_position is None:
            return (
                f"{self.name}: logits are equal but the K/V cache of layer {self.cache_layer} differs from the "
                f"single-token chain's in {self.differing_bytes} of {self.total_bytes} bytes"
            )
        return (
            f"{self.name}: verify block position {self.first_position} differs from the single-token chain in "
            f"{self.differing_bytes} of {self.total_bytes} logit bytes"
        )


@dataclass(frozen=True)
class ProbeResult:
    """All cases of one probe. Passed only when it ran, compared something, and nothing differed.

    `chain_sha256` is over the classic chain's logits of all cases in order, so it is the same for
    every stage of one flag setting.
    """

    outcomes: tuple[DrawResult, ...]
    first_divergence: Divergence | None
    seconds: float
    chain_sha256: str = ""
    not_run: str | None = None
    not_localized: str | None = None

    @property
    def passed(self) -> bool:
        """The only verdict that engages MTP."""
        return (
            self.not_run is None
            and bool(self.outcomes)
            and all(outcome.passed and outcome.positions > 0 for outcome in self.outcomes)
        )

    @property
    def reason(self) -> str:
        """Why it passed or did not, in one line."""
        if self.not_run is not None:
            return f"exactness probe did not run: {self.not_run}"
        if not self.outcomes:
            return "exactness probe did not run: no positions compared"
        failed = next((outcome for outcome in self.outcomes if not outcome.passed), None)
        if failed is None:
            names = ", ".join(outcome.name for outcome in self.outcomes)
            return f"verify block is byte-identical to the single-token chain on {names}"
        where = f"first divergence: {self.first_divergence.describe()}" if self.first_divergence else "not localized"
        if self.not_localized and not self.first_divergence:
            where += f" ({self.not_localized})"
        return f"{failed.describe()}; {where}"


def draw_case(draw: Draw, block_size: int, vocab_size: int) -> ProbeCase:
    """One block of `block_size` rows after the draw's prompt; all rows are kept."""
    committed = draw.following(block_size, vocab_size)
    name = f"draw {draw.index} ({draw.prompt_length} tokens)"
    return ProbeCase(name, draw.prompt(vocab_size), committed, (Block(0, committed, block_size),))


def walk_case(draw: Draw, block_size: int, vocab_size: int, length: int = WALK_LENGTH) -> ProbeCase:
    """Blocks over `length` committed tokens, with full, zero and every partial accept in turn.

    The rows after the accepted ones carry wrong tokens, which the rollback must remove.
    """
    committed = draw.following(length, vocab_size)
    accepts = (block_size - 1, *range(block_size - 1))
    blocks: list[Block] = []
    start = 0
    while start < length:
        kept = min(accepts[len(blocks) % len(accepts)] + 1, length - start)
        right = committed[start : start + kept]
        wrong = tuple(
            ((13 * i + 3 + draw.salt) + 1 + (5 * i) % (vocab_size - 1)) % vocab_size
            for i in range(start + kept, start + block_size)
        )
        blocks.append(Block(start, right + wrong, kept))
        start += kept
    name = f"walk of {length} from {draw.prompt_length} tokens"
    return ProbeCase(name, draw.prompt(vocab_size), committed, tuple(blocks))


class ExactnessProbe:
    """Compares verify blocks of one size with classic decode on one target."""

    def __init__(
        self,
        target: TargetLike,
        block_size: int,
        prefill_chunk: int = 0,
        walk_prompt: int = WALK_PROMPT,
        walk_length: int = WALK_LENGTH,
    ) -> None:
        """`prefill_chunk` as in the run that the probe stands for; the walk's sizes for small tests."""
        self.target = target
        self.block_size = block_size
        self.prefill_chunk = prefill_chunk
        self.walk_prompt = walk_prompt
        self.walk_length = walk_length

    def run(self, draws: Sequence[int] = SHORT_DRAWS, long: int | None = None, walk: bool = True) -> ProbeResult:
        """Run draws of these prompt lengths, a long one too if given, and the walks.

        With `walk`, one walk starts from a short prompt and one from the longest draw past the
        window, if there is one. Later cases run even when one has failed, so that `chain_sha256`
        always covers the same rows.
        """
        began = time.perf_counter()
        vocab_size = self.target.config.vocab_size
        lengths = [*draws, *([long] if long is not None else [])]
        refusal = self._refusal(lengths, vocab_size)
        if refusal:
            return ProbeResult((), None, time.perf_counter() - began, not_run=refusal)
        outcomes: list[DrawResult] = []
        chain_rows: list[str] = []
        failed: ProbeCase | None = None
        prefilled: tuple[tuple[int, ...], Any] | None = None
        for case in self._cases(lengths, vocab_size, walk):
            if prefilled is None or prefilled[0] != case.prompt:
                prefilled = (case.prompt, self._prefill(case.prompt))
            outcome, digest = self._run_case(case, prefilled[1])
            outcomes.append(outcome)
            chain_rows.append(digest)
            if not outcome.passed and failed is None:
                failed = case
        divergence, problem = self._localize(failed) if failed else (None, None)
        return ProbeResult(
            tuple(outcomes),
            divergence,
            time.perf_counter() - began,
            chain_sha256=sha256_of([torch.frombuffer(bytearray("".join(chain_rows).encode()), dtype=torch.uint8)]),
            not_localized=problem,
        )

    def _refusal(self, lengths: Sequence[int], vocab_size: int) -> str | None:
        """Why nothing can be compared, or None."""
        if self.block_size < 2:
            return "block size below 2 drafts nothing"
        if vocab_size < 2:
            return "degenerate vocabulary"
        if not lengths:
            return "no draws asked for"
        if min(lengths) < 1:
            return f"a draw of {min(lengths)} tokens has no prompt"
        return None

    def _cases(self, lengths: Sequence[int], vocab_size: int, walk: bool) -> list[ProbeCase]:
        """The draws in order; the walk of the longest wrapped draw right after it, to share its prefill."""
        window = self.target.config.sliding_window
        wrapped = max((length for length in lengths if window is not None and length > window), default=None)
        cases: list[ProbeCase] = []
        for index, length in enumerate(lengths):
            draw = Draw(length, index)
            cases.append(draw_case(draw, self.block_size, vocab_size))
            if walk and length == wrapped:
                cases.append(walk_case(draw, self.block_size, vocab_size, self.walk_length))
                wrapped = None
        if walk:
            cases.append(walk_case(Draw(self.walk_prompt, len(lengths)), self.block_size, vocab_size, self.walk_length))
        return cases

    def _prefill(self, prompt: tuple[int, ...]) -> Any:
        caches = self.target.new_caches()
        for part in plan_prefill(len(prompt), None, self.prefill_chunk):
            self.target.prefill(prompt[part.start : part.stop], caches)
        return caches

    def _run_case(self, case: ProbeCase, caches: Any) -> tuple[DrawResult, str]:
        """Both arms of a case, the blocks up to the first differing row; also the digest of the whole chain."""
        began = time.perf_counter()
        chain_caches = caches.clone()
        chain = [self.target.step([token], chain_caches, "classic").logits[0].clone() for token in case.committed]
        if not all(bool(torch.isfinite(row).all()) for row in chain):
            raise ValueError(f"{case.name}: the chain's logits are not finite, and equal NaNs would prove nothing")
        block_caches = caches.clone()
        positions = differing = total = 0
        first: int | None = None
        for block in case.blocks:
            output = self.target.step(list(block.tokens), block_caches, "verify")
            if output.logits.shape[0] != len(block.tokens):
                raise ValueError(f"verify gave {output.logits.shape[0]} rows of logits for {len(block.tokens)} tokens")
            at, differing, compared = compare_rows(
                chain[block.start : block.start + block.kept], list(output.logits[: block.kept])
            )
            if at is not None:
                first, positions, total = block.start + at, block.start + at + 1, compared
                break
            positions, total = positions + block.kept, total + compared
            block_caches.rollback(len(block.tokens) - block.kept)
        layer: int | None = None
        if first is None and positions:
            layer, differing, cache_total = compare_caches(chain_caches, block_caches)
            total = cache_total if layer is not None else total + cache_total
        passed = positions > 0 and first is None and layer is None
        result = DrawResult(
            case.name,
            len(case.prompt),
            self.block_size,
            positions,
            passed,
            differing,
            total,
            first,
            time.perf_counter() - began,
            layer,
        )
        return result, sha256_of(chain)

    def _localize(self, case: ProbeCase) -> tuple[Divergence | None, str | None]:
        """The first divergence, or why there is none; the verdict on the bytes stands either way."""
        try:
            found = localize(self.target, case, self._prefill(case.prompt))
        except (EngineError, ValueError, RuntimeError, IndexError) as error:
            return None, str(error)
        return found, None if found else "no capture point differs"


def compare_rows(chain: Sequence[Tensor], rows: Sequence[Tensor]) -> tuple[int | None, int, int]:
    """First differing row, its differing bytes and its bytes; (None, 0, all bytes) when all are equal.

    Raises ValueError for arms of different lengths or shapes: a ragged comparison proves nothing.
    """
    if len(chain) != len(rows):
        raise ValueError(f"arm lengths differ: {len(chain)} chain rows, {len(rows)} block rows")
    compared = 0
    for position, (ours, theirs) in enumerate(zip(chain, rows, strict=True)):
        differing = differing_bytes(ours, theirs)
        row_bytes = ours.numel() * ours.element_size()
        if not row_bytes:
            raise ValueError("arm logits are empty")
        if differing:
            return position, differing, row_bytes
        compared += row_bytes
    return None, 0, compared


def compare_caches(chain_caches: Any, block_caches: Any) -> tuple[int | None, int, int]:
    """First layer whose K/V bytes differ, with its counts; (None, 0, all bytes) when none does."""
    if hasattr(chain_caches, "first_difference"):  # gigabytes on a GPU: only a difference is worth the way to the host
        layer, total = chain_caches.first_difference(block_caches)
        if layer is None:
            return None, 0, total
    compared = 0
    chain, block = chain_caches.snapshot_bytes(), block_caches.snapshot_bytes()
    for layer, (ours, theirs) in enumerate(zip(chain, block, strict=True)):
        differing, total = snapshot_difference(ours, theirs)
        if differing:
            return layer, differing, total
        compared += total
    return None, 0, compared
