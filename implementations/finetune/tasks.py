"""A task as a run sees it: samples to train on and to predict, a model, and what comes of its scores."""

from __future__ import annotations

import hashlib
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


def digest(path: Path) -> str:
    """Of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


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
        self.digests: dict[str, str] = {}  # of the data
        self.train: Samples | None = None
        self.test: Samples | None = None
        version = config.squad_version
        limits = squad.Limits(config.length, config.max_query_length, config.doc_stride)
        if config.trains:
            path = config.data / f"train-v{version}.json"
            found, left_out = squad.make_features(squad.read(path, version), tokenizer, limits, training=True)
            if not len(found):
                raise DataError(f"{path}: no answer is where its answer_start says")
            self.train, self.digests["training data"] = samples_of(found, known=True), digest(path)
            self.notes.append(f"training: {len(found.queries):,} questions, {len(found):,} windows")
            if left_out:
                self.notes.append(f"{len(left_out):,} questions left out: their answer is not in the context")
        if config.mode != "train":
            path = config.data / f"dev-v{version}.json"
            dataset = squad.read(path, version, needs_answers=config.mode != "prediction")
            self.features, _ = squad.make_features(dataset, tokenizer, limits, training=False)
            self.test, self.digests["test data"] = samples_of(self.features, known=False), digest(path)
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
        self.digests: dict[str, str] = {}
        self.train: Samples | None = None
        self.test: Samples | None = None
        self.labels = self.task.labels if config.trains else _labels_of(config) or self.task.labels
        self.num_texts = config.described.get("num_texts", 0)
        if config.trains or not self.labels:
            path = config.data / self.task.train_file
            table = glue.read(path, self.task)
            self.digests["training data"] = digest(path)
            self.labels, self.num_texts = table.names, len(table.texts[0])
            self.train = Samples(glue.encode(table.texts, tokenizer, config.length), {"labels": table.labels})
            self.notes.append(f"training: {len(table.texts):,} examples, labels {glue.some(self.labels)}")
        if config.mode == "prediction":
            path = config.data / self.task.test_file
            path = path if path.is_file() else config.data / self.task.eval_file
            texts = glue.read_texts(path, self.task, self.num_texts, self.labels)
            unknown = np.full(len(texts), IGNORE, dtype=np.int64)
            self.digests["test data"] = digest(path)
            self.test = Samples(glue.encode(texts, tokenizer, config.length), {"labels": unknown})
            self.notes.append(f"test: {len(texts):,} examples of {path.name}, the first {' | '.join(texts[0])[:60]!r}")
        elif config.mode != "train":
            path = config.data / self.task.eval_file
            table = glue.read(path, self.task, self.labels)
            self.digests["test data"] = digest(path)
            if len(table.texts[0]) != (self.num_texts or len(table.texts[0])):
                told = f"{len(table.texts[0])} texts in a line, and the model learns from {self.num_texts}"
                raise DataError(f"{path}: {told}: is it another task's file?")
            self.test = Samples(glue.encode(table.texts, tokenizer, config.length), {"labels": table.labels})
            most = np.bincount(table.labels).max() / len(table.labels)
            self.notes.append(f"test: {len(table.texts):,} examples, {most:.4f} of them of the most frequent label")

    def model(self, config: BertConfig, kernels: Kernels) -> Classification:
        return Classification(config, kernels, len(self.labels))

    def finish(self, scores: Sequence[np.ndarray], folder: Path) -> dict[str, float]:
        """Writes predictions.tsv: number, label, each label's probability; the metrics, where labels are known."""
        assert self.test is not None
        shares = np.array([glue.probabilities(row) for row in scores])
        predicted = np.array([row.argmax() for row in scores], dtype=np.int64)
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["\t".join(["index", "prediction", *self.labels])]
        for number, (label, row) in enumerate(zip(predicted.tolist(), shares.tolist(), strict=True)):
            lines.append("\t".join([str(number), self.labels[label], *(f"{share:.6f}" for share in row)]))
        write_text(folder / "predictions.tsv", "\n".join(lines) + "\n")
        if self.config.mode == "prediction":
            return {}
        return {metric.__name__: metric(predicted, self.test.labels["labels"]) for metric in self.task.metrics}

    def description(self) -> dict[str, Any]:
        config = self.config
        facts = {"task": config.task, "labels": list(self.labels), "lower_case": config.lower_case}
        facts["num_texts"] = self.num_texts
        return {**facts, "max_seq_length": config.length}


def _labels_of(config: Config) -> tuple[str, ...]:
    """The labels of a fine-tuned model by the order of its scores, from task.json or config.json; empty: not told."""
    if "labels" in config.described:
        return tuple(config.described["labels"])
    told = json.loads(config.bert_config_path.read_text(encoding="utf-8")).get("id2label", {})
    names = tuple(str(told[number]) for number in sorted(told, key=int))
    return () if all(name.startswith("LABEL_") for name in names) else names
