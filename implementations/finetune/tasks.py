"""Tasks: samples for training and prediction, the model, predictions and metrics from its
scores.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bert.data.records import DataError
from bert.data.tokens import WordPiece
from bert.kernels import Kernels
from bert.model.config import BertConfig
from common.env import ConfigError
from common.files import write_text
from finetune import conll, entities, glue, tables
from finetune.batches import Samples
from finetune.config import FinetuneConfig
from finetune.dialect import KINDS, Reading
from finetune.models import Classification, SpanPrediction, Tagging
from finetune.squad import data as squad
from finetune.squad.answers import Logits, Rules, predict
from finetune.squad.features import Features, Limits, make_features, settings_of
from finetune.squad.score import best_threshold, score


def build(config: FinetuneConfig, tokenizer: WordPiece) -> Squad | Glue:
    """The task, with the data that the mode needs. Raises DataError."""
    kinds: dict[str, type[Squad | Glue]] = {"squad": Squad, "ner": Ner}
    return kinds.get(config.task, Glue)(config, tokenizer)


def digest(path: Path) -> str:
    """SHA-256 of a file, 16 digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def samples_of(windows: Features) -> Samples:
    sequences = [windows.sequence(i) for i in range(len(windows))]
    labels = {"starts": windows.starts, "ends": windows.ends}
    return Samples(
        sequences, {name: values.astype(np.int64) for name, values in labels.items()}
    )


class TaskData:
    """Data of a task. notes: for people, about the data; digests: of its files."""

    def __init__(self, config: FinetuneConfig) -> None:
        self.config = config
        self.notes = list[str]()
        self.digests = dict[str, str]()
        self.train: Samples | None = None
        self.test: Samples | None = None


class Squad(TaskData):
    """SQuAD: DATA/train-v1.1.json and DATA/dev-v1.1.json, or those of v2.0."""

    def __init__(self, config: FinetuneConfig, tokenizer: WordPiece) -> None:
        super().__init__(config)
        self.version = version = config.squad_version
        own = {k: v for k, v in asdict(config.squad).items() if v is not None}
        facts = {} if config.trains else config.described
        length = {"max_seq_length": config.length}
        self.limits = limits = settings_of(Limits, {**facts, **own, **length})
        self.rules = settings_of(Rules, {**facts, **own, "squad_version": version})
        if config.trains:
            path = config.data / f"train-v{version}.json"
            dataset = squad.read(path, version)
            features, left_out = make_features(
                dataset, tokenizer, limits, training=True
            )
            if not len(features):
                raise DataError(f"{path}: no answer is at its answer_start")
            self.train = samples_of(features)
            self.digests["training data"] = digest(path)
            self.notes.append(
                f"training: {len(features.queries):,} questions, {len(features):,} windows"
            )
            if left_out:
                self.notes.append(
                    f"{len(left_out):,} questions left out: the context does not contain their answer"
                )
        if config.mode != "train":
            path = config.data
            if path.is_dir():
                path /= f"dev-v{version}.json"
            dataset = squad.read(
                path, version, needs_answers=config.mode != "prediction"
            )
            # Needed again to turn scores into texts.
            self.features, _ = make_features(dataset, tokenizer, limits, training=False)
            self.test = samples_of(self.features)
            self.digests["test data"] = digest(path)
            counts = (
                f"{len(dataset.questions):,} questions, {len(self.features):,} windows"
            )
            self.notes.append(f"test: {counts}")

    def model(self, config: BertConfig, kernels: Kernels) -> SpanPrediction:
        return SpanPrediction(config, kernels)

    def finish(
        self, scores: Sequence[np.ndarray], folder: Path | None = None
    ) -> dict[str, float]:
        """Writes predictions from the scores of the test samples, if there is a folder; returns the
        metrics, the main one first, if answers are known.
        """
        predictions = predict(
            self.features, [Logits(*window.T) for window in scores], self.rules
        )
        if folder is not None:
            predictions.write(folder)
        if self.config.mode == "prediction":
            return {}
        questions = self.features.dataset.questions
        metrics = score(questions, predictions.answers, self.version)
        if self.rules.version_2:
            threshold, best = best_threshold(questions, predictions)
            metrics |= {"best_null_threshold": threshold, "best_f1": best}
        return metrics

    def description(self) -> dict[str, Any]:
        """Training settings that prediction needs (task.json)."""
        return {
            "task": "squad",
            "lower_case": self.config.lower_case,
            **self.limits._asdict(),
            **self.rules._asdict(),
        }


