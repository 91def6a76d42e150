"""Tables of text (CSV, TSV, JSON Lines), and examples from them with a label or a number each."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bert.data.records import DataError
from finetune.batches import IGNORE

KINDS = ("tsv", "csv", "jsonl")
_USUAL = re.compile(
    r"id|idx|index|labels?|(text|sentence|question)s?[ _]?[12ab]?"
)  # names that occur in headers
_NO_TEXT = re.compile(r"id|idx|index|labels?")
csv.field_size_limit(1 << 30)  # cells may be long


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Columns by name; empty ones are inferred from the file.

    texts: one or two; usual: text columns to use if the file has them; names: all columns of a file without a header;
    labels: the known ones by id; numbers: whether labels are regression targets, None: if some have decimals.
    """

    texts: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    label: str = ""
    names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    numbers: bool | None = None


def kind_of(path: Path) -> str:
    """Format of a table, by its suffix or else its first line."""
    if (ending := path.suffix.lower().lstrip(".")) in KINDS:
        return ending
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            first = next((line for line in file if line.strip()), "")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    return "jsonl" if first.lstrip().startswith("{") else "tsv" if "\t" in first else "csv"


def lines_of(path: Path, kind: str) -> Iterator[tuple[int, list[str] | dict[str, Any]]]:
    """Number and cells of every line that is not blank. In TSV, quotation marks are text, as in GLUE.

    Raises DataError, naming file and line, if it cannot be read.
    """
    number = 0
    try:
        with open(path, encoding="utf-8-sig", newline="" if kind == "csv" else "\n") as file:
            if kind == "csv":
                reader = csv.reader(file, strict=True)
                for cells in reader:
                    number = reader.line_num
                    if cells:
                        yield number, cells
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield (
                        number,
                        json.loads(line) if kind == "jsonl" else line.rstrip("\r\n").split("\t"),
                    )
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 (after line {number})") from None
    except (ValueError, csv.Error) as error:
        raise DataError(
            f"{path}:{number + (kind == 'csv')}: not {kind.upper()} ({error})"
        ) from None


class Rows:
    """Rows of a table as dictionaries by column; can be iterated repeatedly.

    texts: names of the text columns; label: name of the label column, or "".
    """

    def __init__(self, path: Path, layout: Layout, *, labelled: bool, num_texts: int = 0) -> None:
        """labelled: a label column is required; num_texts: required number of text columns, 0: one or two."""
        self.path, self.kind, self.layout = path, kind_of(path), layout
        first = next(lines_of(path, self.kind), (0, None))[1]
        if not first:
            raise DataError(f"{path}: has no examples")
        self.names = [cell.strip() for cell in first] if isinstance(first, list) else list(first)
        wanted = [*layout.texts, *([layout.label] if labelled and layout.label else [])]
        self.has_header = self.kind != "tsv" or bool(
            set(wanted) <= set(self.names)
            if layout.names or wanted
            else (layout.usual and set(layout.usual) <= set(self.names))
            or self.names[-1].lower() == "label"
            or all(_USUAL.fullmatch(name.lower()) for name in self.names)
        )
        self.label = layout.label
        self.guessed: tuple[
            str, ...
        ] = ()  # allowed values if the last column is assumed to be labels
        if not self.has_header and layout.names:
            self.names = list(layout.names)
        elif not self.has_header and not wanted:
            width = len(self.names)
            count = num_texts or width - int(
                labelled or (width > 1 and self.names[-1] in layout.labels)
            )
            self.label = "label" if labelled or width == count + 1 else ""
            self.names = ["text"] if count == 1 else [f"text{n + 1}" for n in range(count)]
            self.names += ["label"] if self.label else []
            self.guessed = () if labelled or not self.label else layout.labels
        elif not self.label:
            self.label = next(
                (name for name in self.names if name.lower() in ("label", "labels")), ""
            )
        if missing := [name for name in wanted if name not in self.names]:
            raise DataError(
                f"{path}: no column {missing[0]!r} (it has {some(self.names)}): {self._cure}"
            )
        if self.label not in self.names:
            self.label = ""
        if labelled and not self.label:
            raise DataError(
                f"{path}: which of the columns {some(self.names)} is the label? set LABEL_COLUMN"
            )
        others = (
            name
            for name in self.names
            if name != self.label and not _NO_TEXT.fullmatch(name.lower())
        )
        usual = layout.usual if set(layout.usual) <= set(self.names) else ()
        self.texts = layout.texts or usual or tuple(others)
        if len(self.texts) not in (1, 2) or len(self.texts) != (num_texts or len(self.texts)):
            wanted_texts = num_texts or "one or two"
            raise DataError(
                f"{path}: {wanted_texts} of the columns {some(self.names)} must be text: {self._cure}"
            )

    @property
    def _cure(self) -> str:
        return "set TEXT_COLUMNS and LABEL_COLUMN (predict: --text-columns), or is it another task's file?"

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and row. Raises DataError for a line without the texts, or with a wrong number of columns."""
        last = max(
            self.names.index(name) for name in (*self.texts, *([self.label] if self.label else []))
        )
        exact = self.kind == "csv" or not self.layout.texts  # GLUE's lines may have more
        for number, line in islice(
            lines_of(self.path, self.kind), int(self.kind != "jsonl" and self.has_header), None
        ):
            if isinstance(line, list):
                width, cure = len(line), "is it another task's file?"
                if width <= last or (exact and width != len(self.names)):
                    raise DataError(
                        f"{self.path}:{number}: {width} columns, expected {len(self.names)}: {cure}"
                    )
                if self.guessed and line[-1].strip() not in self.guessed:
                    expected = f"{len(self.texts)} of text, or a label in the last"
                    raise DataError(
                        f"{self.path}:{number}: {width} columns, expected {expected}: {cure}"
                    )
                line = dict(zip(self.names, line, strict=False))
            elif not isinstance(line, dict) or not all(
                isinstance(line.get(name), str) for name in self.texts
            ):
                raise DataError(
                    f"{self.path}:{number}: no record with the text {some(self.texts)}: {self._cure}"
                )
            yield number, line

    def text(self, row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(row[name] for name in self.texts)


@dataclass(frozen=True)
class Table:
    """N examples of one or two texts. labels: ids in ``names``, int64 (N,), or regression targets, float32."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray
    names: tuple[str, ...]  # of the labels; empty: regression
    columns: tuple[str, ...]  # names of the texts, if the file has them
    summary: str  # for people


