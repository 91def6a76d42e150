"""What the page says of a result, in words and table cells; the templates lay it out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from review.logs.mllog import number, text
from review.logs.output import ERROR, WARNING, Finding, rate_text
from review.report.plots import UNCONVERGED
from review.report.svg import COLOURS
from review.results.dossier import Dossier
from review.results.run import HYPERPARAMETERS, Run
from review.results.score import REQUIRED_RUNS, Result
from review.rulebook import rcp
from review.verdict.checking import Checked, energy_obstacles, groups, places, shortened, subject, with_places

MOST_REASONS = 4  # of the verdict; the findings have them all
_MOST_LINES = 60  # of a log's excerpt
_LONGEST_LINE = 600  # characters of a log line that an excerpt shows
_OF_REFERENCE = {"opt_lamb_epsilon": "opt_epsilon"}  # our key to the one of the reference points, where they differ

COLUMNS: tuple[tuple[str, bool], ...] = (
    ("Run", False),
    ("Status", False),
    ("Minutes", True),
    ("Samples", True),
    ("Final acc", True),
    ("First acc", True),
    ("Seq/s", True),
    ("per accel.", True),
    ("Evals", True),
    ("Eval %", True),
    ("Init s", True),
    ("Seed", True),
    ("Compliance", False),
)


def columns(result: Result) -> list[dict[str, Any]]:
    """Headings of the runs' table; with power files the energy has a column before the seed."""
    shown = list(COLUMNS)
    if result.energy:
        shown.insert(-2, ("kJ", True))
    return [{"label": label, "number": number} for label, number in shown]


def verdict(result: Result, checked: Checked | None) -> dict[str, Any]:
    """The page's first line: does the result count, and why not. ``checked``: what `check` found, where it ran."""
    if result.official and (checked is None or checked.passed()):
        division = "" if result.division == "closed" else f" in the {text(result.division)} division"
        headline = f"Official score{division}: {result.score:.4f} minutes"
        return {"state": "good", "headline": headline, "detail": _score_detail(result), "reasons": []}
    errors = [] if checked is None else [finding for finding in checked.findings if finding.severity == ERROR]
    failed = any(finding.source != "runs" for finding in errors) or result.failed_runs > 1
    return {
        "state": "bad" if failed else "warn",
        "headline": "Does not count" if failed else "Not official yet",
        "detail": _unofficial_detail(result),
        "reasons": [text(reason) for reason in result.obstacles] + _error_reasons(result, checked, errors),
    }


def _unofficial_detail(result: Result) -> str:
    if result.score is not None:
        return f"As they stand, the runs would score {result.score:.4f} minutes."
    if result.median_minutes is not None:
        runs = "compliant run is" if len(result.counted) == 1 else f"{len(result.counted)} compliant runs is"
        return f"The median of the {runs} {result.median_minutes:.4f} minutes."
    return "There is no olympic score yet."


def _error_reasons(result: Result, checked: Checked | None, errors: Sequence[Finding]) -> list[str]:
    """The first broken rules; too few runs and the RCP test are among the result's obstacles already."""
    broken = [group for group in groups(errors) if group[0].source not in ("runs", "rcp")]
    base = result.folder if checked is None else checked.path
    reasons = [with_places(group, base) for group in broken[:MOST_REASONS]]
    if len(broken) > MOST_REASONS:
        reasons.append(f"and {len(broken) - MOST_REASONS} more reasons, see the findings")
    return reasons


def _score_detail(result: Result) -> str:
    detail = "The mean of the runs without the fastest and the slowest"
    if result.failed_runs:
        detail += ", which is the one that broke the rules"
    if result.scaling_factor != 1:
        detail += (
            f", {result.olympic_minutes:.4f} minutes, times {result.scaling_factor:.6f} because they converged in "
            "fewer samples than the reference mean"
        )
    return detail + "."


def cards(result: Result) -> list[dict[str, str]]:
    """The score card."""
    made = (_time(result), _samples(result), _runs(result), _rate(result), _energy(result), *_shares(result))
    return [card for card in made if card]


