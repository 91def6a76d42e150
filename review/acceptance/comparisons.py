"""What a test compares: ranks with ranks, nodes with nodes, links with links, by what they show.

Four kinds: ``slow`` (time of a round), ``starved`` (time per CPU second), ``hesitates`` (time lost
in pauses), ``network`` (all-reduces and other transfers). outliers.py judges each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from review.acceptance import outliers
from review.acceptance.outliers import MIN_PEERS, Changes, Levels, Outlier, Times
from review.acceptance.records import Records, known, lower_median
from review.acceptance.schema import ALONE, BURN_IN, COLLECTIVES, COPIES, PARTS

# Share of the false alarms that comparisons over all stages may have: they are few and clear; then of
# each stage, and of stretches of its rounds.
SHARES = {"overall": 0.7, "stage": 0.2, "stretch": 0.1}
# Smaller ones do not matter.
MIN_EXCESS = {"slow": 0.03, "starved": 0.03, "hesitates": 0.03, "network": 0.15}
# Prior standard deviation between healthy ones.
SPREAD = {"slow": 0.01, "starved": 0.01, "network": 0.05}
SPREAD_OF_CHANGE = 0.005
# Of two or three, one that is further behind the fastest is broken, whatever the reason.
GROSS = {"slow": 0.25, "starved": 1.0, "network": 1.0}
PAIRED = [name for name in COPIES if name.startswith("device_to_device")]
# Of equal GPUs, by their socket and root complex: 8 x RTX 4090 from 23.9 to 26.4 GB/s.
HOST = (
    "host_copy",
    "host_memory",
    "host_to_device_memcpy_ce",
    "device_to_host_memcpy_ce",
)
VARYING = ("disk", "disk_node", "disk_write")  # as much as a network does
STALL = 1.25  # of a typical step; time beyond it is lost


@dataclass(frozen=True)
class Comparison:
    """Nodes, ranks, pairs or links (``kind``), compared by what they show (``what``, as above).

    values: by name and round; stages: of each round; paired: the rounds of all ran at the same
    time; correlation: see RoundNoise.of; share: which of SHARES its false alarms belong to; least:
    excess that matters, if more than usual; where: what of the stage is compared, if not all.
    """

    what: str
    kind: str
    values: Times
    stages: tuple[str, ...]
    paired: bool = True
    correlation: float = 0.0
    share: str = "stage"
    least: float = 0.0
    where: str = ""

    @cached_property
    def levels(self) -> Levels:
        return Levels.of(self.values, self.paired, self.correlation)

    @property
    def spread(self) -> float:
        """Between healthy ones."""
        return SPREAD[self.what]

    def outliers(self, comparisons: float) -> list[Outlier]:
        """Single slow ones, or else a slow group. comparisons: in the whole test."""
        least = max(MIN_EXCESS[self.what], self.least)
        if self.what == "hesitates":
            return outliers.find_stalls(self.values, comparisons, min_excess=least)
        if len(self.values) >= MIN_PEERS:
            found = outliers.find_slow(
                self.levels, comparisons, min_excess=least, spread=self.spread
            ) or self._slow_group(comparisons, least)
        # Divides round by round, which only rounds of the same time allow.
        elif self.paired:
            found = outliers.slower_than_fastest(
                self.levels,
                comparisons,
                min_excess=least,
                spread=self.spread,
                gross=GROSS[self.what],
            )
        else:
            found = []
        return [replace(one, measure=one.measure + self.where) for one in found]

    def _slow_group(self, comparisons: float, least: float) -> list[Outlier]:
        # GPUs and pairs on two sockets are two groups by design; slow ones are below the floor of
        # their model.
        if {*self.stages} & {*COPIES}:
            return []
        found = outliers.find_slow_group(
            self.levels, comparisons, min_excess=least, spread=self.spread
        )
        # So may be a network of two levels.
        by_design = "pairs" in self.stages
        return [replace(one, state="warn") for one in found] if by_design else found

    def shown_in(self, name: str) -> str:
        """The stage that shows it best: in which most rounds are far above the median, the first of
        equals.
        """
        stages = [*dict.fromkeys(self.stages)]
        if len(stages) == 1 or name not in self.values:  # a group
            return stages[0]
        median = np.nanmedian([*self.values.values()], axis=0)
        far_above = np.array(self.values[name]) - median > MIN_EXCESS[self.what]
        of_stage = np.array(self.stages)
        return max(
            stages, key=lambda stage: float(np.mean(far_above[of_stage == stage]))
        )


@dataclass(frozen=True, kw_only=True)
class Stretch(Comparison):
    """How much slower each was in a part of the rounds than it usually is."""

    rounds: slice
    changes: Changes

    @cached_property
    def levels(self) -> Levels:
        return self.changes.levels(self.rounds)

    @property
    def spread(self) -> float:
        # How they differ for good cancels.
        return SPREAD_OF_CHANGE


def all_comparisons(
    records: Records, burn_in: Mapping[int, Sequence[float]]
) -> Iterator[Comparison]:
    """All comparisons of the test, in the order of the stages. burn_in: seconds of its steps by
    rank and round.

    Each stage is compared separately, and all together: a small excess in all of them is clearer
    over more rounds.
    """
    by_kind = _stages(records)
    correlation = {
        what: outliers.autocorrelation_of_all([*by_kind[what].values()])
        for what in ("slow", "starved")
        if by_kind[what]
    }
    for stage in by_kind["slow"]:
        for what in correlation:
            if stage in by_kind[what]:
                alone = {stage: by_kind[what][stage]}
                bound = correlation[what]
                yield from _per_rank_and_node(records, what, alone, correlation=bound)
    if "matmul" in records.probed:  # compute like most of a step, so its rounds join
        product = records.probe("matmul")
        by_kind["slow"]["matmul"] = product / np.nanmedian(product)
    for what, tables in by_kind.items():
        share = "overall" if what != "hesitates" else "stage"
        about = {"correlation": correlation.get(what, 0.0), "share": share}
        yield from _per_rank_and_node(records, what, tables, **about)
    for probe in records.probed:
        yield from _of_probe(records, probe)
    yield from _of_network(records)
    if set(burn_in) >= set(records.ranks):  # else the missing one would not be missed
        seconds = np.array([burn_in[rank] for rank in records.ranks])
        # Its own rounds are few or many, and few show no correlation.
        bound = correlation.get("slow", 0.0)
        table = {BURN_IN: seconds}
        yield from _per_rank_and_node(records, "slow", table, correlation=bound)


def _stages(records: Records) -> dict[str, dict[str, np.ndarray]]:
    """What the steps of each stage show, by kind and stage [ranks, rounds]."""
    by_kind: dict[str, dict[str, np.ndarray]] = {
        "slow": {},
        "starved": {},
        "hesitates": {},
    }
    # Not pairs: they have few rounds, and `node` compares the same.
    for stage in [name for name in records.stages if name != "pairs"]:
        times = records.relative(stage)  # [ranks, rounds, steps]
        by_kind["slow"][stage] = _of_steps(_typical, times)
        by_kind["hesitates"][stage] = _of_steps(_lost, times)
        # CPU time of a GPU's process says nothing about the GPU.
        if records.on_cpus and stage in ALONE:
            cpu_seconds = np.maximum(records.by_step(stage, "cpu"), 1e-6)
            per_cpu_second = records.by_step(stage, *PARTS) / cpu_seconds
            times = per_cpu_second / np.nanmedian(per_cpu_second)
            by_kind["starved"][stage] = _of_steps(_typical, times)
    return by_kind


def _of_probe(records: Records, probe: str) -> Iterator[Comparison]:
    """Comparisons of one part of the load that was measured separately."""
    if probe in PAIRED:
        yield from _of_gpu_pairs(records, probe)
    else:
        what = "network" if probe in VARYING else "slow"
        least = MIN_EXCESS["network"] if probe in HOST else 0.0
        table = {probe: records.probe(probe)}
        yield from _per_rank_and_node(records, what, table, least=least)
    if probe in COLLECTIVES:
        # Latency may be bad where bandwidth is not, and both be good where gradients' sizes are bad.
        for size in np.unique(records.measured(probe)["amount"]).tolist()[:-1]:
            table = {probe: records.probe(probe, largest=size)}
            where = f" at {size:,.0f} bytes"
            yield from _per_rank_and_node(records, "network", table, where=where)


def _of_network(records: Records) -> Iterator[Comparison]:
    """All-reduces within each node, and of pairs of nodes: of a node with any partner, with its best
    ones, of each link.

    Where half of the nodes are slow, a good one meets mostly slow partners; its best ones tell it.
    """
    # The fastest of a round shows the network; a test that ended early may lack rounds of some nodes.
    if len(records.nodes) > 1 and len(records.measured("reduce_node")["rank"]):
        times = records.probe("reduce_node", of_equal=np.fmin)
        within = {
            f"node {node}": np.fmin.reduce(times[records.of_node(node)])
            for node in records.nodes
        }
        yield Comparison("network", "node", within, ("reduce_node",) * times.shape[1])
    pairs = records.pairs()
    meetings: dict[str, list[float]] = {}
    every: dict[str, list[float]] = {}
    for pair, seconds in pairs.items():
        for node in pair:
            name = f"node {records.nodes[node]}"
            meetings.setdefault(name, []).append(min(seconds))
            every.setdefault(name, []).extend(seconds)
    most = max(map(len, meetings.values()), default=0)  # nodes meet different numbers
    filled = {
        node: times + [np.nan] * (most - len(times)) for node, times in meetings.items()
    }
    # Pairs meet one after the other, so the columns are not of the same time.
    yield Comparison("network", "node", filled, ("pairs",) * most, paired=False)
    fewest = min((len(times) // 3 for times in every.values()), default=0)
    if fewest:
        best = {node: sorted(times)[:fewest] for node, times in every.items()}
        yield Comparison("network", "node", best, ("pairs",) * fewest, paired=False)
    links = {
        f"link {records.nodes[a]} - {records.nodes[b]}": times
        for (a, b), times in pairs.items()
    }
    yield Comparison("network", "link", links, ("pairs",), paired=False)


def _of_gpu_pairs(records: Records, probe: str) -> Iterator[Comparison]:
    """Copies between a node's GPUs: of a GPU with its typical partner, then of each pair by itself.

    A GPU whose pairs are slow would make every other's slowest pair slow: the typical one tells it
    from a bad link.
    """
    pairs, of_gpu = records.gpu_pairs(probe)
    stages = (probe,) * max(map(len, pairs.values()))
    typical = {
        records.ranks[rank].name: lower_median(times)
        for rank, times in sorted(of_gpu.items())
        if len(times) > 2  # two GPUs share their only pair
    }
    if typical:
        yield Comparison("slow", "rank", typical, stages)
    yield Comparison("slow", "pair", pairs, stages)


def _per_rank_and_node(
    records: Records,
    what: str,
    by_stage: Mapping[str, np.ndarray],
    **about: Any,
) -> Iterator[Comparison]:
    """Comparisons of nodes and of ranks; of pauses only of ranks if each node has one, and of what
    takes time also by stretches of each stage. by_stage: [ranks, rounds]; about: see Comparison.

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
        of_nodes.setdefault(f"node {records.ranks[rank].node}", []).append(times)
    one_rank_a_node = len(records.ranks) == len(records.nodes)
    compared: dict[str, Times] = {}
    if what != "hesitates" or not one_rank_a_node:
        compared["node"] = {node: lower_median(rows) for node, rows in of_nodes.items()}
    if len(of_ranks) > len(of_nodes) or one_rank_a_node:
        compared["rank"] = {
            records.ranks[rank].name: times for rank, times in of_ranks.items()
        }
    for kind, values in compared.items():
        whole = Comparison(what, kind, values, stages, **about)
        yield whole
        # Elsewhere a third of the rounds is other load, another part of the disk, another stage.
        if what == "slow" and whole.share == "stage":
            yield from _stretches(whole)


