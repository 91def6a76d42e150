"""`python -m review certify`: the records of an acceptance test to a verdict."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from review.certify.outliers import LEAST_RANKS, Outlier, hesitation, slow, typical
from review.logs.findings import ReviewError

STAGES = {
    "single": "one rank at a time",
    "parallel": "all ranks, each by itself",
    "together": "all ranks, gradients reduced",
}


@dataclass(frozen=True)
class Stage:
    """One stage: seconds a step by rank, and who is slow in it, as a rank, as a node, or now and then."""

    name: str
    seconds: dict[str, float]
    slow_ranks: list[Outlier]
    slow_nodes: list[Outlier]
    hesitating: list[Outlier]

    @property
    def passes(self) -> bool:
        """Nobody is slow."""
        return not (self.slow_ranks or self.slow_nodes or self.hesitating)


@dataclass(frozen=True)
class Certificate:
    """What came of a test. ``corrupt``: ranks whose weights differ from those of most."""

    ranks: int
    nodes: int
    stages: list[Stage]
    corrupt: list[str]

    @property
    def passes(self) -> bool:
        """Nobody is slow and all ranks have computed the same."""
        return not self.corrupt and all(stage.passes for stage in self.stages)

    def reasons(self) -> list[str]:
        """What is wrong, a line each."""
        lines = [
            f"{name}: its weights differ from those of the other ranks after the same steps" for name in self.corrupt
        ]
        for stage in self.stages:
            kinds = (("node ", stage.slow_nodes, "slower"), ("", stage.slow_ranks, "slower"))
            for kind, outliers, words in (*kinds, ("", stage.hesitating, "more lost in single steps")):
                lines += [
                    f"{kind}{one.name}: {one.excess:.1%} {words} than the median, {one.deviations:.0f} deviations "
                    f"({STAGES[stage.name]})"
                    for one in outliers
                ]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "pass": self.passes,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "compared": self.ranks >= LEAST_RANKS,
            "reasons": self.reasons(),
            "seconds_per_step": {stage.name: stage.seconds for stage in self.stages},
        }


def certify(folder: Path) -> Certificate:
    """Judges the records in the folder of a test. Raises ReviewError where they are missing or are no records."""
    records = [_read(path) for path in sorted(folder.glob("certify_rank*.json"))]
    if not records:
        raise ReviewError(f"{folder}: no certify_rank*.json: give the folder that certify.sh named")
    names = {record["rank"]: f"rank {record['rank']} on {record['node']}" for record in records}
    common = Counter(record["weights_crc32"] for record in records).most_common(1)[0][0]
    corrupt = [names[record["rank"]] for record in records if record["weights_crc32"] != common]
    stages = [_stage(stage, records, names) for stage in STAGES]
    return Certificate(len(records), len({record["node"] for record in records}), stages, corrupt)


def _stage(stage: str, records: list[dict[str, Any]], names: dict[int, str]) -> Stage:
    seconds = {names[record["rank"]]: typical(record["seconds"][stage]) for record in records}
    lost = {names[record["rank"]]: hesitation(record["seconds"][stage]) for record in records}
    if stage == "together":  # each waits for the slowest: all have its time, and nobody is told apart
        return Stage(stage, seconds, [], [], [])
    nodes: dict[str, list[float]] = defaultdict(list)
    for record in records:
        nodes[record["node"]].append(seconds[names[record["rank"]]])
    slow_nodes = slow({node: typical(times) for node, times in nodes.items()})
    of_slow_nodes = {one.name for one in slow_nodes}
    slow_ranks = [one for one in slow(seconds) if one.name.partition(" on ")[2] not in of_slow_nodes]
    return Stage(stage, seconds, slow_ranks, slow_nodes, slow(lost))


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = record["rank"], record["node"], record["weights_crc32"]
        whole = all(record["seconds"][stage] and min(record["seconds"][stage]) > 0 for stage in STAGES)
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ReviewError(f"{path}: no record of a test that ran to its end; run certify.sh again")
    return record


def print_certificate(found: Certificate) -> None:
    """The stages, what is wrong, and the verdict on the last line."""
    print(f"{found.ranks} ranks on {found.nodes} nodes")
    for stage in found.stages:
        times = stage.seconds.values()
        print(f"  {STAGES[stage.name]:<30} {min(times) * 1e3:10.2f} to {max(times) * 1e3:10.2f} ms a step")
    if found.ranks < LEAST_RANKS:
        print(f"  too few ranks to tell a slow one from the others: {LEAST_RANKS} or more")
    for reason in found.reasons():
        print(f"  {reason}")
    print("pass" if found.passes else "fail")
