"""How a table is written: encoding, separator, quotation marks; found in the file, or refused where
in doubt.

A wrong guess would train on a price or lose a row in silence, so a file is read only if one way
alone makes it rectangular. What cannot be told from the file is asked for by name: ``Reading``
holds the answers.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bert.data.records import DataError

KINDS = ("tsv", "csv", "jsonl")
SEPARATORS = {",": "','", ";": "';'", "|": "'|'", "\t": "tab"}
SPELLINGS = {"tab": "\t", "none": ""}  # of --separator, besides the character
_UNPACK = "unpack it, or pack it with gzip"
_SHEET = "save the table as CSV (UTF-8)"
_EXPORT = "write it with pandas' to_json(orient='records', lines=True)"
# First bytes of the files that people give by mistake; of those in lower case, any case.
_FOREIGN = {
    (b"PK\x03\x04",): (
        "an Excel workbook or a zip archive",
        "save the sheet as CSV (UTF-8), or unpack it",
    ),
    (b"\xd0\xcf\x11\xe0",): ("an old Excel workbook", _SHEET),
    (b"%PDF",): ("PDF", _SHEET),
    (b"{\\rtf",): ("RTF", _SHEET),
    (b"<!doctype", b"<html", b"<table", b"<!--", b"<?xml"): (
        "a web page or XML",
        _SHEET,
    ),
    (b"PAR1",): ("Parquet", _EXPORT),
    (b"ARROW1",): ("Arrow", _EXPORT),
    (b"SQLite format 3",): ("an SQLite database", _EXPORT),
    (b"\x80\x04", b"\x80\x05"): ("a pickle of Python", _EXPORT),
    (b"\x1f\x8b",): ("gzip within gzip", "unpack it"),
    (b"BZh",): ("bzip2", _UNPACK),
    (b"\xfd7zXZ",): ("xz", _UNPACK),
    (b"7z\xbc\xaf",): ("7-Zip", _UNPACK),
    (b"\x28\xb5\x2f\xfd",): ("zstd", _UNPACK),
    (b"version https://git-lfs",): ("a pointer of Git LFS", "git lfs pull"),
    (b"sep=",): ("a table below Excel's line sep=", "remove that line"),
}
# UTF-32's mark begins with UTF-16's.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    codecs.BOM_UTF8: "UTF-8",
}
# JSON, whatever the file is called.
_RECORD, _LIST = re.compile(r'\s*\{\s*["}]'), re.compile(r'\s*\[\s*["{[\]]')
_QUOTES = "double the quotation marks within a quoted cell"
# csv refuses cells above 131,072 characters otherwise.
csv.field_size_limit(1 << 30)  # cells may be long

Row = list[str] | dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the user says about a file; empty: found. separator: a character, tab, or none for a
    text per line.
    """

    separator: str = ""
    encoding: str = ""
    no_header: bool = False


class RowFile(NamedTuple):
    """A table as rows of cells, or of JSON records, each with its first line. form: how it was
    read, for people.
    """

    rows: list[tuple[int, Row]]
    is_jsonl: bool
    form: str


def read(path: Path, reading: Reading, plain_quotes: bool = False) -> RowFile:
    """Reads a table. plain_quotes: quotation marks are text.

    A blank line is a row of a table with one column, where it is an empty text, but not at its end.
    Raises DataError for an unreadable file, and for one that can be read in several ways, or in
    none.
    """
    text, encoding = _text(path, reading.encoding)
    suffixes = [
        suffix.lstrip(".").lower() for suffix in path.suffixes if suffix != ".gz"
    ]
    kind = suffixes[-1] if suffixes and suffixes[-1] in KINDS else ""
    if _LIST.match(text):
        cure = (
            "write an object per line, as pandas' to_json(orient='records', lines=True)"
        )
        raise DataError(f"{path}: is one JSON list: {cure}")
    if kind == "jsonl" or _RECORD.match(text):
        return RowFile(_records(path, text), True, f"{encoding}JSON Lines")
    separator = _separator(path, text, kind, reading.separator)
    parse = plain = _parse(text, separator or ",")
    is_text = plain_quotes or reading.separator == "none"
    # Only in TSV are quotation marks usually text; in CSV one that does not close is an error.
    if is_text or separator in ("", "\t"):
        lines = enumerate(text.split("\n"), 1)
        plain = _Parse([(number, _cells(line, separator)) for number, line in lines])
    is_quoted = not is_text and _encloses(text, parse, plain)
    if is_quoted and not separator and parse.long_rows:
        told = f"{parse.long_rows[0]}: quotation marks enclose several lines"
        cure = "give --separator ',' if they are one text, or none: a text per line"
        raise DataError(f"{path}:{told}: {cure}")
    if not is_quoted:
        parse = plain
    if parse.problem:
        raise DataError(f"{path}{parse.problem}")
    last = max(number for number, cells in parse.rows if cells)
    is_one_column = len(next(cells for _, cells in parse.rows if cells)) == 1
    rows: list[tuple[int, Row]] = [
        (number, cells or [""])
        for number, cells in parse.rows
        if cells or (is_one_column and number < last)
    ]
    form = f"separator {SEPARATORS.get(separator, repr(separator))}"
    # A quotation mark that stands for itself may have joined two rows.
    if parse.long_rows:
        form += f", rows of several lines: {len(parse.long_rows):,}"
    if blank := sum(number <= last for number, _ in parse.rows) - len(rows):
        form += f", blank lines left out: {blank:,}"
    return RowFile(rows, False, encoding + (form if separator else "a text per line"))


