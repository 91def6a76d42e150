"""What the page says of a result, in words and cells; the templates lay it out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from review.logs.mllog import number, text
from review.logs.output import ERROR, WARNING, Finding, rate_text
from review.report.chart import COLOURS
from review.report.plots import UNCONVERGED
from review.results.run import HYPERPARAMETERS, Run
from review.results.score import REQUIRED_RUNS, UNVERIFIED, Result
from review.results.table import cells, columns
from review.rulebook import rcp
from review.verdict.checking import Checked, energy_obstacles, groups, places, shortened, subject, with_places

MOST_REASONS = 4  # of the verdict; the findings have them all
_MOST_LINES = 60  # of a log's excerpt
_LONGEST_LINE = 600  # characters of a log line that an excerpt shows
_OF_REFERENCE = {"opt_lamb_epsilon": "opt_epsilon"}  # our key to the one of the reference points, where they differ


def verdict(result: Result, checked: Checked | None) -> dict[str, Any]:
    """The page's first line: does the result count, and why not. ``checked``: what `check` found, if it ran."""
    detail = "There is no olympic score yet."
    if result.official and (checked is None or checked.passed()):
        division = "" if result.division == "closed" else f" in the {text(result.division)} division"
        detail = "The mean of the runs without the fastest and the slowest"
        detail += ", which is the one that broke the rules" if result.failed_runs else ""
        if result.scaling_factor != 1:
            detail += f", {result.olympic_minutes:.4f} minutes, times {result.scaling_factor:.6f} because they "
            detail += "converged in fewer samples than the reference mean"
        headline = f"Official score{division}: {result.score:.4f} minutes"
        return {"state": "good", "headline": headline, "detail": f"{detail}. It is {UNVERIFIED}.", "reasons": []}
    if result.score is not None:
        detail = f"As they stand, the runs would score {result.score:.4f} minutes."
    elif result.median_minutes is not None:
        runs = "compliant run is" if len(result.counted) == 1 else f"{len(result.counted)} compliant runs is"
        detail = f"The median of the {runs} {result.median_minutes:.4f} minutes."
    errors = [finding for finding in checked.findings if finding.severity == ERROR] if checked else []
    # Too few runs and the RCP test are among the result's obstacles already.
    broken = [group for group in groups(errors) if group[0].source not in ("runs", "rcp")]
    reasons = [*map(text, result.obstacles)]
    reasons += [with_places(group, checked.path if checked else result.folder) for group in broken[:MOST_REASONS]]
    if len(broken) > MOST_REASONS:
        reasons.append(f"and {len(broken) - MOST_REASONS} more reasons, see the findings")
    failed = any(finding.source != "runs" for finding in errors) or result.failed_runs > 1
    state, headline = ("bad", "Does not count") if failed else ("warn", "Not official yet")
    return {"state": state, "headline": headline, "detail": detail, "reasons": reasons}


def cards(result: Result) -> list[dict[str, str]]:
    """The score card."""
    made: list[dict[str, str]] = []

    def card(label: str, value: str, unit: str, detail: str, state: str = "") -> None:
        made.append({"label": label, "value": value, "unit": unit, "detail": detail, "state": state})

    minutes = [run.minutes for run in result.counted if run.minutes is not None]
    if minutes:
        spread = f"fastest {minutes[0]:.2f}, slowest {minutes[-1]:.2f} min"
        if result.score is not None and len(result.runs) == REQUIRED_RUNS:
            card("Time to train", f"{result.score:.4f}", "min", spread)
        else:
            card("Time to train, median", f"{statistics.median(minutes):.4f}", "min", spread)

    point, mean = result.rcp_point, result.mean_samples
    samples = [run.samples for run in result.runs if run.converged and run.samples is not None]
    if mean is not None and mean < UNCONVERGED:
        detail, state = "olympic mean", ""
        if point is not None:
            said, state = ("passed", "good") if result.rcp_test and result.rcp_test.passed else ("failed", "bad")
            sigma = f", {(mean - point.minimum) / point.std:+.2f} σ" if point.std else ""
            detail = f"RCP {said}: {mean - point.minimum:+,.0f} to the minimum{sigma}"
        card("Samples to target", f"{mean:,.0f}", "", detail, state)
    elif samples:
        detail = f"median of {len(samples)}, no RCP test"
        card("Samples to target", f"{statistics.median(samples):,.0f}", "", detail)

    compliant, total = sum(run.compliant for run in result.runs), len(result.runs) + len(result.crashes)
    detail = f"{len(result.crashes)} crashed, " if result.crashes else ""
    detail += f"{sum(run.converged for run in result.runs)} reached the target, a submission has {REQUIRED_RUNS}"
    card("Compliant runs", f"{compliant} of {total}", "", detail, "" if compliant == total else "warn")

    rates = [run.sequences_per_second for run in result.runs if run.sequences_per_second]
    if rates:
        rate, detail = statistics.median(rates), "median over the whole clock"
        if result.accelerators:
            detail = f"{rate_text(rate / result.accelerators)} per accelerator, evaluations included"
        card("Throughput", rate_text(rate), "seq/s", detail)

    energy = result.energy
    if energy is not None and (energy.joules is None or energy.watts is None):
        card("Energy", "–", "", text(energy.reason), "warn")
    elif energy is not None:
        detail, state = f"{energy.joules:,.2f} J, {energy.watts:,.0f} W on average; runs as of the time", ""
        if energy_obstacles(result):
            detail, state = "unofficial: see findings", "warn"
        card("Energy", f"{(energy.joules or 0) / 1e6:,.4f}", "MJ", detail, state)

    shares = [run.evaluation_share for run in result.runs if run.evaluation_share is not None]
    if shares:
        seconds = [one.seconds for run in result.runs for one in run.evaluations if one.seconds is not None]
        detail = f"of the clock, {statistics.median(seconds):.2f} s each" if seconds else "of the clock"
        card("Evaluations", f"{100 * statistics.median(shares):.1f}", "%", detail)
    starts = [run.init_seconds for run in result.runs if run.init_seconds is not None]
    if starts:
        card("Initialisation", f"{statistics.median(starts):,.1f}", "s", f"median; slowest {max(starts):,.1f} s")
    return made


