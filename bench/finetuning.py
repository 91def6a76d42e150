"""Fine-tuning on real weights and sentences: sequences per second and accuracy, ours against Hugging Face's.

Both start from the same weights and take the same batches of the demo's film reviews in the same order, with AdamW, the
same rates and dropout. Hugging Face's loop is a plain one: transformers with its default attention, padded to the
longest sequence of the batch. It predicts once in the given order, and once sorted by length as ours always does. Speed
is per CPU second, in turns in one process, so that it holds on a busy machine.

usage: python bench/finetuning.py FOLDER [--batch-size 32] [--steps 8] [--repeats 5] [--seeds 0] [--sentences 0]
       FOLDER is the one that `make finetune-demo` creates; --seeds 3 trains each three times
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib import Parser, emit, folder_with, in_turns, integer, natural, ratios
from torch import Tensor

from bert.core.dist import World
from bert.data.tokens import WordPiece
from bert.training.schedule import learning_rate
from finetune import config, tasks, train
from finetune.batches import Order
from finetune.glue import accuracy
from finetune.saved import predict

NAMES = ("ours", "hugging_face")
_LR, _EPOCHS = 5e-5, 2


class Ours:
    """The package's own step."""

    def __init__(self, run: train.Run) -> None:
        self.run, self.task = run, run.task

    def step(self, chosen: list[int], lr: float) -> None:
        self.run.step([self.run.task.train.batch(chosen)], lr)

    def predict(self, samples: tasks.Samples) -> np.ndarray:
        """Predicted labels; batches sorted by length."""
        found = predict(self.run.model, samples, self.run.world, 32)
        self.run.model.train()
        return np.array([row.argmax() for row in found])


