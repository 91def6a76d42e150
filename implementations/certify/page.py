"""The page of an acceptance test: verdict, outliers with their evidence, heat maps of nodes and GPUs, timelines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from certify.baseline import Baseline, label
from certify.figures import FIGURES, STEP, Measured, digits
from certify.records import Records
from certify.schema import BURN_IN, CPUS, LABELS, PROBES
from certify.verdict import WORDS, Certificate, chance_words
from review.logs.output import ReviewError, write_whole
from review.report.chart import Axis, Chart, Point, Series

HEADLINES = {"pass": "Pass", "warn": "Pass, with warnings", "fail": "Fail"}
STATES = {"pass": "good", "warn": "warn", "fail": "bad"}
FULL = 0.10  # of the median: slower by so much has the full colour
MOST_LINES, MOST_POINTS = 10, 80
CLOCKS = {
    "sm_mhz": ("clock", "Clock", "MHz"),
    "watts": ("power", "Power", "W"),
    "celsius": ("temperature", "Temperature", "°C"),
}


def write_page(found: Certificate, output: Path) -> None:
    """Writes the page of a test. Raises ReviewError."""
    records = found.records
    measured = found.figures()
    rates = {one.name: f"{digits(one.median)} {one.unit}" for one in measured if one.name in PROBES}
    accused = [*(one.name for one in found.findings), *(one.name for one in found.faults)]
    _write(
        output,
        title=f"Acceptance test of {records.folder.name}",
        subtitle=f"{len(records.places)} ranks on {len(records.nodes)} nodes · {', '.join(_devices(found))}",
        state=STATES[found.state],
        headline=HEADLINES[found.state],
        reasons=found.reasons(),
        notes=found.notes,
        numbers=_numbers(found, measured),
        outliers=_outliers(found),
        maps=[_map(found, stage, values, rates.get(stage, "")) for stage, values in _levels(found).items()],
        figures=timelines(records, accused),
    )


def write_drift(baselines: Sequence[Baseline], output: Path) -> None:
    """Writes the page of how baselines drift. Raises ReviewError."""
    _write(
        output,
        title="Baselines",
        subtitle=" · ".join(f"{one.name} ({one.saved[:10]})" for one in baselines),
        state="good",
        headline=f"{len(baselines)} baselines",
        reasons=[],
        notes=[],
        numbers=[],
        outliers=[],
        maps=[],
        figures=[drift(baselines)],
    )


def _write(output: Path, *, figures: Sequence[Chart], **content: Any) -> None:
    """Fills in the template. Raises ReviewError where jinja2 is missing or the file cannot be written."""
    from review.report.page import render

    if output.is_dir():
        raise ReviewError(f"{output} is a folder: name the page itself, such as {output / 'certify.html'}")
    most = max((len(chart.series) for chart in figures), default=0)
    page = render("certify.html", figures=figures, most_lines=most, **content)
    write_whole(output, page.encode("utf-8"))


def _devices(found: Certificate) -> list[str]:
    return sorted({place.device for place in found.records.places.values()})


def _numbers(found: Certificate, measured: Sequence[Measured]) -> list[dict[str, str]]:
    """Every number with its limit, and whether it keeps it."""
    short = {one.figure: STATES[one.state] for one in found.reached if one.state != "pass"}
    slow = {finding.stage: "bad" for finding in found.findings}
    rows = []
    for one in measured:
        low, high = one.shown
        # A stage has a row for its seconds, which are compared, and one for its rate, which a config expects.
        state = slow.get(one.name, "") if one.name not in FIGURES or one.unit == STEP else short.get(one.name, "")
        if one.name in PROBES:
            state = slow.get(one.name) or state
        rows.append({"what": one.label, "low": low, "high": high, "unit": one.unit, "limit": one.limit, "state": state})
    return rows


def _row(name: str, state: str, what: str, **cells: str) -> dict[str, str]:
    return {"name": name, "state": state, "what": what, "stage": "", "excess": "", "sure": "", "evidence": ""} | cells


def _outliers(found: Certificate) -> list[dict[str, str]]:
    """A row for each reason of the verdict."""
    wrong = "silent data corruption"
    rows = [
        _row(
            one.name, "bad", wrong, stage=LABELS[one.stage], sure="certain",
            evidence=f"step {one.step + 1} of round {one.round + 1}",
        )
        for one in found.corrupt
    ]  # fmt: skip
    for line in found.burn_in.different if found.burn_in else []:
        name, _, evidence = line.partition(": ")
        rows.append(_row(name, "bad", wrong, stage=LABELS[BURN_IN], sure="certain", evidence=evidence))
    for finding in found.findings:
        also = f"also: {', '.join(finding.also)}" if finding.also else ""
        rows.append(
            _row(
                finding.name, "bad", WORDS[finding.what], stage=LABELS[finding.stage],
                excess=f"+{finding.outlier.excess:.1%}",
                sure=f"{finding.outlier.measure}; {chance_words(finding.outlier.chance)}",
                evidence="; ".join(text for text in (finding.evidence, also) if text),
            )
        )  # fmt: skip
    for one in (one for one in found.reached if one.state != "pass"):
        figure = FIGURES[one.figure]
        rows.append(
            _row(
                one.name, STATES[one.state], "less than the config expects", stage=figure.label,
                excess=f"-{one.short:.1%}", sure=f"± {one.error:.1%}",
                evidence=f"{digits(one.measured)} of {digits(one.expected)} {figure.unit}",
            )
        )  # fmt: skip
    rows += [_row(one.name, STATES[one.state], "hardware", sure="counted", evidence=one.reason) for one in found.faults]
    if found.unfinished:
        name, _, evidence = found.unfinished.partition(": ")
        rows.append(_row(name, "warn", "ended before its time", sure="certain", evidence=evidence))
    return rows


def _levels(found: Certificate) -> dict[str, dict[int, float]]:
    """Seconds by stage or part of the load, and rank."""
    records = found.records
    probes = {
        name: {rank: statistics.median(times) for rank, times in records.probe(name).items() if times}
        for name in records.probed
    }
    return found.seconds | probes


def _map(found: Certificate, stage: str, values: dict[int, float], rate: str) -> dict[str, Any]:
    """A heat map: a row a node, a column a GPU; a cell's heat is how much slower than the median it is.

    rate: the median in the unit of the figure, where it has one.
    """
    center = statistics.median(values.values())
    rows = []
    for node in found.records.nodes:
        cells = []
        for rank, place in found.records.places.items():
            if place.node == node and rank in values:
                excess = values[rank] / center - 1
                heat = min(max(excess / FULL, -1.0), 1.0)
                tip = f"{place.name}: {values[rank] * 1e3:,.2f} ms, {excess:+.1%}"
                side = "slow" if heat >= 0 else "quick"
                shown = f"{100 * excess:+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")
                cells.append({"text": shown, "heat": f"{abs(heat):.2f}", "side": side, "tip": tip})
        rows.append({"node": node, "cells": cells})
    width = max((len(row["cells"]) for row in rows), default=0)
    median = ", ".join(text for text in (f"{center * 1e3:,.2f} ms", rate) if text)
    return {"title": LABELS[stage], "median": median, "rows": rows, "width": width}


def timelines(records: Records, accused: Sequence[str] = ()) -> list[Chart]:
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
) -> Chart:
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
        lines.append(Series(run=number, name=name, points=points))
    left = (
        "" if len(shown) == len(series) else f" Of {len(series)} devices, {len(shown)}: the accused and the extremes."
    )
    lowest, highest = (float(np.nanmedian(series[name][field])) for name in (level[0], level[-1]))
    extremes = f"{level[0]} has the lowest median, {level[-1]} the highest."
    if lowest == highest:
        extremes = f"All have the same median, {lowest:,.0f}."
    return _chart(key, title, f"{title} of each device, in {unit}. {extremes}{left}", "minutes", unit, lines)


def drift(baselines: Sequence[Baseline]) -> Chart:
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
        lines.append(Series(run=number, name=label(name), points=points))
    worst = max((point.y, line.name) for line in lines for point in line.points[-1:])
    words = f"From {baselines[0].name} to {baselines[-1].name}; the largest change is {worst[1]}, {worst[0]:+.1f}%."
    title = "Time of the same work over baselines"
    return _chart("drift", title, words, "baseline, the oldest first", "% slower than the first", lines)


def _chart(key: str, title: str, alt: str, x: str, y: str, lines: list[Series]) -> Chart:
    xs = [point.x for line in lines for point in line.points]
    ys = [point.y for line in lines for point in line.points]
    room = 0.08 * (max(ys) - min(ys)) or max(abs(max(ys)), 1) * 0.05
    return Chart(
        key=key,
        title=title,
        alt=alt,
        x=Axis(label=x, low=min(xs), high=max(xs)),
        y=Axis(label=y, low=min(ys) - room, high=max(ys) + room),
        series=tuple(lines),
    )
