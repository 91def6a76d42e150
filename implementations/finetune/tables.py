"""Tables of text, and examples from them with a label or a number each."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert.data.records import DataError
from finetune import dialect, labels
from finetune.dialect import KINDS, Reading
from finetune.labels import first_lines, is_missing, is_number, is_void, shortened

# Names that occur in headers.
_USUAL = re.compile(r"id|idx|index|labels?|(text|sentence|question)s?[ _]?[12ab]?")
# Labels and numbers of rows; pandas writes its index under an empty name, and reads that as
# "Unnamed: 0". Many data sets have a label by number and by name.
_NO_TEXT = re.compile(
    r"|unnamed: \d+|id|idx|index|labels?|label[_ ].*|.*[_ ]labels?", re.DOTALL
)
_PROSE = re.compile(r".{41,}|.*[.!?]|\S+(\s+\S+){4,}", re.DOTALL)  # no name of a column
_UNSPACED = re.compile("[\u0e00-\u109f\u3040-\u9fff]")  # letters of Thai, Chinese, ...


class Layout(NamedTuple):
    """Columns by name; empty ones are inferred from the file.

    texts: one or two; usual: those that the model was trained on; names: all columns of a file
    without a header; label: a column, or several that say 0 or 1 of a label each, joined by commas;
    label_mark: between labels of a cell; several: an example has any number of labels; labels: the
    known ones by id; numbers: whether labels are regression targets, None: if some have decimals.
    published: a file of GLUE, where quotation marks are text, lines may have more columns, and
    texts may be empty.
    """

    texts: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    label: str = ""
    label_mark: str = ""
    several: bool = False
    names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    numbers: bool | None = None
    published: bool = False
    reading: Reading = Reading()


class Rows:
    """Rows of a table as dictionaries by column.

    texts: names of the text columns; labels: those of the label columns.
    """

    def __init__(
        self, path: Path, layout: Layout, *, labelled: bool, num_texts: int = 0
    ) -> None:
        """labelled: a label column is required; num_texts: required number of text columns, 0: one
        or two.
        """
        self.path, self.layout, self.labelled = path, layout, labelled
        self.wanted = [*layout.texts]
        if labelled:
            self.wanted += column_names(layout.label)
        # Published files of GLUE have quotation marks in their texts that enclose nothing.
        self.file = dialect.read(path, layout.reading, plain_quotes=layout.published)
        first = self.file.rows[0][1]
        self.cells = [cell.strip() for cell in first]
        # Rows of cells below the first one, which may be the header.
        self.others = [row for _, row in self.file.rows[1:] if isinstance(row, list)]
        header = self._finds_header()
        if header is None:
            message = f"is it a header? {shortened(self.cells)}: {_HEADER_CURE}"
            raise DataError(f"{path}:1: {message}")
        self.has_header = header
        if self.has_header and not self.file.is_jsonl and len(self.file.rows) == 1:
            raise DataError(f"{path}: has no examples")
        self._choose_columns()
        count = num_texts or len(self.texts)
        if len(self.texts) not in (1, 2) or len(self.texts) != count:
            wanted = num_texts or "one or two"
            raise self._wrong(
                f"{wanted} of the columns {shortened(self.cells)} must be text"
            )
        if self.guessed and not num_texts and len(self.texts) == 2:
            self._check_pair()

    def _wrong(self, message: str, line: str = "") -> DataError:
        return DataError(f"{self.path}{line}: {message}: {_COLUMNS_CURE}")

    def _check_pair(self) -> None:
        """Raises DataError unless the names of two columns, or most of their cells, say that they
        are texts: an identifier, a date or an author is none.
        """
        prose = []
        for name in self.texts:
            cells = [row[name] for _, row in self if not is_missing(row[name])]
            sentences = list(filter(_is_sentence, cells))
            # A category has few values.
            is_prose = 2 * len(sentences) >= len(cells) < 10 * len({*sentences})
            if is_prose or (self.has_header and _USUAL.fullmatch(name.lower())):
                prose.append(name)
        if len(prose) < 2:
            choices = [*(prose or self.texts), ",".join(self.texts)]
            cure = " or ".join(f"TEXT_COLUMNS={choice}" for choice in choices)
            message = f"are the columns {shortened(self.texts)} a pair of texts?"
            raise DataError(
                f"{self.path}: {message} set {cure} (predict: --text-columns)"
            )

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
        is_known = layout.usual and {*layout.usual} <= {*names}
        if layout.published or self.wanted or is_known:
            return True
        # From here on by evidence, the strongest first: names that headers have.
        lower = [name.lower() for name in names]
        if {"label", "labels"} & set(lower) or all(map(_USUAL.fullmatch, lower)):
            return True
        # A column of numbers: a number on top is one more, a word on top is its name, unless a
        # sentence is beside it. A missing or marked number is no name.
        numeric = {i: name for i, name in enumerate(names) if self._is_numeric(i)}
        tops = numeric.values()
        if any(map(is_number, tops)):
            return False
        # Of pandas' index, or of identifiers, whatever is beside it.
        if any(name and _NO_TEXT.fullmatch(name.lower()) for name in tops):
            return True
        if numeric:
            is_named = any(not is_void(n) and not re.search(r"\d", n) for n in tops)
            others = [name for i, name in enumerate(names) if i not in numeric]
            has_prose = any(map(_PROSE.fullmatch, others))
            return is_named if is_named != has_prose else None
        # A label on top that recurs below makes the first line a row.
        ends = [row[-1].strip() for row in self.others]
        known = {*layout.labels} or ({*ends} if self.labelled else set())
        if len(names) == 1:
            is_name = names[0][-1:] == "?" and not any(end[-1:] == "?" for end in ends)
        elif names[-1] in known:
            return False
        else:
            recur = names[-1] not in ends and len({*ends}) < len(ends)
            is_name = self.labelled and recur
        # A sentence is no name of a column, unless it is a survey's question: it alone asks, or
        # what stands beside it is no label where labels recur. A short text may be one.
        return None if is_name or not any(map(_PROSE.fullmatch, names)) else False

    def _is_numeric(self, column: int, *top: str) -> bool:
        """Whether a column holds numbers alone, apart from missing ones, below the first line."""
        cells = [*top, *(row[column] for row in self.others if column < len(row))]
        present = [cell for cell in cells if not is_void(cell)]
        return bool(present) and all(map(is_number, present))

    def _choose_columns(self) -> None:
        """By the names that are given, else all texts and, without a header, the last as the
        label.
        """
        layout, path = self.layout, self.path
        numbered = [f"column_{number}" for number in range(1, len(self.cells) + 1)]
        names = self.cells if self.has_header else list(layout.names) or numbered
        # Spreadsheets export columns that are empty; pandas calls them so.
        if names.count("") > 1:
            names = [name or f"Unnamed: {at}" for at, name in enumerate(names)]
        self.names = names
        # A dictionary of the row would keep only one of them.
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{path}: two columns are called {twice!r}: rename one")
        # Names in a header, where there was one, say nothing of a file without.
        knows = self.has_header or set(layout.usual) <= set(names)
        usual = layout.usual if knows else ()
        wanted = self.wanted if layout.texts else [*usual, *self.wanted]
        if missing := [name for name in wanted if name not in names]:
            trained = ", which the model was trained on" if missing[0] in usual else ""
            message = f"no column {missing[0]!r}{trained} (it has {shortened(names)})"
            raise self._wrong(message)
        self.named = bool(wanted) or self.has_header
        texts = layout.texts or usual
        self.labels = self._labels(texts)
        if both := [name for name in self.labels if name in layout.texts]:
            raise self._wrong(f"column {both[0]!r} is the label, not a text")
        self.guessed = not texts
        top = [] if self.has_header else self.cells
        self.texts = texts or tuple(
            name
            for column, name in enumerate(names)
            if name not in self.labels
            and not _NO_TEXT.fullmatch(name.lower())
            and not self._is_numeric(column, *top[column : column + 1])
        )

    def _labels(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Names of the label columns, in a file to predict those that it has."""
        layout, names = self.layout, self.names
        if found := [name for name in column_names(layout.label) if name in names]:
            return tuple(found)
        if not self.has_header and not layout.names:
            # A file to predict may have labels: known ones in the last column tell.
            last = {self.cells[-1], *(row[-1].strip() for row in self.others)}
            is_known = len(names) > 1 and last <= set(layout.labels)
            return (names[-1],) if self.labelled or is_known else ()
        # Unless the user, or the training, calls that column a text.
        usual = [name for name in names if name.lower() in ("label", "labels")]
        found = [name for name in usual if name not in texts]
        if self.labelled and len(found) != 1:
            message = f"which of the columns {shortened(names)} is the label? set LABEL_COLUMN"
            raise DataError(f"{self.path}: {message}")
        return tuple(found)

    def describe(self) -> str:
        """How the file is read, for people."""
        header = f"header {shortened(self.names)}" if self.has_header else "no header"
        return f"{self.file.form}, {shortened(self.names) if self.file.is_jsonl else header}"

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and row. Raises DataError for a line without the texts, or with a wrong
        number of columns.
        """
        # The last column that is needed: MNLI's published lines vary in what follows.
        needed = {*self.texts, *self.labels}
        last = max(column for column, name in enumerate(self.names) if name in needed)
        skipped = self.has_header and not self.file.is_jsonl
        for number, line in self.file.rows[skipped:]:
            if isinstance(line, list):
                width = len(line)
                is_ragged = width != len(self.names) and not self.layout.published
                if width <= last or is_ragged:
                    message = f"{width} columns, expected {len(self.names)}: is it another task's file?"
                    raise DataError(f"{self.path}:{number}: {message}")
                line = dict(zip(self.names, line, strict=False))
            texts = [line.get(name, 0) for name in self.texts]
            if not all(isinstance(text, str) or is_missing(text) for text in texts):
                message = f"no record with the text {shortened(self.texts)}"
                raise self._wrong(message, f":{number}")
            yield number, line

    def text(self, row: dict[str, Any]) -> tuple[str, ...] | None:
        """The texts of a row; None if one is missing."""
        texts = tuple(row[name] for name in self.texts)
        # GLUE's own texts may be empty or read like a missing value.
        is_whole = self.layout.published or not any(map(is_missing, texts))
        return texts if is_whole else None


_COLUMNS_CURE = "set TEXT_COLUMNS and LABEL_COLUMN (predict: --text-columns), or is it another task's file?"
_HEADER_CURE = "set TEXT_COLUMNS and LABEL_COLUMN (predict: --text-columns), or NO_HEADER=1 (--no-header)"


def column_names(text: str) -> tuple[str, ...]:
    """Names that are joined by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _is_sentence(cell: str) -> bool:
    """Whether a cell has more words than a name has, or letters where none are between spaces."""
    words = [word for word in cell.split() if any(map(str.isalpha, word))]
    return len(words) > 2 or len(_UNSPACED.findall(cell)) > 5