class Glue(TaskData):
    """A GLUE task or a user's own table: train, dev and test in DATA, as .tsv, .csv or .jsonl.

    reads: of files with labels, and without.
    """

    head = Classification
    kinds: tuple[str, ...] = KINDS
    reads = tables.read, tables.read_texts

    def __init__(self, config: FinetuneConfig, tokenizer: WordPiece) -> None:
        super().__init__(config)
        self.task = glue.TASKS[config.task]
        self.tokenizer = tokenizer
        self.sizes: dict[str, int] = {}  # examples in each test file
        self.num_texts = config.described.get("num_texts", 0)
        self.layout = self.task.layout or _layout(config)
        if config.trains:
            self._read_training()
        else:
            if "labels" not in config.described:
                raise ConfigError(
                    f"{config.weights_folder}: has no task.json: not fine-tuned here"
                )
            # Scores are numbered by the labels of the training, not
            # by those that this file happens to hold.
            labels = tuple(config.described["labels"])
            self.layout = self.layout._replace(labels=labels, numbers=not labels)
        if config.mode != "train":
            self._read_tests()

    def _read_training(self) -> None:
        path = tables.table_in(self.config.data, "train", kinds=self.kinds)
        table = self.reads[0](path, self.layout)
        # What training found in the file holds for dev, test and later predictions: a column or a
        # label of another order there must not change what a score means.
        self.layout = self.layout._replace(
            labels=table.names,
            numbers=not table.names,
            usual=table.columns,
            label=table.label,
            several=table.several,
        )
        self.num_texts = len(table.texts[0])
        self.digests["training data"] = digest(path)
        self.train = self._samples(table)
        self.notes.append(f"training: {table.summary}")

    def _read_tests(self) -> None:
        """The files of all parts as one, so that their predictions are batched together."""
        predicts = self.config.mode == "prediction"
        usual = ("test", "dev", "valid") if predicts else ("dev", "valid")
        tests, digests = list[Samples](), list[str]()
        for part in self.task.parts:
            stems = [f"{name}{part}" for name in usual]
            path = tables.table_in(self.config.data, *stems, kinds=self.kinds)
            table = self.reads[predicts](path, self.layout, self.num_texts)
            self.notes.append(f"test: {table.summary}")
            tests.append(self._samples(table))
            digests.append(digest(path))
            self.sizes[part] = len(table.texts)
        sequences = [sequence for part in tests for sequence in part.sequences]
        labels = np.concatenate([part.labels["labels"] for part in tests])
        self.test, self.digests["test data"] = (
            Samples(sequences, {"labels": labels}),
            "+".join(digests),
        )

    def _samples(self, table: tables.Table) -> Samples:
        length = self.config.length
        sequences = glue.encode(table.texts, self.tokenizer, length)
        full = sum(len(ids) == length for ids, _ in sequences)
        if note := glue.cut_note(full, len(sequences), length):
            self.notes.append(note)
        return Samples(sequences, {"labels": table.labels})

    def model(self, config: BertConfig, kernels: Kernels) -> Classification:
        # One output without labels: a regression.
        return self.head(config, kernels, len(self.layout.labels) or 1)

    def finish(
        self, scores: Sequence[np.ndarray], folder: Path | None = None
    ) -> dict[str, float]:
        """Writes predictions.tsv (index, prediction, probability of each label), and of a user's
        table classes.tsv, if there is a folder; returns the metrics, the main one first, if known.

        Mode prediction also writes the files for GLUE's server.
        """
        assert self.test is not None
        names, several = self.layout.labels, self.layout.several
        usual = glue.SEVERAL if several else glue.CLASSES if names else glue.NUMBERS
        metrics = {}
        end = 0
        for part, size in self.sizes.items():
            begin, end = end, end + size
            own, true = scores[begin:end], self.test.labels["labels"][begin:end]
            # Of MNLI's second part: predictions_mismatched.tsv, "mismatched_accuracy".
            suffix = "_mismatched" if part == "_mismatched" else ""
            if folder is not None:
                self._write(folder, part, suffix, own)
            if self.config.mode == "prediction":
                continue
            values = np.array([glue.chosen(row, names, several) for row in own])
            if folder is not None and names and not self.task.layout:
                _write_classes(folder, glue.by_class(values, true, names))
            for metric in self.task.metrics or usual:
                name = f"{suffix}_{metric.__name__}".lstrip("_")
                metrics[name] = metric(values, true)
        return metrics

    def _write(
        self, folder: Path, part: str, suffix: str, scores: Sequence[np.ndarray]
    ) -> None:
        """The predictions of a part of the test."""
        names = self.layout.labels
        rows = [["index", "prediction", *names]]
        for number, row in enumerate(scores):
            value, shares = glue.prediction(row, names, self.layout.several)
            said = glue.cell(value, self.layout.label_mark)
            cells = [f"{share:.6f}" for share in shares.values()]
            rows.append([str(number), said, *cells])
        _write_rows(folder / f"predictions{suffix}.tsv", rows)
        # GLUE's server takes index and prediction, and no other columns.
        if self.config.mode == "prediction" and self.task.layout:
            answers = glue.SERVER_NAMES.get(part, self.config.task)
            _write_rows(folder / f"{answers}.tsv", [row[:2] for row in rows])

    def description(self) -> dict[str, Any]:
        config, layout = self.config, self.layout
        return {
            "task": config.task,
            "labels": list(layout.labels),
            "several_labels": layout.several,
            "label_separator": layout.label_mark,
            "lower_case": config.lower_case,
            "num_texts": self.num_texts,
            "columns": list(layout.texts or layout.usual),
            "label_column": layout.label,
            "max_seq_length": config.length,
        }


