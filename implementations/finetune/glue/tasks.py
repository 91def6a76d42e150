"""The tasks: where each file has its texts and labels, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.glue import metrics
from finetune.glue.metrics import Metric


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
    metrics: tuple[Metric, ...] = (metrics.accuracy,)


TASKS: dict[str, Task] = {
    "MRPC": Task(texts=(3, 4), label=0, metrics=(metrics.accuracy, metrics.f1, metrics.accuracy_and_f1)),
    "SST-2": Task(texts=(0,), label=1),
    "CoLA": Task(header=False, texts=(3,), label=1, metrics=(metrics.matthews, metrics.accuracy)),
    "MNLI": Task(
        eval_file="dev_matched.tsv",
        texts=(8, 9),
        label=-1,
        labels=("contradiction", "entailment", "neutral"),
    ),
    # One or two columns of text, then the label; every line is an example but a first one whose label is "label".
    "TSV": Task(header=False, texts=(), label=-1, labels=()),
}
