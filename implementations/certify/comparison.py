"""Who stands out among those that did the same work, in which stage, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from certify.records import Records
from certify.schema import ALONE, BURN_IN

LEAST = 4  # of fewer, nobody can say which is the odd one
LEAST_ROUNDS = 3  # of fewer, nobody can say how well one repeats
FALSE_ALARMS = 0.01  # of whole tests of healthy machines, however many comparisons they make
HEALTHY_SPREAD = 0.01  # standard deviation between healthy GPUs, as a share, where few are there to show it
PRIOR_FREEDOM = 6  # degrees of freedom that this knowledge counts for
_TO_DEVIATION = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean
LEAST_EXCESS = {"slow": 0.03, "starved": 0.03, "hesitates": 0.03, "network": 0.15}  # what is less concerns nobody
SPREAD = {"slow": 0.01, "starved": 0.01, "network": 0.05}  # of healthy ones: outliers.HEALTHY_SPREAD
HESITATION = 1.25  # times its typical step: what a step takes beyond that is lost


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
        error = (max(deviation, common) * OF_MEDIAN) ** 2 / count
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


@dataclass(frozen=True)
class Question:
    """Who of these stands out? kind: node, rank or link; values: by name and round; stages: of each round."""

    what: str
    kind: str
    values: dict[str, list[float]]
    stages: tuple[str, ...]
    paired: bool = True

    def outliers(self, comparisons: int) -> list[Outlier]:
        """Those who do. comparisons: of the whole test."""
        least = LEAST_EXCESS[self.what]
        if self.what == "hesitates":
            return hesitating(self.values, comparisons, least=least)
        return slow(self.values, comparisons, least_excess=least, spread=SPREAD[self.what], paired=self.paired)

    def ranking(self) -> dict[str, float]:
        """How much slower than their median each is, as a share, the slowest first."""
        excess = dict(zip(self.values, (relative(self.values, self.paired)[1] - 1).tolist(), strict=True))
        return dict(sorted(excess.items(), key=lambda one: -one[1]))

    def shown_in(self, name: str) -> list[str]:
        """The stages that show it: of several, those with half of their rounds or more far above the median."""
        stages = [*dict.fromkeys(self.stages)]
        if len(stages) == 1:
            return stages
        hit = np.array(self.values[name]) - np.nanmedian([*self.values.values()], axis=0) > LEAST_EXCESS[self.what]
        share = {stage: float(np.mean(hit[np.array(self.stages) == stage])) for stage in stages}
        return [stage for stage in stages if share[stage] >= 0.5] or [max(stages, key=lambda stage: share[stage])]


class Rounds:
    """What rounds of several stages say, by rank, to be asked together."""

    def __init__(self, records: Records, what: str) -> None:
        self.records, self.what = records, what
        self.stages: tuple[str, ...] = ()
        self.values: dict[int, list[float]] = {rank: [] for rank in records.places}

    def add(self, stage: str, values: Mapping[int, list[float]]) -> None:
        """values: by rank and round."""
        for rank, rounds in values.items():
            self.values[rank] += rounds
        self.stages += (stage,) * max(map(len, values.values()))

    def questions(self) -> Iterator[Question]:
        """Of nodes and of ranks; a pause is a rank's where each node has one. None where there are no rounds."""
        if not self.stages:
            return
        places = self.records.places
        if self.what != "hesitates" or len(self.records.nodes) < len(places):
            yield Question(self.what, "node", _by_node(self.records, self.values), self.stages)
        ranks = {places[rank].name: rounds for rank, rounds in self.values.items()}
        yield Question(self.what, "rank", ranks, self.stages)


def questions(records: Records, burn_in: Mapping[int, list[float]]) -> Iterator[Question]:
    """All comparisons of the test, in the order of the stages. burn_in: seconds of its steps by rank and round.

    Each stage is asked by itself, and all together: of what is small, but everywhere, more rounds are surer.
    """
    slow_anywhere, starved, lost = (Rounds(records, what) for what in ("slow", "starved", "hesitates"))
    for stage in (one for one in records.stages if one != "pairs"):  # few rounds, and `node` has asked the same
        own = records.relative(stage)
        typical = {rank: [_typical(times) for times in rounds] for rank, rounds in own.items()}
        yield from _of(records, stage, typical)
        slow_anywhere.add(stage, typical)
        lost.add(stage, {rank: [_lost(times) for times in rounds] for rank, rounds in own.items()})
        if records.on_cpus and stage in ALONE:  # what a GPU's process does on its CPUs says nothing of the GPU
            waited = records.per_cpu_second(stage)
            typical = {rank: [_typical(times) for times in rounds] for rank, rounds in waited.items()}
            yield from _of(records, stage, typical, "starved")
            starved.add(stage, typical)
    for rounds_of in (slow_anywhere, starved, lost):
        yield from rounds_of.questions()
    for probe in records.probed:
        yield from _of(records, probe, records.probe(probe))
    yield from _of_network(records)
    if set(burn_in) >= set(records.places):
        yield from _of(records, BURN_IN, {rank: burn_in[rank] for rank in records.places})


def _of(records: Records, stage: str, values: Mapping[int, list[float]], what: str = "slow") -> Iterator[Question]:
    """Who stands out in one stage."""
    rounds = Rounds(records, what)
    rounds.add(stage, values)
    return rounds.questions()


def _of_network(records: Records) -> Iterator[Question]:
    pairs = records.pairs()
    meetings: dict[str, list[float]] = defaultdict(list)
    for pair, seconds in pairs.items():
        for node in pair:
            meetings[f"node {records.nodes[node]}"].append(min(seconds))
    most = max((len(times) for times in meetings.values()), default=0)
    filled = {node: times + [np.nan] * (most - len(times)) for node, times in meetings.items()}
    yield Question("network", "node", filled, ("pairs",) * most, paired=False)
    links = {f"link {records.nodes[a]} - {records.nodes[b]}": times for (a, b), times in pairs.items()}
    yield Question("network", "link", links, ("pairs",), paired=False)


def _by_node(records: Records, values: dict[int, list[float]]) -> dict[str, list[float]]:
    """A node is as slow as the quicker half of its ranks: one slow rank does not make a slow node."""
    nodes: dict[str, list[list[float]]] = defaultdict(list)
    for rank, rounds in values.items():
        nodes[f"node {records.places[rank].node}"].append(rounds)
    return {node: [statistics.median_low(times) for times in zip(*ranks, strict=True)] for node, ranks in nodes.items()}


def _typical(times: np.ndarray) -> float:
    """The mean of the middle half: as deaf to some disturbed steps as a median, and off by less."""
    cut = len(times) // 4
    return float(np.mean(np.sort(times)[cut : len(times) - cut])) if len(times) else np.nan


def _lost(times: np.ndarray) -> float:
    """The share of time that single steps took beyond what steps vary by."""
    return float(np.mean(np.clip(times / _typical(times) - HESITATION, 0, None))) if len(times) else np.nan
