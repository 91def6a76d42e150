"""What the rules ask of one run and no official tool checks.

Sources: MLPerf training_rules (section 9.5 "Hyperparameters", appendix on LAMB, "Evaluation frequency"), the
submission_rules and the reference implementation, state of v5.0. An error contradicts a rule; a warning needs a human
to look; a note is worth knowing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from review.logs.mllog import Event, number, text
from review.logs.output import ERROR, NOTE, WARNING, Finding
from review.results.gate import first_miss
from review.results.run import TARGET_ACCURACY, Run
from review.rulebook.compliance import evaluation_interval

EVAL_SAMPLES = 10_000
INITIAL_ACCURACY = 0.340  # of the checkpoint that closed runs start from
INITIAL_TOLERANCE = 0.002
SUBMISSION = ("submission_org", "submission_platform", "submission_status", "submission_division")
NOT_SAMPLES = "has an epoch_num that does not count samples"
_PLACEHOLDERS = (None, "", "unknown", "reference_implementation")
_STATUSES = ("onprem", "cloud", "preview", "research")
_LIKELY_MADE_UP = {0, 1, 42, 123, 1234, 12345, 1337, 2**31 - 1}  # a clock or /dev/urandom rarely gives these
_MOST_ACCURATE = 0.73  # a run stops at the first evaluation from 0.720; no published one reached 0.722
_LARGEST_BATCH = 1e9  # above any, and small enough to compute with
_SLACK_MS = 1000  # ranks log in an order of their own within a moment
_EARLIEST_MS, _LATEST_MS = 1.4e12, 4.1e12  # 2014, before the first round, and 2099; seconds are far below


def check_run(run: Run, division: str | None = None) -> list[Finding]:
    """The rules that one log can break. ``division``: that of its result; unset: as logged."""
    if not run.log.events:
        return []  # a finding of the compliance rules
    found = [*_check_clock(run), *_check_submission(run)]
    if (division or run.log.value("submission_division")) == "closed":
        found += [*_check_fixed_values(run), *_check_evaluations(run), *_check_interval(run), *_check_target(run)]
        found += [*_check_trained(run), *_check_starting_point(run)]
    return found


def _check_clock(run: Run) -> Iterator[Finding]:
    """The score is run_stop minus run_start: what cannot be true of these is an error, elsewhere a warning."""
    events, clock = run.log.events, [event for event in (run.run_start, run.run_stop) if event is not None]
    if run.minutes is not None and run.minutes <= 0:
        yield run.broken("clock", f"comes {-60 * run.minutes:.1f} s before run_start", run.run_stop)
    undated = [event for event in clock if not _EARLIEST_MS <= event.time_ms <= _LATEST_MS]
    for event in (one for one in clock if one not in undated):
        yield from _check_neighbours(run, event)
    if not undated and not _EARLIEST_MS <= events[0].time_ms <= _LATEST_MS:
        undated = [events[0]]
    for event in undated:
        message = f"has time_ms {event.time_ms:.0f}, which is not a date of a run"
        yield run.broken("date", message, event, severity=ERROR if event in clock else WARNING)
    latest = events[0]
    for event in events:
        if event.time_ms < latest.time_ms - _SLACK_MS:
            seconds = (latest.time_ms - event.time_ms) / 1000
            yield run.broken("time_order", f"goes back in time by {seconds:.1f} s, behind line {latest.line}", event)
            break
        latest = event if event.time_ms > latest.time_ms else latest


def _check_neighbours(run: Run, event: Event) -> Iterator[Finding]:
    """run_start and run_stop lie between the events that the log has around them."""
    at = run.log.events.index(event)
    before, after = run.log.events[max(at - 1, 0)], run.log.events[min(at + 1, len(run.log.events) - 1)]
    if event.time_ms < before.time_ms - _SLACK_MS:
        message = f"comes {(before.time_ms - event.time_ms) / 1000:.1f} s before {before.key} of the line above it"
        yield run.broken("neighbours", message, event)
    elif event.time_ms > after.time_ms + _SLACK_MS:
        message = f"comes {(event.time_ms - after.time_ms) / 1000:.1f} s after {after.key} of the line below it"
        yield run.broken("neighbours", message, event)


def _check_submission(run: Run) -> Iterator[Finding]:
    for key in SUBMISSION:
        event = run.log.first(key)
        if event is None and key == "submission_division":
            continue  # an official rule
        placeholder = event is not None and isinstance(event.value, str) and "PLACEHOLDER" in event.value
        if event is None or event.value in _PLACEHOLDERS or placeholder:
            message = "is missing" if event is None else f"is {text(event.value)!r}"
            yield run.broken("submitter", message, event, key, variable=key.upper())
    status = run.log.first("submission_status")
    if status is not None and status.value not in (*_STATUSES, *_PLACEHOLDERS):
        yield run.broken("status", f"is {text(status.value)!r}", status, statuses=", ".join(_STATUSES))
    for event in run.log.events:
        if event.line in run.log.glued:
            message = "is the last of several events on one line: the checkers overlook the others"
            yield run.broken("one_event_a_line", message, event)
    cleared = run.log.first("cache_clear")
    if cleared is not None and run.run_start is not None and cleared.line > run.run_start.line:
        yield run.broken("cleared_before", "comes after run_start", cleared)
    if cleared is not None and cleared.value is False:  # null, in many logs, says that it was
        yield run.broken("cleared", "is false", cleared)


def _is(expected: float) -> Callable[[Any], bool]:
    return lambda value: number(value) == expected


def _within(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: (found := number(value)) is not None and low <= found < high


def _above_zero(value: Any) -> bool:
    return (number(value) or 0) > 0


def _positive_integer(value: Any) -> bool:
    return (found := number(value)) is not None and found >= 1 and found == int(found)


# key: (is a value allowed?, what is expected, source of the rule)
_TABLE = "the hyper-parameter table of the training rules"
_FIXED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "opt_name": (lambda value: str(value).casefold() == "lamb", "lamb", "closed BERT trains with LAMB"),
    "max_sequence_length": (_is(512), "512", "the data set of closed BERT has sequences of up to 512 tokens"),
    "max_predictions_per_seq": (_is(76), "76", "the data set of closed BERT masks up to 76 tokens a sequence"),
    "opt_gradient_clip_norm": (_is(1), "1", "closed BERT clips the gradient's norm at 1"),
    "opt_end_learning_rate": (_is(0), "0", "the learning rate of closed BERT decays to 0"),
    "opt_lamb_learning_rate_decay_poly_power": (_is(1), "1", "the learning rate of closed BERT decays linearly"),
    "opt_base_learning_rate": (_above_zero, "a number above 0", _TABLE),
    "opt_lamb_weight_decay_rate": (_within(0), "a number from 0", _TABLE),
    "opt_lamb_epsilon": (_above_zero, "a number above 0", _TABLE),
    "opt_epsilon": (_above_zero, "a number above 0", _TABLE),
    "opt_lamb_beta_1": (_within(0, 1), "a number from 0 to below 1", _TABLE),
    "opt_lamb_beta_2": (_within(0, 1), "a number from 0 to below 1", _TABLE),
    "opt_learning_rate_training_steps": (_above_zero, "a number above 0", _TABLE),
    "opt_learning_rate_warmup_steps": (_within(0), "a number from 0", _TABLE),
    "num_warmup_steps": (_within(0), "a number from 0", _TABLE),
    "start_warmup_step": (lambda value: number(value) is not None, "a number", _TABLE),
    "global_batch_size": (_positive_integer, "a positive integer", _TABLE),
    "gradient_accumulation_steps": (_positive_integer, "a positive integer", _TABLE),
}


def _check_fixed_values(run: Run) -> Iterator[Finding]:
    """Every logged value that a closed run may not have; a key that is missing is the compliance checker's."""
    for key, (allowed, expected, rule) in _FIXED.items():
        event = next((event for event in run.log.all(key) if not allowed(event.value)), None)
        if event is not None:
            message = f"is {text(event.value)[:80]}, {expected} expected"
            yield run.broken("closed_value", message, event, rule=rule)