class Table(NamedTuple):
    """N examples of one or two texts. labels: ids in ``names``, int64 (N,), or regression targets,
    float32; where an example has several labels 0 or 1 of each name, float32 (N, names).
    """

    texts: list[tuple[str, ...]]
    labels: np.ndarray
    names: tuple[str, ...]  # of the labels; empty: regression
    columns: tuple[str, ...]  # names of the texts, if the file has them
    label: str  # name of the label column, if the file has it; of several, with commas
    several: bool
    summary: str  # how it was read, and what it holds, for people


def _texts(rows: Rows) -> list[tuple[str, ...]]:
    """Texts of all rows. Raises DataError that names all of the rows without."""
    texts = {number: rows.text(row) for number, row in rows}
    if lacking := [number for number, text in texts.items() if text is None]:
        message = f"no text in {first_lines(lacking)}: remove these rows, or fill them"
        raise DataError(f"{rows.path}: {message}")
    return [text for text in texts.values() if text]


def read(path: Path, layout: Layout, num_texts: int = 0) -> Table:
    """Reads a table of labelled examples.

    Raises DataError, naming file and line, for an unreadable table, too few columns, a first line
    that may or may not be a header, texts or labels that are missing, and labels that are unknown
    or apparently texts.
    """
    rows = Rows(path, layout, labelled=True, num_texts=num_texts)
    texts = _texts(rows)
    by_line, several = _label_cells(rows)
    given = [(line, name) for line, names in by_line.items() for name in names]
    if not several and not layout.texts:
        _refuse_copies(rows, texts, [name for _, name in given])
    names, column = layout.labels, ",".join(rows.labels)
    may_be_numbers = layout.numbers is None and not names and not several
    if may_be_numbers and labels.are_numbers([name for _, name in given]):
        layout = layout._replace(numbers=True)
    if layout.numbers:
        values, message = labels.targets_of(path, dict(given))
    else:
        # Of columns that say 0 or 1, one may have no 1.
        marked = rows.labels if len(rows.labels) > 1 else ()
        names = names or marked or labels.classes_of(path, given)
        where = column if rows.named else ""
        values, message = labels.ids_of(path, where, given, names)
    if several:
        lines = {line: at for at, line in enumerate(by_line)}
        ids, values = values, np.zeros((len(texts), len(names)), dtype=np.float32)
        values[[lines[line] for line, _ in given], ids] = 1
        message += f", {sum(not row for row in by_line.values()):,} without any"
    summary = f"{_summary(rows, texts)}, label {column}: {message}"
    column = column if rows.named else ""
    columns = rows.texts if rows.named else ()
    return Table(texts, values, names, columns, column, several, summary)


