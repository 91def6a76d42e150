"""Figures of one run from its log: samples, seconds, sequences per second."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from review.logs.mllog import Event, Log, number, text
from review.logs.output import ERROR, Finding
from review.rulebook.compliance import DEFAULT_RULESET, check_compliance
from review.rulebook.rcp import NO_BATCH_SIZE, Reading, read_rcp
from review.rulebook.rules import broken, table

TARGET_ACCURACY = 0.720
OPTIMIZATION: list[str] = table("optimization")
HYPERPARAMETERS = (*OPTIMIZATION, "d_batch_size", "opt_name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation. ``samples``: trained so far, None if the log does not count them. Times in
    ms.
    """

    samples: float | None
    accuracy: float
    time_ms: float
    start_ms: float | None = None
    stop_ms: float | None = None
    line: int = 0
    key: ClassVar[str] = "eval_accuracy"

    @property
    def seconds(self) -> float | None:
        """Duration; None if the log has no eval_start and eval_stop."""
        start, stop = self.start_ms, self.stop_ms
        known = start is not None and stop is not None and stop >= start
        return (stop - start) / 1000 if known else None  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Figures of one log; None if the log lacks them.

    ``run_start``, ``run_stop``: of the official score. ``status``: of run_stop, such as success or
    aborted; error if the run noted one, incomplete without run_stop, empty without events.
    ``continued_at``: samples at which it continued after a restart, so that its clock leaves out the
    time before. ``minutes``: None if the clock is not whole or does not advance. ``init_seconds``:
    from the first init_start to init_stop, or to run_start. ``batch_size``: global_batch_size, as in
    the RCP checker. ``counts_samples``: epoch_num counts samples, as BERT's rules require, and not
    epochs as in some logs. ``evaluations``: up to run_stop, in log order. ``samples``: trained at the
    last evaluation; train_samples if evaluations do not count them. ``last_rate``: sequences per
    second of the last span: as logged in tracked_stats, else up to the last evaluation.
    """

    log: Log
    ruleset: str = DEFAULT_RULESET
    run_start: Event | None = None
    run_stop: Event | None = None
    status: str = "empty"
    continued_at: float | None = None
    minutes: float | None = None
    init_seconds: float | None = None
    rcp_reading: Reading = field(default_factory=Reading)
    batch_size: float | None = None
    seeds: Sequence[Any] = ()
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    counts_samples: bool = False
    evaluations: Sequence[Evaluation] = ()
    samples: float | None = None
    last_rate: float | None = None

    @property
    def path(self) -> Path:
        return self.log.path

    @property
    def name(self) -> str:
        """File name for display."""
        return text(self.path.name)

    # On demand: what follows a live run, or compares curves, needs no rules.
    @functools.cached_property
    def findings(self) -> list[Finding]:
        """Broken compliance rules."""
        return check_compliance(self.log, self.ruleset)

    @functools.cached_property
    def compliant(self) -> bool:
        """The verdict of the compliance checker."""
        return not any(finding.severity == ERROR for finding in self.findings)

    @property
    def converged(self) -> bool:
        """Whether run_stop says success, as the RCP checker defines it."""
        return self.status == "success"

    @property
    def first_accuracy(self) -> float | None:
        return self.evaluations[0].accuracy if self.evaluations else None

    @property
    def final_accuracy(self) -> float | None:
        return self.evaluations[-1].accuracy if self.evaluations else None

    @property
    def sequences_per_second(self) -> float | None:
        """Samples over the whole timed span, evaluations included."""
        known = self.samples and self.minutes
        return self.samples / (self.minutes * 60) if known else None  # type: ignore[operator]

    @property
    def training_rate(self) -> float | None:
        """Sequences per second from the first to the last evaluation, excluding evaluations; None
        without times.
        """
        count, spent = 0.0, 0.0
        for before, after in itertools.pairwise(self.evaluations):
            spans = before.samples, before.stop_ms, after.samples, after.start_ms
            # One gap in the times would shift training into evaluation or back.
            if None in spans:
                return None
            was, since, now, until = map(float, spans)  # type: ignore[arg-type]
            count, spent = count + now - was, spent + until - since
        return 1000 * count / spent if spent > 0 else None

    @property
    def evaluation_share(self) -> float | None:
        """Share of the timed span spent in evaluations; None if the log does not time them."""
        seconds = [evaluation.seconds for evaluation in self.evaluations]
        # The share of only some evaluations would look too small.
        if not seconds or None in seconds or not self.minutes:
            return None
        return sum(filter(None, seconds)) / (self.minutes * 60)

    def broken(
        self,
        name: str,
        message: str,
        /,
        at: Event | Evaluation | None = None,
        key: str | None = None,
        **values: Any,
    ) -> Finding:
        """A finding about this log, by a rule of rules.yaml, at an event or evaluation if given."""
        key = key or (at.key if at and isinstance(at.key, str) else None)
        return broken(name, message, self.path, at.line if at else None, key, **values)


def run_of(log: Log, ruleset: str = DEFAULT_RULESET) -> Run:
    """The figures of a log."""
    reading = read_rcp(log)
    size = reading.batch_size
    batch_size = None if size == NO_BATCH_SIZE else number(size)
    clock: dict[str, Event] = {}
    # The summarizer stops as soon as it has both, and until then keeps the latest of each.
    for event in log.events:
        if event.key in ("run_start", "run_stop") and len(clock) < 2:
            clock[event.key] = event
    start, stop = clock.get("run_start"), clock.get("run_stop")
    restarted = log.first("clock_not_whole")
    minutes = None
    if start and stop and not restarted:
        # In the summarizer's order, so that the last digits agree.
        minutes = number((stop.time_ms - start.time_ms) / 60 / 1000)
    counts = [event.meta("epoch_num") for event in log.all("eval_accuracy")]
    # No run evaluates within its first step, so that counts below one batch are epochs or steps.
    most = max((count for count in counts if count is not None), default=-1)
    counts_samples = most >= max(batch_size or 0, 2)
    evaluations = _evaluations(log, counts_samples, batch_size)
    counted = [one for one in evaluations if one.samples is not None]
    # Before run_stop train_samples may be a plan: some submitters log the maximum up front.
    trained = number(log.value("train_samples")) if stop else None
    # Ranks start at different moments; the limit of the rules runs from the earliest.
    starts = [event.time_ms for event in log.all("init_start")]
    ready = log.first("init_stop") or start
    known = {key: log.first(key) for key in HYPERPARAMETERS}
    return Run(
        log=log,
        ruleset=ruleset,
        run_start=start,
        run_stop=stop,
        status=_status(log),
        # Without a count of samples the event still says that the clock is not whole.
        continued_at=restarted and (restarted.meta("epoch_num") or 0.0),
        minutes=minutes if minutes and minutes > 0 else None,
        init_seconds=number((ready.time_ms - min(starts)) / 1000)
        if starts and ready
        else None,
        rcp_reading=reading,
        batch_size=batch_size,
        seeds=[event.value for event in log.all("seed")],
        hyperparameters={key: event.value for key, event in known.items() if event},
        counts_samples=counts_samples,
        evaluations=evaluations,
        # The last evaluation that counts samples, even if a later one does not.
        samples=counted[-1].samples if counted else trained or None,
        last_rate=_last_rate(log, counted, start),
    )


def _status(log: Log) -> str:
    if not log.events:
        return "empty"
    # This repository's trainer notes an error also after it has logged success.
    if log.first("run_error"):
        return "error"
    # The last one, as in the RCP checker; the clock takes the first.
    stop = log.last("run_stop")
    if stop is None:
        return "incomplete"
    status = stop.metadata.get("status") if isinstance(stop.metadata, dict) else None
    return status if isinstance(status, str) and status else "no status"


def _evaluations(
    log: Log, counts_samples: bool, batch_size: float | None
) -> list[Evaluation]:
    evaluations: list[Evaluation] = []
    start, stop = None, None
    # Logs that count epochs often have the samples under another name beside it.
    names = ("epoch_num",) if counts_samples else ("samples_count", "samples")
    for event in log.events:
        accuracy = number(event.value)
        if event.key == "eval_start":
            # Resets the end as well: an evaluation that died leaves no time to the next one.
            start, stop = event.time_ms, None
        elif event.key == "eval_stop":
            stop = event.time_ms
        elif event.key == "eval_accuracy" and accuracy is not None:
            samples = event.meta(*names)
            # Steps are the last resort: a packed batch holds its number of sequences only on
            # average.
            steps = None if counts_samples else event.meta("step_num", "step")
            if samples is None and steps is not None and batch_size:
                samples = steps * batch_size
            # Without eval_stop, the accuracy is logged when the evaluation is over.
            end = stop if stop is not None or start is None else event.time_ms
            made = Evaluation(
                samples=samples,
                accuracy=accuracy,
                time_ms=event.time_ms,
                start_ms=start,
                stop_ms=end,
                line=event.line,
            )
            evaluations.append(made)
            start = stop = None
        elif event.key == "run_stop":
            break
    return evaluations


def _last_rate(
    log: Log, counted: Sequence[Evaluation], start: Event | None
) -> float | None:
    for event in reversed(log.all("tracked_stats")):
        logged = event.value if isinstance(event.value, dict) else {}
        if (rate := number(logged.get("throughput"))) is not None:
            return rate
    if not counted or start is None:
        return None
    last = counted[-1]
    samples, since = 0.0, start.time_ms
    if len(counted) > 1:
        before = counted[-2]
        samples, since = before.samples or 0.0, before.stop_ms or before.time_ms
    # Training ends where an evaluation starts, if the log says when.
    spent = (last.start_ms or last.time_ms) - since
    trained = (last.samples or 0.0) - samples
    return 1000 * trained / spent if spent > 0 and trained > 0 else None
