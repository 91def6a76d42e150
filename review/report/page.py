"""`report`: a self-contained HTML page of results. Contents are made here, the templates lay them out."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from review.logs.mllog import number, text
from review.logs.output import ERROR, ReviewError, rate_text, write_whole
from review.logs.tree import description, read_json
from review.report.chart import COLOURS, draw
from review.report.plots import UNCONVERGED, charts
from review.results.run import HYPERPARAMETERS, Run
from review.results.score import REQUIRED_RUNS, UNVERIFIED, Result
from review.results.table import cells, columns, rcp_lines
from review.rulebook import rcp
from review.rulebook.description import BLANK, listed
from review.verdict.checking import (
    Checked,
    energy_obstacles,
    groups,
    places,
    shortened,
    subject,
    with_places,
)

_MOST_REASONS = 4  # in the verdict; the findings list all
_MOST_LINES = 60  # of a log excerpt
_LONGEST_LINE = 600  # characters of a line in a log excerpt
_OF_REFERENCE = {
    "opt_lamb_epsilon": "opt_epsilon"
}  # logged keys to keys of the reference points, if they differ
_SOFTWARE = ("framework", "framework_name", "other_software_stack", "operating_system", "sw_notes")


def render(template: str, script: str = "", **values: object) -> str:
    """Renders a template; ``script`` is the only one that may run on the page. Raises ReviewError without jinja2."""
    try:
        from jinja2 import Environment, PackageLoader
        from markupsafe import Markup
    except ImportError:
        raise ReviewError("the page needs jinja2: pip install jinja2") from None
    markup = Environment(
        loader=PackageLoader("review.report"),
        # Style sheets are included as they are; names and logs of others are escaped.
        autoescape=lambda name: name is None or name.endswith(".html"),
        trim_blocks=True,
    )
    markup.globals |= {
        "cells": cells,
        "excerpt": excerpt,
        "groups": groups,
        "subject": subject,
        "places": places,
    }
    markup.globals["draw"] = lambda chart, identifier: Markup(
        draw(chart, identifier)
    )  # already escaped
    markup.filters |= {"text": text, "shortened": shortened}
    if script:
        # The page's security policy allows this script alone, by its hash: logs may hold markup.
        code = Path(__file__).with_name("templates").joinpath(script).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        values |= {"script": Markup(code), "script_hash": Markup(f"sha256-{digest}")}
    return markup.get_template(template).render(**values)


def build_page(results: Sequence[Result], checked: Sequence[Checked] = ()) -> str:
    """The page, with the findings of `check` on the same target. Raises ReviewError if jinja2 is missing."""
    by_path = {one.path: one for one in checked}
    pages = []
    for index, result in enumerate(results):
        own = by_path.pop(result.folder, None)
        if own is None and len(result.runs) == 1:  # a single log
            own = by_path.pop(result.runs[0].path, None)
        pages.append(_result(result, own, f"r{index}"))
    version = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("mlperf-logging")
    return render(
        "report.html",
        title=f"{text(results[0].name) if len(pages) == 1 else f'{len(pages)} results'}: MLPerf Training BERT",
        pages=pages,
        # What no result took are checks of whole submissions.
        submissions=list(by_path.values()),
        most_runs=max((len(result.runs) for result in results), default=0),
        colours=COLOURS,
        ruleset=results[0].ruleset if results else "",
        checker_version=version,
    )


def _result(result: Result, checked: Checked | None, identifier: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "dossier": rcp_lines(result),
        "checked": checked,
        "charts": charts(result),
        "hyperparameters": _hyperparameters(result),
        "facts": _facts(result),
    }
    sections = [
        ("runs", "Runs", True),
        ("dossier", "Convergence", found["dossier"]),
        ("findings", "Findings", checked),
        ("charts", "Charts", found["charts"]),
        ("hyperparameters", "Hyper-parameters", found["hyperparameters"][0]),
        *found["facts"],
        ("logs", "Log excerpts", result.runs),
    ]
    about = [", ".join(part for part in (result.subtitle, f"target {result.target:.3f}") if part)]
    times = [event.time_ms for run in result.runs for event in run.log.events]
    with contextlib.suppress(ValueError, OverflowError, OSError):  # no events, or invalid times
        first, last = (datetime.fromtimestamp(f(times) / 1000, timezone.utc) for f in (min, max))
        end = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M}"
        about.append(f"{first:%Y-%m-%d %H:%M} to {end} UTC")
    return {
        **found,
        "id": identifier,
        "result": result,
        "about": about,
        "sections": [(key, label) for key, label, content in sections if content],
        "verdict": _verdict(result, checked),
        "cards": _cards(result),
        "columns": columns(result),
    }


def write_report(results: Sequence[Result], checked: Sequence[Checked], output: Path) -> None:
    """Writes the page. Raises ReviewError."""
    if output.is_dir():
        raise ReviewError(
            f"{output} is a folder: give the name of the page, such as {output / 'report.html'}"
        )
    write_whole(output, build_page(results, checked))


def _verdict(result: Result, checked: Checked | None) -> dict[str, Any]:
    """The headline: does the result count, and if not, why. ``checked``: outcome of `check`, if it ran."""
    detail = "There is no olympic score yet."
    if result.official and (checked is None or checked.passed()):
        division = (
            "" if result.division == "closed" else f" in the {text(result.division)} division"
        )
        detail = "The mean of the runs without the fastest and the slowest"
        detail += ", which is the one that broke the rules" if result.failed_runs else ""
        if result.scaling_factor != 1:
            detail += f", {result.olympic_minutes:.4f} minutes, times {result.scaling_factor:.6f} because they "
            detail += "converged in fewer samples than the reference mean"
        headline = f"Official score{division}: {result.score:.4f} minutes"
        return {
            "state": "good",
            "headline": headline,
            "detail": f"{detail}. It is {UNVERIFIED}.",
            "reasons": [],
        }
    if result.score is not None:
        detail = f"These runs would score {result.score:.4f} minutes, {UNVERIFIED}."
    elif result.median_minutes is not None:
        runs = (
            "compliant run is"
            if len(result.counted) == 1
            else f"{len(result.counted)} compliant runs is"
        )
        detail = f"The median of the {runs} {result.median_minutes:.4f} minutes, {UNVERIFIED}."
    errors = (
        [finding for finding in checked.findings if finding.severity == ERROR] if checked else []
    )
    # The obstacles already include too few runs and the RCP test.
    broken = [group for group in groups(errors) if group[0].source not in ("runs", "rcp")]
    reasons = [*map(text, result.obstacles)]
    reasons += [
        with_places(group, checked.path if checked else result.folder)
        for group in broken[:_MOST_REASONS]
    ]
    if len(broken) > _MOST_REASONS:
        reasons.append(f"and {len(broken) - _MOST_REASONS} more, see the findings")
    # Too few runs is no fault: the others may be on their way.
    failed = any(finding.source != "runs" for finding in errors) or result.failed_runs > 1
    state, headline = ("bad", "Does not count") if failed else ("warn", "Not official yet")
    return {"state": state, "headline": headline, "detail": detail, "reasons": reasons}


def _cards(result: Result) -> list[dict[str, str]]:
    made: list[dict[str, str]] = []

    def card(label: str, value: str, unit: str, detail: str, state: str = "") -> None:
        made.append(
            {"label": label, "value": value, "unit": unit, "detail": detail, "state": state}
        )

    minutes = [run.minutes for run in result.counted if run.minutes is not None]
    if minutes:
        spread = f"fastest {minutes[0]:.2f}, slowest {minutes[-1]:.2f} min"
        if result.score is not None and len(result.runs) == REQUIRED_RUNS:
            card("Time to train", f"{result.score:.4f}", "min", spread)
        else:
            card("Time to train, median", f"{statistics.median(minutes):.4f}", "min", spread)

    point, mean = result.rcp_point, result.mean_samples
    samples = [run.samples for run in result.runs if run.converged and run.samples is not None]
    # A mean above that includes the 1e9 of a run that did not converge.
    if mean is not None and mean < UNCONVERGED:
        detail, state = "olympic mean", ""
        if point is not None:
            outcome, state = (
                ("passed", "good")
                if result.rcp_test and result.rcp_test.passed
                else ("failed", "bad")
            )
            sigma = f", {(mean - point.minimum) / point.std:+.2f} σ" if point.std else ""
            detail = f"RCP {outcome}: {mean - point.minimum:+,.0f} to the minimum{sigma}"
        card("Samples to target", f"{mean:,.0f}", "", detail, state)
    elif samples:
        detail = f"median of {len(samples)}, no RCP test"
        card("Samples to target", f"{statistics.median(samples):,.0f}", "", detail)

    compliant, total = (
        sum(run.compliant for run in result.runs),
        len(result.runs) + len(result.crashes),
    )
    detail = f"{len(result.crashes)} crashed, " if result.crashes else ""
    detail += f"{sum(run.converged for run in result.runs)} reached the target, a submission has {REQUIRED_RUNS}"
    card(
        "Compliant runs",
        f"{compliant} of {total}",
        "",
        detail,
        "" if compliant == total else "warn",
    )

    rates = [run.sequences_per_second for run in result.runs if run.sequences_per_second]
    if rates:
        rate, detail = statistics.median(rates), "median over the whole timed span"
        if result.accelerators:
            detail = (
                f"{rate_text(rate / result.accelerators)} per accelerator, evaluations included"
            )
        card("Throughput", rate_text(rate), "seq/s", detail)

    energy = result.energy
    if energy is not None and (energy.joules is None or energy.watts is None):
        card("Energy", "–", "", text(energy.reason), "warn")
    elif energy is not None:
        detail, state = (
            f"{energy.joules:,.2f} J, {energy.watts:,.0f} W on average; same runs as the time",
            "",
        )
        if energy_obstacles(result):
            detail, state = "unofficial: see findings", "warn"
        card("Energy", f"{(energy.joules or 0) / 1e6:,.4f}", "MJ", detail, state)
    return made


def _hyperparameters(
    result: Result,
) -> tuple[list[tuple[str, list[str], list[str]]], list[str], str]:
    """[(key, logged values, values of the reference points of the batch size)], headings of these points, a note."""
    point, references = result.rcp_point, []
    if point is not None:
        sizes = point.interpolated_from or (point.batch_size,)
        references = [one for one in rcp.points(result.ruleset) if one.batch_size in sizes]
    rows = []
    for key in HYPERPARAMETERS:
        logged = [
            _plain(run.hyperparameters[key]) for run in result.runs if key in run.hyperparameters
        ]
        known = [
            {**(one.hyperparameters or {}), "global_batch_size": one.batch_size}
            for one in references
        ]
        name = _OF_REFERENCE.get(key, key)
        wanted = [_plain(one[name]) if name in one else "–" for one in known]
        if logged or any(value != "–" for value in wanted):
            rows.append((key, list(dict.fromkeys(logged)), wanted))
    note = "The submitter chooses all values; the convergence test guards against bad ones. All runs must agree."
    if not references:
        note = "There is no reference point for this batch size."
    elif len(references) > 1:
        note += " The test interpolates between the two reference points shown."
    return rows, [f"RCP batch {one.batch_size:,}" for one in references], note


def _plain(value: Any) -> str:
    """A value in a uniform notation: 3680 for 3680.0."""
    return text(value)[:80] if number(value) is None else f"{value:.10g}"


def excerpt(run: Run) -> list[dict[str, Any]]:
    """The relevant lines: start, first and last evaluations, stop, and all that break a rule."""
    keys = ("cache_clear", "init_start", "seed", "global_batch_size", "init_stop", "run_start")
    accuracies = run.log.all("eval_accuracy")
    deciding = [
        *map(run.log.first, keys),
        *accuracies[:1],
        # The evaluation that reached the target, and the one before it.
        *accuracies[-2:],
        *run.log.all("run_stop")[-1:],
    ]
    wrong = {finding.line for finding in run.findings if finding.severity == ERROR}
    lines = {event.line: event.text for event in deciding if event is not None}
    lines |= {event.line: event.text for event in run.log.events if event.line in wrong}
    lines |= {error.line: error.text for error in run.log.errors}
    wrong |= {error.line for error in run.log.errors}
    rows: list[dict[str, Any]] = []
    before = None
    for count, line in enumerate(sorted(lines)):
        if count == _MOST_LINES:
            rows.append(
                {"number": "", "text": f"⋯ and {len(lines) - count:,} more lines", "style": "gap"}
            )
            break
        if before is not None and line > before + 1:
            rows.append({"number": "", "text": "⋯", "style": "gap"})
        content = text(lines[line])
        content = content[:_LONGEST_LINE] + " …" if len(content) > _LONGEST_LINE else content
        rows.append({"number": line, "text": content, "style": "wrong" if line in wrong else ""})
        before = line
    return rows


_Group = tuple[str, list[tuple[str, str]]]  # title, names and values


def _facts(result: Result) -> list[tuple[str, str, list[_Group]]]:
    """(key, heading, groups) of system, software and settings, from systems/NAME.json and the run's files."""
    system = description(result.folder)
    environment = read_json(result.folder / "environment.json")
    machine = {name: value for name, value in system.items() if name not in _SOFTWARE}
    if not system:  # what the run recorded about its machine instead
        machine = {name: environment.get(name) for name in ("host", "platform", "cpus", "gpus")}
    blank = ", ".join(
        text(name).replace("_", " ") for name, value in system.items() if value in BLANK
    )
    described: dict[str, Any] = {}
    for name in _SOFTWARE:
        value = system.get(name)
        # The software stack is an object in some descriptions and text in others.
        described |= value if isinstance(value, dict) else {name: value}
    logged = {
        name: environment.get(name) for name in ("python", "cuda", "cudnn", "nccl", "git_commit")
    }
    logged |= read_json(result.folder / "environment.json", "packages")
    settings = _flat(read_json(result.folder / "config.json"))
    sections = [
        (
            "system",
            "System",
            [_group("", machine), _group("", {"left blank in the system description": blank})],
        ),
        (
            "software",
            "Software",
            [_group("As described", described), _group("As logged by the last run", logged)],
        ),
        ("settings", "Settings", [_group("", settings)]),
    ]
    shown = [(key, label, [one for one in groups if one[1]]) for key, label, groups in sections]
    return [section for section in shown if section[2]]


def _group(title: str, values: dict[str, Any]) -> _Group:
    def label(key: str) -> str:
        words = text(key).removeprefix("s_").replace("_", " ").strip() or text(key)
        return words[0].upper() + words[1:]

    return title, [
        (label(key), listed(value)) for key, value in values.items() if value not in BLANK
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        # A foreign file may nest deeper than Python recurses.
        nested = isinstance(value, dict) and len(prefix) < 200
        flat |= _flat(value, f"{prefix}{name} ") if nested else {f"{prefix}{name}": value}
    return flat
