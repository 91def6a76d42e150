"""Records of an acceptance test: certify_<node>.npz of every node, as tables by rank and round."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from review.acceptance import schema
from review.acceptance.schema import (
    ALL_NODES,
    ALONE,
    PROBES,
    STAGES,
    TOOLS,
    UNREADABLE,
    VERSION,
    Columns,
    Facts,
    RankInfo,
)
from review.logs.output import ReviewError


@dataclass(frozen=True)
class Records:
    """A whole test. steps, probes: columns; ranks: by number, in order; telemetry: by node; on_cpus:
    no GPUs; began, ended: Unix times, 0 if unknown.

    hardware: by node, its ``parts``, its devices' fault counts ``before`` and ``after``,
    ``log_before`` and ``kernel_log``, the kernel's log; tools: by node, name, version, faults and
    skipped tests of each tool. Both are empty in older records.
    """

    folder: Path
    ranks: dict[int, RankInfo]
    nodes: list[str]
    steps: Columns
    probes: Columns
    telemetry: dict[str, Columns] = field(default_factory=dict)
    on_cpus: bool = False
    began: float = 0.0
    ended: float = 0.0
    hardware: dict[str, dict[str, Any]] = field(default_factory=dict)
    tools: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def ranks_per_node(self) -> int:
        """Ranks on the largest node."""
        return max(info.local_rank for info in self.ranks.values()) + 1

    @property
    def extent(self) -> str:
        """Such as "8 ranks on 1 node"."""
        counts = {"rank": len(self.ranks), "node": len(self.nodes)}
        counted = [
            f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items()
        ]
        return " on ".join(counted) + ", on CPUs" * self.on_cpus

    @property
    def names(self) -> list[str]:
        return [info.name for info in self.ranks.values()]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Reports of other tools, of all nodes."""
        return [report for reports in self.tools.values() for report in reports]

    @property
    def stages(self) -> list[str]:
        """The stages that ran."""
        return [
            name
            for number, name in enumerate(STAGES)
            if (self.steps["stage"] == number).any()
        ]

    @property
    def probed(self) -> list[str]:
        """The parts of the load that were measured separately, and tests of other tools."""
        return [
            name
            for name in PROBES | TOOLS
            if (self.probes["probe"] == name.encode()).any()
        ]

    def of_node(self, node: str) -> list[int]:
        """Its ranks."""
        return [rank for rank, info in self.ranks.items() if info.node == node]

    def parts(self, node: str) -> Facts:
        own: Facts = self.hardware.get(node, {}).get("parts", {})
        return own

    def lacks(self, node: str, name: str) -> bool:
        """Whether a probe was measured on other nodes only."""
        ranks = {*self.measured(name)["rank"].tolist()}
        nodes = {self.ranks[rank].node for rank in ranks}
        # A test over all nodes is entered for one of them.
        return bool(nodes) and node not in nodes and not name.endswith(ALL_NODES)

    def by_step(self, stage: str, *columns: str, missing: float = np.nan) -> np.ndarray:
        """Sum of the columns in their dtype [ranks, rounds, steps]; ``missing`` for a step that was
        not taken.
        """
        # Sparse: a rank has no row for a step that it did not
        # take, such as in a round in which it rests.
        chosen = self.steps["stage"] == list(STAGES).index(stage)
        index = tuple(self.steps[name][chosen] for name in ("rank", "round", "step"))
        values: np.ndarray = sum(self.steps[name][chosen] for name in columns)
        rounds, steps = (int(numbers.max()) + 1 for numbers in index[1:])
        table = np.full((len(self.ranks), rounds, steps), missing, values.dtype)
        table[index] = values
        return table

    def seconds(self, stage: str) -> np.ndarray:
        """Seconds of each rank's own work [ranks, rounds, steps]: without the wait for others."""
        wait = ("wait",) if stage in ALONE else ()
        return self.by_step(stage, "data", "compute", "update", *wait)

    def relative(self, stage: str) -> np.ndarray:
        """``seconds``, each over the median of that step over all ranks and rounds, because steps
        differ.
        """
        seconds = self.seconds(stage).astype(np.float64)
        # [ranks, rounds, steps] over [steps]
        return seconds / np.nanmedian(seconds, axis=(0, 1))

    def measured(self, name: str) -> Columns:
        """Columns of one probe."""
        chosen = self.probes["probe"] == name.encode()
        return {column: values[chosen] for column, values in self.probes.items()}

    def by_node(self, name: str) -> Iterator[tuple[int, int, int, int, float]]:
        """(round, rank, node number, partner, seconds) of each measurement."""
        nodes = {rank: self.nodes.index(info.node) for rank, info in self.ranks.items()}
        measured = self.measured(name)
        columns = (
            measured[column].tolist()
            for column in ("round", "rank", "partner", "seconds")
        )
        for number, rank, partner, seconds in zip(*columns, strict=True):
            yield number, rank, nodes[rank], partner, seconds

    def probe(
        self, name: str, largest: float = np.inf, of_equal: np.ufunc = np.fmax
    ) -> np.ndarray:
        """Seconds of a probe at its largest size up to ``largest``, with the slowest partner, or by
        another choice of those of a round [ranks, rounds].
        """
        # At the largest size: smaller ones measure latency, not the rate.
        rows = self.measured(name)
        sizes = rows["amount"][rows["amount"] <= largest]
        chosen = rows["amount"] == sizes.max(initial=0)
        table = np.full((len(self.ranks), 1 + rows["round"].max(initial=-1)), np.nan)
        # fmax ignores the nan of cells not set yet; .at takes each row, also of equal cells.
        of_equal.at(
            table,
            (rows["rank"][chosen], rows["round"][chosen]),
            rows["seconds"][chosen],
        )
        return table

    def reductions(self, name: str) -> list[float]:
        """Seconds of an all-reduce: of each round the fastest in each node or pair of nodes, since
        the others were disturbed.
        """
        best: dict[tuple[int, frozenset[int]], float] = {}
        for number, _, node, partner, seconds in self.by_node(name):
            group = number, frozenset({node, partner})
            best[group] = min(best.get(group, seconds), seconds)
        return [*best.values()]

    def pairs(self) -> dict[tuple[int, int], list[float]]:
        """Seconds of each all-reduce between two nodes, of its fastest rank, by the numbers of the
        nodes.
        """
        times_of: dict[tuple[int, int], dict[int, list[float]]] = {}
        for _, rank, node, partner, seconds in self.by_node("reduce_pairs"):
            # Both nodes of a pair report it, each with the other as partner.
            pair = min(node, partner), max(node, partner)
            times_of.setdefault(pair, {}).setdefault(rank, []).append(seconds)
        return {
            pair: [min(times) for times in zip(*ranks.values(), strict=True)]
            for pair, ranks in sorted(times_of.items())
        }

    def gpu_pairs(
        self, probe: str
    ) -> tuple[dict[str, np.ndarray], dict[int, list[np.ndarray]]]:
        """Seconds by round of each copy between a node's GPUs, by its name, and by the ranks of
        both GPUs.
        """
        rows = self.measured(probe)
        ranks = {
            (info.node, info.local_rank): rank for rank, info in self.ranks.items()
        }
        rounds = int(rows["round"].max(initial=-1)) + 1
        pairs: dict[str, np.ndarray] = {}
        of_gpu: dict[int, list[np.ndarray]] = {}
        columns = zip(
            *(rows[name].tolist() for name in ("rank", "partner", "round", "seconds")),
            strict=True,
        )
        for rank, partner, number, seconds in columns:
            info = self.ranks[rank]
            name = f"GPU {info.local_rank} from GPU {partner} of {info.node}"
            if name not in pairs:
                pairs[name] = np.full(rounds, np.nan)
                for one in {rank, ranks.get((info.node, partner), rank)}:
                    of_gpu.setdefault(one, []).append(pairs[name])
            pairs[name][number] = seconds
        return pairs, of_gpu


