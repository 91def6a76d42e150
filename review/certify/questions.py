"""What an acceptance test asks of its records: who of these stands out, and in which stage."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from review.certify.outliers import Outlier, hesitating, relative, slow
from review.certify.records import ALONE, BURN_IN, Records

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
        """The stages that show it: of several those in which it loses time in at least half of the rounds, or most."""
        stages = [*dict.fromkeys(self.stages)]
        if len(stages) == 1:
            return stages
        above = np.array(self.values[name]) - np.nanmedian(list(self.values.values()), axis=0)
        hit = above > LEAST_EXCESS[self.what]
        share = {stage: float(np.mean(hit[np.array(self.stages) == stage])) for stage in stages}
        return [stage for stage in stages if share[stage] >= 0.5] or [max(stages, key=lambda stage: share[stage])]


def questions(records: Records, burn_in: Mapping[int, list[float]]) -> Iterator[Question]:
    """All comparisons of the test, in the order of the stages. burn_in: seconds of its steps by rank and round."""
    names = {rank: place.name for rank, place in records.places.items()}
    lost: dict[int, list[float]] = {rank: [] for rank in records.places}
    stages: list[str] = []
    for stage in (one for one in records.stages if one != "pairs"):  # few rounds, and `node` has asked the same
        own = records.relative(stage)
        typical = {rank: [_typical(times) for times in rounds] for rank, rounds in own.items()}
        of_stage = (stage,) * len(next(iter(typical.values())))
        yield Question("slow", "node", _by_node(records, typical), of_stage)
        yield Question("slow", "rank", {names[rank]: rounds for rank, rounds in typical.items()}, of_stage)
        if records.on_cpus and stage in ALONE:  # what a GPU's process does on its CPUs says nothing of the GPU
            waited = records.per_cpu_second(stage)
            typical = {rank: [_typical(times) for times in rounds] for rank, rounds in waited.items()}
            yield Question("starved", "node", _by_node(records, typical), of_stage)
            yield Question("starved", "rank", {names[rank]: rounds for rank, rounds in typical.items()}, of_stage)
        stages += of_stage
        for rank, rounds in own.items():
            lost[rank] += [_lost(times) for times in rounds]
    if len(records.nodes) < len(records.places):
        yield Question("hesitates", "node", _by_node(records, lost), tuple(stages))
    yield Question("hesitates", "rank", {names[rank]: rounds for rank, rounds in lost.items()}, tuple(stages))
    for probe in records.probed:
        times = records.probe(probe)
        of_probe = (probe,) * max(map(len, times.values()))
        yield Question("slow", "node", _by_node(records, times), of_probe)
        yield Question("slow", "rank", {names[rank]: rounds for rank, rounds in times.items()}, of_probe)
    yield from _of_network(records)
    if set(burn_in) >= set(records.places):
        of_burn_in = (BURN_IN,) * len(next(iter(burn_in.values())))
        repeated = {rank: burn_in[rank] for rank in records.places}
        yield Question("slow", "node", _by_node(records, repeated), of_burn_in)
        yield Question("slow", "rank", {names[rank]: times for rank, times in repeated.items()}, of_burn_in)


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