def _check_evaluations(run: Run) -> Iterator[Finding]:
    event = run.log.first("eval_samples")
    samples = number(event.value) if event else None
    if samples is not None and samples != EVAL_SAMPLES:
        rule = "eval_samples" if samples < EVAL_SAMPLES else "eval_samples_padded"
        yield run.broken(rule, f"is {samples:,g}", event, samples=EVAL_SAMPLES)
    first = run.evaluations[0] if run.evaluations else None
    if first is not None and first.samples == 0 and abs(first.accuracy - INITIAL_ACCURACY) > INITIAL_TOLERANCE:
        message = f"is {first.accuracy:.4f} before the first step"
        yield run.broken("initial_accuracy", message, first, accuracy=INITIAL_ACCURACY, tolerance=INITIAL_TOLERANCE)
    if first is not None and not run.counts_samples:
        yield run.broken("counts_samples", NOT_SAMPLES, run.log.first("eval_accuracy"))


def _check_interval(run: Run) -> Iterator[Finding]:
    counted, batch = [one for one in run.evaluations if one.samples], run.batch_size
    if batch is None or not 0 < batch < _LARGEST_BATCH or not counted or not run.counts_samples:
        return
    expected = evaluation_interval(batch)
    counts = [one.samples or 0 for one in counted]
    steps = [(now - before, one) for before, now, one in zip([0, *counts], counts, counted, strict=False)]
    mean = counts[-1] / len(counts)
    # steps of a run are whole batches, and packed ones vary in sequences
    odd = [(step, one) for step, one in steps if abs(step - expected) > 2 * batch]
    backwards = [one for step, one in steps if step <= 0]
    if backwards:
        place, message = backwards[0], "does not count more samples than the evaluation before"
    elif abs(mean - expected) > batch:
        place, message = counted[0], f"comes every {mean:,.0f} samples on average"
    elif odd:
        place, message = odd[0][1], f"comes {odd[0][0]:,.0f} samples after the evaluation before"
    else:
        return
    severity = ERROR if 0 < mean < expected / 2 else WARNING  # published results took liberties of a quarter
    yield run.broken("interval", message, place, severity=severity, batch=batch, expected=expected)


