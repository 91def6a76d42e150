"""GLUE tasks and any table of labelled sentences or pairs: TSV files to tokens, predictions to the task's metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert.data.records import DataError
from bert.data.tokens import Integers, WordPiece

Labels = npt.NDArray[np.int64]  # ids, (N,)
Metric = Callable[[Labels, Labels], float]  # of the predicted and the true labels


def accuracy(predicted: Labels, true: Labels) -> float:
    """Share of right labels."""
    return float((predicted == true).mean())


def f1(predicted: Labels, true: Labels) -> float:
    """Harmonic mean of precision and recall of label 1; 0 where it neither occurs nor is predicted."""
    hits = int(((predicted == 1) & (true == 1)).sum())
    either = int((predicted == 1).sum() + (true == 1).sum())
    return 2 * hits / either if either else 0.0


def accuracy_and_f1(predicted: Labels, true: Labels) -> float:
    """The mean of both."""
    return (accuracy(predicted, true) + f1(predicted, true)) / 2


def matthews(predicted: Labels, true: Labels) -> float:
    """Matthews' correlation of two labels, -1 to 1; 0 where all predictions or all labels are the same."""
    counts = np.zeros((2, 2))
    np.add.at(counts, (true, predicted), 1)
    (tn, fp), (fn, tp) = counts.tolist()
    spread = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(spread) if spread else 0.0


