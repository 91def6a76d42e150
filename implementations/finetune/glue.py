"""GLUE tasks and any table of labelled sentences or pairs: TSV files to tokens, predictions to the task's metrics."""

from __future__ import annotations

import math
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


@dataclass(frozen=True, kw_only=True)
class Task:
    """Columns are counted from 0, negative ones from the end.

    labels: in the order of their ids; empty: those of the training file, sorted. The first metric is the headline.
    """

    train_file: str = "train.tsv"
    eval_file: str = "dev.tsv"
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
        eval_file="dev_matched.tsv", texts=(8, 9), label=-1, labels=("contradiction", "entailment", "neutral")
    ),
    # One or two columns of text, then the label; every line is an example but a first one whose label is "label".
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
    Raises DataError naming file and line for a table that cannot be read, too few columns, and unknown labels.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start})") from None
    rows = [(number, line.rstrip("\r").split("\t")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if rows and (task.header or (not task.texts and rows[0][1][-1].strip().lower() == "label")):
        del rows[0]
    if not rows:
        raise DataError(f"{path}: holds no example")
    columns = task.texts or tuple(range(len(rows[0][1]) - 1))
    if len(columns) not in (1, 2):
        raise DataError(f"{path}:{rows[0][0]}: expected one or two columns of text and then the label, between tabs")
    width = max(*columns, task.label) + (2 if task.label < 0 else 1)
    for number, cells in rows:
        if len(cells) < width or (not task.texts and len(cells) > width):
            raise DataError(f"{path}:{number}: {len(cells)} columns, expected {width}: is it another task's file?")
    found = [cells[task.label].strip() for _, cells in rows]
    known = task.labels or tuple(names) or tuple(sorted(set(found)))
    ids = {name: number for number, name in enumerate(known)}
    for (number, _), label in zip(rows, found, strict=True):
        if label not in ids:
            raise DataError(f"{path}:{number}: label {label!r}, expected one of {', '.join(known)}")
    if len(known) < 2:
        raise DataError(f"{path}: every label is {known[0]!r}: expected two or more different ones")
    texts = [tuple(cells[column] for column in columns) for _, cells in rows]
    return Table(texts, np.array([ids[label] for label in found], dtype=np.int64), known)


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