def _card(label: str, value: str, unit: str, detail: str, state: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "unit": unit, "detail": detail, "state": state}


def _time(result: Result) -> dict[str, str] | None:
    minutes = [run.minutes for run in result.counted if run.minutes is not None]
    if not minutes:
        return None
    spread = f"fastest {minutes[0]:.2f}, slowest {minutes[-1]:.2f} min"
    if result.score is not None and len(result.runs) == REQUIRED_RUNS:
        return _card("Time to train", f"{result.score:.4f}", "min", spread)
    return _card("Time to train, median", f"{statistics.median(minutes):.4f}", "min", spread)


def _samples(result: Result) -> dict[str, str] | None:
    point, mean = result.rcp_point, result.mean_samples
    if mean is not None and mean < UNCONVERGED:
        if point is None:
            return _card("Samples to target", f"{mean:,.0f}", "", "olympic mean")
        passed = result.rcp_test is not None and result.rcp_test.passed
        sigma = f", {(mean - point.minimum) / point.std:+.2f} σ" if point.std else ""
        detail = f"RCP {'passed' if passed else 'failed'}: {mean - point.minimum:+,.0f} to the minimum{sigma}"
        return _card("Samples to target", f"{mean:,.0f}", "", detail, "good" if passed else "bad")
    samples = [run.samples for run in result.runs if run.converged and run.samples is not None]
    if not samples:
        return None
    return _card(
        "Samples to target", f"{statistics.median(samples):,.0f}", "", f"median of {len(samples)}, no RCP test"
    )


def dossier(result: Result) -> list[tuple[str, str]]:
    """Why the RCP test fails, what is short, and the nearest reference points; empty where it does not fail."""
    found, mean = Dossier(result), result.mean_samples
    if found.passed or result.rcp_test is None:
        return []
    facts = [] if result.rcp_point else [("Why", text(result.rcp_test.reason))]
    if mean is not None:
        shown = f"{mean:,.0f} samples" if mean < UNCONVERGED else "none: a counted run did not reach the target"
        facts.append(("Olympic mean", shown))
    if found.minimum is not None:
        facts.append(("Smallest mean that passes", f"{found.minimum:,.0f} samples"))
    if found.short:
        counted = rcp.RUNS - 2
        over = f"{counted * found.short:,.0f} over the {counted} runs that count"
        facts.append(("Short of it", f"{found.short:,.0f} samples on average, {over}"))
    for point in found.nearest:
        runs = f"; {len(point.runs)} runs, {point.runs[0]:,} to {point.runs[-1]:,}" if point.runs else ""
        facts.append((f"Reference of batch {point.batch_size:,}", f"{point.describe()}{runs}"))
    return facts


def _runs(result: Result) -> dict[str, str]:
    compliant = sum(run.compliant for run in result.runs)
    converged = sum(run.converged for run in result.runs)
    total = len(result.runs) + len(result.crashes)
    detail = f"{converged} reached the target, a submission has {REQUIRED_RUNS}"
    if result.crashes:
        detail = f"{len(result.crashes)} crashed, {detail}"
    state = "" if compliant == total else "warn"
    return _card("Compliant runs", f"{compliant} of {total}", "", detail, state)


def _rate(result: Result) -> dict[str, str] | None:
    rates = [run.sequences_per_second for run in result.runs if run.sequences_per_second]
    if not rates:
        return None
    rate = statistics.median(rates)
    detail = "median over the whole clock"
    if result.accelerators:
        each = rate / result.accelerators
        detail = f"{rate_text(each)} per accelerator, evaluations included"
    return _card("Throughput", rate_text(rate), "seq/s", detail)


