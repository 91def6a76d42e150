"""The findings of `check` for people: one entry for each rule, with every place that breaks it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from review.logs.findings import Finding
from review.logs.mllog import text
from review.results.display import console
from review.rulebook.official import Outcome
from review.verdict.checking import Checked

_MOST_PLACES = 6
_LONGEST_RULE = 300  # some official rules are lists of hundreds of names
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
    findings = [finding for one in checked for finding in one.findings]
    out.print(Text.assemble(verdict, f": {_counts(findings)}"), soft_wrap=True)


def _counts(findings: Sequence[Finding]) -> str:
    parts = []
    for severity in _STYLES:
        number = sum(finding.severity == severity for finding in findings)
        if number:
            parts.append(f"{number} {severity}{'s' if number > 1 else ''}")
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


def groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one rule together, in the order of the first."""
    found: dict[tuple[str | None, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.severity, finding.source, finding.message, finding.rule, finding.hint)
        found.setdefault(key, []).append(finding)
    return list(found.values())


def subject(group: Sequence[Finding], base: Path) -> str:
    """Which keys or files, and what about them."""
    names = [finding.key for finding in group if finding.key]
    if not names:
        names = [place for finding in group if (place := _file(finding, base))]
    names = list(dict.fromkeys(names))
    prefix = f"{', '.join(names[:_MOST_PLACES])}{_more(names)} " if names else ""
    return text(prefix + group[0].message)


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


def shortened(rule: str) -> str:
    """A rule at a length for reading."""
    return rule if len(rule) <= _LONGEST_RULE else f"{' '.join(rule[:_LONGEST_RULE].split())} ..."


def places(group: Sequence[Finding], base: Path) -> str:
    """Files with the lines of each."""
    files: dict[str, list[str]] = {}
    for finding in group:
        lines = files.setdefault(_file(finding, base), [])
        if finding.line is not None and str(finding.line) not in lines:
            lines.append(str(finding.line))
    found = [f"{name}:{','.join(lines)}" if lines else name for name, lines in files.items() if name]
    return ", ".join(found[:_MOST_PLACES]) + _more(found)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - _MOST_PLACES} more" if len(names) > _MOST_PLACES else ""


def _file(finding: Finding, base: Path) -> str:
    """The file, relative to the checked folder where that is shorter; empty for that folder itself."""
    if finding.file is None or finding.file == base:
        return ""
    name = str(finding.file)
    with contextlib.suppress(ValueError):  # other drives
        name = min(name, os.path.relpath(finding.file, base if base.is_dir() else base.parent), key=len)
    return name
