"""The clock of a log: the score is the time of run_stop minus that of run_start, so neither may lie."""

from __future__ import annotations

import math
from collections.abc import Iterator

from review.logs.mllog import Event
from review.logs.output import ERROR, WARNING, Finding
from review.results.run import Run
from review.verdict.in_log import in_log

_SLACK_MS = 1000  # ranks log in an order of their own within a moment
_EARLIEST_MS, _LATEST_MS = 1.4e12, 4.1e12  # 2014, before the first round, and 2099; seconds are far below
_DATE = "time_ms is Unix time in milliseconds"


def check_clock(run: Run) -> Iterator[Finding]:
    """What cannot be true is an error where the score depends on it, and a warning elsewhere."""
    if run.minutes is not None and run.minutes <= 0:
        message = f"comes {-60 * run.minutes:.1f} s before run_start"
        rule, hint = "the score is run_stop minus run_start", "log both with the clock of one process"
        yield in_log(run, ERROR, message, rule, hint, run.run_stop)
    dated = True
    for event in (run.run_start, run.run_stop):
        if event is not None and not _is_date(event):
            dated = False
            message = f"has time_ms {event.time_ms:.0f}, which is not a date of a run"
            yield in_log(run, ERROR, message, _DATE, "log time.time() * 1000", event)
        elif event is not None:
            yield from _check_neighbours(run, event)
    first = next(iter(run.log.events), None)
    if dated and first is not None and not _is_date(first):
        message = f"has time_ms {first.time_ms:.0f}, which is not a date of a run"
        yield in_log(run, WARNING, message, _DATE, "log time.time() * 1000", first)
    yield from _check_order(run)


def _is_date(event: Event) -> bool:
    return math.isfinite(event.time_ms) and _EARLIEST_MS <= event.time_ms <= _LATEST_MS


def _check_neighbours(run: Run, event: Event) -> Iterator[Finding]:
    """run_start and run_stop lie between the events that the log has around them."""
    at = run.log.events.index(event)
    before, after = run.log.events[max(at - 1, 0)], run.log.events[min(at + 1, len(run.log.events) - 1)]
    if event.time_ms < before.time_ms - _SLACK_MS:
        message = f"comes {(before.time_ms - event.time_ms) / 1000:.1f} s before {before.key} of the line above it"
    elif event.time_ms > after.time_ms + _SLACK_MS:
        message = f"comes {(event.time_ms - after.time_ms) / 1000:.1f} s after {after.key} of the line below it"
    else:
        return
    rule = "the score is run_stop minus run_start, and each lies between its neighbours in the log"
    yield in_log(run, ERROR, message, rule, "a clock was set, or the line was changed: run again", event)


def _check_order(run: Run) -> Iterator[Finding]:
    latest: Event | None = None
    for event in run.log.events:
        if latest is not None and event.time_ms < latest.time_ms - _SLACK_MS:
            message = f"goes back in time by {(latest.time_ms - event.time_ms) / 1000:.1f} s, behind line {latest.line}"
            hint = "a clock was set during the run, or two logs are mixed: run again"
            yield in_log(run, WARNING, message, "times of a log do not decrease", hint, event)
            return
        latest = event if latest is None or event.time_ms > latest.time_ms else latest
