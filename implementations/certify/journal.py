"""How a burn-in goes: who computed something else than in the first repeat, and when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from review.logs.output import ReviewError

if TYPE_CHECKING:
    from certify.records import Place

MOST_ROUNDS = 64


@dataclass(frozen=True)
class BurnIn:
    """How far it has come, and what it says of its ranks.

    repeats, elapsed: of ``duration`` seconds; different: lines on who computed otherwise; rounds: seconds of a step of
    each rank, the repeats put together to MOST_ROUNDS rounds or fewer, nan where a rank's are still to come; running:
    somebody watches it repeat.
    """

    repeats: int
    elapsed: float
    duration: float
    different: list[str]
    rounds: dict[int, list[float]] = field(default_factory=dict)
    running: bool = False

    @property
    def unfinished(self) -> bool:
        """Whether it has less than its time behind it, and nobody knows that it still runs."""
        return self.elapsed < self.duration and not self.running

    def text(self) -> str:
        """In one line."""
        share = min(self.elapsed / self.duration, 1.0) if self.duration else 1.0
        words = "not all the same" if self.different else "all the same, bit for bit" if self.repeats else "not begun"
        return f"burn-in: {self.repeats:,} repeats in {self.elapsed / 3600:.2f} hours ({share:.0%}), {words}"

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {name: value for name, value in vars(self).items() if name not in ("rounds", "running")}


class Rounds:
    """Means of any number of repeats, in memory for MOST_ROUNDS of each rank."""

    def __init__(self) -> None:
        self.width = 1  # repeats of a round
        self._sums: dict[int, list[list[float]]] = {}  # seconds and repeats by rank and round

    def add(self, rank: int, repeat: int, seconds: float) -> None:
        """A repeat of a rank. repeat: counted from 1."""
        while (repeat - 1) // self.width >= MOST_ROUNDS:
            self.width *= 2
            self._sums = {rank: [*map(_added, own[::2], [*own[1::2], [0.0, 0.0]])] for rank, own in self._sums.items()}
        own = self._sums.setdefault(rank, [])
        number = (repeat - 1) // self.width
        own += [[0.0, 0.0] for _ in range(number + 1 - len(own))]
        own[number] = _added(own[number], [seconds, 1.0])

    def means(self) -> dict[int, list[float]]:
        """By rank, as many of each."""
        most = max(map(len, self._sums.values()), default=0)
        return {
            rank: [total / count if count else nan for total, count in own] + [nan] * (most - len(own))
            for rank, own in sorted(self._sums.items())
        }


def _added(one: list[float], other: list[float]) -> list[float]:
    return [one[0] + other[0], one[1] + other[1]]


class Journal:
    """The burn-in in the folder of a test, also while it runs; each reading takes only what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begin(())

    def _begin(self, started: tuple[int, ...]) -> None:
        """Nothing is known yet. started: tells the file of the first repeat from that of another burn-in."""
        self._started = started
        self._duration, self._elapsed, self._repeats = 0.0, 0.0, 0
        self._read: dict[Path, int] = {}  # bytes of each node's journal
        self._first: dict[int, str] = {}
        self._counts: dict[int, int] = {}
        self._rounds = Rounds()

    def read(self, places: Mapping[int, Place]) -> BurnIn | None:
        """How it goes; None without one. Raises ReviewError for files that are none of a burn-in."""
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
        names = {rank: places[rank].name if rank in places else f"rank {rank}" for rank in self._first}
        different = [
            f"{names[rank]}: its weights differ from those of the first repeat, {self._first[rank]} "
            f"(burn-in; {self._counts[rank]:,} of {self._repeats:,} repeats)"
            for rank in sorted(self._first)
        ]
        return BurnIn(self._repeats, self._elapsed, self._duration, different, self._rounds.means())

    def _read_on(self, journal: Path) -> None:
        """The lines of a node that are new; the last one may just be being written."""
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
            self._counts[int(rank)] = self._counts.get(int(rank), 0) + 1
            where = f"first in step {step + 1} of repeat {line['repeat']}"
            self._first.setdefault(int(rank), f"{where}, {line['elapsed'] / 3600:.2f} hours after the start")
