"""Statistics: who stands out among those that did the same work, and how sure that is.

Model. Ranks, nodes or links i = 1..n do equal work in rounds j = 1..m_i. Relative to the median
over all, round j of a healthy i takes

    y_ij = 1 + b_i + e_ij

What varies: b_i is how a healthy i differs for good (silicon, cooling, place in the network), with
variance B; e_ij is the noise of a round, with variance s_i^2 and autocorrelation r^k at lag k.

What is estimated, one function each:

    L_i = median over j of y_ij                                          relative
    B   = (d0 b0^2 + d1 b^2) / (d0 + d1), b0 a prior, b that of the L_i  variance_between
    s_i = that of i's rounds or of all rounds, whichever is worse        RoundNoise
    E_i = variance of L_i by the noise of i's rounds                     RoundNoise.of_median
    r   = from products of neighbouring rounds, corrected for few        autocorrelation

What is tested, against what healthy ones would show by chance:

    (L_i - 1) / sqrt(B + E_i)        is one slow?               find_slow
    distance of two groups' means    are many slow?             find_slow_group
    L_i - L_fastest                  if n is below MIN_PEERS    slower_than_fastest
    number of i's disturbed rounds   does one pause?            find_stalls

A chance is multiplied by the number of comparisons in the whole test (Bonferroni), so that it is
the expected number of such findings per test of healthy machines; below FALSE_ALARMS it counts.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from review.acceptance.records import known

MIN_PEERS = 4  # to tell which one is odd
MIN_ROUNDS = 3  # to estimate repeatability
FALSE_ALARMS = 0.01  # per whole test of healthy machines
PRIOR_FREEDOM = 10  # degrees of freedom d0 of the prior spread b0
MIN_GAP = 0.05  # between two groups; two bins of clocks may lie 3% apart
AUTOCORRELATIONS = np.linspace(0, 0.95, 96)
# Median absolute deviation to standard deviation, of a normal distribution.
TO_DEVIATION = 1.4826
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean

# By name and round, nan where missing.
Times = Mapping[str, "Sequence[float] | np.ndarray"]


@dataclass(frozen=True)
class Outlier:
    """A rank, node or link far above the others.

    excess: over the median, as a fraction; measure: such as "9 deviations" (of healthy ones);
    chance: expected number of such findings per whole test of healthy machines (0.001: one in 1,000
    tests); state: a warning if peers are few.
    """

    name: str
    excess: float
    measure: str
    chance: float
    state: str = "fail"


def relative(table: np.ndarray, paired: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """y [names, rounds] and L [names]. paired: the rounds ran at the same time, so that
    disturbances which all share cancel.
    """
    if paired:
        table = table / np.nanmedian(table, axis=0)
    level = np.nanmedian(table, axis=1)
    # Again by the median of the levels, which need not be 1 after the first division.
    return table / np.median(level), level / np.median(level)


def variance_between(level: np.ndarray, spread: float) -> tuple[float, float]:
    """B and its degrees of freedom: the moderated variance of Smyth (2004).

    The spread of n levels is the median absolute deviation, which their closer half determines:
    d1 = n/2 - 1 degrees of freedom.
    """
    freedom = len(level) // 2 - 1
    deviation = TO_DEVIATION * float(np.median(np.abs(level - 1)))
    total = PRIOR_FREEDOM + freedom
    return (PRIOR_FREEDOM * spread**2 + freedom * deviation**2) / total, total


class RoundNoise:
    """s_i and E_i: how far the median of i's rounds strays by their noise alone."""

    def __init__(self, errors: np.ndarray, correlation: float = 0.0) -> None:
        """errors: y_ij - L_i [names, rounds]; correlation: lower bound of r, estimated over the
        whole test because a few rounds show it badly.
        """
        self.num_rounds = np.maximum(np.sum(~np.isnan(errors), axis=1), 1)
        self.correlation = max(correlation, autocorrelation(errors))
        distances = np.abs(errors)
        self.deviations = TO_DEVIATION * np.nanmedian(distances, axis=1)  # [names]
        # Of all rounds together, outliers clipped at three deviations; each name's median
        # has cost a degree of freedom.
        limit = 3 * TO_DEVIATION * float(np.nanmedian(distances))
        clipped = np.clip(known(errors), -limit, limit)
        self.common_freedom = max(len(clipped) - len(errors), 1)
        self.common = math.sqrt(float(np.sum(clipped**2)) / self.common_freedom)

    def of_median(self, index: int) -> tuple[float, float]:
        """E_i and its degrees of freedom.

        The mean of m rounds has the share h = (1 + 2 sum_k (1 - k/m) r^k) / m of a round's variance
        (Bayley and Hammersley 1946), and around it the rounds show only 1 - h of theirs. So
        E = 1.2533^2 s^2 (1 - 1/m) h / (1 - h). For correlated rounds a median's error is less than
        1.2533 times a mean's; that makes up for an r which few rounds show badly.
        """
        count = int(self.num_rounds[index])
        # One round tells nothing about its noise: an error of 100%, which nobody exceeds.
        if count == 1:
            return 1.0, 1.0
        noise, freedom = self.common, self.common_freedom
        if self.deviations[index] > noise:
            noise, freedom = float(self.deviations[index]), count - 1
        lags = np.arange(1, count)
        weights = (1 - lags / count) @ self.correlation**lags
        share = (1 + 2 * float(weights)) / count
        variance = (OF_MEDIAN * noise) ** 2 * (1 - 1 / count) * share / (1 - share)
        # Correlated rounds are worth this many independent ones each.
        worth = (1 - self.correlation) / (1 + self.correlation)
        return variance, max(freedom * worth, 1)


