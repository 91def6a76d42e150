"""What the rules of closed BERT ask for and no official tool checks: of one run, and of runs together.

Sources: MLPerf training_rules (section 9.5 "Hyperparameters", "Evaluation frequency") and submission_rules, state of
v5.0. An error contradicts a rule; a warning needs a human to look; a note is worth knowing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from review.logs.findings import ERROR, NOTE, WARNING, Finding
from review.logs.mllog import Event, number, text
from review.results.run import OPTIMIZATION, TARGET_ACCURACY, Run
from review.results.score import Result

EVAL_SAMPLES = 10_000
INITIAL_ACCURACY = 0.340  # of the checkpoint that closed runs start from
INITIAL_TOLERANCE = 0.002
_SUBMISSION = ("submission_org", "submission_platform", "submission_status", "submission_division")
_PLACEHOLDERS = (None, "", "unknown", "reference_implementation")
_LARGEST_BATCH = 1e9  # above any, and small enough to compute with
_BACKWARDS_MS = 1000  # ranks log in an order of their own within a moment
_EARLIEST_MS = 1.4e12  # 2014, long before the first round; seconds instead of milliseconds are far below


def evaluation_interval(batch_size: float) -> int:
    """Samples between evaluations: floor(0.05 (230.23 GBS + 3,000,000) / 25,000) 25,000 (training_rules)."""
    return math.floor(0.05 * (230.23 * batch_size + 3_000_000) / 25_000) * 25_000


def _finding(
    run: Run, severity: str, message: str, rule: str, hint: str, event: Event | None = None, key: str | None = None
) -> Finding:
    return Finding(
        severity=severity,
        message=message,
        source="rules",
        file=run.path,
        line=event.line if event else None,
        key=key or (event.key if event and isinstance(event.key, str) else None),
        rule=rule,
        hint=hint,
    )


def check_run(run: Run) -> list[Finding]:
    """The rules that one log can break."""
    found = [*_check_times(run), *_check_submission(run)]
    if run.log.value("submission_division") == "closed":
        found += [*_check_evaluations(run), *_check_interval(run), *_check_target(run)]
    return found


def _check_times(run: Run) -> Iterator[Finding]:
    if run.minutes is not None and run.minutes <= 0:
        yield _finding(
            run,
            ERROR,
            f"comes {-60 * run.minutes:.1f} s before run_start",
            "the score is run_stop minus run_start",
            "log both with the clock of one process",
            run.run_stop,
        )
    latest: Event | None = None
    for event in run.log.events:
        if latest is not None and event.time_ms < latest.time_ms - _BACKWARDS_MS:
            yield _finding(
                run,
                WARNING,
                f"goes back in time by {(latest.time_ms - event.time_ms) / 1000:.1f} s, behind line {latest.line}",
                "times of a log do not decrease",
                "a clock was set during the run, or two logs are mixed: run again",
                event,
            )
            break
        latest = event if latest is None or event.time_ms > latest.time_ms else latest
    first = next(iter(run.log.events), None)
    if first is not None and first.time_ms < _EARLIEST_MS:
        yield _finding(
            run,
            WARNING,
            f"has time_ms {first.time_ms:.0f}, which is no date of a run",
            "time_ms is Unix time in milliseconds",
            "log time.time() * 1000",
            first,
        )


def _check_submission(run: Run) -> Iterator[Finding]:
    for key in _SUBMISSION:
        event = run.log.first(key)
        if event is None and key == "submission_division":
            continue  # an official rule
        if event is None or event.value in _PLACEHOLDERS:
            message = "is missing" if event is None else f"is {text(event.value)!r}"
            rule = "a log names its submitter, system and status"
            yield _finding(run, WARNING, message, rule, f"export {key.upper()} before the run", event, key)
    cleared = run.log.first("cache_clear")
    if cleared is not None and cleared.value is False:  # null, in many logs, says that it was
        yield _finding(
            run,
            WARNING,
            f"is {text(cleared.value)}",
            "the caches of the system are cleared before each run",
            "run with CLEAR_CACHES=1 and the right to drop caches",
            cleared,
        )


def _check_evaluations(run: Run) -> Iterator[Finding]:
    event = run.log.first("eval_samples")
    samples = number(event.value) if event else None
    if event is not None and samples is not None and samples != EVAL_SAMPLES:
        short = samples < EVAL_SAMPLES
        rule = f"every evaluation covers the {EVAL_SAMPLES:,} evaluation samples"
        hint = "evaluate on all of them" if short else "fine where padding of the last batch is counted"
        yield _finding(run, ERROR if short else WARNING, f"is {samples:,g}", rule, hint, event)
    first = run.evaluations[0] if run.evaluations else None
    if first is not None and first.samples == 0 and abs(first.accuracy - INITIAL_ACCURACY) > INITIAL_TOLERANCE:
        yield Finding(
            severity=WARNING,
            message=f"is {first.accuracy:.4f} before the first step",
            source="rules",
            file=run.path,
            line=first.line,
            key="eval_accuracy",
            rule=f"model.ckpt-28252 has an accuracy of {INITIAL_ACCURACY:.3f} +- {INITIAL_TOLERANCE}",
            hint="another checkpoint, or another evaluation set: compare both with their md5 sums",
        )
    if run.evaluations and not run.counts_samples:
        rule = "epoch_num of BERT counts training samples"
        hint = "log the sequences trained so far as epoch_num"
        event = run.log.first("eval_accuracy")
        yield _finding(run, ERROR, "has an epoch_num that does not count samples", rule, hint, event)


def _check_interval(run: Run) -> Iterator[Finding]:
    counts = [(e.samples, e.line) for e in run.evaluations if e.samples]
    if run.batch_size is None or not 0 < run.batch_size < _LARGEST_BATCH or not counts or not run.counts_samples:
        return
    expected, batch = evaluation_interval(run.batch_size), run.batch_size
    rule = f"with a batch of {batch:g}, evaluate every {expected:,} samples, up to the next multiple of the batch"
    steps = [(now - before, line) for (before, _), (now, line) in itertools.pairwise([(0, 0), *counts])]
    mean = counts[-1][0] / len(counts)
    message = None
    if any(step <= 0 for step, _ in steps):
        line = next(line for step, line in steps if step <= 0)
        message = "does not count more samples than the evaluation before"
    elif abs(mean - expected) > batch:
        line, message = counts[0][1], f"comes every {mean:,.0f} samples on average"
    else:  # steps of a run are whole batches, and packed ones vary in sequences
        odd = next(((step, line) for step, line in steps if abs(step - expected) > 2 * batch), None)
        if odd:
            line, message = odd[1], f"comes {odd[0]:,.0f} samples after the evaluation before"
    if message:
        hint = "set EVAL_ITER_START_SAMPLES and EVAL_ITER_SAMPLES to the interval"
        event = next(event for event in run.log.events if event.line == line)
        yield _finding(run, WARNING, message, rule, hint, event)


def _check_target(run: Run) -> Iterator[Finding]:
    reached = next((e for e in run.evaluations if e.accuracy >= TARGET_ACCURACY), None)
    last = run.evaluations[-1] if run.evaluations else None
    if reached is None or last is None or reached is last:
        return
    at = f" at {reached.samples:,.0f} samples" if reached.samples is not None else ""
    yield Finding(
        severity=WARNING,
        message=f"reached the target{at}, in line {reached.line}, but the run goes on",
        source="rules",
        file=run.path,
        line=last.line,
        key="eval_accuracy",
        rule="a run ends at the first evaluation that reaches the target; the RCP test takes the samples of the last",
        hint="stop at the target",
    )


def check_runs(result: Result) -> list[Finding]:
    """The rules that the runs of a result can only break together."""
    found = [*_check_copies(result), *_check_overlap(result), *_check_names(result)]
    if result.division == "closed":
        found += [*_check_hyperparameters(result), *_check_seeds(result), *_check_reference(result)]
    return found


def _common(values: list[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _differing(result: Result, key: str) -> Iterator[tuple[Run, Event | None, str, str]]:
    """(run, event, its value, the common value) where a key differs from most runs."""
    events = [(run, run.log.first(key)) for run in result.runs if run.log.events]
    values = ["missing" if event is None else _canonical(event.value) for _, event in events]
    if len(set(values)) < 2:
        return
    common = _common(values)
    for (run, event), value in zip(events, values, strict=True):
        if value != common:
            yield run, event, value, common


def _canonical(value: Any) -> str:
    found = number(value)
    return text(value) if found is None else f"{found:.12g}"  # 100 and 100.0 are one


def _check_hyperparameters(result: Result) -> Iterator[Finding]:
    for key in OPTIMIZATION:
        for run, event, value, common in _differing(result, key):
            rule = "all runs of a result have the same hyper-parameters"
            hint = "run again with one configuration, or submit the runs as two results"
            message = f"is {value}, of most runs {common}"
            yield _finding(run, ERROR, message, rule, hint, event, key)


def _check_names(result: Result) -> Iterator[Finding]:
    for key in _SUBMISSION:
        severity = ERROR if key == "submission_division" else WARNING
        for run, event, value, common in _differing(result, key):
            rule = "all runs of a result are of one submitter, system and division"
            message = f"is {value}, of most runs {common}"
            yield _finding(run, severity, message, rule, "keep results of different systems apart", event, key)


def _check_seeds(result: Result) -> Iterator[Finding]:
    first: dict[str, Run] = {}
    seeds: list[int] = []
    for run in result.runs:
        events = run.log.all("seed")
        if len({_canonical(event.value) for event in events}) > 1:
            message = f"is logged {len(events)} times with different values"
            yield _finding(run, WARNING, message, "a run has one seed", "log it once, on rank 0", events[1])
        for value in {_canonical(event.value) for event in events}:
            other = first.setdefault(value, run)
            if other is not run:
                event = next(event for event in events if _canonical(event.value) == value)
                rule = "seeds come from the clock or the system's randomness, so that no two runs share one"
                hint = "leave SEED unset, and run again"
                yield _finding(run, WARNING, f"is {value}, as in {other.path.name}", rule, hint, event)
        seeds += [int(event.value) for event in events[:1] if number(event.value) is not None]
    ordered = sorted(set(seeds))
    if len(ordered) > 2 and all(b - a == 1 for a, b in itertools.pairwise(ordered)):
        yield Finding(
            severity=WARNING,
            message=f"runs from {ordered[0]} to {ordered[-1]} without a gap",
            source="rules",
            file=result.folder,
            key="seed",
            rule="seeds come from the clock or the system's randomness",
            hint="leave SEED unset",
        )


def _check_copies(result: Result) -> Iterator[Finding]:
    first: dict[tuple[float, float], Run] = {}
    for run in result.runs:
        if run.run_start is None or run.run_stop is None:
            continue
        other = first.setdefault((run.run_start.time_ms, run.run_stop.time_ms), run)
        if other is not run:
            message = f"is that of {other.path.name}, and so is run_stop"
            yield _finding(run, ERROR, message, "each log is of a run of its own", "remove the copy", run.run_start)


def _check_overlap(result: Result) -> Iterator[Finding]:
    timed = [run for run in result.runs if run.run_start and run.run_stop and (run.minutes or 0) > 0]
    spans = sorted((run.run_start.time_ms, run.run_stop.time_ms, run.path.name) for run in timed)  # type: ignore[union-attr]
    pairs = [(a[2], b[2]) for a, b in itertools.pairwise(spans) if b[0] < a[1]]
    if pairs:
        yield Finding(
            severity=NOTE,
            message=f"{pairs[0][1]} starts while {pairs[0][0]} is running; {len(pairs)} such pairs",
            source="rules",
            file=result.folder,
            key="run_start",
            rule="a run has its system to itself",
            hint="fine where they ran on different machines of the same kind",
        )


def _check_reference(result: Result) -> Iterator[Finding]:
    point = result.rcp_point
    run = next((run for run in result.runs if run.log.events), None)
    if run is None or point is None or not point.hyperparameters or point.batch_size != result.batch_size:
        return
    for key in OPTIMIZATION:
        reference, event = number(point.hyperparameters.get(key)), run.log.first(key)
        logged = number(event.value) if event else None
        if event and reference is not None and logged is not None and not math.isclose(reference, logged, rel_tol=1e-9):
            rule = f"the reference runs of batch {point.batch_size:,} have {reference:g}"
            hint = "allowed: the RCP test is on samples, not on hyper-parameters"
            yield _finding(run, NOTE, f"is {logged:g}, not the reference's", rule, hint, event)


def rcp_findings(result: Result) -> list[Finding]:
    """The RCP test as findings, as the official checker judges."""
    test = result.rcp_test
    if test is None:
        return []
    point, mean = test.point, result.mean_samples
    if test.passed:
        if test.scaling_factor == 1.0 or point is None or mean is None:
            return []
        message = f"mean of {mean:,.0f} samples is below the reference's {point.mean:,.0f}"
        rule = f"the score is multiplied by {test.scaling_factor:.6f}"
        return [_of_folder(result, NOTE, message, rule, "allowed; slower convergence would not be scaled")]
    if point is None or mean is None:
        failing = [run.path.name for run in result.runs if not run.converged]
        names = f": {', '.join(failing)}" if failing and result.batch_size is not None else ""
        rule = "at most one run of ten misses the target, all have one batch size, and a reference point covers it"
        return [_of_folder(result, ERROR, f"test fails: {test.reason}{names}", rule, "see the runs that are named")]
    message = f"test fails: mean of {mean:,.0f} samples, the minimum is {point.minimum:,.0f} ({test.reason})"
    rule = "the olympic mean of samples to the target is at least the reference's mean / maximal speed-up"
    hint = "check epoch_num and the data; else ask for a reference point of these hyper-parameters"
    return [_of_folder(result, ERROR, message, rule, hint)]


def _of_folder(result: Result, severity: str, message: str, rule: str, hint: str) -> Finding:
    return Finding(
        severity=severity,
        message=message,
        source="rcp",
        file=result.folder,
        key="RCP",
        rule=rule,
        hint=hint,
    )
