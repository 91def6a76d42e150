"""GLUE tasks and other tables of sentences or pairs: columns of their files, tokenization, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from bert.data.tokens import Integers, WordPiece
from finetune.tables import Layout

Labels = npt.NDArray[Any]  # (N,): class ids, int64, or regression targets, float32
Metric = Callable[[Labels, Labels], float]  # predicted labels, true labels


def accuracy(predicted: Labels, true: Labels) -> float:
    """Fraction of correct labels."""
    return float((predicted == true).mean())


def f1(predicted: Labels, true: Labels) -> float:
    """Harmonic mean of precision and recall of label 1; 0 if it neither occurs nor is predicted."""
    hits = int(((predicted == 1) & (true == 1)).sum())
    either = int((predicted == 1).sum() + (true == 1).sum())
    return 2 * hits / either if either else 0.0


def accuracy_and_f1(predicted: Labels, true: Labels) -> float:
    return (accuracy(predicted, true) + f1(predicted, true)) / 2


def matthews(predicted: Labels, true: Labels) -> float:
    """Matthews correlation coefficient of two classes, -1 to 1; 0 if all predictions or all labels are the same."""
    counts = np.zeros((2, 2))
    np.add.at(counts, (true, predicted), 1)
    (tn, fp), (fn, tp) = counts.tolist()
    spread = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(spread) if spread else 0.0


def pearson(predicted: Labels, true: Labels) -> float:
    """Pearson correlation, -1 to 1; 0 if either series is constant."""
    # In fp64: of series with a large mean, little would be left in fp32.
    x, y = (
        np.asarray(values, np.float64) - np.mean(values, dtype=np.float64)
        for values in (predicted, true)
    )
    spread = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / spread if spread else 0.0


def spearman(predicted: Labels, true: Labels) -> float:
    """Correlation of the ranks; ties share their mean rank."""
    return pearson(rankdata(predicted), rankdata(true))


def pearson_and_spearman(predicted: Labels, true: Labels) -> float:
    return (pearson(predicted, true) + spearman(predicted, true)) / 2


def probabilities(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Softmax."""
    # Less the maximum, as exp overflows above 88 in fp32.
    shares = np.exp(scores - scores.max(), dtype=np.float64)
    return np.asarray(shares / shares.sum())


def prediction(
    scores: npt.NDArray[np.float32], labels: Sequence[str]
) -> tuple[str | float, dict[str, float]]:
    """Predicted label and the probability of each, from a sequence's scores; a number if there are no labels."""
    if not labels:
        # More digits than fp32 has would be noise.
        return round(float(scores[0]), 6), {}
    return labels[int(scores.argmax())], dict(
        zip(labels, probabilities(scores).tolist(), strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """layout: None for a user's own table. metrics: the main one first; empty: chosen by the type of labels.

    parts: suffix of the test files -> name of the prediction file for GLUE's server.
    """

    layout: Layout | None = None
    metrics: tuple[Metric, ...] = ()
    parts: Mapping[str, str] = field(default_factory=lambda: {"": ""})


CLASSES, NUMBERS = (accuracy,), (pearson, spearman, pearson_and_spearman)  # default metrics
# The metrics that GLUE's leaderboard reports.
_PAIR, _TWO = (accuracy, f1, accuracy_and_f1), ("0", "1")
_ENTAILED = ("entailment", "not_entailment")


def _task(
    answers: str, texts: str, label: str, labels: tuple[str, ...], metrics: tuple[Metric, ...]
) -> Task:
    names = (
        ("source", "label", "mark", "sentence") if answers == "CoLA" else ()
    )  # CoLA's files have no header
    layout = Layout(
        texts=tuple(texts.split(", ")), label=label, labels=labels, names=names, numbers=not labels,
        published=True,
    )  # fmt: skip
    # GLUE scores MNLI twice: on the genres of its training, and on others.
    mnli = {"_matched": "MNLI-m", "_mismatched": "MNLI-mm"}
    return Task(layout=layout, metrics=metrics, parts=mnli if answers == "MNLI" else {"": answers})


TASKS: dict[str, Task] = {
    task.parts.get("", "MNLI"): task
    for task in (
        _task("MRPC", "#1 String, #2 String", "Quality", _TWO, _PAIR),
        _task("SST-2", "sentence", "label", _TWO, CLASSES),
        _task("CoLA", "sentence", "label", _TWO, (matthews, accuracy)),
        _task(
            "MNLI",
            "sentence1, sentence2",
            "gold_label",
            ("contradiction", "entailment", "neutral"),
            CLASSES,
        ),
        _task("QQP", "question1, question2", "is_duplicate", _TWO, _PAIR),
        _task("QNLI", "question, sentence", "label", _ENTAILED, CLASSES),
        _task("RTE", "sentence1, sentence2", "label", _ENTAILED, CLASSES),
        # A similarity from 0 to 5, predicted as a number.
        _task("STS-B", "sentence1, sentence2", "score", (), NUMBERS),
        _task("WNLI", "sentence1, sentence2", "label", _TWO, CLASSES),
    )
} | {"table": Task(), "TSV": Task()}  # TSV: former name


def encode(
    texts: Sequence[tuple[str, ...]], tokenizer: WordPiece, max_seq_length: int
) -> list[tuple[Integers, int]]:
    """[CLS] a [SEP] or [CLS] a [SEP] b [SEP] of each example: token ids, and start of the second segment.

    Long sequences are truncated at the end; of a pair, the longer text loses tokens one by one, b if they are equal.
    """
    first = tokenizer([text[0] for text in texts])
    second = tokenizer([text[1] if len(text) == 2 else "" for text in texts])
    sequences = []
    for text, a, b in zip(texts, first, second, strict=True):
        pair = len(text) == 2
        # Special tokens: [CLS] and [SEP], for a pair one more [SEP].
        keep_a, keep_b = kept(len(a.ids), len(b.ids), max_seq_length - 2 - pair)
        parts: list[npt.ArrayLike] = [[tokenizer.cls], a.ids[:keep_a], [tokenizer.sep]]
        parts += [b.ids[:keep_b], [tokenizer.sep]] if pair else []
        ids = np.concatenate(parts).astype(np.int32)
        # The second segment starts after [CLS] a [SEP]; without one, past the end.
        sequences.append((ids, keep_a + 2 if pair else len(ids)))
    return sequences


def kept(a: int, b: int, room: int) -> tuple[int, int]:
    """Tokens kept of each text of a pair: the longer one is truncated until both fit, b if they are equal."""
    # The result of Google's _truncate_seq_pair, which removes tokens in a loop.
    surplus = max(a + b - room, 0)
    from_longer = min(surplus, abs(a - b))
    a, b = (a - from_longer, b) if a > b else (a, b - from_longer)
    rest = surplus - from_longer  # the lengths are equal now, or nothing is left: b, a, b, ...
    return a - rest // 2, b - (rest + 1) // 2
