"""Bars on what a step costs and on what MTP makes of it. Pure; the throughput check and the record share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.record.speed_model import ArmFigures, StepFigures
from harness.spec.speed_model import StepBars


@dataclass(frozen=True)
class StepBar:
    """One bar and what was measured; `value` None: it was not."""

    what: str
    value: float | None
    limit: float
    highest: bool  # the limit is a maximum

    @property
    def met(self) -> bool | None:
        """Whether it holds; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.limit if self.highest else self.value >= self.limit

    @property
    def words(self) -> str:
        """The bar in one phrase."""
        found = "was not measured" if self.value is None else f"is {self.value:.3g}"
        return f"{self.what} {found}, bar {'at most' if self.highest else 'at least'} {self.limit:g}"


def step_bars(
    bars: StepBars, block_size: int, arms: Sequence[ArmFigures], steps: Sequence[StepFigures]
) -> tuple[StepBar, ...]:
    """Every bar that is set, at every context, for the pair's block size."""
    chosen = [figures for figures in steps if figures.block_size == block_size]
    arm = next((arm for arm in arms if arm.block_size == block_size), None)
    found = [bar for figures in chosen for bar in _of_steps(bars, figures)]
    if not chosen:
        found += [StepBar(what, None, limit, highest) for what, limit, highest in _set(bars)]
    length = arm.acceptance.acceptance_length if arm is not None and arm.acceptance is not None else None
    if bars.min_speedup_per_length is not None:
        value = arm.speedup / length if arm is not None and arm.speedup is not None and length else None
        found.append(StepBar("speed-up over tokens per verify", value, bars.min_speedup_per_length, False))
    if bars.max_prediction_error is not None:
        nearest = _nearest(chosen)
        value = None
        if nearest is not None and nearest.predicted_speedup and nearest.measured_speedup:
            value = abs(nearest.predicted_speedup / nearest.measured_speedup - 1)
        found.append(StepBar("gap of predicted and measured speed-up", value, bars.max_prediction_error, True))
    if bars.max_runs_over_alone is not None:
        found += _runs_over_alone(arm, _nearest(chosen), bars.max_runs_over_alone)
    return tuple(found)


def _of_steps(bars: StepBars, figures: StepFigures) -> Iterator[StepBar]:
    classic, at = figures.classic_step_ms, f" at {figures.context_tokens} tokens"
    values = {
        "byte floor over classic step": figures.floor.floor_share if figures.floor is not None else None,
        "verify over classic step": _over(figures.verify_ms, classic),
        "draft step over classic step": _over(figures.draft_step_ms, classic),
    }
    for what, limit, highest in _set(bars):
        yield StepBar(what + at, values[what], limit, highest)


def _runs_over_alone(arm: ArmFigures | None, alone: StepFigures | None, limit: float) -> Iterator[StepBar]:
    """A slow state of a card or of launches that steps alone do not show lengthens both sides of a speed-up alike."""
    classic = verify = None
    if arm is not None and alone is not None:
        classic = _over(arm.classic_step_ms, alone.classic_step_ms)
        verify = _over(arm.verify_ms, alone.verify_ms)
    for what, value in (("classic", classic), ("verify", verify)):
        yield StepBar(f"{what} step in the timed runs over alone", value, limit, True)


def _set(bars: StepBars) -> Iterator[tuple[str, float, bool]]:
    """The bars on steps that are set: what, limit, whether it is a maximum."""
    for what, limit, highest in (
        ("byte floor over classic step", bars.min_floor_share, False),
        ("verify over classic step", bars.max_verify_over_classic, True),
        ("draft step over classic step", bars.max_draft_over_classic, True),
    ):
        if limit is not None:
            yield what, limit, highest


def _over(cost: float | None, other: float | None) -> float | None:
    return cost / other if cost is not None and other else None


def _nearest(steps: Sequence[StepFigures]) -> StepFigures | None:
    """The figures of the shortest context: the timed runs' texts are hundreds of tokens long."""
    return min(steps, key=lambda figures: figures.context_tokens, default=None)
