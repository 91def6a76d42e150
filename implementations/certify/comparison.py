"""The statistics: which ranks, nodes or links stand out among those that did the same work, and how sure that is."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from certify.records import Records, known
from certify.schema import ALONE, BURN_IN

LEAST = 4  # to tell which is the odd one
LEAST_ROUNDS = 3  # to tell how well one repeats
FALSE_ALARMS = 0.01  # share of whole tests of healthy machines, whatever their number of comparisons
HEALTHY_SPREAD = 0.01  # prior standard deviation between healthy GPUs, as a share
PRIOR_FREEDOM = 6  # degrees of freedom of that prior
AUTOCORRELATIONS = np.linspace(0, 0.95, 96)
_TO_DEVIATION = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean
LEAST_EXCESS = {"slow": 0.03, "starved": 0.03, "hesitates": 0.03, "network": 0.15}  # below it an excess does not matter
SPREAD = {"slow": 0.01, "starved": 0.01, "network": 0.05}  # prior standard deviation between healthy ones
HESITATION = 1.25  # times the typical step: time beyond that is lost


@dataclass(frozen=True)
class Outlier:
    """One that is far above the others.

    excess: over the median, as a share; measure: such as "9 deviations" (of a healthy one); chance: expected number of
    such findings in a whole test of healthy machines, so that 0.001 is one in 1,000 tests; state: a warning among few.
    """

    name: str
    excess: float
    measure: str
    chance: float
    state: str = "fail"


def slow(
    values: Mapping[str, Sequence[float]],
    comparisons: int,
    *,
    least_excess: float,
    spread: float = HEALTHY_SPREAD,
    paired: bool = True,
    alike: float = 0.0,
) -> list[Outlier]:
    """Those whose value is far above the others', the farthest first; none if there are too few to compare.

    values: of each, by round, nan for a round without it. paired: the rounds ran at the same time, so that common
    disturbances cancel. comparisons: of the whole test, these included (Bonferroni). alike: the least autocorrelation
    of rounds, as the whole test shows it: a few rounds show it badly.

    The center is the median over all. A healthy one's variance has two parts: the spread between them, from the median
    absolute deviation and, as a prior with PRIOR_FREEDOM degrees of freedom, from ``spread`` (the moderated variance of
    Smyth 2004); and repeatability, from its own rounds or those of all, whichever is worse. As both are uncertain, the
    limit is Student's quantile with the degrees of freedom of their sum (Welch and Satterthwaite): many rounds tell the
    noise of a round well, few ranks tell their spread badly. Rounds that are like the one before them tell less: the
    variance of the mean of n of them is g / n times that of one, and they vary about it by 1 - g / n of that alone,
    where g = 1 + 2 sum (1 - k / n) r^k over k < n (Bayley and Hammersley 1946).
    """
    from scipy.stats import t  # slow to import, and only needed here

    if len(values) < LEAST:
        return behind(values, comparisons, least_excess=least_excess, spread=spread) if paired else []
    table, level = relative(np.array([*values.values()], np.float64), paired)
    if table.shape[1] < LEAST_ROUNDS:
        return []
    errors = table - level[:, None]
    rounds = np.maximum(np.sum(~np.isnan(table), axis=1), 1)
    common, common_freedom = _common_noise(errors)
    own = _deviation(table, level[:, None], axis=1)
    alike = max(alike, autocorrelation(errors))
    freedom = PRIOR_FREEDOM + len(values) // 2 - 1
    between = (PRIOR_FREEDOM * spread**2 + (freedom - PRIOR_FREEDOM) * _deviation(level, 1.0, axis=0) ** 2) / freedom
    found = []
    for name, value, deviation, count in zip(values, level, own, rounds.tolist(), strict=True):
        of_rounds = common_freedom if deviation <= common else max(count - 1, 1)
        of_rounds = max(of_rounds * (1 - alike) / (1 + alike), 1)
        share = _inflation(alike, count) / count
        error = (max(deviation, common) * OF_MEDIAN) ** 2 * (1 - 1 / count) * share / (1 - share) if count > 1 else 1.0
        deviations = float((value - 1) / math.sqrt(between + error))
        sum_freedom = (between + error) ** 2 / (between**2 / freedom + error**2 / of_rounds)
        chance = float(t.sf(deviations, sum_freedom)) * comparisons
        if chance < FALSE_ALARMS and value - 1 > least_excess:
            found.append(Outlier(name, float(value - 1), f"{deviations:.0f} deviations", chance))
    return sorted(found, key=lambda one: -one.excess)


def behind(
    values: Mapping[str, Sequence[float]], comparisons: int, *, least_excess: float, spread: float
) -> list[Outlier]:
    """Of too few to outvote one another, those surely behind the quickest by more than ``least_excess``, as warnings.

    Healthy ones are taken to differ by ``spread``, as two tell nothing of it; the interval is of a whole test's level.
    """
    from scipy.stats import t

    table = np.array([*values.values()], np.float64)
    quickest = int(np.argmin(np.nanmedian(table, axis=1)))
    found = []
    for name, ratios in zip(values, table / table[quickest], strict=True):
        rounds, excess = known(ratios), float(np.nanmedian(ratios)) - 1
        if len(rounds) >= LEAST_ROUNDS and excess > least_excess:
            repeats = (OF_MEDIAN * float(np.std(rounds, ddof=1))) ** 2 / len(rounds)
            between = 2 * spread**2
            freedom = (between + repeats) ** 2 * (len(rounds) - 1) / max(repeats**2, 1e-30)
            error = math.sqrt(between + repeats)
            half = float(t.isf(FALSE_ALARMS / comparisons, freedom)) * error
            if excess - half > least_excess:
                chance = float(t.sf(excess / error, freedom)) * comparisons
                against = f"{excess - half:.1%} to {excess + half:.1%} behind {[*values][quickest]}"
                found.append(Outlier(name, excess, against, chance, "warn"))
    return found


def relative(table: np.ndarray, paired: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Each round [names, rounds], and the median over rounds [names], over the median of all names."""
    if paired:
        table = table / np.nanmedian(table, axis=0)
    level = np.nanmedian(table, axis=1)
    return table / np.median(level), level / np.median(level)


