"""The plots that pay: deltas over null, acceptance by position, speed-up by block size, bandwidth. Byte-stable SVG.

matplotlib is imported only when a plot is drawn. Text stays text, so figures can be searched in the file, and a digest
of what was drawn is kept inside: a checker with another matplotlib can still tell a stale plot.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from harness.record import kernel_plot
from harness.record.model import CaseRecord, Record
from harness.record.store import slug
from harness.record.svg import BAND, DOT, INK, STYLE, new_figure, svg_text
from harness.record.table import factor, percent_range, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORACLE = "-oracle.svg"
DIGEST = re.compile(r"figures sha256 ([0-9a-f]{64})")
CREATOR = re.compile(r"Matplotlib v([0-9.]+)")


def plot_names(case: CaseRecord) -> list[tuple[str, str]]:
    """File name and alternative text of each plot of a case; none where there is nothing to draw."""
    names = []
    if any(arm.delta for arm in case.arms):
        names.append((f"{slug(case.name)}-deltas.svg", "Paired deltas of each repeat over the null range"))
    if any(arm.acceptance and arm.acceptance.accepted_at for arm in case.arms):
        names.append((f"{slug(case.name)}-acceptance.svg", "Acceptance by draft position"))
    if any(point.predicted_speedup is not None for figures in case.oracle for point in figures.points):
        names.append((f"{slug(case.name)}{ORACLE}", "Predicted and measured speed-up by block size"))
    return names


def draw_plots(record: Record) -> dict[str, str]:
    """SVG text by file name, for every plot the page refers to."""
    drawn = {}
    for case in record.cases:
        for name, _ in plot_names(case):
            kind = name.removesuffix(".svg").rpartition("-")[2]
            drawn[name] = _drawn(kind, json.dumps(plot_data(case, kind)))
    if (bandwidth := kernel_plot.plot_name(record)) is not None:
        drawn[bandwidth[0]] = _drawn("bandwidth", json.dumps(kernel_plot.plot_data(record)))
    return drawn


def plot_data(case: CaseRecord, kind: str) -> list[dict[str, Any]]:
    """The figures a plot shows: all that it is drawn from."""
    if kind == "deltas":
        return [
            {
                "label": f"{arm.arm}, block size {arm.block_size}",
                "delta": arm.delta,
                "null": (*arm.null, *arm.null_block),
            }
            for arm in case.arms
            if arm.delta
        ]
    if kind == "oracle":
        return [
            {
                "label": f"block size {point.block_size}"
                + f", {figures.context_tokens} tokens" * (len(case.oracle) > 1),
                "predicted": point.predicted_speedup,
                "measured": point.measured_speedup,
                "basis": point.basis,
                "needs": point.break_even_acceptance,
                "has": point.acceptance_rate,
            }
            for figures in case.oracle
            for point in figures.points
            if point.predicted_speedup is not None
        ]
    return [
        {"label": f"{arm.arm}, draft {place}", "share": value}
        for arm in case.arms
        if arm.acceptance
        for place, value in enumerate(arm.acceptance.accepted_at, start=1)
    ]


@lru_cache(maxsize=32)
def _drawn(kind: str, data: str) -> str:
    """One plot from its figures as JSON; drawing is pure, so checking a record just rendered costs nothing."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure = DRAWERS[kind](data)
        return svg_text(figure, hashlib.sha256(data.encode()).hexdigest())


def stale_plots(record: Record, found: dict[str, str | None]) -> list[str]:
    """What is wrong with the plots on disk (`found`: name -> text or None), one line each.

    Bytes are compared under the matplotlib that drew them, the digest of the figures under any other.
    """
    problems = []
    drawn = draw_plots(record)
    for name, fresh in drawn.items():
        text = found.get(name)
        if text is None:
            problems.append(f"{name}: missing")
            continue
        same_version = _first(CREATOR, text) == _first(CREATOR, fresh)
        if _first(DIGEST, text) != _first(DIGEST, fresh):
            problems.append(f"{name}: drawn from other figures than the raw lines give")
        elif same_version and text != fresh:
            problems.append(f"{name}: not what these figures draw")
    return problems + [f"{name}: belongs to no figure of this record" for name in found if name not in drawn]


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match.group(1) if match else None


def _deltas(data: str) -> Any:
    arms: list[dict[str, Any]] = json.loads(data)
    figure, axes = new_figure(1.0 + 0.75 * len(arms))
    for row, arm in enumerate(arms):
        _delta_row(axes, row, arm["delta"], arm["null"])
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(arms)), [arm["label"] for arm in arms], color=INK)
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.set_xlabel("decode rate against the repeat's own classic brackets, % (grey: null range)", color=INK)
    return figure


def _delta_row(axes: Axes, row: int, deltas: list[float], nulls: list[float]) -> None:
    low, high = 100 * min(nulls), 100 * max(nulls)
    axes.fill_betweenx([row - 0.3, row + 0.3], low, high, color=BAND, alpha=0.6, linewidth=0)
    null_place = ((low + high) / 2, row + 0.32)
    axes.annotate(f"null {percent_range(nulls)}", null_place, ha="center", va="top", color=INK, fontsize=8)
    spread = [row + 0.12 * ((place % 3) - 1) for place in range(len(deltas))]
    axes.scatter([100 * delta for delta in deltas], spread, color=DOT, s=28, zorder=3)
    delta_place = (50 * (min(deltas) + max(deltas)), row - 0.3)
    axes.annotate(percent_range(deltas), delta_place, ha="center", va="bottom", color=INK, fontsize=9)


def _acceptance(data: str) -> Any:
    bars: list[dict[str, Any]] = json.loads(data)
    figure, axes = new_figure(0.8 + 0.34 * len(bars))
    axes.barh(range(len(bars)), [bar["share"] for bar in bars], color=DOT, height=0.6)
    style: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "color": INK}
    for row, bar in enumerate(bars):
        axes.annotate(share(bar["share"]), (bar["share"], row), **style)
    axes.set_yticks(range(len(bars)), [bar["label"] for bar in bars], color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08)
    axes.set_xlabel("share of rounds that accepted this draft", color=INK)
    return figure


def _oracle(data: str) -> Any:
    """Bars: predicted speed-up; dots: measured; the line at 1 is classic decode; hollow bars are extrapolated."""
    bars: list[dict[str, Any]] = json.loads(data)
    figure, axes = new_figure(0.9 + 0.34 * len(bars))
    style: dict[str, Any] = {
        "xytext": (4, 0),
        "textcoords": "offset points",
        "va": "center",
        "color": INK,
        "fontsize": 9,
    }
    for row, bar in enumerate(bars):
        carried = bar["basis"] == "extrapolated"
        axes.barh(row, bar["predicted"], color="none" if carried else BAND, edgecolor=BAND, height=0.6)
        if bar["measured"] is not None:
            axes.scatter([bar["measured"]], [row], color=DOT, s=28, zorder=3)
        right = max(bar["predicted"], bar["measured"] or 0.0)
        words = f"{factor(bar['predicted'])}, acceptance {share(bar['has'])}, needs {share(max(bar['needs'], 0.0))}"
        axes.annotate(words, (right, row), **style)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [bar["label"] for bar in bars], color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.75 * max(bar["predicted"] for bar in bars))
    axes.set_xlabel("speed-up predicted from step times (bars; hollow: extrapolated) and measured (dots)", color=INK)
    return figure


DRAWERS: dict[str, Callable[[str], Any]] = {
    "deltas": _deltas,
    "acceptance": _acceptance,
    "oracle": _oracle,
    "bandwidth": kernel_plot.draw,
}
