"""Reference convergence points (RCP): the fewest samples in which runs of a batch size may
plausibly converge.

The points are the official RCP checker's: olympic mean of the reference runs, standard deviation of
all of them, the smallest mean that a one-sided two-sample t-test at 5% does not reject; points that
converge more slowly than the interpolation of their neighbours are pruned, other batch sizes
interpolated. What it reads from logs is read here again, in milliseconds and without its crashes.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from review.logs.mllog import Log, number, text
from review.logs.output import ReviewError
from review.rulebook.compliance import BENCHMARK, DEFAULT_RULESET, package_folder

RUNS = 10  # of a submission
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
    interpolated_from: tuple[int, int] | None = None

    def minutes(self, rate: float) -> float:
        """Time to train with the reference's convergence, at this rate in samples per second."""
        return self.mean / rate / 60

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
    remaining = sorted(values)[1:-1]
    return math.fsum(remaining) / len(remaining)


def _path(ruleset: str) -> Path:
    return package_folder() / "rcp_checker" / f"training_{ruleset}" / "rcps_bert.json"


def has_points(ruleset: str) -> bool:
    """Whether a ruleset has reference points for BERT; the first ones do not."""
    return _path(ruleset).is_file()


@functools.cache
def _checker(ruleset: str) -> Any:
    """The official checker. Raises ReviewError."""
    if not has_points(ruleset):
        why = f"no BERT reference points for ruleset {ruleset}"
        raise ReviewError(f"mlperf_logging has {why}")
    # Imported here: takes 0.7 s, which most commands do not need.
    from mlperf_logging.rcp_checker import rcp_checker

    return rcp_checker.RCP_Checker("training", ruleset, BENCHMARK, False)


def _point(record: dict[str, Any], between: tuple[int, int] | None = None) -> Rcp:
    figures = (record[name] for name in ("RCP Mean", "RCP Stdev", "Min Epochs"))
    mean, std, minimum = map(float, figures)
    return Rcp(
        batch_size=record["BS"],
        mean=mean,
        std=std,
        minimum=minimum,
        # BERT's "epochs" are training samples (rules, "Epoch reporting").
        runs=tuple(record["Epochs to converge"]),
        interpolated_from=between,
    )


@functools.cache
def pruned(ruleset: str = DEFAULT_RULESET) -> tuple[Rcp, ...]:
    """The points that submissions are tested against, by batch size. Raises ReviewError."""
    return tuple(map(_point, _checker(ruleset).pruned_rcp_data.values()))


@functools.cache
def _between(batch_size: int, low: int, high: int, ruleset: str) -> Rcp:
    checker = _checker(ruleset)
    ends = (checker._find_rcp(size, "pruned_rcps") for size in (low, high))
    return _point(checker._create_interp_rcp(batch_size, *ends)[1], (low, high))


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
        ends = (point.batch_size for point in around)
        return _between(int(batch_size), *ends, ruleset), "RCP Interpolation"
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
