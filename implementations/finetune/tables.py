"""Tables of text, and examples from them with a label or a number each."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert.data.records import DataError
from finetune import dialect
from finetune.dialect import KINDS, Reading

# Names that occur in headers.
_USUAL = re.compile(r"id|idx|index|labels?|(text|sentence|question)s?[ _]?[12ab]?")
# Labels and numbers of rows; pandas writes its index under an empty name, and reads that as
# "Unnamed: 0". Many data sets have a label by number and by name.
_NO_TEXT = re.compile(
    r"|unnamed: \d+|id|idx|index|labels?|label[_ ].*|.*[_ ]labels?", re.DOTALL
)
_PROSE = re.compile(r".{41,}|.*[.!?]|\S+(\s+\S+){4,}", re.DOTALL)  # no name of a column
# Numbers of any country, and dates in digits.
_NUMERAL = re.compile(r"[-+\u2212]?\d[\d.,]*")
_DECIMALS = re.compile(r"\d[.,]\d")
_UNSPACED = re.compile("[\u0e00-\u109f\u3040-\u9fff]")  # letters of Thai, Chinese, ...
_LARGEST = float(np.finfo(np.float32).max)  # of a regression
# As pandas, JSON, spreadsheets, MySQL and Postgres write a missing value.
MISSING = "", "nan", "null", "<na>", "\\n"
# Words of a text, but no class, and no number.
_NO_VALUE = *MISSING, "na", "n/a", "#n/a"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Columns by name; empty ones are inferred from the file.

    texts: one or two; usual: those that the model was trained on; names: all columns of a file
    without a header; labels: the known ones by id; numbers: whether labels are regression targets,
    None: if some have decimals. published: a file of GLUE, where quotation marks are text, lines
    may have more columns, and texts may be empty.
    """

    texts: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    label: str = ""
    names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    numbers: bool | None = None
    published: bool = False
    reading: Reading = Reading()


