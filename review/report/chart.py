"""Charts as SVG without scripts: lines over two axes, or a row of bars or a dot per run.

On a page, colours are CSS variables, to follow light and dark mode, and every chart is drawn in three widths with text
of the same size; CSS shows the one that fits the screen. A stand-alone picture contains its title and light colours.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

COLOURS = 10  # --run-0 to --run-9 in colours.css
PICTURE = (960, 540)  # CSS pixels
_TEMPLATES = Path(__file__).parent / "templates"
_CHARACTER = 7.2  # px, width of a character of 12 px text in the widest font
_ROW, _MARK_ROW = 26, 17  # px, heights of a bar's row and of a mark's label above the bars


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high``, widened if they are equal.

    ``log``: logarithmic, both ends above 0. ``names``: labels of the values 0, 1, ... instead of numbers.
    """

    label: str
    low: float
    high: float
    log: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Equal ends would divide by zero in share().
        least = (
            1.01 * self.low
            if self.log
            else self.low + 1e-9 * max(abs(self.low), abs(self.high), 1e-3)
        )
        # The class is frozen, for its own methods, too.
        object.__setattr__(self, "high", max(self.high, least))

    @classmethod
    def around(
        cls,
        label: str,
        values: Sequence[float],
        room: float,
        least: float = 0.0,
        floor: float = -math.inf,
    ) -> Axis:
        """An axis with margins: ``room`` times the range of the values (at least ``least``); not below ``floor``."""
        room *= max(max(values) - min(values), least)
        return cls(label=label, low=max(min(values) - room, floor), high=max(values) + room)

    def share(self, value: float) -> float:
        """Position of a value: 0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        """At most about ``count`` round values within the axis."""
        if self.log:  # powers of ten, with values in between if there is room
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks: list[float] = []
            # More steps per power of ten only while they fit.
            for steps in ((1,), (1, 3), (1, 2, 5)):
                found = [step * 10.0**power for power in powers for step in steps]
                # With slack for rounding, so that an end that is a tick has its label.
                within = [
                    value for value in found if self.low * 0.999 <= value <= self.high * 1.001
                ]
                ticks = within if len(within) <= count or not ticks else ticks
            return ticks
        if self.names:
            every = math.ceil(len(self.names) / count)
            # Counted from the end, so that the last name, the newest round, always has its label.
            return [
                float(i) for i in range(len(self.names)) if (len(self.names) - 1 - i) % every == 0
            ]
        rough = (self.high - self.low) / count
        power = 10 ** math.floor(math.log10(rough))
        step = next(
            factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999
        )
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def text(self, value: float) -> str:
        """Label of a tick: 1.5M, 500k, 11,800, 0.72, or the name of the value."""
        if self.names:
            return self.names[round(value)]
        if abs(value) < 1e5:
            # Multiples of a step carry rounding errors, which would be printed.
            return f"{round(value, 6):,g}"
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"


class Point(NamedTuple):
    """A point of a line. ``tip``: shown on hover."""

    x: float
    y: float
    tip: str


class Span(NamedTuple):
    """A segment of a bar; a dot if it has no length."""

    start: float
    stop: float
    part: str


class Mark(NamedTuple):
    """A reference line: horizontal across lines, vertical across bars."""

    value: float
    label: str
    role: Literal["target", "reference", "minimum", "own"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A run's curve (``points``) or row of bars (``spans``). ``run``: index from 0, decides the colour.

    ``label``: at the end of a curve; without it the name is in the legend. ``note``: behind a row's bars.
    """

    run: int
    name: str
    label: str = ""
    points: tuple[Point, ...] = ()
    spans: tuple[Span, ...] = ()
    counted: bool = True
    note: str = ""
    tip: str = ""

    @property
    def style(self) -> str:
        """CSS classes for the colour, and for a run left out of the score."""
        return f"run-{self.run % COLOURS}{'' if self.counted else ' dropped'}"


