"""HTML page of an acceptance test: verdict, reasons, numbers, heat maps of nodes and GPUs, telemetry over time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from review.acceptance.figures import STEP, digits
from review.acceptance.records import Records, median
from review.acceptance.schema import (
    ALL_NODES,
    COPIES,
    CPUS,
    LABELS,
    NOBODY,
    PROBES,
    TABLES,
    TOOLS,
    UNITS,
    Columns,
)
from review.acceptance.verdict import Certificate
from review.logs.output import ReviewError, write_whole
from review.report.chart import Axis, Chart, Point, Series

HEADLINES = {"pass": "Pass", "warn": "Pass, with warnings", "fail": "Fail"}
SOFTWARE = ": the software only, the test ran on CPUs"
STYLES = {"pass": "good", "warn": "warn", "fail": "bad"}
FULL = 0.10  # excess over the median with full colour
# Lines of a chart, points of a line, maps of each kind of copy.
MAX_LINES, MAX_POINTS, MAX_MAPS = 10, 80, 4
CLOCKS = TABLES["timelines"]


def write_page(found: Certificate, output: Path) -> None:
    """Raises ReviewError."""
    from review.report.page import render

    if output.is_dir():
        raise ReviewError(f"{output} is a folder: name a file, such as {output / 'certify.html'}")
    records = found.records
    devices = ", ".join(sorted({place.device for place in records.places.values()}))
    rates = {
        one.name: f"{digits(statistics.median(one.values.values()))} {one.unit}"
        for one in found.figures
        if one.name in PROBES or one.name in COPIES
    }
    of_ranks = [name for name in records.probed if name in PROBES or name in COPIES]
    probes = {
        name: np.array([median(rounds) for rounds in records.probe(name)]) for name in of_ranks
    }
    # Charts of too many lines keep those of the accused.
    accused = [one.name for one in found.why()]
    charts = curves(records, accused) + timelines(records, accused)
    page = render(
        "certify.html",
        title=f"Acceptance test of {records.folder.name}",
        subtitle=f"{len(records.places)} ranks on {len(records.nodes)} nodes · {devices}",
        state=STYLES[found.state],
        headline=HEADLINES[found.state] + SOFTWARE * found.on_cpus,
        reasons=found.reasons(),
        standing=str(found.standing),
        notes=found.notes,
        tested=found.tested,
        bought=found.bought,
        outliers=[vars(one) | {"style": STYLES[one.state]} for one in found.why()],
        numbers=_numbers(found),
        maps=[
            _map(records, name, seconds, rates.get(name, ""))
            for name, seconds in (found.seconds | probes).items()
        ]
        + pairs(records),
        figures=charts,
        most_lines=max((len(chart.series) for chart in charts), default=0),
    )
    write_whole(output, page)


def _numbers(found: Certificate) -> list[dict[str, str]]:
    """Every number with its limit, and whether it is within it.

    A stage has a row for its seconds, which are compared between ranks, and one for its rate, which a config expects; a
    probe has one row for both.
    """
    short = {one.figure: STYLES[one.state] for one in found.reached if one.state != "pass"}
    slow = {finding.stage: "bad" for finding in found.findings}
    rows = []
    for one in found.figures:
        low, high = one.shown
        compared = one.unit == STEP or one.name in PROBES | TOOLS or one.name not in UNITS
        state = (slow.get(one.name, "") if compared else "") or (
            "" if one.unit == STEP else short.get(one.name, "")
        )
        row = {
            "what": one.label,
            "low": low,
            "high": high,
            "unit": one.unit,
            "limit": one.limit,
            "state": state,
        }
        rows.append(row | {"source": " and ".join(one.sources)})
    return rows


def _map(records: Records, stage: str, seconds: np.ndarray, rate: str) -> dict[str, Any]:
    """Heat map with a row per node and a column per GPU; a cell's heat is its excess over the median.

    seconds: by rank; rate: median rate with its unit, if there is one.
    """
    center = float(np.nanmedian(seconds))
    rows: dict[str, list[dict[str, str]]] = {node: [] for node in records.nodes}
    for rank, place in records.places.items():
        excess = float(seconds[rank] / center - 1)
        if not math.isnan(excess):
            # No sign before a zero.
            shown = f"{100 * excess:+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")
            rows[place.node].append(
                _cell(shown, excess, f"{place.name}: {seconds[rank] * 1e3:,.2f} ms, {excess:+.1%}")
            )
    title, middle = LABELS[stage], ", ".join(filter(None, (f"{center * 1e3:,.2f} ms", rate)))
    return {
        "title": title,
        "median": middle,
        "rows": rows,
        "width": max(map(len, rows.values())),
        "head": "Node",
    }


def _cell(text: str, excess: float, tip: str) -> dict[str, str]:
    heat, side = min(abs(excess) / FULL, 1.0), "slow" if excess >= 0 else "quick"
    return {"text": text, "heat": f"{heat:.2f}", "side": side, "tip": tip}


def pairs(records: Records) -> list[dict[str, Any]]:
    """Heat maps of copies between a node's GPUs, for the slowest nodes; a row's GPU reads from the columns'."""
    found = []
    for name in COPIES:
        rows = records.measured(name)
        if not len(rows["rank"]) or (rows["partner"] == NOBODY).all():
            continue
        rates = rows["amount"] / rows["seconds"] / 1e9
        typical = float(np.median(rates))
        nodes = np.array([records.places[rank].node for rank in rows["rank"].tolist()])
        for node in sorted({*nodes.tolist()}, key=lambda node: float(rates[nodes == node].min()))[
            :MAX_MAPS
        ]:
            cells: dict[str, list[dict[str, str]]] = {}
            for rank in np.unique(rows["rank"][nodes == node]).tolist():
                own = rows["rank"] == rank
                gpu = records.places[rank].local_rank
                for peer in range(max(int(rows["partner"][nodes == node].max()), gpu) + 1):
                    # A GPU has no copy to itself: an empty cell.
                    rate = median(rates[own & (rows["partner"] == peer)])
                    # The excess of the time, as in the other maps, though rates are shown.
                    text, heat = (
                        ("", 0.0) if math.isnan(rate) else (f"{rate:.0f}", typical / rate - 1)
                    )
                    tip = f"GPU {gpu} from GPU {peer} of {node}: {rate:.1f} GB/s" if text else ""
                    cells.setdefault(f"{gpu}", []).append(_cell(text, heat, tip))
            about = {
                "title": f"{LABELS[name]}, {node}",
                "median": f"{typical:,.0f} GB/s",
                "head": "GPU",
            }
            found.append({**about, "rows": cells, "width": len(cells)})
    return found


