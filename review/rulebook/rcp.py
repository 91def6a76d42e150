"""Reference convergence points (RCP): the fewest samples in which runs of a batch size may
plausibly converge.

Follows the official RCP checker: olympic mean of the reference runs, standard deviation of all of
them, the smallest mean that a one-sided two-sample t-test at 5% does not reject; points that
converge more slowly than the interpolation of their neighbours are pruned, other batch sizes
interpolated. Data: rcps_bert.json of the mlperf_logging package.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from review.logs.mllog import Log, number, text
from review.logs.output import ReviewError
from review.logs.tree import read_object
from review.rulebook.compliance import DEFAULT_RULESET, package_folder

RUNS = 10  # of a submission
_ALPHA = 0.05
_TOLERANCE = 1e-4  # samples, of the official bisection
_ENDLESS = 1e12  # samples
# What the official checker keeps when it finds no batch size in a log.
NO_BATCH_SIZE = -1
# Benchmarks that log samples under another key.
_COUNT_SAMPLES = (
    "llama2_70b_lora",
    "llama31_405b",
    "llama31_8b",
    "flux1",
    "stable_diffusion",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rcp:
    """A reference point. ``mean``, ``std`` and ``minimum`` are samples; ``minimum`` is the smallest
    accepted mean.
    """

    batch_size: int
    mean: float
    std: float
    minimum: float
    # Samples of each reference run; none for an interpolated point.
    runs: tuple[int, ...] = ()
    hyperparameters: dict[str, Any] | None = None
    interpolated_from: tuple[int, int] | None = None

    def describe(self, batch_size: float | None = None) -> str:
        """Mean, minimum and origin in words. ``batch_size``: of the runs tested."""
        how = (
            "exact"
            if self.interpolated_from is None
            else "between {:,} and {:,}".format(*self.interpolated_from)
        )
        if batch_size is not None and self.batch_size != batch_size:
            how = f"of batch {self.batch_size:,}, the smallest with one"
        return f"mean {self.mean:,.0f}, minimum {self.minimum:,.0f} samples ({how})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Outcome of the RCP test."""

    passed: bool
    reason: str
    scaling_factor: float
    point: Rcp | None


