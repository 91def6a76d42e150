"""Statistics: which ranks, nodes or links stand out among those that did the same work, and with
what confidence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from review.acceptance.records import Records, known
from review.acceptance.schema import ALONE, BURN_IN, COLLECTIVES, COPIES, PARTS

MIN_PEERS = 4  # to tell which one is odd
MIN_ROUNDS = 3  # to estimate repeatability
FALSE_ALARMS = (
    0.01  # per whole test of healthy machines, whatever the number of comparisons
)
OVERALL = 0.7  # share of them that the comparisons over all stages may have: they are few and clear
PRIOR_FREEDOM = 10  # degrees of freedom of the prior SPREAD
MIN_GAP = 0.05  # between two groups; two bins of clocks may lie 3% apart
AUTOCORRELATIONS = np.linspace(0, 0.95, 96)
_TO_DEVIATION = (
    1.4826  # median absolute deviation to standard deviation, of a normal distribution
)
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean
MIN_EXCESS = {
    "slow": 0.03,
    "starved": 0.03,
    "hesitates": 0.03,
    "network": 0.15,
}  # smaller ones do not matter
SPREAD = {
    "slow": 0.01,
    "starved": 0.01,
    "network": 0.05,
}  # prior standard deviation between healthy ones
PAIRED = [name for name in COPIES if name.startswith("device_to_device")]
VARYING = ("disk", "disk_node")  # as much as a network does
SMALL_MESSAGE = 1 << 15  # bytes of an all-reduce that take as long as an empty one
HESITATION = 1.25  # of a typical step; time beyond it is lost


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


def slow(
    values: Mapping[str, Sequence[float]],
    comparisons: float,
    *,
    min_excess: float,
    spread: float = SPREAD["slow"],
    paired: bool = True,
    correlation: float = 0.0,
) -> list[Outlier]:
    """Those far above the others, the farthest first. Fewer than MIN_PEERS are compared with the
    fastest (``behind``).

    values: by name and round, nan where missing. paired: the rounds ran at the same time, so that
    common disturbances cancel. comparisons: in the whole test, these included (Bonferroni).
    correlation: lower bound of the autocorrelation of rounds, estimated over the whole test because
    a few rounds show it badly.

    Model: round j of healthy i lies at 1 + b_i + e_ij relative to the median over all. What is
    tested is (level_i - 1) / sqrt(B + E_i) against Student's quantile, where level_i is the median
    of i's rounds,

    - B estimates the variance of b, between healthy ones (``_variance_between``),
    - E_i estimates the variance of level_i by its rounds' noise e (``_Noise``),
    - the degrees of freedom are those of the sum of both (Welch-Satterthwaite): many rounds
    estimate noise well, few
      ranks estimate their spread badly.
    """
    from scipy.stats import t  # slow to import, and only needed here

    # behind() divides round by round, which only rounds of the same time allow.
    if len(values) < MIN_PEERS:
        return (
            behind(values, comparisons, min_excess=min_excess, spread=spread)
            if paired
            else []
        )
    # [names, rounds], [names]
    table, level = relative(np.array([*values.values()], np.float64), paired)
    if table.shape[1] < MIN_ROUNDS:
        return []
    noise = _Noise(table - level[:, None], correlation)
    between, freedom = _variance_between(level, spread)
    found = []
    for number, (name, value) in enumerate(zip(values, level.tolist(), strict=True)):
        error, of_rounds = noise.of_level(number)
        deviations = (value - 1) / math.sqrt(between + error)
        sum_freedom = (between + error) ** 2 / (
            between**2 / freedom + error**2 / of_rounds
        )
        chance = float(t.sf(deviations, sum_freedom)) * comparisons
        # Surely above the others, and by enough to matter.
        if chance < FALSE_ALARMS and value - 1 > min_excess:
            found.append(
                Outlier(name, value - 1, f"{deviations:.0f} deviations", chance)
            )
    return sorted(found, key=lambda one: -one.excess)


def _variance_between(level: np.ndarray, spread: float) -> tuple[float, float]:
    """Variance between healthy ones and its degrees of freedom.

    A weighted mean of the prior, ``spread`` squared with PRIOR_FREEDOM, and of the median absolute
    deviation, which half of the levels determine (moderated variance, Smyth 2004).
    """
    seen = len(level) // 2 - 1
    freedom = PRIOR_FREEDOM + seen
    deviation = float(_deviation(level, 1.0, axis=0))
    return (PRIOR_FREEDOM * spread**2 + seen * deviation**2) / freedom, freedom


class _Noise:
    """Repeatability: how far the median of one's rounds strays by their noise alone."""

    def __init__(self, errors: np.ndarray, correlation: float) -> None:
        """errors: distance of each round to the median of its name's rounds [names, rounds], nan
        where missing.
        """
        self.rounds = np.maximum(np.sum(~np.isnan(errors), axis=1), 1)
        self.correlation = max(correlation, autocorrelation(errors))
        self.own = _deviation(errors, 0.0, axis=1)
        # Standard deviation of all rounds, outliers clipped.
        limit = 3 * _TO_DEVIATION * float(np.nanmedian(np.abs(errors)))
        clipped = np.clip(known(errors), -limit, limit)
        self.common_freedom = max(len(clipped) - len(errors), 1)
        self.common = math.sqrt(float(np.sum(clipped**2)) / self.common_freedom)

    def of_level(self, number: int) -> tuple[float, float]:
        """Variance of the median of one's rounds, and its degrees of freedom.

        Correlated rounds carry less information, and vary less about their own median: with
        autocorrelation r^k at lag k the mean of n has the share (1 + 2 sum (1 - k/n) r^k) / n of a
        round's variance (Bayley and Hammersley 1946), and about it they show 1 minus that share.
        The median's error is OF_MEDIAN times the mean's; for correlated rounds that is too much,
        which makes up for an autocorrelation that few rounds show badly.
        """
        count = int(self.rounds[number])
        # One round tells nothing about its noise: an error of 100%, which nobody exceeds.
        if count == 1:
            return 1.0, 1.0
        kept = (1 - self.correlation) / (
            1 + self.correlation
        )  # independent rounds for each one
        common, own = (max(n * kept, 1) for n in (self.common_freedom, count - 1))
        noise, freedom = self.common, common
        if self.own[number] > self.common:  # whichever is worse
            noise, freedom = float(self.own[number]), own
        lags = np.arange(1, count)
        share = (1 + 2 * float((1 - lags / count) @ self.correlation**lags)) / count
        error = (OF_MEDIAN * noise) ** 2 * (1 - 1 / count) * share / (1 - share)
        return error, freedom