def curves(records: Records, accused: Sequence[str] = ()) -> list[Chart]:
    """Bus bandwidth over message size of each collective, one line per node."""
    charts = []
    for name in TOOLS:
        rows = records.measured(name)
        if name in COPIES or not len(rows["rank"]):
            continue
        rates = rows["amount"] / rows["seconds"] / 1e9
        lines: dict[str, list[tuple[float, float, str]]] = {}
        # Of a collective, one rank has the rows of its node.
        for rank in np.unique(rows["rank"]).tolist():
            who = "all ranks" if name.endswith(ALL_NODES) else f"node {records.places[rank].node}"
            for size in np.unique(rows["amount"][rows["rank"] == rank]).tolist():
                rate = float(np.median(rates[(rows["rank"] == rank) & (rows["amount"] == size)]))
                lines.setdefault(who, []).append(
                    (size, rate, f"{who}: {rate:,.4g} GB/s at {size:,.0f} bytes")
                )
        # At the largest size, which comes last.
        peaks = {who: points[-1][1] for who, points in lines.items()}
        words = f"Bus bandwidth by size, median of the rounds. {_extremes(peaks)}"
        title = LABELS[name][0].upper() + LABELS[name][1:]
        series = [(who, lines[who]) for who in _chosen(peaks, accused)]
        charts.append(
            _chart(name.replace("_", "-"), title, words, "bytes", "GB/s", series, log=True)
        )
    return charts


