"""What official tools test of the logs together, in our words: number of runs, benchmark, seeds, RCP."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from review.logs import tree
from review.logs.mllog import Event
from review.logs.output import ERROR, WARNING, Finding
from review.results.benchmark import target_of
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, Result
from review.rulebook.rules import broken


def check_together(result: Result) -> Iterator[Finding]:
    """Findings on the runs together."""
    yield from check_benchmark(result)
    yield from _check_count(result)
    if result.division == "closed":
        yield from _check_seeds(result.runs)
    yield from _check_rcp(result)


def _check_count(result: Result) -> Iterator[Finding]:
    """Ten logs, all readable and of this round, and no crashed trials."""
    folder, count, other = result.folder, len(result.runs), result.other_ruleset
    if other is not None:
        message = f"no log complies with ruleset {result.ruleset}, but with {other}"
        yield broken("round", message, folder, other=other)
    if count != REQUIRED_RUNS:
        rule = "ten_runs" if count < REQUIRED_RUNS else "ten_runs_at_most"
        # One's own run in the open division may have any number of trials.
        if result.division == "open" and tree.organization(folder) is None:
            rule = "ten_runs_to_submit"
        message = f"{count} of {REQUIRED_RUNS} runs"
        yield broken(rule, message, folder, count=REQUIRED_RUNS)
    for path, reason in result.unreadable.items():
        yield broken("unjudged" if path == folder else "readable", reason, path)
    for trial, reason in result.crashes.items():
        message = f"trial {trial} left no result: {reason}"
        yield broken("crashed", message, folder / f"failed_{trial}.txt")
    for path, reason in result.errors.items():
        yield broken("ended_in_error", f"ended in an error: {reason}", path)


def check_benchmark(result: Result) -> Iterator[Finding]:
    """Whether BERT-large was trained to the target; the open division allows others, as one's own
    runs.
    """
    if result.departures:
        severity = ERROR if result.division == "closed" else WARNING
        message = f"not the benchmark: {'; '.join(result.departures)}"
        where, target = result.folder, target_of(result.ruleset)
        yield broken("benchmark", message, where, severity=severity, target=target)


def _check_seeds(runs: Sequence[Run]) -> Iterator[Finding]:
    """The official seed checker, for closed results.

    Every run logs integer seeds, and no two runs log the same seed from the same line of code. It
    also fails on any malformed line of a log.
    """
    seen: dict[tuple[Any, ...] | None, Run] = {}
    for run in runs:
        events = run.log.all("seed")
        locations = [_place(event) for event in events]
        # In the order of the seed checker: it parses a whole log first, then looks for seeds.
        if run.log.errors:
            first = run.log.errors[0]
            message = f"cannot be read, since a line {first.reason}"
            found = run.broken("seed_unreadable", message, key="seed")
            yield replace(found, line=first.line)
        elif not run.log.events:
            message = "cannot be read: the file has no MLLOG lines"
            yield run.broken("seed_no_lines", message, key="seed")
        elif not events:
            yield run.broken("seed_missing", "is missing", key="seed")
        elif None in locations:
            odd = events[locations.index(None)]
            yield run.broken("seed_odd", "is not a seed that can be compared", odd)
        else:
            for event, location in zip(events, locations, strict=True):
                other = seen.get(location)
                # Also within a run: the seed checker does not ask which log the earlier seed is from.
                if other is not None:
                    where = "twice" if other is run else f"as in {other.path.name}"
                    message = f"is {int(event.value)}, {where}"
                    yield run.broken("seed_again", message, event)
                seen.setdefault(location, run)


def _place(event: Event) -> tuple[Any, ...] | None:
    """Key by which the seed checker compares; None if it cannot."""
    try:
        # int() like there, so that "7" and 7.0 are seeds; the file and the line may be anything in
        # JSON, and a list cannot be looked up.
        location = (event.metadata["file"], event.metadata["lineno"], int(event.value))
        hash(location)
    except (TypeError, ValueError, OverflowError, KeyError):
        return None
    return location


def _check_rcp(result: Result) -> Iterator[Finding]:
    """The RCP test, judged like in the official checker."""
    test, mean, point = result.rcp_test, result.mean_samples, result.rcp_point
    if test is None:
        return
    factor = test.scaling_factor
    if not test.passed and (point is None or mean is None):
        # Nothing can be compared: the reason is a missing number, not a small one.
        failing = [run.path.name for run in result.runs if not run.converged]
        named = failing if result.batch_size is not None else ()
        names = f": {', '.join(named)}" if named else ""
        rule, message = "rcp_impossible", f"test fails: {test.reason}{names}"
    elif point is None or mean is None or (test.passed and factor == 1.0):
        return
    else:
        rule, message = "rcp_scaled", f"mean of {mean:,.0f} samples"
        if test.passed:
            message += f" is below the reference's {point.mean:,.0f}"
        else:
            least = f"the minimum is {point.minimum:,.0f} ({test.reason})"
            rule, message = "rcp_failed", f"test fails: {message}, {least}"
    yield broken(rule, message, result.folder, key="RCP", factor=factor)
