"""Every number that a test measured, in its unit and with its limits: from the comparison and from
the config.
"""

import itertools
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from review.acceptance.comparisons import HOST, MIN_EXCESS, VARYING
from review.acceptance.coverage import AREAS
from review.acceptance.faults import usual_parts
from review.acceptance.floors import PAIRS, SHARES, all_reduce_floor, least
from review.acceptance.journal import Reason
from review.acceptance.outliers import MIN_PEERS, OF_MEDIAN
from review.acceptance.records import Records, known, lower_median
from review.acceptance.schema import (
    ALL_NODES,
    COLLECTIVES,
    COPIES,
    LABELS,
    PARTS,
    PROBES,
    UNITS,
    Facts,
)
from review.logs.output import ReviewError, write_whole

WARN, FAIL = 0.03, 0.05  # slower by this fraction, and by more than noise explains
# Standard errors that noise may explain.
DEVIATIONS = 3.0
EVERYONE = "all ranks"
STEP, GBPS = "ms a step", "GB/s"
ALL_REDUCE = "all_reduce_perf"


_PER_UNIT = {"Tflop/s": 1e12, GBPS: 1e9}


@dataclass(frozen=True)
class Reached:
    """How much of an expected figure was reached. short: missing fraction, negative above
    expectation.
    """

    name: str
    figure: str
    expected: float
    measured: float
    short: float
    error: float
    state: str

    def reason(self) -> Reason:
        missing = (
            ""
            if self.state == "pass"
            else f", {self.short:.1%} ± {self.error:.1%} below"
        )
        message = f"{digits(self.measured)} of {digits(self.expected)} {UNITS[self.figure]} expected{missing}"
        return Reason(self.name, message, self.state, LABELS[self.figure])


def digits(value: float) -> str:
    """Four significant digits, without an exponent."""
    return f"{float(f'{value:.4g}'):,.10g}"


