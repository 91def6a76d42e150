"""What a chart is made of, in data units; ``svg`` draws it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Unit = Literal["samples", "minutes", "accuracy", "rate", "loss", "count"]
Role = Literal["target", "reference", "minimum", "own"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high``; one without width is widened.

    ``log``: equal factors are equally far, both ends above 0. ``names``: of the values 0, 1, ..., instead of numbers.
    """

    label: str
    unit: Unit
    low: float
    high: float
    log: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.log and self.high < 1.01 * self.low:
            object.__setattr__(self, "high", 1.01 * self.low)
        least = 1e-9 * max(abs(self.low), abs(self.high), 1e-3)
        if self.high - self.low < least:
            object.__setattr__(self, "high", self.low + least)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        """At most about ``count`` round values within the axis."""
        if self.log:
            return self._log_ticks(count)
        if self.names:
            every = math.ceil(len(self.names) / max(count, 1))
            return [float(i) for i in range(len(self.names)) if (len(self.names) - 1 - i) % every == 0]
        rough = (self.high - self.low) / max(count, 1)
        power = 10 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _log_ticks(self, count: int) -> list[float]:
        """Powers of ten with the steps between them that there is room for."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        ticks: list[float] = []
        for steps in ((1,), (1, 3), (1, 2, 5)):
            found = [step * 10.0**power for power in decades for step in steps]
            within = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
            ticks = within if len(within) <= count or not ticks else ticks
        return ticks

    def text(self, value: float) -> str:
        """A tick's label."""
        if self.names:
            return self.names[round(value)]
        return format_value(value, self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A point of a line, and what to say of it."""

    x: float
    y: float
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One run's curve. ``run`` counts from 0; ``counted``: it is part of the score; ``note``: why it is not."""

    run: int
    name: str
    points: tuple[Point, ...]
    counted: bool
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A reference line across the chart: horizontal in a LineChart, vertical in a BarChart."""

    value: float
    label: str
    role: Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of a bar."""

    start: float
    stop: float
    part: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A row of a BarChart: stretches, or a dot. ``run`` is None for a row that is not a run."""

    run: int | None
    name: str
    note: str
    tip: str
    counted: bool = True
    segments: tuple[Segment, ...] = ()
    dot: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """Curves over an x axis. ``alt`` says in words what there is to see."""

    key: str
    title: str
    alt: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BarChart:
    """One row per run. ``parts`` names the stretches of the bars; ``band`` is shaded from low to high."""

    key: str
    title: str
    alt: str
    x: Axis
    bars: tuple[Bar, ...]
    parts: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    band: tuple[float, float] | None = None


Chart = LineChart | BarChart


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A line of a legend: of a run, or of what else is shaded (``swatch``, the classes of its sample)."""

    label: str
    run: int | None = None
    counted: bool = True
    swatch: str = ""


def legend(chart: Chart) -> list[Entry]:
    """What the colours of a chart mean."""
    if isinstance(chart, LineChart):
        return [
            Entry(label=f"{line.name}{line.note and ', '}{line.note}", run=line.run, counted=line.counted)
            for line in chart.lines
        ]
    entries = [Entry(label=part, swatch=f"part {part}") for part in chart.parts]
    if chart.band:
        label = "between RCP minimum and RCP mean: accepted, with the time scaled up"
        entries.append(Entry(label=label, swatch="band"))
    if any(not bar.counted for bar in chart.bars):
        label = "lighter: left out of the score" if chart.parts else "hollow: left out of the score"
        entries.append(Entry(label=label))
    return entries


def format_value(value: float, unit: Unit) -> str:
    """A tick's label in its unit: 1.5M samples, 0.72, 11,800."""
    if unit == "samples":
        for limit, suffix in ((1e6, "M"), (1e3, "k")):
            if abs(value) >= limit:
                return f"{value / limit:g}{suffix}"
    if unit == "rate":
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
    return f"{round(value, 6):,g}"
