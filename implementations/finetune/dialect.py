"""How a table is written: encoding, separator, quotation marks; found in the file, or refused where in doubt.

A wrong guess would train on a price or lose a row in silence, so a file is read only if one way alone makes it
rectangular. What cannot be told from the file is asked for by name: ``Reading`` holds the answers.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from bert.data.records import DataError

KINDS = ("tsv", "csv", "jsonl")
SEPARATORS = {",": "','", ";": "';'", "|": "'|'", "\t": "tab"}
SPELLINGS = {"tab": "\t", "\\t": "\t", "none": ""}  # of --separator, besides the character
HEAD = 1 << 20  # characters in which the dialect is looked for: quoted cells may be long
# First bytes of the files that people give by mistake.
_FOREIGN = {
    b"PK\x03\x04": ("an Excel workbook or a zip archive", "save the sheet as CSV (UTF-8)"),
    b"\xd0\xcf\x11\xe0": ("an old Excel workbook", "save the sheet as CSV (UTF-8)"),
    b"PAR1": ("Parquet", "write it with pandas' to_json(orient='records', lines=True)"),
    b"BZh": ("bzip2", "unpack it, or pack it with gzip"),
    b"\xfd7zXZ\x00": ("xz", "unpack it, or pack it with gzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unpack it, or pack it with gzip"),
}
# csv refuses cells above 131,072 characters otherwise.
csv.field_size_limit(1 << 30)  # cells may be long

Row = list[str] | dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the user says about a file; empty: found. separator: a character, tab, or none for a text per line."""

    separator: str = ""
    encoding: str = ""
    no_header: bool = False


@dataclass(frozen=True)
class RowFile:
    """A table as rows of cells, or of JSON records. separator: "" if a line is one text."""

    path: Path
    kind: str
    encoding: str
    separator: str = ""
    quoted: bool = False  # quotation marks enclose cells, as in CSV; else they are text
    head: list[Row] = field(default_factory=list)  # the first rows, as far as HEAD goes

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """First line and content of each row. Raises DataError, naming the line, for what cannot be read.

        A blank line is a row of a table with one column, where it is an empty text, but not at its end.
        """
        # In a table of several columns a blank line is no row.
        one_column = self.kind != "jsonl" and len(self.head[0] if self.head else ()) == 1
        blank: list[int] = []
        # csv finds the ends of lines itself; outside of CSV only a line feed ends a row.
        with opened(self.path, self.encoding, "" if self.quoted else "\n") as file:
            for number, row in self._parsed(file):
                if row:
                    yield from ((before, [""]) for before in blank if one_column)
                    blank.clear()
                    yield number, row
                else:
                    blank.append(number)

    def _parsed(self, file: TextIO) -> Iterator[tuple[int, Row]]:
        """Rows with the number of their first line; a blank line is an empty row."""
        number = 1
        lines = self._lines(file)
        try:
            if self.quoted:
                # strict: a quotation mark that does not close is an
                # error, not the rest of the file in one cell.
                reader = csv.reader(lines, delimiter=self.separator or ",", strict=True)
                for cells in reader:
                    yield number, cells
                    # A row may have several lines: the next one begins after its last.
                    number = reader.line_num + 1
                return
            for number, line in enumerate(lines, 1):
                text = line.rstrip("\r\n")
                if not text.strip():
                    yield number, []
                elif self.kind == "jsonl":
                    yield number, json.loads(text)
                else:
                    yield number, text.split(self.separator) if self.separator else [text]
        except csv.Error as error:
            raise DataError(f"{self.path}:{number}: not CSV ({error}): {_QUOTES}") from None
        except UnicodeError:
            raise DataError(f"{self.path}: {_undecodable(self.path, self.encoding)}") from None
        except ValueError as error:
            raise DataError(f"{self.path}:{number}: not JSONL ({error})") from None

    def _lines(self, file: TextIO) -> Iterator[str]:
        for number, line in enumerate(file, 1):
            if "\0" in line:
                raise _has_nul(self.path, number)
            yield line

    def describe(self) -> str:
        """How it is read, for people."""
        form = "JSON Lines" if self.kind == "jsonl" else "a text per line"
        if self.separator:
            form = f"separator {SEPARATORS.get(self.separator, repr(self.separator))}"
        return form + ("" if self.encoding == "utf-8-sig" else f", {self.encoding}")


