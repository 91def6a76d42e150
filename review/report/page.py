"""`report`: a self-contained HTML page of results. Contents are made here, the templates lay them
out.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from review.logs.mllog import text
from review.logs.output import ERROR, ReviewError, write_whole
from review.report.chart import COLOURS, layout
from review.report.plots import charts
from review.results.table import cells, columns
from review.verdict.checking import Verdict
from review.verdict.places import groups, places, shortened, subject
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
        "layout": layout,
    }
    markup.filters |= {"text": text, "shortened": shortened}
    if script:
        # The page's security policy allows this script alone, by its hash: logs may hold markup.
        code = (Path(__file__).parent / "templates" / script).read_text("utf-8")
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        values |= {"script": Markup(code), "script_hash": Markup(f"sha256-{digest}")}
    return markup.get_template(template).render(**values)


def build_page(verdicts: Sequence[Verdict]) -> str:
    """The page of results, and of their submissions. Raises ReviewError if jinja2 is missing."""
    results = [verdict.result for verdict in verdicts if verdict.result]
    names = [text(result.name) for result in results]
    return render(
        "report.html",
        title=names[0] if len(names) == 1 else f"{len(names)} results",
        judged=[verdict for verdict in verdicts if verdict.result],
        submissions=[verdict for verdict in verdicts if not verdict.result],
        most_lines=max((len(result.runs) for result in results), default=0),
        colours=COLOURS,
        headline_of=_headline,
        summary=summary,
        columns_of=columns,
        charts_of=charts,
    )


def _headline(verdict: Verdict) -> tuple[str, str]:
    """State and headline: does the result count?"""
    result = verdict.result
    assert result is not None
    if verdict.official and result.score is not None:
        return "good", f"{result.score:.4f} minutes by the official rules, unverified"
    errors = {f.id for f in verdict.findings if f.severity == ERROR}
    # Too few runs is no fault: the others may be on their way.
    if errors - {"ten_runs"} or result.olympic.failed > 1:
        return "bad", "Does not count"
    return "warn", "Not official yet"


def write_report(verdicts: Sequence[Verdict], output: Path) -> None:
    """Writes the page. Raises ReviewError."""
    if output.is_dir():
        how = "give the name of the page, such as report.html"
        raise ReviewError(f"{output} is a folder: {how}")
    write_whole(output, build_page(verdicts))