class Entry(NamedTuple):
    """A legend entry of a run (with ``style``) or a shade (with ``swatch``), both CSS classes."""

    label: str
    run: int | None = None
    style: str = ""
    swatch: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves over ``x`` and ``y``, or without ``y`` a row of bars per run.

    ``alt``: description in words. ``parts``: names of bar segments. ``band``: shaded range, low to high.
    """

    key: str
    title: str
    alt: str
    x: Axis
    series: tuple[Series, ...]
    y: Axis | None = None
    parts: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    band: tuple[float, float] | None = None

    def legend(self) -> list[Entry]:
        if self.y:
            return [Entry(one.name, one.run, one.style) for one in self.series if not one.label]
        entries = [Entry(part, swatch=f"part {part}") for part in self.parts]
        if self.band:
            entries.append(
                Entry(
                    "between RCP minimum and RCP mean: accepted, with the time scaled up",
                    swatch="band",
                )
            )
        if not all(one.counted for one in self.series):
            entries.append(
                Entry(
                    f"{'lighter' if self.parts else 'hollow'}: left out of the score", swatch="none"
                )
            )
        return entries


class Size(NamedTuple):
    """Width of a drawing and height of one with lines, CSS pixels; approximate number of ``ticks`` on the x axis."""

    name: str
    width: int
    height: int
    ticks: int


SIZES = (Size("wide", 1100, 380, 8), Size("medium", 680, 340, 6), Size("narrow", 360, 300, 4))


def draw(chart: Chart, identifier: str) -> str:
    """The chart in every size. ``identifier``: unique on the page."""
    drawn = []
    for size in SIZES:
        height, body = _body(chart, size, f"{identifier}-{size.name}")
        box = f"0 0 {size.width} {height:.0f}"
        drawn.append(
            _tag(
                "svg",
                "\n".join(body),
                class_=size.name,
                role="img",
                viewBox=box,
                aria_label=chart.alt,
            )
        )
    return "\n".join(drawn)


def _tag(name: str, content: str | None = None, **attributes: object) -> str:
    """An element. ``content`` is markup; floats get one decimal, empty attributes are omitted."""
    parts = [name]
    for key, value in attributes.items():
        if value != "":
            shown = f"{value:.1f}" if isinstance(value, float) else escape(str(value))
            # class_ is Python's spelling of class, text_anchor that of text-anchor.
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    return f"<{' '.join(parts)}/>" if content is None else f"<{' '.join(parts)}>{content}</{name}>"


def _text(x: float, y: float, content: str, anchor: str = "", style: str = "") -> str:
    return _tag("text", escape(content), x=x, y=y, text_anchor=anchor, class_=style)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return _tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)


def _width(content: str) -> float:
    return _CHARACTER * len(content)


def _body(chart: Chart, size: Size, identifier: str) -> tuple[float, list[str]]:
    """Height and elements of a chart."""
    return _lines(chart, chart.y, size, identifier) if chart.y else _bars(chart, size)


def _x_axis(axis: Axis, left: float, right: float, bottom: float, size: Size) -> Iterator[str]:
    yield _line(left, bottom, right, bottom, "axis")
    for value in axis.ticks(size.ticks):
        x, label = left + axis.share(value) * (right - left), axis.text(value)
        yield _line(x, bottom, x, bottom + 4, "axis")
        # Moved in from the edges, where it would be cut off.
        middle = min(max(x, _width(label) / 2), size.width - _width(label) / 2)
        yield _text(middle, bottom + 18, label, "middle", "tick")
    yield _text(right, bottom + 36, axis.label, "end", "label")


def _lines(chart: Chart, y_axis: Axis, size: Size, identifier: str) -> tuple[float, list[str]]:
    ticks = {value: y_axis.text(value) for value in y_axis.ticks(5)}
    left, right = max(map(_width, ["0", *ticks.values()])) + 8, size.width - 8.0
    top, bottom = 26.0, size.height - 44.0

    def y(value: float) -> float:
        return bottom - y_axis.share(value) * (bottom - top)

    body = [_text(0, 12, y_axis.label, style="label")]
    for value, label in ticks.items():
        body.append(_line(left, y(value), right, y(value), "grid"))
        body.append(_text(left - 7, y(value) + 4, label, "end", "tick"))
    body += _x_axis(chart.x, left, right, bottom, size)
    # Four pixels more on each side, for the dots on the frame.
    frame = _tag("rect", x=left - 4, y=top - 4, width=right - left + 8, height=bottom - top + 8)
    body.append(_tag("clipPath", frame, id=f"{identifier}-clip"))
    body += [
        _line(left, y(mark.value), right, y(mark.value), f"mark {mark.role}")
        for mark in chart.marks
    ]
    curves, ends = [], []
    for one in chart.series:
        places = [
            (left + chart.x.share(point.x) * (right - left), y(point.y)) for point in one.points
        ]
        parts = [_tag("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in places))]
        for (a, b), point in zip(places, one.points, strict=True):
            # Tips in the wide size only: small screens have no pointer.
            tip = _tag("title", escape(point.tip)) if size.name == "wide" else None
            parts.append(_tag("circle", tip, cx=a, cy=b, r=2.2))
        curves.append(_tag("g", "".join(parts), class_=f"series {one.style}", data_run=one.run))
        ends += (
            [(*places[-1], places[-1][1] - 2 > places[max(len(places) - 2, 0)][1], one)]
            if one.label
            else []
        )
    body.append(_tag("g", "\n".join(curves), clip_path=f"url(#{identifier}-clip)"))
    notes = [(left + 6, y(mark.value) - 6, mark) for mark in chart.marks]
    covered = [(x + _width(mark.label) / 2, _width(mark.label) / 2, at) for x, at, mark in notes]
    # What comes later lies on top: no curve may cross a label.
    body += _end_labels(ends, covered, size)
    body += [_text(x, at, mark.label, style=f"note {mark.role}") for x, at, mark in notes]
    return size.height, body


def _end_labels(
    ends: Iterable[tuple[float, float, bool, Series]],
    placed: list[tuple[float, float, float]],
    size: Size,
) -> Iterator[str]:
    """Names of curves above their ends, joined for curves that end together, moved so that none overlaps another.

    ends: x, y, whether the curve falls (which leaves room on the right), curve. placed: middle, half width, y of text.
    """
    groups: list[tuple[float, float, bool, list[Series]]] = []
    for x, y, falls, one in sorted(ends, key=lambda end: end[:2]):
        if groups and abs(x - groups[-1][0]) < 18 and abs(y - groups[-1][1]) < 14:
            groups[-1][3].append(one)
        else:
            groups.append((x, y, falls, [one]))
    # From the bottom up, as labels give way upwards; y grows downwards in SVG.
    for x, y, falls, series in sorted(groups, key=lambda group: -group[1]):
        label = ", ".join(one.label for one in sorted(series, key=lambda one: one.run))
        half = 0.58 * _width(label)  # bold
        x = min(max(x + falls * half, half), size.width - half)
        near = [at for other, wide, at in placed if abs(other - x) < wide + half]
        for at, step in ((y - 8, -13), (y + 16, 13)):  # below the end if there is no room above
            while covered := [other for other in near if abs(other - at) < 13]:
                at = (max if step > 0 else min)(covered) + step
            # Higher up the text would leave the drawing.
            if at >= 10:
                break
        y = at
        placed.append((x, half, y))
        style = f"series {series[0].style}" if len(series) == 1 else ""
        yield _tag(
            "g", _text(x, y, label, "middle", "note end"), class_=style, data_run=series[0].run
        )


def _bars(chart: Chart, size: Size) -> tuple[float, list[str]]:
    stacked = size.name == "narrow"  # names above their rows instead of beside them
    left = 4.0 if stacked else max(_width(one.name) for one in chart.series) + 8
    right = size.width - (8 if stacked else max(_width(one.note) for one in chart.series) + 10)
    row, top = _ROW + (14 if stacked else 0), 8.0 + _MARK_ROW * len(chart.marks)
    bottom = top + row * len(chart.series) + 6

    def x(value: float) -> float:
        return left + chart.x.share(value) * (right - left)

    def group(one: Series, content: str) -> str:
        return _tag(
            "g",
            _tag("title", escape(one.tip)) + content,
            class_=f"bar {one.style}",
            data_run=one.run,
        )

    body, names = [], []
    if chart.band:
        low, high = (min(max(x(value), left), right) for value in chart.band)
        body.append(
            _tag("rect", class_="band", x=low, y=top, width=high - low, height=bottom - top)
        )
    body += [_line(x(value), top, x(value), bottom, "grid") for value in chart.x.ticks(size.ticks)]
    body += _x_axis(chart.x, left, right, bottom, size)
    for index, one in enumerate(chart.series):
        edge = top + row * index
        middle, parts = edge + row - _ROW / 2, []
        for span in one.spans:
            if span.start == span.stop:
                parts.append(_line(left, middle, right, middle, "grid"))
                parts.append(_tag("circle", class_="dot", cx=x(span.start), cy=middle, r=5))
            else:
                width = max(x(span.stop) - x(span.start), 0.8)  # a short evaluation stays visible
                style = f"part {span.part}"
                parts.append(
                    _tag(
                        "rect", class_=style, x=x(span.start), y=middle - 7, width=width, height=14
                    )
                )
        body.append(group(one, "".join(parts)))
        if stacked:
            name = _text(left, edge + 12, one.name, style="tick")
            note = _text(right, edge + 12, one.note, "end", "note")
        else:
            name = _text(left - 8, middle + 4, one.name, "end", "tick")
            note = _text(right + 8, middle + 4, one.note, style="note")
        names.append(group(one, name + note))
    # Labels of marks are stacked from left to right, so that no line crosses one.
    for index, mark in enumerate(sorted(chart.marks, key=lambda mark: mark.value)):
        at, y = x(mark.value), 12 + _MARK_ROW * index
        body.append(_line(at, y - 9, at, bottom, f"mark {mark.role}"))
        fits = at + 6 + _width(mark.label) <= size.width
        body.append(
            _text(
                at + (6 if fits else -6), y, mark.label, "" if fits else "end", f"note {mark.role}"
            )
        )
    return bottom + 44, [*body, *names]


def svg(chart: Chart, subject: str) -> str:
    """Curves with their title as a stand-alone file, in light colours and the viewer's font."""
    width, height, margin = *PICTURE, 20
    size = Size("picture", width - 2 * margin, height - 4 * margin - 18, 8)
    tall, body = _body(chart, size, "picture")
    parts = [
        f"<style>{style_sheet()}</style>{_tag('rect', width=width, height=height, fill='#ffffff')}",
        _text(margin, margin + 8, f"{chart.title}  ·  {subject[:60]}", style="title"),
        _tag(
            "svg", "\n".join(body), x=margin, y=2 * margin, width=size.width, height=size.height,
            viewBox=f"0 0 {size.width} {tall:.0f}",
        ),
    ]  # fmt: skip
    box = f"0 0 {width} {height}"
    return _tag("svg", "\n".join(parts), xmlns="http://www.w3.org/2000/svg", viewBox=box) + "\n"


@functools.cache
def style_sheet() -> str:
    """chart.css with the page's light colours instead of variables, which SVG renderers do not support."""
    colours = (_TEMPLATES / "colours.css").read_text(encoding="utf-8")
    # The light colours stand before the media query with the dark ones.
    light = dict(re.findall(r"--([\w-]+): (#\w+);", colours.partition("@media")[0]))
    runs = " ".join(re.findall(r"\.run-\d+ \{[^}]*\}", colours))
    css = f"{runs}\n{(_TEMPLATES / 'chart.css').read_text(encoding='utf-8')}"
    css = css.replace("--c:", "color:").replace(
        "var(--c)", "currentColor"
    )  # inherited like the variable
    return re.sub(r"var\(--([\w-]+)\)", lambda match: light[match[1]], css)


def plausible(*values: float) -> bool:
    """Whether numbers can be drawn: not NaN, nor so large (above 1e12) that they hide everything else."""
    return all(abs(value) <= 1e12 for value in values)


def count(things: Sequence[object], what: str = "run") -> str:
    """1 run, 2 runs."""
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"
