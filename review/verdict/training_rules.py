"""Rules for runs, single and together, that no official tool checks.

Sources: MLPerf training_rules (section 9.5 "Hyperparameters", appendix on LAMB, "Evaluation
frequency"), the submission_rules and the reference implementation, as of v5.0. An error breaks a
rule; a warning needs a human to look; a note is worth knowing.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from common.accelerators import family_of
from review.logs.mllog import Event, Log, number, text
from review.logs.output import ERROR, NOTE, WARNING, Finding
from review.results.benchmark import EVAL_SAMPLES, starting_point
from review.results.published_curves import (
    INITIAL_ACCURACY,
    INITIAL_TOLERANCE,
    first_deviation,
)
from review.results.run import OPTIMIZATION, TARGET_ACCURACY, Run
from review.results.score import Result
from review.rulebook.compliance import evaluation_interval
from review.rulebook.rules import broken, table

SUBMISSION = (
    "submission_org",
    "submission_platform",
    "submission_status",
    "submission_division",
)
NOT_SAMPLES = "has an epoch_num that does not count samples"
_PLACEHOLDERS = (None, "", "unknown", "reference_implementation")
# As logs have them; descriptions use other words (submission_rules.categories).
_STATUSES = ("onprem", "cloud", "preview", "research")
# A clock or /dev/urandom rarely returns these.
_LIKELY_MADE_UP = {
    0,
    1,
    42,
    123,
    1234,
    12345,
    1337,
    2**31 - 1,
}
# A run stops at the first evaluation from 0.720 on; no published one reached 0.722.
_MOST_ACCURATE = 0.73
_LARGEST_BATCH = 1e9  # above any real one, and small enough to compute with
# Evaluations; so many equal accuracies of two runs are no coincidence.
_LEAST_SERIES = 4
_SLACK_MS = 1000  # ranks may log out of order within a moment
# 2014, before the first round, to 2099; times in seconds are far below.
_EARLIEST_MS, _LATEST_MS = 1.4e12, 4.1e12
# Clocks that no machine keeps: a sequence of BERT-large takes at least 6 operations for each weight of
# the encoder and token.
_WEIGHTS = 24 * 12 * 1024**2  # of the encoder's matrices
_TOKENS = 254.5  # a sequence, on average
OPERATIONS = 6 * _WEIGHTS * _TOKENS
# 24 layers come one after the other, forward and backward, each of several kernels that take some
# microseconds; the fastest published step takes 15 ms.
_MOST_STEPS = 1000  # a second
_FACTOR = 1.5  # over the fastest published


def check_run(run: Run, division: str | None = None) -> list[Finding]:
    """Checks a single log. ``division``: of its result; None: as logged."""
    if not run.log.events:
        return []  # reported by the compliance rules
    findings = [*_check_numbers(run), *_check_clock(run), *_check_submission(run)]
    # The open division fixes none of these.
    if (division or run.log.value("submission_division")) == "closed":
        findings += [
            *_check_fixed_values(run),
            *_check_evaluations(run),
            *_check_interval(run),
            *_check_trained(run),
        ]
    return findings


def _check_numbers(run: Run) -> Iterator[Finding]:
    """A number that cannot be computed with is unknown, and hides what it stands for."""
    for event in run.log.events:
        about = event.metadata if isinstance(event.metadata, dict) else {}
        for value in (event.value, about.get("epoch_num"), about.get("samples_count")):
            numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
            if numeric and number(value) is None and event.key != "seed":
                shown = text(str(value)[:20])
                yield run.broken("number", f"has {shown}: not computable", event)
                return


def _check_clock(run: Run) -> Iterator[Finding]:
    """Implausible times: an error for run_start and run_stop, which make the score, else a
    warning.
    """
    events = run.log.events
    if error := run.log.first("run_error"):
        reason = f"ended in an error: {text(error.value)}"
        yield run.broken("ended_in_error", reason, error)
    clock = [event for event in (run.run_start, run.run_stop) if event is not None]
    if run.continued_at is not None:
        message = f"says that the run continued at {run.continued_at:,.0f} samples: it has no time"
        yield run.broken("whole_clock", message, run.log.first("clock_not_whole"))
    if (
        run.run_start
        and run.run_stop
        and (early := run.run_start.time_ms - run.run_stop.time_ms) >= 0
    ):
        yield run.broken(
            "clock", f"comes {early / 1000:.1f} s before run_start", run.run_stop
        )
    undated = [
        event for event in clock if not _EARLIEST_MS <= event.time_ms <= _LATEST_MS
    ]
    for event in clock:
        if event not in undated:
            yield from _check_neighbours(run, event)
    # The first event stands for the rest of the log: a wrong clock is wrong all through.
    if not undated and not _EARLIEST_MS <= events[0].time_ms <= _LATEST_MS:
        undated = [events[0]]
    for event in undated:
        message = f"has time_ms {event.time_ms:.0f}, which is not a date of a run"
        yield run.broken(
            "date", message, event, severity=ERROR if event in clock else WARNING
        )
    latest = events[0]
    for event in events:
        if event.time_ms < latest.time_ms - _SLACK_MS:
            seconds = (latest.time_ms - event.time_ms) / 1000
            yield run.broken(
                "time_order",
                f"is {seconds:.1f} s earlier than line {latest.line}",
                event,
            )
            # The first step back is enough; those after it have the same cause.
            break
        latest = event if event.time_ms > latest.time_ms else latest


def _check_neighbours(run: Run, event: Event) -> Iterator[Finding]:
    """run_start and run_stop, which make the score, come between their neighbours in the log."""
    events = run.log.events
    at = events.index(event)
    # At either end of the log an event is its own neighbour.
    before, after = events[max(at - 1, 0)], events[min(at + 1, len(events) - 1)]
    if (early := before.time_ms - event.time_ms) > _SLACK_MS:
        message = f"comes {early / 1000:.1f} s before {before.key} of the line above it"
        yield run.broken("neighbours", message, event)
    elif (late := event.time_ms - after.time_ms) > _SLACK_MS:
        message = f"comes {late / 1000:.1f} s after {after.key} of the line below it"
        yield run.broken("neighbours", message, event)


def _check_submission(run: Run) -> Iterator[Finding]:
    for key in SUBMISSION:
        event = run.log.first(key)
        value = None if event is None else event.value
        if event is None and key == "submission_division":
            continue  # covered by an official rule
        if value in _PLACEHOLDERS or "PLACEHOLDER" in str(value):
            message = "is missing" if event is None else f"is {text(value)!r}"
            yield run.broken("submitter", message, event, key, variable=key.upper())
    status = run.log.first("submission_status")
    if status is not None and status.value not in (*_STATUSES, *_PLACEHOLDERS):
        message, known = f"is {text(status.value)!r}", ", ".join(_STATUSES)
        yield run.broken("status", message, status, statuses=known)
    for event in run.log.events:
        if event.line in run.log.glued:
            message = "is the last of several events on one line: the checkers miss the others"
            yield run.broken("one_event_a_line", message, event)
    cleared = run.log.first("cache_clear")
    # By position in the log: clocks are judged above, and here it is the order that matters.
    if cleared and run.run_start and cleared.line > run.run_start.line:
        yield run.broken("cleared_before", "comes after run_start", cleared)
    # Many logs have null for cleared caches.
    if cleared is not None and cleared.value is False:
        yield run.broken("cleared", "is false", cleared)


def _check_fixed_values(run: Run) -> Iterator[Finding]:
    """Logged values that a closed run may not have; missing keys are reported by the compliance
    checker.
    """

    def allowed(value: Any, limits: dict[str, Any]) -> bool:
        if isinstance(limits.get("is"), str):
            # Vendors write the name in either case.
            return str(value).casefold() == limits["is"]
        known = number(value)
        if known is None or (limits.get("whole") and known != int(known)):
            return False
        if "is" in limits:
            return known == limits["is"]
        above = limits.get("above", -math.inf)
        below = limits.get("below", math.inf)
        return above < known < below and known >= limits.get("from", known)

    for key, limits in table("closed_values").items():
        for event in run.log.all(key):
            if not allowed(event.value, limits):
                message = f"is {text(event.value)[:80]}, {limits['expected']} expected"
                yield run.broken("closed_value", message, event, rule=limits["rule"])
                break


def _check_evaluations(run: Run) -> Iterator[Finding]:
    event = run.log.first("eval_samples")
    samples = number(event.value) if event else None
    if samples is not None and samples != EVAL_SAMPLES:
        rule = "eval_samples" if samples < EVAL_SAMPLES else "eval_samples_padded"
        yield run.broken(rule, f"is {samples:,g}", event, samples=EVAL_SAMPLES)
    first = run.evaluations[0] if run.evaluations else None
    # The rules skip an evaluation before the first step; if there is one, it is the checkpoint's.
    known: dict[str, Any] = {"accuracy": INITIAL_ACCURACY}
    known["tolerance"] = INITIAL_TOLERANCE
    off = abs(first.accuracy - INITIAL_ACCURACY) if first else 0.0
    if first and first.samples == 0 and off > INITIAL_TOLERANCE:
        message = f"is {first.accuracy:.4f} before the first step"
        yield run.broken("initial_accuracy", message, first, **known)
    if first is not None and not run.counts_samples:
        yield run.broken("counts_samples", NOT_SAMPLES, run.log.first("eval_accuracy"))


def _check_interval(run: Run) -> Iterator[Finding]:
    batch = run.batch_size
    counted = [one for one in run.evaluations if one.samples and run.counts_samples]
    if batch is None or not 0 < batch < _LARGEST_BATCH or not counted:
        return
    expected = evaluation_interval(batch)
    counts = [one.samples or 0.0 for one in counted]
    mean = counts[-1] / len(counts)
    # The first interval begins at 0 samples.
    steps = [now - before for before, now in itertools.pairwise([0.0, *counts])]
    backwards = [at for at, step in enumerate(steps) if step <= 0]
    # Steps are whole batches, and packed batches vary in sequences.
    odd = [at for at, step in enumerate(steps) if abs(step - expected) > 2 * batch]
    first = next(iter([*backwards, *odd]), 0)
    message = f"comes {steps[first]:,.0f} samples after the evaluation before"
    if backwards:
        message = "does not count more samples than the evaluation before"
    # Rounding up to whole batches moves an evaluation by less than one.
    elif abs(mean - expected) > batch:
        first, message = 0, f"comes every {mean:,.0f} samples on average"
    elif not odd:
        return
    # Published results deviate by up to a quarter.
    severity = ERROR if 0 < mean < expected / 2 else WARNING
    about: dict[str, Any] = {"severity": severity, "batch": batch, "expected": expected}
    yield run.broken("interval", message, counted[first], **about)


def _check_trained(run: Run) -> Iterator[Finding]:
    """Start and end against the rules, and implausible seeds, samples and accuracies."""
    yield from _check_end(run)
    event = run.log.first("seed")
    if event is not None and number(event.value) in _LIKELY_MADE_UP:  # None is not
        yield run.broken("seed_unset", f"is {text(event.value)}", event)
    event = run.log.first("train_samples")
    trained = number(event.value) if event is not None else None
    if trained is not None and run.counts_samples and run.evaluations:
        last = run.evaluations[-1].samples
        # The last evaluation cannot come long after the last sample.
        if last is not None and trained < last / 2:
            message = f"is {trained:,.0f}, the last evaluation came at {last:,.0f}"
            yield run.broken("train_samples", message, event)
    high = next((e for e in run.evaluations if e.accuracy > _MOST_ACCURATE), None)
    if high is not None:
        message = f"is {high.accuracy:.4f}, which no published run reached"
        yield run.broken("too_accurate", message, high, target=TARGET_ACCURACY)
    yield from _check_curve(run)
    # Logged by this repository's trainer about weights and data.
    if unproved := starting_point(run).get("unproved"):
        message = f"does not prove {text(unproved)}"
        event = run.log.last("starting_point")
        yield run.broken("starting_point", message, event)


def _check_end(run: Run) -> Iterator[Finding]:
    """A run ends at the first evaluation that reaches the target, as a success."""
    reached = next((e for e in run.evaluations if e.accuracy >= TARGET_ACCURACY), None)
    if reached is None:
        return
    if reached is not run.evaluations[-1]:
        known = reached.samples is not None
        at = f" at {reached.samples:,.0f} samples" if known else ""
        line = reached.line
        message = f"reached the target{at}, in line {line}, but the run continues"
        yield run.broken("ends_at_target", message, run.evaluations[-1])
    if run.run_stop is not None and run.status == "aborted":
        message = "says aborted, though the target was reached"
        yield run.broken("success", message, run.run_stop)


def _check_curve(run: Run) -> Iterator[Finding]:
    """Its accuracies lie within those of published runs of its batch size."""
    deviation = first_deviation(run)
    if deviation is None:
        return
    # With other hyper-parameters another curve is no wonder, only worth knowing.
    severity, recipe = WARNING, ""
    if not deviation.same_recipe:
        severity, recipe = NOTE, ", though of other hyper-parameters"
    about: dict[str, Any] = {
        "severity": severity,
        "batch": run.batch_size,
        "recipe": recipe,
        "causes": "; ".join(deviation.causes),
    }
    message = f"is {deviation.describe()}"
    yield run.broken("published_runs", message, deviation.evaluation, **about)


def check_runs(result: Result) -> list[Finding]:
    """Checks the runs of a result against each other."""
    findings = [
        *_check_copies(result),
        *_check_overlap(result),
        *_check_alike(result, SUBMISSION, "one_submitter"),
    ]
    if result.division == "closed":
        findings += [
            *_check_alike(result, OPTIMIZATION, "one_configuration"),
            *_check_seeds(result),
        ]
        findings += _check_alike(result, ["starting_point"], "one_starting_point")
    return findings


def _canonical(value: Any) -> str:
    known = number(value)
    # The same for 100 and 100.0.
    return text(value) if known is None else f"{known:.12g}"


def _check_alike(result: Result, keys: Sequence[str], rule: str) -> Iterator[Finding]:
    """Values that differ from those of most runs: a warning for the submitter, else an error."""
    # The one run that may fail may also differ in its settings.
    runs = [
        run for run in result.runs if run.log.events and run is not result.tolerated
    ]
    for key in keys:
        severity = (
            WARNING if key in SUBMISSION and key != "submission_division" else ERROR
        )
        # Data are proved when a run is over: of their events the last one counts.
        found = Log.last if key == "starting_point" else Log.first
        events = [found(run.log, key) for run in runs]
        values = [
            "missing" if event is None else _canonical(event.value) for event in events
        ]
        common = Counter(values).most_common(1)[0][0] if values else ""
        for run, event, value in zip(runs, events, values, strict=True):
            if value != common:
                message = f"is {value}, of most runs {common}"
                yield run.broken(rule, message, event, key, severity=severity)


def _check_seeds(result: Result) -> Iterator[Finding]:
    first: dict[str, Run] = {}
    seeds: list[int] = []
    for run in result.runs:
        events = run.log.all("seed")
        # Reversed, so that of equal seeds the first line is the one named.
        values = {_canonical(event.value): event for event in reversed(events)}
        if len(values) > 1:
            yield run.broken(
                "one_seed",
                f"is logged {len(events)} times with different values",
                events[1],
            )
        for value, event in values.items():
            other = first.setdefault(value, run)
            if other is not run:
                yield run.broken(
                    "shared_seed", f"is {value}, as in {other.path.name}", event
                )
        seeds += [
            int(event.value) for event in events[:1] if number(event.value) is not None
        ]
    # Such as 1, 2, 3: counted, not drawn. Two neighbours alone may be chance.
    ordered = sorted(set(seeds))
    if len(ordered) > 2 and all(b - a == 1 for a, b in itertools.pairwise(ordered)):
        message = f"runs from {ordered[0]} to {ordered[-1]} without a gap"
        yield broken("seed_unset", message, result.folder, key="seed")


def _check_copies(result: Result) -> Iterator[Finding]:
    """Pairs of runs with the same start and stop times, or the same accuracies to the last
    digit.
    """
    clocks: dict[tuple[float, float], Run] = {}
    accuracies: dict[tuple[float, ...], Run] = {}
    for run in result.runs:
        start, stop = run.run_start, run.run_stop
        other = run
        if start and stop:
            other = clocks.setdefault((start.time_ms, stop.time_ms), run)
        if other is not run:
            message = f"is that of {other.path.name}, and so is run_stop"
            yield run.broken("copied_clock", message, start)
    # Accuracies, unlike times, survive an edited clock.
    for run in result.runs:
        series = tuple(evaluation.accuracy for evaluation in run.evaluations)
        known = len(series) >= _LEAST_SERIES
        other = accuracies.setdefault(series, run) if known else run
        if other is not run:
            message = f"is that of {other.path.name} in all {len(series)} evaluations"
            first = run.log.first("eval_accuracy")
            yield run.broken("copied_accuracies", message, first)


def _check_overlap(result: Result) -> Iterator[Finding]:
    spans = []
    for run in result.runs:
        if run.run_start and run.run_stop and (run.minutes or 0) > 0:
            spans.append((run.run_start.time_ms, run.run_stop.time_ms, run.path.name))
    # Sorted by start: if any two overlap, so do two neighbours.
    pairs = []
    for (_, stop, before), (start, _, after) in itertools.pairwise(sorted(spans)):
        if start < stop:
            pairs.append(f"{after} starts while {before} is running")
    if pairs:
        message = f"{pairs[0]}; {len(pairs)} such pairs"
        yield broken("overlap", message, result.folder, key="run_start")


def limits(accelerator: str) -> tuple[float, float]:
    """Sequences per second and accelerator: that it can compute, and that a published one reached."""
    # The empty name has those of accelerators that it does not name.
    teraflops, published = table("accelerators")[family_of(accelerator)]
    return teraflops * 1e12 / OPERATIONS, published


def check_speed(result: Result) -> Iterator[Finding]:
    """Runs faster than an accelerator computes, or than any published."""
    # Another model may be faster: the open division has others.
    closed = result.division == "closed"
    most, published = limits(result.accelerator)
    for run in result.runs:
        rate, each = run.sequences_per_second, result.rate_per_accelerator(run)
        if rate and run.batch_size and rate / run.batch_size > _MOST_STEPS:
            rule, message = "step_time", f"{rate / run.batch_size:,.0f} steps/s"
        elif each and each > most:
            rule, message = "impossible_rate", f"{each:,.0f} sequences/s of each"
        elif each and each > _FACTOR * published:
            rule, message = "unseen_rate", f"{each:,.0f} sequences/s of each"
        else:
            continue
        yield run.broken(
            rule,
            f"gives {message}",
            run.run_stop,
            severity=None if closed else WARNING,
            accelerator=result.accelerator or "an accelerator",
            most=most,
            published=published,
            steps=_MOST_STEPS,
        )