def autocorrelation(errors: np.ndarray) -> float:
    """r, 0 to 0.95, from y_ij - L_i [names, rounds].

    Short series show too little of it, which is corrected by inverting the expected value. Half a
    standard error is subtracted, so that independent rounds count in full.
    """
    num_rounds, square = errors.shape[1], float(np.nanmean(errors**2))
    if num_rounds <= MIN_ROUNDS or square == 0:
        return 0.0
    shown = float(np.nanmean(errors[:, 1:] * errors[:, :-1])) / square
    standard_error = known(errors).size ** -0.5
    expected = _expected_autocorrelation(num_rounds)
    return float(np.interp(shown - 0.5 * standard_error, expected, AUTOCORRELATIONS))


@functools.cache
def _expected_autocorrelation(num_rounds: int) -> np.ndarray:
    """What a series of this length shows about its own mean, for each of AUTOCORRELATIONS."""
    # Takes the mean off a series [rounds, rounds].
    centering = np.eye(num_rounds) - 1 / num_rounds
    numbers = np.arange(num_rounds)
    lags = np.abs(np.subtract.outer(numbers, numbers))
    shown = []
    for correlation in AUTOCORRELATIONS:
        covariance = centering @ correlation**lags @ centering
        at_lag_one = np.trace(covariance, 1) / (num_rounds - 1)
        shown.append(at_lag_one / (np.trace(covariance) / num_rounds))
    return np.array(shown)


def autocorrelation_of_all(tables: Sequence[np.ndarray]) -> float:
    """r over the rounds of all stages [ranks, rounds], each about its own median."""
    levels = [relative(table) for table in tables]
    errors = [table - level[:, None] for table, level in levels]
    return autocorrelation(np.concatenate(errors))


def _freedom_of_sum(*variances: tuple[float, float]) -> float:
    """Degrees of freedom of a sum of estimated variances, each with its own (Welch-Satterthwaite):
    many rounds estimate noise well, few ranks estimate their spread badly.
    """
    total = sum(variance for variance, _ in variances)
    squares = sum(variance**2 / freedom for variance, freedom in variances)
    return float(total**2 / max(squares, 1e-30))


