"""A chart for terminals: the accuracy of runs on its way to the target."""

from __future__ import annotations

from collections.abc import Sequence

from review.results.run import Evaluation

MARKS = "•x+o*#@%&$"  # of the first ten runs; of more, from the first again
_ABOVE = 0.02  # share of the accuracies' range that is left above the target


def accuracy_chart(
    series: Sequence[Sequence[Evaluation]], target: float, width: int, height: int, samples: float | None = None
) -> list[str]:
    """Lines of text, ``width`` x ``height``: accuracy over samples with a line at the target; none without two points.

    Args: series: the evaluations of each run. samples: where the x axis is to end at least, such as a projection.
    """
    points = [[(e.samples, e.accuracy) for e in run if e.samples is not None] for run in series]
    known = [point for run in points for point in run]
    if len(known) < 2:
        return []
    left = len(f"{target:.3f}") + 2
    columns, rows = max(width - left, 10), max(height - 2, 4)
    right = max([samples or 0.0, *(x for x, _ in known)])
    low = min(min(y for _, y in known), target)
    high = max(max(y for _, y in known), target)
    high += max(_ABOVE * (high - low), 1e-6)
    grid = [[" "] * columns for _ in range(rows)]
    goal = _row(target, low, high, rows)
    grid[goal] = ["-"] * columns
    for index, run in enumerate(points):
        for x, y in run:
            grid[_row(y, low, high, rows)][min(columns - 1, int(x / right * columns))] = MARKS[index % len(MARKS)]
    labels = {goal: f"{target:.3f}", rows - 1: f"{low:.3f}"}
    lines = [f"{labels.get(row, ''):>{left - 2}} |{''.join(cells)}" for row, cells in enumerate(grid)]
    end = f"{right:,.0f} samples"
    return [*lines, " " * (left - 1) + "+" + "-" * columns, " " * left + "0" + f"{end:>{columns - 1}}"]


def _row(accuracy: float, low: float, high: float, rows: int) -> int:
    return min(rows - 1, max(0, int((high - accuracy) / (high - low) * rows)))