class Ner(Glue):
    """Token classification: train, dev and test in DATA, as CoNLL's .txt or .conll."""

    head = Tagging
    kinds = "txt", "conll"
    reads = conll.read, conll.read_words

    def _samples(self, table: tables.Table) -> Samples:
        self.num_texts = 1
        self.table = table
        names, length = self.layout.labels, self.config.length
        return conll.encode(table, names, self.tokenizer, length)

    def finish(
        self, scores: Sequence[np.ndarray], folder: Path | None = None
    ) -> dict[str, float]:
        """Writes predictions.conll (word, tag if it is known, predicted tag), and classes.tsv, if
        there is a folder; returns the metrics, the main one first, if tags are known.
        """
        assert self.test is not None
        best = (
            self.layout.labels[number]
            for row, labels in zip(scores, self.test.labels["labels"], strict=True)
            for number in row[labels != conll.IGNORED].argmax(axis=1)
        )
        words, true = self.table.texts, self.table.labels
        said = [list(islice(best, len(tags))) for tags in true]
        predicts = self.config.mode == "prediction"
        if folder is not None:
            rows = list[list[str]]()
            for columns in zip(words, *[true] * (not predicts), said, strict=True):
                rows += [*map(list, zip(*columns, strict=True)), []]
            _write_rows(folder / "predictions.conll", rows)
        if predicts:
            return {}
        metrics, classes = entities.scores(said, [*true])
        if folder is not None:
            _write_classes(folder, classes)
        return metrics


def _layout(config: FinetuneConfig) -> tables.Layout:
    """Columns of a user's own table: as set, else as in the training of the model."""
    facts = {} if config.trains else config.described
    # Names in a header say nothing of a file without.
    if config.no_header and not facts.get("label_column", "").startswith("column_"):
        facts = {}
    return tables.Layout(
        texts=tables.column_names(config.text_columns),
        numbers=config.regression,
        label=config.label_column or facts.get("label_column", ""),
        label_mark=config.label_separator or facts.get("label_separator", ""),
        several=facts.get("several_labels", False),
        usual=tuple(facts.get("columns", ())),
        reading=Reading.of(config),
    )


def _write_rows(path: Path, rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join("\t".join(row) + "\n" for row in rows))


def _write_classes(folder: Path, rows: list[list[str]]) -> None:
    """classes.tsv, shown too."""
    _write_rows(folder / "classes.tsv", rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = "  ".join(map(str.ljust, row, widths))
        print(f"finetune: {padded.rstrip()}", file=sys.stderr)
