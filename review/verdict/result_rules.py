"""What the runs of a result can only break together, and the RCP test as findings."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from review.logs.mllog import number, text
from review.logs.output import ERROR, WARNING, Finding
from review.results.run import OPTIMIZATION, Run
from review.results.score import Result
from review.rulebook.rules import broken
from review.verdict.training_rules import SUBMISSION

_LEAST_SERIES = 4  # evaluations from which two runs do not have the same accuracies by chance


def check_runs(result: Result) -> list[Finding]:
    """The rules that the runs of a result can only break together."""
    found = [*_check_copies(result), *_check_overlap(result), *_check_alike(result, SUBMISSION, "one_submitter")]
    if result.division == "closed":
        found += [*_check_alike(result, OPTIMIZATION, "one_configuration"), *_check_seeds(result)]
        found += [*_check_reference(result), *_check_alike(result, ["starting_point"], "one_starting_point")]
    return found


def _canonical(value: Any) -> str:
    found = number(value)
    return text(value) if found is None else f"{found:.12g}"  # 100 and 100.0 are one


def _check_alike(result: Result, keys: Sequence[str], rule: str) -> Iterator[Finding]:
    """Values that differ from those of most runs: of the submitter a warning, else an error."""
    runs = [run for run in result.runs if run.log.events and run is not result.accepted_failure]
    for key in keys:
        severity = WARNING if key in SUBMISSION and key != "submission_division" else ERROR
        events = [run.log.first(key) for run in runs]
        values = ["missing" if event is None else _canonical(event.value) for event in events]
        common = Counter(values).most_common(1)[0][0] if values else ""
        for run, event, value in zip(runs, events, values, strict=True):
            if value != common:
                yield run.broken(rule, f"is {value}, of most runs {common}", event, key, severity=severity)


def _check_seeds(result: Result) -> Iterator[Finding]:
    first: dict[str, Run] = {}
    seeds: list[int] = []
    for run in result.runs:
        events = run.log.all("seed")
        values = {_canonical(event.value): event for event in reversed(events)}
        if len(values) > 1:
            yield run.broken("one_seed", f"is logged {len(events)} times with different values", events[1])
        for value, event in values.items():
            other = first.setdefault(value, run)
            if other is not run:
                yield run.broken("shared_seed", f"is {value}, as in {other.path.name}", event)
        seeds += [int(event.value) for event in events[:1] if number(event.value) is not None]
    ordered = sorted(set(seeds))
    if len(ordered) > 2 and all(b - a == 1 for a, b in itertools.pairwise(ordered)):
        message = f"runs from {ordered[0]} to {ordered[-1]} without a gap"
        yield broken("seed_unset", message, result.folder, key="seed")


def _check_copies(result: Result) -> Iterator[Finding]:
    """Two runs with one clock, or with the same accuracies to the last digit."""
    clocks: dict[tuple[float, float], Run] = {}
    accuracies: dict[tuple[float, ...], Run] = {}
    for run in result.runs:
        if run.run_start is None or run.run_stop is None:
            continue
        other = clocks.setdefault((run.run_start.time_ms, run.run_stop.time_ms), run)
        if other is not run:
            yield run.broken("copied_clock", f"is that of {other.path.name}, and so is run_stop", run.run_start)
    for run in result.runs:
        series = tuple(evaluation.accuracy for evaluation in run.evaluations)
        other = accuracies.setdefault(series, run) if len(series) >= _LEAST_SERIES else run
        if other is not run:
            message = f"is that of {other.path.name} in all {len(series)} evaluations"
            yield run.broken("copied_accuracies", message, run.log.first("eval_accuracy"))


def _check_overlap(result: Result) -> Iterator[Finding]:
    timed = [run for run in result.runs if run.run_start and run.run_stop and (run.minutes or 0) > 0]
    spans = sorted((run.run_start.time_ms, run.run_stop.time_ms, run.path.name) for run in timed)  # type: ignore[union-attr]
    pairs = [(a[2], b[2]) for a, b in itertools.pairwise(spans) if b[0] < a[1]]
    if pairs:
        message = f"{pairs[0][1]} starts while {pairs[0][0]} is running; {len(pairs)} such pairs"
        yield broken("overlap", message, result.folder, key="run_start")


def _check_reference(result: Result) -> Iterator[Finding]:
    point = result.rcp_point
    run = next((run for run in result.runs if run.log.events), None)
    if run is None or point is None or not point.hyperparameters or point.batch_size != result.batch_size:
        return
    for key in OPTIMIZATION:
        reference, event = number(point.hyperparameters.get(key)), run.log.first(key)
        logged = number(event.value) if event else None
        if event and reference is not None and logged is not None and not math.isclose(reference, logged, rel_tol=1e-9):
            message = f"is {logged:g}, not the reference's"
            yield run.broken("reference_value", message, event, batch=point.batch_size, value=reference)


def rcp_findings(result: Result) -> list[Finding]:
    """The RCP test as findings, as the official checker judges."""
    test, mean = result.rcp_test, result.mean_samples
    if test is None:
        return []
    point, factor, rule = test.point, test.scaling_factor, "rcp_scaled"
    if test.passed:
        if factor == 1.0 or point is None or mean is None:
            return []
        message = f"mean of {mean:,.0f} samples is below the reference's {point.mean:,.0f}"
    elif point is None or mean is None:
        failing = [run.path.name for run in result.runs if not run.converged]
        names = f": {', '.join(failing)}" if failing and result.batch_size is not None else ""
        rule, message = "rcp_impossible", f"test fails: {test.reason}{names}"
    else:
        message = f"test fails: mean of {mean:,.0f} samples, the minimum is {point.minimum:,.0f} ({test.reason})"
        rule = "rcp_failed"
    return [broken(rule, message, result.folder, key="RCP", factor=factor)]