def _chosen(levels: Mapping[str, float], accused: Sequence[str]) -> list[str]:
    """All names, or if too many for a chart, the accused and the extremes."""
    if len(levels) <= MAX_LINES:
        return [*levels]
    others = [name for name in sorted(levels, key=lambda name: levels[name]) if name not in accused]
    # The accused are always drawn; the others share the room that is left, at least two of them.
    room = max(MAX_LINES - len(levels) + len(others), 2)
    return [
        name
        for name in levels
        if name in (*accused, *others[: room // 2], *others[-(room - room // 2) :])
    ]


def _extremes(levels: Mapping[str, float]) -> str:
    low, high = (
        min(levels, key=lambda name: levels[name]),
        max(levels, key=lambda name: levels[name]),
    )
    words = f"{low} has the lowest median, {high} the highest."
    if levels[low] == levels[high]:
        words = f"All have the same median, {levels[low]:,.0f}."
    if len(levels) > MAX_LINES:
        words += f" The accused and the extremes of {len(levels)} are shown."
    return words


def timelines(records: Records, accused: Sequence[str] = ()) -> list[Chart]:
    """Clock, power and temperature by device over the test; if too many, of the accused and the extremes."""
    ranks = {(place.node, place.local_rank): place.name for place in records.places.values()}
    series: dict[str, Columns] = {}
    for node, table in records.telemetry.items():
        for device in np.unique(table["device"]).tolist():
            chosen = table["device"] == device
            name = (
                f"CPUs of {node}"
                if device == CPUS
                else ranks.get((node, device), f"GPU {device} of {node}")
            )
            series[name] = {field: column[chosen] for field, column in table.items()}
    charts = []
    for field, (key, title, unit) in CLOCKS.items():
        level = {
            name: median(one[field])
            for name, one in series.items()
            if not np.isnan(one[field]).all()
        }
        begin = min((float(series[name]["time"].min()) for name in level), default=0.0)
        lines = []
        for name in _chosen(level, accused):
            one = series[name]
            # Every n-th sample: a burn-in of days has no more points than a short test.
            step = max(1, math.ceil(len(one["time"]) / MAX_POINTS))
            minutes, values = (one["time"][::step] - begin) / 60, one[field][::step]
            tips = (
                f"{name}: {y:,.0f} {unit} at {x:.1f} minutes"
                for x, y in zip(minutes, values, strict=True)
            )
            lines.append((name, list(zip(minutes.tolist(), values.tolist(), tips, strict=True))))
        if lines:
            words = f"{title} of each device, in {unit}. {_extremes(level)}"
            charts.append(_chart(key, title, words, "minutes", unit, lines))
    return charts


def _chart(
    key: str,
    title: str,
    alt: str,
    x: str,
    y: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float, str]]]],
    log: bool = False,
) -> Chart:
    """A chart of named lines of (x, y, tip); points whose y is nan are left out."""
    lines = tuple(
        Series(
            run=run,
            name=name,
            points=tuple(Point(*point) for point in points if not math.isnan(point[1])),
        )
        for run, (name, points) in enumerate(series)
    )
    xs, ys = ([getattr(point, axis) for line in lines for point in line.points] for axis in "xy")
    # Equal values still need an axis with a height.
    room = 0.08 * (max(ys) - min(ys)) or max(abs(max(ys)), 1) * 0.05
    return Chart(
        key=key,
        title=title,
        alt=alt,
        x=Axis(label=x, low=min(xs), high=max(xs), log=log),
        y=Axis(label=y, low=min(ys) - room, high=max(ys) + room),
        series=lines,
    )
