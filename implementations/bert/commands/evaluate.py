"""``python -m bert evaluate``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert.checkpoint.save import step_path
from bert.commands import weights as trained
from bert.commands.weights import Trained
from bert.core.dist import World
from bert.core.env import ConfigError, from_env
from bert.data.records import DataError
from bert.data.shards import count_rows, list_shards
from bert.model.bert import BertForPreTraining
from bert.pretraining.closed_division import VOCAB_MD5
from bert.training import evaluate as evaluation
from bert.training.evaluate import Evaluator

# The reference's accuracy of its initial checkpoint on its 10,000 evaluation sequences, and the tolerance.
INITIAL, TOLERANCE, SEQUENCES = 0.34085, 0.0005, 10_000
POLL_SECONDS = 1.0
_COLUMNS = ("accuracy", "mlm_loss", "nsp_loss", "nsp_accuracy")


@dataclass(frozen=True, kw_only=True)
class Config(trained.Source):
    """Where and on what to evaluate."""

    evaluate: evaluation.Config = field(default_factory=evaluation.Config)


def evaluate(parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]) -> int:
    """How good are these weights? Accuracy and losses on the sequences of EVALDIR.

    Each PATH is a checkpoint, a folder of them (all are evaluated, oldest first), or the folder of a run. With --watch
    it follows a run that is still training, newest checkpoint first, until the run is over or TARGET_MLM_ACCURACY,
    where it is set, is reached. NUM_EVAL_EXAMPLES, EVAL_BATCHSIZE, PRECISION, DEVICE mean what they mean to the
    trainer; without NUM_EVAL_EXAMPLES all sequences count. Exit status: 0, or 2 for bad input.
    """
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a checkpoint, a folder of them, or a run")
    parser.add_argument("--watch", action="store_true", help="follow a run that is still training")
    parser.add_argument("--samples", type=int, help="sequences to evaluate on (default: NUM_EVAL_EXAMPLES, or all)")
    parser.add_argument("--json", action="store_true", help="a JSON object for each checkpoint")
    parser.add_argument("--bert-config", type=Path, help="the model's bert_config.json, if not found otherwise")
    options = parser.parse_args(arguments)
    config = from_env(Config, environ)
    given = environ.get("NUM_EVAL_EXAMPLES", "").strip()
    samples = options.samples or (config.evaluate.num_examples if given else None)
    if samples is not None and samples < 1:
        raise ConfigError(f"--samples {samples}: expected at least 1")
    evaluator, paths = CheckpointEvaluator(config, samples, options.bert_config), options.paths
    if options.watch:
        if len(paths) > 1:
            raise ConfigError("--watch follows one run: give one PATH")
        target = config.evaluate.target if environ.get("TARGET_MLM_ACCURACY", "").strip() else 0.0
        results = watch(paths[0], evaluator, target)
    else:
        found = (path for place in paths for path in trained.find(place) or [trained.newest(place)])
        results = (evaluator(path)[1] for path in found)
    for number, figures in enumerate(results):
        if options.json:
            print(json.dumps(figures), flush=True)
            continue
        if number == 0:
            titles = ("accuracy", "mlm loss", "nsp loss", "nsp accuracy", "sequences/s")
            print(f"{'checkpoint':<18}  {'steps':>9}  " + "  ".join(f"{title:>12}" for title in titles))
        path, steps = Path(figures["checkpoint"]), figures["steps"]
        cells = "  ".join(f"{figures[column]:>12.5f}" for column in _COLUMNS)
        print(
            f"{path.name if len(paths) == 1 else path!s:<18}  {'-' if steps is None else f'{steps:,}':>9}  {cells}  "
            f"{figures['sequences_per_second']:>12.1f}",
            flush=True,
        )
        if "initial_checkpoint" in figures:
            verdict = "met" if figures["initial_checkpoint"] else "not met: these are not the benchmark's weights"
            print(f"{INITIAL} +- {TOLERANCE} is expected of the benchmark's initial checkpoint: {verdict}", flush=True)
    return 0


class CheckpointEvaluator:
    """Evaluates one file of weights after another; model and evaluation set are made for the first."""

    def __init__(self, config: Config, samples: int | None, bert_config: Path | None) -> None:
        """samples: sequences to evaluate on, None for all. Raises DataError where there is no evaluation set."""
        if config.evaluate.evaldir is None:
            raise DataError("EVALDIR is not set: give the folder of the evaluation records")
        if samples is None:
            samples = sum(count_rows(path) for path in list_shards(config.evaluate.evaldir, "EVALDIR"))
        self.config = dataclasses.replace(
            config, evaluate=dataclasses.replace(config.evaluate, num_examples=max(1, samples))
        )
        self.bert_config, self.world = bert_config, World(config.dist)
        self._model: BertForPreTraining | None = None
        self._evaluator: Evaluator | None = None

    def __call__(self, path: Path) -> tuple[Trained, dict[str, Any]]:
        """The description of the weights, and their figures. Raises ConfigError or DataError."""
        source = trained.describe(path, self.bert_config)
        if self._model is None or self._model.config != source.shape:
            self._model = self.config.model(source.shape, self.world)
            self._evaluator = None
        trained.load(source, self._model)
        if self._evaluator is None:
            shape = source.shape
            self._evaluator = Evaluator(
                self.config.evaluate, shape.max_position_embeddings, shape.vocab_size, source.vocab_md5, self.world
            )
        begin = time.perf_counter()
        result = self._evaluator(self._model)
        seconds, number = time.perf_counter() - begin, self.config.evaluate.num_examples
        figures: dict[str, Any] = {
            "checkpoint": str(step_path(path)), "steps": source.steps, "trained_samples": source.samples,
            **dataclasses.asdict(result),
            "sequences": number, "sequences_per_second": number / seconds,
        }  # fmt: skip
        if source.steps is None and number == SEQUENCES and self._evaluator.vocab_md5 == VOCAB_MD5:
            figures["initial_checkpoint"] = abs(result.accuracy - INITIAL) <= TOLERANCE
        return source, figures


def watch(path: Path, evaluator: CheckpointEvaluator, target: float) -> Iterator[dict[str, Any]]:
    """Figures of checkpoints as they appear, newest first, until one is the last of its run or reaches the target.

    A checkpoint that its run removes before its turn is skipped.
    """
    seen: set[Path] = set()
    while True:
        waiting = [found for found in trained.find(path) if found not in seen]
        if not waiting:
            time.sleep(POLL_SECONDS)
            continue
        seen.add(waiting[-1])
        try:
            source, figures = evaluator(waiting[-1])
        except ConfigError:
            if waiting[-1].exists():
                raise
            continue
        yield figures
        if source.ended or 0 < target <= figures["accuracy"]:
            word = "the run is over" if source.ended else f"the target {target} is reached"
            print(f"{word}: {source.path}", file=sys.stderr)
            return
