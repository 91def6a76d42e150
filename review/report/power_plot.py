"""The chart of power over time: what all nodes and switches of each run drew, by its power files."""

from __future__ import annotations

import math

from review.report.chart import Axis, Line, LineChart, Point
from review.results.energy import EnergyError, PowerFile, RunEnergy
from review.results.run import Run
from review.results.score import Result

MOST_POINTS = 60  # of a run; more readings than that are averaged, or ten runs would hide each other
_LARGEST = 1e12  # watts, and minutes: beyond it a file is broken, and the chart would show nothing else
_ROOM = 0.06  # of the range of watts, above and below

Span = tuple[float, float, float]  # minutes since run_start, from and to, and watts


def power_chart(result: Result) -> LineChart | None:
    """Watts of each run over its minutes; None where no run has readings."""
    if result.energy is None:
        return None
    lines = []
    for index, run in enumerate(result.runs):
        points = _points(run, result.energy.runs.get(run.path))
        if points:
            why = result.dropped.get(run.path, "")
            note = {"best": "fastest", "worst": "slowest"}.get(why, why)
            lines.append(Line(run=index, name=run.name, points=points, counted=not why, note=note))
    if not lines:
        return None
    watts = [point.y for line in lines for point in line.points]
    minutes = [point.x for line in lines for point in line.points]
    low, high = min(watts), max(watts)
    room = max(_ROOM * (high - low), 0.01 * high)
    left = min(0.0, *minutes)
    width = max(minutes) - left
    return LineChart(
        key="power",
        title="Power over time",
        alt=f"Power of all nodes and switches of {len(lines)} run{'s' * (len(lines) > 1)} together: between {low:,.0f} "
        f"and {high:,.0f} W, {_mean(lines):,.0f} W on average.",
        x=Axis(label="minutes since run_start", unit="minutes", low=left, high=max(minutes) + 0.02 * width),
        y=Axis(label="watts", unit="rate", low=max(low - room, 0), high=high + room),
        lines=tuple(lines),
    )


def _mean(lines: list[Line]) -> float:
    """The mean of the runs' means."""
    return math.fsum(math.fsum(p.y for p in line.points) / len(line.points) for line in lines) / len(lines)


def _points(run: Run, energy: RunEnergy | None) -> tuple[Point, ...]:
    """The power of a run in equal stretches of the time that all its nodes measured; none where one cannot be read."""
    if energy is None or run.run_start is None:
        return ()
    nodes, constant = [], 0.0
    try:
        for file in energy.files:
            if file.is_node:
                nodes.append(_spans(file, run.run_start.time_ms))
            else:
                constant += file.joules(1000.0)  # of a second
    except EnergyError:
        return ()
    if not nodes or not all(nodes):
        return ()
    low, high = max(spans[0][0] for spans in nodes), min(spans[-1][1] for spans in nodes)
    if not low < high:
        return ()
    count = min(MOST_POINTS, max(len(spans) for spans in nodes))
    step = (high - low) / count
    totals = [constant] * count
    for spans in nodes:
        _add(totals, spans, low, step)
    points = []
    for i, watts in enumerate(totals):
        at = low + (i + 0.5) * step
        points.append(Point(x=at, y=watts, tip=f"{run.name}: {watts:,.0f} W at {at:.2f} min"))
    return tuple(points)


def _spans(file: PowerFile, run_start_ms: float) -> list[Span]:
    """The node's power over time: a reading holds from the one before it, the first one from the start."""
    if file.start is None:
        return []
    spans, efficiency = [], file.efficiency
    before = (file.start.time_ms - run_start_ms) / 60_000
    for event in file.readings:
        watts, now = efficiency * file.value_of(event), (event.time_ms - run_start_ms) / 60_000
        if not all(abs(value) <= _LARGEST for value in (watts, now, before)):  # nan is not
            return []
        if now > before:
            spans.append((before, now, watts))
            before = now
    return spans


def _add(totals: list[float], spans: list[Span], low: float, step: float) -> None:
    """Adds the mean power of a node in each stretch [low + i * step, low + (i + 1) * step) to the totals."""
    for start, stop, watts in spans:
        first = max(math.floor((start - low) / step), 0)
        last = min(math.ceil((stop - low) / step), len(totals))
        for i in range(first, last):
            covered = min(stop, low + (i + 1) * step) - max(start, low + i * step)
            totals[i] += watts * max(covered, 0.0) / step
