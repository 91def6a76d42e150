"""The league as a self-contained HTML page: ranks and scaling."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from review.league.entries import Entry
from review.league.ranking import BY, CELLS, EXPLAINED, League, apart_text, size
from review.logs.output import ReviewError, counted, write_whole
from review.report.chart import Axis, Chart, Point, Series
from review.report.page import render
from review.results.score import UNVERIFIED

_MOST_CURVES = 6  # of the scaling chart
_FIRST = ("rank", "minutes", "/accel")  # columns that a phone shows without scrolling
# Sorted by a number that the cell does not begin with; the round is the first of those named.
_SORTED_BY: dict[str, Callable[[Entry], object]] = {
    "round": lambda entry: entry.round,
    "nodes x accel.": lambda entry: entry.accelerators,
}
# The first click shows the greatest on top.
_MORE_IS_BETTER = "seq/s", "/accel", "efficiency"


def scaling(league: League) -> Chart | None:
    """Minutes over accelerators: the fastest result of each size, of each accelerator of the widest
    reach.

    Own results make curves of their own, which come first; published ones are those of the closed
    division.
    """
    systems: dict[tuple[str, ...], list[Entry]] = {}
    for entry in league.own:
        systems.setdefault(entry.kind[1:], []).append(entry)
    curves = [
        (True, f"yours, {_short_name(ones[0])}", _best_by_size(ones))
        for ones in systems.values()
    ]
    closed = [
        entry
        for entry in league.others
        if entry.division == "closed" and entry.accelerator
    ]
    for name in dict.fromkeys(map(_short_name, closed)):
        same = [entry for entry in closed if _short_name(entry) == name]
        curves.append((False, name, _best_by_size(same)))

    def reach(curve: tuple[bool, str, dict[float, Entry]]) -> float:
        sizes = curve[2]
        return max(sizes) / min(sizes) if sizes else 0.0

    # Only what at least doubles in size shows how a system scales; one's own are points among them.
    if not any(reach(curve) >= 2 for curve in curves):
        return None
    curves = [curve for curve in curves if reach(curve) >= (1 if curve[0] else 2)]
    curves.sort(key=lambda curve: (curve[0], reach(curve)), reverse=True)
    lines = []
    # More lines could not be told apart.
    for index, (_, name, best) in enumerate(curves[:_MOST_CURVES]):
        points = [
            Point(x, entry.minutes or 0.0, _tip(entry))
            for x, entry in sorted(best.items())
        ]
        lines.append(Series(run=index, name=name, label=name, points=tuple(points)))
    counts = [point.x for line in lines for point in line.points]
    minutes = [point.y for line in lines for point in line.points]
    # Beside every picture of a result, by MLCommons' guidelines.
    whose = ", yours unverified" if any(curve[0] for curve in curves) else ""
    return Chart(
        key="scaling",
        title="Time to train over accelerators",
        alt=f"{counted(len(lines), 'accelerator')} of the widest reach{whose}, and of each size the fastest "
        "result in the closed division, of any submitter and round; both axes are logarithmic, so "
        "perfect scaling is a straight line of slope -1.",
        x=Axis(
            label="accelerators",
            low=min(counts) / 1.1,
            high=max(counts) * 1.6,
            log=True,
        ),
        y=Axis(
            label="minutes",
            low=min(minutes) / 1.15,
            high=max(minutes) * 1.15,
            log=True,
        ),
        series=tuple(lines),
    )


def _tip(entry: Entry) -> str:
    whose = f"{entry.submitter}, {entry.accelerator}, {entry.round}"
    return f"{whose}: {counted(entry.accelerators or 0, 'accelerator')} ({size(entry)}), {entry.minutes:.4f} minutes"


def _short_name(entry: Entry) -> str:
    """GB200, H100 or TPU-v4 of an accelerator's name; else its first letters."""
    known = re.search(r"(TPU.)?\w*\d\w*", entry.accelerator)
    return known[0] if known else entry.accelerator[:16]


def _best_by_size(entries: Iterable[Entry]) -> dict[float, Entry]:
    """The fastest result of each number of accelerators."""
    best: dict[float, Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry.minutes or 0):
        if entry.accelerators and entry.minutes:
            best.setdefault(entry.accelerators, entry)
    return best


def build_page(league: League) -> str:
    """The page, own results on top. Raises ReviewError if jinja2 is missing."""
    drawn = scaling(league)
    rounds = sorted({entry.round for entry in league.others})
    first = [column for name in _FIRST for column in CELLS if column.heading == name]
    own = [entry for entry in league.ranked if league.is_own(entry)]
    about = [f"{len(own)} of your own"] if own else []
    if rounds:
        span = f"{rounds[0]} to {rounds[-1]}, resubmissions in one row"
        about.append(f"{len(league.others)} published in rounds {span}")
    return render(
        "league.html",
        script="league.js",
        title=f"{len(league.ranked)} results",
        subtitle=", ".join(about),
        standing=[f"{one.system}: {league.standing(one)}" for one in own if rounds],
        apart=[f"{entry.system}: {apart_text(entry)}" for entry in league.apart],
        more_is_better=_MORE_IS_BETTER,
        unverified=UNVERIFIED,
        chart=drawn,
        most_lines=len(drawn.series) if drawn else 0,
        by=BY[league.by][0],
        columns=[*first, *(column for column in CELLS if column not in first)],
        league=league,
        # One's own rows first, whatever their rank: that is what the reader looks for.
        entries=sorted(league.ranked, key=lambda entry: not league.is_own(entry)),
        cells=CELLS,
        sorted_by=_SORTED_BY,
        explained=EXPLAINED,
        rounds=rounds,
    )


def write_picture(league: League, output: Path) -> None:
    """Writes the scaling chart. Raises ReviewError if no system has results in several sizes."""
    drawn = scaling(league)
    if drawn is None:
        why = "no chart, since no system has results in several sizes"
        raise ReviewError(f"{output}: {why}")
    whose = f", {len(league.own)} of them unverified" if league.own else ""
    subject = f"{len(league.ranked)} results of MLPerf Training BERT{whose}"
    write_whole(output, render("picture.html", chart=drawn, subject=subject))