def find_slow(
    values: Times,
    comparisons: float,
    *,
    min_excess: float,
    spread: float,
    paired: bool = True,
    correlation: float = 0.0,
) -> list[Outlier]:
    """Those far above the others, the farthest first.

    comparisons: in the whole test, these included; min_excess: a smaller one does not matter;
    spread: the prior b0; correlation: see RoundNoise.
    """
    from scipy.stats import t  # slow to import, and only needed here

    if len(values) < MIN_PEERS:
        # Divides round by round, which only rounds of the same time allow.
        prior = {"min_excess": min_excess, "spread": spread}
        return slower_than_fastest(values, comparisons, **prior) if paired else []
    table, level = relative(np.array([*values.values()], np.float64), paired)
    if table.shape[1] < MIN_ROUNDS:
        return []
    noise = RoundNoise(table - level[:, None], correlation)
    between = variance_between(level, spread)
    outliers = []
    for index, (name, excess) in enumerate(
        zip(values, (level - 1).tolist(), strict=True)
    ):
        error = noise.of_median(index)
        deviations = excess / math.sqrt(between[0] + error[0])
        freedom = _freedom_of_sum(between, error)
        chance = float(t.sf(deviations, freedom)) * comparisons
        # Surely above the others, and by enough to matter.
        if chance < FALSE_ALARMS and excess > min_excess:
            measure = f"{deviations:.0f} deviations"
            outliers.append(Outlier(name, excess, measure, chance))
    return sorted(outliers, key=lambda outlier: -outlier.excess)