def _label_cells(rows: Rows) -> tuple[dict[int, tuple[str, ...]], bool]:
    """Labels of each line, and whether an example may have several. Raises DataError where it may
    not.
    """
    layout = rows.layout
    several = layout.several or bool(layout.label_mark) or len(rows.labels) > 1
    by_line = dict[int, tuple[str, ...]]()
    for number, row in rows:
        value = row.get(rows.labels[0], "")
        several = several or isinstance(value, list)
        if several and (layout.numbers or layout.labels) and not layout.several:
            message = "several labels, and the model or REGRESSION=1 has one an example"
            raise DataError(f"{rows.path}:{number}: {message}")
        if len(rows.labels) > 1:
            by_line[number] = labels.marked(rows.path, number, row, rows.labels)
        else:
            by_line[number] = labels.in_cell(value, layout.label_mark)
    return by_line, several


def _refuse_copies(
    rows: Rows, texts: Sequence[tuple[str, ...]], given: Sequence[str]
) -> None:
    """Raises DataError if one of two texts that nobody named is the label in other words."""
    for name, cells in zip(rows.texts, zip(*texts, strict=True), strict=True):
        pairs = {*zip(cells, given, strict=True)}
        is_label = len({*cells}) == len({*given}) == len(pairs) < len(given)
        if is_label and len(rows.texts) > 1:
            raise rows._wrong(f"column {name!r} says the same as the label")