def _text(path: Path, encoding: str) -> tuple[str, str]:
    """The text of a file, unpacked if it is gzip, and what to say of its encoding. Raises
    DataError.
    """
    try:
        data = path.read_bytes()
        # By content, as the name may lack .gz.
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        told = f"is gzip and cannot be unpacked ({error}): copy it again"
        raise DataError(f"{path}: {told}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    _refuse_foreign(path, data)
    text, found = _decoded(path, data, encoding)
    text = text.removeprefix("\ufeff")
    _refuse_foreign(path, text[:99].lstrip().lower().encode(errors="replace"))
    if "\n" not in text:  # old Macintosh
        text = text.replace("\r", "\n")
    if not text.strip():
        raise DataError(f"{path}: has no examples")
    return text, found


def _refuse_foreign(path: Path, start: bytes) -> None:
    for signatures, (format_name, cure) in _FOREIGN.items():
        if start.startswith(signatures):
            raise DataError(f"{path}: is {format_name}: {cure}")


def _decoded(path: Path, data: bytes, given: str) -> tuple[str, str]:
    """The text, and what to say if its encoding is not the given one.

    The mark tells, and so does UTF-8 beyond ASCII, which other encodings are not by chance: cp1252
    would read it as other letters. Without either and none given: UTF-8. Raises DataError.
    """
    marked = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "")
    in_utf8, others = list[int](), list[int]()  # lines beyond ASCII
    if marked in ("", "UTF-8"):
        for number, line in enumerate(data.split(b"\n"), 1):
            try:
                line.decode()
                if not line.isascii():
                    in_utf8.append(number)
            except UnicodeError:
                others.append(number)
    is_utf8 = in_utf8 and not others
    encoding = marked or ("UTF-8" if is_utf8 or not given else given)
    failed = None
    try:
        differs = given and codecs.lookup(given) != codecs.lookup(encoding)
        text = data.decode(encoding)
    except LookupError:
        told = f"--encoding {given}: no such encoding, such as cp1252"
        raise DataError(told) from None
    except UnicodeError as error:
        failed, text = error, "" if marked else data.decode("latin-1")
    if "\0" in text:  # all separators fail then, for another reason
        number = 1 + text[: text.index("\0")].count("\n")
        order = "le" if data.index(b"\0") % 2 else "be"
        cure = f"is it UTF-16? give --encoding utf-16{order}"
        raise DataError(f"{path}:{number}: has a NUL character: {cure}")
    # Of an encoding with several bytes a character, a short line may be UTF-8 by chance.
    is_single = not failed and len(text) == len(data)
    if others and in_utf8 and (is_single or len(in_utf8) >= len(others)):
        told = f"line {others[0]} is not UTF-8, line {in_utf8[0]} is: two encodings"
        raise DataError(f"{path}: {told}: write all lines in UTF-8")
    if failed:
        # Some encodings do not say where.
        number = 1 + data.count(b"\n", 0, getattr(failed, "start", 0))
        line = data.split(b"\n")[number - 1]
        cure = "another --encoding"
        if not given:
            guess = f"{line.decode('cp1252', 'replace')!r:.60}"
            cure = f"--encoding, such as cp1252 (Windows in Western Europe: {guess})"
        cure = "write it again" if marked else f"give {cure}"
        raise DataError(f"{path}: line {number} is not {encoding}: {cure}")
    return text, f"{encoding} (not {given}), " if differs else ""


