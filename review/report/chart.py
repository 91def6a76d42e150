"""Line charts: where their axes, curves and names lie; chart.html draws them as SVG, in the colours
of the page.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

COLOURS = 10  # --run-0 to --run-9 in colours.css
WIDTH, HEIGHT = 960, 400  # of a drawing, CSS pixels
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
    """A curve. ``run``: index from 0, decides the colour. ``dropped``: from the score, drawn dashed.

    ``label``: at the end of the curve; without it the name is in the legend.
    """

    run: int
    name: str
    points: tuple[Point, ...]
    label: str = ""
    dropped: bool = False

    @property
    def style(self) -> str:
        """CSS classes for the colour, and for a dropped run."""
        return f"run-{self.run % COLOURS}{' dropped' if self.dropped else ''}"


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


def layout(chart: Chart) -> dict[str, Any]:
    """What chart.html draws, in pixels; y grows downwards."""
    rows = [(value, chart.y.text(value)) for value in chart.y.ticks(5)]
    left = max(_width(label) for label in ["0", *(label for _, label in rows)]) + 8
    right, top, bottom = WIDTH - 8.0, 26.0, HEIGHT - 44.0

    def x(value: float) -> float:
        return left + chart.x.share(value) * (right - left)

    def y(value: float) -> float:
        return bottom - chart.y.share(value) * (bottom - top)

    columns = []
    for value in chart.x.ticks(8):
        label = chart.x.text(value)
        # Moved in from the edges, where it would be cut off.
        half = _width(label) / 2
        columns.append((x(value), min(max(x(value), half), WIDTH - half), label))
    curves = [
        (line, [(x(point.x), y(point.y), point.tip) for point in line.points])
        for line in chart.series
    ]
    ends = ((*points[-1][:2], line) for line, points in curves if line.label)
    return {
        "size": (WIDTH, HEIGHT),
        "frame": (left, right, bottom),
        "rows": [(y(value), label) for value, label in rows],
        "columns": columns,
        "target": None if chart.target is None else y(chart.target),
        "curves": curves,
        "names": [*_names(ends)],
    }


def _width(content: str) -> float:
    return _CHARACTER * len(content)


def _names(
    ends: Iterable[tuple[float, float, Series]],
) -> Iterator[tuple[float, float, Series]]:
    """Names of curves above their ends (x, y), moved up so that none overlaps another."""
    placed: list[tuple[float, float, float]] = []  # middle, half width, y of the text
    # From the bottom up, as names give way upwards.
    for x, y, line in sorted(ends, key=lambda end: -end[1]):
        half = 0.58 * _width(line.label)  # bold
        x, y = min(x + half, WIDTH - half), y - 8
        near = [at for other, wide, at in placed if abs(other - x) < wide + half]
        while covered := [at for at in near if abs(at - y) < _LINE]:
            y = min(covered) - _LINE
        placed.append((x, half, y))
        yield x, y, line
