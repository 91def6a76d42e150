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
    number_text,
    rate_text,
)

BY: dict[
    str, tuple[str, Callable[[Entry], float | None], int]
] = {  # name: label, value, 1 if less is better else -1
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
NOT_CHECKED = "*"
EXPLAINED = (
    "minutes: the score by the installed rules of the round, with their factor for fast "
    "convergence; published: the olympic mean times the factor committed with the logs; "
    f"{NOT_CHECKED} not checked: olympic mean of logs that no installed rules accept"
)
UNVERIFIED = "unverified"


@dataclass(frozen=True)
class League:
    """The user's own results and published ones. ``by``: a name of BY.

    ``apart``: own results of another model, target or data, which are shown but never ranked.
    """

    own: tuple[Entry, ...]
    others: tuple[Entry, ...]
    by: str = "minutes"
    apart: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, own: Sequence[Entry], others: Sequence[Entry], by: str) -> League:
        """A league in which own results that are not of the benchmark stand apart."""
        ranked = tuple(one for one in own if not one.departures)
        return cls(
            ranked, tuple(others), by, tuple(one for one in own if one.departures)
        )

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
        found = value(entry)
        # The names decide among equals, so that the table comes out the same each time.
        return (
            found is None,
            sign * (found or 0.0),
            entry.round,
            entry.submitter,
            entry.system,
        )

    @functools.cached_property
    def _same_logs(self) -> dict[Any, list[Entry]]:
        """Groups of equal logs: the user's own or first submission, then resubmissions. By energy,
        per measurement.
        """
        found: dict[Any, list[Entry]] = {}
        others = sorted(self.others, key=lambda one: one.round)
        for entry in [*self.own, *others]:
            # Logs too little known to recognise are taken for logs of their own.
            key = (
                entry.logs or id(entry),
                entry.joules if self.by == "energy" else None,
            )
            found.setdefault(key, []).append(entry)
        return found

    def rounds(self, entry: Entry) -> list[str]:
        """Its round, and those in which the same logs were resubmitted."""
        same = [entry]
        for ones in self._same_logs.values():
            if ones[0] is entry:
                same = ones
        return list(dict.fromkeys(one.round for one in same))

    def is_own(self, entry: Entry) -> bool:
        # By identity: one's own result may equal a published one in every value.
        return any(entry is one for one in self.own)

    def rank(self, entry: Entry, among: Sequence[Entry] | None = None) -> int | None:
        """Rank from 1, shared by equal values; None if it has no value."""
        _, value, sign = BY[self.by]
        own = value(entry)
        if own is None:
            return None
        values = [
            found for one in among or self.ranked if (found := value(one)) is not None
        ]
        return 1 + sum(sign * found < sign * own for found in values)

    def efficiency(self, entry: Entry) -> float | None:
        """Rate per accelerator relative to the smallest system of its kind; None if there is only
        one size.
        """
        smallest = self.kinds.get(entry.kind, [None])[0]
        if (
            smallest is None
            or not entry.per_accelerator
            or not smallest.per_accelerator
        ):
            return None
        return entry.per_accelerator / smallest.per_accelerator

    @functools.cached_property
    def kinds(self) -> dict[tuple[str, str, str, str], list[Entry]]:
        """Results of several sizes by round, submitter, division and accelerator, the smallest
        first.
        """
        found: dict[tuple[str, str, str, str], list[Entry]] = {}
        known = [one for one in (*self.own, *self.others) if one.per_accelerator]
        # Of equal sizes, the fastest is the one that others are measured by.
        for entry in sorted(
            known,
            key=lambda one: (one.accelerators or 0.0, -(one.per_accelerator or 0.0)),
        ):
            found.setdefault(entry.kind, []).append(entry)
        return {
            kind: ones
            for kind, ones in found.items()
            if len({one.accelerators for one in ones}) > 1
        }

    def standing(self, entry: Entry) -> str:
        """Rank within its division and among systems of its size, in words."""
        division = [one for one in self.ranked if one.division == entry.division]
        size = [one for one in division if one.accelerators == entry.accelerators]
        place = self.rank(entry, division)
        of_size = self.rank(entry, size)
        if place is None:
            return f"has no {BY[self.by][0]} to rank it by"
        label, value, _ = BY[self.by]
        known = sum(value(one) is not None for one in division)
        peers = sum(value(one) is not None for one in size)
        results = f"{entry.division or 'division unknown'} results"
        standing = f"rank {place} of {known} {results} by {label}"
        if entry.accelerators and peers > 1:
            standing += (
                f", {of_size} of {peers} with {entry.accelerators:g} accelerators"
            )
        return standing

    def as_dict(self) -> dict[str, Any]:
        results = []
        for one in self.ranked:
            about = {
                "rank": self.rank(one),
                "efficiency": self.efficiency(one),
                "own": self.is_own(one),
                UNVERIFIED: self.is_own(one),
            }
            # The first of its rounds is its own.
            again = self.rounds(one)[1:]
            results.append({**one.as_dict(), **about, "resubmitted": again})
        standing = [
            {
                "folder": one.folder,
                "system": one.system,
                "said": self.standing(one),
                UNVERIFIED: True,
            }
            for one in self.own
        ]
        apart = [
            {**one.as_dict(), "departures": one.departures, UNVERIFIED: True}
            for one in self.apart
        ]
        return {"by": self.by, "results": results, "standing": standing, "apart": apart}


