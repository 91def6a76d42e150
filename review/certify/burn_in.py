"""How a burn-in goes: who computed something else than in the first repeat, and when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from review.logs.findings import ReviewError

if TYPE_CHECKING:
    from review.certify.records import Place


@dataclass(frozen=True)
class BurnIn:
    """repeats, elapsed: how far it has come, of ``duration`` seconds; different: lines on who computed otherwise."""

    repeats: int
    elapsed: float
    duration: float
    different: list[str]

    def text(self) -> str:
        """In one line."""
        share = min(self.elapsed / self.duration, 1.0) if self.duration else 1.0
        words = "not all the same" if self.different else "all the same, bit for bit"
        return f"burn-in: {self.repeats:,} repeats in {self.elapsed / 3600:.2f} hours ({share:.0%}), {words}"


def read(folder: Path, places: Mapping[int, Place]) -> BurnIn | None:
    """What the folder of a test has of it, also while it runs; None without one. Raises ReviewError."""
    path = folder / "burn_in.json"
    if not path.exists():
        return None
    repeats, elapsed = 0, 0.0
    first: dict[int, str] = {}
    counts: dict[int, int] = {}
    try:
        duration = float(json.loads(path.read_text(encoding="utf-8"))["duration"])
        for journal in sorted(folder.glob("burn_in_*.jsonl")):
            path = journal
            text = journal.read_text(encoding="utf-8")
            for written in text[: text.rfind("\n") + 1].splitlines():  # the last line may just be being written
                line = json.loads(written)
                repeats, elapsed = max(repeats, line["repeat"]), max(elapsed, line["elapsed"])
                for rank, step in line["different"].items():
                    counts[int(rank)] = counts.get(int(rank), 0) + 1
                    where = f"first in step {step + 1} of repeat {line['repeat']}"
                    first.setdefault(int(rank), f"{where}, {line['elapsed'] / 3600:.2f} hours after the start")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ReviewError(f"{path}: no record of a burn-in; it was cut short or is another file") from None
    names = {rank: places[rank].name if rank in places else f"rank {rank}" for rank in first}
    different = [
        f"{names[rank]}: its weights differ from those of the first repeat, {first[rank]} "
        f"(burn-in; {counts[rank]:,} of {repeats:,} repeats)"
        for rank in sorted(first)
    ]
    return BurnIn(repeats, elapsed, duration, different)
