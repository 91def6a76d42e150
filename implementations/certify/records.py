"""What an acceptance test left in its folder: certify_<node>.npz of every node, read into tables by rank and round."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from certify.schema import ALONE, PARTS, PROBES, STAGES, VERSION
from review.logs.output import ReviewError

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Place:
    """Where a rank is, and what it runs on."""

    rank: int
    local_rank: int
    node: str
    device: str

    @property
    def name(self) -> str:
        """As the verdict calls it."""
        return f"rank {self.rank} on {self.node}"


@dataclass(frozen=True)
class Records:
    """The whole test. steps, probes: a column an array; places: by rank; nodes: by number; on_cpus: without GPUs."""

    folder: Path
    places: dict[int, Place]
    nodes: list[str]
    steps: Columns
    probes: Columns
    telemetry: dict[str, Columns] = field(default_factory=dict)
    on_cpus: bool = False

    @property
    def ranks_per_node(self) -> int:
        """Of the largest node."""
        return max(place.local_rank for place in self.places.values()) + 1

    @property
    def stages(self) -> list[str]:
        """Those that ran."""
        return [name for number, name in enumerate(STAGES) if (self.steps["stage"] == number).any()]

    @property
    def probed(self) -> list[str]:
        """Parts of the load that ran by themselves."""
        return [name for name in PROBES if (self.probes["probe"] == name.encode()).any()]

    def probe(self, name: str) -> dict[int, list[float]]:
        """Seconds of a part of the load by itself, by rank and round."""
        chosen = self.probes["probe"] == name.encode()
        found: dict[int, list[float]] = {rank: [] for rank in self.places}
        order = np.argsort(self.probes["round"][chosen], kind="stable")
        columns = (self.probes[column][chosen][order].tolist() for column in ("rank", "seconds"))
        for rank, seconds in zip(*columns, strict=True):
            found[rank].append(seconds)
        return found

    def of(self, stage: str) -> Columns:
        """The steps of a stage."""
        chosen = self.steps["stage"] == list(STAGES).index(stage)
        return {name: column[chosen] for name, column in self.steps.items()}

    def seconds(self, stage: str, whole: bool = False) -> dict[int, list[np.ndarray]]:
        """A rank's own seconds of each step, by round: without what it waited for others, where there are others.

        whole: with it.
        """
        steps = self.of(stage)
        own = steps["data"] + steps["compute"] + steps["update"] + (steps["wait"] if whole or stage in ALONE else 0)
        return self._by_round(steps, own)

    def _by_round(self, steps: Columns, values: np.ndarray) -> dict[int, list[np.ndarray]]:
        """What belongs to each rank and round, step by step. steps, values: rows and a value of each."""
        rounds = int(steps["round"].max()) + 1
        place = steps["rank"].astype(np.int64) * rounds + steps["round"]
        order = np.lexsort((steps["step"], place))
        ends = np.searchsorted(place[order], np.arange(1, len(self.places) * rounds))
        parts = np.split(values[order], ends)
        return {rank: parts[rank * rounds : (rank + 1) * rounds] for rank in self.places}

    def per_cpu_second(self, stage: str) -> dict[int, list[np.ndarray]]:
        """Seconds of each step for each second that the process had of CPUs, over the median of all."""
        steps = self.of(stage)
        times = sum(steps[part] for part in PARTS) / np.maximum(steps["cpu"], 1e-6)
        return self._by_round(steps, times / np.median(times))

    def relative(self, stage: str) -> dict[int, list[np.ndarray]]:
        """The same seconds, each over the median of that step over all ranks and rounds: no two steps are alike."""
        seconds = self.seconds(stage)
        longest = max(len(times) for rounds in seconds.values() for times in rounds)
        table = np.full((len(seconds), len(next(iter(seconds.values()))), longest), np.nan)
        for rank, rounds in enumerate(seconds.values()):
            for number, times in enumerate(rounds):
                table[rank, number, : len(times)] = times
        typical = np.nanmedian(table, axis=(0, 1))
        return {rank: [times / typical[: len(times)] for times in rounds] for rank, rounds in seconds.items()}

    def rates(self, stage: str) -> dict[int, list[float]]:
        """A rank's sequences per second, by round; empty where the stage did not run."""
        steps = self.of(stage)
        if not len(steps["rank"]):
            return {}
        total = steps["data"] + steps["compute"] + steps["wait"] + steps["update"]
        rounds = int(steps["round"].max()) + 1
        found: dict[int, list[float]] = {}
        for rank in self.places:
            chosen = [(steps["rank"] == rank) & (steps["round"] == number) for number in range(rounds)]
            found[rank] = [float(steps["sequences"][one].sum() / total[one].sum()) for one in chosen]
        return found

    def waits(self, stage: str) -> dict[int, float]:
        """Median seconds a step that a rank waits for others and for the network."""
        steps = self.of(stage)
        return {rank: float(np.median(steps["wait"][steps["rank"] == rank])) for rank in self.places}

    def _node_of(self) -> dict[int, int]:
        """The number of each rank's node."""
        return {rank: self.nodes.index(place.node) for rank, place in self.places.items()}

    def reductions(self, name: str) -> dict[int, list[float]]:
        """Seconds of an all-reduce by round: the quickest of each group that did it. Others show what disturbs it."""
        own, chosen = self._node_of(), self.probes["probe"] == name.encode()
        columns = (self.probes[column][chosen].tolist() for column in ("round", "rank", "partner", "seconds"))
        found: dict[int, dict[frozenset[int], float]] = {}
        for number, rank, partner, seconds in zip(*columns, strict=True):
            group = frozenset() if name == "reduce_together" else frozenset({own[rank], partner})
            best = found.setdefault(number, {})
            best[group] = min(best.get(group, seconds), seconds)
        return {number: [*best.values()] for number, best in sorted(found.items())}

    def pairs(self) -> dict[tuple[int, int], list[float]]:
        """Seconds of each all-reduce of every pair of nodes that met, by their numbers: those of its quickest rank."""
        own = self._node_of()
        chosen = (self.probes["probe"] == b"reduce_pairs") & (self.probes["partner"] >= 0)
        columns = (self.probes[name][chosen].tolist() for name in ("rank", "partner", "seconds"))
        found: dict[tuple[int, int], dict[int, list[float]]] = {}
        for rank, partner, seconds in zip(*columns, strict=True):
            pair = min(own[rank], partner), max(own[rank], partner)
            found.setdefault(pair, {}).setdefault(rank, []).append(seconds)
        return {
            pair: [min(times) for times in zip(*ranks.values(), strict=True)] for pair, ranks in sorted(found.items())
        }