def settings(folder: Path) -> tuple[dict[str, float], float, Facts | None, list[str]]:
    """Expected figures of the test in this folder, seconds of its burn-in, expected parts, required
    areas.

    Raises ReviewError for an invalid config.json.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        figures = config.get("expected", {})
        expected = {name: float(figures[name]) for name in UNITS if figures.get(name)}
        seconds = float(config.get("burn_in_seconds", 0))
        parts = config.get("expected_parts")
        required = [*filter(None, config.get("required_tests", "").split(","))]
        # A test whose name is mistyped would never be missed.
        if not {*required} <= {*AREAS}:
            raise ValueError
        return expected, seconds, parts, required
    except (OSError, ValueError, TypeError, AttributeError):
        raise ReviewError(
            f"{path}: not the settings of a test; run certify.sh again"
        ) from None


def check(records: Records, expected: Mapping[str, float]) -> list[Reached]:
    """Compares measurements with the expected figures.

    One entry for each rank that falls short, or one for all ranks if most or none of them do.
    """
    reached = []
    for name, value in expected.items():
        measured = measure(records, name)
        judged = [_judge(who, name, value, rounds) for who, rounds in measured.items()]
        short = [figure for figure in judged if figure.state != "pass"]
        if short and 2 * len(short) <= len(judged):
            reached += short
        elif judged:
            # If most fall short, one line for all says more: the
            # cause is common, or the figure is wrong.
            everyone = [float(np.median(rounds)) for rounds in zip(*measured.values())]  # noqa: B905  # rounds may differ
            reached.append(_judge(EVERYONE, name, value, everyone))
    return reached


def measure(records: Records, name: str) -> dict[str, list[float]]:
    """A figure in its unit for each round, by rank or for all ranks; empty if it was not
    measured.
    """
    if name in ("parallel", "together"):
        if name not in records.stages:
            return {}
        seconds = records.by_step(name, *PARTS)
        sequences = records.by_step(name, "sequences", missing=0)
        # [ranks, rounds]
        rates = sequences.sum(axis=2) / np.nansum(seconds, axis=2, dtype=np.float64)
        if name == "together":
            return {EVERYONE: rates.sum(axis=0).tolist()}
        return dict(zip(records.names, rates.tolist(), strict=True))
    # The largest size, at which probe() has the times.
    amount = records.measured(name)["amount"].max(initial=0)
    if not amount:
        return {}
    # The fastest of each round shows the network, the others what disturbs it.
    if name == "reduce_together":
        work = bus_bandwidth(records, name, len(records.ranks))
        times = np.fmin.reduce(records.probe(name, of_equal=np.fmin))
        return {EVERYONE: (work / known(times)).tolist()}
    by_who = {}
    table = amount / records.probe(name) / _PER_UNIT[UNITS[name]]
    for info, rates in zip(records.ranks.values(), table, strict=True):
        if len(kept := known(rates)):
            who = info.name
            if name in COLLECTIVES:
                who = f"node {info.node}"
            elif name.endswith(ALL_NODES):
                who = EVERYONE
            by_who[who] = kept.tolist()
    return by_who


def floors(records: Records) -> dict[str, dict[str, float]]:
    """Lowest healthy rate of each probe by rank, by the datasheet of its GPU; none on CPUs and for
    unknown models.
    """
    limits: dict[str, dict[str, float]] = {}
    for name, info in itertools.product(SHARES, records.ranks.values()):
        # The driver knows GPUs that no rank ran on: they show how a machine connects its GPUs.
        parts = records.parts(info.node).values()
        gpus = sum(part.get("name") == info.device for part in parts)
        rate = least(name, info.device, max(gpus, records.ranks_per_node))
        if not records.on_cpus and rate:
            limits.setdefault(name, {})[info.name] = rate
    for node in records.nodes:
        largest = records.measured(ALL_REDUCE)["amount"].max(initial=0)
        if rate := all_reduce_floor(_models(records, node), largest):
            limits.setdefault(ALL_REDUCE, {})[f"node {node}"] = rate
    return limits


def _models(records: Records, node: str) -> list[str]:
    """Names of the GPUs of a node on which its ranks run; empty on CPUs."""
    ranks = [] if records.on_cpus else records.ranks.values()
    return [info.device for info in ranks if info.node == node]


def slow_all_reduces(records: Records) -> list[Reason]:
    """Nodes whose own all-reduce is slower than of any healthy one of their GPUs, by the largest
    size that is: of nccl-tests, and of the load.
    """
    times: dict[tuple[str, float, str], list[float]] = {}
    # On one node, all ranks are the node's.
    own = "reduce_node" if len(records.nodes) > 1 else "reduce_together"
    for name in (ALL_REDUCE, own):
        rows = records.measured(name)
        columns = (rows[key].tolist() for key in ("rank", "amount", "seconds"))
        for rank, size, seconds in zip(*columns, strict=True):
            node = records.ranks[rank].node
            times.setdefault((node, size, name), []).append(seconds)
    reasons: dict[tuple[str, str], Reason] = {}
    for (node, size, name), seconds in sorted(times.items()):
        gpus = _models(records, node)
        # nccl-tests' rates are of the bus; the load's are of the bytes themselves.
        share = 1.0 if name == ALL_REDUCE else 2 * (len(gpus) - 1) / max(len(gpus), 1)
        rate = share * size / statistics.median(seconds) / _PER_UNIT[GBPS]
        floor = all_reduce_floor(gpus, size)
        if floor and rate < floor:
            message = f"{digits(rate)} GB/s at {size:,.0f} bytes, at least {digits(floor)} of its GPUs"
            reasons[node, name] = Reason(f"node {node}", message, stage=LABELS[name])
    return [*reasons.values()]


def below(records: Records, limits: Mapping[str, Mapping[str, float]]) -> list[Reason]:
    """Ranks that reach less than any healthy GPU of their model."""
    reasons = []
    for name, by_rank in limits.items():
        if name == ALL_REDUCE:
            continue  # slow_all_reduces() judges every size
        measured = measure(records, name) if name != PAIRS else _typical_pairs(records)
        for who, rounds in measured.items():
            rate, limit = statistics.median(rounds), by_rank.get(who, 0.0)
            if rate < limit:
                message = f"{digits(rate)} {UNITS[name]}, at least {digits(limit)} by its datasheet"
                reasons.append(Reason(who, message, stage=LABELS[name]))
    return reasons


def _typical_pairs(records: Records) -> dict[str, list[float]]:
    """GB/s of a typical pair of each GPU by round; a slow pair alone is its link's fault."""
    _, of_gpu = records.gpu_pairs(PAIRS)
    # tools.py enters each copy as one of a GB.
    rates = {
        records.ranks[rank].name: known(1 / lower_median(own)).tolist()
        for rank, own in of_gpu.items()
    }
    return {name: by_round for name, by_round in rates.items() if by_round}


def bus_bandwidth(records: Records, name: str, size: int) -> float:
    """Bus GB moved by an all-reduce of ``size`` ranks; over its seconds, the bus bandwidth of
    nccl-tests.
    """
    # A ring all-reduce moves 2 (n - 1) / n of its bytes over
    # each link (nccl-tests, PERFORMANCE.md).
    return (
        2
        * (size - 1)
        / size
        * float(records.measured(name)["amount"][0])
        / _PER_UNIT[GBPS]
    )


def _judge(who: str, name: str, expected: float, rounds: Sequence[float]) -> Reached:
    measured = statistics.median(rounds)
    spread = statistics.stdev(rounds) if len(rounds) > 1 else 0.0
    error = OF_MEDIAN * spread / len(rounds) ** 0.5 / expected
    short = 1 - measured / expected
    return Reached(who, name, expected, measured, short, error, state_of(short, error))


