"""A task as a run sees it: samples to train on and to predict, a model, and what comes of its scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert.core.files import write_text
from bert.data.records import DataError
from bert.data.tokens import WordPiece
from bert.kernels import Kernels
from bert.model.config import BertConfig
from finetune import glue, squad
from finetune.batches import IGNORE, Samples
from finetune.config import Config
from finetune.models import Classification, SpanPrediction


def build(config: Config, tokenizer: WordPiece) -> Squad | Glue:
    """The task with the data that the mode needs. Raises DataError."""
    return Squad(config, tokenizer) if config.task == "squad" else Glue(config, tokenizer)


def samples_of(windows: squad.Features, known: bool) -> Samples:
    """The windows as samples; without answers where they are not known."""
    unknown = np.full(len(windows), IGNORE, dtype=np.int32)
    starts, ends = (windows.starts, windows.ends) if known else (unknown, unknown)
    return Samples([windows.sequence(i) for i in range(len(windows))], {"starts": starts, "ends": ends})


class Squad:
    """SQuAD: DATA/train-v1.1.json and DATA/dev-v1.1.json, or those of v2.0."""

    def __init__(self, config: Config, tokenizer: WordPiece) -> None:
        self.config = config
        self.notes: list[str] = []  # for people, about the data
        self.train: Samples | None = None
        self.test: Samples | None = None
        version = config.squad_version
        limits = squad.Limits(config.length, config.max_query_length, config.doc_stride)
        if config.trains:
            path = config.data / f"train-v{version}.json"
            found, left_out = squad.make_features(squad.read(path, version), tokenizer, limits, training=True)
            if not len(found):
                raise DataError(f"{path}: no answer is where its answer_start says")
            self.train = samples_of(found, known=True)
            self.notes.append(f"training: {len(found.queries):,} questions, {len(found):,} windows")
            if left_out:
                self.notes.append(f"{len(left_out):,} questions left out: their answer is not in the context")
        if config.mode != "train":
            path = config.data / f"dev-v{version}.json"
            dataset = squad.read(path, version, needs_answers=config.mode != "prediction")
            self.features, _ = squad.make_features(dataset, tokenizer, limits, training=False)
            self.test = samples_of(self.features, known=False)
            self.notes.append(f"test: {len(dataset.questions):,} questions, {len(self.features):,} windows")

    def model(self, config: BertConfig, kernels: Kernels) -> SpanPrediction:
        """The model, without weights."""
        return SpanPrediction(config, kernels)

    def finish(self, scores: Sequence[np.ndarray], folder: Path) -> dict[str, float]:
        """Writes predictions from the scores of the test samples; returns the metrics, where answers are known."""
        config = self.config
        rules = squad.Rules(
            n_best=config.n_best, max_answer_length=config.max_answer_length,
            version_2=config.squad_version == "2.0", null_threshold=config.null_threshold,
        )  # fmt: skip
        found = squad.predict(self.features, (squad.Logits(*window.T) for window in scores), rules)
        found.write(folder)
        known = config.mode != "prediction"
        return squad.score(self.features.dataset.questions, found.answers, config.squad_version) if known else {}

    def description(self) -> dict[str, Any]:
        """Settings of the training that prediction needs (task.json)."""
        config = self.config
        return {
            "task": "squad", "squad_version": config.squad_version, "lower_case": config.lower_case,
            "max_seq_length": config.length, "max_query_length": config.max_query_length,
            "doc_stride": config.doc_stride,
        }  # fmt: skip


class Glue:
    """A task of GLUE, or a table of one's own: DATA/train.tsv and DATA/dev.tsv."""

    def __init__(self, config: Config, tokenizer: WordPiece) -> None:
        self.config, self.task = config, glue.TASKS[config.task]
        self.notes: list[str] = []
        self.train: Samples | None = None
        self.test: Samples | None = None
        self.labels = self.task.labels
        described = config.weights_folder / "task.json"  # of the fine-tuned model that the run starts from
        if not self.labels and not config.trains and described.is_file():
            self.labels = tuple(json.loads(described.read_text(encoding="utf-8")).get("labels", ()))
        if config.trains or not self.labels:
            table = glue.read(config.data / self.task.train_file, self.task)
            self.labels = table.names
            self.train = Samples(glue.encode(table.texts, tokenizer, config.length), {"labels": table.labels})
            self.notes.append(f"training: {len(table.texts):,} examples, labels {', '.join(self.labels)}")
        if config.mode != "train":
            table = glue.read(config.data / self.task.eval_file, self.task, self.labels)
            self.test = Samples(glue.encode(table.texts, tokenizer, config.length), {"labels": table.labels})
            most = np.bincount(table.labels).max() / len(table.labels)
            self.notes.append(f"test: {len(table.texts):,} examples, {most:.4f} of them of the most frequent label")

    def model(self, config: BertConfig, kernels: Kernels) -> Classification:
        return Classification(config, kernels, len(self.labels))

    def finish(self, scores: Sequence[np.ndarray], folder: Path) -> dict[str, float]:
        """predictions.tsv: number of the example, label."""
        assert self.test is not None
        predicted = np.array([row.argmax() for row in scores], dtype=np.int64)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{number}\t{self.labels[label]}" for number, label in enumerate(predicted.tolist())]
        write_text(folder / "predictions.tsv", "\n".join(["index\tprediction", *lines]) + "\n")
        return {metric.__name__: metric(predicted, self.test.labels["labels"]) for metric in self.task.metrics}

    def description(self) -> dict[str, Any]:
        config = self.config
        facts = {"task": config.task, "labels": list(self.labels), "lower_case": config.lower_case}
        return {**facts, "max_seq_length": config.length}