class Rows:
    """Rows of a table as dictionaries by column.

    texts: names of the text columns; label: name of the label column, or "".
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        *,
        labelled: bool,
        num_texts: int = 0,
    ) -> None:
        """labelled: a label column is required; num_texts: required number of text columns, 0: one
        or two.
        """
        self.path = path
        self.layout = layout
        self.labelled = labelled
        self.wanted = [
            *layout.texts,
            *([layout.label] if labelled and layout.label else []),
        ]
        # Published files of GLUE have quotation marks in their texts that enclose nothing.
        self.file = dialect.read(path, layout.reading, plain_quotes=layout.published)
        first = self.file.rows[0][1]
        self.cells = (
            [cell.strip() for cell in first] if isinstance(first, list) else list(first)
        )
        # Rows of cells below the first one, which may be the header.
        self.others = [row for _, row in self.file.rows[1:] if isinstance(row, list)]
        header = self._finds_header()
        if header is None:
            raise DataError(
                f"{path}:1: is it a header? {some(self.cells)}: {_HEADER_CURE}"
            )
        self.has_header = header
        if self.has_header and not self.file.is_jsonl and len(self.file.rows) == 1:
            raise DataError(f"{path}: has no examples")
        self._choose_columns()
        count = num_texts or len(self.texts)
        if len(self.texts) not in (1, 2) or len(self.texts) != count:
            wanted = f"{num_texts or 'one or two'} of the columns {some(self.cells)} must be text"
            raise DataError(f"{path}: {wanted}: {_COLUMNS_CURE}")
        if self.guessed and not num_texts and len(self.texts) == 2:
            self._check_pair()

    def _check_pair(self) -> None:
        """Raises DataError unless the names of two columns, or most of their cells, say that they
        are texts: an identifier, a date or an author is none.
        """
        prose = []
        for name in self.texts:
            cells = [row[name] for _, row in self if not is_missing(row[name])]
            sentences = list(filter(_is_sentence, cells))
            # A category has few values.
            is_varied = 10 * len({*sentences}) > len(cells)
            if (self.has_header and _USUAL.fullmatch(name.lower())) or (
                is_varied and 2 * len(sentences) >= len(cells)
            ):
                prose.append(name)
        if len(prose) < 2:
            choices = [*(prose or self.texts), ",".join(self.texts)]
            cure = " or ".join(f"TEXT_COLUMNS={choice}" for choice in choices)
            told = f"are the columns {some(self.texts)} a pair of texts?"
            raise DataError(f"{self.path}: {told} set {cure} (predict: --text-columns)")

    def _finds_header(self) -> bool | None:
        """Whether the first line names the columns. None: in doubt."""
        layout, names = self.layout, self.cells
        if layout.reading.no_header:
            return False
        if self.file.is_jsonl:
            return True
        if layout.names:
            return set(layout.texts) <= set(names)
        # Names that a file without a header gets.
        is_numbered = all(name.startswith("column_") for name in self.wanted)
        if self.wanted and is_numbered and not {*self.wanted} <= {*names}:
            return False
        if (
            layout.published
            or self.wanted
            or (layout.usual and set(layout.usual) <= set(names))
        ):
            return True
        # From here on by evidence, the strongest first: names that headers have.
        lower = [name.lower() for name in names]
        if {"label", "labels"} & set(lower) or all(map(_USUAL.fullmatch, lower)):
            return True
        # A column of numbers: a number on top is one more, a word on top is its name, unless a
        # sentence is beside it. A missing or marked number is no name.
        numeric = {i: name for i, name in enumerate(names) if self._is_numeric(i)}
        tops = numeric.values()
        if any(map(_is_number, tops)):
            return False
        # Of pandas' index, or of identifiers, whatever is beside it.
        if any(name and _NO_TEXT.fullmatch(name.lower()) for name in tops):
            return True
        if numeric:
            is_named = any(not _is_void(n) and not re.search(r"\d", n) for n in tops)
            others = [name for i, name in enumerate(names) if i not in numeric]
            has_prose = any(map(_PROSE.fullmatch, others))
            return is_named if is_named != has_prose else None
        # A label on top that recurs below makes the first line a row.
        last = {row[-1].strip() for row in self.others}
        known = set(layout.labels) or (last if self.labelled else set())
        if len(names) > 1 and names[-1] in known:
            return False
        if len(names) > 1 and layout.labels and last and last <= known:
            return True
        ends = [row[-1].strip() for row in self.others]
        if len(names) == 1:
            is_name = names[0][-1:] == "?" and not any(end[-1:] == "?" for end in ends)
        else:
            is_name = (
                self.labelled and names[-1] not in ends and len({*ends}) < len(ends)
            )
        # A sentence is no name of a column, unless it is a survey's question: it alone asks, or
        # what stands beside it is no label where labels recur. A short text may be one.
        return None if is_name or not any(map(_PROSE.fullmatch, names)) else False

    def _is_numeric(self, column: int, *top: str) -> bool:
        """Whether a column holds numbers alone, apart from missing ones, below the first line."""
        cells = [*top, *(row[column] for row in self.others if column < len(row))]
        present = [cell for cell in cells if not _is_void(cell)]
        return bool(present) and all(map(_is_number, present))

    def _choose_columns(self) -> None:
        """By the names that are given, else all texts and, without a header, the last as the
        label.
        """
        layout, path = self.layout, self.path
        numbered = [f"column_{number}" for number in range(1, len(self.cells) + 1)]
        names = self.names = (
            self.cells if self.has_header else list(layout.names) or numbered
        )
        # Spreadsheets export columns that are empty; pandas calls them so.
        if names.count("") > 1:
            names = self.names = [
                name or f"Unnamed: {column}" for column, name in enumerate(names)
            ]
        # A dictionary of the row would keep only one of them.
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(
                f"{path}: two columns are called {repeated[0]!r}: rename one"
            )
        # Names in a header, where there was one, say nothing of a file without.
        knows = self.has_header or set(layout.usual) <= set(names)
        usual = layout.usual if knows else ()
        wanted = self.wanted if layout.texts else [*usual, *self.wanted]
        if missing := [name for name in wanted if name not in names]:
            trained = ", which the model was trained on" if missing[0] in usual else ""
            told = f"no column {missing[0]!r}{trained} (it has {some(names)})"
            raise DataError(f"{path}: {told}: {_COLUMNS_CURE}")
        self.named = bool(wanted) or self.has_header
        texts = layout.texts or usual
        self.label = self._label(texts)
        if self.label in layout.texts:
            told = f"column {self.label!r} is the label, not a text"
            raise DataError(f"{path}: {told}: {_COLUMNS_CURE}")
        self.guessed = not texts
        top = [] if self.has_header else self.cells
        self.texts = texts or tuple(
            name
            for column, name in enumerate(names)
            if name != self.label
            and not _NO_TEXT.fullmatch(name.lower())
            and not self._is_numeric(column, *top[column : column + 1])
        )

    def _label(self, texts: Sequence[str]) -> str:
        """Name of the label column; "": the file has none."""
        layout, names = self.layout, self.names
        if layout.label and layout.label in names:
            return layout.label
        if not self.has_header and not layout.names:
            # A file to predict may have labels: known ones in the last column tell.
            last = {self.cells[-1], *(row[-1].strip() for row in self.others)}
            is_known = len(names) > 1 and last <= set(layout.labels)
            return names[-1] if self.labelled or is_known else ""
        # Unless the user, or the training, calls that column a text.
        usual = [name for name in names if name.lower() in ("label", "labels")]
        found = [name for name in usual if name not in texts]
        if self.labelled and len(found) != 1:
            told = f"which of the columns {some(names)} is the label? set LABEL_COLUMN"
            raise DataError(f"{self.path}: {told}")
        return found[0] if found else ""

    def describe(self) -> str:
        """How the file is read, for people."""
        names = some(self.names)
        if self.file.is_jsonl:
            return f"{self.file.form}, {names}"
        return (
            f"{self.file.form}, {f'header {names}' if self.has_header else 'no header'}"
        )

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and row. Raises DataError for a line without the texts, or with a wrong
        number of columns.
        """
        # The last column that is needed: MNLI's published lines vary in what follows.
        needed = {*self.texts, self.label}
        last = max(column for column, name in enumerate(self.names) if name in needed)
        skipped = self.has_header and not self.file.is_jsonl
        for number, line in self.file.rows[skipped:]:
            if isinstance(line, list):
                width = len(line)
                if width <= last or (
                    not self.layout.published and width != len(self.names)
                ):
                    told = f"{width} columns, expected {len(self.names)}: is it another task's file?"
                    raise DataError(f"{self.path}:{number}: {told}")
                yield number, dict(zip(self.names, line, strict=False))
                continue
            if not isinstance(line, dict) or not all(
                name in line and (isinstance(line[name], str) or is_missing(line[name]))
                for name in self.texts
            ):
                told = f"no record with the text {some(self.texts)}"
                raise DataError(f"{self.path}:{number}: {told}: {_COLUMNS_CURE}")
            yield number, line

    def text(self, row: dict[str, Any]) -> tuple[str, ...] | None:
        """The texts of a row; None if one is missing."""
        texts = tuple(row[name] for name in self.texts)
        # GLUE's own texts may be empty or read like a missing value.
        return (
            texts if self.layout.published or not any(map(is_missing, texts)) else None
        )


