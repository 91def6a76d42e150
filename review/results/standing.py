"""Progress of a live run: time to the target and the projected margin of the RCP test.

Samples to the target are projected from two sources, weighted by the inverse of their variances. One is the RCP mean.
The other is the accuracy of the last two evaluations: it rises on a curve of one shape over the share of the samples
that a run needs in all (_CURVE). Of the 20 runs that the curve is made of, each projected half-way, at 60, 70 and 90%
of the run, the errors are 13, 10, 6 and 4% (root mean square). Single published runs of other rounds with batches of
448 and 3,072 are met as well; at 6,912, where the curve rises later, a run is overestimated by 10 to 20%.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from review.logs.mllog import number, text
from review.logs.output import duration, pick
from review.results.gate import Miss, first_miss
from review.results.run import TARGET_ACCURACY, Run
from review.results.score import Result

# Accuracies at 10, 15, ... 100% of the samples to the target: medians of the 20 runs of two published results of 5.0.
# fmt: off
_ACCURACIES = (
    0.3966, 0.4452, 0.5472, 0.6544, 0.7015, 0.7079, 0.7105, 0.7125, 0.7136, 0.7146,
    0.7155, 0.7163, 0.7170, 0.7177, 0.7181, 0.7187, 0.7192, 0.7197, 0.7201,
)
# fmt: on
_SHARES = [(index + 2) / 20 for index in range(len(_ACCURACIES))]
# Relative standard errors of a projection by the curve at shares of the run, larger than on the curve's own runs.
_KNOWN_SHARES, _CURVE_ERRORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), (1.0, 0.4, 0.22, 0.14, 0.10, 0.07, 0.05, 0.04)
_RCP_ERROR = 0.17  # relative standard error of the RCP mean as the projection of one run
_FITTED = 4  # evaluations that the projection to another target is fitted to
_STALLED_SECONDS = 60.0


def curve_share(accuracy: float) -> float:
    """The share of its samples at which a run to 0.720 has this accuracy, by interpolation; 0 below the curve."""
    return float(np.interp(accuracy, _ACCURACIES, _SHARES, left=0.0))


@dataclass(frozen=True)
class Standing:
    """A run at ``now_ms``, a Unix time in milliseconds. None: not known yet."""

    result: Result
    now_ms: float
    target: float = TARGET_ACCURACY

    @property
    def run(self) -> Run:
        """The one run of the result."""
        return self.result.runs[0]

    @functools.cached_property
    def phase(self) -> str:
        """starting, initialising, training, evaluating, finishing, or how the run ended: success, aborted, ..."""
        if self.done:
            return self.run.status
        if self.run.run_start is None:
            return "initialising" if self.run.log.events else "starting"
        if self.reached:
            return "finishing"
        marks = [event.key for event in self.run.log.events if event.key in ("eval_start", "eval_stop")]
        return "evaluating" if marks[-1:] == ["eval_start"] else "training"

    @property
    def reached(self) -> bool:
        """Whether the last evaluation reached the target."""
        return (self.run.final_accuracy or 0) >= self.target

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return self.run.run_stop is not None

    @functools.cached_property
    def elapsed(self) -> float | None:
        """Seconds since run_start."""
        start, stop = self.run.run_start, self.run.run_stop
        if start is None:
            return None
        return number(((stop.time_ms if stop else max(self.now_ms, start.time_ms)) - start.time_ms) / 1000)

    @functools.cached_property
    def silent(self) -> float | None:
        """Seconds since the last event of a run that has not ended."""
        events = self.run.log.events
        silent = None if self.done or not events else number((self.now_ms - events[-1].time_ms) / 1000)
        return None if silent is None else max(0.0, silent)

    @functools.cached_property
    def stalled(self) -> bool:
        """Whether the log has been silent for over a minute, and over three times its longest silence so far."""
        times = [event.time_ms for event in self.run.log.events]
        longest = max((b - a for a, b in itertools.pairwise(times)), default=0.0) / 1000
        return self.silent is not None and self.silent > max(_STALLED_SECONDS, 3 * longest)

    @functools.cached_property
    def rate(self) -> float | None:
        """Samples a second while training: the last measured span."""
        return self.run.throughput[-1][1] if self.run.throughput else None

    @functools.cached_property
    def _counted(self) -> list[tuple[float, float]]:
        """(samples, accuracy) of every evaluation that counts samples."""
        return [(e.samples, e.accuracy) for e in self.run.evaluations if e.samples]

    @functools.cached_property
    def interval(self) -> float | None:
        """Samples between evaluations."""
        return self._counted[-1][0] / len(self._counted) if self._counted else None

    @functools.cached_property
    def samples(self) -> float | None:
        """Samples trained by now: of the last event that counts them, and what the rate adds since."""
        if self.done:
            return self.run.samples
        counted = [e.samples for e in self.run.evaluations if e.samples is not None]
        since = self.run.run_start.time_ms if self.run.run_start else 0.0
        for event in self.run.log.events:
            if event.key == "tracked_stats" and self.run.counts_samples:
                counted.append(event.meta("epoch_num", "samples_count") or 0.0)
            if event.key in ("tracked_stats", "eval_stop", "eval_accuracy"):
                since = max(since, event.time_ms)  # training goes on from here
        if not counted:
            return 0.0 if self.run.run_start else None
        if self.rate is None or self.phase != "training":
            return max(counted)
        ahead = max(0.0, (self.now_ms - since) / 1000) * self.rate
        return max(counted) + min(ahead, self.interval or math.inf)  # the next evaluation would have been logged

    @functools.cached_property
    def projection(self) -> tuple[float, float] | None:
        """(samples to the target, their standard error), by the accuracies so far and the RCP mean."""
        if self.reached and self.run.samples:
            return self.run.samples, 0.0
        if self.target != TARGET_ACCURACY:
            return _extrapolate(self._counted[-_FITTED:], self.target)
        guesses = [] if self.result.rcp_point is None else [(self.result.rcp_point.mean, _RCP_ERROR)]
        shares = [(samples, curve_share(accuracy)) for samples, accuracy in self._counted[-2:]]
        if shares and all(share > 0 for _, share in shares):
            by_curve = sum(samples / share for samples, share in shares) / len(shares)
            guesses.append((by_curve, float(np.interp(shares[-1][1], _KNOWN_SHARES, _CURVE_ERRORS))))
        if not guesses:
            return None
        weight = sum(error**-2 for _, error in guesses)
        projected = math.exp(sum(math.log(guess) * error**-2 for guess, error in guesses) / weight)
        return max(projected, self.samples or 0.0), projected * weight**-0.5

    @functools.cached_property
    def share(self) -> float | None:
        """Share of the run that is done, by samples."""
        if self.done:
            return 1.0
        if self.projection is None or self.samples is None or self.projection[0] <= 0:
            return None
        return min(1.0, self.samples / self.projection[0])

    @functools.cached_property
    def eta(self) -> float | None:
        """Seconds to the evaluation that will reach the target, evaluations on the way included."""
        if self.done or self.stalled or self.projection is None or self.samples is None or not self.rate:
            return None
        end = self.projection[0]
        if self.interval:
            end = self.interval * math.ceil(end / self.interval - 1e-9)  # runs end at evaluations
        left = max(0.0, end - self.samples)
        times = [seconds for e in self.run.evaluations if (seconds := e.seconds) is not None]
        evaluation = sum(times) / len(times) if times else 0.0
        return left / self.rate + (math.ceil(left / self.interval) if self.interval else 0) * evaluation

    @functools.cached_property
    def rcp_margin(self) -> tuple[float, float] | None:
        """(projected samples above the smallest mean that the RCP test accepts, standard error)."""
        if self.result.rcp_point is None or self.projection is None:
            return None
        return self.projection[0] - self.result.rcp_point.minimum, self.projection[1]

    @functools.cached_property
    def miss(self) -> Miss | None:
        """The first evaluation outside the published runs, of a run to their target."""
        return first_miss(self.run) if self.target == TARGET_ACCURACY else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        projected, error = self.projection or (None, None)
        return {
            **pick(self, "file=run.path phase done stalled elapsed_seconds=elapsed samples sequences_per_second=rate"),
            "evaluations": len(self.run.evaluations),
            **pick(self, "accuracy=run.final_accuracy target"),
            "projected_samples": projected,
            "projected_samples_error": error,
            **pick(self, "share eta_seconds=eta"),
            "rcp_margin_samples": self.rcp_margin and self.rcp_margin[0],
            "outside_published": self.miss,
        }

    def line(self) -> str:
        """All of it in one line of text."""
        run, miss = self.run, self.miss
        parts = {
            self.phase: True,
            f"{self.samples or 0:,.0f} samples": self.samples is not None,
            f"accuracy {run.final_accuracy or 0:.4f} of {self.target:g}": run.evaluations,
            f"{self.rate or 0:,.0f} sequences/s": self.rate,
            f"{duration(self.elapsed)} elapsed": self.elapsed is not None,
            f"{duration(self.eta)} to go": self.eta is not None,
            f"RCP margin {self.margin}": self.rcp_margin,
            f"{miss.describe()} (likely: {miss.causes[0]})" if miss else "": miss,
            f"no new line for {duration(self.silent)}": self.stalled,
        }
        return text(", ".join(part for part, known in parts.items() if known))

    @property
    def margin(self) -> str:
        """The RCP margin in samples with its error; a dash where it is not known."""
        if self.rcp_margin is None:
            return "-"
        margin, error = self.rcp_margin
        return f"{margin:+,.0f}{f' +- {error:,.0f}' if error else ''} samples"


def _extrapolate(counted: list[tuple[float, float]], target: float) -> tuple[float, float] | None:
    """Where a straight line through accuracy over log samples meets the target; None where it does not rise."""
    x, y = [math.log(samples) for samples, _ in counted], [accuracy for _, accuracy in counted]
    if len(set(x)) < 2:
        return None
    rise, start = statistics.linear_regression(x, y)
    exponent = (target - start) / rise if rise > 0 else math.inf
    if exponent > 50:  # beyond any run
        return None
    projected = max(math.exp(exponent), counted[-1][0])
    residual = math.fsum((b - start - rise * a) ** 2 for a, b in zip(x, y, strict=True))
    return projected, projected * math.sqrt(residual / len(x)) / rise
