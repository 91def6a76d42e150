"""The league as one self-contained HTML page: ranks, scaling, and the trend over the rounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from review.league.entries import Entry
from review.league.ranking import BY, COLUMNS, EXPLAINED, League, cells, size
from review.logs.output import ReviewError, write_whole
from review.report.chart import Axis, Chart, Mark, Point, Series, svg
from review.report.page import render
from review.results.score import UNVERIFIED

_MOST_CURVES = 6  # of the scaling charts
_FIRST = ("rank", "minutes", "/accel")  # columns that a phone shows without scrolling
_NODE = 8  # accelerators of the systems whose trend is drawn
_Value = Callable[[Entry], "float | None"]


class _Curve(NamedTuple):
    """A system that was measured in several sizes: the fastest of each, and whether it is the user's own."""

    name: str
    entries: list[Entry]
    own: bool

    @property
    def accelerator(self) -> str:
        """In short: GB200, H100, TPU-v4."""
        known = re.search(r"(TPU.)?\w*\d\w*", name := self.entries[0].accelerator)
        return ("yours, " if self.own else "") + (known[0] if known else name[:16])


def _curves(league: League) -> list[_Curve]:
    """The user's own, then of each accelerator the newest, of these the one that reaches farthest."""
    found = []
    for (round_, submitter, _, accelerator), entries in league.kinds.items():
        best: dict[float, Entry] = {}
        for entry in entries:
            if entry.accelerators and entry.minutes:
                before = best.get(entry.accelerators, entry)
                best[entry.accelerators] = min(before, entry, key=lambda one: one.minutes or 0)
        if max(best, default=0) >= 2 * min(best, default=1):
            whose = "" if accelerator.startswith(f"{submitter} ") else f"{submitter}, "
            own = any(league.is_own(entry) for entry in entries)
            found.append(_Curve(f"{whose}{accelerator}, {round_}", [best[count] for count in sorted(best)], own))
    found.sort(key=lambda one: (one.own, one.entries[0].round, one.entries[-1].accelerators), reverse=True)
    first = {curve.accelerator: curve for curve in reversed(found)}
    return [curve for curve in found if curve.own or curve is first[curve.accelerator]][:_MOST_CURVES]


def _lines(curves: Sequence[_Curve], value: _Value, form: str) -> tuple[Series, ...]:
    """A line of each system over its accelerators. ``form`` formats a value."""
    lines = []
    for index, curve in enumerate(curves):
        points = [
            Point(x := entry.accelerators or 0.0, y, f"{curve.name}: {x:g} accelerators ({size(entry)}), {form % y}")
            for entry in curve.entries
            if (y := value(entry)) is not None
        ]
        lines.append(Series(run=index, name=curve.name, label=curve.accelerator, points=tuple(points)))
    return tuple(lines)


def _scaling(league: League) -> list[Chart]:
    """Minutes and efficiency over the number of accelerators."""
    curves = _curves(league)
    if not curves:
        return []
    times = _lines(curves, lambda entry: entry.minutes, "%.4f minutes")
    shares = _lines(curves, lambda entry: 100 * (league.efficiency(entry) or 0), "%.1f%%")
    counts = [point.x for line in times for point in line.points]
    minutes, percent = ([point.y for line in lines for point in line.points] for lines in (times, shares))
    x = Axis(label="accelerators", low=min(counts) / 1.1, high=max(counts) * 1.6, log=True)
    return [
        Chart(
            key="scaling",
            title="Time to train over accelerators",
            alt=f"{len(times)} systems in several sizes, of each accelerator the newest that reaches farthest; both "
            "axes by factors, so that a straight line that falls one to one is perfect scaling.",
            x=x,
            y=Axis(label="minutes", low=min(minutes) / 1.15, high=max(minutes) * 1.15, log=True),
            series=times,
        ),
        Chart(
            key="efficiency",
            title="Efficiency over accelerators",
            alt="Sequences a second of one accelerator against the smallest system of its kind, in percent.",
            x=x,
            y=Axis(label="% of the smallest system", low=min(*percent, 90.0) - 5, high=max(*percent, 100.0) + 5),
            series=shares,
            marks=(Mark(100.0, "perfect scaling", "reference"),),
        ),
    ]


