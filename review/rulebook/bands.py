"""The accuracy that published runs had on their way to the target: a band of samples by batch size.

published_curves.json has, for each batch size of which ten runs were published, the smallest and the largest accuracy
of those runs after so many training samples, as long as all of them still trained: later on, only the slow ones do.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from review.logs.findings import ReviewError

TABLE = Path(__file__).with_name("published_curves.json")


@dataclass(frozen=True)
class Band:
    """The runs of one batch size. points: (samples, smallest accuracy, largest accuracy), ascending."""

    batch_size: int
    runs: int
    source: str
    points: tuple[tuple[float, float, float], ...]

    def at(self, samples: float) -> tuple[float, float] | None:
        """Smallest and largest accuracy after ``samples``, on the line between the points; None outside of them.

        An evaluation comes at the first whole step after its point, so one point more than a step away is as good.
        """
        first, last = self.points[0][0], self.points[-1][0]
        if samples < first - self.batch_size or samples > last + self.batch_size:
            return None
        samples = min(max(samples, first), last)
        for (left, *low), (right, *high) in zip(self.points, self.points[1:], strict=False):
            if left <= samples <= right:
                share = (samples - left) / (right - left)
                return low[0] + share * (high[0] - low[0]), low[1] + share * (high[1] - low[1])
        return self.points[0][1:]


@functools.cache
def published() -> tuple[Band, ...]:
    """The bands of all batch sizes that were published, ascending."""
    return tuple(sorted((_band(entry) for entry in _read(TABLE)["bands"]), key=lambda band: band.batch_size))


def find(batch_size: float | None) -> Band | None:
    """The band of a batch size; None where no ten runs of it were published."""
    return next((band for band in published() if band.batch_size == batch_size), None)


def read(path: Path) -> Band:
    """The first band of a file of the same form as published_curves.json. Raises ReviewError."""
    try:
        return _band(_read(path)["bands"][0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ReviewError(
            f"{path}: no band of accuracies ({type(error).__name__}: {error}); see {TABLE.name}"
        ) from None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReviewError(f"{path}: {error.strerror}") from None


def _band(entry: Any) -> Band:
    points = tuple(sorted((float(samples), float(low), float(high)) for samples, low, high in entry["points"]))
    if not points:
        raise ValueError("points is empty")
    return Band(int(entry["batch_size"]), int(entry["runs"]), str(entry["source"]), points)
