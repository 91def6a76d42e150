"""The findings of `check` for people: one entry for each rule, with every place that breaks it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from review.logs.mllog import text
from review.logs.output import console, say
from review.verdict.checking import Checked, groups, places, shortened, subject

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr that says what is going on."""
    from rich.console import Console
    from rich.text import Text

    err = Console(stderr=True)
    if not err.is_terminal:
        yield lambda message: None
        return
    with err.status("official checkers") as spinner:
        yield lambda message: spinner.update(Text(text(message)))


def print_checked(checked: Sequence[Checked], strict: bool = False) -> None:
    """Prints everything on stdout, the verdict last, with how many findings there are in how many places."""
    from rich.table import Table
    from rich.text import Text

    out, counts = console(), []
    for one in checked:
        say(out, (text(one.title), "bold"), "  ", ("pass", "green") if one.passed(strict) else ("fail", "red"))
        say(out, (str(one.path), "dim"))
        tools = []
        for outcome in one.outcomes:
            crash = f"crashes: {shortened(text(outcome.crash))}" if outcome.crash else ""
            tools.append(f"{outcome.tool} {crash or ('passes' if outcome.passed else 'fails')}")
        say(out, ("  official  ", "dim"), ", ".join(tools))
        for group in groups(one.findings):
            first = group[0]
            say(out, (f"  {first.severity:<10}", _STYLES[first.severity]), subject(group, one.path))
            grid = Table.grid(padding=(0, 1))
            for width in (11, 4, None):
                grid.add_column(width=width, overflow="fold")
            at = places(group, one.path) if any(finding.line or finding.key for finding in group) else ""
            rule = f"{shortened(first.rule or '')} [{first.source}]"
            for label, line in (("at", at), ("rule", rule), ("do", first.hint)):
                if line:
                    grid.add_row("", Text(label, "dim"), Text(text(line)))
            out.print(grid)
        out.print()
    for severity in _STYLES:
        found = [group for one in checked for group in groups(one.findings) if group[0].severity == severity]
        if found:
            in_all = sum(len(group) for group in found)
            at = f" at {in_all} places" if in_all > len(found) else ""
            counts.append(f"{len(found)} {severity}{'s' if len(found) > 1 else ''}{at}")
    passed = all(one.passed(strict) for one in checked)
    verdict = ("PASS", "bold green") if passed else ("FAIL", "bold red")
    say(out, verdict, f": {', '.join(counts) or 'nothing found'}")
