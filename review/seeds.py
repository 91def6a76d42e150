"""The rules of the official seed checker, which only closed results are held to."""

from __future__ import annotations

from collections.abc import Sequence

from review.findings import ERROR, Finding
from review.mllog import Event
from review.run import Run


def check_seeds(runs: Sequence[Run]) -> list[Finding]:
    """Every run logs integer seeds, no two runs one seed from one line of code, and every line of each log is readable.

    The last is no rule of its own: the official checker gives up on a log with a broken line, and fails.
    """
    found: list[Finding] = []
    seen: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        events = run.log.all("seed")
        if run.log.errors:
            broken = run.log.errors[0]
            rule, hint = "the seed checker reads every line of each log", "remove the broken line, or run again"
            found.append(_finding(run, f"cannot be read, since a line {broken.reason}", rule, hint, broken.line))
            continue
        if not events:
            hint = "log the run's seed once, on rank 0"
            found.append(_finding(run, "is missing", "every run logs a seed", hint))
        found += _check_events(run, events, seen)
    return found


def _check_events(run: Run, events: Sequence[Event], seen: dict[tuple[str, str, int], Run]) -> list[Finding]:
    found = []
    for event in events:
        try:
            seed = int(event.value)
            place = (str(event.metadata["file"]), str(event.metadata["lineno"]), seed)
        except (TypeError, ValueError, OverflowError, KeyError):
            rule, hint = "a seed is an integer, with metadata file and lineno", "log it with mllog"
            found.append(_finding(run, "is not a seed that can be compared", rule, hint, event.line))
            continue
        other = seen.setdefault(place, run)
        if other is not run:
            rule = "no two runs log one seed from one line of the code"
            hint = "leave SEED unset, and run again"
            found.append(_finding(run, f"is {seed}, as in {other.path.name}", rule, hint, event.line))
    return found


def _finding(run: Run, message: str, rule: str, hint: str, line: int | None = None) -> Finding:
    return Finding(
        severity=ERROR, message=message, source="seeds", file=run.path, line=line, key="seed", rule=rule, hint=hint
    )
