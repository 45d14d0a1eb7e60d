"""Bandwidth against the size of what a call reads: our kernel and the peers under the stream's ceiling."""

from __future__ import annotations

import json
import statistics
from typing import Any

from harness.kernel_figures import OURS
from harness.record.model import Record
from harness.record.svg import DOT, INK, OTHERS, new_figure

NAME = "bandwidth.svg"
MARKERS = ("o", "s", "^", "D", "v", "P")


def plot_name(record: Record) -> tuple[str, str] | None:
    """File name and alternative text, or None where there is nothing to draw."""
    if not plot_data(record)["series"]:
        return None
    return NAME, "GB/s of each product at one row against its size, with the read-only stream as ceiling"


def plot_data(record: Record) -> dict[str, Any]:
    """The figures that are drawn: GB/s at M = 1 by megabytes, for ours and each peer, and the ceiling."""
    series: dict[str, list[tuple[float, float]]] = {}
    ceilings = []
    for case in record.cases:
        kernel = case.kernel
        if kernel is None or kernel.op != "qmv":
            continue
        if kernel.stream_gb_per_s is not None:
            ceilings.append(kernel.stream_gb_per_s)
        label = f"{OURS}, {kernel.bits} bits"
        if "1" in kernel.gb_per_s:
            series.setdefault(label, []).append((kernel.nbytes / 1e6, kernel.gb_per_s["1"]))
        for peer in kernel.peers:
            if "1" in peer.gb_per_s:
                place = (kernel.nbytes / 1e6, peer.gb_per_s["1"])
                series.setdefault(f"{peer.peer}, {kernel.bits} bits", []).append(place)
    ordered = sorted(series.items(), key=lambda item: (not item[0].startswith(OURS), item[0]))
    return {
        "series": [{"label": label, "points": sorted(points)} for label, points in ordered],
        "ceiling": statistics.median(ceilings) if ceilings else None,
    }


def draw(data: str) -> Any:
    """The figure from its data as JSON."""
    found = json.loads(data)
    figure, axes = new_figure(4.2)
    peers: list[str] = []
    for place, series in enumerate(found["series"]):
        ours = series["label"].startswith(OURS)
        program = series["label"].partition(",")[0]
        if not ours and program not in peers:
            peers.append(program)
        color = DOT if ours else OTHERS[peers.index(program) % len(OTHERS)]
        xs, ys = zip(*series["points"], strict=True)
        style: dict[str, Any] = {"marker": MARKERS[place % len(MARKERS)], "markersize": 6 if ours else 4}
        hollow = "8 bits" in series["label"]
        axes.plot(
            xs,
            ys,
            color=color,
            linewidth=1.2 if ours else 0.7,
            label=series["label"],
            markerfacecolor="none" if hollow else color,
            linestyle="--" if hollow else "-",
            **style,
        )
    if found["ceiling"] is not None:
        axes.axhline(found["ceiling"], color=INK, linewidth=1.0, linestyle=":")
        axes.annotate(
            f"read-only stream {found['ceiling']:.0f} GB/s",
            (0.01, found["ceiling"]),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            va="top",
            color=INK,
            fontsize=8,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.set_xlabel("size of the matrix as our kernel reads it, MB", color=INK)
    axes.set_ylabel("GB/s at M = 1, own bytes", color=INK)
    # Above the axes: inside there is no corner that neither curves nor the stream's line cross.
    legend = axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    for text in legend.get_texts():
        text.set_color(INK)
    return figure
