"""Draws charts as PNG files with matplotlib, for slides: the page's colours on white, 16:9."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

from review.logs.findings import ReviewError
from review.report.chart import Axis, BarChart, Chart, LineChart, Mark

# The light colours of templates/report.css.
RUNS = (
    "#0b63c4",
    "#c2410c",
    "#15803d",
    "#7c3aed",
    "#be185d",
    "#0e7490",
    "#956200",
    "#475569",
    "#b91c1c",
    "#4d7c0f",
)
PARTS = {"training": "#2f76c4", "evaluation": "#d9730d", "initialisation": "#8a94a0"}
_TEXT, _MUTED, _LINE, _BAD = "#15191e", "#525b66", "#d8dde3", "#a9211a"
_MARKS = {"target": (_BAD, "--"), "minimum": (_BAD, "-"), "reference": (_MUTED, "--"), "own": (_TEXT, "-")}
_BAND = "#0f766e26"
_INCHES, _DPI = (9.6, 5.4), 200


def draw(chart: Chart, subject: str) -> bytes:
    """A PNG of 1920 x 1080 pixels. ``subject`` is what the result is called. Raises ReviewError without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise ReviewError("PNG files need matplotlib: pip install matplotlib") from None
    # parse_math off: a $ in the name of a file or a system is a $, not a formula.
    with rc_context({"text.parse_math": False, "font.size": 10, "font.family": "sans-serif"}):
        figure = Figure(figsize=_INCHES, dpi=_DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        axes = figure.subplots()
        above = 13 * len(chart.marks) if isinstance(chart, BarChart) else 0
        title = f"{chart.title}  ·  {subject[:60]}"
        axes.set_title(title, loc="left", color=_TEXT, fontsize=12, fontweight="bold", pad=12 + above)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_MUTED)
        axes.tick_params(colors=_MUTED, length=0)
        _scale(axes.set_xlim, axes.set_xticks, chart.x, 8)
        axes.set_xlabel(chart.x.label, color=_MUTED, loc="right")
        if isinstance(chart, LineChart):
            _draw_lines(axes, chart)
        else:
            _draw_bars(axes, chart)
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a name in a script that the font lacks is shown as boxes
            figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _scale(set_limits: Callable[..., Any], set_ticks: Callable[..., Any], axis: Axis, count: int) -> None:
    ticks = axis.ticks(count)
    set_ticks(ticks, [axis.text(value) for value in ticks])
    set_limits(axis.low, axis.high)


def _draw_lines(axes: Any, chart: LineChart) -> None:
    _scale(axes.set_ylim, axes.set_yticks, chart.y, 6)
    axes.set_ylabel(chart.y.label, color=_MUTED)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for line in chart.lines:
        axes.plot(
            [point.x for point in line.points],
            [point.y for point in line.points],
            color=RUNS[line.run % len(RUNS)],
            linestyle="-" if line.counted else "--",
            linewidth=1.4,
            marker="o",
            markersize=3,
            label=f" {line.name}",  # a label that starts with an underscore would be left out
        )
    for mark in chart.marks:
        colour, style = _MARKS[mark.role]
        axes.axhline(mark.value, color=colour, linestyle=style, linewidth=1.2)
        place = (chart.x.low + 0.01 * (chart.x.high - chart.x.low), mark.value)
        axes.annotate(mark.label, place, (0, 4), textcoords="offset points", color=colour, fontweight="bold")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=_TEXT, fontsize=9)


def _draw_bars(axes: Any, chart: BarChart) -> None:
    rows = range(len(chart.bars))
    axes.set_ylim(len(chart.bars) - 0.5, -0.5)
    axes.set_yticks(list(rows), [bar.name for bar in chart.bars])
    axes.grid(axis="x", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    if chart.band:
        axes.axvspan(*chart.band, color=_BAND, linewidth=0)
    for row, bar in zip(rows, chart.bars, strict=True):
        for segment in bar.segments:
            width, alpha = segment.stop - segment.start, 1.0 if bar.counted else 0.55
            axes.barh(row, width, 0.55, segment.start, color=PARTS[segment.part], alpha=alpha, linewidth=0)
        if bar.dot is not None and bar.run is not None:
            colour = RUNS[bar.run % len(RUNS)]
            axes.plot(bar.dot, row, "o", markersize=7, color=colour, markerfacecolor=colour if bar.counted else "white")
        axes.annotate(
            bar.note, (1.01, row), xycoords=("axes fraction", "data"), va="center", color=_TEXT, annotation_clip=False
        )
    for index, mark in enumerate(sorted(chart.marks, key=lambda mark: -mark.value)):
        _vertical(axes, mark, index, chart.x)
    if chart.parts:
        from matplotlib.patches import Patch

        handles = [Patch(color=PARTS[part], label=part) for part in chart.parts]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=3, frameon=False, fontsize=9)


def _vertical(axes: Any, mark: Mark, index: int, axis: Axis) -> None:
    """A line with its label above the plot, each label in a row of its own, since close ones would overlap."""
    colour, style = _MARKS[mark.role]
    axes.axvline(mark.value, color=colour, linestyle=style, linewidth=1.2)
    flipped = mark.value > axis.low + 0.7 * (axis.high - axis.low)  # no room to the right of it
    axes.annotate(
        mark.label,
        (mark.value, 1.0),
        (-4 if flipped else 4, 4 + 13 * index),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if flipped else "left",
        color=colour,
        fontweight="bold",
    )
