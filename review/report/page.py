"""`report`: a self-contained HTML page of results. Contents are made here, the templates lay them
out.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import ERROR, ReviewError, write_whole
from review.report.chart import COLOURS, draw
from review.report.plots import charts
from review.results.score import Result
from review.results.table import cells, columns
from review.verdict.checking import (
    Checked,
    groups,
    is_official,
    places,
    shortened,
    subject,
)
from review.verdict.summary import summary


def render(template: str, script: str = "", **values: object) -> str:
    """Renders a template; ``script`` is the only one that may run on the page. Raises ReviewError
    without jinja2.
    """
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
        "groups": groups,
        "subject": subject,
        "places": places,
    }
    markup.globals["draw"] = lambda chart: Markup(draw(chart))  # already escaped
    markup.filters |= {"text": text, "shortened": shortened}
    if script:
        # The page's security policy allows this script alone, by its hash: logs may hold markup.
        code = (
            Path(__file__)
            .with_name("templates")
            .joinpath(script)
            .read_text(encoding="utf-8")
        )
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        values |= {"script": Markup(code), "script_hash": Markup(f"sha256-{digest}")}
    return markup.get_template(template).render(**values)


def build_page(results: Sequence[Result], checked: Sequence[Checked]) -> str:
    """The page, with the findings of `check` on the same target. Raises ReviewError if jinja2 is
    missing.
    """
    by_path = {result.path: result for result in checked}
    pages = []
    for index, result in enumerate(results):
        verdict = by_path.pop(result.folder, None)
        if verdict is None and len(result.runs) == 1:  # a single log
            verdict = by_path.pop(result.runs[0].path, None)
        pages.append(_result(result, verdict, f"r{index}"))
    return render(
        "report.html",
        title=text(results[0].name) if len(pages) == 1 else f"{len(pages)} results",
        pages=pages,
        # What no result took are checks of whole submissions.
        submissions=list(by_path.values()),
        most_lines=max((len(result.runs) for result in results), default=0),
        colours=COLOURS,
    )


def _result(result: Result, checked: Checked | None, identifier: str) -> dict[str, Any]:
    state, headline = _verdict(result, checked)
    return {
        "id": identifier,
        "result": result,
        "checked": checked,
        "state": state,
        "headline": headline,
        "summary": summary(result),
        "columns": columns(result),
        "charts": charts(result),
    }


def _verdict(result: Result, checked: Checked | None) -> tuple[str, str]:
    """State and headline: does the result count?"""
    if is_official(result) and (checked is None or checked.passed()):
        return "good", f"Official score: {result.score:.4f} minutes, unverified"
    errors = [
        finding
        for finding in (checked.findings if checked else ())
        if finding.severity == ERROR
    ]
    # Too few runs is no fault: the others may be on their way.
    if any(finding.source != "runs" for finding in errors) or result.failed_runs > 1:
        return "bad", "Does not count"
    return "warn", "Not official yet"


def write_report(
    results: Sequence[Result], checked: Sequence[Checked], output: Path
) -> None:
    """Writes the page. Raises ReviewError."""
    if output.is_dir():
        raise ReviewError(
            f"{output} is a folder: give the name of the page, such as report.html"
        )
    write_whole(output, build_page(results, checked))
