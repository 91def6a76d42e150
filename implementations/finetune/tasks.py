"""Tasks: samples for training and prediction, the model, predictions and metrics from its scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bert.data.records import DataError
from bert.data.tokens import WordPiece
from bert.kernels import Kernels
from bert.model.config import BertConfig
from common.files import write_text
from finetune import glue, squad, tables
from finetune.batches import IGNORE, Samples
from finetune.config import Config
from finetune.dialect import Reading
from finetune.models import Classification, SpanPrediction


def build(config: Config, tokenizer: WordPiece) -> Squad | Glue:
    """The task, with the data that the mode needs. Raises DataError."""
    return Squad(config, tokenizer) if config.task == "squad" else Glue(config, tokenizer)


def digest(path: Path) -> str:
    """SHA-256 of a file, 16 digits."""
    # Block by block: files to predict and weights may be large.
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()[:16]


def samples_of(windows: squad.Features, known: bool) -> Samples:
    """Windows as samples. known: with answers."""
    unknown = np.full(len(windows), IGNORE, dtype=np.int32)
    starts, ends = (windows.starts, windows.ends) if known else (unknown, unknown)
    return Samples(
        [windows.sequence(i) for i in range(len(windows))], {"starts": starts, "ends": ends}
    )


class TaskData:
    """Data of a task. notes: for people, about the data; digests: of its files."""

    def __init__(self, config: Config) -> None:
        self.config, self.notes, self.digests = config, list[str](), dict[str, str]()
        self.train: Samples | None = None
        self.test: Samples | None = None


class Squad(TaskData):
    """SQuAD: DATA/train-v1.1.json and DATA/dev-v1.1.json, or those of v2.0."""

    def __init__(self, config: Config, tokenizer: WordPiece) -> None:
        super().__init__(config)
        version = config.squad_version
        limits = squad.Limits(config.length, config.max_query_length, config.doc_stride)
        if config.trains:
            path = config.data / f"train-v{version}.json"
            found, left_out = squad.make_features(
                squad.read(path, version), tokenizer, limits, training=True
            )
            if not len(found):
                raise DataError(f"{path}: no answer is at its answer_start")
            self.train, self.digests["training data"] = samples_of(found, known=True), digest(path)
            self.notes.append(f"training: {len(found.queries):,} questions, {len(found):,} windows")
            if left_out:
                self.notes.append(
                    f"{len(left_out):,} questions left out: the context does not contain their answer"
                )
        if config.mode != "train":
            path = config.data / f"test-v{version}.json"
            # Answers of the test set are not published: only MODE=prediction can use it.
            if config.mode != "prediction" or not path.is_file():
                path = config.data / f"dev-v{version}.json"
            dataset = squad.read(path, version, needs_answers=config.mode != "prediction")
            # Needed again to turn scores into texts.
            self.features, _ = squad.make_features(dataset, tokenizer, limits, training=False)
            self.test, self.digests["test data"] = (
                samples_of(self.features, known=False),
                digest(path),
            )
            self.notes.append(
                f"test: {len(dataset.questions):,} questions, {len(self.features):,} windows"
            )

    def model(self, config: BertConfig, kernels: Kernels) -> SpanPrediction:
        return SpanPrediction(config, kernels)

    def finish(self, scores: Sequence[np.ndarray], folder: Path) -> dict[str, float]:
        """Writes predictions from the scores of the test samples; returns the metrics if answers are known."""
        config = self.config
        rules = squad.Rules(
            n_best=config.n_best, max_answer_length=config.max_answer_length,
            version_2=config.squad_version == "2.0", null_threshold=config.null_threshold,
        )  # fmt: skip
        found = squad.predict(self.features, (squad.Logits(*window.T) for window in scores), rules)
        found.write(folder)
        if config.mode == "prediction":
            return {}
        questions = self.features.dataset.questions
        metrics = squad.score(questions, found.answers, config.squad_version)
        if config.squad_version == "2.0":
            metrics["best_null_threshold"], metrics["best_f1"] = squad.best_threshold(
                questions, found
            )
        return metrics

    def description(self) -> dict[str, Any]:
        """Training settings that prediction needs (task.json)."""
        config = self.config
        return {
            "task": "squad", "squad_version": config.squad_version, "lower_case": config.lower_case,
            "max_seq_length": config.length, "max_query_length": config.max_query_length,
            "doc_stride": config.doc_stride, "null_threshold": config.null_threshold,
        }  # fmt: skip


class Glue(TaskData):
    """A GLUE task or a user's own table: train, dev and test in DATA, as .tsv, .csv or .jsonl."""

    def __init__(self, config: Config, tokenizer: WordPiece) -> None:
        super().__init__(config)
        self.task = glue.TASKS[config.task]
        self.sizes: dict[str, int] = {}  # examples in each test file
        facts, self.num_texts = config.described, config.described.get("num_texts", 0)
        self.layout = self.task.layout or tables.Layout(
            texts=config.texts, numbers=config.regression,
            label=config.label_column or ("" if config.trains else facts.get("label_column", "")),
            usual=() if config.trains else tuple(facts.get("columns", ())),
            reading=Reading(
                separator=config.separator, encoding=config.encoding, no_header=config.no_header
            ),
        )  # fmt: skip
        # Scores are numbered by the labels of the training, not
        # by those that this file happens to hold.
        labels = None if config.trains else labels_of(facts, config.bert_config_path)
        if labels is not None:
            self.layout = replace(self.layout, labels=labels, numbers=not labels)
        # A model of Hugging Face without label names: they are
        # taken from the table it was trained on.
        if config.trains or (labels is None and not self.task.layout):
            path = tables.table_in(config.data, "train")
            table = tables.read(path, self.layout)
            self.layout = replace(
                self.layout, labels=table.names, numbers=not table.names, usual=table.columns,
                label=table.label,
            )  # fmt: skip
            self.num_texts, self.digests["training data"] = len(table.texts[0]), digest(path)
            self.train = self._samples(table, tokenizer)
            self.notes.append(f"training: {table.form}; {table.summary}")
        tests: list[Samples] = []
        for part in self.task.parts if config.mode != "train" else ():
            stems = (
                (f"test{part}", f"dev{part}") if config.mode == "prediction" else (f"dev{part}",)
            )
            # Asked only for parts after the first, which must be there.
            if tests and not any((config.data / f"{stem}.tsv").is_file() for stem in stems):
                break  # MNLI's mismatched examples are optional
            path = tables.table_in(config.data, *stems)
            read = tables.read_texts if config.mode == "prediction" else tables.read
            table = read(path, self.layout, self.num_texts)
            self.notes.append(f"test: {table.form}; {table.summary}")
            tests.append(self._samples(table, tokenizer))
            self.sizes[part] = len(table.texts)
            self.digests["test data"] = "+".join(
                [*filter(None, [self.digests.get("test data")]), digest(path)]
            )
        if tests:
            (name,) = tests[0].labels
            sequences = [sequence for part in tests for sequence in part.sequences]
            # All parts as one, so that their predictions are batched together.
            self.test = Samples(
                sequences, {name: np.concatenate([part.labels[name] for part in tests])}
            )

    def _samples(self, table: tables.Table, tokenizer: WordPiece) -> Samples:
        name = "labels" if self.layout.labels else "numbers"
        return Samples(
            glue.encode(table.texts, tokenizer, self.config.length), {name: table.labels}
        )

    def model(self, config: BertConfig, kernels: Kernels) -> Classification:
        return Classification(config, kernels, len(self.layout.labels) or 1)

    def finish(self, scores: Sequence[np.ndarray], folder: Path) -> dict[str, float]:
        """Writes predictions.tsv (index, prediction, probability of each label); returns the metrics, if known.

        Mode prediction also writes the files for GLUE's server.
        """
        assert self.test is not None
        folder.mkdir(parents=True, exist_ok=True)
        (true,), names, metrics = self.test.labels.values(), self.layout.labels, {}
        end = 0
        for (part, size), answers in zip(
            self.sizes.items(), self.task.parts.values(), strict=False
        ):
            begin, end = end, end + size
            rows = [["index", "prediction", *names]]
            for number, (prediction, shares) in enumerate(
                glue.prediction(row, names) for row in scores[begin:end]
            ):
                rows.append(
                    [str(number), str(prediction), *(f"{share:.6f}" for share in shares.values())]
                )
            suffix = "_mismatched" if part == "_mismatched" else ""
            files = [(f"predictions{suffix}", rows)]
            # GLUE's server takes index and prediction, and no other columns.
            if self.config.mode == "prediction":
                files += [(answers, [row[:2] for row in rows])] if answers else []
            else:
                values = [scores[i].argmax() if names else scores[i][0] for i in range(begin, end)]
                prefix = f"{suffix[1:]}_" if suffix else ""
                for metric in self.task.metrics or (glue.CLASSES if names else glue.NUMBERS):
                    # Of MNLI's second part, "mismatched_accuracy".
                    metrics[prefix + metric.__name__] = metric(np.array(values), true[begin:end])
            for name, lines in files:
                write_text(
                    folder / f"{name}.tsv", "".join("\t".join(line) + "\n" for line in lines)
                )
        return metrics

    def description(self) -> dict[str, Any]:
        config = self.config
        facts = {
            "task": config.task,
            "labels": list(self.layout.labels),
            "lower_case": config.lower_case,
        }
        facts |= {
            "num_texts": self.num_texts,
            "columns": list(self.layout.texts or self.layout.usual),
            "label_column": self.layout.label,
        }
        return {**facts, "max_seq_length": config.length}


def labels_of(facts: Mapping[str, Any], config_file: Path) -> tuple[str, ...] | None:
    """Labels of a fine-tuned model in the order of its scores; empty for a regression; None if unknown."""
    if "labels" in facts:
        return tuple(facts["labels"])
    known = json.loads(config_file.read_text(encoding="utf-8")).get("id2label", {})
    names = tuple(str(known[number]) for number in sorted(known, key=int))
    # Hugging Face's regression has one output, LABEL_0.
    if len(names) == 1:
        return ()
    # Placeholders of transformers, which say nothing.
    return None if all(name.startswith("LABEL_") for name in names) else names