def olympic_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest value. Raises ValueError for fewer than three."""
    if len(values) < 3:
        raise ValueError("an olympic mean needs at least three values")
    # "Olympic": MLPerf drops the fastest and the slowest, so that one outlier cannot decide.
    kept = sorted(values)[1:-1]
    return math.fsum(kept) / len(kept)


def minimum_mean(mean: float, std: float, reference_runs: int) -> float:
    """The smallest mean of a submission's eight counted runs that the t-test accepts.

    Args: mean, std: of the reference, samples. reference_runs: number of them in the test.
    """
    # Imported here: takes 0.2 s, which most commands do not need.
    from scipy.special import stdtrit

    if std == 0:
        return mean
    # The olympic mean of a submission is over eight of its ten runs.
    counted = RUNS - 2
    # Pooled degrees of freedom: the checker assumes equal variances (equal_var=True).
    t = float(stdtrit(reference_runs + counted - 2, 1 - _ALPHA))
    threshold = mean - t * std * math.sqrt(1 / reference_runs + 1 / counted)
    low, high = 0.0, mean  # the official bisection, so that the last digits agree
    middle = (low + high) / 2
    while high - low > _TOLERANCE:
        low, high = (low, middle) if middle > threshold else (middle, high)
        middle = (low + high) / 2
    return middle


def _path(ruleset: str) -> Path:
    return package_folder() / "rcp_checker" / f"training_{ruleset}" / "rcps_bert.json"


def has_points(ruleset: str) -> bool:
    """Whether a ruleset has reference points for BERT; the first ones do not."""
    return _path(ruleset).is_file()


@functools.cache
def points(ruleset: str = DEFAULT_RULESET) -> tuple[Rcp, ...]:
    """All reference points, by batch size. Raises ReviewError."""
    if not has_points(ruleset):
        raise ReviewError(
            f"mlperf_logging has no BERT reference points for ruleset {ruleset}"
        )
    points = []
    for record in read_object(_path(ruleset)).values():
        # BERT's "epochs" are training samples (rules, "Epoch reporting").
        runs = record["Epochs to converge"]
        # The mean leaves out two runs, the deviation none: the official checker's own mixture.
        mean = olympic_mean(runs)
        center = math.fsum(runs) / len(runs)
        std = math.sqrt(math.fsum((value - center) ** 2 for value in runs) / len(runs))
        point = Rcp(
            batch_size=record["BS"],
            mean=mean,
            std=std,
            minimum=minimum_mean(mean, std, len(runs) - 2),
        )
        points.append(
            replace(
                point, runs=tuple(sorted(runs)), hyperparameters=record["Hyperparams"]
            )
        )
    return tuple(sorted(points, key=lambda point: point.batch_size))


@functools.cache
def pruned(ruleset: str = DEFAULT_RULESET) -> tuple[Rcp, ...]:
    """The points that submissions are tested against."""
    every = points(ruleset)
    fastest = min(every, key=lambda point: point.mean)
    # So that the smallest batch left converges fastest (the official checker's first step).
    kept = [point for point in every if point.batch_size >= fastest.batch_size]
    i = 1
    while i < len(kept) - 1:
        between = _interpolate(kept[i].batch_size, kept[i - 1], kept[i + 1])
        if kept[i].mean > between.mean:
            # The index stays: its new neighbour is compared next, as in the official loop, which by
            # its own comment is not the lower convex envelope.
            del kept[i]
        else:
            i += 1
    return tuple(kept)


def _interpolate(batch_size: int, low: Rcp, high: Rcp) -> Rcp:
    share = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)
    mean = low.mean + share * (high.mean - low.mean)
    std = low.std + share * (high.std - low.std)
    # An interpolated point has no runs; the official checker takes twice those of a submission.
    point = Rcp(
        batch_size=batch_size,
        mean=mean,
        std=std,
        minimum=minimum_mean(mean, std, 2 * RUNS),
    )
    return replace(point, interpolated_from=(low.batch_size, high.batch_size))


def nearest(batch_size: float, ruleset: str = DEFAULT_RULESET) -> list[Rcp]:
    """The pruned points next to a batch size on both sides, or the one of exactly this size."""
    lower = [point for point in pruned(ruleset) if point.batch_size < batch_size]
    higher = [point for point in pruned(ruleset) if point.batch_size > batch_size]
    exact = [point for point in pruned(ruleset) if point.batch_size == batch_size]
    return exact or [*lower[-1:], *higher[:1]]


def find(batch_size: float, ruleset: str = DEFAULT_RULESET) -> tuple[Rcp | None, str]:
    """The point for a batch size and how it was found; None above the largest batch size."""
    around = nearest(batch_size, ruleset)
    if around[0].batch_size == batch_size:
        return around[0], "RCP found"
    if len(around) == 2:
        return _interpolate(int(batch_size), *around), "RCP Interpolation"
    if around[0].batch_size > batch_size:
        # Below the smallest reference there is nothing to
        # interpolate: its limit must be met as it is.
        return around[0], "RCP not found but slower convergence on smaller batch size"
    return None, f"Missing RCP, please submit RCP with BS = {batch_size:g}"


def judge(
    batch_size: float, mean_samples: float, ruleset: str = DEFAULT_RULESET
) -> Verdict:
    """RCP test of a mean number of samples to the target."""
    point, reason = find(batch_size, ruleset)
    if point is None:
        return Verdict(passed=False, reason=reason, scaling_factor=1.0, point=None)
    # Only faster convergence than the reference lengthens the time; slower is its own penalty.
    factor = max(1.0, point.mean / mean_samples) if mean_samples > 0 else 1.0
    # Rounded like the official maximal speed-up.
    passed = mean_samples >= point.mean / (point.mean / point.minimum)
    # Not even slower than the smallest reference: then the
    # official checker asks for one of its size.
    if not passed and reason.startswith("RCP not found"):
        reason = f"Missing RCP, please submit RCP with BS = {batch_size:g}"
    return Verdict(passed=passed, reason=reason, scaling_factor=factor, point=point)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """``samples`` to the target, None if the run did not converge. ``crash``: why the checker
    crashes.
    """

    samples: float | None = None
    batch_size: Any = NO_BATCH_SIZE
    benchmark: Any = None
    crash: str | None = None


def read_rcp(log: Log, train_samples: bool = False) -> Reading:
    """What the official RCP checker reads from a log, including its quirks and crashes.

    It searches whole lines for names, takes the last match, and stops with a traceback if a value
    is missing or of another type, which fails the whole result, not just this run. (Malformed lines
    already fail the seed checker.)

    ``train_samples``: take the samples from train_samples, as the rules allow for BERT, instead of
    the epoch_num of the evaluation that reached the target.
    """
    batch_size = NO_BATCH_SIZE
    benchmark = None
    last = None
    samples = None
    crash = ""
    for event in log.events:
        line = event.text
        metadata = event.metadata if isinstance(event.metadata, dict) else {}
        # By substring of the line: a name inside a value counts, too, as in the official checker.
        if "global_batch_size" in line:
            batch_size = event.value
        if "submission_benchmark" in line:
            benchmark = event.value
        # The official checker drops the option once the log names another benchmark.
        if train_samples and benchmark in (None, "bert"):
            if "train_samples" in line:
                last = event.value
        elif (
            "eval_accuracy" in line or "eval_error" in line
        ) and benchmark not in _COUNT_SAMPLES:
            count = metadata.get("epoch_num")
            if not isinstance(count, (int, float)):
                crash = (
                    f"line {event.line} has eval_accuracy without a number epoch_num"
                )
                break
            # Rounded to three digits like there; matters for logs that count epochs. Beyond what can
            # be computed with, a count is as slow as any.
            last = round(count, 3) if number(count) is not None else _ENDLESS
        if event.key == "run_stop":
            # Each run_stop replaces the verdict of the one before it.
            samples = None
            if "status" not in metadata:
                crash = f"line {event.line} has run_stop without a status"
            elif metadata["status"] == "success":
                samples, key = (
                    last,
                    "train_samples" if train_samples else "eval_accuracy",
                )
                if last is None:
                    crash = f"line {event.line} has run_stop with success, and no {key} before it"
                elif train_samples and number(last) is None:
                    crash = f"train_samples is {text(last)}, not a number"
            if crash:
                break
    samples = None if crash else samples
    return Reading(
        samples=samples, batch_size=batch_size, benchmark=benchmark, crash=crash or None
    )
