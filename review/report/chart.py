"""Line charts as SVG without scripts.

On a page, colours are CSS variables, to follow light and dark mode. A stand-alone picture contains
its title and light colours.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

COLOURS = 10  # --run-0 to --run-9 in colours.css
WIDTH, HEIGHT = 960, 400  # of a drawing, CSS pixels
_TEMPLATES = Path(__file__).parent / "templates"
_CHARACTER = 7.2  # px, width of a character of 12 px text in the widest font
_LINE = 13  # px, height of a label


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high``, widened if they are equal. ``log``: logarithmic, both ends
    above 0.
    """

    label: str
    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        # Equal ends would divide by zero in share().
        widest = max(abs(self.low), abs(self.high), 1e-3)
        least = 1.01 * self.low if self.log else self.low + 1e-9 * widest
        # The class is frozen, for its own methods, too.
        object.__setattr__(self, "high", max(self.high, least))

    def share(self, value: float) -> float:
        """Position of a value: 0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        """At most about ``count`` round values within the axis."""
        return self._powers(count) if self.log else self._steps(count)

    def _powers(self, count: int) -> list[float]:
        """Powers of ten, with values in between if there is room."""
        first = math.floor(math.log10(self.low))
        last = math.ceil(math.log10(self.high))
        powers = range(first, last + 1)
        ticks: list[float] = []
        # More steps per power of ten only while they fit.
        for steps in ((1,), (1, 3), (1, 2, 5)):
            values = [step * 10.0**power for power in powers for step in steps]
            # With slack for rounding, so that an end that is a tick has its label.
            within = [
                tick for tick in values if self.low * 0.999 <= tick <= self.high * 1.001
            ]
            ticks = within if len(within) <= count or not ticks else ticks
        return ticks

    def _steps(self, count: int) -> list[float]:
        rough = (self.high - self.low) / count
        power = 10 ** math.floor(math.log10(rough))
        steps = (factor * power for factor in (1, 2, 2.5, 5, 10))
        step = next(step for step in steps if step >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def text(self, value: float) -> str:
        """Label of a tick: 1.5M, 500k, 11,800 or 0.72."""
        if abs(value) < 1e5:
            # Multiples of a step carry rounding errors, which would be printed.
            return f"{round(value, 6):,g}"
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"


class Point(NamedTuple):
    """A point of a line. ``tip``: shown on hover."""

    x: float
    y: float
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A curve. ``run``: index from 0, decides the colour. ``counted``: drawn solid, else dashed.

    ``label``: at the end of the curve; without it the name is in the legend.
    """

    run: int
    name: str
    points: tuple[Point, ...]
    label: str = ""
    counted: bool = True

    @property
    def style(self) -> str:
        """CSS classes for the colour, and for a run left out of the score."""
        return f"run-{self.run % COLOURS}{'' if self.counted else ' dropped'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves over ``x`` and ``y``. ``alt``: description in words. ``target``: a value of y, drawn
    as a line.
    """

    key: str
    title: str
    alt: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    target: float | None = None


def draw(chart: Chart) -> str:
    """The chart as an element of a page."""
    body = "\n".join(_body(chart))
    return _tag(
        "svg", body, role="img", viewBox=f"0 0 {WIDTH} {HEIGHT}", aria_label=chart.alt
    )


def svg(chart: Chart, subject: str) -> str:
    """The chart with its title as a stand-alone file, in light colours and the viewer's font."""
    margin, head = 20, 48
    wide, tall = WIDTH + 2 * margin, HEIGHT + head + margin
    paper = _tag("rect", x=-margin, y=-head, width=wide, height=tall, fill="#ffffff")
    title = _text(0, 20 - head, f"{chart.title}  ·  {subject[:60]}", style="title")
    content = "\n".join(
        [f"<style>{style_sheet()}</style>{paper}", title, *_body(chart)]
    )
    box = f"{-margin} {-head} {wide} {tall}"
    return _tag("svg", content, xmlns="http://www.w3.org/2000/svg", viewBox=box) + "\n"


