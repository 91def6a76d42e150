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

    excess: by how much, as a share of their median; measure: what says so, in words, such as "9 deviations" (of a
    healthy one); chance: expected number of such findings in a whole test of healthy machines, so that 0.001 is one in
    1,000 tests.
    """

    name: str
    excess: float
    measure: str
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
    variance of Smyth 2004); and how well one repeats, from its own rounds or those of all, whichever is worse. The
    limit is Student's quantile, as both are uncertain, with the degrees of freedom that the sum of the two has (Welch
    and Satterthwaite): the rounds of all tell well how much a round is off, few ranks tell badly how much they differ.
    """
    from scipy.stats import t  # slow to import, and only needed here

    if len(values) < LEAST:
        return []
    table, level = relative(values, paired)
    if table.shape[1] < LEAST_ROUNDS:
        return []
    rounds = np.maximum(np.sum(~np.isnan(table), axis=1), 1)
    common, common_freedom = _common_noise(table - level[:, None])
    own = _deviation(table, level[:, None], axis=1)
    freedom = PRIOR_FREEDOM + len(values) // 2 - 1
    between = (PRIOR_FREEDOM * spread**2 + (freedom - PRIOR_FREEDOM) * _deviation(level, 1.0, axis=0) ** 2) / freedom
    found = []
    for name, value, deviation, count in zip(values, level, own, rounds.tolist(), strict=True):
        of_rounds = common_freedom if deviation <= common else max(count - 1, 1)
        error = (max(deviation, common) * _OF_MEDIAN) ** 2 / count
        deviations = float((value - 1) / math.sqrt(between + error))
        sum_freedom = (between + error) ** 2 / (between**2 / freedom + error**2 / of_rounds)
        chance = float(t.sf(deviations, sum_freedom)) * comparisons
        if chance < FALSE_ALARMS and value - 1 > least_excess:
            found.append(Outlier(name, float(value - 1), f"{deviations:.0f} deviations", chance))
    return sorted(found, key=lambda one: -one.excess)


def relative(values: Mapping[str, Sequence[float]], paired: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Each round [names, rounds], and the median over rounds [names], over the median of all names."""
    table = np.array([list(rounds) for rounds in values.values()], np.float64)
    if paired:
        table = table / np.nanmedian(table, axis=0)
    level = np.nanmedian(table, axis=1)
    return table / np.median(level), level / np.median(level)


def hesitating(lost: Mapping[str, Sequence[float]], comparisons: int, *, least: float) -> list[Outlier]:
    """Those that lose time in more rounds than the others do, the worst first.

    lost: share of each round's time, nan where one took no part; it counts by how much it is above the round's median.
    Pauses are rare and of any length, so that nothing is assumed of how they are distributed: where all are alike, the
    rounds that lost more than ``least`` are anybody's, and how many are one's own is hypergeometric (Fisher's exact
    test). One long pause is no more than one round.
    """
    from scipy.stats import hypergeom  # slow to import, and only needed here

    if len(lost) < LEAST:
        return []
    table = np.array([list(rounds) for rounds in lost.values()], np.float64)
    table = table - np.nanmedian(table, axis=0)
    rounds, hit = np.sum(~np.isnan(table), axis=1), np.sum(table > least, axis=1)
    chances = hypergeom.sf(hit - 1, rounds.sum(), hit.sum(), rounds) * comparisons
    found = [
        Outlier(name, excess, f"in {own} of {count} rounds", chance)
        for name, excess, own, count, chance in zip(
            lost, np.nanmean(table, axis=1).tolist(), hit.tolist(), rounds.tolist(), chances.tolist(), strict=True
        )
        if chance < FALSE_ALARMS and excess > least
    ]
    return sorted(found, key=lambda one: -one.excess)


def _common_noise(table: np.ndarray) -> tuple[float, float]:
    """The standard deviation of a round of any of them, outliers cut off, and its degrees of freedom."""
    limit = 3 * _TO_DEVIATION * float(np.nanmedian(np.abs(table)))
    known = np.clip(table[~np.isnan(table)], -limit, limit)
    freedom = max(len(known) - len(table), 1)
    return math.sqrt(float(np.sum(known**2)) / freedom), freedom


def _deviation(table: np.ndarray, center: np.ndarray | float, axis: int) -> np.ndarray:
    return _TO_DEVIATION * np.nanmedian(np.abs(table - center), axis=axis)
