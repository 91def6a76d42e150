"""Draws charts as SVG whose looks are those of chart.css: inline in the page, and as a picture of its own.

On the page the colours are CSS variables, so that they follow light and dark, and every chart is drawn in three widths
with text of the same size; CSS shows the one that fits the screen. A picture has a title and a legend drawn in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from review.report.chart import Axis, Bar, BarChart, Chart, Entry, LineChart, Mark, legend

COLOURS = 10  # --run-0 to --run-9 in report.css
_CHARACTER = 7.2  # width to leave for a character of the 12 px text; that of the widest of the fonts
_MARK_ROW, _LEAST_ROW, _MOST_ROW = 17, 14, 44
PICTURE = (960, 540)
_MARGIN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A drawing's width, a LineChart's height, a BarChart's height of a row, in CSS pixels; ``ticks`` on the x axis."""

    name: str
    width: int
    height: int
    ticks: int
    row: int = 26


SIZES = (
    Size(name="wide", width=1100, height=380, ticks=8),
    Size(name="medium", width=680, height=340, ticks=6),
    Size(name="narrow", width=360, height=300, ticks=4),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """The plot's area within the drawing and the scales that map data into it."""

    left: float
    right: float
    top: float
    bottom: float
    x_axis: Axis
    y_axis: Axis | None = None

    def x(self, value: float) -> float:
        return self.left + self.x_axis.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        assert self.y_axis is not None
        return self.bottom - self.y_axis.share(value) * (self.bottom - self.top)


def draw(chart: Chart, identifier: str) -> str:
    """Every size of a chart. ``identifier`` is unique on the page."""
    return "\n".join(_draw_one(chart, size, f"{identifier}-{size.name}") for size in SIZES)


def _draw_one(chart: Chart, size: Size, identifier: str) -> str:
    height, body = _draw_body(chart, size, identifier)
    box = f'viewBox="0 0 {size.width} {height:.0f}"'
    head = f'<svg class="{size.name}" role="img" {box} aria-label="{escape(chart.alt)}">'
    return "\n".join([head, *body, "</svg>"])


def _draw_body(chart: Chart, size: Size, identifier: str) -> tuple[float, list[str]]:
    """Height and elements of a chart."""
    return _line_chart(chart, size, identifier) if isinstance(chart, LineChart) else _bar_chart(chart, size)


def draw_picture(chart: Chart, subject: str) -> str:
    """An SVG file of 960 x 540 with the title, the name of what is shown and the legend."""
    entries = legend(chart)
    beside = isinstance(chart, LineChart)  # a row a run; the rows of bars are named already
    column = min(max((_width(entry.label) for entry in entries), default=0) + 36, 280) if beside else 0
    below = 0 if beside or not entries else 24
    width, room = PICTURE[0] - 2 * _MARGIN - column, PICTURE[1] - 3 * _MARGIN - below - 16
    rows = 1 if isinstance(chart, LineChart) else len(chart.bars)
    row = min(max(int((room - 60 - _MARK_ROW * len(chart.marks)) / rows), _LEAST_ROW), _MOST_ROW)
    size = Size(name="picture", width=int(width), height=int(room), ticks=8, row=row)
    height, body = _draw_body(chart, size, "picture")
    scale = min(1.0, room / height)  # a result of very many runs
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{PICTURE[0]}" height="{PICTURE[1]}">'
    parts = [head, _text(_MARGIN, _MARGIN + 8, f"{chart.title}  ·  {subject[:60]}", style="title")]
    parts.append(f'<g transform="translate({_MARGIN} {2 * _MARGIN + 8}) scale({scale:.4f})">')
    parts += [*body, "</g>"]
    x: float
    y: float
    x, y = (PICTURE[0] - _MARGIN - column + 16, 2 * _MARGIN + 30) if beside else (_MARGIN, PICTURE[1] - _MARGIN)
    step = min(18.0, room / max(len(entries), 1))
    for entry in entries:
        parts.append(_legend_entry(entry, x, y))
        x, y = (x, y + step) if beside else (x + _width(entry.label) + 30, y)
    return "\n".join([*parts, "</svg>"])


def _legend_entry(entry: Entry, x: float, y: float) -> str:
    if entry.run is not None:
        mark = f'<polyline points="{x:.1f},{y - 4:.1f} {x + 20:.1f},{y - 4:.1f}"/>'
        mark = f'<g class="series run-{entry.run % COLOURS}{"" if entry.counted else " dropped"}">{mark}</g>'
    else:
        mark = f'<rect class="{entry.swatch}" x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12"/>'
        mark = mark if entry.swatch else ""
    return mark + _text(x + (26 if entry.run is not None else 18 if mark else 0), y, entry.label)


def _text(x: float, y: float, content: str, anchor: str = "start", style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    side = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{side}{kind}>{escape(content)}</text>'


def _segment(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def _width(content: str) -> float:
    return _CHARACTER * len(content)


def _x_axis(frame: _Frame, size: Size) -> list[str]:
    parts = [_segment(frame.left, frame.bottom, frame.right, frame.bottom, "axis")]
    for value in frame.x_axis.ticks(size.ticks):
        x, label = frame.x(value), frame.x_axis.text(value)
        parts.append(_segment(x, frame.bottom, x, frame.bottom + 4, "axis"))
        middle = min(max(x, _width(label) / 2), size.width - _width(label) / 2)
        parts.append(_text(middle, frame.bottom + 18, label, "middle", "tick"))
    parts.append(_text(frame.right, frame.bottom + 36, frame.x_axis.label, "end", "label"))
    return parts


def _line_chart(chart: LineChart, size: Size, identifier: str) -> tuple[float, list[str]]:
    ticks = chart.y.ticks(5)
    labels = [chart.y.text(value) for value in ticks]
    frame = _Frame(
        left=max(_width(label) for label in [*labels, "0"]) + 8,
        right=size.width - 8,
        top=26,
        bottom=size.height - 44,
        x_axis=chart.x,
        y_axis=chart.y,
    )
    body = [_text(0, 12, chart.y.label, style="label")]
    for value, label in zip(ticks, labels, strict=True):
        y = frame.y(value)
        body.append(_segment(frame.left, y, frame.right, y, "grid"))
        body.append(_text(frame.left - 7, y + 4, label, "end", "tick"))
    body += _x_axis(frame, size)
    clip = f"{identifier}-clip"
    body.append(
        f'<clipPath id="{clip}"><rect x="{frame.left - 4:.1f}" y="{frame.top - 4:.1f}" '
        f'width="{frame.right - frame.left + 8:.1f}" height="{frame.bottom - frame.top + 4:.1f}"/></clipPath>'
    )
    for mark in chart.marks:
        body.append(_segment(frame.left, frame.y(mark.value), frame.right, frame.y(mark.value), f"mark {mark.role}"))
    body.append(f'<g clip-path="url(#{clip})">')
    body += [
        _curve(line.run, line.counted, [(frame.x(p.x), frame.y(p.y), p.tip) for p in line.points], size)
        for line in chart.lines
    ]
    body.append("</g>")
    body += [
        _text(frame.left + 6, frame.y(mark.value) - 6, mark.label, style=f"note {mark.role}") for mark in chart.marks
    ]
    return size.height, body


def _curve(run: int, counted: bool, points: Sequence[tuple[float, float, str]], size: Size) -> str:
    """A line with a dot at each point; the wide size has tips, since a small screen has no pointer to hover."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    parts = [f'<g class="series run-{run % COLOURS}{"" if counted else " dropped"}" data-run="{run}">']
    parts.append(f'<polyline points="{path}"/>')
    for x, y, tip in points:
        title = f"><title>{escape(tip)}</title></circle>" if size.name == "wide" else "/>"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2"{title}')
    parts.append("</g>")
    return "".join(parts)


def _bar_chart(chart: BarChart, size: Size) -> tuple[float, list[str]]:
    names = max(_width(bar.name) for bar in chart.bars) + 8
    notes = max(_width(bar.note) for bar in chart.bars) + 10
    stacked = size.name == "narrow"  # names above their rows, where there is no room beside them
    row = size.row + (14 if stacked else 0)
    top = 8 + _MARK_ROW * len(chart.marks)
    frame = _Frame(
        left=4 if stacked else names,
        right=size.width - (8 if stacked else notes),
        top=top,
        bottom=top + row * len(chart.bars) + 6,
        x_axis=chart.x,
    )
    body = []
    if chart.band:
        low, high = (min(max(frame.x(value), frame.left), frame.right) for value in chart.band)
        body.append(
            f'<rect class="band" x="{low:.1f}" y="{frame.top:.1f}" width="{high - low:.1f}" '
            f'height="{frame.bottom - frame.top:.1f}"/>'
        )
    body += [
        _segment(frame.x(value), frame.top, frame.x(value), frame.bottom, "grid") for value in chart.x.ticks(size.ticks)
    ]
    body += _x_axis(frame, size)
    for index, bar in enumerate(chart.bars):
        body.append(_bar(bar, frame, frame.top + row * index + (14 if stacked else 0) + size.row / 2))
    body += _vertical_marks(chart.marks, frame, size)
    for index, bar in enumerate(chart.bars):
        body.append(_bar_text(bar, frame, frame.top + row * index + (0 if stacked else size.row / 2), stacked))
    return frame.bottom + 44, body


def _group(bar: Bar) -> str:
    colour = "" if bar.run is None else f" run-{bar.run % COLOURS}"
    data = "" if bar.run is None else f' data-run="{bar.run}"'
    return f'<g class="bar{colour}{"" if bar.counted else " dropped"}"{data}><title>{escape(bar.tip)}</title>'


def _bar(bar: Bar, frame: _Frame, middle: float) -> str:
    parts = [_group(bar)]
    for segment in bar.segments:
        left, right = frame.x(segment.start), frame.x(segment.stop)
        parts.append(
            f'<rect class="part {segment.part}" x="{left:.1f}" y="{middle - 7:.1f}" '
            f'width="{max(right - left, 0.8):.1f}" height="14"/>'
        )
    if bar.dot is not None:
        parts.append(_segment(frame.left, middle, frame.right, middle, "grid"))
        parts.append(f'<circle class="dot" cx="{frame.x(bar.dot):.1f}" cy="{middle:.1f}" r="5"/>')
    return "".join([*parts, "</g>"])


def _bar_text(bar: Bar, frame: _Frame, y: float, stacked: bool) -> str:
    """Name and note of a row, over everything else: beside its middle y, or ``stacked`` below y, its upper edge."""
    if stacked:
        name = _text(frame.left, y + 12, bar.name, style="tick")
        note = _text(frame.right, y + 12, bar.note, "end", "note")
    else:
        name = _text(frame.left - 8, y + 4, bar.name, "end", "tick")
        note = _text(frame.right + 8, y + 4, bar.note, style="note")
    return "".join([_group(bar), name, note, "</g>"])


def _vertical_marks(marks: Sequence[Mark], frame: _Frame, size: Size) -> list[str]:
    """Lines with their labels above the plot, one label a row, so that close ones stay readable."""
    body = []
    # From left to right and top to bottom, so that no label is crossed by the line of another mark.
    for index, mark in enumerate(sorted(marks, key=lambda mark: mark.value)):
        x, y = frame.x(mark.value), 12 + _MARK_ROW * index
        body.append(_segment(x, y - 9, x, frame.bottom, f"mark {mark.role}"))
        fits_right = x + 6 + _width(mark.label) <= size.width
        body.append(
            _text(x + (6 if fits_right else -6), y, mark.label, "start" if fits_right else "end", f"note {mark.role}")
        )
    return body
