"""How far a live run is: its phase, the share that is done, and the time to go.

Samples to the target are projected by the RCP mean, and in the last 40% of a run by the accuracy of
the last two evaluations, which follows a curve of fixed shape over the share of the total samples
(_ACCURACIES).
"""

import functools
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.durations import duration
from review.logs import tree
from review.logs.mllog import number, text
from review.logs.output import number_text, pick
from review.results.folder import RunFolder
from review.results.published_curves import Deviation, first_deviation
from review.results.run import TARGET_ACCURACY, Run

# Accuracies at 10, 15, ... 100% of the samples to the target: medians of the 20 runs of two
# published 5.0 results.
# fmt: off
_ACCURACIES = (
    0.3966, 0.4452, 0.5472, 0.6544, 0.7015, 0.7079, 0.7105, 0.7125, 0.7136, 0.7146,
    0.7155, 0.7163, 0.7170, 0.7177, 0.7181, 0.7187, 0.7192, 0.7197, 0.7201,
)
# fmt: on
_SHARES = [(index + 2) / 20 for index in range(len(_ACCURACIES))]
# Relative standard errors of projections: by the RCP mean, and by the curve at a share of the run,
# larger than on the runs it was fitted to.
_RCP_ERROR = 0.17
_KNOWN_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_CURVE_ERRORS = (1.0, 0.4, 0.22, 0.14, 0.10, 0.07, 0.05, 0.04)
STALLED_SECONDS = 60.0