def groups(
    values: Mapping[str, Sequence[float]],
    comparisons: float,
    *,
    spread: float,
    paired: bool = True,
) -> list[Outlier]:
    """Two groups, at least MIN_GAP apart: the slow one, as a single finding with its members'
    names.

    Where half are slow, no median tells them from the others. Levels in ascending order are cut
    where the variance within both sides is smallest; the fast side has at least a quarter, the slow
    one two. Under the hypothesis that all are alike any fixed split has a t statistic of its two
    means; the bound multiplies its chance by the number of all splits, 2^(n-1), so that the choice
    of the best one is paid for. The variance within is moderated by ``spread``.
    """
    from scipy.stats import t

    if len(values) < MIN_PEERS:
        return []
    table, level = relative(np.array([*values.values()], np.float64), paired)
    order = np.argsort(level)
    ranked, count = level[order], len(level)
    within, cut = min(
        (_squares(ranked[:cut]) + _squares(ranked[cut:]), cut)
        for cut in range(-(-count // 4), count - 1)
    )
    fast, slow_ones = ranked[:cut], ranked[cut:]
    gap = float(np.mean(slow_ones) / np.mean(fast)) - 1
    nearest = (
        float(slow_ones[0] / fast[-1]) - 1
    )  # no gap: a wide spread, not two groups
    if gap < MIN_GAP or nearest < MIN_GAP / 2 or table.shape[1] < MIN_ROUNDS:
        return []
    freedom = PRIOR_FREEDOM + count - 2
    noise = _Noise(table - level[:, None], 0.0)
    # The noisiest one's, since its level may lie on either side by chance.
    prior = spread**2 + max(noise.of_level(number)[0] for number in range(count))
    deviation = math.sqrt((PRIOR_FREEDOM * prior + within) / freedom)
    distance = float(np.mean(slow_ones) - np.mean(fast)) / deviation
    statistic = distance / math.sqrt(1 / cut + 1 / (count - cut))
    # log sf(x) <= log pdf(x) + log((1 + x^2/v) / (x (v - 1) / v)), which does not underflow.
    tail = (1 + statistic**2 / freedom) * freedom / (statistic * (freedom - 1))
    log_chance = float(t.logpdf(statistic, freedom)) + math.log(tail * comparisons)
    log_chance += (count - 1) * math.log(2)
    if log_chance >= math.log(FALSE_ALARMS):
        return []
    names = [[*values][number] for number in order[cut:].tolist()]
    who = f"{len(names)} of {count}: {', '.join(names)}"
    measure = f"two groups, the other {cut} within {float(fast[-1] / fast[0] - 1):.1%}"
    return [Outlier(who, gap, measure, math.exp(log_chance))]


def members(name: str) -> list[str]:
    """Names of a group, or the one name."""
    return (
        name.partition(" of ")[2].partition(": ")[2].split(", ")
        if ": " in name
        else [name]
    )


def _squares(values: np.ndarray) -> float:
    """Sum of the squared distances to the mean."""
    return float(np.sum((values - np.mean(values)) ** 2))


def behind(
    values: Mapping[str, Sequence[float]],
    comparisons: float,
    *,
    min_excess: float,
    spread: float,
) -> list[Outlier]:
    """Among too few for a majority: those surely slower than the fastest by more than
    ``min_excess``, as warnings.

    Healthy ones are assumed to differ by ``spread``. The confidence level of the interval is that
    of a whole test.
    """
    from scipy.stats import t

    table = np.array([*values.values()], np.float64)
    fastest = int(np.argmin(np.nanmedian(table, axis=1)))
    found = []
    for name, ratios in zip(values, table / table[fastest], strict=True):
        rounds, excess = known(ratios), float(np.nanmedian(ratios)) - 1
        if len(rounds) >= MIN_ROUNDS and excess > min_excess:
            repeats = (OF_MEDIAN * float(np.std(rounds, ddof=1))) ** 2 / len(rounds)
            # Both differ from a typical one, each by its own deviation.
            between = 2 * spread**2
            freedom = (
                (between + repeats) ** 2 * (len(rounds) - 1) / max(repeats**2, 1e-30)
            )
            error = math.sqrt(between + repeats)
            half = float(t.isf(FALSE_ALARMS / comparisons, freedom)) * error
            if excess - half > min_excess:
                chance = float(t.sf(excess / error, freedom)) * comparisons
                measure = f"{excess - half:.1%} to {excess + half:.1%} behind {[*values][fastest]}"
                found.append(Outlier(name, excess, measure, chance, "warn"))
    return found


def relative(table: np.ndarray, paired: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Values [names, rounds] and their medians over rounds [names], relative to the median of all
    names.
    """
    if paired:
        table = table / np.nanmedian(table, axis=0)
    level = np.nanmedian(table, axis=1)
    # Again by the median of the levels, which need not be 1 after the first division.
    return table / np.median(level), level / np.median(level)


def hesitating(
    lost: Mapping[str, Sequence[float]], comparisons: float, *, least: float
) -> list[Outlier]:
    """Those that lose time in more rounds than the others, the worst first.

    lost: fraction of each round's time, nan where missing; its excess over the round's median
    counts. Pauses are rare and of any length, so no distribution is assumed: among equals, rounds
    that lost more than ``least`` are spread at random, and the number of one's own is
    hypergeometric (Fisher's exact test). A long pause counts as one round.
    """
    from scipy.stats import hypergeom  # slow to import, and only needed here

    if len(lost) < MIN_PEERS:
        return []
    table = np.array([*lost.values()], np.float64)
    table = table - np.nanmedian(table, axis=0)
    rounds, hit = np.sum(~np.isnan(table), axis=1), np.sum(table > least, axis=1)
    # sf(k) is the chance of more than k.
    chances = hypergeom.sf(hit - 1, rounds.sum(), hit.sum(), rounds) * comparisons
    found = [
        Outlier(name, excess, f"in {own} of {count} rounds", chance)
        for name, excess, own, count, chance in zip(
            lost,
            np.nanmean(table, axis=1).tolist(),
            hit.tolist(),
            rounds.tolist(),
            chances.tolist(),
            strict=True,
        )
        if chance < FALSE_ALARMS and excess > least
    ]
    return sorted(found, key=lambda one: -one.excess)


def autocorrelation(errors: np.ndarray) -> float:
    """Lag-1 autocorrelation of rounds, 0 to 0.95, from their distances to their own median [names,
    rounds].

    Short series show too little of it, which is corrected by inverting the expected value. Half a
    standard error is subtracted, so that independent rounds count in full.
    """
    rounds, square = errors.shape[1], float(np.nanmean(errors**2))
    if rounds <= MIN_ROUNDS or square == 0:
        return 0.0
    found = (
        float(np.nanmean(errors[:, 1:] * errors[:, :-1])) / square
        - 0.5 / known(errors).size ** 0.5
    )
    return float(np.interp(found, _expected(rounds), AUTOCORRELATIONS))


@functools.cache
def _expected(rounds: int) -> np.ndarray:
    """Autocorrelation that a series of ``rounds`` shows about its own mean, for each of
    AUTOCORRELATIONS.
    """
    # Takes the mean off a series [rounds, rounds]; from what remains, the traces give the
    # covariance at lag 1 and the variance.
    centered = np.eye(rounds) - 1 / rounds
    apart = np.abs(np.subtract.outer(np.arange(rounds), np.arange(rounds)))
    shown = [
        centered @ correlation**apart @ centered for correlation in AUTOCORRELATIONS
    ]
    return np.array(
        [np.trace(one, 1) / (rounds - 1) / (np.trace(one) / rounds) for one in shown]
    )


def _deviation(table: np.ndarray, center: np.ndarray | float, axis: int) -> np.ndarray:
    return _TO_DEVIATION * np.nanmedian(np.abs(table - center), axis=axis)


@dataclass(frozen=True)
class Question:
    """A comparison. what: slow, starved, hesitates or network; kind: node, rank or link; values: by
    name and round; stages: of each round; overall: of all stages together, the clearest.
    """

    what: str
    kind: str
    values: Mapping[str, Sequence[float]]
    stages: tuple[str, ...]
    paired: bool = True
    correlation: float = 0.0
    overall: bool = False

    def outliers(self, comparisons: float) -> list[Outlier]:
        """Single ones, then groups that they do not explain. comparisons: in the whole test."""
        least = MIN_EXCESS[self.what]
        if self.what == "hesitates":
            return hesitating(self.values, comparisons, least=least)
        spread = SPREAD[self.what]
        found = slow(
            self.values,
            comparisons,
            min_excess=least,
            spread=spread,
            paired=self.paired,
            correlation=self.correlation,
        )
        # GPUs and pairs on two sockets are two groups by design; so are networks of two levels.
        if found or self.what == "network" or {*self.stages} & {*COPIES}:
            return found
        return groups(self.values, comparisons, spread=spread, paired=self.paired)

    def shown_in(self, name: str) -> str:
        """The stage that shows it best: in which most rounds are far above the median, the first of
        equals.
        """
        stages = [*dict.fromkeys(self.stages)]
        if len(stages) == 1 or name not in self.values:  # a group
            return stages[0]
        excess = np.array(self.values[name]) - np.nanmedian(
            [*self.values.values()], axis=0
        )
        hit, of_stage = excess > MIN_EXCESS[self.what], np.array(self.stages)
        return max(stages, key=lambda stage: float(np.mean(hit[of_stage == stage])))


def questions(
    records: Records, burn_in: Mapping[int, Sequence[float]]
) -> Iterator[Question]:
    """All comparisons of the test, in the order of the stages. burn_in: seconds of its steps by
    rank and round.

    Each stage is compared separately, and all together: a small excess in all of them is clearer
    over more rounds.
    """
    everywhere: dict[str, dict[str, np.ndarray]] = {
        "slow": {},
        "starved": {},
        "hesitates": {},
    }
    # Not pairs: they have few rounds, and `node` compares the same.
    for stage in [one for one in records.stages if one != "pairs"]:
        own = records.relative(stage)
        everywhere["slow"][stage] = np.apply_along_axis(_typical, 2, own)
        everywhere["hesitates"][stage] = np.apply_along_axis(_lost, 2, own)
        # CPU time of a GPU's process says nothing about the GPU.
        if records.on_cpus and stage in ALONE:
            cpu_seconds = np.maximum(records.by_step(stage, "cpu"), 1e-6)
            per_cpu_second = records.by_step(stage, *PARTS) / cpu_seconds
            relative_time = per_cpu_second / np.nanmedian(per_cpu_second)
            everywhere["starved"][stage] = np.apply_along_axis(
                _typical, 2, relative_time
            )
    correlation = {
        what: of_all([*everywhere[what].values()])
        for what in ("slow", "starved")
        if everywhere[what]
    }
    for stage in everywhere["slow"]:
        for what in correlation:
            if stage in everywhere[what]:
                yield from _ask(
                    records, what, {stage: everywhere[what][stage]}, correlation[what]
                )
    if "matmul" in records.probed:  # compute like most of a step, so its rounds join
        product = records.probe("matmul")
        everywhere["slow"]["matmul"] = product / np.nanmedian(product)
    for what, by_stage in everywhere.items():
        yield from _ask(
            records, what, by_stage, correlation.get(what, 0.0), what != "hesitates"
        )
    for probe in records.probed:
        if probe in PAIRED:
            yield from _of_gpu_pairs(records, probe)
        else:
            what = "network" if probe in VARYING else "slow"
            yield from _ask(records, what, {probe: records.probe(probe)})
        if probe in COLLECTIVES:  # latency may be bad where bandwidth is not
            small = records.probe(probe, largest=SMALL_MESSAGE)
            yield from _ask(records, "network", {probe: small})
    yield from _of_network(records)
    if set(burn_in) >= set(records.places):  # else the missing one would not be missed
        seconds = np.array([burn_in[rank] for rank in records.places])
        yield from _ask(records, "slow", {BURN_IN: seconds})


def of_all(tables: Sequence[np.ndarray]) -> float:
    """Autocorrelation of the rounds of all stages [ranks, rounds], each about its own median."""
    levels = [relative(table) for table in tables]
    return autocorrelation(
        np.concatenate([table - level[:, None] for table, level in levels])
    )


def _of_network(records: Records) -> Iterator[Question]:
    """All-reduces of pairs of nodes: of a node with any partner, then of each link."""
    pairs = records.pairs()
    meetings: dict[str, list[float]] = {}
    for pair, seconds in pairs.items():
        for node in pair:
            meetings.setdefault(f"node {records.nodes[node]}", []).append(min(seconds))
    most = max(map(len, meetings.values()), default=0)  # nodes meet different numbers
    filled = {
        node: times + [np.nan] * (most - len(times)) for node, times in meetings.items()
    }
    yield Question(
        "network", "node", filled, ("pairs",) * most, paired=False
    )  # at other times
    links = {
        f"link {records.nodes[a]} - {records.nodes[b]}": times
        for (a, b), times in pairs.items()
    }
    yield Question("network", "link", links, ("pairs",), paired=False)


def _of_gpu_pairs(records: Records, probe: str) -> Iterator[Question]:
    """Copies between a node's GPUs: of a GPU with its typical partner, then of each pair by itself.

    A GPU whose pairs are slow would make every other's slowest pair slow: the typical one tells it
    from a bad link.
    """
    rows = records.measured(probe)
    places = {
        (place.node, place.local_rank): place for place in records.places.values()
    }
    rounds = int(rows["round"].max(initial=-1)) + 1
    pairs: dict[str, np.ndarray] = {}
    of_gpu: dict[int, list[np.ndarray]] = {}
    columns = zip(
        *(rows[name].tolist() for name in ("rank", "partner", "round", "seconds")),
        strict=True,
    )
    for rank, partner, number, seconds in columns:
        place = records.places[rank]
        name = f"GPU {place.local_rank} from GPU {partner} of {place.node}"
        if name not in pairs:
            pairs[name] = np.full(rounds, np.nan)
            peer = places.get((place.node, partner))
            for one in (rank, *([peer.rank] if peer else [])):
                of_gpu.setdefault(one, []).append(pairs[name])
        pairs[name][number] = seconds
    # The lower median of each round [pairs, rounds]: nan, for a copy not made, sorts last.
    typical = {
        records.places[rank].name: np.sort(own, axis=0)[(len(own) - 1) // 2]
        for rank, own in sorted(of_gpu.items())
        if len(own) > 2  # two GPUs share their only pair
    }
    if typical:
        yield Question("slow", "rank", typical, (probe,) * rounds)
    of_pairs = {name: times.tolist() for name, times in pairs.items()}
    yield Question("slow", "pair", of_pairs, (probe,) * rounds)


def _ask(
    records: Records,
    what: str,
    by_stage: Mapping[str, np.ndarray],
    correlation: float = 0.0,
    overall: bool = False,
) -> Iterator[Question]:
    """Comparisons of nodes and of ranks; of pauses only of ranks if each node has one. by_stage:
    [ranks, rounds].

    A node is as slow as the faster half of its ranks: one slow rank does not make a slow node.
    Measurements of one rank for its node are compared between nodes only.
    """
    if not by_stage:
        return
    table = np.concatenate([*by_stage.values()], axis=1)
    stages = tuple(
        stage for stage, values in by_stage.items() for _ in range(values.shape[1])
    )
    of_ranks = {
        rank: times for rank, times in enumerate(table) if not np.isnan(times).all()
    }
    if not of_ranks:  # no message of this size
        return
    of_nodes: dict[str, list[np.ndarray]] = {}
    for rank, times in of_ranks.items():
        of_nodes.setdefault(f"node {records.places[rank].node}", []).append(times)
    if what != "hesitates" or len(records.nodes) < len(records.places):
        typical = {
            name: np.sort(own, axis=0)[(len(own) - 1) // 2]
            for name, own in of_nodes.items()
        }
        yield Question(
            what, "node", typical, stages, correlation=correlation, overall=overall
        )
    if len(of_ranks) > len(of_nodes) or len(records.places) == len(records.nodes):
        of_names = {
            records.places[rank].name: times for rank, times in of_ranks.items()
        }
        yield Question(
            what, "rank", of_names, stages, correlation=correlation, overall=overall
        )


def _typical(times: np.ndarray) -> float:
    """Mean of the middle half: robust to a few disturbed steps like a median, with a smaller
    error.
    """
    times = known(times)
    cut = len(times) // 4
    return (
        float(np.mean(np.sort(times)[cut : len(times) - cut])) if len(times) else np.nan
    )


def _lost(times: np.ndarray) -> float:
    """Fraction of time lost in steps beyond HESITATION of the typical one."""
    times = known(times)
    if not len(times):
        return np.nan
    return float(np.mean(np.clip(times / _typical(times) - HESITATION, 0, None)))
