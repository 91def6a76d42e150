"""Findings, errors, and the output of `review` and `certify` commands: text and JSON.

A command hands ``emit`` its parts (headings, tables, labelled lines) or a function that prints, and
its JSON value: dataclasses, paths, objects with ``as_dict``.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.files import whole_file

if TYPE_CHECKING:  # importing rich takes 0.1 s, which --json and errors do not need
    import rich.table
    from rich.console import Console
    from rich.text import Text

SEVERITIES = ERROR, WARNING, NOTE, IGNORED = "error", "warning", "note", "ignored"
# Characters a line in a file or a pipe, which have no width of their own.
_PIPED_WIDTH = 200


class ReviewError(Exception):
    """User error; the message is one line: what, where, what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a check. ``id``: its name, which stays; ``rule``: the rule's text; ``hint``:
    what to do.

    ``source``: the check that found it, such as "compliance"; "rules" are those that no official
    tool tests. ``crash``: the official checker stops with a traceback, which fails the whole
    result, not just this run. ``unofficial``: no error, but the score does not count.
    """

    id: str
    severity: str
    message: str
    source: str = "rules"
    file: Path | None = None
    line: int | None = None
    key: str | None = None
    rule: str | None = None
    hint: str | None = None
    crash: bool = False
    unofficial: bool = False

    @property
    def blocks(self) -> bool:
        """Whether a score with this finding is not official."""
        return self.severity == ERROR or self.unofficial


def emit(
    arguments: argparse.Namespace,
    *,
    json: Callable[[], Any],
    text: Callable[[], None] | None = None,
    parts: Callable[[], Sequence[Part]] = lambda: (),
) -> None:
    """Prints a result as --json, else as text: by ``text``, or its parts."""
    # The parts are made late: rich is slow to import.
    if arguments.json:
        print_json(json())
    elif text:
        text()
    else:
        print_parts(parts(), console())


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Prints strict JSON and flushes. ``indent`` None: on one line."""
    # Flushed, as `watch --json` is read line by line through a pipe.
    print(json_text(value, indent=indent), flush=True)


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """Strict JSON: NaN and infinities become null."""
    # default=str: paths and dates become text.
    return json.dumps(_plain(value), indent=indent, default=str)


def _plain(value: Any) -> Any:
    # A class may say by itself what its JSON is, a dataclass need not.
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {
            entry.name: getattr(value, entry.name)
            for entry in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    # NaN and infinities are no JSON; parsers of other languages reject them.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def pick(value: Any, names: str) -> dict[str, Any]:
    """Attributes for JSON, by space-separated names: ``name``, ``key=attribute`` or
    ``key=part.attribute``.

    None if a part of the path is None.
    """
    values = {}
    for key, _, path in (name.partition("=") for name in names.split()):
        part = value
        for attribute in (path or key).split("."):
            part = None if part is None else getattr(part, attribute)
        values[key] = part
    return values


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """CSV of rows, headings first; None becomes an empty cell."""
    file = io.StringIO()
    # The csv module would end lines in \r\n, which shell tools take for part of the last cell.
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows(
        ["" if value is None else value for value in _plain(list(row))] for row in rows
    )
    return file.getvalue()


class Column(NamedTuple):
    """A table column. ``drop``: order in which columns are dropped on a narrow terminal; 0:
    never.
    """

    heading: str
    right: bool = False
    drop: int = 0
    wraps: bool = False


class Heading(NamedTuple):
    """Starts a section. ``place``: its folder, shown on terminals only."""

    title: str
    about: str = ""
    place: str = ""


class Table(NamedTuple):
    """Cells are str or rich's Text; ``styles``: one per row."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    styles: Sequence[str] = ()


class Line(NamedTuple):
    """A labelled line below a table; without a label it continues the line before."""

    label: str
    content: str
    style: str = ""


Part = Heading | Table | Line


def print_parts(parts: Sequence[Part], out: Console) -> None:
    """Prints sections to a terminal, dropping table columns that do not fit."""
    for index, part in enumerate(parts):
        if isinstance(part, Table):
            columns, rows = fit(part.columns, part.rows, out.width)
            out.print(table(columns, rows, part.styles))
        elif isinstance(part, Line):
            say(out, (f"  {part.label:<12}", "dim"), (part.content, part.style))
        else:
            if index and not isinstance(parts[index - 1], Heading):
                out.print()
            fits = len(part.title) + 2 + len(part.about) <= out.width
            say(
                out,
                (part.title, "bold"),
                ("  " if fits else "\n") if part.about else "",
                part.about,
            )
            if part.place:
                say(out, (part.place, "dim"))


def fit(
    columns: Sequence[Column], rows: Sequence[Sequence[Any]], width: int
) -> tuple[list[Column], list[list[Any]]]:
    """The columns, and their cells, that fit a terminal of this width."""
    from rich.cells import cell_len

    widths = [
        max([len(column.heading), *(cell_len(str(row[i])) for row in rows)])
        for i, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    can_go = [index for index in kept if columns[index].drop]
    for index in sorted(can_go, key=lambda index: columns[index].drop):
        # Three characters between columns and one at each end, as table() pads them.
        padding = 3 * (len(kept) - 1) + 2
        if sum(widths[i] for i in kept) + padding <= width:
            break
        kept.remove(index)
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Any]], styles: Iterable[str] = ()
) -> rich.table.Table:
    """A table for a terminal. Cells are str or Text; ``styles``: one per row."""
    from rich import box, table
    from rich.text import Text

    drawn = table.Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    # Text that cannot wrap is cut with an ellipsis: a fold in the middle of a number misleads.
    for column in columns:
        drawn.add_column(
            column.heading,
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold" if column.wraps else "ellipsis",
        )
    for row, style in itertools.zip_longest(rows, styles, fillvalue=""):
        # As Text: in a plain str rich would read [brackets] of file names as its own markup.
        cells = [Text(cell) if isinstance(cell, str) else cell for cell in row]
        drawn.add_row(*cells, style=style)
    return drawn


def console() -> Console:
    """A console on stdout; wide if that is not a terminal, so that nothing is cut off in a file."""
    from rich.console import Console

    # Without highlighting: rich would colour every number in the text.
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)


def say(out: Console, *parts: str | tuple[str, str] | Text) -> None:
    """Prints a line of text and (text, style) parts."""
    from rich.text import Text

    # Not wrapped by rich: a path copied from the terminal stays in one piece.
    out.print(Text.assemble(*parts), soft_wrap=True)


def counted(count: float, thing: str) -> str:
    """1 accelerator, 8 accelerators, 2 processes."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{count:g} {thing if count == 1 else plural}"


def number_text(value: float | None, spec: str) -> str:
    """A formatted number; a dash for None."""
    return "-" if value is None else format(value, spec)


def rate_text(value: float | None) -> str:
    """A rate with three or more digits."""
    # Small rates, of one accelerator or a CPU, keep three digits instead of showing 0.
    return number_text(
        value,
        ",.0f" if value is None or value >= 100 else ".3g" if value < 10 else ".1f",
    )


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all. Raises ReviewError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_bytes(
                content.encode("utf-8") if isinstance(content, str) else content
            )
    except OSError as error:
        raise ReviewError(
            f"{path}: cannot be written: {error.strerror or error}"
        ) from None
