"""What the rules ask of one run and no official tool checks.

Sources: MLPerf training_rules (section 9.5 "Hyperparameters", "Evaluation frequency") and submission_rules, state of
v5.0. An error contradicts a rule; a warning needs a human to look; a note is worth knowing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from review.logs.mllog import number, text
from review.logs.output import ERROR, NOTE, WARNING, Finding
from review.results.gate import first_miss
from review.results.run import TARGET_ACCURACY, Run
from review.rulebook.compliance import evaluation_interval
from review.verdict.clock_rules import check_clock
from review.verdict.closed_rules import check_fixed_values
from review.verdict.in_log import in_log

EVAL_SAMPLES = 10_000
INITIAL_ACCURACY = 0.340  # of the checkpoint that closed runs start from
INITIAL_TOLERANCE = 0.002
SUBMISSION = ("submission_org", "submission_platform", "submission_status", "submission_division")
_PLACEHOLDERS = (None, "", "unknown", "reference_implementation")
_STATUSES = ("onprem", "cloud", "preview", "research")
_LIKELY_MADE_UP = {0, 1, 42, 123, 1234, 12345, 1337, 2**31 - 1}  # a clock or /dev/urandom rarely gives these
_MOST_ACCURATE = 0.73  # a run stops at the first evaluation from 0.720; no published one reached 0.722
_LARGEST_BATCH = 1e9  # above any, and small enough to compute with
NOT_SAMPLES = "has an epoch_num that does not count samples"


def check_run(run: Run, division: str | None = None) -> list[Finding]:
    """The rules that one log can break. ``division``: of its result; unset: as the log says."""
    if not run.log.events:
        return []  # which is said already
    found = [*check_clock(run), *_check_submission(run)]
    if (division or run.log.value("submission_division")) == "closed":
        found += [*check_fixed_values(run), *_check_evaluations(run), *_check_interval(run), *_check_target(run)]
        found += [*_check_seed(run), *_check_trained(run), *_check_band(run)]
    return found


def _check_submission(run: Run) -> Iterator[Finding]:
    for key in SUBMISSION:
        event = run.log.first(key)
        if event is None and key == "submission_division":
            continue  # an official rule
        placeholder = event is not None and isinstance(event.value, str) and "PLACEHOLDER" in event.value
        if event is None or event.value in _PLACEHOLDERS or placeholder:
            message = "is missing" if event is None else f"is {text(event.value)!r}"
            rule = "a log names its submitter, system and status"
            yield in_log(run, WARNING, message, rule, f"export {key.upper()} before the run", event, key)
    status = run.log.first("submission_status")
    if status is not None and status.value not in (*_STATUSES, *_PLACEHOLDERS):
        rule, hint = f"submission_status is one of {', '.join(_STATUSES)}", "export SUBMISSION_STATUS before the run"
        yield in_log(run, WARNING, f"is {text(status.value)!r}", rule, hint, status)
    for event in run.log.events:
        if event.line in run.log.glued:
            rule, hint = "every line with :::MLLOG is one JSON object", "keep the output of ranks apart"
            message = "is the last of several events on one line: the checkers overlook the others"
            yield in_log(run, WARNING, message, rule, hint, event)
    cleared = run.log.first("cache_clear")
    if cleared is not None and run.run_start is not None and cleared.line > run.run_start.line:
        rule, hint = "the caches of the system are cleared before each run", "log cache_clear before init_start"
        yield in_log(run, ERROR, "comes after run_start", rule, hint, cleared)
    if cleared is not None and cleared.value is False:  # null, in many logs, says that it was
        yield in_log(
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
        yield in_log(run, ERROR if short else WARNING, f"is {samples:,g}", rule, hint, event)
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
        hint = "log the sequences trained so far as epoch_num; train_samples count with --rcp-bert-train-samples"
        event = run.log.first("eval_accuracy")
        yield in_log(run, ERROR, NOT_SAMPLES, rule, hint, event)


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
        severity = ERROR if 0 < mean < expected / 2 else WARNING  # published results took liberties of a quarter
        hint = "set EVAL_ITER_START_SAMPLES and EVAL_ITER_SAMPLES to the interval"
        event = next(event for event in run.log.events if event.line == line)
        yield in_log(run, severity, message, rule, hint, event)


def _check_seed(run: Run) -> Iterator[Finding]:
    event = run.log.first("seed")
    if event is not None and number(event.value) in _LIKELY_MADE_UP:  # None is not
        rule = "seeds come from the clock or the system's randomness"
        yield in_log(run, WARNING, f"is {text(event.value)}", rule, "leave SEED unset", event)


def _check_trained(run: Run) -> Iterator[Finding]:
    """Samples and accuracies that cannot be, and an end that contradicts them."""
    event, last = run.log.first("train_samples"), run.evaluations[-1] if run.evaluations else None
    trained = number(event.value) if event is not None else None
    if last is not None and trained is not None and run.counts_samples and trained < (last.samples or 0) / 2:
        rule = "train_samples counts the sequences trained on"
        message = f"is {trained:,.0f}, the last evaluation came at {last.samples:,.0f}"
        yield in_log(run, WARNING, message, rule, "log the count of the last evaluation", event)
    high = next((e for e in run.evaluations if e.accuracy > _MOST_ACCURATE), None)
    if high is not None:
        rule = f"a run stops at the first evaluation from {TARGET_ACCURACY:.3f}, which is barely above it"
        hint = "another evaluation set, or evaluation data in the training set"
        event = next(event for event in run.log.events if event.line == high.line)
        yield in_log(run, WARNING, f"is {high.accuracy:.4f}, which no published run reached", rule, hint, event)
    stop = run.log.all("run_stop")[-1:]
    reached = any(e.accuracy >= TARGET_ACCURACY for e in run.evaluations)
    if stop and reached and run.status == "aborted":
        rule, hint = "a run that reaches the target ends with status success", "log status success"
        yield in_log(run, WARNING, "says aborted, though the target was reached", rule, hint, stop[0])


def _check_band(run: Run) -> Iterator[Finding]:
    """The gate: a run of a published batch size lies among the published runs."""
    miss = first_miss(run)
    if miss is not None:
        event = next(event for event in run.log.events if event.line == miss.evaluation.line)
        severity = WARNING if miss.same_recipe else NOTE
        recipe = "" if miss.same_recipe else ", though of other hyper-parameters"
        rule = f"published closed runs of batch {run.batch_size:,g}{recipe}, rise in this range"
        yield in_log(run, severity, f"is {miss.describe()}", rule, f"likely causes: {'; '.join(miss.causes)}", event)


def _check_target(run: Run) -> Iterator[Finding]:
    reached = next((e for e in run.evaluations if e.accuracy >= TARGET_ACCURACY), None)
    last = run.evaluations[-1] if run.evaluations else None
    if reached is None or last is None or reached is last:
        return
    at = f" at {reached.samples:,.0f} samples" if reached.samples is not None else ""
    yield Finding(
        severity=WARNING,
        message=f"reached the target{at}, in line {reached.line}, but the run continues",
        source="rules",
        file=run.path,
        line=last.line,
        key="eval_accuracy",
        rule="a run ends at the first evaluation that reaches the target; the RCP test takes the samples of the last",
        hint="stop at the target",
    )
