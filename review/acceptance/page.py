"""HTML page of an acceptance test: verdict, reasons, numbers, heat maps of nodes and GPUs,
telemetry over time.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from review.acceptance.faults import devices
from review.acceptance.figures import GBPS, STEP, Measured, digits
from review.acceptance.journal import STYLES
from review.acceptance.records import Records, median
from review.acceptance.schema import (
    COPIES,
    LABELS,
    PROBES,
    STAGES,
    TABLES,
    UNITS,
    Columns,
)
from review.acceptance.verdict import Certificate
from review.logs.output import write_whole
from review.report.chart import Axis, Chart, Point, Series

HEADLINES = {"pass": "Pass", "warn": "Pass, with warnings", "fail": "Fail"}
SOFTWARE = ": the software only, the test ran on CPUs"
FULL = 0.10  # excess over the median with full colour
MAX_LINES, MAX_POINTS = 10, 80  # of a chart, of a line


def write_page(certificate: Certificate, output: Path) -> None:
    """Raises ReviewError."""
    from review.report.page import render

    records = certificate.records
    devices = ", ".join(sorted({info.device for info in records.ranks.values()}))
    rates = {
        figure.name: f"{digits(statistics.median(figure.values.values()))} {figure.unit}"
        for figure in certificate.figures
        if figure.name in PROBES | COPIES
    }
    probes = {
        name: np.array([median(rounds) for rounds in records.probe(name)])
        for name in records.probed
        if name in PROBES | COPIES
    }
    # Charts of too many lines keep those of the accused.
    charts = timelines(records, [reason.name for reason in certificate.why()])
    page = render(
        "certify.html",
        title=f"Acceptance test of {records.folder.name}",
        subtitle=f"{records.extent} · {devices}",
        state=STYLES[certificate.state],
        headline=HEADLINES[certificate.state] + SOFTWARE * records.on_cpus,
        reasons=certificate.reasons(),
        standing=str(certificate.standing),
        notes=certificate.notes,
        tested=certificate.tested,
        inventory=certificate.inventory,
        highest=certificate.highest,
        styles=STYLES,
        outliers=certificate.why(),
        numbers=_numbers(certificate),
        maps=[
            _map(records, name, seconds, rates.get(name, ""))
            for name, seconds in (certificate.seconds | probes).items()
        ],
        figures=charts,
        most_lines=max((len(chart.series) for chart in charts), default=0),
    )
    write_whole(output, page)


def _numbers(certificate: Certificate) -> list[tuple[Measured, str]]:
    """Every number with its limit, and the style of its state.

    A stage has a row for its seconds, which are compared between ranks, and one for its rate, which
    a config expects.
    """
    marks = {
        (reached.figure, UNITS[reached.figure]): STYLES[reached.state]
        for reached in certificate.reached
        if reached.state != "pass"
    }
    for finding in certificate.findings:
        unit = STEP if finding.stage in STAGES else UNITS.get(finding.stage, GBPS)
        marks[finding.stage, unit] = "bad"
    return [
        (figure, marks.get((figure.name, figure.unit), ""))
        for figure in certificate.figures
    ]


def _map(
    records: Records, stage: str, seconds: np.ndarray, rate: str
) -> dict[str, Any]:
    """Heat map with a row per node and a column per GPU; a cell's heat is its excess over the
    median.

    seconds: by rank; rate: median rate with its unit, if there is one.
    """
    # nan where a rank was not measured.
    center = float(np.nanmedian(seconds))
    rows: dict[str, list[dict[str, str]]] = {node: [] for node in records.nodes}
    for rank, info in records.ranks.items():
        excess = float(seconds[rank] / center - 1)
        if not math.isnan(excess):
            cell = {
                # No sign before a zero.
                "text": f"{100 * excess:+.1f}" if abs(excess) >= 5e-4 else "0.0",
                "heat": f"{min(abs(excess) / FULL, 1.0):.2f}",
                "side": "slow" if excess >= 0 else "quick",
                "tip": f"{info.name}: {seconds[rank] * 1e3:,.2f} ms, {excess:+.1%}",
            }
            rows[info.node].append(cell)
    middle = ", ".join(filter(None, (f"{center * 1e3:,.2f} ms", rate)))
    # Nodes may hold different numbers of GPUs.
    width = max(map(len, rows.values()))
    return {"title": LABELS[stage], "median": middle, "rows": rows, "width": width}


def timelines(records: Records, accused: Sequence[str] = ()) -> list[Chart]:
    """Clock, power and temperature by device over the test; if too many, of the accused and some
    others.
    """
    series, charts = dict(devices(records)), []
    for field, (key, title, unit) in TABLES["timelines"].items():
        medians = {name: median(columns[field]) for name, columns in series.items()}
        known = {
            name: level for name, level in medians.items() if not math.isnan(level)
        }
        if known:
            # Stable: those accused first, the others in the order of ranks.
            order = sorted(known, key=lambda name: name not in accused)
            shown = {name: series[name] for name in order[:MAX_LINES]}
            low, high = min(known.values()), max(known.values())
            message = f"{title} of {len(shown)} of {len(known)} devices, in {unit}: medians {low:,.0f} to {high:,.0f}."
            charts.append(_timeline(key, title, message, unit, field, shown))
    return charts


def _timeline(
    key: str,
    title: str,
    alt: str,
    unit: str,
    field: str,
    devices: Mapping[str, Columns],
) -> Chart:
    """A line for each device; points without a value are left out."""
    begin = min(float(columns["time"].min()) for columns in devices.values())
    lines = []
    for run, (name, columns) in enumerate(devices.items()):
        # Every n-th sample: a burn-in of days has no more points than a short test.
        step = max(1, math.ceil(len(columns["time"]) / MAX_POINTS))
        minutes = ((columns["time"][::step] - begin) / 60).tolist()
        points = tuple(
            Point(x, y, f"{name}: {y:,.0f} {unit} at {x:.1f} minutes")
            for x, y in zip(minutes, columns[field][::step].tolist(), strict=True)
            if not math.isnan(y)
        )
        lines.append(Series(run=run, name=name, points=points))
    xs, ys = (
        [getattr(point, axis) for line in lines for point in line.points]
        for axis in "xy"
    )
    # Equal values still need an axis with a height.
    room = 0.08 * (max(ys) - min(ys)) or max(abs(max(ys)), 1) * 0.05
    return Chart(
        key=key,
        title=title,
        alt=alt,
        x=Axis(label="minutes", low=min(xs), high=max(xs)),
        y=Axis(label=unit, low=min(ys) - room, high=max(ys) + room),
        series=tuple(lines),
    )
