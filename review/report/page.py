"""`report`: one self-contained HTML page of results, and its charts as PNG files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import ReviewError, write_whole
from review.report import data
from review.report.chart import Chart, Entry, legend
from review.report.plots import charts
from review.report.svg import COLOURS, draw
from review.report.system import facts
from review.results.score import Result
from review.verdict.checking import Checked


def render(template: str, **values: object) -> str:
    """A page of one of the templates. Raises ReviewError where jinja2 is missing."""
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError:
        raise ReviewError("the page needs jinja2: pip install jinja2") from None
    environment = Environment(loader=PackageLoader("review.report"), autoescape=_is_markup, trim_blocks=True)
    return environment.get_template(template).render(**values)


def build_page(results: Sequence[Result], checked: Sequence[Checked] = ()) -> str:
    """The page, with what `check` found of the same target. Raises ReviewError where jinja2 is missing."""
    by_path = {one.path: one for one in checked}
    pages = []
    for index, result in enumerate(results):
        own = by_path.pop(result.folder, None)
        if own is None and len(result.runs) == 1:  # a log by itself
            own = by_path.pop(result.runs[0].path, None)
        pages.append(_result(result, own, f"r{index}"))
    title = pages[0]["name"] if len(pages) == 1 else f"{len(pages)} results"
    return render(
        "report.html",
        title=f"{title}: MLPerf Training BERT",
        results=pages,
        submissions=[_findings(one) for one in by_path.values()],
        most_runs=max((len(result.runs) for result in results), default=0),
        ruleset=results[0].ruleset if results else "",
        checker_version=_checker_version(),
    )


def _is_markup(name: str | None) -> bool:
    return name is None or name.endswith(".html")


def _checker_version() -> str | None:
    try:
        return metadata.version("mlperf-logging")
    except metadata.PackageNotFoundError:
        return None


def _findings(checked: Checked) -> dict[str, Any]:
    return {
        "title": text(checked.title),
        "official": data.official_verdicts(checked),
        "rows": data.findings(checked),
    }


def _result(result: Result, checked: Checked | None, identifier: str) -> dict[str, Any]:
    figures = [figure(chart, f"{identifier}-{chart.key}") for chart in charts(result)]
    dossier = data.dossier(result)
    hyperparameters, described = data.hyperparameters(result), facts(result)
    have = [
        ("runs", "Runs", True),
        ("dossier", "Convergence", dossier),
        ("findings", "Findings", checked),
        ("charts", "Charts", figures),
        ("hyperparameters", "Hyper-parameters", hyperparameters["rows"]),
        *described,
        ("logs", "Log excerpts", result.runs),
    ]
    return {
        "id": identifier,
        "name": text(result.name),
        "organization": result.organization or "–",
        "batch_size": "–" if result.batch_size is None else f"{result.batch_size:g}",
        "accelerators": result.accelerators or "–",
        "subtitle": data.subtitle_text(result),
        "dates": data.dates(result),
        "sections": data.sections(have),
        "verdict": data.verdict(result, checked),
        "dossier": dossier,
        "cards": data.cards(result),
        "columns": data.columns(result),
        "runs": data.run_rows(result),
        "crashes": [{"name": f"failed_{i}.txt", "reason": text(reason)} for i, reason in result.crashes.items()],
        "findings": None if checked is None else _findings(checked),
        "charts": figures,
        "hyperparameters": hyperparameters,
        "facts": described,
    }


def figure(chart: Chart, identifier: str) -> dict[str, Any]:
    """What the templates show of a chart. ``identifier`` is unique on the page."""
    from markupsafe import Markup

    return {
        "key": chart.key,
        "title": chart.title,
        "alt": chart.alt,
        "svg": Markup(draw(chart, identifier)),  # draw() escapes what it quotes
        "legend": [_entry(entry) for entry in legend(chart)],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    style = "" if entry.run is None else f"run-{entry.run % COLOURS}{'' if entry.counted else ' dropped'}"
    return {
        "run": entry.run,
        "style": style,
        "swatch": entry.swatch or ("none" if entry.run is None else ""),
        "label": entry.label,
    }


def write_report(
    results: Sequence[Result], checked: Sequence[Checked], output: Path, png_folder: Path | None = None
) -> list[Path]:
    """Writes the page and, with a folder, a PNG of each chart; returns every file written. Raises ReviewError."""
    if output.is_dir():
        raise ReviewError(f"{output} is a folder: name the page itself, such as {output / 'report.html'}")
    files = {output: build_page(results, checked).encode("utf-8")}
    if png_folder is not None:
        from review.report.png import draw

        names = [re.sub(r"[^A-Za-z0-9._-]+", "_", text(result.name)) for result in results]
        for index, result in enumerate(results):
            prefix = "" if len(results) == 1 else f"{names[index]}_" if names.count(names[index]) == 1 else f"{index}_"
            for chart in charts(result):
                files[png_folder / f"{prefix}{chart.key}.png"] = draw(chart, text(result.name))
    for path, content in files.items():
        write_whole(path, content)
    return list(files)