def apart_text(entry: Entry) -> str:
    """Why an own result is not ranked."""
    return f"not ranked: {'; '.join(entry.departures)}"


def size(entry: Entry) -> str:
    """Nodes x accelerators per node, as far as known."""
    nodes, count = entry.nodes, entry.accelerators
    if nodes and count:
        return f"{nodes:g} x {count / nodes:g}"
    return f"{count:g}" if count else f"{nodes:g} x 0" if nodes else "-"


def _short(content: str) -> str:
    return content if len(content) <= _LONGEST else content[: _LONGEST - 1] + "…"


def _minutes(entry: Entry) -> str:
    return number_text(entry.minutes, ",.4f") + NOT_CHECKED * (
        not entry.checked and entry.minutes is not None
    )


CELLS: dict[Column, Callable[[League, Entry], str]] = {
    Column("rank", right=True): lambda league, one: number_text(league.rank(one), "d"),
    Column("round"): lambda league, one: ", ".join(league.rounds(one)),
    Column("submitter", drop=4, wraps=True): lambda _, one: _short(one.submitter),
    Column("system", wraps=True): lambda _, one: _short(one.system),
    Column("division", drop=2): lambda _, one: one.division,
    Column("nodes x accel.", right=True): lambda _, one: size(one),
    Column("accelerator", drop=3, wraps=True): lambda _, one: _short(one.accelerator),
    Column("batch", right=True, drop=5): lambda _, one: number_text(
        one.batch_size, "g"
    ),
    Column("minutes", right=True): lambda _, one: _minutes(one),
    Column("published", right=True, drop=3): lambda _, one: number_text(
        one.published_minutes, ",.4f"
    ),
    Column("seq/s", right=True, drop=6): lambda _, one: rate_text(
        one.sequences_per_second
    ),
    Column("/accel", right=True): lambda _, one: rate_text(one.per_accelerator),
    Column("efficiency", right=True, drop=7): lambda league, one: number_text(
        league.efficiency(one), ".1%"
    ),
    Column("MJ", right=True, drop=1): lambda _, one: number_text(
        one.joules and one.joules / 1e6, ",.3f"
    ),
}
COLUMNS = tuple(CELLS)


def parts(league: League, top: int | None) -> list[Part]:
    """The table and the standing of the user's own results."""
    entries = []
    for place, one in enumerate(league.ranked):
        if top is None or place < top or league.is_own(one):
            entries.append(one)
    made = [[cell(league, one) for cell in CELLS.values()] for one in entries]
    # Figures that no row has are left out; the first eight columns name the result.
    blank = {i for i in range(8, len(COLUMNS)) if all(row[i] == "-" for row in made)}
    known = [i for i in range(len(COLUMNS)) if i not in blank]
    styles = ["bold green" if league.is_own(one) else "" for one in entries]
    rows = [[row[i] for i in known] for row in made]
    found: list[Part] = [Table([COLUMNS[i] for i in known], rows, styles)]
    if hidden := len(league.ranked) - len(entries):
        found.append(Line("", f"{hidden} more: --top 0 shows all {len(league.ranked)}"))
    found.append(Line("", EXPLAINED, "dim"))
    for one in league.ranked:
        if league.is_own(one):
            said = f"{one.system}: {league.standing(one)}; {UNVERIFIED}"
            found.append(Line("yours", said, "bold"))
    for one in league.apart:
        said = f"{one.system}: {_minutes(one)} min, {UNVERIFIED}, {apart_text(one)}"
        found.append(Line("apart", said, "yellow"))
    return found
