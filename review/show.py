"""`show`: a table of runs for each result, with the score below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from review.logs.mllog import text
from review.logs.output import Heading, Line, Part, Table
from review.results.score import REQUIRED_RUNS, UNVERIFIED, Result
from review.results.table import cells, columns, first_reason, rcp_lines
from review.verdict import checking

if TYPE_CHECKING:
    from rich.text import Text

_OF_RESULT = (
    "name",
    "folder",
    "organization",
    "division",
    "global_batch_size",
    "accelerators",
    "score_minutes",
)
_OF_SCORE = ("olympic_minutes", "scaling_factor", "official", "unverified")


def parts(results: Sequence[Result]) -> list[Part]:
    """Table and summary of every result, and why runs failed."""
    made: list[Part] = []
    for result in results:
        made.append(Heading(text(result.name), result.subtitle, str(result.folder)))
        made += [_table(result), *summary(result)]
        # Runs without a target are not meant to comply.
        runs = [] if result.pretrains else [run for run in result.runs if not run.compliant]
        failing = [(text(run.path.name), first_reason(run.findings)) for run in runs]
        failing += [(text(path.name), reason) for path, reason in result.unreadable.items()]
        failing += [
            (f"failed_{number}.txt", text(reason)) for number, reason in result.crashes.items()
        ]
        made += [Line("fails", f"{file}: {reason}", "red") for file, reason in failing]
    return made


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [checking.as_dict(result) for result in results]


def csv_rows(results: Sequence[Result]) -> list[list[Any]]:
    """Headings and a row per run, the columns of its result first."""
    records = []
    for whole in map(checking.as_dict, results):
        shared = {name: whole[name] for name in (*_OF_RESULT, *_OF_SCORE)}
        shared["energy_joules"] = whole["energy"]["joules"] if whole["energy"] else None
        records += [
            shared | {name: run[name] for name in run if name != "findings"}
            for run in whole["runs"]
        ]
    # All records have the same keys, so that those of the last are the headings.
    return [list(records[-1] if records else ()), *(list(record.values()) for record in records)]


def _table(result: Result) -> Table:
    from rich.text import Text

    shown, records = columns(result), []
    for run in result.runs:
        record: dict[str, str | Text] = {**cells(run, result)}
        verdict = Text("ok", "green") if run.compliant else Text("fails", "red")
        if result.pretrains and run.converged:
            verdict = Text("no target", "dim")
        if (dropped := result.dropped.get(run.path)) in ("best", "worst"):
            verdict.append(f", {dropped}", "italic")
        record["status"] = Text(str(record["status"]), "" if run.converged else "yellow")
        record["minutes"] = Text(str(record["minutes"]), "bold")
        records.append(record | {"compliance": verdict})
    for number in result.crashes:
        records.append({"run": f"failed_{number}.txt", "status": "crashed", "compliance": "fails"})
    styles = ["dim" if run.path in result.dropped else "" for run in result.runs] + ["red"] * len(
        result.crashes
    )
    return Table(
        shown, [[record.get(one.heading, "") for one in shown] for record in records], styles
    )


def summary(result: Result) -> list[Line]:
    """The lines below the table."""
    if result.pretrains:
        return [
            Line(
                "pretraining", "runs to the last step; without a target accuracy there is no score"
            )
        ]
    lines, reasons, energy = [], checking.obstacles(result), result.energy
    official = ", official" if result.score is not None and not reasons else ""
    good = "bold green" if official else ""
    # The best that is known: the score, a median, or the mean of logs that no rules accept.
    if result.score is not None:
        score = f"{result.score:.4f} min"
        if result.scaling_factor != 1:
            why = "converged faster than the RCP mean"
            score += f" = {result.olympic_minutes:.4f} x {result.scaling_factor:.6f} ({why})"
        lines.append(Line("score", score + official, good))
    elif result.median_minutes is not None:
        lines.append(Line("median", f"{result.median_minutes:.4f} min, no olympic score yet"))
    elif result.reached_minutes is not None:
        about = "not checked: olympic mean of the runs that report success"
        lines.append(Line("raw", f"{result.reached_minutes:.4f} min, {about}", "yellow"))
    # Wherever a time is shown, MLCommons' guidelines want this beside it.
    if lines:
        lines.append(Line("", UNVERIFIED, "dim"))
    if not official:
        lines.append(Line("unofficial", "; ".join(reasons) or "no score", "yellow"))
    if result.other_ruleset:
        lines.append(
            Line(
                "ruleset", f"logs of another round: try --ruleset {result.other_ruleset}", "yellow"
            )
        )
    minutes = [run.minutes for run in result.counted]
    if len(minutes) > 1:
        spread = f"median {result.median_minutes:.4f}, fastest {minutes[0]:.4f}, slowest {minutes[-1]:.4f} min"
        lines.append(Line("runs", f"{len(minutes)} of {len(result.runs)} count: {spread}"))
    if energy is not None and energy.joules is None:
        lines.append(Line("energy", f"none: {energy.reason}", "yellow"))
    elif energy is not None:
        line = f"{energy.joules:,.2f} J over the same runs, {energy.watts:,.0f} W on average"
        if against := checking.energy_obstacles(result):
            lines += [Line("energy", line), Line("", f"unofficial: {'; '.join(against)}", "yellow")]
        else:
            # Energy counts only with a time that counts.
            lines.append(Line("energy", line + official, good))
    return lines + _rcp_lines(result)


def _rcp_lines(result: Result) -> list[Line]:
    point, test, mean = result.rcp_point, result.rcp_test, result.mean_samples
    if result.division != "closed":
        return (
            [Line("RCP", f"not tested in the {result.division} division", "dim")]
            if result.division
            else []
        )
    lines = []
    if point is None:
        lines = [Line("RCP", test.reason, "red")] if test else []
    else:
        lines.append(Line("RCP", point.describe(result.batch_size)))
        if mean is not None:
            margin = mean - point.minimum
            # Deviations of single reference runs, to give the margin a scale.
            sigma = f", {margin / point.std:+.2f} sigma" if point.std else ""
            verdict, style = ("passed", "green") if test and test.passed else ("FAILED", "red")
            short = "" if len(result.runs) == REQUIRED_RUNS else f" on {len(result.runs)} runs"
            line = (
                f"{verdict}{short}: mean {mean:,.0f} samples, {margin:+,.0f} to the minimum{sigma}"
            )
            lines.append(Line("", line, style))
        elif test is not None:
            lines.append(Line("", f"FAILED: {test.reason}", "red"))
    return lines + [Line("", line, "yellow") for line in rcp_lines(result)]
