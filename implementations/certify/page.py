"""The page of an acceptance test: verdict, outliers with their evidence, heat maps of nodes and GPUs, timelines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from certify import charts
from certify.baseline import Baseline
from certify.expected import FIGURES, digits
from certify.figures import STEP, Measured
from certify.records import BURN_IN, LABELS, PROBES
from certify.verdict import WORDS, Certificate, chance_words
from review.logs.output import ReviewError, write_whole
from review.report.chart import LineChart

HEADLINES = {"pass": "Pass", "warn": "Pass, with warnings", "fail": "Fail"}
STATES = {"pass": "good", "warn": "warn", "fail": "bad"}
FULL = 0.10  # of the median: slower by so much has the full colour


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
        reasons=[],
        notes=[],
        numbers=[],
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