def _check_target(run: Run) -> Iterator[Finding]:
    reached = next((e for e in run.evaluations if e.accuracy >= TARGET_ACCURACY), None)
    if reached is not None and reached is not run.evaluations[-1]:
        at = f" at {reached.samples:,.0f} samples" if reached.samples is not None else ""
        message = f"reached the target{at}, in line {reached.line}, but the run continues"
        yield run.broken("ends_at_target", message, run.evaluations[-1])


def _check_starting_point(run: Run) -> Iterator[Finding]:
    """What our own trainer says of weights and data; other logs do not have it."""
    event = run.log.first("starting_point")
    unproved = event.value.get("unproved") if event is not None and isinstance(event.value, dict) else None
    if unproved:
        yield run.broken("starting_point", f"does not prove {text(unproved)}", event)


def _check_trained(run: Run) -> Iterator[Finding]:
    """Seeds, samples and accuracies that cannot be, and an end that contradicts them."""
    event = run.log.first("seed")
    if event is not None and number(event.value) in _LIKELY_MADE_UP:  # None is not
        yield run.broken("seed_unset", f"is {text(event.value)}", event)
    event, last = run.log.first("train_samples"), run.evaluations[-1] if run.evaluations else None
    trained = number(event.value) if event is not None else None
    if last is not None and trained is not None and run.counts_samples and trained < (last.samples or 0) / 2:
        message = f"is {trained:,.0f}, the last evaluation came at {last.samples:,.0f}"
        yield run.broken("train_samples", message, event)
    high = next((e for e in run.evaluations if e.accuracy > _MOST_ACCURATE), None)
    if high is not None:
        message = f"is {high.accuracy:.4f}, which no published run reached"
        yield run.broken("too_accurate", message, high, target=TARGET_ACCURACY)
    stop = run.log.all("run_stop")[-1:]
    if stop and run.status == "aborted" and any(e.accuracy >= TARGET_ACCURACY for e in run.evaluations):
        yield run.broken("success", "says aborted, though the target was reached", stop[0])
    miss = first_miss(run)
    if miss is not None:
        severity, recipe = (WARNING, "") if miss.same_recipe else (NOTE, ", though of other hyper-parameters")
        known: dict[str, Any] = {"severity": severity, "batch": run.batch_size, "recipe": recipe}
        causes = "; ".join(miss.causes)
        yield run.broken("published_runs", f"is {miss.describe()}", miss.evaluation, causes=causes, **known)
