"""`show`: one table for each result, one row for each run, and the score beneath."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from review.findings import ERROR, Finding
from review.mllog import text
from review.run import Run
from review.score import REQUIRED_RUNS, Result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# (heading, right-aligned, least width of the terminal that shows it)
_COLUMNS = (
    ("run", False, 0),
    ("seed", True, 110),
    ("status", False, 0),
    ("init s", True, 120),
    ("minutes", True, 0),
    ("evals", True, 120),
    ("samples", True, 0),
    ("first acc", True, 110),
    ("final acc", True, 0),
    ("seq/s", True, 80),
    ("/accel", True, 130),
    ("eval %", True, 130),
    ("compliance", False, 0),
)


def console(width: int | None = None) -> Console:
    """A console on stdout; wide where stdout is no terminal, so that nothing is cut off in a file."""
    from rich.console import Console

    if width is None and not sys.stdout.isatty():
        width = 160
    return Console(width=width, highlight=False)


def show(results: Sequence[Result], out: Console) -> None:
    """Prints every result."""
    for index, result in enumerate(results):
        if index:
            out.print()
        _show_one(result, out)


def _show_one(result: Result, out: Console) -> None:
    from rich.markup import escape

    out.print(f"[bold]{escape(text(result.name))}[/]  {escape(subtitle(result))}")
    out.print(f"[dim]{escape(str(result.folder))}[/]", soft_wrap=True)
    out.print(_table(result, out.width))
    for label, line, style in summary(result):
        out.print(f"  {label:<11}", end="", style="dim")
        out.print(escape(line), style=style, soft_wrap=True)


def subtitle(result: Result) -> str:
    """Submitter, platform, division, batch size and accelerators, as far as known."""
    parts = [part for part in (result.organization, result.platform, result.division) if part]
    if result.batch_size is not None:
        parts.append(f"batch {result.batch_size:g}")
    if result.accelerators:
        parts.append(f"{result.accelerators} accelerator{'s' if result.accelerators > 1 else ''}")
    elif result.processes:
        parts.append(f"{result.processes} process{'es' if result.processes > 1 else ''}")
    return ", ".join(parts)


def _table(result: Result, width: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    shown = [index for index, column in enumerate(_COLUMNS) if width >= column[2]]
    for index in shown:
        heading, right, _ = _COLUMNS[index]
        last = heading == "compliance"
        table.add_column(
            heading, justify="right" if right else "left", overflow="fold" if last else "ellipsis", no_wrap=not last
        )
    for run in result.runs:
        cells = _cells(run, result)
        style = "dim" if run.path in result.dropped else ""
        table.add_row(*(cells[index] for index in shown), style=style)
    for number, reason in result.crashes.items():
        cells = [f"failed_{number}.txt", "", "crashed", *[""] * 9, reason]
        table.add_row(*(_plain(cells[index]) for index in shown), style="red")
    return table


def _plain(value: str) -> Any:
    from rich.text import Text

    return Text(value)


def _cells(run: Run, result: Result) -> list[Any]:
    from rich.text import Text

    rate = run.sequences_per_second
    each = rate / result.accelerators if rate and result.accelerators else None
    dropped = {"best": "best, dropped", "worst": "worst, dropped"}.get(result.dropped.get(run.path, ""), "")
    verdict = Text()
    if run.compliant:
        verdict.append("ok", "green")
    else:
        verdict.append(first_reason(run.findings), "red")
    if dropped:
        verdict.append(f"  {dropped}", "italic")
    return [
        Text(text(run.path.name)),
        Text(_seed(run)),
        Text(text(run.status), "" if run.converged else "yellow"),
        _plain(_format(run.init_seconds, ",.1f")),
        Text(_format(run.minutes, ",.4f"), "bold"),
        Text(str(len(run.evaluations))),
        _plain(_format(run.samples, ",.0f")),
        _plain(_format(run.first_accuracy, ".4f")),
        _plain(_format(run.final_accuracy, ".4f")),
        _plain(_format(rate, rate_format(rate))),
        _plain(_format(each, rate_format(each))),
        _plain(_format(None if run.evaluation_share is None else 100 * run.evaluation_share, ".1f")),
        verdict,
    ]


def rate_format(rate: float | None) -> str:
    """Three or more digits of a rate."""
    return ",.0f" if rate is None or rate >= 100 else ".3g" if rate < 10 else ".1f"


def _seed(run: Run) -> str:
    if not run.seeds:
        return "-"
    more = len(set(map(repr, run.seeds))) - 1
    return text(run.seeds[0])[:12] + (f" +{more}" if more else "")


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def first_reason(findings: Sequence[Finding]) -> str:
    """The first broken rule in a few words, and how many more there are."""
    errors = [finding for finding in findings if finding.severity == ERROR]
    if not errors:
        return "ok"
    first = errors[0]
    more = f" (+{len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{first.key + ' ' if first.key else ''}{first.message}{more}"


def summary(result: Result) -> list[tuple[str, str, str]]:
    """The lines beneath the table: (label, text, style)."""
    lines = []
    if result.score is not None:
        score = f"{result.score:.4f} min"
        if result.scaling_factor != 1:
            score += (
                f" = {result.olympic_minutes:.4f} x {result.scaling_factor:.6f} (converged faster than the RCP mean)"
            )
        lines.append(
            ("score", score + (", official" if result.official else ""), "bold green" if result.official else "")
        )
    elif result.median_minutes is not None:
        lines.append(("median", f"{result.median_minutes:.4f} min, no olympic score yet", ""))
    if not result.official:
        lines.append(("unofficial", "; ".join(result.obstacles) or "no score", "yellow"))
    lines.extend(_spread(result))
    lines.extend(_rcp_lines(result))
    return lines


def _spread(result: Result) -> list[tuple[str, str, str]]:
    minutes = [run.minutes for run in result.counted if run.minutes is not None]
    if len(minutes) < 2 or result.median_minutes is None:
        return []
    line = f"median {result.median_minutes:.4f}, fastest {minutes[0]:.4f}, slowest {minutes[-1]:.4f} min"
    return [("runs", f"{len(minutes)} of {len(result.runs)} count: {line}", "")]


def _rcp_lines(result: Result) -> list[tuple[str, str, str]]:
    point = result.rcp_point
    if result.division != "closed":
        return [("RCP", f"not tested in the {result.division} division", "dim")] if result.division else []
    if point is None:
        return [("RCP", result.rcp_test.reason, "red")] if result.rcp_test else []
    how = "exact" if point.interpolated_from is None else "between {:,} and {:,}".format(*point.interpolated_from)
    if result.batch_size is not None and point.batch_size != result.batch_size:
        how = f"of batch {point.batch_size:,}, the smallest with one"
    lines = [("RCP", f"mean {point.mean:,.0f}, minimum {point.minimum:,.0f} samples ({how})", "")]
    mean = result.mean_samples
    if mean is not None:
        margin = mean - point.minimum
        sigma = f", {margin / point.std:+.2f} sigma" if point.std else ""
        verdict = "passed" if result.rcp_test and result.rcp_test.passed else "FAILED"
        short = "" if len(result.runs) == REQUIRED_RUNS else f" on {len(result.runs)} runs"
        line = f"{verdict}{short}: mean {mean:,.0f} samples, {margin:+,.0f} to the minimum{sigma}"
        lines.append(("", line, "green" if verdict == "passed" else "red"))
    elif result.rcp_test is not None:
        lines.append(("", f"FAILED: {result.rcp_test.reason}", "red"))
    return lines
