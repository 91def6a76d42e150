"""The league in a terminal, as CSV and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from review.league.entries import Entry
from review.league.ranking import League
from review.logs.output import Column, console, fit, labelled, number_text, rate_text, say, table

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = (
    Column("rank", right=True),
    Column("round"),
    Column("submitter", drop=4, wraps=True),
    Column("system", wraps=True),
    Column("division", drop=2),
    Column("nodes x accel.", right=True),
    Column("accelerator", drop=3, wraps=True),
    Column("batch", right=True, drop=5),
    Column("minutes", right=True),
    Column("published", right=True, drop=3),
    Column("seq/s", right=True, drop=6),
    Column("/accel", right=True),
    Column("efficiency", right=True, drop=7),
    Column("MJ", right=True, drop=1),
)
_LONGEST = 36
NOT_CHECKED = "*"
EXPLAINED = f"{NOT_CHECKED} not checked: the olympic mean of the logs as they are, which no installed rules accept"


def cells(league: League, entry: Entry) -> list[str]:
    """The row of an entry."""
    rank, efficiency, joules = league.rank(entry), league.efficiency(entry), entry.joules
    minutes = number_text(entry.minutes, ",.4f")
    return [
        number_text(rank, "d"),
        ", ".join(league.rounds(entry)),
        _short(entry.submitter),
        _short(entry.system),
        entry.division,
        size(entry),
        _short(entry.accelerator),
        number_text(entry.batch_size, "g"),
        minutes if entry.checked or entry.minutes is None else minutes + NOT_CHECKED,
        number_text(entry.published_minutes, ",.4f"),
        rate_text(entry.sequences_per_second),
        rate_text(entry.per_accelerator),
        number_text(efficiency, ".1%"),
        number_text(None if joules is None else joules / 1e6, ",.3f"),
    ]


def size(entry: Entry) -> str:
    """Nodes x accelerators of a node, or what is known of it."""
    nodes, count = entry.nodes, entry.accelerators
    if nodes and count:
        return f"{nodes:g} x {count / nodes:g}"
    return f"{count:g}" if count else f"{nodes:g} x 0" if nodes else "-"


def _short(content: str) -> str:
    return content if len(content) <= _LONGEST else content[: _LONGEST - 1] + "…"


def shown(league: League, top: int | None) -> list[Entry]:
    """The first ``top`` results (all if None) and the user's own."""
    return [one for place, one in enumerate(league.ranked) if top is None or place < top or league.is_own(one)]


def rows(league: League, top: int | None) -> list[list[str]]:
    """Headings and rows, for Markdown."""
    return [[one.heading for one in COLUMNS], *(cells(league, one) for one in shown(league, top))]


def print_league(league: League, top: int | None, out: Console | None = None) -> None:
    """Prints the table, and the rank of the user's own results."""
    out, entries = out or console(), shown(league, top)
    made = [cells(league, one) for one in entries]
    known = [i for i in range(len(COLUMNS)) if i < 8 or any(row[i] != "-" for row in made)]
    columns, body = fit([COLUMNS[i] for i in known], [[row[i] for i in known] for row in made], out.width)
    out.print(table(columns, body, ["bold green" if league.is_own(one) else "" for one in entries]))
    hidden = len(league.ranked) - len(entries)
    if hidden:
        say(out, labelled("", f"{hidden} more: --top 0 shows all {len(league.ranked)}"))
    if any(not entry.checked and entry.minutes is not None for entry in entries):
        say(out, labelled("", EXPLAINED, "dim"))
    for entry in (one for one in league.ranked if league.is_own(one)):
        say(out, labelled("yours", f"{entry.system}: {league.standing(entry)}", "bold"))
