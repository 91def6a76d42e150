"""`show`: one table for each result, one row for each run, and the score beneath."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from review.league.borrowed import as_list, describe
from review.logs.mllog import text
from review.logs.output import (
    ERROR,
    Column,
    Finding,
    console,
    fit,
    labelled,
    markdown_table,
    markdown_text,
    number_text,
    rate_text,
    say,
    table,
    table_width,
)
from review.results.dossier import Dossier
from review.results.score import REQUIRED_RUNS, Result
from review.verdict import checking
from review.verdict.checking import energy_obstacles, obstacles

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_COLUMNS = (
    Column("run"),
    Column("seed", right=True, drop=5),
    Column("status"),
    Column("init s", right=True, drop=4),
    Column("minutes", right=True),
    Column("evals", right=True, drop=3),
    Column("samples", right=True),
    Column("first acc", right=True, drop=6),
    Column("final acc", right=True),
    Column("seq/s", right=True, drop=7),
    Column("/accel", right=True, drop=2),
    Column("eval %", right=True, drop=1),
    Column("kJ", right=True, drop=2),
    Column("compliance"),
)
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
        columns, rows = _cells(result, with_reasons=True)
        has_reasons = table_width(columns, rows) <= out.width
        if not has_reasons:
            columns, rows = fit(*_cells(result, with_reasons=False), out.width)
        styles = ["dim" if run.path in result.dropped else "" for run in result.runs] + ["red"] * len(result.crashes)
        out.print(table(columns, rows, styles))
        for label, line, style in summary(result):
            say(out, labelled(label, line, style))
        if not has_reasons:
            runs = [] if pretrains(result) else [run for run in result.runs if not run.compliant]
            failing = [(text(run.path.name), first_reason(run.findings)) for run in runs]
            failing += [(text(path.name), reason) for path, reason in result.unreadable.items()]
            failing += [(f"failed_{number}.txt", text(reason)) for number, reason in result.crashes.items()]
            for file, reason in failing:
                say(out, labelled("fails", f"{file}: {reason}", "red"))


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results for JSON."""
    return [{**checking.as_dict(result), "same_hyperparameters": as_list(result)} for result in results]


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
        columns, rows = _cells(result, with_reasons=True)
        cells = [[one.heading for one in columns], *(list(map(str, row)) for row in rows)]
        lines = [f"- **{label or '…'}** {markdown_text(line)}" for label, line, _ in summary(result)]
        about = f"### {markdown_text(text(result.name))}\n\n{markdown_text(result.subtitle)}"
        parts += [about, markdown_table(cells, [one.right for one in columns]), "\n".join(lines)]
    return "\n\n".join(parts)


def _cells(result: Result, with_reasons: bool) -> tuple[list[Column], list[list[str | Text]]]:
    """The columns and rows of a result's table; ``with_reasons``: why runs do not comply, else only that they fail."""
    from rich.text import Text

    records: list[dict[str, str | Text]] = []
    for run in result.runs:
        rate = run.sequences_per_second
        reason = first_reason(run.findings) if with_reasons else "fails"
        verdict = Text("ok", "green") if run.compliant else Text(reason, "red")
        if pretrains(result) and run.converged:
            verdict = Text("no target", "dim")
        dropped = result.dropped.get(run.path)
        if dropped in ("best", "worst"):
            verdict.append(f", {dropped}", "italic")
        more = len(set(map(repr, run.seeds))) - 1
        joules = result.joules(run)
        records.append(
            {
                "run": run.name,
                "seed": text(run.seeds[0])[:12] + (f" +{more}" if more else "") if run.seeds else "-",
                "status": Text(text(run.status), "" if run.converged else "yellow"),
                "init s": number_text(run.init_seconds, ",.1f"),
                "minutes": Text(number_text(run.minutes, ",.4f"), "bold"),
                "evals": str(len(run.evaluations)),
                "samples": number_text(run.samples, ",.0f"),
                "first acc": number_text(run.first_accuracy, ".4f"),
                "final acc": number_text(run.final_accuracy, ".4f"),
                "seq/s": rate_text(rate),
                "/accel": rate_text(rate / result.accelerators if rate and result.accelerators else None),
                "eval %": number_text(None if run.evaluation_share is None else 100 * run.evaluation_share, ".1f"),
                "kJ": number_text(None if joules is None else joules / 1000, ",.1f"),
                "compliance": verdict,
            }
        )
    for number, reason in result.crashes.items():
        said = text(reason) if with_reasons else "fails"
        records.append({"run": f"failed_{number}.txt", "status": "crashed", "compliance": said})
    columns = [one for one in _COLUMNS if result.energy or one.heading != "kJ"]
    return columns, [[record.get(one.heading, "") for one in columns] for record in records]


def pretrains(result: Result) -> bool:
    """Whether config.json beside the logs says that the runs had no target: there for their weights, no results."""
    try:
        settings = json.loads((result.folder / "config.json").read_text(encoding="utf-8"))
        evaluate = settings["evaluate"]
        return not (evaluate["target"] and (evaluate["every_samples"] or evaluate["initial"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def first_reason(findings: Sequence[Finding]) -> str:
    """The first broken rule in a few words, and how many more there are."""
    errors = [finding for finding in findings if finding.severity == ERROR]
    if not errors:
        return "ok"
    more = f" (+{len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{errors[0].key + ' ' if errors[0].key else ''}{errors[0].message}{more}"


def summary(result: Result) -> list[tuple[str, str, str]]:
    """The lines beneath the table: (label, text, style)."""
    if pretrains(result):
        return [("pretraining", "to the last step: without a target there is no score", "")]
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
    if borrowed := describe(result):
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
