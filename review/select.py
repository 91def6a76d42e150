"""`select`: from more than ten runs, the ten consecutive ones to submit under the training rules.

A submitter may decide beforehand to make M runs instead of N = 10. Every N consecutive runs, by
start time, form a set with a score; a set that would not count is infinitely slow. The set to
submit is the one whose score is closest to the median of all sets (never the fastest), the slower
one in a tie.
"""

import contextlib
import functools
import math
import os
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import (
    Column,
    Heading,
    Line,
    Part,
    ReviewError,
    Table,
    json_text,
    pick,
    write_whole,
)
from review.logs.tree import copy_runs
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, Result

# Written by this repository's runs, read by `package`.
_ALONG = "config.json", "environment.json"
RECORD = "selection.json"


@dataclass(frozen=True)
class RunSet:
    """Ten consecutive runs. ``first``: index of the first one in start order."""

    first: int
    result: Result

    @functools.cached_property
    def score(self) -> float:
        """Minutes; infinite if the set would not count."""
        # Infinite, not left out: the rule takes the median over all sets.
        score = self.result.score
        return math.inf if score is None or self.result.obstacles else score

    def as_dict(self) -> dict[str, Any]:
        runs = self.result.runs
        about = {
            "runs": [run.path.name for run in runs],
            "started": [_date(run) for run in (runs[0], runs[-1])],
        }
        return {**about, **pick(self, "score_minutes=score obstacles=result.obstacles")}


@dataclass(frozen=True)
class Selection:
    """All sets of a folder."""

    folder: Path
    sets: tuple[RunSet, ...]
    crashes: dict[int, str]

    @functools.cached_property
    def median(self) -> float:
        """Median score of all sets; infinite if half of them or more do not count."""
        return statistics.median(candidate.score for candidate in self.sets)

    @functools.cached_property
    def chosen(self) -> RunSet | None:
        """The set closest to the median; None if the median is infinite."""
        if math.isinf(self.median):
            return None

        def order(candidate: RunSet) -> tuple[float, float, int]:
            # Rounded, so that a tie is not decided by the last bits.
            distance = round(abs(candidate.score - self.median), 9)
            return distance, -candidate.score, candidate.first

        return min(self.sets, key=order)

    @property
    def reason(self) -> str:
        # Said even where a set is chosen: they count in the median.
        invalid = sum(math.isinf(candidate.score) for candidate in self.sets)
        sets = "1 set" if len(self.sets) == 1 else f"{len(self.sets)} sets"
        without = f", {invalid} of which would not count" if invalid else ""
        if self.chosen is None:
            return f"the median of {sets}{without}, is of a set that would not count"
        scores = f"{self.chosen.score:.4f}, median {self.median:.4f} minutes"
        return f"closest to the median of {sets}{without}: {scores}"

    def as_dict(self) -> dict[str, Any]:
        answer = pick(
            self, "folder median_minutes=median chosen reason crashed=crashes sets"
        )
        return {**answer, "unverified": True}


def select(result: Result) -> Selection:
    """The sets of a folder. Raises ReviewError for fewer than ten runs, or a log that cannot be put
    in order.
    """
    for path, reason in result.unreadable.items():
        raise ReviewError(
            f"{path} {reason}: every run counts, so each log must be readable"
        )
    if len(result.runs) < REQUIRED_RUNS:
        raise ReviewError(
            f"{result.folder}: {len(result.runs)} logs, a set needs {REQUIRED_RUNS}"
        )
    # By time of start, as the rule says "consecutive"; the numbers in names may be another order.
    runs = tuple(sorted(result.runs, key=_start))
    starts = range(len(runs) - REQUIRED_RUNS + 1)
    # Without crashes, which are of the folder and not of a set.
    sets = (
        RunSet(
            i,
            Result(result.folder, runs[i : i + REQUIRED_RUNS], ruleset=result.ruleset),
        )
        for i in starts
    )
    return Selection(result.folder, tuple(sets), result.crashes)


def _start(run: Run) -> float:
    """Start time in ms: run_start, or the first event of a run that did not get that far."""
    # A run that failed before run_start still has its place among the others.
    event = run.run_start or next(iter(run.log.events), None)
    if event is None:
        raise ReviewError(
            f"{run.path}: has no events, so its position among the runs is unknown"
        )
    return event.time_ms


def _date(run: Run) -> str:
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return f"{datetime.fromtimestamp(_start(run) / 1000, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    return "-"


def write(selection: Selection, output: Path) -> None:
    """Writes the chosen set: logs renumbered from result_0.txt, their power files, and
    selection.json.

    The folder appears whole or not at all. Raises ReviewError if it exists or cannot be written.
    """
    if selection.chosen is None:
        return
    if output.exists():
        raise ReviewError(f"{output} exists: give another folder with -o")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Beside the output: a rename works within one file system only.
        with tempfile.TemporaryDirectory(
            dir=output.parent, prefix=f".{output.name}."
        ) as scratch:
            folder = Path(scratch) / "selected"
            folder.mkdir()
            renamed = copy_runs(
                (run.path for run in selection.chosen.result.runs), folder
            )
            for name in _ALONG:
                if (selection.folder / name).is_file():
                    shutil.copyfile(selection.folder / name, folder / name)
            write_whole(
                folder / RECORD,
                json_text({**selection.as_dict(), "renamed": renamed}) + "\n",
            )
            os.rename(folder, output)
    except OSError as error:
        raise ReviewError(f"{error.filename or output}: {error.strerror}") from None


def parts(selection: Selection, output: Path | None) -> list[Part]:
    chosen, rows = selection.chosen, []
    for candidate in selection.sets:
        runs = candidate.result.runs
        minutes = (
            "does not count"
            if math.isinf(candidate.score)
            else f"{candidate.score:.4f}"
        )
        note = (
            "submit this one"
            if candidate is chosen
            else text("; ".join(candidate.result.obstacles))
        )
        first, last = runs[0], runs[-1]
        rows.append(
            [
                str(candidate.first + 1),
                first.name,
                last.name,
                _date(first),
                minutes,
                note,
            ],
        )
    columns = [
        Column("set", right=True),
        Column("first"),
        Column("last"),
        Column("started"),
    ]
    columns += [Column("minutes", right=True), Column("", wraps=True)]
    styles = [
        "bold green" if candidate is chosen else "" for candidate in selection.sets
    ]
    made: list[Part] = [
        Heading(
            text(selection.folder.name or str(selection.folder)),
            "every set of ten runs",
        ),
        Table(columns, rows, styles),
        Line("set", f"{selection.reason}, unverified", "" if chosen else "yellow"),
    ]
    if selection.crashes:
        failed = ", ".join(f"failed_{number}.txt" for number in selection.crashes)
        made.append(
            Line(
                "crashed",
                f"{failed}: left out; be ready to explain the cause in the review",
                "yellow",
            )
        )
    return (
        made
        if chosen is None or output is None
        else [*made, Line("written", str(output))]
    )
