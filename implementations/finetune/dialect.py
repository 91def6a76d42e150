"""How a table is written: encoding, separator, quotation marks; found in the file, or refused where
in doubt.

A wrong guess would train on a price or lose a row in silence. So a file is read in each way that
programs write tables, and taken only if one way alone makes it rectangular; where quotation marks
could be text, if a program that encloses cells would have written the same. What cannot be told
from the file is asked for by name: ``Reading`` holds the answers.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from bert.data.records import DataError
from common.foreign import foreign

KINDS = ("tsv", "csv", "jsonl")
SEPARATORS = ",;|\t"
SPELLINGS = {"tab": "\t", "none": ""}  # of SEPARATOR, besides the character
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
# Ways to write a cell that holds a separator, a quotation mark or a line break, for csv's writer.
QUOTING: dict[str, dict[str, Any]] = {
    # In marks, those within doubled: pandas, Excel, Google Sheets' CSV.
    "double": {},
    # In marks, those within behind a backslash, which else is text: write.table, made "double".
    "R": {},
    # In marks or not, each of these behind a backslash: csv's and pandas' escapechar, MySQL's
    # ENCLOSED BY.
    "backslash": {"escapechar": "\\", "doublequote": False},
    # Marks are text, and a backslash is before the others: MySQL's and Postgres' text.
    "dump": {"escapechar": "\\", "quoting": csv.QUOTE_NONE},
    # Google Sheets' TSV, which has neither line breaks nor tabs in cells.
    "none": {"quoting": csv.QUOTE_NONE},
}
ESCAPING = ["backslash", "dump"]
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# What stands behind a backslash, and what it means; N is the missing value of databases.
_ESCAPED = {letter: letter for letter in "\\'\"\r\n\t,;|"}
_ESCAPED |= {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "0": "\0",
    "b": "\b",
    "Z": "\x1a",
    "N": r"\N",
}
# Private use: stands for an escaped character while csv reads, which knows neither \n nor \N.
_PRIVATE, _NEVER = 0xF0000, "\uffff"
_MEANT = {_PRIVATE + ord(letter): meant for letter, meant in _ESCAPED.items()}
# Which cells programs enclose, as csv's writer does with these arguments: quoting, and a line's end,
# as it also encloses cells with a character of that.
_ENCLOSED: dict[str, tuple[Any, str]] = {
    # With a separator, a mark or a line break: pandas, R, Excel's CSV.
    "special": (csv.QUOTE_MINIMAL, "\r\n"),
    # With a comma, too, where tabs separate: Excel's text.
    "commas": (csv.QUOTE_MINIMAL, ",\r\n"),
    "all": (csv.QUOTE_ALL, "\r\n"),
    "none": (csv.QUOTE_NONE, "\r\n"),
}
_QUOTING_CURE = "set QUOTING (predict: --quoting) to double, none (they are text), backslash, dump or R"
_QUOTES = "double the quotation marks within a quoted cell"
# csv refuses cells above 131,072 characters otherwise.
csv.field_size_limit(1 << 30)  # cells may be long

Row = list[str] | dict[str, Any]


class Reading(NamedTuple):
    """What the user says about a file; empty: found. separator: a character, tab, or none for a
    text per line; quoting: a key of QUOTING.
    """

    separator: str = ""
    quoting: str = ""
    encoding: str = ""
    no_header: bool = False

    @classmethod
    def of(cls, settings: Any) -> "Reading":
        """Those among settings, or options."""
        return cls(*(getattr(settings, name) for name in cls._fields))


class RowFile(NamedTuple):
    """A table as rows of cells, or of JSON records, each with its first line. form: how it was
    read, for people.
    """

    rows: list[tuple[int, Row]]
    is_jsonl: bool
    form: str


def read(path: Path, reading: Reading, plain_quotes: bool = False) -> RowFile:
    """Reads a table. plain_quotes: in a file of tabs quotation marks are text.

    A blank line is a row of a table with one column, where it is an empty text, but not at its end.
    Raises DataError for an unreadable file, and for one that can be read in several ways, or in
    none.
    """
    text, encoding = text_of(path, reading.encoding)
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if _LIST.match(text):
        cure = "as pandas' to_json(orient='records', lines=True)"
        raise DataError(f"{path}: is one JSON list: write an object per line, {cure}")
    if kind == "jsonl" or _RECORD.match(text):
        return RowFile(_records(path, text), True, f"{encoding}JSON Lines")
    if plain_quotes and "\t" in text:
        separator, parse = "\t", _parse(text, "\t", "none", ragged=True)
    elif reading.separator == "none":
        separator, parse = "", _parse(text, "", "none")
    else:
        separator, parse = _found(path, text, kind, reading)
    if parse.problem:
        raise DataError(f"{path}{parse.problem}")
    last = max(number for number, cells in parse.rows if cells)
    rows: list[tuple[int, Row]] = [
        (number, cells or [""])
        for number, cells in parse.rows
        if cells or (parse.width == 1 and number < last)
    ]
    form = f"separator {_shown(separator)}"
    # A quotation mark that stands for itself may have joined two rows.
    if parse.long_rows:
        form += f", rows of several lines: {len(parse.long_rows):,}"
    if blank := sum(number <= last for number, _ in parse.rows) - len(rows):
        form += f", blank lines left out: {blank:,}"
    return RowFile(rows, False, encoding + (form if separator else "a text per line"))


def text_of(path: Path, encoding: str) -> tuple[str, str]:
    """The text of a file, unpacked if it is gzip, and what to say of its encoding. Raises
    DataError.
    """
    try:
        data = path.read_bytes()
        # By content, as the name may lack .gz.
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        message = f"is gzip and cannot be unpacked ({error}): copy it again"
        raise DataError(f"{path}: {message}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    _refuse_foreign(path, data[:300])
    text, found = _decoded(path, data, encoding)
    text = text.removeprefix("\ufeff")
    _refuse_foreign(path, text[:99].encode(errors="replace"))  # in UTF-16
    if "\n" not in text:  # old Macintosh
        text = text.replace("\r", "\n")
    if not text.strip():
        raise DataError(f"{path}: has no examples")
    return text, found


def _refuse_foreign(path: Path, start: bytes) -> None:
    if message := foreign(start, "table"):
        raise DataError(f"{path}: is {message}")


def _decoded(path: Path, data: bytes, given: str) -> tuple[str, str]:
    """The text, and what to say if its encoding is not the given one.

    The mark tells, and so does UTF-8 beyond ASCII, which other encodings are not by chance: cp1252
    would read it as other letters. Without either and none given: UTF-8. Raises DataError.
    """
    marked = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "")
    lines = data.split(b"\n") if marked in ("", "UTF-8") else []
    in_utf8 = [
        n for n, line in enumerate(lines, 1) if _is_utf8(line) and not line.isascii()
    ]
    others = [n for n, line in enumerate(lines, 1) if not _is_utf8(line)]
    is_utf8 = in_utf8 and not others
    encoding = marked or ("UTF-8" if is_utf8 or not given else given)
    wrong = ""
    try:
        differs = given and codecs.lookup(given) != codecs.lookup(encoding)
        text = data.decode(encoding)
    except LookupError:
        message = (
            f"ENCODING={given} (predict: --encoding): no such encoding, such as cp1252"
        )
        raise DataError(message) from None
    except UnicodeError as error:
        # Some encodings do not say where.
        at = data.count(b"\n", 0, getattr(error, "start", 0))
        wrong, text = (
            f"line {at + 1} is not {encoding}",
            "" if marked else data.decode("latin-1"),
        )
        line = data.split(b"\n")[at].decode("cp1252", "replace")
    if "\0" in text:  # all separators fail then, for another reason
        number = 1 + text[: text.index("\0")].count("\n")
        order = "le" if data.index(b"\0") % 2 else "be"
        cure = f"is it UTF-16? set ENCODING=utf-16{order} (predict: --encoding)"
        raise DataError(f"{path}:{number}: has a NUL character: {cure}")
    # Of an encoding with several bytes a character, many short lines may be UTF-8 by chance; of one
    # byte a character, rarely more than one in twenty.
    limit = 20 if not wrong and len(text) == len(data) else 1
    if others and limit * len(in_utf8) >= len(others):
        message = f"line {others[0]} is not UTF-8, line {in_utf8[0]} is: two encodings"
        raise DataError(f"{path}: {message}: write all lines in UTF-8")
    if wrong:
        cure = "set another ENCODING (predict: --encoding)"
        if not given:
            guess = f"Windows in Western Europe: {line!r:.60}"
            cure = f"set ENCODING (predict: --encoding), such as cp1252 ({guess})"
        raise DataError(f"{path}: {wrong}: {'write it again' if marked else cure}")
    if others and in_utf8:
        return text, f"line {in_utf8[0]} may be UTF-8, "
    return text, f"{encoding} (not {given}), " if differs else ""


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeError:
        return False
    return True


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


class _Parse(NamedTuple):
    """A file read in one way: first line and cells of each row, none of a blank one, up to the row
    that does not fit.
    """

    rows: list[tuple[int, list[str]]]
    problem: str = ""  # with its line; "" if it is a table
    is_short: bool = False  # the first row was, as R's write.table has no name above those of the rows

    @property
    def table(self) -> list[list[str]]:
        return [cells for _, cells in self.rows if cells]

    @property
    def width(self) -> int:
        return len(next((cells for _, cells in self.rows if cells), ()))

    @property
    def long_rows(self) -> list[int]:
        """First lines of the rows with a line break in a cell."""
        return [
            line for line, cells in self.rows if any("\n" in cell for cell in cells)
        ]


def _parse(text: str, separator: str, quoting: str, ragged: bool = False) -> _Parse:
    """ragged: rows may have any number of cells."""
    if quoting == "R":
        text = text.replace('\\"', '""')
    elif quoting in ESCAPING:
        text = _ESCAPE.sub(_as_private, text)
    # strict: a quotation mark that does not close is an error, not the rest of the file in one
    # cell.
    how = {**QUOTING[quoting], "escapechar": None, "delimiter": separator or _NEVER}
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, **how)
    rows: list[tuple[int, list[str]]] = []
    line, width, is_short = 1, 0, False
    try:
        for cells in reader:
            # A row may have several lines: the next one begins after its last.
            breaks = sum(
                cell.count("\n") + cell.count(chr(_PRIVATE + 10)) for cell in cells
            )
            cells = [cell.translate(_MEANT) for cell in cells]
            if len(rows) == 1 and separator == "\t" and len(cells) == width + 1:
                is_short, width = True, width + 1
            width = width or len(cells)
            if cells and len(cells) != width and not ragged:
                message = f"{len(cells)} columns, expected {width} with the separator"
                return _Parse(rows, f":{line}: {message} {_shown(separator)}")
            rows.append((line, cells))
            line += 1 + breaks
    except csv.Error as error:
        return _Parse(rows, f":{line}: not CSV ({error}): {_QUOTES}")
    if is_short:
        names = [cells[0] for _, cells in rows[1:] if cells]
        if len({*names}) < len(names) or not all(map(str.isdecimal, names)):
            return _Parse(rows[:1], f":{rows[1][0]}: a column more than the first line")
        rows[0] = (1, ["", *rows[0][1]])
    return _Parse(rows, is_short=is_short)


def _as_private(escape: re.Match[str]) -> str:
    return chr(_PRIVATE + ord(escape[1])) if escape[1] in _ESCAPED else escape[1]


def _shown(separator: str) -> str:
    return "tab" if separator == "\t" else repr(separator)


def _quotings(text: str, separator: str) -> list[str]:
    """Ways to enclose cells that could matter in this text."""
    ways = ["double"]
    if '\\"' in text:
        ways.append("R")
    if "\\" in text and all(e[1] in _ESCAPED for e in _ESCAPE.finditer(text)):
        ways += ESCAPING
    # Only without commas do programs write quotation marks as they are.
    if '"' in text and separator in ("\t", ""):
        ways.append("none")
    return ways


def _certainty(text: str, parse: _Parse, separator: str, quoting: str) -> int:
    """Whether a program wrote the table in this way: 2 surely, 1 perhaps, 0 no: none writes these
    cells as they are in the file.
    """
    if quoting in ("dump", "none"):
        return int(separator in ("", "\t"))
    if quoting == "R":
        text = text.replace('\\"', '""')
    rows = [[cell.replace("\r\n", "\n") for cell in cells] for _, cells in parse.rows]
    rows[0] = rows[0][parse.is_short :]
    how = {"delimiter": separator or ",", **QUOTING[quoting]}
    wanted = text.replace("\r\n", "\n").rstrip("\n")
    alike = (cells for cells in _ENCLOSED if _written(rows, cells, how) == wanted)
    enclosed = next(alike, "")
    if not enclosed:
        return 0
    if enclosed == "none":
        # Sure only by a mark behind a backslash, which no plain text has.
        return 1 + ('\\"' in text)
    # Sure if something proves that a program enclosed: a cell of speech alone is in marks, too,
    # which are text. But speech has no marks that are doubled or empty, and a separator only beside
    # a backslash or a line break.
    cells = [cell for row in rows for cell in row]
    simple = [cell for cell in cells if not re.search(r"[\n\\]", cell)]
    is_proved = '"' in "".join(cells) or how["delimiter"] in "".join(simple)
    is_proved |= enclosed == "all" or (parse.width == 1 and [""] in rows)
    many = enclosed == "commas" and sum("," in cell for cell in cells) > 2
    return 1 + (is_proved or many)


def _written(rows: list[list[str]], enclosed: str, how: dict[str, Any]) -> str | None:
    """The table as a program writes it, with line feeds as line ends; None if it cannot."""
    quoting, end = _ENCLOSED[enclosed]
    # Commas separate: as "special" writes it. From Python 3.13 on csv refuses it.
    if how["delimiter"] in end:
        return None
    target = io.StringIO(newline="")
    writer = csv.writer(target, lineterminator=end, quoting=quoting, **how)
    try:
        writer.writerows(rows)
    except csv.Error:
        return None
    return target.getvalue().replace(end, "\n").rstrip("\n")


def _one_quoting(
    path: Path, text: str, separator: str, ways: dict[str, _Parse]
) -> _Parse:
    """The table by the way to enclose cells. Raises DataError if several ways give others."""
    sure: dict[str, int] = {}  # of each table, by the first way that gives it
    for way, parse in ways.items():
        first = next((w for w in sure if ways[w].table == parse.table), way)
        certainty = _certainty(text, parse, separator, way)
        sure[first] = max(sure.get(first, 0), certainty)
    best = [way for way in sure if sure[way] == 2]
    if not best:  # a missing value as databases write it
        best = [w for w in sure if w in ESCAPING and r"\N" in chain(*ways[w].table)]
    if not best:
        best = [way for way in sure if sure[way]]
        # Two marks of speech have joined rows.
        if "none" in sure and separator:
            most = len(ways["none"].table)
            best = [way for way in best if len(ways[way].table) == most]
    if len(best) == 1 or len(sure) == 1:
        return ways[[*best, *sure][0]]
    message = ": quotation marks or backslashes may be text, or enclose and escape it"
    if not separator and "double" in sure and (lines := ways["double"].long_rows):
        message = f":{lines[0]}: quotation marks enclose several lines"
    raise DataError(f"{path}{message}: {_QUOTING_CURE}")


def _found(path: Path, text: str, kind: str, reading: Reading) -> tuple[str, _Parse]:
    """Separator, and the only table. Raises DataError if there are several, or none."""
    given = SPELLINGS.get(reading.separator, reading.separator)
    if len(given) > 1:
        message = f"{reading.separator!r}: expected one character, tab or none"
        raise DataError(f"SEPARATOR (predict: --separator) {message}")
    # A mark that does not occur makes one column, as the usual one then does.
    usual = given or ("\t" if kind == "tsv" else ",")
    separators = [mark for mark in SEPARATORS if mark in text or mark == usual]
    if given or (kind == "tsv" and "\t" in text):
        separators = [usual]
    parses = {
        (mark, way): _parse(text, mark, way)
        for mark in separators
        for way in ([reading.quoting] if reading.quoting else _quotings(text, mark))
    }
    tables = {key: parse for key, parse in parses.items() if not parse.problem}
    wide = {key: parse for key, parse in tables.items() if parse.width > 1}
    right = list(dict.fromkeys(mark for mark, _ in wide))
    if right and kind == "tsv" and right != ["\t"] and not given:
        right = ["\t", *right]  # a column without a tab, or a table by another mark
    if len(right) > 1:
        choices = " or ".join(map(_shown, right))
        cure = "set SEPARATOR (predict: --separator)"
        raise DataError(f"{path}: is the separator {choices}? {cure}")
    mark = right[0] if right else usual
    ways = {way: p for (m, way), p in (wide or tables).items() if m == mark}
    if ways and not (right or given):
        # One column: of texts as they are where no mark occurs, else as a program encloses them.
        if {m for m, _ in tables} == {*separators} or kind == "tsv":
            ways["none"] = _parse(text, "", "none")
        elif "double" in ways and _certainty(text, ways["double"], mark, "double") == 2:
            ways = {"double": ways["double"]}
        else:
            ways = {}
        mark = ""
    if not ways:
        # The first line that does not fit where most lines do.
        wrong = [parse for parse in parses.values() if parse.problem]
        worst = max(wrong, key=lambda parse: (parse.width > 1, len(parse.rows)))
        cure = "set SEPARATOR (tab, or none: a text per line; predict: --separator)"
        cure = f": quote the cell, or {cure}" if "columns" in worst.problem else ""
        raise DataError(f"{path}{worst.problem}{cure}")
    return mark, _one_quoting(path, text, mark, ways)