def read(path: Path, layout: Layout, num_texts: int = 0) -> Table:
    """Reads a table of labelled examples.

    Raises DataError, naming file and line, for an unreadable table, too few columns, a first line that may or may not
    be a header, and labels that are unknown, empty, or apparently texts.
    """
    rows = Rows(path, layout, labelled=True, num_texts=num_texts)
    numbers, texts, found = [], [], []
    for number, row in rows:
        value = row.get(rows.label, "")
        numbers.append(number)
        texts.append(rows.text(row))
        found.append(value.strip() if isinstance(value, str) else json.dumps(value))
    if not found:
        raise DataError(f"{path}: has no examples")
    columns = rows.texts if rows.has_header else ()
    summary = f"{len(found):,} examples, text {' | '.join(rows.texts)}, label {rows.label}: "
    as_numbers = layout.numbers
    if as_numbers is None and not layout.labels:
        values = [_number(label) for label in found]
        as_numbers = None not in values and any("." in label for label in found)
    if as_numbers:
        for number, label in zip(numbers, found, strict=True):
            if _number(label) is None:
                raise DataError(
                    f"{path}:{number}: label {label!r:.60} is not a number, others are (regression)"
                )
        labels = np.array([float(label) for label in found], dtype=np.float32)
        summary += f"numbers from {labels.min():g} to {labels.max():g}, mean {labels.mean():.4g}"
        return Table(texts, labels, (), columns, summary)
    counts = Counter(found)
    if not layout.labels:
        if len(counts) - 1 > max(3, len(found) / 2):
            problem = (
                f"{len(counts):,} different labels in {len(found):,} lines ({some(sorted(counts))})"
            )
            cure = "the label is the last column, after the text, or named by LABEL_COLUMN; REGRESSION=1 for numbers"
            raise DataError(f"{path}: {problem}: {cure}")
        if not rows.has_header and len(found) > 1 and counts[found[0]] == 1:
            cure = "set LABEL_COLUMN to its name, or add another example with this label"
            raise DataError(
                f"{path}:1: is it a header? No other line has the label {found[0]!r:.60}: {cure}"
            )
    known = layout.labels or tuple(sorted(counts))
    ids = {name: number for number, name in enumerate(known)}
    for number, label in zip(numbers, found, strict=True):
        if label not in ids or not label:
            where = f" in column {rows.label}" if rows.has_header else " in the last column"
            raise DataError(
                f"{path}:{number}: label {label!r:.60}, expected one of {some(known)}{where}"
            )
    if len(known) < 2:
        raise DataError(
            f"{path}: every label is {known[0]!r}: expected at least two different ones"
        )
    each = [f"{count:,} {name:.30}" for name, count in counts.most_common()]
    summary += f"{len(known)} classes: {', '.join(each[:10])}{', ...' if len(each) > 10 else ''} "
    summary += f"({max(counts.values()) / len(found):.2%} the first)"
    return Table(
        texts, np.array([ids[label] for label in found], dtype=np.int64), known, columns, summary
    )


def read_texts(path: Path, layout: Layout, num_texts: int = 0) -> Table:
    """Reads a table to predict, ignoring labels. Raises DataError as ``read`` does.

    num_texts: number of text columns that the model was trained on, 0: unknown.
    """
    rows = Rows(path, layout, labelled=False, num_texts=num_texts)
    texts = [rows.text(row) for _, row in rows]
    if not texts:
        raise DataError(f"{path}: has no examples")
    labels = np.full(len(texts), IGNORE if layout.labels else np.nan)
    summary = f"{len(texts):,} examples, text {' | '.join(rows.texts)}, the first {' | '.join(texts[0])[:60]!r}"
    return Table(texts, labels, layout.labels, rows.texts if rows.has_header else (), summary)


def some(names: Sequence[str]) -> str:
    """The first names, shortened."""
    return ", ".join([*(name[:30] for name in names[:10]), *(["..."] if len(names) > 10 else [])])


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def table_in(folder: Path, *stems: str) -> Path:
    """The first of these tables in a folder, in any format. Raises DataError if it exists in two formats."""
    for stem in stems:
        found = [path for kind in KINDS if (path := folder / f"{stem}.{kind}").is_file()]
        if len(found) > 1:
            raise DataError(
                f"{folder}: {found[0].name} and {found[1].name}: which one? remove the other"
            )
        if found:
            return found[0]
    raise DataError(f"{folder / stems[0]}.tsv: No such file, nor .csv or .jsonl")
