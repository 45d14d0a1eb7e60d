"""The gate: MTP engages only when the probe passed here and now, and says why when it does not.

Fail-closed: an exception, a probe that did not run, a missing long draw and a failed comparison
all decline, and classic decode goes on. `MLXCEL_MTP_ALLOW_INEXACT=1` overrides a measured
difference only, loudly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from engine.config import mtp_requires_linear_singleton
from engine.probe import LONG_DRAW_EXTRA, SHORT_DRAWS, ExactnessProbe, ProbeResult
from engine.speculative import MAX_BLOCK_SIZE

if TYPE_CHECKING:
    from engine.flags import Flags
    from engine.protocols import PairLike

logger = logging.getLogger("engine")

Gate = Literal["measured", "hazard"]
"""Who decides: the probe's bytes, or before it the static predicate of the reference system."""

HAZARD_HEAD_DIMS = (256, 288)
"""Head dims that its fused attention kernels took on CUDA."""


@dataclass(frozen=True)
class Decision:
    """Whether MTP runs, why, and whether its text may differ from classic decode's."""

    engaged: bool
    reason: str
    inexact: bool = False

    @property
    def log_line(self) -> str:
        """The one line that says so in the log."""
        if not self.engaged:
            return f"MTP declined: {self.reason}"
        if self.inexact:
            return (
                "MTP engaged: INEXACT, output may differ from classic decode (MLXCEL_MTP_ALLOW_INEXACT=1): "
                f"{self.reason}"
            )
        return f"MTP engaged: {self.reason}"


def layout_reason(config: Any, cuda: bool, batch: int = 1, tree: bool = False) -> str | None:
    """Why a draft layout cannot be verified row by row on this geometry, or None.

    Geometries for which `mtp_requires_linear_singleton` holds take one sequence and a linear
    draft; the wording names no geometry, so that it fits whichever pair is loaded.
    """
    if not mtp_requires_linear_singleton(config, cuda):
        return None
    if batch != 1:
        return f"row-wise exact verification takes one sequence at a time, not a batch of {batch}"
    if tree:
        return "row-wise exact verification requires a linear draft layout, not a tree"
    return None


def required_long_draw(config: Any, cuda: bool) -> int | None:
    """Prompt length of the draw past the window that this geometry must pass, or None."""
    return config.sliding_window + LONG_DRAW_EXTRA if mtp_requires_linear_singleton(config, cuda) else None


def hazard_reason(config: Any, cuda: bool, flags: Flags) -> str | None:
    """Why the reference system did not even probe such a pair for two weeks, in its own words, or None.

    Its predicate suspected the fused attention kernel at head_dim 256 and 288 on CUDA. The cause was RoPE, as the
    measured gate's localization would have said; the predicate stays selectable so that a record can show both.
    """
    if not cuda or config.head_dim not in HAZARD_HEAD_DIMS or not flags.sdpa_large_d:
        return None
    return (
        "exactness probe did not run: on CUDA this head_dim reaches the fused sdpa_vector kernels, where a verify "
        "block's per-position attention is not bit-equal to the single-token decode it stands for (issue #1935); "
        "MLXCEL_SDPA_VECTOR_LARGE_D=0 restores it"
    )


def width_reason(block_size: int) -> str | None:
    """Why this block size cannot run rounds, or None."""
    if block_size < 2:
        return f"block size {block_size} drafts nothing"
    if block_size > MAX_BLOCK_SIZE:
        return f"block size {block_size} is above the {MAX_BLOCK_SIZE} rows that verify keeps exact"
    return None


def decide(
    config: Any, result: ProbeResult | None, flags: Flags, block_size: int, cuda: bool, reason: str | None = None
) -> Decision:
    """The decision for a probe result; `reason` declines whatever the result says.

    Without a result, or with one that lacks the long draw this geometry needs, MTP is declined.
    """
    refusal = reason or width_reason(block_size)
    if refusal:
        return Decision(False, refusal)
    if result is None:
        return Decision(False, "exactness probe did not run")
    if result.not_run is not None or not result.outcomes:
        return Decision(False, result.reason)
    if any(outcome.block_size != block_size for outcome in result.outcomes):
        return Decision(False, f"exactness probe ran at another block size than {block_size}")
    long_draw = required_long_draw(config, cuda)
    if long_draw is not None and all(outcome.prompt_length < long_draw for outcome in result.outcomes):
        return Decision(False, f"exactness probe lacks the draw of {long_draw} tokens that this geometry requires")
    if result.passed:
        return Decision(True, f"{result.reason}; block size {block_size}")
    if flags.allow_inexact:
        return Decision(True, f"{result.reason}; block size {block_size}", inexact=True)
    return Decision(False, f"{result.reason}; block size {block_size}")


@dataclass
class DecisionMemo:
    """Remembers decisions of one loaded pair, so that each block size is probed once.

    Exactness holds at one width and not at another on the same machine, so the width is part of
    the key; so are the draws and the walk, the kernels' policy and the device. Keep one memo a pair.
    """

    known: dict[tuple[Any, ...], tuple[Decision, ProbeResult | None]] = field(default_factory=dict)


def prepare_mtp(
    pair: PairLike,
    block_size: int,
    draws: Sequence[int] = SHORT_DRAWS,
    long: int | None = None,
    walk: bool = True,
    memo: DecisionMemo | None = None,
    gate: Gate = "measured",
) -> tuple[Decision, ProbeResult | None]:
    """Probe a pair at one block size and decide; logs the decision and never raises for a failed probe.

    The long draw is added where the geometry requires it. The result is None when no probe ran; with gate `hazard`
    none runs where the static predicate holds.
    """
    target = pair.target
    policy = target.policy
    cuda = str(target.device).startswith("cuda")
    key = (block_size, tuple(draws), long, walk, gate, policy, str(target.device), str(target.dtype), target)
    if memo is not None and key in memo.known:
        return memo.known[key]
    refusal = width_reason(block_size)
    if pair.drafter is None:
        refusal = "this pair has no drafter"
    if refusal is None and gate == "hazard":
        refusal = hazard_reason(target.config, cuda, policy.flags)
    result: ProbeResult | None = None
    if refusal is None:
        required = required_long_draw(target.config, cuda)
        if required is not None and long is None and all(length < required for length in draws):
            long = required
        try:
            result = ExactnessProbe(target, block_size, policy.flags.prefill_chunk).run(draws, long, walk)
        except Exception as error:  # fail closed: whatever goes wrong in the probe, classic decode must go on
            logger.debug("exactness probe raised", exc_info=True)
            text = " ".join(str(error).split()) or type(error).__name__
            refusal = f"exactness probe did not run: {text}"
    decision = decide(target.config, result, policy.flags, block_size, cuda, refusal)
    logger.log(logging.INFO if decision.engaged and not decision.inexact else logging.WARNING, decision.log_line)
    if memo is not None:
        memo.known[key] = (decision, result)
    return decision, result
