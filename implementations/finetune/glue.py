"""GLUE tasks and other tables of sentences or pairs: columns of their files, tokenization,
metrics.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import expit, softmax

from bert.data.tokens import Integers, WordPiece
from common.tables import read_table
from finetune.tables import Layout

# (N,): class ids, int64, or regression targets, float32; (N, labels): several, of 0 and 1
Labels = npt.NDArray[Any]
Scores = npt.NDArray[np.float32]  # of a sequence [labels]
Metric = Callable[[Labels, Labels], float]  # predicted labels, true labels


def accuracy(predicted: Labels, true: Labels) -> float:
    """Fraction of correct labels."""
    return float((predicted == true).mean())


def f1(predicted: Labels, true: Labels, label: int = 1) -> float:
    """Harmonic mean of precision and recall of a label; 0 if it neither occurs nor is predicted."""
    hits = int(((predicted == label) & (true == label)).sum())
    either = int((predicted == label).sum() + (true == label).sum())
    return 2 * hits / either if either else 0.0


def micro_f1(predicted: Labels, true: Labels) -> float:
    """F1 of all labels of all examples together."""
    return f1(predicted.ravel(), true.ravel())


def exact_match(predicted: Labels, true: Labels) -> float:
    """Fraction of the examples whose labels are all right."""
    return float((predicted == true).all(axis=1).mean())


def macro_f1(predicted: Labels, true: Labels) -> float:
    """Mean F1 of the labels, frequent and rare ones alike: of those that occur or are predicted,
    or, where an example has several, of all.
    """
    # As scikit-learn has them.
    if true.ndim == 2:
        return float(np.mean([*map(f1, predicted.T, true.T)]))
    labels = np.union1d(predicted, true)
    return float(np.mean([f1(predicted, true, label) for label in labels]))


def by_class(predicted: Labels, true: Labels, names: Sequence[str]) -> list[list[str]]:
    """A row of each class: precision, recall, F1, and how many examples it has."""
    rows = [["class", "precision", "recall", "f1", "examples"]]
    for label, name in enumerate(names):
        if true.ndim == 2:
            chosen, is_so = predicted[:, label] == 1, true[:, label] == 1
        else:
            chosen, is_so = predicted == label, true == label
        # 0 of none, as scikit-learn has it.
        shares = (
            is_so[chosen].sum() / max(chosen.sum(), 1),
            chosen[is_so].sum() / max(is_so.sum(), 1),
        )
        figures = (*shares, f1(chosen, is_so))
        rows.append([name, *(f"{x:.4f}" for x in figures), str(is_so.sum())])
    return rows


def accuracy_and_f1(predicted: Labels, true: Labels) -> float:
    return (accuracy(predicted, true) + f1(predicted, true)) / 2


def pearson(predicted: Labels, true: Labels) -> float:
    """Pearson correlation, -1 to 1; 0 if either series is constant."""
    # In fp64: of series with a large mean, little would be left in fp32.
    x = np.asarray(predicted, np.float64) - np.mean(predicted, dtype=np.float64)
    y = np.asarray(true, np.float64) - np.mean(true, dtype=np.float64)
    spread = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / spread if spread else 0.0


def matthews(predicted: Labels, true: Labels) -> float:
    """Matthews correlation coefficient of two classes: their Pearson correlation."""
    return pearson(predicted, true)


def spearman(predicted: Labels, true: Labels) -> float:
    """Correlation of the ranks; ties share their mean rank."""
    from scipy.stats import rankdata  # slow to import, and only needed here

    return pearson(rankdata(predicted), rankdata(true))


def pearson_and_spearman(predicted: Labels, true: Labels) -> float:
    return (pearson(predicted, true) + spearman(predicted, true)) / 2


def chosen(scores: Scores, labels: Sequence[str], several: bool) -> Any:
    """What a sequence's scores say: a class id, a number if there are no labels, or of several
    labels which are at least half probable.
    """
    if several:
        return scores >= 0
    return scores.argmax() if labels else scores[0]


def prediction(
    scores: Scores, labels: Sequence[str], several: bool
) -> tuple[str | float | list[str], dict[str, float]]:
    """Predicted label, number, or labels, and the probability of each."""
    said = chosen(scores, labels, several)
    if not labels:
        # More digits than fp32 has would be noise.
        return round(float(said), 6), {}
    shares = (expit if several else softmax)(scores.astype(np.float64))
    by_label = dict(zip(labels, shares.tolist(), strict=True))
    if several:
        return [
            name for name, is_so in zip(labels, said, strict=True) if is_so
        ], by_label
    return labels[said], by_label


def cell(value: Any, label_mark: str) -> str:
    """A value as a table has it: several labels with a mark between them, else as JSON."""
    if label_mark and isinstance(value, list):
        return label_mark.join(value)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


class Task(NamedTuple):
    """layout: None for a user's own table. metrics: the main one first; empty: chosen by the type
    of labels.

    parts: suffixes of the test files.
    """

    layout: Layout | None = None
    metrics: tuple[Metric, ...] = ()
    parts: tuple[str, ...] = ("",)


# default metrics
CLASSES = (accuracy, macro_f1)
SEVERAL = (micro_f1, macro_f1, exact_match)
NUMBERS = (pearson, spearman, pearson_and_spearman)


def _published(
    metrics: Sequence[str], parts: Sequence[str] = ("",), **columns: str | list[str]
) -> Task:
    """A row of glue.yaml; without labels the task predicts numbers."""
    named: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in columns.items()
    }
    layout = Layout(**named, numbers="labels" not in columns, published=True)
    return Task(layout, tuple(globals()[name] for name in metrics), tuple(parts))


TASKS = {
    name: _published(**row) for name, row in read_table(__file__, "glue.yaml").items()
}
# Not GLUE's, but of users' own files. TSV: former name.
TASKS |= {"table": Task(), "TSV": Task(), "ner": Task()}
# Names that GLUE's server gives to the answers, where they are not the task's.
SERVER_NAMES = {"_matched": "MNLI-m", "_mismatched": "MNLI-mm"}


def encode(
    texts: Sequence[tuple[str, ...]], tokenizer: WordPiece, max_seq_length: int
) -> list[tuple[Integers, int]]:
    """[CLS] a [SEP] or [CLS] a [SEP] b [SEP] of each example: token ids, and start of the second
    segment.

    Long sequences are truncated at the end; of a pair, the longer text loses tokens one by one, b
    if they are equal.
    """
    first = tokenizer([text[0] for text in texts])
    second = tokenizer([text[1] if len(text) == 2 else "" for text in texts])
    sequences = []
    for text, a, b in zip(texts, first, second, strict=True):
        is_pair = len(text) == 2
        # Special tokens: [CLS] and [SEP], for a pair one more [SEP].
        room = max_seq_length - 2 - is_pair
        # As Google's _truncate_seq_pair leaves them.
        keep_b = min(len(b.ids), max(room - len(a.ids), room // 2))
        keep_a = min(len(a.ids), room - keep_b)
        ids = [tokenizer.cls, *a.ids[:keep_a], tokenizer.sep]
        begin = len(ids)  # of the second segment; without one, past the end
        if is_pair:
            ids += [*b.ids[:keep_b], tokenizer.sep]
        sequences.append((np.array(ids, dtype=np.int32), begin))
    return sequences


def cut_note(num_full: int, total: int, length: int) -> str:
    """What to say of sequences that are full, as they may have been cut, which costs accuracy
    without a word; "" if none is.
    """
    message = f"{num_full:,} of {total:,} examples fill {length} tokens"
    return (
        f"{message}: what is longer is cut there (MAX_SEQ_LENGTH)" if num_full else ""
    )
