"""`show`: one table for each result, one row for each run, and the score beneath."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from review.league.entries import describe_same, same_hyperparameters
from review.logs.mllog import text
from review.logs.output import (
    Column,
    console,
    fit,
    labelled,
    markdown_table,
    markdown_text,
    say,
    table,
    table_width,
)
from review.results.dossier import Dossier
from review.results.score import REQUIRED_RUNS, Result
from review.results.table import cells as run_cells
from review.results.table import columns, first_reason
from review.verdict import checking
from review.verdict.checking import energy_obstacles, obstacles

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_OF_RESULT = ("name", "folder", "organization", "division", "global_batch_size", "accelerators", "score_minutes")
_OF_SCORE = ("olympic_minutes", "scaling_factor", "official")


def print_text(results: Sequence[Result], out: Console | None = None) -> None:
    """Prints every result."""
    out = out or console()
    for index, result in enumerate(results):
        if index:
            out.print()
        fits = len(text(result.name)) + 2 + len(result.subtitle) <= out.width
        say(out, (text(result.name), "bold"), "  " if fits else "\n", result.subtitle)
        say(out, (str(result.folder), "dim"))
        shown, rows = _cells(result, with_reasons=True)
        has_reasons = table_width(shown, rows) <= out.width
        if not has_reasons:
            shown, rows = fit(*_cells(result, with_reasons=False), out.width)
        styles = ["dim" if run.path in result.dropped else "" for run in result.runs] + ["red"] * len(result.crashes)
        out.print(table(shown, rows, styles))
        for label, line, style in summary(result):
            say(out, labelled(label, line, style))
        if not has_reasons:
            failing = [(text(run.path.name), first_reason(run.findings)) for run in result.runs if not run.compliant]
            failing += [(text(path.name), reason) for path, reason in result.unreadable.items()]
            failing += [(f"failed_{number}.txt", text(reason)) for number, reason in result.crashes.items()]
            for file, reason in failing:
                say(out, labelled("fails", f"{file}: {reason}", "red"))


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results for JSON."""
    keys = ("round", "submitter", "system", "batch_size", "folder")
    found = []
    for result in results:
        same = [{key: getattr(entry, key) for key in keys} for entry in same_hyperparameters(result)]
        found.append({**checking.as_dict(result), "same_hyperparameters": same})
    return found


def csv_rows(results: Sequence[Result]) -> list[list[Any]]:
    """Headings and a row for each run, what is of its result in front: for a spreadsheet."""
    records = []
    for whole in map(checking.as_dict, results):
        shared = {name: whole[name] for name in (*_OF_RESULT, *_OF_SCORE)}
        shared["energy_joules"] = whole["energy"]["joules"] if whole["energy"] else None
        records += [shared | {name: run[name] for name in run if name != "findings"} for run in whole["runs"]]
    return [list(records[-1] if records else ()), *(list(record.values()) for record in records)]


def markdown(results: Sequence[Result]) -> str:
    """The table and the lines beneath it, for the text of an issue."""
    parts = []
    for result in results:
        shown, rows = _cells(result, with_reasons=True)
        cells = [[one.heading for one in shown], *(list(map(str, row)) for row in rows)]
        lines = [f"- **{label or '…'}** {markdown_text(line)}" for label, line, _ in summary(result)]
        about = f"### {markdown_text(text(result.name))}\n\n{markdown_text(result.subtitle)}"
        parts += [about, markdown_table(cells, [one.right for one in shown]), "\n".join(lines)]
    return "\n\n".join(parts)


def _cells(result: Result, with_reasons: bool) -> tuple[list[Column], list[list[str | Text]]]:
    """The columns and rows of a result's table; ``with_reasons``: why runs do not comply, else only that they fail."""
    from rich.text import Text

    shown = columns(result)
    records: list[dict[str, str | Text]] = []
    for run in result.runs:
        cells = run_cells(run, result)
        verdict = (
            Text("ok", "green") if run.compliant else Text(cells["compliance"] if with_reasons else "fails", "red")
        )
        dropped = result.dropped.get(run.path)
        if dropped in ("best", "worst"):
            verdict.append(f", {dropped}", "italic")
        status = Text(cells["status"], "" if run.converged else "yellow")
        records.append({**cells, "status": status, "minutes": Text(cells["minutes"], "bold"), "compliance": verdict})
    for number, reason in result.crashes.items():
        said = text(reason) if with_reasons else "fails"
        records.append({"run": f"failed_{number}.txt", "status": "crashed", "compliance": said})
    return shown, [[record.get(one.heading, "") for one in shown] for record in records]


