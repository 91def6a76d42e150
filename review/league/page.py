"""The league as one self-contained HTML page: where one's own results stand, scaling, the trend over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from review.league.entries import Entry
from review.league.ranking import BY, League
from review.league.table import EXPLAINED, cells, headings, shown, size
from review.logs.output import write_whole
from review.report.chart import Axis, Chart, Line, LineChart, Mark, Point, Unit
from review.report.page import figure, render

_MOST_CURVES = 8  # of the scaling charts
_NUMBERS = ("rank", "nodes x accel.", "batch", "minutes", "seq/s", "/accel", "efficiency", "MJ")
_FIRST = ("rank", "minutes", "/accel")  # columns that a phone shows without scrolling
_NODE = 8  # accelerators of the systems whose trend is drawn


def charts(league: League) -> list[Chart]:
    """Scaling in minutes and in efficiency, and the trend over rounds, as far as there is data for them."""
    curves = _curves(league)
    found = [_scaling(league, curves), _efficiency(league, curves)]
    found += [_trend_minutes(league), _trend_rates(league)]
    return [chart for chart in found if chart is not None]


def _curves(league: League) -> list[tuple[str, list[Entry], bool]]:
    """(name, the best of each size, whether it is one's own) of systems in several sizes: own, then the newest."""
    found = []
    for (round_, submitter, _, accelerator), entries in league.kinds.items():
        best: dict[float, Entry] = {}
        for entry in entries:
            if entry.accelerators and entry.minutes:
                before = best.get(entry.accelerators)
                best[entry.accelerators] = entry if before is None else min(before, entry, key=lambda e: e.minutes or 0)
        if len(best) > 1:
            own = any(league.is_own(entry) for entry in entries)
            whose = "" if accelerator.startswith(f"{submitter} ") else f"{submitter}, "
            found.append((f"{whose}{accelerator}, {round_}", [best[count] for count in sorted(best)], own))
    found.sort(key=lambda curve: curve[1][-1].accelerators or 0.0, reverse=True)
    found.sort(key=lambda curve: curve[1][0].round, reverse=True)
    return sorted(found, key=lambda curve: not curve[2])[:_MOST_CURVES]


def _lines(
    curves: Sequence[tuple[str, list[Entry], bool]],
    value: Callable[[Entry], float | None],
    form: Callable[[float], str],
) -> tuple[Line, ...]:
    lines = []
    for index, (name, entries, _) in enumerate(curves):
        known = [(entry.accelerators or 0.0, found, entry) for entry in entries if (found := value(entry)) is not None]
        points = [
            Point(x=x, y=y, tip=f"{name}: {x:g} accelerators ({size(entry)}), {form(y)}") for x, y, entry in known
        ]
        lines.append(Line(run=index, name=name, points=tuple(points), counted=True))
    return tuple(lines)


def _bounds(lines: Iterable[Line]) -> tuple[float, float, float, float]:
    xs = [point.x for line in lines for point in line.points]
    ys = [point.y for line in lines for point in line.points]
    return min(xs), max(xs), min(ys), max(ys)


def _scaling(league: League, curves: Sequence[tuple[str, list[Entry], bool]]) -> Chart | None:
    lines = _lines(curves, lambda entry: entry.minutes, lambda value: f"{value:.4f} minutes")
    if not lines:
        return None
    left, right, low, high = _bounds(lines)
    return LineChart(
        key="scaling",
        title="Time to train over accelerators",
        alt=f"{len(lines)} systems that were measured in several sizes; both axes by factors, so that a straight line "
        "that falls one to one is perfect scaling.",
        x=Axis(label="accelerators", unit="count", low=left / 1.1, high=right * 1.1, log=True),
        y=Axis(label="minutes", unit="minutes", low=low / 1.15, high=high * 1.15, log=True),
        lines=lines,
    )


def _efficiency(league: League, curves: Sequence[tuple[str, list[Entry], bool]]) -> Chart | None:
    def percent(entry: Entry) -> float | None:
        efficiency = league.efficiency(entry)
        return None if efficiency is None else 100 * efficiency

    lines = _lines(curves, percent, lambda value: f"{value:.1f}%")
    if not lines:
        return None
    left, right, low, high = _bounds(lines)
    return LineChart(
        key="efficiency",
        title="Efficiency over accelerators",
        alt="Sequences a second of one accelerator against the smallest system of its kind, in percent.",
        x=Axis(label="accelerators", unit="count", low=left / 1.1, high=right * 1.1, log=True),
        y=Axis(label="% of the smallest system", unit="rate", low=min(low, 90.0) - 5, high=max(high, 100.0) + 5),
        lines=lines,
        marks=(Mark(value=100.0, label="perfect scaling", role="reference"),),
    )


def _trend(
    league: League,
    series: Sequence[tuple[str, Callable[[Entry], float | None]]],
    best: Callable[[Iterable[float]], float],
    unit: Unit,
) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """The best value of each published round, a line for each of the ``series``."""
    closed = [entry for entry in league.others if entry.division == "closed"]
    rounds = tuple(sorted({entry.round for entry in closed}))
    lines = []
    for index, (name, value) in enumerate(series):
        points = []
        for place, round_ in enumerate(rounds):
            found = [
                (known, entry) for entry in closed if entry.round == round_ and (known := value(entry)) is not None
            ]
            if found:
                top = best(known for known, _ in found)
                entry = next(entry for known, entry in found if known == top)
                tip = f"round {round_}: {top:,.4g} {unit}, {entry.submitter} {entry.system} ({size(entry)})"
                points.append(Point(x=float(place), y=top, tip=tip))
        if points:
            lines.append(Line(run=index, name=name, points=tuple(points), counted=True))
    return tuple(lines), rounds


def _own_mark(
    league: League, value: Callable[[Entry], float | None], best: Callable[[Iterable[float]], float]
) -> tuple[Mark, ...]:
    """A line at the best of one's own."""
    found = {known: entry.system for entry in league.own if (known := value(entry)) is not None}
    if not found:
        return ()
    top = best(found)
    return (Mark(value=top, label=f"yours: {found[top][:40]}", role="own"),)


def _trend_minutes(league: League) -> Chart | None:
    series: list[tuple[str, Callable[[Entry], float | None]]] = [
        ("fastest of any size", lambda entry: entry.minutes),
        (f"fastest with {_NODE} accelerators", lambda entry: entry.minutes if entry.accelerators == _NODE else None),
    ]
    lines, rounds = _trend(league, series, min, "minutes")
    if len(rounds) < 2 or not lines:
        return None
    _, _, low, high = _bounds(lines)
    own = [entry.minutes for entry in league.own if entry.minutes]
    low, high = min([low, *own]) / 1.3, max([high, *own]) * 1.3
    return LineChart(
        key="trend",
        title="Time to train over the rounds",
        alt="The fastest published result of each round in the closed division; the rounds from 1.0 on train to 0.720, "
        "round 0.7 trained to 0.712.",
        x=Axis(label="round", unit="count", low=-0.2, high=len(rounds) - 0.8, names=rounds),
        y=Axis(label="minutes", unit="minutes", low=low, high=high, log=True),
        lines=lines,
        marks=_own_mark(league, lambda entry: entry.minutes, min),
    )


def _trend_rates(league: League) -> Chart | None:
    series = [("fastest accelerator", lambda entry: entry.per_accelerator)]
    lines, rounds = _trend(league, series, max, "rate")
    if len(rounds) < 2 or not lines:
        return None
    _, _, _, high = _bounds(lines)
    own = [entry.per_accelerator for entry in league.own if entry.per_accelerator]
    high = max([high, *own]) * 1.08
    return LineChart(
        key="trend_per_accelerator",
        title="Sequences a second of one accelerator over the rounds",
        alt="The best published result of each round in the closed division, evaluations included.",
        x=Axis(label="round", unit="count", low=-0.2, high=len(rounds) - 0.8, names=rounds),
        y=Axis(label="sequences/s and accelerator", unit="rate", low=0.0, high=high),
        lines=lines,
        marks=_own_mark(league, lambda entry: entry.per_accelerator, max),
    )


def _ordered(row: list[str], order: list[str]) -> list[str]:
    """The cells of a row in another order of the columns."""
    cell = dict(zip(headings(), row, strict=True))
    return [cell[heading] for heading in order]


def build_page(league: League, top: int | None) -> str:
    """The page. Raises ReviewError where jinja2 is missing."""
    drawn, entries = charts(league), shown(league, top)
    rounds = sorted({entry.round for entry in league.others})
    order = [*_FIRST, *(heading for heading in headings() if heading not in _FIRST)]
    about = [f"{len(league.own)} of your own"] if league.own else []
    about += [f"{len(league.others)} published in rounds {', '.join(rounds)}"] if league.others else []
    return render(
        "league.html",
        title=f"{len(league.ranked)} results",
        subtitle=", ".join(about),
        standing=[f"{entry.system}: {league.standing(entry)}" for entry in league.own] if league.others else [],
        charts=[figure(chart, f"league-{chart.key}") for chart in drawn],
        most_lines=max((len(chart.lines) for chart in drawn if isinstance(chart, LineChart)), default=0),
        by=BY[league.by][0],
        columns=[{"label": heading, "number": heading in _NUMBERS} for heading in order],
        named=order.index("system"),
        rows=[{"own": league.is_own(entry), "cells": _ordered(cells(league, entry), order)} for entry in entries],
        explained=EXPLAINED if any(not one.checked and one.minutes is not None for one in entries) else "",
        rounds=rounds,
    )


def write_page(league: League, top: int | None, output: Path) -> None:
    """Writes the page whole. Raises ReviewError."""
    write_whole(output, build_page(league, top).encode("utf-8"))
