"""Compares the accuracy curve of a run with those of published runs.

published_curves.json has, for each batch size and recipe with at least ten published runs, the
smallest and the largest accuracy of those runs by training samples, and the results they belong to.

A range of few runs is narrower than that of all sound runs: of eleven sound runs, two lie outside
the range of the other ten. So an accuracy counts as wrong only if it is outside the range by more
than a margin.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from review.logs.mllog import number, read_log
from review.logs.output import ReviewError, pick
from review.logs.tree import read_object
from review.results.run import Evaluation, Run, run_of
from review.rulebook import rules

_LEAST_RUNS = 10
LEAST_MARGIN = 0.002  # accuracy, in a rehearsal
INITIAL_ACCURACY = 0.340  # of the checkpoint that closed runs start from
INITIAL_TOLERANCE = 0.002
_ROUNDING = 3e-4  # accuracy
_LATE = 1_400_000  # samples, after which runs differ little and low precision shows
TABLE = Path(rules.__file__).with_name("published_curves.json")


@dataclass(frozen=True)
class Point:
    """An accuracy after some samples, and the range of a band there."""

    samples: float
    accuracy: float
    low: float
    high: float
    margin: float  # by which a sound run may be outside the range

    @property
    def verdict(self) -> str:
        """as published, near, low or high."""
        if self.low <= self.accuracy <= self.high:
            return "as published"
        if self.low - self.margin <= self.accuracy <= self.high + self.margin:
            return "near"
        return "low" if self.accuracy < self.low else "high"

    @property
    def within_range(self) -> bool:
        return self.verdict in ("as published", "near")


@dataclass(frozen=True)
class CurveRange:
    """Accuracy range of the published runs of one batch size and ``recipe`` (hyper-parameters).

    ``points``: (samples, smallest accuracy, largest accuracy), ascending.
    """

    batch_size: int
    runs: int
    source: str
    points: tuple[tuple[float, float, float], ...]
    recipe: dict[str, float]

    def compare(
        self, samples: float, accuracy: float, least_margin: float = 0.0
    ) -> Point | None:
        """Compares an accuracy with the band, linear between its points; None beyond its points.

        An evaluation comes at the first whole step after its point, hence the tolerance of a step
        at both ends. The fewer runs a band has, the more easily a new one is outside: the margin is
        a share of the band's width.
        """
        known, lows, highs = zip(*self.points, strict=True)
        if not known[0] - self.batch_size <= samples <= known[-1] + self.batch_size:
            return None
        low = float(np.interp(samples, known, lows))
        high = float(np.interp(samples, known, highs))
        # Of n runs the next lies outside their range with chance 2 / (n + 1).
        margin = (high - low) * min(1.0, _LEAST_RUNS / self.runs) + _ROUNDING
        return Point(samples, accuracy, low, high, max(margin, least_margin))


@functools.cache
def published() -> tuple[CurveRange, ...]:
    """All published bands, by batch size; within a size the one with the most runs first."""
    ranges = []
    for entry in read_object(TABLE)["bands"]:
        points = tuple(sorted(map(tuple, entry["points"])))
        size = entry["batch_size"]
        runs = entry["runs"]
        source = entry["source"]
        ranges.append(CurveRange(size, runs, source, points, entry["recipe"]))
    return tuple(sorted(ranges, key=lambda band: (band.batch_size, -band.runs)))


@dataclass(frozen=True, slots=True)
class Deviation:
    """An evaluation outside the published runs. ``causes``: most likely first."""

    evaluation: Evaluation
    low: float
    high: float
    runs: int
    same_recipe: bool
    causes: tuple[str, ...]

    def describe(self) -> str:
        at = f"{self.evaluation.accuracy:.4f} at {self.evaluation.samples:,.0f} samples"
        band = f"of {self.runs} runs {self.low:.4f} to {self.high:.4f}"
        return f"outside the published runs: {at}, {band}"


def recipe(run: Run) -> dict[str, float]:
    """Logged hyper-parameters that shape the accuracy curve; 0 if missing."""
    return {key: number(run.log.value(key)) or 0.0 for key in rules.table("recipe")}


def range_of(run: Run) -> CurveRange | None:
    """The range of the run's batch size and recipe, else the one of most runs of its batch size,
    else None.
    """
    ranges = [band for band in published() if band.batch_size == run.batch_size]
    settings = recipe(run)
    same = [band for band in ranges if band.recipe == settings]
    # published() has the band of most runs first.
    return next(iter([*same, *ranges]), None)


def first_deviation(run: Run) -> Deviation | None:
    """The first evaluation outside the band of its batch size; None if there is none, or no band.

    Leaving out one result of batch 768 at a time, 5 of 488 published runs are outside the band of
    the others.
    """
    band = range_of(run)
    if band is None or not run.counts_samples:
        return None
    for evaluation in run.evaluations:
        samples = evaluation.samples or 0
        # Between points a curve is not straight, so accuracies are judged near a point only.
        near = any(
            abs(samples - point) <= max(2 * band.batch_size, 0.01 * point)
            for point, _, _ in band.points
        )
        point = band.compare(samples, evaluation.accuracy) if samples and near else None
        if point is not None and not point.within_range:
            causes = likely_causes(samples, point.verdict == "high", band, run)
            low = point.low - point.margin
            high = point.high + point.margin
            return Deviation(
                evaluation, low, high, band.runs, band.recipe == recipe(run), causes
            )
    return None


def likely_causes(
    samples: float, high: bool, band: CurveRange, run: Run, sound_start: bool = False
) -> tuple[str, ...]:
    """Why an accuracy may be outside a band after some samples, most likely cause first.

    Args: high: it is above the band. sound_start: the accuracy before the first step was the
    checkpoint's.
    """
    settings = recipe(run)
    differing = []
    for key, value in band.recipe.items():
        if settings[key] != value:
            differing.append(f"{key} is {settings[key]:g}, published {value:g}")
    if high:
        others = [
            "another evaluation set, or one that is part of the training data",
            "a larger batch than logged",
        ]
    elif samples >= _LATE:
        others = [
            "LayerNorm and biases in bf16: keep them in fp32",
            "evaluation logits in low precision",
            "data order",
        ]
    else:
        others = [
            *(
                []
                if sound_start
                else [
                    "another checkpoint or evaluation set: REHEARSAL=1 has 0.340 before step 1"
                ]
            ),
            "the wrong form of GELU, or no dropout",
            "gradients not reduced over all ranks, or clipped twice",
            "training data of another vocabulary or preparation: launch/doctor.sh verify",
        ]
    return (*differing, *others)


@dataclass(frozen=True)
class Rehearsal:
    """The first evaluations of a run, compared with a band."""

    run: Run
    band: CurveRange
    points: tuple[Point, ...]

    def causes(self) -> Iterator[str]:
        """Likely causes of a deviation, most likely first; none if all is as published."""
        start = next((point for point in self.points if point.samples == 0), None)
        later = [point for point in self.points if point.samples]
        wrong = [point for point in later if not point.within_range]
        if start is None:
            why = "not a rehearsal (REHEARSAL=1 evaluates there)"
            yield f"no evaluation before the first step: {why}"
        elif not start.within_range:
            yield (
                f"the accuracy before the first step is {start.accuracy:.4f}, but the checkpoint "
                f"has {start.low:.3f} to {start.high:.3f}: other weights (md5 of model.ckpt-28252), "
                "another evaluation set or vocabulary (./verify_dataset.sh), or another form of GELU"
            )
        # A flat curve is told apart first: its causes are not those of a curve that rises wrongly.
        elif wrong and abs(later[-1].accuracy - start.accuracy) < LEAST_MARGIN:
            why = "no step is taken (learning rate, loss scale), or bad data"
            yield f"the accuracy stays at the checkpoint's: {why}"
        elif wrong:
            high = wrong[0].verdict == "high"
            yield from likely_causes(
                wrong[0].samples, high, self.band, self.run, sound_start=True
            )
            # Wrong arithmetic makes a model worse; it does not
            # explain an accuracy that is too high.
            if not high:
                settings = "FUSED=none, ATTENTION=sdpa_loop, PRECISION=fp32"
                yield f"a fused kernel, attention or number format: try {settings} in turn"
        if not later and not self.points[-1].samples:
            yield "no evaluation after the first step: the run ended too early"

    @property
    def go(self) -> bool:
        """Whether the ten runs may start."""
        return not any(self.causes())

    def as_dict(self) -> dict[str, Any]:
        points = [
            pick(point, "samples accuracy low high verdict") for point in self.points
        ]
        return {
            "go": self.go,
            "file": self.run.path,
            "points": points,
            "causes": list(self.causes()),
        }


def rehearsal(target: Path) -> Rehearsal:
    """Compares a log, or the newest one in a folder, with the published runs of its batch size.

    Raises ReviewError if there is no log, no band of its batch size, or no evaluation that the band
    covers.
    """
    logs = [target] if target.is_file() else list(target.glob("result_*.txt"))
    if not logs:
        raise ReviewError(f"{target}: no result_*.txt: did the rehearsal finish?")
    # The newest: a folder may hold the rehearsals of several days.
    run = run_of(read_log(max(logs, key=lambda path: path.stat().st_mtime)))
    band = range_of(run)
    if band is None:
        known = ", ".join(
            dict.fromkeys(f"{curve.batch_size:,}" for curve in published())
        )
        size = run.batch_size or "unknown"
        why = f"fewer than ten published runs have batch size {size}"
        raise ReviewError(f"{run.path}: {why}: rehearse a config with one of {known}")
    points = []
    for evaluation in run.evaluations:
        if evaluation.samples is None:
            continue
        # Bands begin at the first evaluation; before it the checkpoint's accuracy is known.
        if evaluation.samples == 0:
            low = INITIAL_ACCURACY - INITIAL_TOLERANCE
            high = INITIAL_ACCURACY + INITIAL_TOLERANCE
            points.append(Point(0, evaluation.accuracy, low, high, 0.0))
        elif point := band.compare(
            evaluation.samples, evaluation.accuracy, LEAST_MARGIN
        ):
            points.append(point)
    if not points:
        raise ReviewError(
            f"{run.path}: none of its evaluations is at a sample count that published runs cover"
        )
    return Rehearsal(run, band, tuple(points))


def print_rehearsal(rehearsal: Rehearsal) -> None:
    band = rehearsal.band
    print(rehearsal.run.path)
    print(
        f"compared with {band.runs} runs of batch size {band.batch_size:,}: {band.source}"
    )
    print(f"{'samples':>12} {'accuracy':>10} {'published':>18}")
    for point in rehearsal.points:
        span = f"{point.low:.4f} to {point.high:.4f}"
        print(
            f"{point.samples:>12,.0f} {point.accuracy:>10.4f} {span:>18}  {point.verdict}"
        )
    for rank, cause in enumerate(rehearsal.causes(), 1):
        print(f"{rank}. {cause}")
    print(
        "GO: the run starts like the published ones"
        if rehearsal.go
        else "NO GO: outside the published runs; see above"
    )
