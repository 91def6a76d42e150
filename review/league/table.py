"""The league in a terminal and as Markdown."""

from __future__ import annotations

from review.league.entries import Entry
from review.league.ranking import League
from review.logs.output import Column, Line, Part, Table, number_text, rate_text

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


def parts(league: League, top: int | None, width: int | None = None) -> list[Part]:
    """The table, and the rank of the user's own results; of a terminal (``width``) without columns that are blank."""
    entries = shown(league, top)
    made = [cells(league, one) for one in entries]
    known = [i for i in range(len(COLUMNS)) if width is None or i < 8 or any(row[i] != "-" for row in made)]
    styles = ["bold green" if league.is_own(one) else "" for one in entries]
    table = Table([COLUMNS[i] for i in known], [[row[i] for i in known] for row in made], styles)
    if width is None:
        return [table]
    lines = []
    if hidden := len(league.ranked) - len(entries):
        lines.append(Line("", f"{hidden} more: --top 0 shows all {len(league.ranked)}"))
    if any(not entry.checked and entry.minutes is not None for entry in entries):
        lines.append(Line("", EXPLAINED, "dim"))
    own = [one for one in league.ranked if league.is_own(one)]
    return [table, *lines, *(Line("yours", f"{one.system}: {league.standing(one)}; unverified", "bold") for one in own)]
