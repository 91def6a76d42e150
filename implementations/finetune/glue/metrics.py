"""Metrics of GLUE. Each takes the ids of the predicted and of the true labels, int (N,), and gives a number."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]
Metric = Callable[[Labels, Labels], float]


def accuracy(predicted: Labels, true: Labels) -> float:
    """Share of right labels."""
    return float((predicted == true).mean())


def f1(predicted: Labels, true: Labels) -> float:
    """Harmonic mean of precision and recall of label 1; 0 where it neither occurs nor is predicted."""
    hits = int(((predicted == 1) & (true == 1)).sum())
    either = int((predicted == 1).sum() + (true == 1).sum())
    return 2 * hits / either if either else 0.0


def accuracy_and_f1(predicted: Labels, true: Labels) -> float:
    """The mean of both."""
    return (accuracy(predicted, true) + f1(predicted, true)) / 2


def matthews(predicted: Labels, true: Labels) -> float:
    """Matthews' correlation of two labels, -1 to 1; 0 where all predictions or all labels are the same."""
    counts = np.zeros((2, 2))
    np.add.at(counts, (true, predicted), 1)
    (tn, fp), (fn, tp) = counts.tolist()
    spread = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(spread) if spread else 0.0
