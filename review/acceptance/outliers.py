"""Statistics: who stands out among those that did the same work, and how sure that is.

Model. Ranks, nodes or links i = 1..n do equal work in rounds j = 1..m_i. Relative to the median
over all, round j of a healthy i takes

    y_ij = 1 + b_i + e_ij

What varies: b_i is how a healthy i differs for good (silicon, cooling, place in the network), with
variance B; e_ij is the noise of a round, with variance s_i^2 and autocorrelation r^k at lag k.

What is estimated, one function each:

    L_i = median over j of y_ij                                          Levels.of
    C_i = lower quartile of a stretch of rounds / that of all of i's     Changes
    B   = (d0 b0^2 + d1 b^2) / (d0 + d1), b0 a prior, b that of the L_i  variance_between
    s_i = that of i's rounds or of all rounds, whichever is worse        RoundNoise.of
    E_i = variance of L_i by the noise of i's rounds                     RoundNoise.of_median
    r   = from products of neighbouring rounds, corrected for few        autocorrelation

What is tested, against what healthy ones would show by chance:

    (L_i - 1) / sqrt(B + E_i)        is one slow?               find_slow
    distance of two groups' means    are many slow?             find_slow_group
    L_i - L_fastest                  if n is below MIN_PEERS    slower_than_fastest
    number of i's disturbed rounds   does one pause?            find_stalls

The first three also take C_i for L_i: a median over all rounds does not show what lasts less than
half of them. No estimate of noise may grow with a fault, or the slower one is, the surer it would
pass: what is pooled is clipped, and the own noise is that of neighbouring rounds.

A chance is multiplied by the number of comparisons in the whole test (Bonferroni), so that it is
the expected number of such findings per test of healthy machines; below FALSE_ALARMS it counts.
"""

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from review.acceptance.records import known

MIN_PEERS = 4  # to tell which one is odd
MIN_ROUNDS = 3  # to estimate repeatability
FALSE_ALARMS = 0.01  # per whole test of healthy machines
PRIOR_FREEDOM = 10  # degrees of freedom d0 of the prior spread b0
MIN_GAP = 0.05  # between two groups; two bins of clocks may lie 3% apart
AUTOCORRELATIONS = np.linspace(0, 0.95, 20)
SHORT = 6  # rounds of a quick test's stage, for which r is raised by so many
SHORT_DOUBT = 1.5  # standard errors
# Median absolute deviation to standard deviation, of a normal distribution.
TO_DEVIATION = 1.4826
QUARTILE_TO_DEVIATION = 3.1383  # and the lower quartile of absolute deviations
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean
CALM = 10.0  # times the variance of a typical one
OF_QUARTILE = 1.3626  # and of a quartile

# By name and round, nan where missing.
Times = Mapping[str, "Sequence[float] | np.ndarray"]


@dataclass(frozen=True)
class Outlier:
    """A rank, node or link far above the others.

    excess: over the median, as a fraction; measure: such as "9 deviations" (of healthy ones);
    chance: expected number of such findings per whole test of healthy machines (0.001: one in 1,000
    tests); state: a warning if peers are few and the difference is not gross.
    """

    name: str
    excess: float
    measure: str
    chance: float
    state: str = "fail"


