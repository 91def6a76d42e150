"""`select`: of more than ten runs, the ten consecutive ones that the training rules let a submitter hand in.

A submitter may decide to make M runs where N = 10 are asked for. Every N consecutive runs, by their start times, are a
set; each set has its score, and a set that would not count is infinitely slow. The set to submit is the one whose score
is closest to the median of all sets: never the fastest. Of two that are as close it is the slower one.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from review.logs.mllog import text
from review.logs.output import ReviewError, console, labelled, write_whole
from review.results.energy import FOLDER as POWER
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, Result

if TYPE_CHECKING:
    from rich.console import Console

_ALONG = ("config.json", "environment.json")  # of a run of this repository, which `package` reads
RECORD = "selection.json"


@dataclass(frozen=True)
class RunSet:
    """Ten consecutive runs. ``first`` counts from 0 in the order of their start."""

    first: int
    result: Result

    @functools.cached_property
    def score(self) -> float:
        """Minutes; infinite for a set that would not count."""
        score = self.result.score
        return math.inf if score is None or self.result.obstacles else score

    @property
    def names(self) -> tuple[str, str]:
        """The first and the last log."""
        return text(self.result.runs[0].path.name), text(self.result.runs[-1].path.name)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "runs": [run.path.name for run in self.result.runs],
            "started": [_date(run) for run in (self.result.runs[0], self.result.runs[-1])],
            "score_minutes": None if math.isinf(self.score) else self.score,
            "obstacles": self.result.obstacles,
        }


@dataclass(frozen=True)
class Selection:
    """Every set of a folder, and the one to submit."""

    folder: Path
    sets: tuple[RunSet, ...]
    crashes: dict[int, str]

    @functools.cached_property
    def median(self) -> float:
        """Of the scores of all sets; infinite where half of them or more do not count."""
        return statistics.median(one.score for one in self.sets)

    @functools.cached_property
    def chosen(self) -> RunSet | None:
        """The set closest to the median; None where the median is of sets that do not count."""
        if math.isinf(self.median):
            return None
        return min(self.sets, key=lambda one: (round(abs(one.score - self.median), 9), -one.score, one.first))

    @property
    def reason(self) -> str:
        """Why this set, or why none."""
        invalid = sum(math.isinf(one.score) for one in self.sets)
        sets = "1 set" if len(self.sets) == 1 else f"{len(self.sets)} sets"
        without = f", {invalid} of which would not count" if invalid else ""
        if self.chosen is None:
            return f"the median of {sets}{without}, is of a set that would not count"
        return f"closest to the median of {sets}{without}: {self.chosen.score:.4f}, median {self.median:.4f} minutes"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "folder": str(self.folder),
            "median_minutes": None if math.isinf(self.median) else self.median,
            "chosen": self.chosen.as_dict() if self.chosen else None,
            "reason": self.reason,
            "crashed": {str(number): reason for number, reason in self.crashes.items()},
            "sets": [one.as_dict() for one in self.sets],
        }


def select(result: Result) -> Selection:
    """Chooses among the runs of a folder. Raises ReviewError for fewer than ten, or a log whose place is not known."""
    for path, reason in result.unreadable.items():
        raise ReviewError(f"{path} {reason}: every run counts, so each must be read")
    if len(result.runs) < REQUIRED_RUNS:
        raise ReviewError(f"{result.folder}: holds {len(result.runs)} logs, a set has {REQUIRED_RUNS}")
    runs = sorted(result.runs, key=_start)
    sets = [
        RunSet(first, Result(result.folder, tuple(runs[first : first + REQUIRED_RUNS]), ruleset=result.ruleset))
        for first in range(len(runs) - REQUIRED_RUNS + 1)
    ]
    return Selection(result.folder, tuple(sets), result.crashes)


def _start(run: Run) -> float:
    """When a run started: its run_start, or of a run that never came so far its first line."""
    event = run.run_start or next(iter(run.log.events), None)
    if event is None:
        raise ReviewError(f"{run.path}: has no events, so its place among the runs is not known")
    return event.time_ms


def _date(run: Run) -> str:
    try:
        return f"{datetime.fromtimestamp(_start(run) / 1000, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "-"


def write(selection: Selection, output: Path) -> None:
    """Writes the folder to submit: the logs from result_0.txt on, their power files, and how they were chosen.

    The folder appears whole or not at all. Raises ReviewError where it exists or cannot be written.
    """
    if selection.chosen is None:
        return
    if output.exists():
        raise ReviewError(f"{output} exists: name another folder with -o")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
            folder = Path(scratch) / "selected"
            folder.mkdir()
            _copy(selection.chosen, selection.folder, folder)
            record = {**selection.as_dict(), "renamed": _renamed(selection.chosen)}
            write_whole(folder / RECORD, (json.dumps(record, indent=2) + "\n").encode("utf-8"))
            os.rename(folder, output)
    except OSError as error:
        raise ReviewError(f"{error.filename or output}: {error.strerror}") from None


def _renamed(chosen: RunSet) -> dict[str, str]:
    return {f"result_{index}.txt": run.path.name for index, run in enumerate(chosen.result.runs)}


def _copy(chosen: RunSet, source: Path, folder: Path) -> None:
    for index, run in enumerate(chosen.result.runs):
        shutil.copyfile(run.path, folder / f"result_{index}.txt")
        if (source / POWER / run.path.stem).is_dir():
            shutil.copytree(source / POWER / run.path.stem, folder / POWER / f"result_{index}")
    for name in _ALONG:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def print_selection(selection: Selection, output: Path | None, out: Console | None = None) -> None:
    """Prints every set and the one to submit."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = out or console()
    out.print(Text.assemble((text(selection.folder.name or str(selection.folder)), "bold"), "  every set of ten runs"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading, justify in (("set", "right"), ("first", "left"), ("last", "left"), ("started", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("minutes", justify="right", no_wrap=True)
    table.add_column("")
    for one in selection.sets:
        shown = "does not count" if math.isinf(one.score) else f"{one.score:.4f}"
        first = one is selection.chosen
        note = "submit this one" if first else "; ".join(one.result.obstacles)
        cells = [str(one.first + 1), *one.names, _date(one.result.runs[0]), shown, text(note)]
        table.add_row(*(Text(cell) for cell in cells), style="bold green" if first else "")
    out.print(table)
    out.print(labelled("set", selection.reason, "" if selection.chosen else "yellow"), soft_wrap=True)
    if selection.crashes:
        failed = ", ".join(f"failed_{number}.txt" for number in selection.crashes)
        out.print(
            labelled("crashed", f"{failed}: left out, have the cause ready for the review", "yellow"), soft_wrap=True
        )
    if selection.chosen is not None and output is not None:
        out.print(labelled("written", str(output)), soft_wrap=True)
