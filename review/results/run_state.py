"""How far a live run is: its phase, its samples and their limit, its rate, its last evaluations."""

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.durations import duration
from review.logs import tree
from review.logs.mllog import number, text
from review.logs.output import number_text, pick
from review.results.folder import RunFolder
from review.results.published_curves import Deviation, first_deviation
from review.results.run import TARGET_ACCURACY, Run

_STALLED_SECONDS = 60.0
_LAST = 3  # evaluations that are shown


@dataclass(frozen=True)
class RunState:
    """State of a run at ``now_ms``, a Unix time in milliseconds. None: not known yet."""

    result: RunFolder
    now_ms: float

    @property
    def run(self) -> Run:
        return self.result.runs[0]

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def target(self) -> float:
        return self.result.target

    @functools.cached_property
    def phase(self) -> str:
        """starting, initialising, training, evaluating, finishing, or how the run ended: success,
        aborted, ...
        """
        if self.ended:
            return self.run.status
        if self.run.run_start is None:
            return "initialising" if self.run.log.events else "starting"
        if not self.result.pretrains and (self.run.final_accuracy or 0) >= self.target:
            return "finishing"
        keys = [event.key for event in self.run.log.events]
        marks = [key for key in keys if key in ("eval_start", "eval_stop")]
        return "evaluating" if marks[-1:] == ["eval_start"] else "training"

    @property
    def ended(self) -> bool:
        """Whether its own log says so."""
        return self.run.run_stop is not None or self.run.status == "error"

    @functools.cached_property
    def failure(self) -> str | None:
        """Why the trial failed; None unless the launcher has recorded a failure."""
        failed = re.fullmatch(r"failed_\D*(\d*).*", self.path.name)
        number = int(failed[1] or -1) if failed else -1
        return tree.crashes(self.path.parent).get(number, "crashed") if failed else None

    @property
    def over(self) -> bool:
        """Whether no more lines are to come."""
        return self.ended or self.failure is not None

    @property
    def status(self) -> int:
        """Exit status: 1 if it ended without reaching the target."""
        return int(self.over and not self.run.converged)

    @property
    def news(self) -> object:
        """What is worth a new line; samples and times change with every look."""
        return len(self.run.evaluations), self.stalled, self.phase, self.failure

    @functools.cached_property
    def elapsed(self) -> float | None:
        """Seconds since run_start."""
        start, stop = self.run.run_start, self.run.run_stop
        if start is None:
            return None
        # The clocks of the cluster and of this machine may differ: time does not run backwards.
        end = stop.time_ms if stop else max(self.now_ms, start.time_ms)
        return number((end - start.time_ms) / 1000)

    @functools.cached_property
    def silent(self) -> float:
        """Seconds since the last event of a run that has not ended."""
        events = self.run.log.events
        if self.ended or not events:
            return 0.0
        return (self.now_ms - events[-1].time_ms) / 1000

    @functools.cached_property
    def stalled(self) -> bool:
        """Whether the log has been silent for more than a minute and three times its longest
        silence so far.
        """
        times = [event.time_ms for event in self.run.log.events]
        # Logs are silent during an evaluation; how long, the log's past tells.
        longest = max((b - a for a, b in itertools.pairwise(times)), default=0.0) / 1000
        return self.silent > max(_STALLED_SECONDS, 3 * longest)

    @functools.cached_property
    def samples(self) -> float | None:
        """Samples trained at the last count that the log has."""
        if self.ended:
            return self.run.samples
        counted = [each.samples for each in self.run.evaluations if each.samples]
        if self.run.counts_samples:
            stats = self.run.log.all("tracked_stats")
            counted += [
                event.meta("epoch_num", "samples_count") or 0.0 for event in stats
            ]
        return max(counted) if counted else 0.0 if self.run.run_start else None

    @functools.cached_property
    def limit(self) -> float | None:
        """Samples after which the run ends, at its target or not, by config.json."""
        settings = tree.read_json(self.result.folder / "config.json")
        schedule = settings.get("schedule")
        schedule = schedule if isinstance(schedule, dict) else {}
        steps = number(schedule.get("max_steps")) or 0.0
        limits = (
            steps * (self.run.batch_size or 0.0),
            number(settings.get("max_samples")) or 0.0,
        )
        return min((limit for limit in limits if limit > 0), default=None)

    @functools.cached_property
    def deviation(self) -> Deviation | None:
        """The first evaluation outside the range of published runs, if this run has the same
        target.
        """
        if self.target != TARGET_ACCURACY or self.result.pretrains:
            return None
        return first_deviation(self.run)

    def as_dict(self) -> dict[str, Any]:
        names = "file=path phase done=ended stalled elapsed_seconds=elapsed samples"
        names += " limit_samples=limit sequences_per_second=run.last_rate"
        names += " accuracy=run.final_accuracy target outside_published=deviation"
        return {**pick(self, names), "evaluations": len(self.run.evaluations)}

    def parts(self) -> list[str]:
        """Everything known, one phrase per item."""
        run, deviation = self.run, self.deviation
        limit = (
            f" of at most {self.limit:,.0f}" if self.limit and not self.ended else ""
        )
        wanted = "" if self.result.pretrains else f" of {self.target:g}"
        last = ", ".join(f"{each.accuracy:.4f}" for each in run.evaluations[-_LAST:])
        causes = f" (likely: {'; '.join(deviation.causes)})" if deviation else ""
        parts = (
            (self.phase, True),
            (f"{self.samples or 0:,.0f}{limit} samples", self.samples is not None),
            (f"accuracy {last}{wanted}", run.evaluations),
            (f"{run.last_rate or 0:,.0f} sequences/s", run.last_rate),
            (f"{duration(self.elapsed)} elapsed", self.elapsed is not None),
            (f"{deviation.describe() if deviation else ''}{causes}", deviation),
            (f"no new line for {duration(self.silent)}", self.stalled),
        )
        return [text(part) for part, known in parts if known]

    def cells(self) -> list[str]:
        """What the columns of `watch` show from the third on."""
        return [
            number_text(self.samples, ",.0f"),
            number_text(self.limit, ",.0f"),
            number_text(self.run.final_accuracy, ".4f"),
            str(len(self.run.evaluations)),
            number_text(self.run.last_rate or None, ",.0f"),
            duration(self.elapsed),
        ]