def state_of(share: float, error: float) -> str:
    """pass, warn or fail for a deficit, as a fraction, with its standard error."""
    if not share > max(WARN, DEVIATIONS * error):  # true of nan too
        return "pass"
    return "fail" if share > FAIL else "warn"


def write_expectations(records: Records, path: Path) -> None:
    """Writes FILE.json, the parts of a node, and FILE.sh, which makes a test expect them and this
    one's figures.
    """
    parts = path.with_suffix(".json")
    write_whole(parts, json.dumps(usual_parts(records.hardware), indent=2) + "\n")
    inventory, rates = str(parts.resolve()), expectations(records)
    write_exports(path, EXPECTED_INVENTORY=inventory, EXPECTED_FIGURES=rates)


def write_exports(path: Path, **variables: str) -> None:
    """Writes FILE.sh, to be sourced."""
    lines = (f"export {name}={shlex.quote(own)}\n" for name, own in variables.items())
    write_whole(path.with_suffix(".sh"), "".join(lines))


def expectations(records: Records) -> str:
    """Figures of this test for EXPECTED_FIGURES: medians over ranks and rounds, to four digits."""
    rates = {
        # All ranks and rounds alike: the median is what a typical rank reaches.
        name: [value for rounds in measure(records, name).values() for value in rounds]
        for name in UNITS
    }
    return " ".join(
        f"{name}={float(f'{np.median(rounds):.4g}'):.10g}"
        for name, rounds in rates.items()
        if rounds
    )


@dataclass(frozen=True)
class Measured:
    """A measured number by rank, or of all ranks. name: a stage or probe; limits: in words."""

    name: str
    unit: str
    values: dict[str, float]
    limits: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return LABELS[self.name]

    @property
    def limit(self) -> str:
        return " and ".join(self.limits) or "no limit"

    @property
    def shown(self) -> tuple[str, str]:
        """Lowest and highest value, to four digits or hundredths of a millisecond; the first empty
        if equal.
        """
        ends = min(self.values.values()), max(self.values.values())
        low, high = (
            f"{end:,.2f}" if self.unit == STEP else digits(end) for end in ends
        )
        return (low if low != high else ""), high


def figures(
    records: Records,
    seconds: Mapping[str, np.ndarray],
    expected: Mapping[str, float],
    lowest: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> list[Measured]:
    """Seconds of each stage, then rates and probes. seconds: per step by stage [ranks]."""
    measured = []
    for stage, of_ranks in seconds.items():
        values = dict(zip(records.names, (1e3 * of_ranks).tolist(), strict=True))
        limits = _than_peers("slow", records.ranks) if stage != "pairs" else ()
        measured.append(Measured(stage, STEP, values, limits))
    for name, unit in UNITS.items():
        values = {
            who: statistics.median(rounds)
            for who, rounds in measure(records, name).items()
        }
        of_nodes = name in COLLECTIVES or name in VARYING
        limits = ()
        if name in PROBES | COLLECTIVES | COPIES:
            what = "network" if name in (*VARYING, *HOST) else "slow"
            limits = _than_peers(what, records.nodes if of_nodes else records.ranks)
        if wanted := expected.get(name):
            limits = (
                f"at least {digits((1 - FAIL) * wanted)} ({digits(wanted)} expected)",
                *limits,
            )
        if name in lowest:
            # Of the slowest model where a test mixes several: what no healthy GPU is below.
            least_of_all = digits(min(lowest[name].values()))
            limits = (*limits, f"at least {least_of_all} by the datasheet")
        if values:
            measured.append(Measured(name, unit, values, limits))
    return measured + _reductions(records)


def _than_peers(what: str, peers: Sized) -> tuple[str, ...]:
    """The limit of a comparison; none where they are too few."""
    few = len(peers) < MIN_PEERS
    message = f"at most {MIN_EXCESS[what]:.0%} slower than the median, or by chance"
    return () if few else (message,)


def _reductions(records: Records) -> list[Measured]:
    """All-reduces of each node and of pairs of nodes."""
    rows = []
    # Nodes that take part: one, or the two of a pair.
    for name, nodes in (("reduce_node", 1), ("reduce_pairs", 2)):
        if not (times := records.reductions(name)):
            continue
        rate = bus_bandwidth(records, name, nodes * records.ranks_per_node)
        values = {
            "slowest": rate / max(times),
            EVERYONE: rate / statistics.median(times),
            "quickest": rate / min(times),
        }
        limits = _than_peers("network", records.nodes) if nodes == 2 else ()
        rows.append(Measured(name, GBPS, values, limits))
    return rows
