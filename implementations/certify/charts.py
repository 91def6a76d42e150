"""Charts of an acceptance test: clocks and power over time, and how the figures of saved baselines drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from certify.baseline import Baseline, label
from certify.hardware import CPUS
from certify.records import Records
from review.report.chart import Axis, Line, LineChart, Point

MOST_LINES, MOST_POINTS = 10, 80
CLOCKS = {
    "sm_mhz": ("clock", "Clock", "MHz"),
    "watts": ("power", "Power", "W"),
    "celsius": ("temperature", "Temperature", "°C"),
}


def timelines(records: Records, accused: Sequence[str] = ()) -> list[LineChart]:
    """Clock, power and temperature by device over the test; of more than fit, the accused and the extremes."""
    series: dict[str, dict[str, np.ndarray]] = {}
    for node, table in records.telemetry.items():
        for device in np.unique(table["device"]).tolist():
            chosen = table["device"] == device
            rank = next((p.name for p in records.places.values() if (p.node, p.local_rank) == (node, device)), None)
            name = f"CPUs of {node}" if device == CPUS else rank or f"GPU {device} of {node}"
            series[name] = {field: column[chosen] for field, column in table.items()}
    charts = []
    for field, (key, title, unit) in CLOCKS.items():
        known = {name: one for name, one in series.items() if not np.isnan(one[field]).all()}
        if known:
            charts.append(_timeline(field, key, title, unit, known, accused))
    return charts


def _timeline(
    field: str, key: str, title: str, unit: str, series: Mapping[str, Mapping[str, np.ndarray]], accused: Sequence[str]
) -> LineChart:
    begin = min(float(one["time"].min()) for one in series.values())
    level = sorted(series, key=lambda name: float(np.nanmedian(series[name][field])))
    shown = list(series)
    if len(shown) > MOST_LINES:
        others = [name for name in level if name not in accused]
        room = max(MOST_LINES - sum(name in accused for name in level), 2)
        kept = {*accused, *others[: room // 2], *others[-(room - room // 2) :]}
        shown = [name for name in series if name in kept]
    lines = []
    for number, name in enumerate(shown):
        one = series[name]
        step = max(1, math.ceil(len(one["time"]) / MOST_POINTS))
        pairs = zip((one["time"][::step] - begin) / 60, one[field][::step], strict=True)
        points = tuple(
            Point(x=float(x), y=float(y), tip=f"{name}: {y:,.0f} {unit} at {x:.1f} minutes")
            for x, y in pairs
            if not np.isnan(y)
        )
        lines.append(Line(run=number, name=name, points=points, counted=True))
    left = (
        "" if len(shown) == len(series) else f" Of {len(series)} devices, {len(shown)}: the accused and the extremes."
    )
    lowest, highest = (float(np.nanmedian(series[name][field])) for name in (level[0], level[-1]))
    extremes = f"{level[0]} has the lowest median, {level[-1]} the highest."
    if lowest == highest:
        extremes = f"All have the same median, {lowest:,.0f}."
    return _chart(key, title, f"{title} of each device, in {unit}. {extremes}{left}", "minutes", unit, lines)


def drift(baselines: Sequence[Baseline]) -> LineChart:
    """Every figure of each baseline relative to the first that has it, the oldest first."""
    names = list(dict.fromkeys(name for one in baselines for name in one.metrics))
    lines = []
    for number, name in enumerate(names):
        known = [(place, one) for place, one in enumerate(baselines, 1) if name in one.metrics]
        first = known[0][1].metrics[name][0]
        points = tuple(
            Point(
                x=place,
                y=100 * (one.metrics[name][0] / first - 1),
                tip=f"{one.name}: {label(name)} {one.metrics[name][0] * 1e3:,.3f} ms",
            )
            for place, one in known
        )
        lines.append(Line(run=number, name=label(name), points=points, counted=True))
    worst = max((point.y, line.name) for line in lines for point in line.points[-1:])
    words = f"From {baselines[0].name} to {baselines[-1].name}; the largest change is {worst[1]}, {worst[0]:+.1f}%."
    title = "Time of the same work over baselines"
    return _chart("drift", title, words, "baseline, the oldest first", "% slower than the first", lines)


def _chart(key: str, title: str, alt: str, x: str, y: str, lines: list[Line]) -> LineChart:
    xs = [point.x for line in lines for point in line.points]
    ys = [point.y for line in lines for point in line.points]
    room = 0.08 * (max(ys) - min(ys)) or max(abs(max(ys)), 1) * 0.05
    return LineChart(
        key=key,
        title=title,
        alt=alt,
        x=Axis(label=x, unit="minutes" if x == "minutes" else "rate", low=min(xs), high=max(xs)),
        y=Axis(label=y, unit="rate", low=min(ys) - room, high=max(ys) + room),
        lines=tuple(lines),
    )
