"""The findings of `check` for people: one entry for each rule, with every place that breaks it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from review.logs.mllog import text
from review.logs.output import Finding, console
from review.rulebook.official import Outcome
from review.verdict.checking import Checked
from review.verdict.grouping import groups, places, shortened, subject

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr that says what is going on."""
    err = Console(stderr=True)
    if not err.is_terminal:
        yield lambda message: None
        return
    with err.status("official checkers") as spinner:
        yield lambda message: spinner.update(Text(text(message)))


def print_checked(checked: Sequence[Checked], strict: bool = False) -> None:
    """Prints everything on stdout, the verdict last."""
    out = console()
    for one in checked:
        _print_one(one, strict, out)
        out.print()
    failing = [one for one in checked if not one.passed(strict)]
    verdict = Text("PASS", "bold green") if not failing else Text("FAIL", "bold red")
    out.print(Text.assemble(verdict, f": {_counts(checked)}"), soft_wrap=True)


def _counts(checked: Sequence[Checked]) -> str:
    """How many findings of each severity are printed above, and in how many places they are."""
    parts = []
    for severity in _STYLES:
        found = [group for one in checked for group in groups(one.findings) if group[0].severity == severity]
        if found:
            in_all = sum(len(group) for group in found)
            at = f" at {in_all} places" if in_all > len(found) else ""
            parts.append(f"{len(found)} {severity}{'s' if len(found) > 1 else ''}{at}")
    return ", ".join(parts) or "nothing found"


def _print_one(one: Checked, strict: bool, out: Console) -> None:
    passed = one.passed(strict)
    verdict = Text("pass", "green") if passed else Text("fail", "red")
    out.print(Text.assemble((text(one.title), "bold"), "  ", verdict), soft_wrap=True)
    out.print(Text(str(one.path), "dim"), soft_wrap=True)
    tools = ", ".join(_said(outcome) for outcome in one.outcomes)
    out.print(Text.assemble(("  official  ", "dim"), tools), soft_wrap=True)
    for group in groups(one.findings):
        severity = group[0].severity
        out.print(Text.assemble((f"  {severity:<10}", _STYLES[severity]), subject(group, one.path)), soft_wrap=True)
        out.print(_details(group, one.path))


def _said(outcome: Outcome) -> str:
    if outcome.crash:
        return f"{outcome.tool} crashes: {shortened(text(outcome.crash))}"
    return f"{outcome.tool} {'passes' if outcome.passed else 'fails'}"


def _details(group: Sequence[Finding], base: Path) -> Table:
    grid = Table.grid(padding=(0, 1))
    for width in (11, 4, None):
        grid.add_column(width=width, overflow="fold")
    first = group[0]
    at = places(group, base) if any(finding.line or finding.key for finding in group) else ""
    for label, line in (("at", at), ("rule", f"{shortened(first.rule or '')} [{first.source}]"), ("do", first.hint)):
        if line:
            grid.add_row("", Text(label, "dim"), Text(text(line)))
    return grid