class HuggingFace:
    """A plain loop around AutoModelForSequenceClassification."""

    def __init__(self, folder: Path, task: tasks.Glue) -> None:
        from transformers import AutoModelForSequenceClassification

        self.model = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=len(task.layout.labels)
        ).train()
        self.task = task
        # Biases and LayerNorms are vectors.
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": 0.01},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=_LR, eps=1e-8)

    @staticmethod
    def padded(samples: tasks.Samples, chosen: list[int]) -> dict[str, Tensor]:
        """Token ids and mask of a batch, padded to its longest sequence."""
        rows = [torch.from_numpy(samples.sequences[i][0]).long() for i in chosen]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        }

    def step(self, chosen: list[int], lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        labels = torch.from_numpy(self.task.train.labels["labels"][chosen])
        self.model(**self.padded(self.task.train, chosen), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        # After the step, as in the loops of its documentation.
        self.optimizer.zero_grad()

    @torch.no_grad()
    def predict(self, samples: tasks.Samples, by_length: bool = False) -> np.ndarray:
        """Predicted labels; batches in the order of the samples, or sorted by length."""
        self.model.eval()
        count = len(samples.sequences)
        # Equal lengths together have little padding; it is the fairer opponent.
        order = np.argsort(-samples.lengths, kind="stable") if by_length else np.arange(count)
        found = np.empty(count, dtype=np.int64)
        for begin in range(0, count, 32):
            chosen = order[begin : begin + 32]
            found[chosen] = (
                self.model(**self.padded(samples, chosen.tolist())).logits.argmax(dim=1).numpy()
            )
        self.model.train()
        return found


def some_of(samples: tasks.Samples, count: int) -> tasks.Samples:
    """``count`` samples, evenly spaced."""
    chosen = np.linspace(0, len(samples.sequences) - 1, min(count, len(samples.sequences))).astype(
        int
    )
    return tasks.Samples(
        [samples.sequences[i] for i in chosen], {"labels": samples.labels["labels"][chosen]}
    )


def build(folder: Path, batch_size: int, seed: int, sentences: int) -> tuple[Ours, HuggingFace]:
    """Both trainers with the same initial weights."""
    environment = {
        "TASK": "TSV", "DATA": str(folder / "data"), "INIT_CHECKPOINT": str(folder / "weights" / "model.safetensors"),
        "BATCHSIZE": str(batch_size), "LR": str(_LR), "SEED": str(seed), "DEVICE": "cpu", "RUN_DIR": str(folder),
    }  # fmt: skip
    settings = config.read(environment)
    task = tasks.build(settings, WordPiece(settings.vocabulary))
    if sentences:
        for name in ("train", "test"):
            setattr(
                task, name, some_of(getattr(task, name), sentences)
            )  # the table is sorted by label
    torch.manual_seed(seed)
    run = train.build(settings, environment, World(settings.dist), task)
    run.model.train()
    # Hugging Face draws its new head from the global generator.
    torch.manual_seed(seed)
    return Ours(run), HuggingFace(folder / "weights", task)


def speeds(pair: tuple[Ours, HuggingFace], options: argparse.Namespace) -> dict[str, Any]:
    """Sequences per CPU second of training, and of prediction with untrained heads: medians, all rounds, and the median
    ratio of ours to each of the others.
    """
    ours, hugging_face = pair
    order, sequences = (
        Order(len(ours.task.train.lengths), options.batch_size, 1, 1),
        options.steps * options.batch_size,
    )
    # As many as a round of training takes.
    samples = some_of(ours.task.test, sequences)

    def take_steps(loop: Ours | HuggingFace, numbers: Iterator[int]) -> None:
        # Goes on where the last round stopped: no batch is seen twice in a row.
        for number in itertools.islice(numbers, options.steps):
            loop.step(order.step(number)[0], _LR)

    predictions = {
        "ours": partial(ours.predict, samples), "hugging_face": partial(hugging_face.predict, samples),
        "hugging_face_by_length": partial(hugging_face.predict, samples, by_length=True),
    }  # fmt: skip
    trainings = {
        name: partial(take_steps, loop, itertools.count(1))
        for name, loop in zip(NAMES, pair, strict=True)
    }
    figures: dict[str, Any] = {}
    for prefix, functions, count in (
        ("inference_", predictions, len(samples.sequences)),
        ("", trainings, sequences),
    ):
        times = in_turns(functions, options.repeats + 1)  # the first turn warms up
        found = {name: [count / seconds for seconds in spans[1:]] for name, spans in times.items()}
        middle = {name: round(statistics.median(rates), 2) for name, rates in found.items()}
        figures[f"{prefix}sequences_per_cpu_second"] = middle
        figures[f"{prefix}rounds"] = {
            name: [round(rate, 2) for rate in rates] for name, rates in found.items()
        }
        for name in list(found)[1:]:
            figures[f"{prefix}ratio{name.removeprefix('hugging_face')}"] = ratios(
                found["ours"], found[name]
            )[0]
    return figures


def accuracies(options: argparse.Namespace) -> dict[str, list[float]]:
    """Test accuracy after full training, by seed."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for seed, number in itertools.product(range(1, options.seeds + 1), range(len(NAMES))):
        loop = build(options.folder, options.batch_size, seed, options.sentences)[number]
        count = len(loop.task.train.lengths)
        # Rounded up: the last step may go beyond the epoch.
        last = -(-count * _EPOCHS // options.batch_size)
        rates, order = (
            config.learning_rates({"LR": str(_LR)}, last),
            Order(count, options.batch_size, 1, seed),
        )
        torch.manual_seed(seed)
        for step in range(1, last + 1):
            loop.step(order.step(step)[0], learning_rate(step, rates))
        right = accuracy(loop.predict(loop.task.test), loop.task.test.labels["labels"])
        found[NAMES[number]].append(round(right, 4))
        print(f"seed {seed}: {NAMES[number]} {right:.4f}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = Parser(__doc__)
    folder = folder_with("weights", "data", advice="make finetune-demo makes one")
    parser.add_argument("folder", type=folder, help="created by make finetune-demo")
    parser.add_argument("--batch-size", type=integer, default=32, help="(default %(default)s)")
    parser.add_argument("--steps", type=integer, default=8, help="per round (default %(default)s)")
    parser.add_argument(
        "--repeats", type=natural, default=5, help="rounds; 0: only accuracy (default %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=natural, default=0, help="full trainings of each (default %(default)s)"
    )
    parser.add_argument(
        "--sentences", type=natural, default=0, help="for training and for test; 0: all"
    )
    parser.add_argument(
        "--threads", type=integer, default=1, help="of PyTorch (default %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {}
    if options.repeats:
        figures = speeds(build(options.folder, options.batch_size, 1, 0), options)
    if options.seeds:
        labels = build(options.folder, options.batch_size, 1, options.sentences)[
            0
        ].task.test.labels["labels"]
        # What a model scores that always gives the most frequent label.
        most = float(np.bincount(labels).max() / len(labels))
        figures |= {"accuracy": accuracies(options), "accuracy_of_the_majority": round(most, 4)}
    emit(
        "finetuning",
        figures,
        data=f"film reviews, batches of {options.batch_size}, {options.threads} threads",
    )


if __name__ == "__main__":
    main()
