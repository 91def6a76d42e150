"""``python -m bert evaluate``."""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.checkpoint.save import step_path
from bert.checkpoint.weights import load_weights
from bert.commands import weights as trained
from bert.core.dist import World
from bert.data.prepared import VOCAB_MD5
from bert.model.bert import BertForPreTraining
from bert.training import evaluate as evaluation
from bert.training.evaluate import Evaluator
from common.env import ConfigError, from_env

# The reference's accuracy of its initial checkpoint on its 10,000 evaluation sequences, and the
# tolerance.
INITIAL, TOLERANCE, SEQUENCES = 0.34085, 0.0005, 10_000
_COLUMNS = "accuracy", "mlm_loss", "nsp_loss", "nsp_accuracy"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(trained.Source):
    evaluate: evaluation.EvaluationConfig = evaluation.EvaluationConfig()


def evaluate(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> int:
    """Accuracy and losses of trained weights on the sequences of EVALDIR.

    Each PATH is a checkpoint, a folder of them (all are evaluated, oldest first), or a run's
    folder, even while it is training. mlm_loss is the mean over masked tokens; the speed is that of
    inference, kernels being compiled. NUM_EVAL_EXAMPLES,
    EVAL_BATCHSIZE, PRECISION and DEVICE are the trainer's; without NUM_EVAL_EXAMPLES all sequences
    count. Exit status: 0, or 2 for bad input.
    """
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a checkpoint, a folder of them, or a run",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object per checkpoint"
    )
    parser.add_argument(
        "--bert-config",
        type=Path,
        help="the model's bert_config.json, if not found otherwise",
    )
    options = parser.parse_args(arguments)
    config = from_env(EvaluateConfig, environ)
    is_given = environ.get("NUM_EVAL_EXAMPLES", "").strip()
    samples = config.evaluate.num_examples if is_given else 0
    evaluator = CheckpointEvaluator(config, samples, options.bert_config)
    checkpoints = [path for given in options.paths for path in trained.find(given)]
    for number, path in enumerate(checkpoints):
        figures = evaluator(path)
        if options.json:
            print(json.dumps(figures), flush=True)
        else:
            _print_row(
                figures, with_titles=number == 0, whole_path=len(options.paths) > 1
            )
    return 0


def _print_row(figures: Mapping[str, Any], with_titles: bool, whole_path: bool) -> None:
    if with_titles:
        titles = "  ".join(f"{column.replace('_', ' '):>12}" for column in _COLUMNS)
        print(f"{'checkpoint':<18}  {'steps':>9}  {titles}  {'sequences/s':>12}")
    path, steps = figures["checkpoint"], figures["steps"]
    name = path if whole_path else Path(path).name
    trained_for = "-" if steps is None else f"{steps:,}"
    values = (
        f"{figures[column]:.5f}" if column in figures else "-" for column in _COLUMNS
    )
    cells = "  ".join(f"{value:>12}" for value in values)
    rate = figures["sequences_per_second"]
    print(f"{name:<18}  {trained_for:>9}  {cells}  {rate:>12.1f}", flush=True)
    if "initial_checkpoint" in figures:
        verdict = "met"
        if not figures["initial_checkpoint"]:
            verdict = "not met: these are not the benchmark's weights"
        print(
            f"{INITIAL} +- {TOLERANCE} is expected of the benchmark's initial checkpoint: {verdict}",
            flush=True,
        )


class CheckpointEvaluator:
    """Evaluates one weights file after another; model and evaluation set are reused."""

    def __init__(
        self, config: EvaluateConfig, samples: int, bert_config: Path | None
    ) -> None:
        """samples: sequences to evaluate on, 0 for all."""
        self.config, self.bert_config = config, bert_config
        self.settings = dataclasses.replace(config.evaluate, num_examples=samples)
        self.world = World(config.dist)
        self._model: BertForPreTraining | None = None
        self._evaluator: Evaluator | None = None

    def __call__(self, path: Path) -> dict[str, Any]:
        """The figures of a weights file. Raises ConfigError or DataError."""
        source = trained.describe(path, self.bert_config)
        shape = source.shape
        # Checkpoints of one run share all but the weights, which alone are read anew.
        if self._model is None or self._model.config != shape:
            self._model = self.config.model(shape, self.world)
            self._evaluator = None
        loaded = load_weights(self._model, source.path, new_heads=True)
        if loaded.new:
            raise ConfigError(
                f"{path} lacks {', '.join(loaded.new)}, which evaluation is about: "
                "train it first, or give a pretrained BERT"
            )
        if self._evaluator is None:
            sizes = shape.max_position_embeddings, shape.vocab_size
            self._evaluator = Evaluator(
                self.settings, *sizes, source.vocab_md5, self.world
            )
            self._evaluator.warm_up(self._model)
        begin = time.perf_counter()
        result = self._evaluator(self._model)
        seconds, number = time.perf_counter() - begin, self._evaluator.num_sequences
        figures: dict[str, Any] = {
            "checkpoint": str(step_path(path)),
            "steps": source.steps,
            "trained_samples": source.samples,
            **result.figures(),
            "sequences": number,
            "sequences_per_second": number / seconds,
        }
        # Only the published initial weights have a published accuracy: no steps of ours, all
        # sequences, the benchmark's vocabulary.
        is_benchmarks = number == SEQUENCES and self._evaluator.vocab_md5 == VOCAB_MD5
        if source.steps is None and is_benchmarks:
            figures["initial_checkpoint"] = abs(result.accuracy - INITIAL) <= TOLERANCE
        return figures
