"""Why a test does not pass, and how a burn-in goes: which ranks computed otherwise than in the first repeat, and when.

Imports no statistics, as `watch` needs it at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from review.logs.output import ReviewError, duration

if TYPE_CHECKING:
    from certify.schema import Place

EXIT = {"pass": 0, "warn": 3, "fail": 1}
STATES = ("pass", "warn", "fail")
MOST_ROUNDS = 64


def worst(states: Iterable[str]) -> str:
    """The verdict over several states."""
    return max(states, key=STATES.index, default="pass")


@dataclass(frozen=True)
class Reason:
    """Why a test does not pass: one line of a verdict, and a row of its page. state: fail or warn."""

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

    repeats, elapsed: of ``duration`` seconds; different: ranks that computed otherwise; rounds: seconds of a step of
    each rank, the repeats averaged into at most MOST_ROUNDS rounds, nan where a rank's are still to come; running:
    `watch` sees it repeat.
    """

    repeats: int
    elapsed: float
    duration: float
    different: list[Reason]
    rounds: dict[int, list[float]] = field(default_factory=dict)
    running: bool = False

    @property
    def share(self) -> float:
        return min(self.elapsed / self.duration, 1.0) if self.duration else 1.0

    def text(self) -> str:
        words = "not all the same" if self.different else "all the same, bit for bit" if self.repeats else "not begun"
        return f"burn-in: {self.repeats:,} repeats in {self.elapsed / 3600:.2f} hours ({self.share:.0%}), {words}"

    def reasons(self, run_name: str) -> list[Reason]:
        """Why the test does not pass: ranks that differ. A burn-in that ended before its time is a warning."""
        if self.elapsed >= self.duration or self.running:
            return self.different
        ended = f"ended after {floor(100 * self.elapsed / self.duration)}% of {duration(self.duration)}"
        again = f"run it again with RUN_NAME={run_name} DURATION={self.duration:g}s, unless it still runs"
        return [*self.different, Reason("burn-in", f"{ended}: {again}", "warn")]

    def as_dict(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self).items() if name not in ("rounds", "running")}
        return found | {"different": [one.text() for one in self.different]}


class Rounds:
    """Means of any number of repeats, in memory for MOST_ROUNDS of each rank."""

    def __init__(self) -> None:
        self.width = 1  # repeats of a round
        self._sums: dict[int, np.ndarray] = {}  # by rank: seconds and repeats of each round [MOST_ROUNDS, 2]

    def add(self, rank: int, repeat: int, seconds: float) -> None:
        """repeat: counted from 1."""
        while (repeat - 1) // self.width >= MOST_ROUNDS:
            self.width *= 2
            for one, sums in self._sums.items():
                self._sums[one] = np.pad(sums.reshape(-1, 2, 2).sum(axis=1), ((0, MOST_ROUNDS // 2), (0, 0)))
        self._sums.setdefault(rank, np.zeros((MOST_ROUNDS, 2)))[(repeat - 1) // self.width] += seconds, 1

    def means(self) -> dict[int, list[float]]:
        """By rank, as many of each."""
        most = max((int(np.flatnonzero(sums[:, 1])[-1]) + 1 for sums in self._sums.values()), default=0)
        with np.errstate(invalid="ignore"):
            return {rank: (sums[:most, 0] / sums[:most, 1]).tolist() for rank, sums in sorted(self._sums.items())}


class Journal:
    """The burn-in in the folder of a test, also while it runs; each reading takes only what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begin(())

    def _begin(self, started: tuple[int, ...]) -> None:
        """Forgets all. started: tells the file of the first repeat from that of another burn-in."""
        self._started = started
        self._duration, self._elapsed, self._repeats = 0.0, 0.0, 0
        self._read: dict[Path, int] = {}  # bytes of each node's journal
        self._different: dict[int, tuple[str, int]] = {}  # by rank: where first, and in how many repeats
        self._rounds = Rounds()

    def read(self, places: Mapping[int, Place]) -> BurnIn | None:
        """None without a burn-in. Raises ReviewError for other files of these names."""
        path = self.folder / "burn_in.json"
        if not path.exists():
            return None
        try:
            about = path.stat()
            if (about.st_ino, about.st_mtime_ns) != self._started:
                self._begin((about.st_ino, about.st_mtime_ns))
                self._duration = float(json.loads(path.read_text(encoding="utf-8"))["duration"])
            for journal in sorted(self.folder.glob("burn_in_*.jsonl")):
                path = journal
                self._read_on(journal)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._begin(())
            raise ReviewError(f"{path}: no record of a burn-in; it was cut short or is another file") from None
        different = [
            Reason(
                places[rank].name if rank in places else f"rank {rank}",
                f"its weights differ from those of the first repeat, first in {first}",
                stage="burn-in",
                sure=f"{count:,} of {self._repeats:,} repeats",
            )
            for rank, (first, count) in sorted(self._different.items())
        ]
        return BurnIn(self._repeats, self._elapsed, self._duration, different, self._rounds.means())

    def _read_on(self, journal: Path) -> None:
        """The new lines of a node's journal; the last one may be half written."""
        with open(journal, "rb") as file:
            file.seek(self._read.get(journal, 0))
            for written in file:
                if not written.endswith(b"\n"):
                    break
                self._take(json.loads(written))
                self._read[journal] = self._read.get(journal, 0) + len(written)

    def _take(self, line: dict[str, Any]) -> None:
        self._repeats, self._elapsed = max(self._repeats, line["repeat"]), max(self._elapsed, line["elapsed"])
        for rank, seconds in line["seconds"].items():
            self._rounds.add(int(rank), line["repeat"], float(seconds))
        for rank, step in line["different"].items():
            where = f"step {step + 1} of repeat {line['repeat']}, {line['elapsed'] / 3600:.2f} hours after the start"
            first, count = self._different.get(int(rank), (where, 0))
            self._different[int(rank)] = first, count + 1
