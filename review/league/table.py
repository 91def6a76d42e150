"""The league in a terminal, as CSV and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from review.league.entries import Entry
from review.league.ranking import League
from review.logs.output import console, labelled, rate_text

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (  # heading, right-aligned, the order in which columns go where the terminal is too narrow: 0 stays
    ("rank", True, 0),
    ("round", False, 0),
    ("submitter", False, 4),
    ("system", False, 0),
    ("division", False, 6),
    ("nodes x accel.", True, 0),
    ("accelerator", False, 5),
    ("batch", True, 3),
    ("minutes", True, 0),
    ("seq/s", True, 2),
    ("/accel", True, 0),
    ("efficiency", True, 1),
    ("MJ", True, 7),
)
_GAP, _LONGEST = 3, 36
NOT_CHECKED = "*"
EXPLAINED = f"{NOT_CHECKED} not checked: the olympic mean of the logs as they are, which no installed rules accept"


def cells(league: League, entry: Entry) -> list[str]:
    """The row of an entry."""
    rank, efficiency, each = league.rank(entry), league.efficiency(entry), entry.per_accelerator
    rate = entry.sequences_per_second
    return [
        "-" if rank is None else str(rank),
        entry.round,
        _short(entry.submitter),
        _short(entry.system),
        entry.division,
        size(entry),
        _short(entry.accelerator),
        "-" if entry.batch_size is None else f"{entry.batch_size:g}",
        "-" if entry.minutes is None else f"{entry.minutes:,.4f}{'' if entry.checked else NOT_CHECKED}",
        rate_text(rate),
        rate_text(each),
        "-" if efficiency is None else f"{100 * efficiency:.1f}%",
        "-" if entry.joules is None else f"{entry.joules / 1e6:,.3f}",
    ]


def size(entry: Entry) -> str:
    """Nodes x accelerators of a node, or what is known of it."""
    nodes, count = entry.nodes, entry.accelerators
    if nodes and count:
        each = count / nodes
        return f"{nodes:g} x {each:g}"
    return f"{count:g}" if count else f"{nodes:g} x 0" if nodes else "-"


def _short(content: str) -> str:
    return content if len(content) <= _LONGEST else content[: _LONGEST - 1] + "…"


def headings() -> list[str]:
    """Of the columns."""
    return [heading for heading, _, _ in _COLUMNS]


def shown(league: League, top: int | None) -> list[Entry]:
    """The first ``top`` results and one's own; all where it is None."""
    return [one for place, one in enumerate(league.ranked) if top is None or place < top or league.is_own(one)]


def rows(league: League, top: int | None) -> list[list[str]]:
    """Headings and rows, for Markdown."""
    return [headings(), *(cells(league, one) for one in shown(league, top))]


def print_league(league: League, top: int | None, out: Console | None = None) -> None:
    """Prints the table, and where one's own results stand."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = out or console()
    entries = shown(league, top)
    made = [cells(league, one) for one in entries]
    kept = [index for index in range(len(_COLUMNS)) if index < 8 or any(row[index] != "-" for row in made)]
    for index in sorted((i for i in kept if _COLUMNS[i][2]), key=lambda i: -_COLUMNS[i][2]):
        widths = [max(len(_COLUMNS[i][0]), *(len(row[i]) for row in made)) for i in kept]
        if sum(widths) + _GAP * len(kept) > out.width:
            kept.remove(index)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for index in kept:
        heading, right, _ = _COLUMNS[index]
        table.add_column(heading, justify="right" if right else "left", no_wrap=right)
    for entry, row in zip(entries, made, strict=True):
        table.add_row(*(Text(row[index]) for index in kept), style="bold green" if league.is_own(entry) else "")
    out.print(table)
    hidden = len(league.ranked) - len(entries)
    if hidden:
        out.print(labelled("", f"{hidden} more: --top 0 shows all {len(league.ranked)}"), soft_wrap=True)
    if any(not entry.checked and entry.minutes is not None for entry in entries):
        out.print(labelled("", EXPLAINED, "dim"), soft_wrap=True)
    for entry in league.own:
        out.print(labelled("yours", f"{entry.system}: {league.standing(entry)}", "bold"), soft_wrap=True)
