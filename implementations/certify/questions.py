"""What an acceptance test asks of its records: who of these stands out, and in which stage."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from certify.outliers import Outlier, hesitating, relative, slow
from certify.records import ALONE, BURN_IN, Records

LEAST_EXCESS = {"slow": 0.03, "starved": 0.03, "hesitates": 0.03, "network": 0.15}  # what is less concerns nobody
SPREAD = {"slow": 0.01, "starved": 0.01, "network": 0.05}  # of healthy ones: outliers.HEALTHY_SPREAD
HESITATION = 1.25  # times its typical step: what a step takes beyond that is lost


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
