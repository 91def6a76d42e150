"""Reasons of a verdict, and progress of a burn-in: which ranks differed from the first repeat, and
when.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.durations import duration
from review.logs.output import ReviewError

if TYPE_CHECKING:
    from review.acceptance.schema import RankInfo

EXIT = {"pass": 0, "warn": 3, "fail": 1}  # exit status by state, the best first
STYLES = {"pass": "good", "warn": "warn", "fail": "bad"}  # of a page
# Even, since two rounds become one when all are full.
MAX_ROUNDS = 64
MOST_LISTED = 8


def listed(names: Sequence[str]) -> str:
    """The first MOST_LISTED of them in words."""
    more = ["..."] if len(names) > MOST_LISTED else []
    return ", ".join([*names[:MOST_LISTED], *more])


@dataclass(frozen=True)
class Reason:
    """Why a test does not pass: one line of a verdict, and a row of its page. state: warn or
    fail.
    """

    name: str
    what: str
    state: str = "fail"
    stage: str = ""
    sure: str = ""
    evidence: str = ""

    def text(self) -> str:
        where = "; ".join(filter(None, (self.stage, self.sure)))
        return f"{self.name}: {self.what}{where and f' ({where})'}{self.evidence and f'; {self.evidence}'}"


@dataclass(frozen=True)
class BurnIn:
    """Progress and findings of a burn-in.

    elapsed: of ``duration`` seconds; different: ranks that differed from the first repeat; behind:
    nodes that recorded fewer repeats than others; rounds: seconds per step of each rank, the
    repeats averaged into at most MAX_ROUNDS rounds, nan for those to come.
    """

    repeats: int
    elapsed: float
    duration: float
    different: list[Reason]
    behind: list[Reason] = field(default_factory=list)
    rounds: dict[int, list[float]] = field(default_factory=dict)

    def text(self) -> str:
        share = min(self.elapsed / self.duration, 1.0) if self.duration else 1.0
        message = (
            "not all identical"
            if self.different
            else "identical bit for bit"
            if self.repeats
            else "not started"
        )
        return f"burn-in: {self.repeats:,} repeats in {self.elapsed / 3600:.2f} hours ({share:.0%}), {message}"

    def reasons(self, run_name: str) -> list[Reason]:
        """Ranks that differ, nodes that are behind, and a warning for a burn-in that ended early."""
        found = [*self.different, *self.behind]
        if self.elapsed >= self.duration:
            return found
        ended = f"ended after {floor(100 * self.elapsed / self.duration)}% of {duration(self.duration)}"
        resume = f"resume it with RUN_NAME={run_name} DURATION={self.duration:g}s, unless it is still running"
        return [*found, Reason("burn-in", f"{ended}: {resume}", "warn")]

    def as_dict(self) -> dict[str, Any]:
        return {
            name: [reason.text() for reason in value]
            if isinstance(value, list)
            else value
            for name, value in vars(self).items()
            if name != "rounds"
        }


class Rounds:
    """Means over any number of repeats, kept as MAX_ROUNDS rounds per rank."""

    def __init__(self) -> None:
        self.width = 1  # repeats per round
        # By rank: seconds and repeats of each round [MAX_ROUNDS, 2].
        self._sums: dict[int, np.ndarray] = {}

    def add(self, rank: int, repeat: int, seconds: float) -> None:
        """repeat: counted from 1."""
        while (repeat - 1) // self.width >= MAX_ROUNDS:
            self.width *= 2
            for other, sums in self._sums.items():
                # [MAX_ROUNDS, 2] -> [MAX_ROUNDS / 2, 2, 2]: neighbours
                # are added, the upper half is free again.
                self._sums[other] = np.pad(
                    sums.reshape(-1, 2, 2).sum(axis=1), ((0, MAX_ROUNDS // 2), (0, 0))
                )
        self._sums.setdefault(rank, np.zeros((MAX_ROUNDS, 2)))[
            (repeat - 1) // self.width
        ] += (
            seconds,
            1,
        )

    def means(self) -> dict[int, list[float]]:
        """Rounds by rank, the same number for each."""
        most = max(
            (int(np.flatnonzero(sums[:, 1])[-1]) + 1 for sums in self._sums.values()),
            default=0,
        )
        # 0 / 0 of a round that a rank has not reached gives the nan that is wanted.
        with np.errstate(invalid="ignore"):
            return {
                rank: (sums[:most, 0] / sums[:most, 1]).tolist()
                for rank, sums in sorted(self._sums.items())
            }


def read_burn_in(folder: Path, ranks: Mapping[int, RankInfo]) -> BurnIn | None:
    """The burn-in in a test's folder, also while it runs; None without one. Raises ReviewError for
    invalid files.
    """
    path = folder / "burn_in.json"
    if not path.exists():
        return None
    last, elapsed = 0, 0.0
    wrong: dict[int, list[str]] = {}  # where, of each repeat that differed, by rank
    rounds, recorded = Rounds(), Counter[int]()
    try:
        planned = float(json.loads(path.read_text(encoding="utf-8"))["duration"])
        for path in sorted(folder.glob("burn_in_*.jsonl")):
            with open(path, "rb") as file:
                for text in file:
                    if not text.endswith(b"\n"):
                        break  # being written
                    line = json.loads(text)
                    repeat, at = line["repeat"], line["elapsed"]
                    last, elapsed = max(last, repeat), max(elapsed, at)
                    for rank, seconds in line["seconds"].items():
                        rounds.add(int(rank), repeat, float(seconds))
                        recorded[int(rank)] += 1
                    for rank, step in line["different"].items():
                        where = f"step {step + 1} of repeat {repeat}, {at / 3600:.2f} hours after the start"
                        wrong.setdefault(int(rank), []).append(where)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ReviewError(f"{path}: not a record of a burn-in, or truncated") from None
    different = [
        Reason(
            ranks[rank].name if rank in ranks else f"rank {rank}",
            f"its weights differ from the first repeat, first in {places[0]}",
            stage="burn-in",
            sure=f"{len(places):,} of {last:,} repeats",
        )
        for rank, places in sorted(wrong.items())
    ]
    # Where a burn-in is ended early, a node may not have written the last one.
    least = last - (elapsed < planned)
    behind = [
        Reason(
            f"node {node}",
            f"recorded {count:,} of {last:,} repeats",
            stage="burn-in",
        )
        for node, count in sorted(
            {(info.node, recorded[rank]) for rank, info in ranks.items()}
        )
        if count < least
    ]
    return BurnIn(last, elapsed, planned, different, behind, rounds.means())