def find_slow_group(
    values: Times,
    comparisons: float,
    *,
    spread: float,
    paired: bool = True,
    min_gap: float = MIN_GAP,
) -> list[Outlier]:
    """Two groups, at least ``min_gap`` apart: the slow one, as a single finding with its members'
    names.

    Where half are slow, no median tells them from the others. Levels in ascending order are cut
    where the variance within both sides is smallest; the fast side has at least a quarter, the slow
    one two. Under the hypothesis that all are alike any fixed split has a t statistic of its two
    means; the bound multiplies its chance by the number of all splits, 2^(n-1), so that the choice
    of the best one is paid for. The variance within is moderated by ``spread``.
    """
    if len(values) < MIN_PEERS:
        return []
    table, level = relative(np.array([*values.values()], np.float64), paired)
    order = np.argsort(level)
    ranked, count = level[order], len(level)
    within, cut = min(
        (_sum_of_squares(ranked[:cut]) + _sum_of_squares(ranked[cut:]), cut)
        for cut in range(-(-count // 4), count - 1)
    )
    fast, slow = ranked[:cut], ranked[cut:]
    excess = float(np.mean(slow) / np.mean(fast)) - 1
    # Without a gap between them it is a wide spread, not two groups.
    nearest = float(slow[0] / fast[-1]) - 1
    too_close = excess < min_gap or nearest < min_gap / 2
    if too_close or table.shape[1] < MIN_ROUNDS:
        return []
    noise = RoundNoise(table - level[:, None])
    # The noisiest one's, since its level may lie on either side by chance.
    noisiest = max(noise.of_median(index)[0] for index in range(count))
    freedom = PRIOR_FREEDOM + count - 2
    variance = (PRIOR_FREEDOM * (spread**2 + noisiest) + within) / freedom
    distance = float(np.mean(slow) - np.mean(fast))
    statistic = distance / math.sqrt(variance * (1 / cut + 1 / (count - cut)))
    log_splits = (count - 1) * math.log(2)
    log_chance = _log_tail(statistic, freedom) + math.log(comparisons) + log_splits
    if log_chance >= math.log(FALSE_ALARMS):
        return []
    names = [[*values][index] for index in sorted(order[cut:].tolist())]
    who = f"{len(names)} of {count}: {', '.join(names)}"
    spread_of_fast = float(fast[-1] / fast[0] - 1)
    measure = f"two groups, the other {cut} within {spread_of_fast:.1%}"
    return [Outlier(who, excess, measure, math.exp(log_chance))]


def members(name: str) -> list[str]:
    """Names of a group, or the one name."""
    return name.rpartition(": ")[2].split(", ")


def _sum_of_squares(values: np.ndarray) -> float:
    """Of the distances to the mean."""
    return float(np.sum((values - np.mean(values)) ** 2))


def _log_tail(x: float, freedom: float) -> float:
    """Upper bound of Student's log sf(x), which does not underflow as sf does:
    sf(x) <= pdf(x) (1 + x^2/v) / (x (v - 1) / v).
    """
    from scipy.stats import t

    bound = (1 + x**2 / freedom) * freedom / (x * (freedom - 1))
    return float(t.logpdf(x, freedom)) + math.log(bound)


def slower_than_fastest(
    values: Times, comparisons: float, *, min_excess: float, spread: float
) -> list[Outlier]:
    """Among too few for a majority: those surely slower than the fastest by more than
    ``min_excess``, as warnings.

    Surely: the whole interval, at the confidence level of a test, lies above. Healthy ones are
    assumed to differ by ``spread``.
    """
    from scipy.stats import t

    table = np.array([*values.values()], np.float64)
    fastest = int(np.argmin(np.nanmedian(table, axis=1)))
    outliers = []
    for name, ratios in zip(values, table / table[fastest], strict=True):
        rounds = known(ratios)
        excess = float(np.nanmedian(ratios)) - 1
        if len(rounds) < MIN_ROUNDS or excess <= min_excess:
            continue
        repeats = (OF_MEDIAN * float(np.std(rounds, ddof=1))) ** 2 / len(rounds)
        # This one and the fastest both differ from a typical one; the spread is given.
        between = 2 * spread**2
        freedom = _freedom_of_sum((between, math.inf), (repeats, len(rounds) - 1))
        error = math.sqrt(between + repeats)
        half = float(t.isf(FALSE_ALARMS / comparisons, freedom)) * error
        low, high = excess - half, excess + half
        if low > min_excess:
            chance = float(t.sf(excess / error, freedom)) * comparisons
            measure = f"{low:.1%} to {high:.1%} behind {[*values][fastest]}"
            outliers.append(Outlier(name, excess, measure, chance, "warn"))
    return outliers


def find_stalls(lost: Times, comparisons: float, *, min_excess: float) -> list[Outlier]:
    """Those that lose time in more rounds than the others, the worst first.

    lost: fraction of each round's time; its excess over the round's median counts. Pauses are rare
    and of any length, so no distribution is assumed: among equals, rounds that lost more than
    ``min_excess`` are spread at random, and the number of i's own is hypergeometric (Fisher's exact
    test). A long pause counts as one round.
    """
    from scipy.stats import hypergeom  # slow to import, and only needed here

    if len(lost) < MIN_PEERS:
        return []
    table = np.array([*lost.values()], np.float64)
    table = table - np.nanmedian(table, axis=0)
    num_rounds = np.sum(~np.isnan(table), axis=1)
    disturbed = np.sum(table > min_excess, axis=1)
    # sf(k) is the chance of more than k.
    chances = hypergeom.sf(disturbed - 1, num_rounds.sum(), disturbed.sum(), num_rounds)
    excesses = np.nanmean(table, axis=1)
    outliers = []
    for index, name in enumerate(lost):
        chance, excess = float(chances[index]) * comparisons, float(excesses[index])
        if chance < FALSE_ALARMS and excess > min_excess:
            measure = f"in {disturbed[index]} of {num_rounds[index]} rounds"
            outliers.append(Outlier(name, excess, measure, chance))
    return sorted(outliers, key=lambda outlier: -outlier.excess)
