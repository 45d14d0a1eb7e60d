"""How every plot looks, and its text: byte-stable SVG with a digest of what was drawn. matplotlib is imported late."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, DOT, BAND, GRID = "#57606a", "#0969da", "#b1bac4", "#d0d7de"  # readable on GitHub's light and dark pages
OTHERS = ("#bc4c00", "#8250df", "#1a7f37", "#bf3989", "#9a6700")
STYLE: Any = {"svg.hashsalt": "harness", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}


def new_figure(height: float) -> tuple[Any, Axes]:
    """A figure with one pair of axes, transparent, 7.2 inches wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.add_subplot()
    figure.patch.set_alpha(0.0)
    axes.patch.set_alpha(0.0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(INK)
    axes.tick_params(colors=INK, length=3)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def svg_text(figure: Any, figures_digest: str) -> str:
    """The figure as SVG; the digest says which figures were drawn."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Description": f"figures sha256 {figures_digest}"})
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"