def _stretches(whole: Comparison) -> Iterator[Stretch]:
    """Thirds of the rounds."""
    count = len(whole.stages)
    if not (parts := outliers.stretches(count)):
        return
    changes = Changes(whole.values, whole.correlation)
    for part in parts:
        yield Stretch(
            whole.what,
            whole.kind,
            whole.values,
            whole.stages,
            correlation=whole.correlation,
            share="stretch",
            # What comes or goes, as clocks do, matters if it is clear.
            least=max(outliers.MIN_GAP, whole.least),
            where=f" in rounds {part.start + 1} to {part.stop} of {count}",
            rounds=part,
            changes=changes,
        )


def _of_steps(
    summary: Callable[[np.ndarray], np.ndarray], times: np.ndarray
) -> np.ndarray:
    """A summary of the known steps of each round: [ranks, rounds] of [ranks, rounds, steps]."""
    # All rounds at once where none lacks a step, as most do: several times faster.
    if not np.isnan(times).any():
        return summary(times)
    return np.apply_along_axis(lambda own: summary(known(own)), 2, times)


def _mean(values: np.ndarray) -> np.ndarray:
    """Over the last axis; nan of nothing."""
    empty = np.full(values.shape[:-1], np.nan)
    return np.asarray(np.mean(values, axis=-1)) if values.shape[-1] else empty


def _typical(times: np.ndarray) -> np.ndarray:
    """Mean of the middle half: robust to a few disturbed steps like a median, with a smaller
    error.
    """
    count = times.shape[-1]
    cut = count // 4
    return _mean(np.sort(times)[..., cut : count - cut])


def _lost(times: np.ndarray) -> np.ndarray:
    """Fraction of time lost in steps beyond STALL of the typical one."""
    beyond = times / _typical(times)[..., None] - STALL
    return _mean(np.clip(beyond, 0, None))
