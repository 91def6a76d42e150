"""Who is slow: robust outliers among ranks that did the same work, with the number of comparisons counted in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_RANKS = 4  # of fewer, nobody can say which is the odd one
LEAST_EXCESS = 0.03  # what is less slow than that concerns nobody
LEAST_SCALE = 0.005  # of the median: identical times must not make an outlier of the smallest difference
FALSE_ALARMS = 0.01  # of a stage, however many ranks it has


@dataclass(frozen=True)
class Outlier:
    """One that is slow. excess: by how much of the others' median; deviations: how many robust standard deviations."""

    name: str
    excess: float
    deviations: float


def slow(values: Mapping[str, float]) -> list[Outlier]:
    """Those whose value is far above the others', slowest first; none where there are too few to compare.

    The center is the median, the scale the median absolute deviation times 1.4826 (that of a normal distribution). The
    limit is Student's quantile for as many comparisons as there are names (Bonferroni): the spread is uncertain, too.
    """
    if len(values) < LEAST_RANKS:
        return []
    center = statistics.median(values.values())
    spread = 1.4826 * statistics.median(abs(value - center) for value in values.values())
    scale = max(spread, LEAST_SCALE * center)
    limit = _limit(len(values))
    found = [Outlier(name, value / center - 1, (value - center) / scale) for name, value in values.items()]
    return sorted(
        (one for one in found if one.deviations > limit and one.excess > LEAST_EXCESS), key=lambda one: -one.excess
    )


def _limit(count: int) -> float:
    from scipy.stats import t  # slow to import, and only needed here

    return float(t.ppf(1 - FALSE_ALARMS / count, max(count // 2 - 1, 1)))


def typical(seconds: Sequence[float]) -> float:
    """A rank's time of a step, whatever single steps were disturbed by."""
    return statistics.median(seconds)


def hesitation(seconds: Sequence[float]) -> float:
    """Mean over median: above one where a rank stops now and then."""
    return statistics.fmean(seconds) / statistics.median(seconds)