def curve_share(accuracy: float) -> float:
    """Share of its samples at which a run to 0.720 has this accuracy, by interpolation; 0 below the
    curve.
    """
    return float(np.interp(accuracy, _ACCURACIES, _SHARES, left=0.0))


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
        if self.done:
            return self.run.status
        if self.run.run_start is None:
            return "initialising" if self.run.log.events else "starting"
        if self.reached:
            return "finishing"
        marks = [
            event.key
            for event in self.run.log.events
            if event.key in ("eval_start", "eval_stop")
        ]
        return "evaluating" if marks[-1:] == ["eval_start"] else "training"

    @property
    def reached(self) -> bool:
        return (
            not self.result.pretrains and (self.run.final_accuracy or 0) >= self.target
        )

    @property
    def done(self) -> bool:
        return self.run.run_stop is not None or self.run.status == "error"

    @functools.cached_property
    def broken(self) -> str | None:
        """Why the trial failed; None unless the launcher has recorded a failure."""
        failed = re.fullmatch(r"failed_\D*(\d*).*", self.path.name)
        number = int(failed[1] or -1) if failed else -1
        return tree.crashes(self.path.parent).get(number, "crashed") if failed else None

    @property
    def status(self) -> int:
        """Exit status: 1 if it ended without reaching the target."""
        return int((self.done or self.broken is not None) and not self.run.converged)

    @property
    def news(self) -> object:
        """What is worth a new line; samples and times change with every look."""
        return len(self.run.evaluations), self.stalled, self.phase, self.broken

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
        return (
            0.0
            if self.done or not events
            else (self.now_ms - events[-1].time_ms) / 1000
        )

    @functools.cached_property
    def stalled(self) -> bool:
        """Whether the log has been silent for more than a minute and three times its longest
        silence so far.
        """
        times = [event.time_ms for event in self.run.log.events]
        # Logs are silent during an evaluation; how long, the log's past tells.
        longest = max((b - a for a, b in itertools.pairwise(times)), default=0.0) / 1000
        return self.silent > max(STALLED_SECONDS, 3 * longest)

    @functools.cached_property
    def _counted(self) -> list[tuple[float, float]]:
        """(samples, accuracy) of every evaluation with a sample count."""
        return [(e.samples, e.accuracy) for e in self.run.evaluations if e.samples]

    @functools.cached_property
    def samples(self) -> float | None:
        """Samples trained at the last count that the log has."""
        if self.done:
            return self.run.samples
        counted = [samples for samples, _ in self._counted]
        if self.run.counts_samples:
            stats = self.run.log.all("tracked_stats")
            counted += [
                event.meta("epoch_num", "samples_count") or 0.0 for event in stats
            ]
        return max(counted) if counted else 0.0 if self.run.run_start else None

    @functools.cached_property
    def projection(self) -> float | None:
        """Samples to the target, or of a run without a target to the last step; None if unknown."""
        if self.result.pretrains:
            steps = number(
                tree.read_json(self.result.folder / "config.json", "schedule").get(
                    "max_steps"
                )
            )
            return (
                steps * self.run.batch_size if steps and self.run.batch_size else None
            )
        if self.reached and self.run.samples:
            return self.run.samples
        # The curve and the reference are of runs to 0.720.
        if self.target != TARGET_ACCURACY:
            return None
        shares = [
            (samples, curve_share(accuracy)) for samples, accuracy in self._counted[-2:]
        ]
        point = self.result.rcp_point
        projected, errors = ([point.mean], [_RCP_ERROR]) if point else ([], [])
        # Below its first point the curve says nothing about the end.
        if shares and all(share > 0 for _, share in shares):
            projected.append(
                sum(samples / share for samples, share in shares) / len(shares)
            )
            errors.append(float(np.interp(shares[-1][1], _KNOWN_SHARES, _CURVE_ERRORS)))
        if not projected:
            return None
        # Weighted by inverse variance; the errors are relative, so it is the logarithms that are
        # averaged.
        mean = float(np.average(np.log(projected), weights=np.array(errors) ** -2.0))
        return max(math.exp(mean), self.samples or 0.0)

    @functools.cached_property
    def share(self) -> float | None:
        """Share of the run that is done, by samples, 0 to 1."""
        if self.done:
            return 1.0
        if self.samples is None or not self.projection:
            return None
        return min(1.0, self.samples / self.projection)

    @functools.cached_property
    def eta(self) -> float | None:
        """Seconds of training from the last count of samples to the target."""
        rate = self.run.last_rate
        if self.done or self.stalled or not rate or self.samples is None:
            return None
        return self.projection and (self.projection - self.samples) / rate

    @functools.cached_property
    def rcp_margin(self) -> float | None:
        """Projected samples minus the smallest mean that the RCP test accepts."""
        if (
            self.result.rcp_point is None
            or self.projection is None
            or self.result.pretrains
        ):
            return None
        return self.projection - self.result.rcp_point.minimum

    @functools.cached_property
    def deviation(self) -> Deviation | None:
        """The first evaluation outside the range of published runs, if this run has the same
        target.
        """
        if self.target != TARGET_ACCURACY or self.result.pretrains:
            return None
        return first_deviation(self.run)

    def as_dict(self) -> dict[str, Any]:
        names = "file=path phase done stalled elapsed_seconds=elapsed samples share"
        names += (
            " sequences_per_second=run.last_rate accuracy=run.final_accuracy target"
        )
        names += " projected_samples=projection eta_seconds=eta"
        names += " rcp_margin_samples=rcp_margin outside_published=deviation"
        return {**pick(self, names), "evaluations": len(self.run.evaluations)}

    def parts(self) -> list[str]:
        """Everything known, one phrase per item."""
        run, deviation, margin = self.run, self.deviation, self.rcp_margin
        expected = (
            ""
            if self.done or not self.projection
            else f" of about {self.projection:,.0f}"
        )
        wanted = "" if self.result.pretrains else f" of {self.target:g}"
        causes = f" (likely: {'; '.join(deviation.causes)})" if deviation else ""
        parts = (
            (self.phase, True),
            (f"{self.samples or 0:,.0f}{expected} samples", self.samples is not None),
            (f"accuracy {run.final_accuracy or 0:.4f}{wanted}", run.evaluations),
            (f"{run.last_rate or 0:,.0f} sequences/s", run.last_rate),
            (f"{duration(self.elapsed)} elapsed", self.elapsed is not None),
            (f"{duration(self.eta)} to go", self.eta is not None),
            (f"RCP margin {margin or 0:+,.0f} samples", margin is not None),
            (f"{deviation.describe() if deviation else ''}{causes}", deviation),
            (f"no new line for {duration(self.silent)}", self.stalled),
        )
        return [text(part) for part, known in parts if known]

    def cells(self) -> list[str]:
        """What _COLUMNS show from the third on."""
        return [
            number_text(self.share, ".0%"),
            number_text(self.run.final_accuracy, ".4f"),
            str(len(self.run.evaluations)),
            number_text(self.run.last_rate or None, ",.0f"),
            duration(self.elapsed),
            duration(self.eta),
        ]
