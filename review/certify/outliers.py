"""Who stands out among those that did the same work, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 4  # of fewer, nobody can say which is the odd one
LEAST_ROUNDS = 3  # of fewer, nobody can say how well one repeats
FALSE_ALARMS = 0.01  # of whole tests of healthy machines, however many comparisons they make
HEALTHY_SPREAD = 0.01  # standard deviation between healthy GPUs, as a share, where few are there to show it
PRIOR_FREEDOM = 6  # degrees of freedom that this knowledge counts for
_TO_DEVIATION = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
_OF_MEDIAN = 1.2533  # standard error of a median over that of a mean


@dataclass(frozen=True)
class Outlier:
    """One that is far above the others.

    excess: by how much, as a share of their median; deviations: how many standard deviations of a healthy one;
    chance: expected number of such findings in a whole test of healthy machines, so that 0.001 is one in 1,000 tests.
    """

    name: str
    excess: float
    deviations: float
    chance: float


def slow(
    values: Mapping[str, Sequence[float]],
    comparisons: int,
    *,
    least_excess: float,
    spread: float = HEALTHY_SPREAD,
    paired: bool = True,
) -> list[Outlier]:
    """Those whose value is far above the others', the farthest first; none where there are too few to compare.

    values: of each, by round, nan where it took no part. paired: the rounds ran at the same time, so that what
    disturbed all of them cancels. comparisons: how many the whole test makes, this one's included (Bonferroni).

    The center is the median over all. What a healthy one deviates by has two parts: the spread between them, from the
    median absolute deviation and, as a variance with PRIOR_FREEDOM degrees of freedom, from ``spread`` (the moderated
    variance of Smyth 2004); and how well one repeats, from its own rounds or those of the typical one, whichever is
    worse. The limit is Student's quantile, as both are uncertain.
    """
    from scipy.stats import t  # slow to import, and only needed here

    if len(values) < LEAST:
        return []
    table = np.array([list(rounds) for rounds in values.values()], np.float64)
    if table.shape[1] < LEAST_ROUNDS:
        return []
    if paired:
        table = table / np.nanmedian(table, axis=0)
    level = np.nanmedian(table, axis=1)
    level, table = level / np.median(level), table / np.median(level)
    rounds = np.maximum(np.sum(~np.isnan(table), axis=1), 1)
    own = _deviation(table, level[:, None], axis=1) * _OF_MEDIAN / np.sqrt(rounds)
    noise = np.maximum(own, np.median(own))
    freedom = len(values) // 2 - 1
    between = (PRIOR_FREEDOM * spread**2 + freedom * _deviation(level, 1.0, axis=0) ** 2) / (PRIOR_FREEDOM + freedom)
    found = []
    for name, value, error in zip(values, level, noise, strict=True):
        deviations = float((value - 1) / math.sqrt(between + error**2))
        chance = float(t.sf(deviations, PRIOR_FREEDOM + freedom)) * comparisons
        if chance < FALSE_ALARMS and value - 1 > least_excess:
            found.append(Outlier(name, float(value - 1), deviations, chance))
    return sorted(found, key=lambda one: -one.excess)


def _deviation(table: np.ndarray, center: np.ndarray | float, axis: int) -> np.ndarray:
    return _TO_DEVIATION * np.nanmedian(np.abs(table - center), axis=axis)
