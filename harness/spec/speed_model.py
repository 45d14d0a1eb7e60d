"""Bars of the checks that time whole steps: on steps and speed-up, and against other engines."""

from __future__ import annotations

from typing import Literal

from harness.spec.base import Model, Share

DecodePeer = Literal["mlx_lm", "transformers"]


class StepBars(Model):
    """What single steps and the speed-up must reach, at the pair's block size and at every context."""

    min_floor_share: Share | None = None
    """Lowest share of a classic step that its byte floor is: bytes that it must read over the measured stream rate."""
    max_verify_over_classic: Share | None = None
    """Highest ratio of the time of a verify to that of a classic step."""
    max_draft_over_classic: Share | None = None
    """Highest ratio of the time of a draft step to that of a classic step."""
    min_speedup_per_length: Share | None = None
    """Lowest ratio of the measured speed-up to the tokens per verify."""
    max_prediction_error: Share | None = None
    """Largest gap between the speed-up that steps and acceptance predict and the measured one, as a share."""
    max_runs_over_alone: Share | None = None
    """Highest ratio of a classic step's or a verify's time in the timed runs to that alone at the shortest context."""


class PeerSpeedups(Model):
    """Least ratio of a peer's time per token to ours."""

    mlx_lm: Share | None = None
    """Against mlx-lm on MLX, the same checkpoint."""
    transformers: Share | None = None
    """Against transformers in bf16, eager."""
