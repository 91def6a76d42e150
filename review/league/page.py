"""The league as a self-contained HTML page: ranks, scaling, and the trend over the rounds."""

from __future__ import annotations

import re
from pathlib import Path

from review.league.entries import Entry
from review.league.ranking import BY, CELLS, EXPLAINED, League, size
from review.logs.output import ReviewError, write_whole
from review.report.chart import Axis, Chart, Mark, Point, Series, svg
from review.report.page import render
from review.results.score import UNVERIFIED

_MOST_CURVES = 6  # of the scaling chart
_FIRST = ("rank", "minutes", "/accel")  # columns that a phone shows without scrolling
_NODE = 8  # accelerators of the systems in the trend chart


def _scaling(league: League) -> Chart | None:
    """Minutes over accelerators of systems in several sizes: own ones, then the newest of each accelerator."""
    found = []
    for (round_, submitter, _, accelerator), entries in league.kinds.items():
        best: dict[float, Entry] = {}  # the fastest of each size
        for entry in entries:
            if entry.accelerators and entry.minutes:
                before = best.get(entry.accelerators, entry)
                best[entry.accelerators] = min(before, entry, key=lambda one: one.minutes or 0)
        if max(best, default=0) >= 2 * min(best, default=1):
            own = any(league.is_own(entry) for entry in entries)
            known = re.search(r"(TPU.)?\w*\d\w*", accelerator)  # short name: GB200, H100, TPU-v4
            label = ("yours, " if own else "") + (known[0] if known else accelerator[:16])
            whose = "" if accelerator.startswith(f"{submitter} ") else f"{submitter}, "
            found.append((own, round_, max(best), label, f"{whose}{accelerator}, {round_}", best))
    found.sort(key=lambda one: one[:3], reverse=True)
    farthest = {label: name for _, _, _, label, name, _ in reversed(found)}
    curves = [one for one in found if one[0] or farthest[one[3]] == one[4]][:_MOST_CURVES]
    if not curves:
        return None
    lines = []
    for index, (_, _, _, label, name, best) in enumerate(curves):
        points = [
            Point(
                x,
                one.minutes or 0.0,
                f"{name}: {x:g} accelerators ({size(one)}), {one.minutes:.4f} minutes",
            )
            for x, one in sorted(best.items())
        ]
        lines.append(Series(run=index, name=name, label=label, points=tuple(points)))
    counts = [point.x for line in lines for point in line.points]
    minutes = [point.y for line in lines for point in line.points]
    return Chart(
        key="scaling",
        title="Time to train over accelerators",
        alt=f"{len(lines)} systems in several sizes, for each accelerator the newest and largest; both axes are "
        "logarithmic, so perfect scaling is a straight line of slope -1.",
        x=Axis(label="accelerators", low=min(counts) / 1.1, high=max(counts) * 1.6, log=True),
        y=Axis(label="minutes", low=min(minutes) / 1.15, high=max(minutes) * 1.15, log=True),
        series=tuple(lines),
    )


def _trend(league: League) -> Chart | None:
    """The fastest closed result of each published round, of any size and of a single node."""
    closed = [entry for entry in league.others if entry.division == "closed" and entry.minutes]
    rounds = tuple(sorted({entry.round for entry in league.others if entry.division == "closed"}))
    if len(rounds) < 2 or not closed:
        return None
    lines = []
    for index, name in enumerate(("any size", f"{_NODE} accelerators")):
        points = []
        for place, round_ in enumerate(rounds):
            known = [
                one
                for one in closed
                if one.round == round_ and (not index or one.accelerators == _NODE)
            ]
            if known:
                top = min(known, key=lambda one: one.minutes or 0.0)
                tip = f"round {round_}: {top.minutes:,.4g} minutes, {top.submitter} {top.system} ({size(top)})"
                points.append(Point(float(place), top.minutes or 0.0, tip))
        if points:
            lines.append(Series(run=index, name=name, label=name, points=tuple(points)))
    own = {entry.minutes: f"yours: {entry.system[:40]}" for entry in league.own if entry.minutes}
    drawn = [*(point.y for line in lines for point in line.points), *own]
    return Chart(
        key="trend",
        title="Time to train over the rounds",
        alt="The fastest published result of each round in the closed division; rounds from 1.0 on train to "
        "0.720, round 0.7 to 0.712.",
        x=Axis(label="round", low=-0.2, high=len(rounds) - 0.8, names=rounds),
        y=Axis(label="minutes", low=min(drawn) / 1.3, high=max(drawn) * 1.3, log=True),
        series=tuple(lines),
        marks=(Mark(min(own), own[min(own)], "own"),) if own else (),
    )


def charts(league: League) -> list[Chart]:
    return [chart for chart in (_scaling(league), _trend(league)) if chart]


def build_page(league: League) -> str:
    """The page, own results on top. Raises ReviewError if jinja2 is missing."""
    drawn = charts(league)
    own = [one for one in league.ranked if league.is_own(one)]
    entries = [*own, *(one for one in league.ranked if not league.is_own(one))]
    rounds = sorted({entry.round for entry in league.others})
    order = sorted(
        CELLS, key=lambda one: _FIRST.index(one.heading) if one.heading in _FIRST else len(_FIRST)
    )
    about = [f"{len(own)} of your own"] if own else []
    if rounds:
        about.append(
            f"{len(league.others)} published in rounds {rounds[0]} to {rounds[-1]}, resubmissions in one row"
        )
    rows = [
        {"own": league.is_own(one), "cells": [CELLS[column](league, one) for column in order]}
        for one in entries
    ]
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
        explained=EXPLAINED
        if any(not one.checked and one.minutes is not None for one in entries)
        else "",
        rounds=rounds,
    )


def write_picture(league: League, output: Path) -> None:
    """Writes the scaling chart. Raises ReviewError if no system has results in several sizes."""
    drawn = _scaling(league)
    if drawn is None:
        raise ReviewError(f"{output}: no chart, since no system has results in several sizes")
    write_whole(output, svg(drawn, f"{len(league.ranked)} results of MLPerf Training BERT"))
