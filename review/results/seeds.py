"""The rules of the official seed checker, which only closed results are held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from review.logs.mllog import Event
from review.logs.output import ERROR, Finding
from review.results.run import Run


def check_seeds(runs: Sequence[Run]) -> list[Finding]:
    """Every run logs integer seeds, no two runs one seed from one line of code, and every line of each log is readable.

    The last is not a rule of its own: the official checker gives up on a log with a broken line, and fails.
    """
    found: list[Finding] = []
    seen: dict[tuple[Any, ...] | None, Run] = {}
    for run in runs:
        if run.log.errors:
            broken = run.log.errors[0]
            rule, hint = "the seed checker reads every line of each log", "remove the broken line, or run again"
            found.append(_finding(run, f"cannot be read, since a line {broken.reason}", rule, hint, broken.line))
            continue
        events = run.log.all("seed")
        if not run.log.events:
            rule, hint = "a log has MLLOG lines", "see what is said of the log itself"
            found.append(_finding(run, "cannot be read: the file has no MLLOG lines", rule, hint))
        elif not events:
            hint = "log the run's seed once, on rank 0"
            found.append(_finding(run, "is missing", "every run logs a seed", hint))
        places = [_place(event) for event in events]
        if None in places:
            rule, hint = "a seed is an integer, with metadata file and lineno", "log it with mllog"
            line = events[places.index(None)].line
            found.append(_finding(run, "is not a seed that can be compared", rule, hint, line))
            continue
        for event, place in zip(events, places, strict=True):
            if place in seen:
                rule = "no two runs log one seed from one line of the code, and no run logs it twice"
                hint = "leave SEED unset, log it on rank 0 alone, and run again"
                where = "twice" if seen[place] is run else f"as in {seen[place].path.name}"
                message = f"is {int(event.value)}, {where}"
                found.append(_finding(run, message, rule, hint, event.line))
            else:
                seen[place] = run
    return found


def _place(event: Event) -> tuple[Any, ...] | None:
    """What the checker compares; None where it cannot."""
    try:
        place = (event.metadata["file"], event.metadata["lineno"], int(event.value))
        hash(place)
    except (TypeError, ValueError, OverflowError, KeyError):
        return None
    return place


def _finding(run: Run, message: str, rule: str, hint: str, line: int | None = None) -> Finding:
    return Finding(
        severity=ERROR, message=message, source="seeds", file=run.path, line=line, key="seed", rule=rule, hint=hint
    )