def read_texts(path: Path, layout: Layout, num_texts: int = 0) -> Table:
    """Reads a table to predict, ignoring labels. Raises DataError as ``read`` does.

    num_texts: number of text columns that the model was trained on, 0: unknown.
    """
    rows = Rows(path, layout, labelled=False, num_texts=num_texts)
    texts = _texts(rows)
    none = np.zeros(len(texts))
    return Table(texts, none, layout.labels, (), "", False, _summary(rows, texts))


def _summary(rows: Rows, texts: Sequence[tuple[str, ...]]) -> str:
    message = f"{len(texts):,} examples, text {' | '.join(rows.texts)}"
    return f"{rows.path.name}: {rows.describe()}; {message}"


def table_in(folder: Path, *stems: str, kinds: Sequence[str] = KINDS) -> Path:
    """The first of these tables in a folder, of any format, which reading it may refuse. Raises
    DataError for several files of one name, or none.
    """
    names = sorted(path.name for path in folder.iterdir())
    for stem in stems:
        found = [name for name in names if name.lower().startswith(f"{stem}.")]
        # One of them would be ignored, perhaps the newer one.
        if len(found) > 1:
            message = f"{shortened(found)}: which one? remove or rename the others"
            raise DataError(f"{folder}: {message}")
        if found:
            return folder / found[0]
    message = f"no {' or '.join(stems)} as {', '.join(f'.{kind}' for kind in kinds)}"
    raise DataError(f"{folder}: {message} (it has {shortened(names)})")