def _trends(league: League) -> list[Chart]:
    """The fastest closed result of each published round, and the fastest accelerator."""
    closed = [entry for entry in league.others if entry.division == "closed"]
    rounds = tuple(sorted({entry.round for entry in closed}))
    if len(rounds) < 2:
        return []

    def lines(unit: str, best: Callable[[Iterable[float]], float], **values: _Value) -> tuple[Series, ...]:
        found = []
        for index, (name, value) in enumerate(values.items()):
            points = []
            for place, round_ in enumerate(rounds):
                known = {amount: one for one in reversed(closed) if one.round == round_ and (amount := value(one))}
                if known:
                    top = best(known)
                    tip = f"round {round_}: {top:,.4g} {unit}, {known[top].submitter} {known[top].system}"
                    points.append(Point(float(place), top, f"{tip} ({size(known[top])})"))
            if points:
                found.append(Series(run=index, name=name, label=name, points=tuple(points)))
        return tuple(found)

    def own(value: _Value, best: Callable[[Iterable[float]], float]) -> tuple[Mark, ...]:
        found = {known: entry.system for entry in league.own if (known := value(entry))}
        return (Mark(best(found), f"yours: {found[best(found)][:40]}", "own"),) if found else ()

    charts = []
    x = Axis(label="round", low=-0.2, high=len(rounds) - 0.8, names=rounds)
    sizes: dict[str, _Value] = {
        "any size": lambda entry: entry.minutes,
        f"{_NODE} accelerators": lambda entry: entry.minutes if entry.accelerators == _NODE else None,
    }
    times, marks = lines("minutes", min, **sizes), own(lambda entry: entry.minutes, min)
    if times:
        drawn = [*(point.y for line in times for point in line.points), *(e.minutes for e in league.own if e.minutes)]
        charts.append(
            Chart(
                key="trend",
                title="Time to train over the rounds",
                alt="The fastest published result of each round in the closed division; the rounds from 1.0 on train "
                "to 0.720, round 0.7 trained to 0.712.",
                x=x,
                y=Axis(label="minutes", low=min(drawn) / 1.3, high=max(drawn) * 1.3, log=True),
                series=times,
                marks=marks,
            )
        )
    fastest: dict[str, _Value] = {"fastest": lambda entry: entry.per_accelerator}
    rates, marks = lines("sequences/s", max, **fastest), own(lambda entry: entry.per_accelerator, max)
    if rates:
        high = max([*(point.y for point in rates[0].points), *(mark.value for mark in marks)])
        charts.append(
            Chart(
                key="trend_per_accelerator",
                title="Sequences a second of one accelerator over the rounds",
                alt="The best published result of each round in the closed division, evaluations included.",
                x=x,
                y=Axis(label="sequences/s and accelerator", low=0.0, high=high * 1.08),
                series=rates,
                marks=marks,
            )
        )
    return charts


def charts(league: League) -> list[Chart]:
    """Scaling in minutes and in efficiency, and the trend over rounds, as far as there is data for them."""
    return [*_scaling(league), *_trends(league)]


def build_page(league: League) -> str:
    """The page, one's own results on top. Raises ReviewError if jinja2 is missing."""
    drawn = charts(league)
    own = [one for one in league.ranked if league.is_own(one)]
    entries = [*own, *(one for one in league.ranked if not league.is_own(one))]
    rounds = sorted({entry.round for entry in league.others})
    order = sorted(COLUMNS, key=lambda one: _FIRST.index(one.heading) if one.heading in _FIRST else len(_FIRST))
    about = [f"{len(own)} of your own"] if own else []
    if rounds:
        about.append(f"{len(league.others)} published in rounds {rounds[0]} to {rounds[-1]}, the same logs in one row")
    rows = []
    for entry in entries:
        cell = dict(zip(COLUMNS, cells(league, entry), strict=True))
        rows.append({"own": league.is_own(entry), "cells": [cell[column] for column in order]})
    return render(
        "league.html",
        script="league.js",
        title=f"{len(league.ranked)} results",
        subtitle=", ".join(about),
        standing=[f"{one.system}: {league.standing(one)}" for one in own] if league.others else [],
        unverified=UNVERIFIED,
        charts=drawn,
        most_lines=max((len(chart.series) for chart in drawn), default=0),
        by=BY[league.by][0],
        columns=order,
        rows=rows,
        explained=EXPLAINED if any(not one.checked and one.minutes is not None for one in entries) else "",
        rounds=rounds,
    )


def write_page(league: League, output: Path) -> None:
    """Writes the page whole. Raises ReviewError."""
    write_whole(output, build_page(league).encode("utf-8"))


def write_picture(league: League, output: Path) -> None:
    """Writes the chart of times over accelerators. Raises ReviewError where no system was measured in several sizes."""
    drawn = _scaling(league)
    if not drawn:
        raise ReviewError(f"{output}: no system of these results was measured in several sizes, so there is no chart")
    write_whole(output, svg(drawn[0], f"{len(league.ranked)} results of MLPerf Training BERT"))
