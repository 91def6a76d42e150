"""The accuracy that published runs had on their way to the target, and whether a run lies among them.

published_curves.json has, for each batch size and recipe of which ten runs or more were published, the smallest and the
largest accuracy of those runs after so many training samples, and the results that they are of.

Few runs span less than all that are as good: of two sound runs in eleven, one lies outside of the other ten. So an
accuracy counts as wrong only where it lies outside by more than the band's room (at least 0.002).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from review.logs.mllog import number, read_log
from review.logs.output import ReviewError, pick
from review.logs.tree import read_object
from review.results.run import Evaluation, Run
from review.rulebook import rules
from review.rulebook.compliance import DEFAULT_RULESET

_LEAST_RUNS = 10
LEAST_ROOM = 0.002  # of a rehearsal
INITIAL_ACCURACY = 0.340  # of the checkpoint that closed runs start from
INITIAL_TOLERANCE = 0.002
_ROUNDING = 3e-4  # accuracy
_LATE = 1_400_000  # samples from which runs differ by little, and precision shows
TABLE = Path(rules.__file__).with_name("published_curves.json")


@dataclass(frozen=True)
class Point:
    """An accuracy after so many samples, and what the runs of a band had there."""

    samples: float
    accuracy: float
    low: float
    high: float
    room: float  # how far outside of the band a sound run may lie

    @property
    def verdict(self) -> str:
        """as published, near, low or high."""
        if self.low <= self.accuracy <= self.high:
            return "as published"
        if self.low - self.room <= self.accuracy <= self.high + self.room:
            return "near"
        return "low" if self.accuracy < self.low else "high"

    @property
    def sound(self) -> bool:
        """Whether a sound run may have it."""
        return self.verdict in ("as published", "near")


@dataclass(frozen=True)
class Band:
    """The runs of one batch size. points: (samples, smallest accuracy, largest accuracy), ascending.

    ``recipe``: the hyper-parameters that they share.
    """

    batch_size: int
    runs: int
    source: str
    points: tuple[tuple[float, float, float], ...]
    recipe: dict[str, float] = field(default_factory=dict)

    def at(self, samples: float) -> tuple[float, float] | None:
        """Smallest and largest accuracy after ``samples``, on the line between the points; None outside of them.

        An evaluation comes at the first whole step after its point, so one point more than a step away is as good.
        """
        known, low, high = zip(*self.points, strict=True)
        if not known[0] - self.batch_size <= samples <= known[-1] + self.batch_size:
            return None
        return float(np.interp(samples, known, low)), float(np.interp(samples, known, high))

    def hold(self, samples: float, accuracy: float, least_room: float = 0.0) -> Point | None:
        """An accuracy beside the band; None outside of its points.

        Of few runs, a new one is easily the lowest or the highest: the room is a share of the band, and at least
        ``least_room``.
        """
        bounds = self.at(samples)
        if bounds is None:
            return None
        low, high = bounds
        room = (high - low) * min(1.0, _LEAST_RUNS / self.runs) + _ROUNDING
        return Point(samples, accuracy, low, high, max(room, least_room))


@functools.cache
def published() -> tuple[Band, ...]:
    """The bands of all batch sizes that were published, ascending; of one size that of the most runs first."""
    return tuple(sorted(_bands(TABLE), key=lambda band: (band.batch_size, -band.runs)))


def read(path: Path) -> Band:
    """The first band of a file of the same form as published_curves.json. Raises ReviewError."""
    try:
        return next(_bands(path))
    except (KeyError, TypeError, ValueError) as error:
        said = f"no band of accuracies ({type(error).__name__}: {error}); see {TABLE.name}"
        raise ReviewError(f"{path}: {said}") from None


def _bands(path: Path) -> Iterator[Band]:
    entries = read_object(path)["bands"]
    if not entries:
        raise ValueError("bands is empty")
    for entry in entries:
        points = tuple(sorted((float(samples), float(low), float(high)) for samples, low, high in entry["points"]))
        if not points:
            raise ValueError("points is empty")
        recipe = {str(key): float(value) for key, value in entry.get("recipe", {}).items()}
        yield Band(int(entry["batch_size"]), int(entry["runs"]), str(entry["source"]), points, recipe)


@dataclass(frozen=True, slots=True)
class Miss:
    """An evaluation outside the published runs. ``causes``: likely ones, the likeliest first."""

    evaluation: Evaluation
    low: float
    high: float
    runs: int
    same_recipe: bool
    causes: tuple[str, ...]

    def describe(self) -> str:
        """In one line."""
        at = f"{self.evaluation.accuracy:.4f} at {self.evaluation.samples:,.0f} samples"
        return f"outside the published runs: {at}, of {self.runs} runs {self.low:.4f} to {self.high:.4f}"


def recipe(run: Run) -> dict[str, float]:
    """The logged hyper-parameters that decide how the accuracy rises, 0 for one that is missing."""
    return {key: number(run.log.value(key)) or 0.0 for key in rules.table("recipe")}


def band_of(run: Run) -> Band | None:
    """The published runs of its batch size and recipe where ten are, else the recipe that most of that size have."""
    found = [band for band in published() if band.batch_size == run.batch_size]
    own = recipe(run)
    return next((band for band in found if band.recipe == own), found[0] if found else None)


def first_miss(run: Run) -> Miss | None:
    """The first evaluation outside the published runs of its batch size; None where there is none, or no band.

    Left out in turn, one result of batch 768 after the other, 5 of 488 published runs lie outside the others' bounds.
    """
    band = band_of(run)
    if band is None or not run.counts_samples:
        return None
    for one in run.evaluations:
        samples = one.samples or 0
        near = any(abs(samples - point) <= max(2 * band.batch_size, 0.01 * point) for point, _, _ in band.points)
        held = band.hold(samples, one.accuracy) if samples and near else None
        if held is not None and not held.sound:
            causes = likely_causes(samples, held.verdict == "high", band, run)
            low, high = held.low - held.room, held.high + held.room
            return Miss(one, low, high, band.runs, band.recipe == recipe(run), causes)
    return None


def likely_causes(samples: float, high: bool, band: Band, run: Run, sound_start: bool = False) -> tuple[str, ...]:
    """Why an accuracy may lie outside of a band after so many samples, the likeliest cause first.

    Args: high: above it; sound_start: the accuracy before the first step is known to be the checkpoint's.
    """
    own = recipe(run)
    differing = [
        f"{key} is {own[key]:g}, published {value:g}" for key, value in band.recipe.items() if own[key] != value
    ]
    if high:
        others = ["another evaluation set, or one that is part of the training data", "a larger batch than is logged"]
    elif samples >= _LATE:
        others = ["LayerNorm and biases in bf16: keep them in fp32", "evaluation logits in low precision", "data order"]
    else:
        others = [
            *([] if sound_start else ["another checkpoint or evaluation set: REHEARSAL=1 has 0.340 before step 1"]),
            "the wrong form of GELU, or no dropout",
            "gradients that are not reduced over all ranks, or clipped twice",
            "training data of another vocabulary or preparation: launch/doctor.sh verify",
        ]
    return (*differing, *others)


@dataclass(frozen=True)
class Rehearsal:
    """The evaluations of the start of a run that a band covers."""

    run: Run
    band: Band
    points: tuple[Point, ...]

    def causes(self) -> Iterator[str]:
        """What is most likely wrong, the first cause first; nothing where all is as published."""
        start = next((point for point in self.points if point.samples == 0), None)
        later = [point for point in self.points if point.samples]
        wrong = [point for point in later if not point.sound]
        if start is None:
            yield "there is no evaluation before the first step: it was no rehearsal (REHEARSAL=1 evaluates there)"
        elif not start.sound:
            yield (
                f"before the first step the accuracy is {start.accuracy:.4f}, and the checkpoint has {start.low:.3f} "
                f"to {start.high:.3f}: other weights (md5 of model.ckpt-28252), another evaluation set or vocabulary "
                "(./verify_dataset.sh), or GELU's form"
            )
        elif wrong and abs(later[-1].accuracy - start.accuracy) < LEAST_ROOM:
            yield "the accuracy stays at the checkpoint's: no step is taken (learning rate, loss scale), or noisy data"
        elif wrong:
            high = wrong[0].verdict == "high"
            yield from likely_causes(wrong[0].samples, high, self.band, self.run, sound_start=True)
            if not high:
                settings = "FUSED=none, ATTENTION=sdpa_loop, PRECISION=fp32"
                yield f"a fused kernel, attention or number format: {settings} in turn"
        if not later and not self.points[-1].samples:
            yield "there is no evaluation after the first step: the run ended too early"

    @property
    def go(self) -> bool:
        """Whether the ten runs may start."""
        return not any(self.causes())

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        points = [pick(point, "samples accuracy low high verdict") for point in self.points]
        return {"go": self.go, "file": self.run.path, "points": points, "causes": list(self.causes())}


def rehearsal(target: Path, band: Path | None = None, ruleset: str = DEFAULT_RULESET) -> Rehearsal:
    """Holds the newest log of a run's folder, or a log, to the published runs of its batch size, or to ``band``.

    A band of one's own begins with the point of sample 0, where the checkpoint of the benchmark has 0.340. Raises
    ReviewError where there is no log, no band of its batch size, or no evaluation that the band covers.
    """
    logs = [target] if target.is_file() else sorted(target.glob("result_*.txt"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise ReviewError(f"{target}: no result_*.txt: did the rehearsal run to its end?")
    run = Run(read_log(logs[-1]), ruleset)
    found = read(band) if band else band_of(run)
    if found is None:
        known = ", ".join(dict.fromkeys(f"{one.batch_size:,}" for one in published()))
        raise ReviewError(
            f"{run.path}: no ten runs of batch size {run.batch_size or 'unknown'} were published to compare with, only "
            f"of {known}: rehearse a config of one of these, or give a band of your own with --band"
        )
    points = []
    for one in (one for one in run.evaluations if one.samples is not None):
        if one.samples == 0 and band is None:
            low, high = INITIAL_ACCURACY - INITIAL_TOLERANCE, INITIAL_ACCURACY + INITIAL_TOLERANCE
            points.append(Point(0, one.accuracy, low, high, 0.0))
        elif held := found.hold(one.samples or 0, one.accuracy, LEAST_ROOM):
            points.append(held if held.samples else replace(held, room=0.0))
    if not points:
        raise ReviewError(f"{run.path}: no evaluation of it lies where published runs have one")
    return Rehearsal(run, found, tuple(points))


def print_rehearsal(found: Rehearsal) -> None:
    """The points, and go or the likely causes."""
    band = found.band
    print(f"{found.run.path}\nheld to {band.runs} runs of batch size {band.batch_size:,}: {band.source}")
    print(f"{'samples':>12} {'accuracy':>10} {'published':>18}")
    for point in found.points:
        span = f"{point.low:.4f} to {point.high:.4f}"
        print(f"{point.samples:>12,.0f} {point.accuracy:>10.4f} {span:>18}  {point.verdict}")
    for place, cause in enumerate(found.causes(), 1):
        print(f"{place}. {cause}")
    print("GO: the run starts as the published ones" if found.go else "NO GO: outside the published runs; see above")
