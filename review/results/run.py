"""Figures of one run from its log: samples, seconds, sequences per second."""

import functools
import itertools
from dataclasses import dataclass, replace
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
        if (
            self.start_ms is None
            or self.stop_ms is None
            or self.stop_ms < self.start_ms
        ):
            return None
        return (self.stop_ms - self.start_ms) / 1000


@dataclass(frozen=True)
class Run:
    """Figures of one log; None if the log lacks them."""

    log: Log
    ruleset: str = DEFAULT_RULESET

    @property
    def path(self) -> Path:
        return self.log.path

    @property
    def name(self) -> str:
        """File name for display."""
        return text(self.path.name)

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

    # Computed once: cached_property writes into __dict__, which a frozen dataclass allows.
    @functools.cached_property
    def findings(self) -> list[Finding]:
        """Broken compliance rules."""
        return check_compliance(self.log, self.ruleset)

    @functools.cached_property
    def compliant(self) -> bool:
        """The verdict of the compliance checker."""
        return not any(finding.severity == ERROR for finding in self.findings)

    @functools.cached_property
    def _clock(self) -> dict[str, Event]:
        events: dict[str, Event] = {}
        # The summarizer stops as soon as it has both, and until then keeps the latest of each.
        for event in self.log.events:
            if event.key in ("run_start", "run_stop") and len(events) < 2:
                events[event.key] = event
        return events

    @property
    def run_start(self) -> Event | None:
        """The run_start of the official score: the last one before the first run_stop."""
        return self._clock.get("run_start")

    @property
    def run_stop(self) -> Event | None:
        return self._clock.get("run_stop")

    @functools.cached_property
    def status(self) -> str:
        """Status of run_stop, such as success or aborted; error if the run noted one, incomplete
        without run_stop, empty without events.
        """
        if not self.log.events:
            return "empty"
        # This repository's trainer notes an error also after it has logged success.
        if self.log.first("run_error"):
            return "error"
        # The last one, as in the RCP checker; the clock takes the first.
        stop = self.log.last("run_stop")
        if stop is None:
            return "incomplete"
        status = (
            stop.metadata.get("status") if isinstance(stop.metadata, dict) else None
        )
        return status if isinstance(status, str) and status else "no status"

    @functools.cached_property
    def continued_at(self) -> float | None:
        """Samples at which a run continued after a restart: its clock leaves out the time
        before.
        """
        event = self.log.first("clock_not_whole")
        # Without a count of samples the event still says that the clock is not whole.
        return None if event is None else event.meta("epoch_num") or 0.0

    @functools.cached_property
    def minutes(self) -> float | None:
        """Time from run_start to run_stop; None if the clock is not whole or does not advance."""
        if (
            self.run_start is None
            or self.run_stop is None
            or self.continued_at is not None
        ):
            return None
        # In the summarizer's order, so that the last digits agree.
        minutes = number((self.run_stop.time_ms - self.run_start.time_ms) / 60 / 1000)
        return minutes if minutes is not None and minutes > 0 else None

    @functools.cached_property
    def init_seconds(self) -> float | None:
        """Time from the first init_start to init_stop, or to run_start."""
        # Ranks start at different moments; the limit of the rules runs from the earliest.
        starts = self.log.all("init_start")
        stop = self.log.first("init_stop") or self.run_start
        if not starts or stop is None:
            return None
        return number((stop.time_ms - min(event.time_ms for event in starts)) / 1000)

    @functools.cached_property
    def batch_size(self) -> float | None:
        """global_batch_size, sequences per step over all ranks; the last one logged, as in the RCP
        checker.
        """
        size = self.rcp_reading.batch_size
        return None if size == NO_BATCH_SIZE else number(size)

    @functools.cached_property
    def seeds(self) -> list[Any]:
        return [event.value for event in self.log.all("seed")]

    @functools.cached_property
    def hyperparameters(self) -> dict[str, Any]:
        return {
            key: event.value
            for key in HYPERPARAMETERS
            if (event := self.log.first(key)) is not None
        }

    @functools.cached_property
    def counts_samples(self) -> bool:
        """Whether epoch_num counts samples, as BERT's rules require, and not epochs as in some
        logs.
        """
        counts = [
            samples
            for event in self.log.all("eval_accuracy")
            if (samples := event.meta("epoch_num")) is not None
        ]
        # No run evaluates within its first step, so that
        # counts below one batch are epochs or steps.
        return bool(counts) and max(counts) >= max(self.batch_size or 0, 2)

    @functools.cached_property
    def evaluations(self) -> list[Evaluation]:
        """Evaluations up to run_stop, in log order."""
        evaluations: list[Evaluation] = []
        start, stop = None, None
        for event in self.log.events:
            if event.key == "eval_start":
                # Resets the end as well: an evaluation that died leaves no time to the next one.
                start, stop = event.time_ms, None
            elif event.key == "eval_stop":
                stop = event.time_ms
            elif (
                event.key == "eval_accuracy"
                and (accuracy := number(event.value)) is not None
            ):
                # Logs that count epochs often have the samples under another name beside it.
                samples = event.meta(
                    *(
                        ("epoch_num",)
                        if self.counts_samples
                        else ("samples_count", "samples")
                    )
                )
                # Steps are the last resort: a packed batch holds its
                # number of sequences only on average.
                steps = (
                    None
                    if self.counts_samples or samples is not None
                    else event.meta("step_num", "step")
                )
                if steps is not None and self.batch_size:
                    samples = steps * self.batch_size
                # Without eval_stop, the accuracy is logged when the evaluation is over.
                end = stop if stop is not None or start is None else event.time_ms
                evaluation = Evaluation(
                    samples=samples,
                    accuracy=accuracy,
                    time_ms=event.time_ms,
                    line=event.line,
                )
                evaluations.append(replace(evaluation, start_ms=start, stop_ms=end))
                start = stop = None
            elif event.key == "run_stop":
                break
        return evaluations

    @functools.cached_property
    def converged(self) -> bool:
        """Whether run_stop says success, as the RCP checker defines it."""
        return self.status == "success"

    @functools.cached_property
    def rcp_reading(self) -> Reading:
        return read_rcp(self.log)

    @functools.cached_property
    def samples(self) -> float | None:
        """Samples trained at the last evaluation; train_samples if evaluations do not count
        them.
        """
        # The last evaluation that counts samples, even if a later one does not.
        counted = [
            evaluation.samples
            for evaluation in self.evaluations
            if evaluation.samples is not None
        ]
        if counted:
            return counted[-1]
        trained = number(self.log.value("train_samples"))
        # Before run_stop it may be a plan: some submitters log the maximum up front.
        return trained if trained and self.run_stop is not None else None

    @property
    def training_rate(self) -> float | None:
        """Sequences per second from the first to the last evaluation, excluding evaluations; None
        without times.
        """
        count, spent = 0.0, 0.0
        for before, after in itertools.pairwise(self.evaluations):
            # One gap in the times would shift training into evaluation or back.
            if (
                before.samples is None
                or before.stop_ms is None
                or after.samples is None
                or after.start_ms is None
            ):
                return None
            count += after.samples - before.samples
            spent += after.start_ms - before.stop_ms
        return 1000 * count / spent if spent > 0 else None

    @property
    def first_accuracy(self) -> float | None:
        return self.evaluations[0].accuracy if self.evaluations else None

    @property
    def final_accuracy(self) -> float | None:
        return self.evaluations[-1].accuracy if self.evaluations else None

    @functools.cached_property
    def sequences_per_second(self) -> float | None:
        """Samples over the whole timed span, evaluations included."""
        if not self.samples or not self.minutes:
            return None
        return self.samples / (self.minutes * 60)

    @functools.cached_property
    def evaluation_share(self) -> float | None:
        """Share of the timed span spent in evaluations; None if the log does not time them."""
        seconds = [
            evaluation.seconds
            for evaluation in self.evaluations
            if evaluation.seconds is not None
        ]
        # The share of only some evaluations would look too small.
        if not seconds or len(seconds) < len(self.evaluations) or not self.minutes:
            return None
        return sum(seconds) / (self.minutes * 60)

    @functools.cached_property
    def last_rate(self) -> float | None:
        """Sequences per second of the last span: as logged in tracked_stats, else up to the last
        evaluation.
        """
        for event in reversed(self.log.all("tracked_stats")):
            rate = (
                number(event.value.get("throughput"))
                if isinstance(event.value, dict)
                else None
            )
            if rate is not None:
                return rate
        counted = [
            evaluation
            for evaluation in self.evaluations
            if evaluation.samples is not None
        ]
        if not counted or self.run_start is None:
            return None
        last = counted[-1]
        samples = 0.0
        since = self.run_start.time_ms
        if len(counted) > 1:
            before = counted[-2]
            samples, since = before.samples or 0.0, before.stop_ms or before.time_ms
        # Training ends where an evaluation starts, if the log says when.
        spent = (last.start_ms or last.time_ms) - since
        trained = (last.samples or 0.0) - samples
        return 1000 * trained / spent if spent > 0 and trained > 0 else None
