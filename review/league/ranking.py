"""Ranks, scaling efficiencies and the standing of the user's own results, and the table of the
league.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from review.league.entries import Entry
from review.logs.output import (
    Column,
    Line,
    Part,
    ReviewError,
    Table,
    counted,
    number_text,
    rate_text,
)

# Name: label, value, 1 if less is better else -1.
BY: dict[str, tuple[str, Callable[[Entry], float | None], int]] = {
    "minutes": ("minutes", lambda entry: entry.minutes, 1),
    "published": ("published minutes", lambda entry: entry.published_minutes, 1),
    "rate": ("sequences/s", lambda entry: entry.sequences_per_second, -1),
    "per-accelerator": (
        "sequences/s and accelerator",
        lambda entry: entry.per_accelerator,
        -1,
    ),
    "energy": ("joules", lambda entry: entry.joules, 1),
}
_LONGEST = 36  # characters of a cell
NOT_ACCEPTED = "*"
EXPLAINED = (
    "minutes: the score by the installed rules of the round, with their factor for fast "
    "convergence; published: with the factor committed with the logs, for yours as minutes; "
    f"{NOT_ACCEPTED} not accepted by the rules; without a score the olympic mean"
)
UNVERIFIED = "unverified"


@dataclass(frozen=True)
class League:
    """The user's own results and published ones. ``by``: a name of BY.

    ``apart``: own results that would not count, which are shown but never ranked.
    """

    own: tuple[Entry, ...]
    others: tuple[Entry, ...]
    by: str = "minutes"
    apart: tuple[Entry, ...] = ()

    @classmethod
    def of(
        cls, own_entries: Sequence[Entry], others: Sequence[Entry], by: str
    ) -> League:
        """A league in which own results that the rules do not accept stand apart."""
        ranked = tuple(entry for entry in own_entries if entry.checked)
        apart = tuple(entry for entry in own_entries if not entry.checked)
        return cls(ranked, tuple(others), by, apart)

    def __post_init__(self) -> None:
        if not self.own and not self.others and not self.apart:
            raise ReviewError(
                "no result is left to rank: remove a filter, or give a folder of results"
            )

    @functools.cached_property
    def ranked(self) -> list[Entry]:
        """Results without resubmissions, best first; those without a value last."""
        return sorted((ones[0] for ones in self._same_logs.values()), key=self._order)

    def _order(self, entry: Entry) -> tuple[Any, ...]:
        _, value, sign = BY[self.by]
        figure = value(entry)
        # The names decide among equals, so that the table comes out the same each time.
        return (
            figure is None,
            sign * (figure or 0.0),
            entry.round,
            entry.submitter,
            entry.system,
        )

    @functools.cached_property
    def _same_logs(self) -> dict[Any, list[Entry]]:
        """Groups of equal logs: the user's own or first submission, then resubmissions. By energy,
        per measurement.
        """
        groups: dict[Any, list[Entry]] = {}
        others = sorted(self.others, key=lambda entry: entry.round)
        for entry in [*self.own, *others]:
            # Logs too little known to recognise are taken for logs of their own.
            key = entry.logs or id(entry), entry.joules if self.by == "energy" else None
            groups.setdefault(key, []).append(entry)
        return groups

    def rounds(self, entry: Entry) -> list[str]:
        """Its round, and those in which the same logs were resubmitted."""
        groups = self._same_logs.values()
        same = next((ones for ones in groups if ones[0] is entry), [entry])
        return list(dict.fromkeys(result.round for result in same))

    def is_own(self, entry: Entry) -> bool:
        # By identity: one's own result may equal a published one in every value.
        return any(entry is result for result in self.own)

    def rank(self, entry: Entry, among: Sequence[Entry] | None = None) -> int | None:
        """Rank from 1, shared by equal values; None if it has no value."""
        _, value, sign = BY[self.by]
        figure = value(entry)
        if figure is None:
            return None
        values = [
            other
            for result in among or self.ranked
            if (other := value(result)) is not None
        ]
        return 1 + sum(sign * other < sign * figure for other in values)

    def efficiency(self, entry: Entry) -> float | None:
        """Rate per accelerator relative to the smallest system of its kind; None if there is only
        one size.
        """
        # The smallest size of a kind is the one that others are measured by.
        smallest = self.kinds.get(entry.kind, [None])[0]
        rate, reference = entry.per_accelerator, smallest and smallest.per_accelerator
        return rate / reference if rate and reference else None

    @functools.cached_property
    def kinds(self) -> dict[tuple[str, str, str, str], list[Entry]]:
        """Results of several sizes by round, submitter, division and accelerator, the smallest
        first.
        """
        kinds: dict[tuple[str, str, str, str], list[Entry]] = {}
        known = [entry for entry in (*self.own, *self.others) if entry.per_accelerator]
        # Of equal sizes, the fastest is the one that others are measured by.
        for entry in sorted(
            known,
            key=lambda entry: (
                entry.accelerators or 0.0,
                -(entry.per_accelerator or 0.0),
            ),
        ):
            kinds.setdefault(entry.kind, []).append(entry)
        return {
            kind: ones
            for kind, ones in kinds.items()
            if len({entry.accelerators for entry in ones}) > 1
        }

    def standing(self, entry: Entry) -> str:
        """Rank within its division and among systems of its size, in words."""
        division = [
            result for result in self.ranked if result.division == entry.division
        ]
        size = [
            result for result in division if result.accelerators == entry.accelerators
        ]
        rank = self.rank(entry, division)
        of_size = self.rank(entry, size)
        if rank is None:
            return f"has no {BY[self.by][0]} to rank it by"
        label, value, _ = BY[self.by]
        known = sum(value(result) is not None for result in division)
        # A place among one is no place.
        peers = sum(value(result) is not None for result in size)
        results = f"{entry.division or 'division unknown'} results"
        standing = f"rank {rank} of {known} {results} by {label}"
        if entry.accelerators and peers > 1:
            standing += f", {of_size} of {peers} with "
            standing += counted(entry.accelerators, "accelerator")
        if entry.unproved:
            standing += f"; {', '.join(entry.unproved)} not shown to be the benchmark's"
        return standing

    def as_dict(self) -> dict[str, Any]:
        results = []
        for entry in self.ranked:
            about = {
                "rank": self.rank(entry),
                "efficiency": self.efficiency(entry),
                "own": self.is_own(entry),
                UNVERIFIED: self.is_own(entry),
            }
            # The first of its rounds is its own.
            again = self.rounds(entry)[1:]
            # No obstacles: only results that count are ranked.
            results.append({**entry.as_dict(), **about, "resubmitted": again})
        standing = [
            {
                "folder": entry.folder,
                "system": entry.system,
                "said": self.standing(entry),
                UNVERIFIED: True,
            }
            for entry in self.own
        ]
        apart = [
            {**entry.as_dict(), "obstacles": entry.obstacles, UNVERIFIED: True}
            for entry in self.apart
        ]
        return {"by": self.by, "results": results, "standing": standing, "apart": apart}


def apart_text(entry: Entry) -> str:
    """Why an own result is not ranked."""
    return f"not ranked: {next(iter(entry.obstacles), 'no score')}"


def size(entry: Entry) -> str:
    """Nodes x accelerators per node, as far as known."""
    nodes, count = entry.nodes, entry.accelerators
    if nodes and count:
        return f"{nodes:g} x {count / nodes:g}"
    return f"{count:g}" if count else f"{nodes:g} x 0" if nodes else "-"


def _short(content: str) -> str:
    return content if len(content) <= _LONGEST else content[: _LONGEST - 1] + "…"


def _minutes(entry: Entry) -> str:
    return number_text(entry.minutes, ",.4f") + NOT_ACCEPTED * (
        not entry.checked and entry.minutes is not None
    )


CELLS: dict[Column, Callable[[League, Entry], str]] = {
    Column("rank", right=True): lambda league, entry: number_text(
        league.rank(entry), "d"
    ),
    Column("round"): lambda league, entry: ", ".join(league.rounds(entry)),
    Column("submitter", drop=4, wraps=True): lambda _, entry: _short(entry.submitter),
    Column("system", wraps=True): lambda _, entry: _short(entry.system),
    Column("division", drop=2): lambda _, entry: entry.division,
    Column("nodes x accel.", right=True): lambda _, entry: size(entry),
    Column("accelerator", drop=3, wraps=True): lambda _, entry: _short(
        entry.accelerator
    ),
    Column("batch", right=True, drop=5): lambda _, entry: number_text(
        entry.batch_size, "g"
    ),
    Column("minutes", right=True): lambda _, entry: _minutes(entry),
    Column("published", right=True, drop=3): lambda _, entry: number_text(
        entry.published_minutes, ",.4f"
    ),
    Column("seq/s", right=True, drop=6): lambda _, entry: rate_text(
        entry.sequences_per_second
    ),
    Column("/accel", right=True): lambda _, entry: rate_text(entry.per_accelerator),
    Column("efficiency", right=True, drop=7): lambda league, entry: number_text(
        league.efficiency(entry), ".1%"
    ),
    Column("MJ", right=True, drop=1): lambda _, entry: number_text(
        entry.joules and entry.joules / 1e6, ",.3f"
    ),
}
COLUMNS = tuple(CELLS)


def parts(league: League, top: int | None) -> list[Part]:
    """The table and the standing of the user's own results."""
    entries = []
    for index, entry in enumerate(league.ranked):
        if top is None or index < top or league.is_own(entry):
            entries.append(entry)
    made = [[cell(league, entry) for cell in CELLS.values()] for entry in entries]
    # Figures that no row has are left out; the first eight columns name the result.
    blank = {i for i in range(8, len(COLUMNS)) if all(row[i] == "-" for row in made)}
    known = [i for i in range(len(COLUMNS)) if i not in blank]
    styles = ["bold green" if league.is_own(entry) else "" for entry in entries]
    rows = [[row[i] for i in known] for row in made]
    shown: list[Part] = [Table([COLUMNS[i] for i in known], rows, styles)]
    if hidden := len(league.ranked) - len(entries):
        shown.append(Line("", f"{hidden} more: --top 0 shows all {len(league.ranked)}"))
    shown.append(Line("", EXPLAINED, "dim"))
    for entry in league.ranked:
        if league.is_own(entry):
            message = f"{entry.system}: {league.standing(entry)}; {UNVERIFIED}"
            shown.append(Line("yours", message, "bold"))
    for entry in league.apart:
        message = (
            f"{entry.system}: {_minutes(entry)} min, {UNVERIFIED}, {apart_text(entry)}"
        )
        shown.append(Line("apart", message, "yellow"))
    return shown