_QUOTES = "double the quotation marks within a quoted cell"


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if it is gzip. Raises DataError for a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            # By content, as the name may lack .gz.
            if not file.peek(2).startswith(b"\x1f\x8b"):
                yield file
                return
            with gzip.open(file) as content:
                yield cast(BinaryIO, content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: is gzip and cannot be unpacked ({error}): copy it again"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


@contextmanager
def opened(path: Path, encoding: str, newline: str = "") -> Iterator[TextIO]:
    """The text of a file. Raises DataError for a file that cannot be read."""
    with unpacked(path) as content, io.TextIOWrapper(content, encoding, newline=newline) as text:
        yield text


def row_file(
    path: Path, reading: Reading, wanted: Collection[str] = (), plain_quotes: bool = False
) -> RowFile:
    """Finds how a table is written. wanted: columns of its header; plain_quotes: marks are text.

    Raises DataError for an unreadable file, and for one that can be read in several ways, or in none.
    """
    encoding = reading.encoding or _encoding_of(path)
    try:
        with opened(path, encoding) as file:
            # One character more tells whether this is the whole file.
            text, is_cut = file.read(HEAD), bool(file.read(1))
    except UnicodeError:
        raise DataError(f"{path}: {_undecodable(path, encoding)}") from None
    except LookupError:
        raise DataError(f"{path}: --encoding {encoding}: no such encoding") from None
    if not text.strip():
        raise DataError(f"{path}: has no examples")
    if "\0" in text:  # all separators fail then, for another reason
        raise _has_nul(path, 1 + text[: text.index("\0")].count("\n"))
    suffixes = [suffix.lstrip(".").lower() for suffix in path.suffixes if suffix != ".gz"]
    kind = suffixes[-1] if suffixes and suffixes[-1] in KINDS else ""
    if text.lstrip().startswith("[") and kind in ("", "jsonl"):
        cure = "write an object per line, as pandas' to_json(orient='records', lines=True)"
        raise DataError(f"{path}: is one JSON list: {cure}")
    if kind == "jsonl" or (not kind and text.lstrip().startswith("{")):
        found = RowFile(path, "jsonl", encoding)
    else:
        separator = _separator(path, text, is_cut, kind, reading.separator, wanted)
        enclosed = not plain_quotes and _encloses(text, separator or ",", is_cut)
        # Only in TSV are quotation marks usually text; in CSV one that does not close is an error.
        quoted = enclosed or (separator not in ("", "\t") and not plain_quotes)
        found = RowFile(path, "csv" if quoted else kind or "csv", encoding, separator, quoted)
    # What Rows needs to tell the header and the types of the columns.
    head, size = list[Row](), 0
    for _, row in found:
        head.append(row)
        size += sum(len(str(cell)) for cell in (row if isinstance(row, list) else [row]))
        if size > HEAD:
            break
    return replace(found, head=head)


class _Parse(NamedTuple):
    """The head of a file as CSV: first line and cells of each row, until one that is not CSV."""

    rows: list[tuple[int, list[str]]]
    problem: str  # with its line; "" if there is none

    @property
    def widths(self) -> Counter[int]:
        return Counter(len(cells) for _, cells in self.rows)

    @property
    def is_rectangular(self) -> bool:
        # A wrong separator seldom passes: texts and prices have unequal numbers of commas.
        return not self.problem and len(self.widths) == 1


def _parse(text: str, separator: str, is_cut: bool) -> _Parse:
    """is_cut: the text ends within a row, which is left out."""
    rows: list[tuple[int, list[str]]] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        # A quoted cell that the cut left open.
        within_last = is_cut and "unexpected end" in str(error)
        return _Parse(rows, "" if within_last else f":{line}: not CSV ({error}): {_QUOTES}")
    # The last row may be cut off.
    return _Parse(rows[: -1 if is_cut else None], "")


def _separator(
    path: Path, text: str, is_cut: bool, kind: str, given: str, wanted: Collection[str]
) -> str:
    """The one that makes the table rectangular. Raises DataError if several do, or none."""
    if given:
        separator = SPELLINGS.get(given, given)
        if len(separator) > 1:
            raise DataError(f"--separator {given}: expected one character, tab or none")
        return separator
    if kind == "tsv":
        return "\t"
    parses = {mark: _parse(text, mark, is_cut) for mark in SEPARATORS}
    # No separator occurs: a text per line.
    if all(parse.is_rectangular and set(parse.widths) == {1} for parse in parses.values()):
        return ""
    right = [
        mark for mark, parse in parses.items() if parse.is_rectangular and max(parse.widths) > 1
    ]
    # Where several fit, the one that gives the wanted columns; "a,b;c" can be split at either.
    named = [
        mark for mark in right if set(wanted) <= {cell.strip() for cell in parses[mark].rows[0][1]}
    ]
    if wanted and named:
        right = named
    if len(right) == 1:
        return right[0]
    if right:
        choices = " or ".join(SEPARATORS[mark] for mark in right)
        raise DataError(f"{path}: is the separator {choices}? give --separator")
    raise DataError(f"{path}{_misfit(parses)}")


def _misfit(parses: dict[str, _Parse]) -> str:
    """The first line that does not fit the separator that fits most lines."""

    def fit(mark: str) -> tuple[float, int]:
        rows, widths = parses[mark].rows, parses[mark].widths
        width, count = widths.most_common(1)[0] if rows else (1, 0)
        return (count / len(rows) if width > 1 else 0.0), width

    mark = max(parses, key=fit)
    parse, (share, width) = parses[mark], fit(mark)
    cure = "give --separator (none: a text per line)"
    for line, cells in parse.rows if share else ():
        if len(cells) != width:
            told = f"{len(cells)} columns, expected {width} with the separator {SEPARATORS[mark]}"
            return f":{line}: {told}: quote the cell, or {cure}"
    if parse.problem:
        return parse.problem
    return f": its lines have different numbers of columns: quote the cells, or {cure}"


def _encloses(text: str, separator: str, is_cut: bool) -> bool:
    """Whether quotation marks enclose cells: some do, and each that begins a cell also ends it."""
    begins = text.startswith('"') or any(f'{before}"' in text for before in (separator, "\n", "\r"))
    return begins and _parse(text, separator, is_cut).is_rectangular


def _has_nul(path: Path, line: int) -> DataError:
    cure = "is it UTF-16? give --encoding utf-16-le"
    return DataError(f"{path}:{line}: has a NUL character: {cure}")


def _encoding_of(path: Path) -> str:
    """UTF-8, with or without a mark, or UTF-16 by its mark. Raises DataError for a file of another format."""
    with unpacked(path) as content:
        start = content.read(8)
    for signature, (what, cure) in _FOREIGN.items():
        if start.startswith(signature):
            raise DataError(f"{path}: is {what}: {cure}")
    # Before UTF-16, whose mark is the beginning of this one.
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    # utf-8-sig also reads files without a mark.
    return "utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"


def _undecodable(path: Path, encoding: str) -> str:
    """The first line that is not in the encoding, and how Western European software would have written it."""
    with unpacked(path) as content:
        for number, line in enumerate(content, 1):
            try:
                line.decode(encoding)
            except UnicodeDecodeError as error:
                shown = line[max(0, error.start - 20) : error.start + 20].decode(
                    "cp1252", "replace"
                )
                name = "UTF-8" if encoding == "utf-8-sig" else encoding
                cure = "give --encoding (cp1252, cp1250, utf-16-le, ...)"
                return f"line {number} is not {name}; in cp1252 it is {shown.strip()!r}: {cure}"
    return f"not {encoding}: give --encoding"