def stretches(num_rounds: int) -> list[slice]:
    """Thirds of the rounds, overlapping by half: whatever lasts a third fills most of one."""
    width = round(num_rounds / 3)
    # Too few rounds, and a stretch is nearly all of them.
    if num_rounds < 2 * MIN_ROUNDS:
        return []
    last = num_rounds - width
    starts = {*range(0, last, max(1, width // 2)), last}
    return [slice(start, start + width) for start in sorted(starts)]


@dataclass(frozen=True)
class Levels:
    """L_i or C_i of each name, 1 for the median one; variance, freedom: E_i and its degrees of
    freedom.
    """

    names: list[str]
    level: np.ndarray
    variance: np.ndarray
    freedom: np.ndarray
    num_rounds: int

    @classmethod
    def of(
        cls, values: Times, paired: bool = True, correlation: float = 0.0
    ) -> "Levels":
        """paired: the rounds ran at the same time; correlation: see RoundNoise.of."""
        table, level = relative(np.array([*values.values()], np.float64), paired)
        noise = RoundNoise.of(table, level, correlation, in_order=paired)
        error = noise.of_median(noise.num_rounds)
        return cls([*values], level, *error, table.shape[1])


class Changes:
    """C_i: how much slower each was in a stretch of rounds than it usually is. paired rounds.

    Over the fastest of each round, since in a stretch most may be slow; its noise is shared by all.
    Lower quartiles: the usual one stays that of good rounds until three quarters are slow, and
    three quarters of a stretch must be slow, which a few disturbed rounds are not.
    """

    def __init__(self, values: Times, correlation: float = 0.0) -> None:
        table = np.array([*values.values()], np.float64)
        table = table / np.fmin.reduce(table, axis=0)
        self.names = [*values]
        self.table = table / _quartile(table)[:, None]
        self.noise = RoundNoise.of(self.table, _median(self.table), correlation)

    def levels(self, stretch: slice) -> Levels:
        part = self.table[:, stretch]
        change = _quartile(part)
        counts = np.sum(~np.isnan(part), axis=1)
        of_part, freedom = self.noise.of_median(np.maximum(counts, 1))
        of_all, _ = self.noise.of_median(self.noise.num_rounds)
        variance = (OF_QUARTILE / OF_MEDIAN) ** 2 * (of_part + of_all)
        # A round that is missing in a stretch of few tells nothing.
        num_rounds = self.table.shape[1] if counts.all() else 0
        return Levels(
            self.names, change / np.median(change), variance, freedom, num_rounds
        )


def relative(table: np.ndarray, paired: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """y [names, rounds] and L [names]. paired: the rounds ran at the same time, so that
    disturbances which all share cancel.
    """
    if paired:
        table = table / _median(table, axis=0)
    level = _median(table)
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


@dataclass(frozen=True)
class RoundNoise:
    """How far the rounds of each i stray from its level by noise alone, and thus its median.

    deviations, freedom: s_i and its degrees of freedom [names]; num_rounds: m_i, at least 1;
    correlation: r.
    """

    deviations: np.ndarray
    freedom: np.ndarray
    num_rounds: np.ndarray
    correlation: float

    @classmethod
    def of(
        cls,
        table: np.ndarray,
        level: np.ndarray,
        correlation: float = 0.0,
        in_order: bool = True,
    ) -> "RoundNoise":
        """table: y_ij; level: their medians [names]; correlation: lower bound of r, estimated over
        the whole test because a few rounds show it badly; in_order: neighbours in the table are
        rounds one after the other.
        """
        # Of the own level: ten times as slow is ten times as noisy, and no less sure.
        errors = table / level[:, None] - 1
        num_rounds = np.maximum(np.sum(~np.isnan(errors), axis=1), 1)
        # Alone, a few rounds often look correlated.
        alone = autocorrelation(errors, doubt=0.0 if correlation else 1.0)
        correlation = max(correlation, alone)
        # Around their own mean, m correlated rounds show only 1 - h of their variance.
        shown = 1 - _shares(num_rounds, correlation)
        with np.errstate(divide="ignore", invalid="ignore"):
            unseen = np.sqrt((1 - 1 / num_rounds) / shown)
        own = TO_DEVIATION * _median(np.abs(errors)) * unseen
        if in_order and table.shape[1] > MIN_ROUNDS:
            own = _without_changes(own, errors, correlation)
        pooled, freedom = _pooled_deviation(errors)
        common = pooled * unseen
        # Whichever is worse: one may be noisier than the others, or look calmer by chance.
        return cls(
            deviations=np.fmax(common, own),
            freedom=np.where(own > common, num_rounds - 1, freedom),
            num_rounds=num_rounds,
            correlation=correlation,
        )

    def of_median(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """E_i of the median of so many rounds, and its degrees of freedom [names]."""
        shares = _shares(counts, self.correlation, of_median=True)
        # Correlated rounds are worth this many independent ones each.
        worth = (1 - self.correlation) / (1 + self.correlation)
        freedom = np.maximum(self.freedom * worth, 1)
        # One round tells nothing about its noise: an error of 100%, which nobody exceeds.
        alone = self.num_rounds == 1
        variance = self.deviations**2 * shares
        return np.where(alone, 1.0, variance), np.where(alone, 1.0, freedom)


def _without_changes(
    own: np.ndarray, errors: np.ndarray, correlation: float
) -> np.ndarray:
    """s_i of each i's own rounds; by the steps between neighbours of one whose level changes.

    After a change half-way, all rounds are far from the median, but not from their neighbours.
    """
    steps = TO_DEVIATION * _median(np.abs(np.diff(errors, axis=1)))
    steps = steps / math.sqrt(2 * (1 - correlation))
    # Few rounds may look changed by chance.
    most = 1.5 * (1 + (SHORT / errors.shape[1]) ** 2)
    return np.where(own > most * steps, steps, own)


def _pooled_deviation(errors: np.ndarray) -> tuple[float, int]:
    """s of all rounds together and its degrees of freedom, from what is noise for sure.

    Half of the rounds may be far off, so the nearest quarter tells the deviation. Rounds beyond
    twice three of those are at another level, and left out; nearer ones count as three at most.
    """
    distances = np.abs(errors)
    three = 3 * QUARTILE_TO_DEVIATION * float(np.nanquantile(distances, 0.25))
    near = np.minimum(distances[distances <= 2 * three], three)
    # Each name's median has cost a degree of freedom.
    freedom = max(len(near) - len(errors), 1)
    return math.sqrt(float(np.sum(near**2)) / freedom), freedom


def _shares(
    counts: np.ndarray, correlation: float, of_median: bool = False
) -> np.ndarray:
    """h: the mean of m rounds has the share (1 + 2 sum_k (1 - k/m) r^k) / m of a round's variance
    (Bayley and Hammersley 1946); their median asin(r^k) for r^k, if they are normal.
    """
    shares = {}
    for count in {*counts.tolist()}:
        lags = np.arange(count)
        of_lag = correlation**lags
        if of_median:
            of_lag = np.arcsin(of_lag)
        weights = (1 - lags / count) @ of_lag
        shares[count] = (2 * float(weights) - of_lag[0]) / count
    return np.array([shares[count] for count in counts.tolist()])


def _median(table: np.ndarray, axis: int = 1) -> np.ndarray:
    """Without nan; nan, without a warning, where nothing is left."""
    # Several times faster, and most tables are whole.
    if not np.isnan(table).any():
        return np.asarray(np.median(table, axis=axis))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(table, axis=axis))


def _quartile(table: np.ndarray) -> np.ndarray:
    """The lower one of each row, a value of its own; nan, which sorts last, does not count."""
    counts = np.sum(~np.isnan(table), axis=1)
    chosen = np.maximum(counts - 1, 0) // 4
    return np.sort(table, axis=1)[np.arange(len(table)), chosen]


def autocorrelation(errors: np.ndarray, doubt: float = 0.0) -> float:
    """r, 0 to 0.95, from y_ij - L_i [names, rounds].

    Short series show too little of it, which is corrected by inverting what they show on average.
    doubt: standard errors to subtract; below 0, to add.
    """
    num_rounds = errors.shape[1]
    errors = errors[~np.isnan(errors).all(axis=1)]
    if num_rounds <= MIN_ROUNDS or not errors.any():
        return 0.0
    shown = _shown_autocorrelation(errors)
    expected = _expected_autocorrelation(num_rounds)
    shown -= doubt * known(errors).size ** -0.5
    return float(np.interp(shown, expected, AUTOCORRELATIONS))


def _shown_autocorrelation(errors: np.ndarray) -> float:
    """The share of the variance that neighbours have in common, in calm series: one that changes
    its level looks correlated, and would hide its own fault.
    """
    squares = np.nanmean(errors**2, axis=1)
    # Noise alone rarely exceeds this; half may change their levels.
    calm = errors[squares <= CALM * np.sort(squares)[(len(squares) - 1) // 2]]
    products = np.nanmean(calm[:, 1:] * calm[:, :-1])
    return float(products / max(np.nanmean(calm**2), 1e-300))


@functools.cache
def _expected_autocorrelation(num_rounds: int) -> np.ndarray:
    """What series of this length show of each of AUTOCORRELATIONS, simulated."""
    generator, count = np.random.default_rng(0), 1000
    new = generator.standard_normal((num_rounds, count))
    shown = []
    for correlation in AUTOCORRELATIONS:
        series = [new[0]]
        for number in range(1, num_rounds):
            # The root keeps the deviation the same for any correlation.
            fresh = (1 - correlation**2) ** 0.5 * new[number]
            series.append(correlation * series[-1] + fresh)
        table = np.stack(series, axis=1)
        errors = table - np.median(table, axis=1, keepdims=True)
        shown.append(_shown_autocorrelation(errors))
    # Rising, as np.interp needs it.
    return np.maximum.accumulate(shown)


def autocorrelation_of_all(tables: Sequence[np.ndarray]) -> float:
    """r over the rounds of all stages [ranks, rounds], each about its own median."""
    # Where half are slow, the median would lie between, far from all.
    rounds = [table / np.fmin.reduce(table, axis=0) for table in tables]
    errors = [table / _median(table)[:, None] - 1 for table in rounds]
    # A low guess names healthy ranks if rounds are few: little noise shows within one stage.
    doubt = SHORT_DOUBT * (SHORT / tables[0].shape[1]) ** 2
    return autocorrelation(np.concatenate(errors), -doubt)


def find_slow(
    levels: Levels,
    comparisons: float,
    *,
    min_excess: float,
    spread: float,
) -> list[Outlier]:
    """Those far above the others, the farthest first.

    comparisons: in the whole test, these included; min_excess: a smaller one does not matter;
    spread: the prior b0.
    """
    from scipy.stats import t  # slow to import, and only needed here

    if levels.num_rounds < MIN_ROUNDS:
        return []
    excess = levels.level - 1
    between, between_freedom = variance_between(levels.level, spread)
    variance = between + levels.variance
    deviations = excess / np.sqrt(variance)
    # Of a sum (Welch-Satterthwaite): many rounds estimate noise well, few ranks their spread badly.
    squares = between**2 / between_freedom + levels.variance**2 / levels.freedom
    freedom = variance**2 / squares
    chances = t.sf(deviations, freedom) * comparisons
    # Surely above the others, and by enough to matter.
    found = [
        Outlier(
            levels.names[index],
            float(excess[index]),
            f"{deviations[index]:,.0f} deviations",
            float(chances[index]),
        )
        for index in np.flatnonzero((chances < FALSE_ALARMS) & (excess > min_excess))
    ]
    return sorted(found, key=lambda outlier: -outlier.excess)


def find_slow_group(
    levels: Levels,
    comparisons: float,
    *,
    min_excess: float,
    spread: float,
) -> list[Outlier]:
    """Two groups, clearly apart: the slow one, as a single finding with its members' names.

    Where half are slow, no median tells them from the others. Levels in ascending order are cut
    where the variance within both sides is smallest; the slow side has at least two. Under the
    hypothesis that all are alike any fixed split has a t statistic of its two means; the bound
    multiplies its chance by the number of splits with as many on either side, and by that of such
    numbers, so that the choice of the best one is paid for. The variance within is moderated by
    ``spread``.
    """
    from scipy.stats import t

    if levels.num_rounds < MIN_ROUNDS:
        return []
    min_gap = max(MIN_GAP, min_excess)
    order = np.argsort(levels.level)
    ranked, count = levels.level[order], len(order)
    within, cut = min(
        (_sum_of_squares(ranked[:cut]) + _sum_of_squares(ranked[cut:]), cut)
        for cut in range(1, count - 1)
    )
    fast, slow = ranked[:cut], ranked[cut:]
    excess = float(np.mean(slow) / np.mean(fast)) - 1
    # Without a gap between them it is a wide spread, not two groups.
    nearest = float(slow[0] / fast[-1]) - 1
    if excess < min_gap or nearest < min_gap / 2:
        return []
    # The noisiest one's, since its level may lie on either side by chance.
    noisiest = float(levels.variance.max())
    freedom = PRIOR_FREEDOM + count - 2
    variance = (PRIOR_FREEDOM * (spread**2 + noisiest) + within) / freedom
    distance = float(np.mean(slow) - np.mean(fast))
    statistic = distance / math.sqrt(variance * (1 / cut + 1 / (count - cut)))
    log_splits = math.log(math.comb(count, cut)) + math.log(count)
    # Its tail may be below the smallest float.
    log_tail = math.log(max(float(t.sf(statistic, freedom)), 1e-300))
    log_chance = log_tail + math.log(comparisons) + log_splits
    if log_chance >= math.log(FALSE_ALARMS):
        return []
    names = [levels.names[index] for index in sorted(order[cut:].tolist())]
    who = f"{len(names)} of {count}: {', '.join(names)}"
    spread_of_fast = float(fast[-1] / fast[0] - 1)
    measure = f"two groups, the other {cut} within {spread_of_fast:.1%}"
    return [Outlier(who, excess, measure, math.exp(log_chance))]


def members(name: str) -> list[str]:
    """Names of a group, or the one name."""
    return name.rpartition(": ")[2].split(", ")


def _sum_of_squares(values: np.ndarray) -> float:
    """Of the distances to the mean."""
    # Asked of every cut: without the checks of np.mean and np.sum, which take most of the time.
    mean = np.add.reduce(values) / len(values)
    return float(np.add.reduce((values - mean) ** 2))


def slower_than_fastest(
    levels: Levels,
    comparisons: float,
    *,
    min_excess: float,
    spread: float,
    gross: float,
) -> list[Outlier]:
    """Among too few for a majority: those surely slower than the fastest by more than
    ``min_excess``: warnings, or failures beyond ``gross``, which no two healthy ones differ by.

    Surely: the whole interval, at the confidence level of a test, lies above. Healthy ones are
    assumed to differ by ``spread``.
    """
    from scipy.stats import t

    if levels.num_rounds < MIN_ROUNDS:
        return []
    fastest = int(np.argmin(levels.level))
    excess = levels.level / levels.level[fastest] - 1
    # This one and the fastest both differ from a typical one; the spread is given.
    repeats = levels.variance + levels.variance[fastest]
    error = np.sqrt(2 * spread**2 + repeats)
    freedom = error**4 * levels.freedom / np.maximum(repeats**2, 1e-30)
    half = t.isf(FALSE_ALARMS / comparisons, freedom) * error
    chances = t.sf(excess / error, freedom) * comparisons
    return [
        Outlier(
            levels.names[index],
            float(excess[index]),
            f"{excess[index] - half[index]:.1%} to {excess[index] + half[index]:.1%}"
            f" behind {levels.names[fastest]}",
            float(chances[index]),
            "fail" if excess[index] - half[index] > gross else "warn",
        )
        for index in np.flatnonzero(excess - half > min_excess)
    ]


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
