"""The page of an acceptance test: verdict, outliers with their evidence, heat maps of nodes and GPUs, timelines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from review.certify import charts
from review.certify.baseline import Baseline
from review.certify.records import LABELS
from review.certify.verdict import WORDS, Certificate, chance_words
from review.logs.findings import ReviewError
from review.logs.output import write_whole
from review.report.chart import LineChart

HEADLINES = {"pass": "Pass", "warn": "Pass, with warnings", "fail": "Fail"}
STATES = {"pass": "good", "warn": "warn", "fail": "bad"}
FULL = 0.10  # of the median: slower by so much has the full colour


def write_page(found: Certificate, output: Path) -> None:
    """Writes the page of a test. Raises ReviewError."""
    records = found.records
    accused = [*(one.name for one in found.findings), *(one.name for one in found.faults)]
    _write(
        output,
        title=f"Acceptance test of {records.folder.name}",
        subtitle=f"{len(records.places)} ranks on {len(records.nodes)} nodes · {', '.join(_devices(found))}",
        state=STATES[found.state],
        headline=HEADLINES[found.state],
        notes=found.notes,
        outliers=_outliers(found),
        maps=[_map(found, stage, values) for stage, values in _levels(found).items()],
        figures=charts.timelines(records, accused),
    )


def write_drift(baselines: Sequence[Baseline], output: Path) -> None:
    """Writes the page of how baselines drift. Raises ReviewError."""
    _write(
        output,
        title="Baselines",
        subtitle=" · ".join(f"{one.name} ({one.saved[:10]})" for one in baselines),
        state="good",
        headline=f"{len(baselines)} baselines",
        notes=[],
        outliers=[],
        maps=[],
        figures=[charts.drift(baselines)],
    )


def _write(output: Path, *, figures: Sequence[LineChart], **content: Any) -> None:
    """Fills in the template. Raises ReviewError where jinja2 is missing or the file cannot be written."""
    from review.report.page import figure, render

    if output.is_dir():
        raise ReviewError(f"{output} is a folder: name the page itself, such as {output / 'certify.html'}")
    shown = [figure(chart, chart.key) for chart in figures]
    most = max((len(chart.lines) for chart in figures), default=0)
    page = render("certify.html", figures=shown, most_lines=most, **content)
    write_whole(output, page.encode("utf-8"))


def _devices(found: Certificate) -> list[str]:
    return sorted({place.device for place in found.records.places.values()})


def _outliers(found: Certificate) -> list[dict[str, str]]:
    rows = [
        {
            "name": one.name,
            "state": "bad",
            "what": "silent data corruption",
            "stage": LABELS[one.stage],
            "excess": "",
            "sure": "certain",
            "evidence": f"step {one.step + 1} of round {one.round + 1}",
        }
        for one in found.corrupt
    ]
    for finding in found.findings:
        also = f"also: {', '.join(finding.also)}" if finding.also else ""
        rows.append(
            {
                "name": finding.name,
                "state": "bad",
                "what": WORDS[finding.what],
                "stage": LABELS[finding.stage],
                "excess": f"+{finding.outlier.excess:.1%}",
                "sure": f"{finding.outlier.measure}; {chance_words(finding.outlier.chance)}",
                "evidence": "; ".join(text for text in (finding.evidence, also) if text),
            }
        )
    for fault in found.faults:
        rows.append(
            {
                "name": fault.name,
                "state": STATES[fault.state],
                "what": "hardware",
                "stage": "",
                "excess": "",
                "sure": "counted",
                "evidence": fault.reason,
            }
        )
    return rows


def _levels(found: Certificate) -> dict[str, dict[int, float]]:
    """Seconds by stage or part of the load, and rank."""
    records = found.records
    probes = {
        name: {rank: statistics.median(times) for rank, times in records.probe(name).items() if times}
        for name in records.probed
    }
    return found.seconds | probes


def _map(found: Certificate, stage: str, values: dict[int, float]) -> dict[str, Any]:
    """A heat map: a row a node, a column a GPU; a cell's heat is how much slower than the median it is."""
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
    return {"title": LABELS[stage], "median": f"{center * 1e3:,.2f} ms", "rows": rows, "width": width}