def known(values: np.ndarray) -> np.ndarray:
    """Values that are not nan."""
    return values[~np.isnan(values)]


def median(values: np.ndarray) -> float:
    """Median of the values that are not nan; nan if there are none."""
    return float(np.median(known(values))) if len(known(values)) else np.nan


def lower_median(times: Sequence[np.ndarray]) -> np.ndarray:
    """Of each round over rows; nan, for what was not measured, sorts last."""
    lower: np.ndarray = np.sort(times, axis=0)[(len(times) - 1) // 2]
    return lower


def read(folder: Path) -> Records:
    """Reads all files of a test. Raises ReviewError for a missing or invalid file."""
    files = [_read(path) for path in sorted(folder.glob("certify_*.npz"))]
    if not files:
        raise ReviewError(
            f"{folder}: no certify_<node>.npz: give the folder that certify.sh or certify.sub printed"
        )
    ranks, tools, telemetry, hardware = {}, {}, {}, {}
    ended = 0.0
    for about, tables in files:
        node = about["node"]
        for info in about["ranks"]:
            ranks[info["rank"]] = RankInfo(**info | {"node": node})
        tools[node] = about.get("tools", [])
        later, samples = _burn_in(folder / f"burn_in_{node}.npz")
        telemetry[node] = _joined([tables["telemetry"], *samples])
        ended = max(ended, about.get("ended", 0.0), later.get("ended", 0.0))
        if facts := about.get("hardware"):
            # The burn-in comes last: its counts of faults are those after the test.
            last = {
                name: later[name] for name in ("after", "kernel_log") if name in later
            }
            hardware[node] = facts | last
    first, _ = files[0]
    # Every record names all nodes of its test, so that a lost one is missed.
    missing = [node for node in first["nodes"] if node not in tools]
    if missing or len(ranks) != first["size"]:
        raise ReviewError(
            f"{folder}: no record of {', '.join(missing) or 'some ranks'}: the test did not finish there"
        )
    return Records(
        folder=folder,
        ranks=dict(sorted(ranks.items())),
        nodes=first["nodes"],
        steps=_joined([tables["steps"] for _, tables in files]),
        probes=_joined([tables["probes"] for _, tables in files]),
        telemetry=telemetry,
        on_cpus=all(about["on_cpus"] for about, _ in files),
        began=min(about.get("began", 0.0) for about, _ in files),
        ended=ended,
        hardware=hardware,
        tools=tools,
    )


def _joined(tables: Sequence[Columns]) -> Columns:
    """Rows of tables that have the columns of the first."""
    return {
        name: np.concatenate([table[name] for table in tables]) for name in tables[0]
    }


def _burn_in(path: Path) -> tuple[dict[str, Any], list[Columns]]:
    """A burn-in's ``about`` and its telemetry; nothing without one."""
    if not path.exists():
        return {}, []
    try:
        about, tables = schema.read(path)
        return about, [tables["telemetry"]]
    except UNREADABLE:
        raise ReviewError(f"{path}: not a burn-in's telemetry, or truncated") from None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Columns]]:
    try:
        about, tables = schema.read(path)
        # A record that was cut off, or of another version, lacks some of what readers rely on.
        whole = about["version"] == VERSION and all(
            (
                about["size"] > 0,
                about["ranks"],
                about["nodes"],
                "on_cpus" in about,
                len(tables["steps"]["checksum"]) > 0,
                "seconds" in tables["probes"],
                "device" in tables["telemetry"],
            )
        )
    except UNREADABLE:
        whole = False
    if not whole:
        raise ReviewError(
            f"{path}: not the record of a finished test; run certify.sh again"
        )
    return about, tables