_COLUMNS_CURE = "set TEXT_COLUMNS and LABEL_COLUMN (predict: --text-columns), or is it another task's file?"
_HEADER_CURE = "set TEXT_COLUMNS and LABEL_COLUMN (predict: --text-columns), or NO_HEADER=1 (--no-header)"


def column_names(text: str) -> tuple[str, ...]:
    """Names that are joined by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def is_missing(value: Any) -> bool:
    """Whether a cell is empty, null or NaN."""
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    # JSON's NaN differs from itself.
    return value is None or value != value


def _is_void(cell: str) -> bool:
    """Whether a cell is missing, also as people write it by hand."""
    # Python's None, as pandas reads it; none is a class of many data sets.
    return cell.strip().lower() in _NO_VALUE or cell.strip() == "None"


def _is_sentence(cell: str) -> bool:
    """Whether a cell has more words than a name has, or letters where none are between spaces."""
    words = [word for word in cell.split() if any(map(str.isalpha, word))]
    return len(words) > 2 or len(_UNSPACED.findall(cell)) > 5


def lines_told(numbers: Sequence[int]) -> str:
    """Line numbers, shortened."""
    return f"lines {some([str(number) for number in numbers])}"


@dataclass(frozen=True)
class Table:
    """N examples of one or two texts. labels: ids in ``names``, int64 (N,), or regression targets,
    float32.
    """

    texts: list[tuple[str, ...]]
    labels: np.ndarray
    names: tuple[str, ...]  # of the labels; empty: regression
    columns: tuple[str, ...]  # names of the texts, if the file has them
    label: str  # name of the labels' column, if the file has it
    summary: str  # how it was read, and what it holds, for people


def _texts(rows: Rows) -> list[tuple[str, ...]]:
    """Texts of all rows. Raises DataError that names all of the rows without."""
    texts, lacking = [], []
    for number, row in rows:
        text = rows.text(row)
        if text is None:
            lacking.append(number)
        else:
            texts.append(text)
    if lacking:
        told = f"no text in {lines_told(lacking)}: remove these rows, or fill them"
        raise DataError(f"{rows.path}: {told}")
    return texts


def read(path: Path, layout: Layout, num_texts: int = 0) -> Table:
    """Reads a table of labelled examples.

    Raises DataError, naming file and line, for an unreadable table, too few columns, a first line
    that may or may not be a header, texts or labels that are missing, and labels that are unknown
    or apparently texts.
    """
    rows = Rows(path, layout, labelled=True, num_texts=num_texts)
    # labels by line
    texts = _texts(rows)
    labels_by_row = dict[int, str]()
    for number, row in rows:
        value = row.get(rows.label, "")
        if isinstance(value, (list, dict)):
            told = f"label {json.dumps(value)[:60]}: several labels an example are not supported"
            raise DataError(f"{path}:{number}: {told}: give one")
        labels_by_row[number] = (
            value.strip() if isinstance(value, str) else json.dumps(value)
        )
    # Of two texts that nobody named, one may be the label in other words.
    given = list(labels_by_row.values())
    for name, values in zip(rows.texts, zip(*texts, strict=True), strict=True):
        pairs = {*zip(values, given, strict=True)}
        is_label = len({*values}) == len({*given}) == len(pairs) < len(given)
        if is_label and len(rows.texts) > 1 and not layout.texts:
            told = f"column {name!r} says the same as the label"
            raise DataError(f"{path}: {told}: {_COLUMNS_CURE}")
    names = layout.labels
    if layout.numbers or (layout.numbers is None and not names and _are_numbers(given)):
        labels, told = _targets(path, labels_by_row)
    else:
        names = names or _classes(rows, labels_by_row)
        labels, told = _ids(rows, labels_by_row, names)
    columns, label = (rows.texts, rows.label) if rows.named else ((), "")
    about = f"{len(labels_by_row):,} examples, text {' | '.join(rows.texts)}, label {rows.label}: {told}"
    return Table(
        texts,
        labels,
        names,
        columns,
        label,
        f"{path.name}: {rows.describe()}; {about}",
    )


def _are_numbers(given: Sequence[str]) -> bool:
    """Whether labels are regression targets: most are numbers, and some have decimals."""
    labels = [label for label in given if not is_missing(label)]
    # Integers may be grades or classes, so they are classes unless REGRESSION=1; pandas writes them
    # as 1.0 where one is missing.
    are_most = 2 * sum(map(_is_number, labels)) > len(labels)
    return are_most and any(map(_has_decimals, labels))


def _has_decimals(label: str) -> bool:
    value = _number(label)
    # As written in another country, or with a unit.
    return value % 1 != 0 if value is not None else bool(_DECIMALS.search(label))


def _targets(path: Path, labels_by_row: Mapping[int, str]) -> tuple[np.ndarray, str]:
    """Targets of a regression, and a summary."""
    values = {number: _number(label) for number, label in labels_by_row.items()}
    wrong = [n for n, value in values.items() if value is None or abs(value) > _LARGEST]
    if wrong:
        told = f"label {labels_by_row[wrong[0]]!r:.60} is not a number up to {_LARGEST:.0e}"
        cure = "write it with a decimal point, or set REGRESSION=0 for classes"
        raise DataError(f"{path}:{wrong[0]}: {told} ({lines_told(wrong)}): {cure}")
    targets = np.array([*values.values()], dtype=np.float32)
    told = f"numbers from {targets.min():g} to {targets.max():g}, mean {targets.mean():.4g}"
    return targets, told


def _classes(rows: Rows, labels_by_row: Mapping[int, str]) -> tuple[str, ...]:
    """The labels that occur. Raises DataError if they are apparently texts, or two are one
    number, or one word, such as TRUE and True.
    """
    labels = list(labels_by_row.values())
    names = set(labels)
    # Nearly every line has another label: those are texts, identifiers or numbers.
    if len(names) - 1 > max(3, len(labels) / 2):
        told = f"{len(names):,} different labels in {len(labels):,} lines ({some(sorted(names))})"
        cure = "the label is the last column, after the text, or named by LABEL_COLUMN; REGRESSION=1 for numbers"
        raise DataError(f"{rows.path}: {told}: {cure}")
    spellings = dict[float | str, str]()
    for number, label in labels_by_row.items():
        value = _number(label)
        key = label.casefold() if value is None else value
        if (other := spellings.setdefault(key, label)) != label:
            told = f"label {label!r}, in other lines {other!r}: write it in one way"
            raise DataError(f"{rows.path}:{number}: {told}")
    # Sorted, so that a label's number does not depend on the order of the rows.
    return tuple(sorted(name for name in names if not _is_void(name)))


def _ids(
    rows: Rows,
    labels_by_row: Mapping[int, str],
    known: tuple[str, ...],
) -> tuple[np.ndarray, str]:
    """Class ids, and a summary."""
    path = rows.path
    ids = {name: number for number, name in enumerate(known)}
    if wrong := [number for number, name in labels_by_row.items() if name not in ids]:
        where = f"in column {rows.label}" if rows.named else "in the last column"
        told = f"label {labels_by_row[wrong[0]]!r:.60}, expected one of {some(known)} {where}"
        raise DataError(f"{path}:{wrong[0]}: {told} ({lines_told(wrong)})")
    if len(known) < 2:
        told = f"every label is {known[0]!r}: expected at least two different ones"
        raise DataError(f"{path}: {told}")
    counts = Counter(labels_by_row.values()).most_common()
    each = some([f"{count:,} {name}" for name, count in counts])
    # What a model scores that always says the most frequent class.
    share = f"{counts[0][1] / len(labels_by_row):.2%} the first"
    labels = np.array([ids[name] for name in labels_by_row.values()], dtype=np.int64)
    return labels, f"{len(known)} classes: {each} ({share})"


def read_texts(path: Path, layout: Layout, num_texts: int = 0) -> Table:
    """Reads a table to predict, ignoring labels. Raises DataError as ``read`` does.

    num_texts: number of text columns that the model was trained on, 0: unknown.
    """
    rows = Rows(path, layout, labelled=False, num_texts=num_texts)
    texts = _texts(rows)
    told = f"{len(texts):,} examples, text {' | '.join(rows.texts)}"
    summary = f"{path.name}: {rows.describe()}; {told}"
    return Table(texts, np.zeros(len(texts)), layout.labels, (), "", summary)


def some(names: Sequence[str]) -> str:
    """The first names, shortened."""
    shown = [name[:30] for name in names[:10]]
    if len(names) > 10:
        shown.append("...")
    return ", ".join(shown)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    # float() also reads "nan" and "inf", which are words in a text.
    return value if np.isfinite(value) else None


def _is_number(text: str) -> bool:
    """Whether a cell is a number, also as Excel writes it where the decimal sign is a comma."""
    return _number(text) is not None or bool(_NUMERAL.fullmatch(text.strip()))


def table_in(folder: Path, *stems: str) -> Path:
    """The first of these tables in a folder, of any format, which reading it may refuse. Raises
    DataError for several files of one name, or none.
    """
    names = sorted(path.name for path in folder.iterdir())
    for stem in stems:
        found = [name for name in names if name.lower().startswith(f"{stem}.")]
        # One of them would be ignored, perhaps the newer one.
        if len(found) > 1:
            raise DataError(
                f"{folder}: {some(found)}: which one? remove or rename the others"
            )
        if found:
            return folder / found[0]
    told = f"no {' or '.join(stems)} as {', '.join(f'.{kind}' for kind in KINDS)}"
    raise DataError(f"{folder}: {told} (it has {some(names)})")
