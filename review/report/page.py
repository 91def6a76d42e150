"""`report`: one self-contained HTML page of results, and its charts as PNG files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import ReviewError, write_whole
from review.report import data
from review.report.chart import draw, picture
from review.report.plots import charts
from review.report.system import facts
from review.results.dossier import Dossier
from review.results.score import Result
from review.results.table import columns
from review.verdict.checking import Checked


def render(template: str, script: str = "", **values: object) -> str:
    """A page of one of the templates, with a script of them that alone may run. Raises ReviewError without jinja2."""
    try:
        from jinja2 import Environment, PackageLoader
        from markupsafe import Markup
    except ImportError:
        raise ReviewError("the page needs jinja2: pip install jinja2") from None
    markup = Environment(
        loader=PackageLoader("review.report"),
        autoescape=lambda name: name is None or name.endswith(".html"),
        trim_blocks=True,
    )
    markup.globals["draw"] = lambda chart, identifier: Markup(draw(chart, identifier))  # which escapes what it quotes
    if script:
        code = Path(__file__).with_name("templates").joinpath(script).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        values |= {"script": Markup(code), "script_hash": Markup(f"sha256-{digest}")}
    return markup.get_template(template).render(**values)


def build_page(results: Sequence[Result], checked: Sequence[Checked] = ()) -> str:
    """The page, with what `check` found of the same target. Raises ReviewError if jinja2 is missing."""
    by_path = {one.path: one for one in checked}
    pages = []
    for index, result in enumerate(results):
        own = by_path.pop(result.folder, None)
        if own is None and len(result.runs) == 1:  # a log by itself
            own = by_path.pop(result.runs[0].path, None)
        pages.append(_result(result, own, f"r{index}"))
    try:
        version = metadata.version("mlperf-logging")
    except metadata.PackageNotFoundError:
        version = ""
    return render(
        "report.html",
        title=f"{pages[0]['name'] if len(pages) == 1 else f'{len(pages)} results'}: MLPerf Training BERT",
        results=pages,
        submissions=[data.findings(one) for one in by_path.values()],
        most_runs=max((len(result.runs) for result in results), default=0),
        ruleset=results[0].ruleset if results else "",
        checker_version=version,
    )


def _result(result: Result, checked: Checked | None, identifier: str) -> dict[str, Any]:
    drawn, dossier = charts(result), Dossier(result).lines()
    hyperparameters, described = data.hyperparameters(result), facts(result)
    sections = [
        ("runs", "Runs", True),
        ("dossier", "Convergence", dossier),
        ("findings", "Findings", checked),
        ("charts", "Charts", drawn),
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
        "subtitle": ", ".join(part for part in (result.subtitle, f"target {result.target:.3f}") if part),
        "dates": data.dates(result),
        "sections": [(key, label) for key, label, content in sections if content],
        "verdict": data.verdict(result, checked),
        "dossier": dossier,
        "cards": data.cards(result),
        "columns": columns(result),
        "runs": data.runs(result),
        "crashes": [{"name": f"failed_{i}.txt", "reason": text(reason)} for i, reason in result.crashes.items()],
        "findings": None if checked is None else data.findings(checked),
        "charts": drawn,
        "hyperparameters": hyperparameters,
        "facts": described,
    }


def write_report(
    results: Sequence[Result], checked: Sequence[Checked], output: Path, png_folder: Path | None = None
) -> list[Path]:
    """Writes the page and, with a folder, a PNG of each chart; returns every file written. Raises ReviewError."""
    if output.is_dir():
        raise ReviewError(f"{output} is a folder: name the page itself, such as {output / 'report.html'}")
    files = {output: build_page(results, checked).encode("utf-8")}
    names = [re.sub(r"[^A-Za-z0-9._-]+", "_", text(result.name)) for result in results]
    for index, result in enumerate(results if png_folder else ()):
        prefix = "" if len(results) == 1 else f"{names[index]}_" if names.count(names[index]) == 1 else f"{index}_"
        for chart in charts(result):
            assert png_folder is not None
            files[png_folder / f"{prefix}{chart.key}.png"] = picture(chart, text(result.name))
    for path, content in files.items():
        write_whole(path, content)
    return list(files)
