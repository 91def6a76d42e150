"""The accuracy that published runs had on their way to the target: a band of samples by batch size.

published_curves.json has, for each batch size and recipe of which ten runs or more were published, the smallest and the
largest accuracy of those runs after so many training samples, and the results that they are of.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from review.logs.output import ReviewError

_LEAST_RUNS = 10
_ROUNDING = 3e-4  # accuracy
TABLE = Path(__file__).with_name("published_curves.json")


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

    ``recipe``: the hyper-parameters that they share. ``results``: round/submitter/system of each.
    """

    batch_size: int
    runs: int
    source: str
    points: tuple[tuple[float, float, float], ...]
    recipe: dict[str, float] = field(default_factory=dict)
    results: tuple[str, ...] = ()

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
    except OSError as error:
        raise ReviewError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ReviewError(
            f"{path}: no band of accuracies ({type(error).__name__}: {error}); see {TABLE.name}"
        ) from None


def _bands(path: Path) -> Iterator[Band]:
    entries = json.loads(path.read_text(encoding="utf-8"))["bands"]
    if not entries:
        raise ValueError("bands is empty")
    for entry in entries:
        points = tuple(sorted((float(samples), float(low), float(high)) for samples, low, high in entry["points"]))
        if not points:
            raise ValueError("points is empty")
        recipe = {str(key): float(value) for key, value in entry.get("recipe", {}).items()}
        results = tuple(map(str, entry.get("results", ())))
        yield Band(int(entry["batch_size"]), int(entry["runs"]), str(entry["source"]), points, recipe, results)