def _energy(result: Result) -> dict[str, str] | None:
    if result.energy is None:
        return None
    if result.energy.joules is None or result.energy.watts is None:
        return _card("Energy", "–", "", text(result.energy.reason), "warn")
    against = energy_obstacles(result)
    detail = f"{result.energy.joules:,.2f} J, {result.energy.watts:,.0f} W on average; runs as of the time"
    state = "warn" if against else ""
    return _card(
        "Energy", f"{result.energy.joules / 1e6:,.4f}", "MJ", "unofficial: see findings" if against else detail, state
    )


def _shares(result: Result) -> list[dict[str, str]]:
    made = []
    shares = [run.evaluation_share for run in result.runs if run.evaluation_share is not None]
    if shares:
        seconds = [e.seconds for run in result.runs for e in run.evaluations if e.seconds is not None]
        detail = f"of the clock, {statistics.median(seconds):.2f} s each" if seconds else "of the clock"
        made.append(_card("Evaluations", f"{100 * statistics.median(shares):.1f}", "%", detail))
    starts = [run.init_seconds for run in result.runs if run.init_seconds is not None]
    if starts:
        detail = f"median; slowest {max(starts):,.1f} s"
        made.append(_card("Initialisation", f"{statistics.median(starts):,.1f}", "s", detail))
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


def run_rows(result: Result) -> list[dict[str, Any]]:
    """One row per run, with the excerpt of its log."""
    rows = []
    for index, run in enumerate(result.runs):
        rows.append(
            {
                "index": index,
                "colour": index % COLOURS,
                "name": run.name,
                "dropped": run.path in result.dropped,
                "wrong": not run.compliant,
                "cells": _cells(run, result),
                "excerpt": excerpt(run),
                "log_summary": f"{len(run.log.events):,} events, {run.status}" if run.log.events else "no events",
            }
        )
    return rows


def _cells(run: Run, result: Result) -> list[dict[str, Any]]:
    rate = run.sequences_per_second
    each = rate / result.accelerators if rate and result.accelerators else None
    share = None if run.evaluation_share is None else 100 * run.evaluation_share
    joules = result.joules(run)
    errors = [finding for finding in run.findings if finding.severity == ERROR]
    compliance: dict[str, Any] = {"text": "ok", "state": "good"}
    if errors:
        more = f" (+{len(errors) - 1} more)" if len(errors) > 1 else ""
        key = f"{text(errors[0].key)} " if errors[0].key else ""
        compliance = {"text": f"{key}{text(errors[0].message)}{more}", "state": "bad"}
    tag = {"best": "fastest, dropped", "worst": "slowest, dropped"}.get(result.dropped.get(run.path, ""))
    return [
        {"text": text(run.status), "state": "" if run.converged else "warn"},
        _number(_format(run.minutes, ",.4f")),
        _number(_format(run.samples, ",.0f")),
        _number(_format(run.final_accuracy, ".4f")),
        _number(_format(run.first_accuracy, ".4f")),
        _number("–" if rate is None else rate_text(rate)),
        _number("–" if each is None else rate_text(each)),
        _number(str(len(run.evaluations))),
        _number(_format(share, ".1f")),
        _number(_format(run.init_seconds, ",.1f")),
        *([_number(_format(None if joules is None else joules / 1000, ",.1f"))] if result.energy else []),
        _number(", ".join(dict.fromkeys(text(seed)[:24] for seed in run.seeds[:3])) or "–"),
        compliance | {"tag": tag},
    ]


def _number(content: str) -> dict[str, Any]:
    return {"text": content, "number": True}