def summary(result: Result) -> list[tuple[str, str, str]]:
    """The lines beneath the table: (label, text, style)."""
    lines, reasons = [], obstacles(result)
    official = result.score is not None and not reasons
    if result.score is not None:
        score = f"{result.score:.4f} min"
        if result.scaling_factor != 1:
            score += (
                f" = {result.olympic_minutes:.4f} x {result.scaling_factor:.6f} (converged faster than the RCP mean)"
            )
        lines.append(("score", score + (", official" if official else ""), "bold green" if official else ""))
    elif result.median_minutes is not None:
        lines.append(("median", f"{result.median_minutes:.4f} min, no olympic score yet", ""))
    elif result.reached_minutes is not None:
        about = "not checked: the olympic mean of the runs that say they reached the target"
        lines.append(("raw", f"{result.reached_minutes:.4f} min, {about}", "yellow"))
    if not official:
        lines.append(("unofficial", "; ".join(reasons) or "no score", "yellow"))
    if result.other_ruleset:
        lines.append(("ruleset", f"the logs are of another round: try --ruleset {result.other_ruleset}", "yellow"))
    minutes = [run.minutes for run in result.counted]
    if len(minutes) > 1:
        spread = f"median {result.median_minutes:.4f}, fastest {minutes[0]:.4f}, slowest {minutes[-1]:.4f} min"
        lines.append(("runs", f"{len(minutes)} of {len(result.runs)} count: {spread}", ""))
    if result.energy is not None and result.energy.joules is None:
        lines.append(("energy", f"none: {result.energy.reason}", "yellow"))
    elif result.energy is not None:
        line = f"{result.energy.joules:,.2f} J by the same runs, {result.energy.watts:,.0f} W on average"
        if against := energy_obstacles(result):
            lines += [("energy", line, ""), ("", f"unofficial: {'; '.join(against)}", "yellow")]
        else:
            lines.append(("energy", line + (", official" if official else ""), "bold green" if official else ""))
    lines += _rcp_lines(result)
    if borrowed := describe_same(result):
        lines.append(("recipe", borrowed, "dim"))
    return lines


def _rcp_lines(result: Result) -> list[tuple[str, str, str]]:
    point, test, mean = result.rcp_point, result.rcp_test, result.mean_samples
    if result.division != "closed":
        return [("RCP", f"not tested in the {result.division} division", "dim")] if result.division else []
    why = [("", line, "yellow") for line in Dossier(result).lines()]
    if point is None:
        return [("RCP", test.reason, "red"), *why] if test else []
    lines = [("RCP", point.describe(result.batch_size), "")]
    if mean is not None:
        margin = mean - point.minimum
        sigma = f", {margin / point.std:+.2f} sigma" if point.std else ""
        verdict, style = ("passed", "green") if test and test.passed else ("FAILED", "red")
        short = "" if len(result.runs) == REQUIRED_RUNS else f" on {len(result.runs)} runs"
        line = f"{verdict}{short}: mean {mean:,.0f} samples, {margin:+,.0f} to the minimum{sigma}"
        lines.append(("", line, style))
    elif test is not None:
        lines.append(("", f"FAILED: {test.reason}", "red"))
    return lines + why


def print_rcp(dossiers: Sequence[Dossier]) -> None:
    """Prints the RCP test of each result, and why it fails."""
    out = console()
    for result in (dossier.result for dossier in dossiers):
        say(out, (text(result.name), "bold"), "  ", result.subtitle)
        for label, line, style in _rcp_lines(result):
            say(out, labelled(label, line, style))