def _records(path: Path, text: str) -> list[tuple[int, Row]]:
    rows: list[tuple[int, Row]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_unique)
            if not isinstance(record, dict):
                raise ValueError("no object")
            # Half of a character could not be written to the output.
            json.dumps(record, ensure_ascii=False).encode()
        # A line of thousands of brackets makes the parser run out of stack.
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSONL ({error})") from None
        rows.append((number, record))
    return rows


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a name that occurs twice, whose first value would be
    lost.
    """
    names = Counter(name for name, _ in pairs)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two values of {twice[0]!r}")
    return dict(pairs)


def _cells(line: str, separator: str) -> list[str]:
    """Cells of a line where quotation marks are text; none of a blank one."""
    line = line.rstrip("\r")
    # Separators alone are a row of empty cells.
    if not line:
        return []
    return line.split(separator) if separator else [line]


class _Parse(NamedTuple):
    """A file as CSV: first line and cells of each row, none of a blank one, until a row that is not
    CSV.
    """

    rows: list[tuple[int, list[str]]]
    problem: str = ""  # with its line; "" if there is none

    @property
    def widths(self) -> Counter[int]:
        return Counter(len(cells) for _, cells in self.rows if cells)

    @property
    def long_rows(self) -> list[int]:
        """First lines of the rows with a line break in a cell."""
        return [
            line for line, cells in self.rows if any("\n" in cell for cell in cells)
        ]

    @property
    def is_rectangular(self) -> bool:
        # A wrong separator seldom passes: texts and prices have unequal numbers of commas.
        return not self.problem and len(self.widths) == 1


def _parse(text: str, separator: str) -> _Parse:
    rows: list[tuple[int, list[str]]] = []
    # strict: a quotation mark that does not close is an error, not the rest of the file in one
    # cell.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    line = 1
    try:
        for cells in reader:
            rows.append((line, cells))
            # A row may have several lines: the next one begins after its last.
            line = reader.line_num + 1
    except csv.Error as error:
        return _Parse(rows, f":{line}: not CSV ({error}): {_QUOTES}")
    return _Parse(rows)


def _encloses(text: str, parse: _Parse, plain: _Parse) -> bool:
    """Whether quotation marks enclose cells: some do, and each that begins a cell also ends it.

    plain: the file with quotation marks as text. If that makes a table of more rows, two marks of
    speech have joined some.
    """
    begins = text.startswith('"') or any(f'{before}"' in text for before in ",\t\n\r")
    if not (begins and parse.is_rectangular):
        return False
    is_table = plain.is_rectangular and max(plain.widths) > 1
    return not (is_table and len(plain.rows) > len(parse.rows))


def _separator(path: Path, text: str, kind: str, given: str) -> str:
    """The one that makes the table rectangular. Raises DataError if several do, or none."""
    if given:
        separator = SPELLINGS.get(given, given)
        if len(separator) > 1:
            raise DataError(f"--separator {given}: expected one character, tab or none")
        return separator
    if kind == "tsv" and "\t" in text:
        return "\t"
    parses = {mark: _parse(text, mark) for mark in SEPARATORS}
    # No separator occurs: a text per line.
    if all(
        parse.is_rectangular and set(parse.widths) == {1} for parse in parses.values()
    ):
        return ""
    right = [
        mark
        for mark, parse in parses.items()
        if parse.is_rectangular and max(parse.widths) > 1
    ]
    if kind == "tsv":  # of a column without a tab, unless another mark makes more
        right = ["\t", *right]
    if len(right) == 1:
        return right[0]
    if right:
        choices = " or ".join(SEPARATORS[mark] for mark in right)
        raise DataError(f"{path}: is the separator {choices}? give --separator")
    raise DataError(f"{path}{_misfit(parses)}")


def _misfit(parses: dict[str, _Parse]) -> str:
    """The first line that does not fit the separator that fits most lines."""
    cure = "give --separator (none: a text per line)"
    # Lines with its usual number of columns, of each separator; of the others that number is 1.
    fits = {
        mark: (count, width)
        for mark, parse in parses.items()
        for width, count in parse.widths.most_common(1)
        if width > 1
    }
    if fits:
        mark = max(fits, key=lambda mark: fits[mark])
        _, width = fits[mark]
        for line, cells in parses[mark].rows:
            if len(cells) not in (0, width):
                told = f"{len(cells)} columns, expected {width} with the separator {SEPARATORS[mark]}"
                return f":{line}: {told}: quote the cell, or {cure}"
        return parses[mark].problem
    if problem := parses[","].problem:
        return problem
    return f": its lines have different numbers of columns: quote the cells, or {cure}"