def hesitating(lost: Mapping[str, Sequence[float]], comparisons: int, *, least: float) -> list[Outlier]:
    """Those that lose time in more rounds than the others do, the worst first.

    lost: share of each round's time, nan for a round without it; its excess over the round's median counts. Pauses are
    rare and of any length, so no distribution is assumed: among equals the rounds that lost more than ``least`` fall on
    anyone, and the number of one's own is hypergeometric (Fisher's exact test). One long pause is just one round.
    """
    from scipy.stats import hypergeom  # slow to import, and only needed here

    if len(lost) < LEAST:
        return []
    table = np.array([*lost.values()], np.float64)
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
    errors = np.clip(known(table), -limit, limit)
    freedom = max(len(errors) - len(table), 1)
    return math.sqrt(float(np.sum(errors**2)) / freedom), freedom


def autocorrelation(errors: np.ndarray) -> float:
    """Of rounds with those before them, 0 to 0.95, by their distances from their own median [names, rounds].

    Of a short series these come out too low; what they are expected to be is inverted. Half a standard error is taken
    off, so that independent rounds count in full.
    """
    rounds, square = errors.shape[1], float(np.nanmean(errors**2))
    if rounds <= LEAST_ROUNDS or square == 0:
        return 0.0
    found = float(np.nanmean(errors[:, 1:] * errors[:, :-1])) / square - 0.5 / known(errors).size ** 0.5
    return float(np.interp(found, _expected(rounds), AUTOCORRELATIONS))


@functools.cache
def _expected(rounds: int) -> np.ndarray:
    """The autocorrelation that a series of so many rounds shows about its own mean, by AUTOCORRELATIONS."""
    centered = np.eye(rounds) - 1 / rounds
    apart = np.abs(np.subtract.outer(np.arange(rounds), np.arange(rounds)))
    shown = [centered @ alike**apart @ centered for alike in AUTOCORRELATIONS]
    return np.array([np.trace(one, 1) / (rounds - 1) / (np.trace(one) / rounds) for one in shown])


def _inflation(alike: float, rounds: int) -> float:
    """By how much the variance of a mean is larger than that of independent rounds."""
    after = np.arange(1, rounds)
    return 1 + 2 * float(np.sum((1 - after / rounds) * alike**after))


def _deviation(table: np.ndarray, center: np.ndarray | float, axis: int) -> np.ndarray:
    return _TO_DEVIATION * np.nanmedian(np.abs(table - center), axis=axis)


@dataclass(frozen=True)
class Question:
    """Which of these stand out? kind: node, rank or link; values: by name and round; stages: of each round."""

    what: str
    kind: str
    values: Mapping[str, Sequence[float]]
    stages: tuple[str, ...]
    paired: bool = True
    alike: float = 0.0

    def outliers(self, comparisons: int) -> list[Outlier]:
        """comparisons: of the whole test."""
        least = LEAST_EXCESS[self.what]
        if self.what == "hesitates":
            return hesitating(self.values, comparisons, least=least)
        known = {"spread": SPREAD[self.what], "alike": self.alike}
        return slow(self.values, comparisons, least_excess=least, paired=self.paired, **known)

    def ranking(self) -> dict[str, float]:
        """Excess over the median, as a share, the slowest first."""
        level = relative(np.array([*self.values.values()]), self.paired)[1]
        excess = dict(zip(self.values, (level - 1).tolist(), strict=True))
        return dict(sorted(excess.items(), key=lambda one: -one[1]))

    def shown_in(self, name: str) -> list[str]:
        """The stages that show it: of several, those with half of their rounds or more far above the median."""
        stages = [*dict.fromkeys(self.stages)]
        if len(stages) == 1:
            return stages
        hit = np.array(self.values[name]) - np.nanmedian([*self.values.values()], axis=0) > LEAST_EXCESS[self.what]
        share = {stage: float(np.mean(hit[np.array(self.stages) == stage])) for stage in stages}
        return [stage for stage in stages if share[stage] >= 0.5] or [max(stages, key=lambda stage: share[stage])]


