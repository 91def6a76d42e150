"""Cells of a table: missing ones, numbers, and labels as classes or numbers."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert.data.records import DataError

# Numbers of any country, and dates in digits.
_NUMERAL = re.compile(r"[-+\u2212]?\d[\d.,]*")
_DECIMALS = re.compile(r"\d[.,]\d")
_LARGEST = float(np.finfo(np.float32).max)  # of a regression
# As pandas, JSON, spreadsheets, MySQL and Postgres write a missing value.
MISSING = "", "nan", "null", "<na>", "\\n"
# Of a column that is a label.
_YES, _NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")
Pairs = Sequence[tuple[int, str]]  # number of a line, and a label there
# Words of a text, but no class, and no number.
_NO_VALUE = *MISSING, "na", "n/a", "#n/a"


def is_missing(value: Any) -> bool:
    """Whether a cell is empty, null or NaN."""
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    # JSON's NaN differs from itself.
    return value is None or value != value


def is_void(cell: str) -> bool:
    """Whether a cell is missing, also as people write it by hand."""
    # Python's None, as pandas reads it; none is a class of many data sets.
    return cell.strip().lower() in _NO_VALUE or cell.strip() == "None"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    # float() also reads "nan" and "inf", which are words in a text.
    return value if np.isfinite(value) else None


def is_number(text: str) -> bool:
    """Whether a cell is a number, also as Excel writes it where the decimal sign is a comma."""
    return _number(text) is not None or bool(_NUMERAL.fullmatch(text.strip()))


def shortened(names: Sequence[str]) -> str:
    """The first names, shortened."""
    more = ["..."] if len(names) > 10 else []
    return ", ".join([name[:30] for name in names[:10]] + more)


def first_lines(numbers: Sequence[int]) -> str:
    """Line numbers, shortened."""
    return f"lines {shortened([str(number) for number in numbers])}"


def are_numbers(given: Sequence[str]) -> bool:
    """Whether labels are regression targets: most are numbers, and some have decimals."""
    labels = [label for label in given if not is_missing(label)]
    # Integers may be grades or classes, so they are classes unless REGRESSION=1; pandas writes them
    # as 1.0 where one is missing.
    are_most = 2 * sum(map(is_number, labels)) > len(labels)
    return are_most and any(map(_has_decimals, labels))


def _has_decimals(label: str) -> bool:
    value = _number(label)
    # As written in another country, or with a unit.
    return bool(_DECIMALS.search(label) if value is None else value % 1)


def targets_of(path: Path, by_line: Mapping[int, str]) -> tuple[np.ndarray, str]:
    """Targets of a regression, and a summary."""
    values = {number: _number(label) for number, label in by_line.items()}
    wrong = [n for n, value in values.items() if value is None or abs(value) > _LARGEST]
    if wrong:
        message = (
            f"label {by_line[wrong[0]]!r:.60} is not a number up to {_LARGEST:.0e}"
        )
        cure = "write it with a decimal point, or set REGRESSION=0 for classes"
        raise DataError(f"{path}:{wrong[0]}: {message} ({first_lines(wrong)}): {cure}")
    targets = np.array([*values.values()], dtype=np.float32)
    message = f"numbers from {targets.min():g} to {targets.max():g}, mean {targets.mean():.4g}"
    return targets, message


def in_cell(value: Any, mark: str) -> tuple[str, ...]:
    """The labels of a cell, or of a list. mark: between those of a cell; empty: it is one."""
    values = value if isinstance(value, list) else [value]
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if mark:
        texts = [part for text in texts for part in text.split(mark) if part.strip()]
    return tuple(dict.fromkeys(text.strip() for text in texts))


def marked(
    path: Path, line: int, row: Mapping[str, Any], columns: Sequence[str]
) -> tuple[str, ...]:
    """The columns of a row that say 1, of those that say 0 or 1. Raises DataError for another."""
    said = {name: str(row.get(name, "")).strip().lower() for name in columns}
    for name, cell in said.items():
        if cell not in _YES + _NO:
            message = f"label {cell!r:.60} in column {name}, expected 0 or 1"
            raise DataError(f"{path}:{line}: {message}")
    return tuple(name for name, cell in said.items() if cell in _YES)


def classes_of(path: Path, by_line: Pairs) -> tuple[str, ...]:
    """The labels that occur. Raises DataError if they are apparently texts, or two are one
    number, or one word, such as TRUE and True.
    """
    labels = [label for _, label in by_line]
    names = {*labels}
    # Nearly every line has another label: those are texts, identifiers or numbers.
    if len(names) - 1 > max(3, len(labels) / 2):
        message = f"{len(names):,} different labels in {len(labels):,} lines ({shortened(sorted(names))})"
        cure = "the label is the last column, after the text, or named by LABEL_COLUMN; REGRESSION=1 for numbers"
        raise DataError(f"{path}: {message}: {cure}")
    spellings = dict[float | str, str]()
    for number, label in by_line:
        value = _number(label)
        key = label.casefold() if value is None else value
        if (other := spellings.setdefault(key, label)) != label:
            message = f"label {label!r}, in other lines {other!r}: write it in one way"
            raise DataError(f"{path}:{number}: {message}")
    # Sorted, so that a label's number does not depend on the order of the rows.
    return tuple(sorted(name for name in names if not is_void(name)))


def ids_of(
    path: Path, column: str, by_line: Pairs, known: tuple[str, ...]
) -> tuple[np.ndarray, str]:
    """Class ids, one a pair, and a summary. column: its name, if the file has it."""
    ids = {name: number for number, name in enumerate(known)}
    if wrong := [(number, name) for number, name in by_line if name not in ids]:
        line, name = wrong[0]
        lines = first_lines([*dict.fromkeys(number for number, _ in wrong)])
        where = f"in column {column}" if column else "in the last column"
        message = f"label {name!r:.60}, expected one of {shortened(known)} {where}"
        raise DataError(f"{path}:{line}: {message} ({lines})")
    if len(known) < 2:
        message = f"every label is {known[0]!r}: expected at least two different ones"
        raise DataError(f"{path}: {message}")
    counts = Counter(name for _, name in by_line).most_common()
    each = shortened([f"{count:,} {name}" for name, count in counts])
    # What a model scores that always says the most frequent class.
    share = f"{counts[0][1] / len(by_line):.2%} the first"
    labels = np.array([ids[name] for _, name in by_line], dtype=np.int64)
    return labels, f"{len(known)} classes: {each} ({share})"