def _tag(name: str, content: str | None = None, **attributes: object) -> str:
    """An element. ``content`` is markup; floats get one decimal, empty attributes are omitted."""
    parts = [name]
    for key, value in attributes.items():
        if value != "":
            shown = f"{value:.1f}" if isinstance(value, float) else escape(str(value))
            # class_ is Python's spelling of class, text_anchor that of text-anchor.
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    return (
        f"<{' '.join(parts)}/>"
        if content is None
        else f"<{' '.join(parts)}>{content}</{name}>"
    )


def _text(x: float, y: float, content: str, anchor: str = "", style: str = "") -> str:
    return _tag("text", escape(content), x=x, y=y, text_anchor=anchor, class_=style)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return _tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)


def _width(content: str) -> float:
    return _CHARACTER * len(content)


def _body(chart: Chart) -> list[str]:
    ticks = {value: chart.y.text(value) for value in chart.y.ticks(5)}
    left = max(map(_width, ["0", *ticks.values()])) + 8
    right = WIDTH - 8.0
    top, bottom = 26.0, HEIGHT - 44.0

    def x(value: float) -> float:
        return left + chart.x.share(value) * (right - left)

    def y(value: float) -> float:
        return bottom - chart.y.share(value) * (bottom - top)

    body = [_text(0, 12, chart.y.label, style="label")]
    for value, label in ticks.items():
        body.append(_line(left, y(value), right, y(value), "grid"))
        body.append(_text(left - 7, y(value) + 4, label, "end", "tick"))
    body.append(_line(left, bottom, right, bottom, "axis"))
    for value in chart.x.ticks(8):
        at, label = x(value), chart.x.text(value)
        body.append(_line(at, bottom, at, bottom + 4, "axis"))
        # Moved in from the edges, where it would be cut off.
        middle = min(max(at, _width(label) / 2), WIDTH - _width(label) / 2)
        body.append(_text(middle, bottom + 18, label, "middle", "tick"))
    body.append(_text(right, bottom + 36, chart.x.label, "end", "label"))
    if chart.target is not None:
        at = y(chart.target)
        body.append(_line(left, at, right, at, "target"))
        body.append(
            _text(left + 6, at - 6, f"target {chart.target:.3f}", style="note target")
        )
    ends = []
    for line in chart.series:
        points = [(x(point.x), y(point.y)) for point in line.points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts = [_tag("polyline", points=path)]
        for (a, b), point in zip(points, line.points, strict=True):
            tip = _tag("title", escape(point.tip))
            parts.append(_tag("circle", tip, cx=a, cy=b, r=2.2))
        style = f"series {line.style}"
        body.append(_tag("g", "".join(parts), class_=style, data_run=line.run))
        ends += [(*points[-1], line)] if line.label else []
    # What comes later lies on top: no curve may cross a label.
    return [*body, *_end_labels(ends)]


def _end_labels(ends: Iterable[tuple[float, float, Series]]) -> Iterator[str]:
    """Names of curves above their ends (x, y), moved up so that none overlaps another."""
    placed: list[tuple[float, float, float]] = []  # middle, half width, y of the text
    # From the bottom up, as labels give way upwards; y grows downwards in SVG.
    for x, y, line in sorted(ends, key=lambda end: -end[1]):
        half = 0.58 * _width(line.label)  # bold
        x, y = min(x + half, WIDTH - half), y - 8
        near = [at for other, wide, at in placed if abs(other - x) < wide + half]
        while covered := [at for at in near if abs(at - y) < _LINE]:
            y = min(covered) - _LINE
        placed.append((x, half, y))
        label = _text(x, y, line.label, "middle", "note end")
        yield _tag("g", label, class_=f"series {line.style}", data_run=line.run)


@functools.cache
def style_sheet() -> str:
    """chart.css with the page's light colours instead of variables, which SVG renderers do not
    support.
    """
    colours = (_TEMPLATES / "colours.css").read_text(encoding="utf-8")
    # The light colours stand before the media query with the dark ones.
    light = dict(re.findall(r"--([\w-]+): (#\w+);", colours.partition("@media")[0]))
    runs = " ".join(re.findall(r"\.run-\d+ \{[^}]*\}", colours))
    css = f"{runs}\n{(_TEMPLATES / 'chart.css').read_text(encoding='utf-8')}"
    # currentColor is inherited like the variable.
    css = css.replace("--c:", "color:").replace("var(--c)", "currentColor")
    return re.sub(r"var\(--([\w-]+)\)", lambda match: light[match[1]], css)