def questions(records: Records, burn_in: Mapping[int, Sequence[float]]) -> Iterator[Question]:
    """All comparisons of the test, in the order of the stages. burn_in: seconds of its steps by rank and round.

    Each stage is asked by itself, and all together: a small excess that is in all of them is surer in more rounds.
    """
    everywhere: dict[str, dict[str, np.ndarray]] = {"slow": {}, "starved": {}, "hesitates": {}}
    for stage in (one for one in records.stages if one != "pairs"):  # few rounds, and `node` has asked the same
        own = records.relative(stage)
        everywhere["slow"][stage] = np.apply_along_axis(_typical, 2, own)
        everywhere["hesitates"][stage] = np.apply_along_axis(_lost, 2, own)
        if records.on_cpus and stage in ALONE:  # what a GPU's process does on its CPUs says nothing of the GPU
            everywhere["starved"][stage] = np.apply_along_axis(_typical, 2, records.per_cpu_second(stage))
    asked = {what: [*tables.values()] for what, tables in everywhere.items() if tables and what != "hesitates"}
    alike = {what: of_all(tables) for what, tables in asked.items()}
    for stage in everywhere["slow"]:
        for what in asked:
            if stage in everywhere[what]:
                yield from _ask(records, what, {stage: everywhere[what][stage]}, alike[what])
    for what, by_stage in everywhere.items():
        yield from _ask(records, what, by_stage, alike.get(what, 0.0))
    for probe in records.probed:
        yield from _ask(records, "slow", {probe: records.probe(probe)})
    yield from _of_network(records)
    if set(burn_in) >= set(records.places):
        yield from _ask(records, "slow", {BURN_IN: np.array([burn_in[rank] for rank in records.places])})


def of_all(tables: Sequence[np.ndarray]) -> float:
    """The autocorrelation of the rounds of all stages, each [ranks, rounds], about its own median."""
    levels = [relative(table) for table in tables]
    return autocorrelation(np.concatenate([table - level[:, None] for table, level in levels]))


def _ask(records: Records, what: str, by_stage: Mapping[str, np.ndarray], alike: float = 0.0) -> Iterator[Question]:
    """Of nodes and of ranks; of pauses only of ranks if each node has one. by_stage: values [ranks, rounds].

    A node is as slow as the quicker half of its ranks: one slow rank does not make a slow node. What one rank measured
    for its node is asked of nodes alone.
    """
    if not by_stage:
        return
    table = np.concatenate([*by_stage.values()], axis=1)
    stages = tuple(stage for stage, values in by_stage.items() for _ in range(values.shape[1]))
    of_ranks = {rank: times for rank, times in enumerate(table) if not np.isnan(times).all()}
    of_nodes: dict[str, list[np.ndarray]] = {}
    for rank, times in of_ranks.items():
        of_nodes.setdefault(f"node {records.places[rank].node}", []).append(times)
    if what != "hesitates" or len(records.nodes) < len(records.places):
        typical = {name: np.sort(own, axis=0)[(len(own) - 1) // 2] for name, own in of_nodes.items()}
        yield Question(what, "node", typical, stages, alike=alike)
    if len(of_ranks) > len(of_nodes) or len(records.places) == len(records.nodes):
        of_names = {records.places[rank].name: times for rank, times in of_ranks.items()}
        yield Question(what, "rank", of_names, stages, alike=alike)


def _of_network(records: Records) -> Iterator[Question]:
    pairs = records.pairs()
    meetings: dict[str, list[float]] = {}
    for pair, seconds in pairs.items():
        for node in pair:
            meetings.setdefault(f"node {records.nodes[node]}", []).append(min(seconds))
    most = max(map(len, meetings.values()), default=0)
    filled = {node: times + [np.nan] * (most - len(times)) for node, times in meetings.items()}
    yield Question("network", "node", filled, ("pairs",) * most, paired=False)
    links = {f"link {records.nodes[a]} - {records.nodes[b]}": times for (a, b), times in pairs.items()}
    yield Question("network", "link", links, ("pairs",), paired=False)


def _typical(times: np.ndarray) -> float:
    """The mean of the middle half: as robust to some disturbed steps as a median, with a smaller error."""
    times = known(times)
    cut = len(times) // 4
    return float(np.mean(np.sort(times)[cut : len(times) - cut])) if len(times) else np.nan


def _lost(times: np.ndarray) -> float:
    """The share of time that single steps took beyond what steps vary by."""
    times = known(times)
    return float(np.mean(np.clip(times / _typical(times) - HESITATION, 0, None))) if len(times) else np.nan