def read(folder: Path) -> Records:
    """All files of a test. Raises ReviewError where one is missing or is none."""
    paths = sorted(folder.glob("certify_*.npz"))
    if not paths:
        raise ReviewError(f"{folder}: no certify_<node>.npz: give the folder that certify.sh or certify.sub named")
    files = [_read(path) for path in paths]
    nodes: list[str] = files[0][0]["nodes"]
    places = {
        one["rank"]: Place(one["rank"], one["local_rank"], about["node"], one["device"])
        for about, _ in files
        for one in about["ranks"]
    }
    missing = [node for node in nodes if node not in {about["node"] for about, _ in files}]
    if missing or len(places) != files[0][0]["size"]:
        raise ReviewError(f"{folder}: nothing of {', '.join(missing) or 'some ranks'}: the test did not end there")
    tables = {
        table: {
            name.partition(".")[2]: np.concatenate([columns[name] for _, columns in files])
            for name in files[0][1]
            if name.startswith(f"{table}.")
        }
        for table in ("steps", "probes")
    }
    telemetry = {about["node"]: _telemetry(folder, about["node"], columns) for about, columns in files}
    on_cpus = all(about["on_cpus"] for about, _ in files)
    return Records(folder, dict(sorted(places.items())), nodes, tables["steps"], tables["probes"], telemetry, on_cpus)


def _telemetry(folder: Path, node: str, columns: Columns) -> Columns:
    """The samples of a node, with those of its burn-in behind."""
    samples = {name.partition(".")[2]: column for name, column in columns.items() if name.startswith("telemetry.")}
    path = folder / f"burn_in_{node}.npz"
    if not path.exists():
        return samples
    try:
        with np.load(path) as file:
            return {name: np.concatenate([column, file[f"telemetry.{name}"]]) for name, column in samples.items()}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        raise ReviewError(f"{path}: no telemetry of a burn-in; it was cut short or is another file") from None


def _read(path: Path) -> tuple[dict[str, Any], Columns]:
    try:
        with np.load(path) as file:
            about: dict[str, Any] = json.loads(str(file["about"]))
            columns = {name: file[name] for name in file.files if name != "about"}
        whole = about["version"] == VERSION and about["ranks"] and about["nodes"] and about["size"] > 0
        whole = whole and "on_cpus" in about and len(columns["steps.checksum"]) > 0
        whole = whole and "probes.seconds" in columns and "telemetry.device" in columns
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        whole = False
    if not whole:
        raise ReviewError(f"{path}: no record of a test that ran to its end; run certify.sh again")
    return about, columns
