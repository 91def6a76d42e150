"""``python -m bert evaluate``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bert.checkpoint.save import step_path
from bert.commands import weights as trained
from bert.core.dist import World
from bert.data.batch import PretrainingBatch
from bert.data.records import DataError
from bert.data.tokens import WordPiece
from bert.model.bert import BertForPreTraining
from bert.pretraining.closed_division import VOCAB_MD5
from bert.training import evaluate as evaluation
from bert.training.evaluate import Evaluator
from common.env import ConfigError, from_env

# The reference's accuracy of its initial checkpoint on its 10,000 evaluation sequences, and the tolerance.
INITIAL, TOLERANCE, SEQUENCES = 0.34085, 0.0005, 10_000
MUCH_WORSE = 0.2  # increase of a masked-LM loss: a fifth of the perplexity
_COLUMNS = (
    "accuracy", "mlm_loss", "loss_per_word", "nsp_loss", "nsp_accuracy", "general_accuracy", "general_mlm_loss",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(trained.Source):
    evaluate: evaluation.Config = field(default_factory=evaluation.Config)


def evaluate(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> int:
    """Accuracy and losses of trained weights on the sequences of EVALDIR.

    Each PATH is a checkpoint, a folder of them (all are evaluated, oldest first), or a run's folder, even while it is
    training. With several paths the last line compares the last with the first, such as a domain model with the one it
    was continued from. mlm_loss is the mean over masked tokens; loss_per_word is that times the tokens per word (or
    punctuation mark), if the vocabulary is found: a rough comparison between vocabularies, since the rest of a masked
    word helps. NUM_EVAL_EXAMPLES, EVAL_BATCHSIZE, PRECISION and DEVICE are the trainer's; without NUM_EVAL_EXAMPLES all
    sequences count. Exit status: 0, or 2 for bad input.
    """
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a checkpoint, a folder of them, or a run",
    )
    parser.add_argument(
        "--samples", type=int, help="sequences to evaluate on (default: NUM_EVAL_EXAMPLES, or all)"
    )
    parser.add_argument(
        "--general", type=Path, metavar="FOLDER", help="records of general text, to find forgetting"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object per checkpoint")
    parser.add_argument(
        "--bert-config", type=Path, help="the model's bert_config.json, if not found otherwise"
    )
    options = parser.parse_args(arguments)
    config = from_env(Config, environ)
    samples = options.samples or (
        config.evaluate.num_examples if environ.get("NUM_EVAL_EXAMPLES", "").strip() else 0
    )
    if samples < 0:
        raise ConfigError(f"--samples {samples}: expected at least 1")
    evaluator, paths = (
        CheckpointEvaluator(config, samples, options.bert_config, options.general),
        options.paths,
    )
    columns = _COLUMNS if options.general else _COLUMNS[:5]
    widths = [max(12, len(column)) for column in columns]
    shown: list[dict[str, Any]] = []
    for found in (path for place in paths for path in trained.find(place)):
        figures = evaluator(found)
        shown.append(figures)
        if options.json:
            print(json.dumps(figures), flush=True)
            continue
        if len(shown) == 1:
            titles = (
                f"{column.replace('_', ' '):>{width}}"
                for column, width in zip(columns, widths, strict=True)
            )
            print(f"{'checkpoint':<18}  {'steps':>9}  {'  '.join(titles)}  {'sequences/s':>12}")
        path, steps = Path(figures["checkpoint"]), figures["steps"]
        values = (f"{figures[column]:.5f}" if column in figures else "-" for column in columns)
        cells = "  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
        name, rate = path.name if len(paths) == 1 else str(path), figures["sequences_per_second"]
        print(
            f"{name:<18}  {'-' if steps is None else f'{steps:,}':>9}  {cells}  {rate:>12.1f}",
            flush=True,
        )
        if "initial_checkpoint" in figures:
            verdict = (
                "met"
                if figures["initial_checkpoint"]
                else "not met: these are not the benchmark's weights"
            )
            print(
                f"{INITIAL} +- {TOLERANCE} is expected of the benchmark's initial checkpoint: {verdict}",
                flush=True,
            )
    if len(paths) > 1:
        # JSON is for a program, so the sentence is left out there and the warning goes to stderr.
        _compare(shown[0], shown[-1], quiet=options.json)
    return 0


def _compare(before: dict[str, Any], after: dict[str, Any], quiet: bool) -> None:
    """Prints the last line, and warns if general text is predicted much worse than before."""
    texts = {"": "this text", "general_": "general text"}
    for prefix in [prefix for prefix in texts if f"{prefix}mlm_loss" in after]:
        loss, words = (f"{prefix}{name}" for name in ("mlm_loss", "accuracy"))
        change = f"masked-LM loss {before[loss]:.4f} -> {after[loss]:.4f}"
        if not quiet:
            print(
                f"{texts[prefix]}: {change}, accuracy {before[words]:.4f} -> {after[words]:.4f}",
                flush=True,
            )
        if prefix and after[loss] > before[loss] + MUCH_WORSE:
            cure = "mix general text into the training data, or lower LR or MAX_STEPS"
            print(
                f"bert evaluate: warning: general text got much worse ({change}): {cure}",
                file=sys.stderr,
            )


class CheckpointEvaluator:
    """Evaluates one weights file after another; model and evaluation sets are reused."""

    def __init__(
        self, config: Config, samples: int, bert_config: Path | None, general: Path | None = None
    ) -> None:
        """samples: sequences to evaluate on, 0 for all; general: a second evaluation set.

        Raises DataError without an evaluation set.
        """
        if config.evaluate.evaldir is None:
            raise DataError("EVALDIR is not set: give the folder of the evaluation records")
        self.config, self.sets = config, {}
        for prefix, folder in (("", config.evaluate.evaldir), ("general_", general)):
            if folder is not None:
                self.sets[prefix] = dataclasses.replace(
                    config.evaluate, evaldir=folder, num_examples=samples
                )
        self.bert_config, self.world = bert_config, World(config.dist)
        self._model: BertForPreTraining | None = None
        self._evaluators: dict[str, Evaluator] = {}

    def __call__(self, path: Path) -> dict[str, Any]:
        """The figures of a weights file. Raises ConfigError or DataError."""
        source = trained.describe(path, self.bert_config)
        # Checkpoints of one run share all but the weights, which alone are read anew.
        if self._model is None or self._model.config != source.shape:
            self._model = self.config.model(source.shape, self.world)
            self._evaluators = {}
        trained.load(source, self._model)
        if not self._evaluators:
            shape = source.shape
            self._evaluators = {
                prefix: Evaluator(
                    own,
                    shape.max_position_embeddings,
                    shape.vocab_size,
                    source.vocab_md5,
                    self.world,
                )
                for prefix, own in self.sets.items()
            }
        begin = time.perf_counter()
        results = {
            prefix: evaluator(self._model).figures()
            for prefix, evaluator in self._evaluators.items()
        }
        seconds = time.perf_counter() - begin
        number = sum(evaluator.num_sequences for evaluator in self._evaluators.values())
        figures: dict[str, Any] = {
            "checkpoint": str(step_path(path)), "steps": source.steps, "trained_samples": source.samples,
            **{f"{prefix}{name}": value for prefix, found in results.items() for name, value in found.items()},
            "sequences": self._evaluators[""].num_sequences, "sequences_per_second": number / seconds,
        }  # fmt: skip
        own = self._evaluators[""]
        with suppress(ConfigError):  # no vocab.txt is found
            figures["loss_per_word"] = figures["mlm_loss"] * tokens_per_word(
                own.batches, trained.vocabulary(source)
            )
        if (
            # Only the published initial weights have a published accuracy: no steps of ours, all
            # sequences, the benchmark's vocabulary.
            source.steps is None
            and figures["sequences"] == SEQUENCES
            and own.vocab_md5 == VOCAB_MD5
        ):
            figures["initial_checkpoint"] = abs(figures["accuracy"] - INITIAL) <= TOLERANCE
        return figures


def tokens_per_word(batches: list[PretrainingBatch], vocab_file: Path) -> float:
    """Tokens per word of the text in the batches, with masked tokens restored."""
    vocabulary = WordPiece(vocab_file)
    # A piece that continues a word is no word of its own.
    continuing = [number for word, number in vocabulary.ids.items() if word.startswith("##")]
    tokens = words = 0
    for batch in batches:
        # The masked words are put back: [MASK] would count as a word each.
        ids = batch.input_ids.long().index_copy(
            0, batch.masked_positions.long(), batch.masked_labels
        )
        text = ~torch.isin(ids, torch.tensor([vocabulary.cls, vocabulary.sep], device=ids.device))
        tokens += int(text.sum())
        words += int((text & ~torch.isin(ids, torch.tensor(continuing, device=ids.device))).sum())
    return tokens / max(words, 1)