def _format(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def findings(checked: Checked) -> list[dict[str, str]]:
    """What `check` found, one entry for each rule with every place that breaks it."""
    rows = []
    for group in groups(checked.findings):
        first = group[0]
        rows.append(
            {
                "severity": first.severity,
                "state": {ERROR: "bad", WARNING: "warn"}.get(first.severity, "muted"),
                "subject": subject(group, checked.path),
                "places": text(places(group, checked.path)) if any(f.line or f.key for f in group) else "",
                "rule": text(shortened(first.rule or "")),
                "hint": text(first.hint or ""),
            }
        )
    return rows


def official_verdicts(checked: Checked) -> str:
    """What each official checker says."""
    said = [f"{text(outcome.tool)} {'passes' if outcome.passed else 'fails'}" for outcome in checked.outcomes]
    return ", ".join(said)


def hyperparameters(result: Result) -> dict[str, Any]:
    """The logged hyper-parameters beside those of the reference points that the batch size is held to."""
    references = _references(result)
    rows = []
    for key in HYPERPARAMETERS:
        values = list(
            dict.fromkeys(_plain(run.hyperparameters[key]) for run in result.runs if key in run.hyperparameters)
        )
        wanted = [_reference_value(point, key) for point in references]
        if not values and not any(value != "–" for value in wanted):
            continue
        rows.append({"key": key, "value": " / ".join(values) or "–", "varies": len(values) > 1, "references": wanted})
    note = "The rules leave every value to the submitter; the convergence test is what guards them. Runs must agree."
    if not references:
        note = "No reference point applies."
    elif len(references) > 1:
        note += " The test interpolates between the two reference points shown."
    return {"rows": rows, "references": [f"RCP batch {point.batch_size:,}" for point in references], "note": note}


def _references(result: Result) -> list[rcp.Rcp]:
    point = result.rcp_point
    if point is None:
        return []
    wanted = point.interpolated_from or (point.batch_size,)
    return [found for found in rcp.points(result.ruleset, result.terms.rcp_file) if found.batch_size in wanted]


def _reference_value(point: rcp.Rcp, key: str) -> str:
    if key == "global_batch_size":
        return _plain(point.batch_size)
    known = point.hyperparameters or {}
    name = _OF_REFERENCE.get(key, key)
    return _plain(known[name]) if name in known else "–"


def _plain(value: Any) -> str:
    """One notation for a number however it was logged: 3680 for 3680.0."""
    if number(value) is not None:
        return f"{value:.10g}"
    return text(value)[:80]


def excerpt(run: Run) -> list[dict[str, Any]]:
    """The lines that decide: start, first and last evaluations, stop, and every line that breaks a rule."""
    wanted: dict[int, str] = {}
    for key in ("cache_clear", "init_start", "seed", "global_batch_size", "init_stop", "run_start"):
        event = run.log.first(key)
        if event is not None:
            wanted[event.line] = event.text
    accuracies = run.log.all("eval_accuracy")
    for event in [*accuracies[:1], *accuracies[-2:], *run.log.all("run_stop")[-1:]]:
        wanted[event.line] = event.text
    texts = {event.line: event.text for event in run.log.events}
    wrong = {finding.line for finding in run.findings if finding.severity == ERROR and finding.line is not None}
    wanted |= {line: texts[line] for line in wrong if line in texts}
    wanted |= {error.line: error.text for error in run.log.errors}
    wrong |= {error.line for error in run.log.errors}
    return _with_gaps(wanted, wrong)


def _with_gaps(lines: dict[int, str], wrong: set[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    before = None
    for count, line in enumerate(sorted(lines)):
        if count == _MOST_LINES:
            rows.append({"number": "", "text": f"⋯ and {len(lines) - count:,} more such lines", "style": "gap"})
            break
        if before is not None and line > before + 1:
            rows.append({"number": "", "text": "⋯", "style": "gap"})
        content = text(lines[line])
        if len(content) > _LONGEST_LINE:
            content = content[:_LONGEST_LINE] + " …"
        rows.append({"number": line, "text": content, "style": "wrong" if line in wrong else ""})
        before = line
    return rows


def subtitle_text(result: Result) -> str:
    """Submitter, platform, division, batch size, accelerators, target."""
    parts = result.subtitle
    target = result.target
    return f"{parts}{', ' if parts else ''}target {target:.3f}"


def sections(have: Sequence[tuple[str, str, object]]) -> list[tuple[str, str]]:
    """The page's table of contents: those of (key, label, content) that have content."""
    return [(key, label) for key, label, content in have if content]