def probabilities(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Softmax of the scores of labels or answers."""
    shares = np.exp(scores - scores.max(), dtype=np.float64)
    return np.asarray(shares / shares.sum())


@dataclass(frozen=True, kw_only=True)
class Task:
    """Columns are counted from 0, negative ones from the end.

    labels: in the order of their ids; empty: those of the training file, sorted. The first metric is the headline.
    """

    train_file: str = "train.tsv"
    eval_file: str = "dev.tsv"
    test_file: str = "test.tsv"  # without labels
    header: bool = True
    texts: tuple[int, ...]
    label: int
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[Metric, ...] = (accuracy,)


TASKS: dict[str, Task] = {
    "MRPC": Task(texts=(3, 4), label=0, metrics=(accuracy, f1, accuracy_and_f1)),
    "SST-2": Task(texts=(0,), label=1),
    "CoLA": Task(header=False, texts=(3,), label=1, metrics=(matthews, accuracy)),
    "MNLI": Task(
        eval_file="dev_matched.tsv",
        test_file="test_matched.tsv",
        texts=(8, 9),
        label=-1,
        labels=("contradiction", "entailment", "neutral"),
    ),
    # One or two columns of text, then the label; a first line whose label is "label" is a header.
    "TSV": Task(header=False, texts=(), label=-1, labels=()),
}


@dataclass(frozen=True)
class Table:
    """N examples: one text or two each, and the id of its label."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray  # int64 (N,)
    names: tuple[str, ...]  # of the labels


def read(path: Path, task: Task, names: Sequence[str] = ()) -> Table:
    """Reads a table; quotation marks are text, as GLUE has them, and only line feeds end a line.

    Args: names: the labels in the order of their ids, where the task leaves them open (those of the training file).
    Raises DataError naming file and line for a table that cannot be read, too few columns, a first line that may or may
    not be a header, and labels that are unknown, empty, or the texts themselves.
    """
    rows = _rows(path)
    given = tuple(names) or task.labels
    if task.header:
        first = rows.pop(0)[1]
        if len(first) > max(task.label, 0) and first[task.label].strip() in given:
            raise DataError(f"{path}:1: an example, and this task's files begin with a header: add one")
    columns = task.texts or tuple(range(len(rows[0][1]) - 1))
    if len(columns) not in (1, 2):
        raise DataError(f"{path}:{rows[0][0]}: expected one or two columns of text and then the label, between tabs")
    _check_width(path, rows, task, max(*columns, task.label) + (2 if task.label < 0 else 1))
    found = [cells[task.label].strip() for _, cells in rows]
    different = sorted(set(found))
    if not given and len(different) - 1 > max(3, len(rows) / 2):
        told = f"{len(different):,} different labels in {len(rows):,} lines ({some(different)})"
        raise DataError(f"{path}: {told}: the label is the last column, after the text")
    if not task.texts and found[0] not in found[1:]:
        if found[0].lower() == "label":
            del rows[0], found[0]
        elif not given and len(rows) > 1:
            cure = "call a header's last column label, give an example's label a second example"
            raise DataError(f"{path}:1: is it a header? {found[0]!r:.60} is the label of no other line: {cure}")
    if not rows:
        raise DataError(f"{path}: holds no example")
    known = given or tuple(sorted(set(found)))
    ids = {name: number for number, name in enumerate(known)}
    for (number, _), label in zip(rows, found, strict=True):
        if label not in ids or not label:
            where = "" if task.texts else " in the last column"
            raise DataError(f"{path}:{number}: label {label!r:.60}, expected one of {some(known)}{where}")
    if len(known) < 2:
        raise DataError(f"{path}: every label is {known[0]!r}: expected two or more different ones")
    texts = [tuple(cells[column] for column in columns) for _, cells in rows]
    return Table(texts, np.array([ids[label] for label in found], dtype=np.int64), known)


def read_texts(path: Path, task: Task, num_texts: int, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The texts of a table to predict: with labels, which are passed over, or without, as GLUE's test files are.

    num_texts, names: columns of text and labels that a model of one's own table was trained on; 0 where it does not
    say, and then a last column of labels alone is no text. Raises DataError as ``read`` does.
    """
    rows = _rows(path)
    first = [cell.strip().lower() for cell in rows[0][1]]
    labelled = len(first) > max(num_texts, 1) and all(
        cells[-1].strip() in names for _, cells in rows[first[-1] == "label" :]
    )
    columns = task.texts or tuple(range(num_texts or len(first) - labelled))
    if task.texts:  # GLUE's test files have a header, and a number before a single sentence
        if first[0] == "index" and len(columns) == 1:
            columns = (1,)
        if task.header or first[0] == "index":
            del rows[0]
    elif first[-1] == "label" or all(re.fullmatch(r"(text|sentence)[ _]?[12ab]?", cell) for cell in first):
        del rows[0]
    if not rows:
        raise DataError(f"{path}: holds no example")
    _check_width(path, rows, task, max(columns, default=0) + 1 + (not task.texts and labelled))
    return [tuple(cells[column] for column in columns) for _, cells in rows]


def some(names: Sequence[str]) -> str:
    """The first labels, of texts that were taken for labels their beginnings."""
    return ", ".join([*(name[:30] for name in names[:10]), *(["..."] if len(names) > 10 else [])])


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """Numbers and cells of the lines that are not blank, at least one."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start})") from None
    rows = [(number, line.rstrip("\r").split("\t")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not rows:
        raise DataError(f"{path}: holds no example")
    return rows


def _check_width(path: Path, rows: Sequence[tuple[int, list[str]]], task: Task, width: int) -> None:
    for number, cells in rows:
        if len(cells) < width or (not task.texts and len(cells) > width):
            raise DataError(f"{path}:{number}: {len(cells)} columns, expected {width}: is it another task's file?")


def encode(texts: Sequence[tuple[str, ...]], tokenizer: WordPiece, max_seq_length: int) -> list[tuple[Integers, int]]:
    """[CLS] a [SEP] or [CLS] a [SEP] b [SEP] of each example: token ids, and where its second segment starts.

    A sequence that is too long loses tokens at the end, a pair one after another from the longer text, b among equals.
    """
    first = tokenizer([text[0] for text in texts])
    second = tokenizer([text[1] if len(text) == 2 else "" for text in texts])
    sequences = []
    for text, a, b in zip(texts, first, second, strict=True):
        pair = len(text) == 2
        keep_a, keep_b = kept(len(a.ids), len(b.ids), max_seq_length - 2 - pair)
        parts: list[npt.ArrayLike] = [[tokenizer.cls], a.ids[:keep_a], [tokenizer.sep]]
        parts += [b.ids[:keep_b], [tokenizer.sep]] if pair else []
        ids = np.concatenate(parts).astype(np.int32)
        sequences.append((ids, keep_a + 2 if pair else len(ids)))
    return sequences


def kept(a: int, b: int, room: int) -> tuple[int, int]:
    """Tokens that a pair of so many keeps: the longer one is cut until both fit, b where they are equally long."""
    surplus = max(a + b - room, 0)
    from_longer = min(surplus, abs(a - b))
    a, b = (a - from_longer, b) if a > b else (a, b - from_longer)
    rest = surplus - from_longer  # now they are equally long: b, a, b, ...
    return a - rest // 2, b - (rest + 1) // 2