def dates(result: Result) -> str:
    """When the runs ran, in UTC."""
    times = [event.time_ms for run in result.runs for event in run.log.events]
    try:
        first, last = (datetime.fromtimestamp(f(times) / 1000, timezone.utc) for f in (min, max))
    except (ValueError, OverflowError, OSError):  # no events, or times that are no dates
        return ""
    end = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M}"
    return f"{first:%Y-%m-%d %H:%M} to {end} UTC"


def runs(result: Result) -> list[dict[str, Any]]:
    """A row of cells a run, and the excerpt of its log."""
    rows = []
    for index, run in enumerate(result.runs):
        shown = cells(run, result)
        states = {"status": "" if run.converged else "warn", "compliance": "good" if run.compliant else "bad"}
        tag = {"best": "fastest, dropped", "worst": "slowest, dropped"}.get(result.dropped.get(run.path, ""))
        rows.append(
            {
                "index": index,
                "colour": index % COLOURS,
                "name": run.name,
                "dropped": run.path in result.dropped,
                "wrong": not run.compliant,
                "cells": [
                    {"text": text(shown[one.heading]), "number": one.right, "state": states.get(one.heading, "")}
                    for one in columns(result)[1:]
                ],
                "tag": tag,
                "excerpt": excerpt(run),
                "log_summary": f"{len(run.log.events):,} events, {run.status}" if run.log.events else "no events",
            }
        )
    return rows


def findings(checked: Checked) -> dict[str, Any]:
    """What `check` found: the official verdicts, and one entry for each rule with every place that breaks it."""
    states = {ERROR: "bad", WARNING: "warn"}
    said = [f"{text(outcome.tool)} {'passes' if outcome.passed else 'fails'}" for outcome in checked.outcomes]

    def row(group: Sequence[Finding]) -> dict[str, str]:
        first = group[0]
        return {
            "severity": first.severity,
            "state": states.get(first.severity, "muted"),
            "subject": subject(group, checked.path).replace(f"{checked.path}/", ""),  # of the official tools' words
            "places": text(places(group, checked.path)) if any(one.line or one.key for one in group) else "",
            "rule": text(shortened(first.rule or "")),
            "hint": text(first.hint or ""),
        }

    return {"title": text(checked.title), "official": ", ".join(said), "rows": list(map(row, groups(checked.findings)))}


def hyperparameters(result: Result) -> dict[str, Any]:
    """The logged hyper-parameters beside those of the reference points that the batch size is held to."""
    point, references = result.rcp_point, []
    if point is not None:
        sizes = point.interpolated_from or (point.batch_size,)
        references = [one for one in rcp.points(result.ruleset, result.terms.rcp_file) if one.batch_size in sizes]
    rows = []
    for key in HYPERPARAMETERS:
        logged = [_plain(run.hyperparameters[key]) for run in result.runs if key in run.hyperparameters]
        values, wanted = list(dict.fromkeys(logged)), []
        for one in references:
            known = {**(one.hyperparameters or {}), "global_batch_size": one.batch_size}
            name = _OF_REFERENCE.get(key, key)
            wanted.append(_plain(known[name]) if name in known else "–")
        if values or any(value != "–" for value in wanted):
            rows.append(
                {"key": key, "value": " / ".join(values) or "–", "varies": len(values) > 1, "references": wanted}
            )
    note = "The rules leave every value to the submitter; the convergence test is what guards them. Runs must agree."
    if not references:
        note = "No reference point applies."
    elif len(references) > 1:
        note += " The test interpolates between the two reference points shown."
    return {"rows": rows, "references": [f"RCP batch {one.batch_size:,}" for one in references], "note": note}


def _plain(value: Any) -> str:
    """One notation for a number however it was logged: 3680 for 3680.0."""
    return text(value)[:80] if number(value) is None else f"{value:.10g}"


def excerpt(run: Run) -> list[dict[str, Any]]:
    """The lines that decide: start, first and last evaluations, stop, and every line that breaks a rule."""
    keys = ("cache_clear", "init_start", "seed", "global_batch_size", "init_stop", "run_start")
    accuracies = run.log.all("eval_accuracy")
    deciding = [*map(run.log.first, keys), *accuracies[:1], *accuracies[-2:], *run.log.all("run_stop")[-1:]]
    wrong = {finding.line for finding in run.findings if finding.severity == ERROR}
    lines = {event.line: event.text for event in deciding if event is not None}
    lines |= {event.line: event.text for event in run.log.events if event.line in wrong}
    lines |= {error.line: error.text for error in run.log.errors}
    wrong |= {error.line for error in run.log.errors}
    rows: list[dict[str, Any]] = []
    before = None
    for count, line in enumerate(sorted(lines)):
        if count == _MOST_LINES:
            rows.append({"number": "", "text": f"⋯ and {len(lines) - count:,} more such lines", "style": "gap"})
            break
        if before is not None and line > before + 1:
            rows.append({"number": "", "text": "⋯", "style": "gap"})
        content = text(lines[line])
        content = content[:_LONGEST_LINE] + " …" if len(content) > _LONGEST_LINE else content
        rows.append({"number": line, "text": content, "style": "wrong" if line in wrong else ""})
        before = line
    return rows
