"""`show`: one table for each result, one row for each run, and the score beneath."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from review.league.borrowed import describe
from review.logs.mllog import text
from review.logs.output import ERROR, Finding, labelled, markdown_table, markdown_text, rate_text
from review.results.dossier import Dossier
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, Result
from review.verdict.checking import as_dict, energy_obstacles, obstacles

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# (heading, right-aligned, the order in which columns go when the terminal is too narrow: 0 stays)
_COLUMNS = (
    ("run", False, 0),
    ("seed", True, 5),
    ("status", False, 0),
    ("init s", True, 4),
    ("minutes", True, 0),
    ("evals", True, 3),
    ("samples", True, 0),
    ("first acc", True, 6),
    ("final acc", True, 0),
    ("seq/s", True, 7),
    ("/accel", True, 2),
    ("eval %", True, 1),
    ("kJ", True, 2),
    ("compliance", False, 0),
)
_GAP = 3  # between columns of the table


def show(results: Sequence[Result], out: Console) -> None:
    """Prints every result."""
    for index, result in enumerate(results):
        if index:
            out.print()
        _show_one(result, out)


def _show_one(result: Result, out: Console) -> None:
    from rich.text import Text

    name, about = text(result.name), result.subtitle
    fits = len(name) + 2 + len(about) <= out.width
    out.print(Text.assemble((name, "bold"), "  " if fits else "\n", about), soft_wrap=True)
    out.print(Text(str(result.folder), "dim"), soft_wrap=True)
    table, has_reasons = _table(result, out.width)
    out.print(table)
    for label, line, style in summary(result):
        out.print(labelled(label, line, style), soft_wrap=True)
    for file, reason in () if has_reasons else reasons(result):
        out.print(labelled("fails", f"{file}: {reason}", "red"), soft_wrap=True)


_OF_RESULT = ("name", "folder", "organization", "division", "global_batch_size", "accelerators", "score_minutes")
_OF_SCORE = ("olympic_minutes", "scaling_factor", "official")


def csv_rows(results: Sequence[Result]) -> list[list[Any]]:
    """Headings and a row for each run, what is of its result in front: for a spreadsheet."""
    found: list[list[Any]] = []
    headings: list[str] = []
    for result in results:
        whole = as_dict(result)
        for run in whole["runs"]:
            values = {name: whole[name] for name in (*_OF_RESULT, *_OF_SCORE)}
            values["energy_joules"] = whole["energy"]["joules"] if whole["energy"] else None
            values |= {name: value for name, value in run.items() if name != "findings"}
            headings = list(values)
            found.append(list(values.values()))
    return [headings, *found]


def markdown(results: Sequence[Result]) -> str:
    """The table and the lines beneath it, for the text of an issue."""
    parts = []
    for result in results:
        shown = [i for i, column in enumerate(_COLUMNS) if result.energy or column[0] != "kJ"]
        rows = [_row(run, result, True) for run in result.runs]
        rows += [_crash(number, reason, True) for number, reason in result.crashes.items()]
        table = [[_COLUMNS[i][0] for i in shown], *([row[i].plain for i in shown] for row in rows)]
        lines = [f"- **{label or '…'}** {markdown_text(line)}" for label, line, _ in summary(result)]
        about = f"### {markdown_text(text(result.name))}\n\n{markdown_text(result.subtitle)}"
        parts += [about, markdown_table(table, [_COLUMNS[i][1] for i in shown]), "\n".join(lines)]
    return "\n\n".join(parts)


def reasons(result: Result) -> list[tuple[str, str]]:
    """(file, first reason) of every run that does not count."""
    failing = [(text(run.path.name), first_reason(run.findings)) for run in result.runs if not run.compliant]
    failing += [(text(path.name), reason) for path, reason in result.unreadable.items()]
    return failing + [(f"failed_{number}.txt", text(reason)) for number, reason in result.crashes.items()]


def _table(result: Result, width: int) -> tuple[Table, bool]:
    """The table, and whether there was room in it for the reasons of failing runs."""
    from rich import box
    from rich.table import Table

    rows = [_row(run, result, True) for run in result.runs] + [_crash(*crash, True) for crash in result.crashes.items()]
    shown = [index for index, column in enumerate(_COLUMNS) if result.energy or column[0] != "kJ"]
    has_reasons = _width(rows, shown) <= width
    if not has_reasons:
        rows = [_row(run, result, False) for run in result.runs]
        rows += [_crash(*crash, False) for crash in result.crashes.items()]
    for index in sorted((i for i in shown if _COLUMNS[i][2]), key=lambda i: _COLUMNS[i][2]):
        if _width(rows, shown) > width:
            shown.remove(index)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for index in shown:
        heading, right, _ = _COLUMNS[index]
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    styles = ["dim" if run.path in result.dropped else "" for run in result.runs] + ["red"] * len(result.crashes)
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*(row[index] for index in shown), style=style)
    return table, has_reasons


def _width(rows: list[list[Text]], shown: list[int]) -> int:
    widths = [max(len(_COLUMNS[i][0]), *(row[i].cell_len for row in rows), 0) for i in shown]
    return sum(widths) + _GAP * (len(shown) - 1) + 2


def _crash(number: int, reason: str, with_reason: bool) -> list[Text]:
    from rich.text import Text

    cells = [f"failed_{number}.txt", "", "crashed", *[""] * 10, text(reason) if with_reason else "fails"]
    return [Text(cell) for cell in cells]


def _row(run: Run, result: Result, with_reason: bool) -> list[Text]:
    from rich.text import Text

    rate = run.sequences_per_second
    each = rate / result.accelerators if rate and result.accelerators else None
    share = None if run.evaluation_share is None else 100 * run.evaluation_share
    joules = result.joules(run)
    reason = first_reason(run.findings) if with_reason else "fails"
    verdict = Text("ok", "green") if run.compliant else Text(reason, "red")
    dropped = result.dropped.get(run.path)
    if dropped in ("best", "worst"):
        verdict.append(f", {dropped}", "italic")
    return [
        Text(text(run.path.name)),
        Text(_seed(run)),
        Text(text(run.status), "" if run.converged else "yellow"),
        Text(_format(run.init_seconds, ",.1f")),
        Text(_format(run.minutes, ",.4f"), "bold"),
        Text(str(len(run.evaluations))),
        Text(_format(run.samples, ",.0f")),
        Text(_format(run.first_accuracy, ".4f")),
        Text(_format(run.final_accuracy, ".4f")),
        Text(rate_text(rate)),
        Text(rate_text(each)),
        Text(_format(share, ".1f")),
        Text(_format(None if joules is None else joules / 1000, ",.1f")),
        verdict,
    ]


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
    lines.extend(_spread(result))
    lines.extend(_energy_lines(result, official))
    lines.extend(_rcp_lines(result))
    borrowed = describe(result)
    return [*lines, ("recipe", borrowed, "dim")] if borrowed else lines


def _energy_lines(result: Result, official: bool) -> list[tuple[str, str, str]]:
    """The energy beside the score, from the same runs; nothing where it was not measured."""
    if result.energy is None:
        return []
    against = energy_obstacles(result)
    if result.energy.joules is None or result.energy.watts is None:
        return [("energy", f"none: {result.energy.reason}", "yellow")]
    line = f"{result.energy.joules:,.2f} J by the same runs, {result.energy.watts:,.0f} W on average"
    if against:
        return [("energy", line, ""), ("", f"unofficial: {'; '.join(against)}", "yellow")]
    return [("energy", line + (", official" if official else ""), "bold green" if official else "")]


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
        why = [("", line, "yellow") for line in Dossier(result).lines()]
        return [("RCP", result.rcp_test.reason, "red"), *why] if result.rcp_test else []
    lines = [("RCP", point.describe(result.batch_size), "")]
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
    return lines + [("", line, "yellow") for line in Dossier(result).lines()]


def print_rcp(result: Result, out: Console) -> None:
    """Prints the RCP test of a result, and why it fails."""
    from rich.text import Text

    out.print(Text.assemble((text(result.name), "bold"), "  ", result.subtitle), soft_wrap=True)
    for label, line, style in _rcp_lines(result):
        out.print(labelled(label, line, style), soft_wrap=True)
