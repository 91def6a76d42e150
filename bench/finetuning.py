"""Fine-tuning on real weights and sentences: speed of ours against Hugging Face's.

Both start from the same weights and take the same batches of 32 of the demo's film reviews in the
same order, with AdamW, the same rates and dropout. Hugging Face's loop is a plain one: transformers
with its default attention, padded to the longest sequence of the batch. It predicts once in the
given order, and once sorted by length as ours always does. Speed is sequences per CPU second, in
turns in one process with one thread, so that it holds on a busy machine.

usage: python bench/finetuning.py FOLDER [--repeats 5]
       FOLDER is the one that `make finetune-demo` creates
"""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib import Parser, emit, folder_with, in_turns, integer, medians, ratios
from torch import Tensor

from bert.core.dist import World
from bert.data.tokens import WordPiece
from finetune import config, tasks, train
from finetune.batches import Order
from finetune.saved import predict

NAMES = ("ours", "hugging_face")
LR, BATCH_SIZE = 5e-5, 32
STEPS = 3  # of a turn


class Ours:
    """The package's own step."""

    def __init__(self, run: train.Run) -> None:
        self.run, self.task = run, run.task

    def step(self, chosen: list[int]) -> None:
        self.run.step([self.run.task.train.batch(chosen)], LR)

    def predict(self, samples: tasks.Samples) -> np.ndarray:
        """Predicted labels; batches sorted by length."""
        scores = predict(self.run.model, samples, self.run.world, BATCH_SIZE)
        self.run.model.train()
        return np.array([row.argmax() for row in scores])


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
        self.optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-8)

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

    def step(self, chosen: list[int]) -> None:
        labels = torch.from_numpy(self.task.train.labels["labels"][chosen])
        self.model(
            **self.padded(self.task.train, chosen), labels=labels
        ).loss.backward()
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
        order = (
            np.argsort(-samples.lengths, kind="stable")
            if by_length
            else np.arange(count)
        )
        classes = np.empty(count, dtype=np.int64)
        for begin in range(0, count, BATCH_SIZE):
            chosen = order[begin : begin + BATCH_SIZE]
            scored = self.model(**self.padded(samples, chosen.tolist()))
            classes[chosen] = scored.logits.argmax(dim=1).numpy()
        self.model.train()
        return classes


def some_of(samples: tasks.Samples, count: int) -> tasks.Samples:
    """``count`` samples, evenly spaced, as the table is sorted by label."""
    total = len(samples.sequences)
    chosen = np.linspace(0, total - 1, min(count, total)).astype(int)
    labels = {"labels": samples.labels["labels"][chosen]}
    return tasks.Samples([samples.sequences[i] for i in chosen], labels)


def build(folder: Path) -> tuple[Ours, HuggingFace]:
    """Both trainers with the same initial weights."""
    environment = {
        "TASK": "table",
        "DATA": str(folder / "data"),
        "INIT_CHECKPOINT": str(folder / "weights" / "model.safetensors"),
        "BATCHSIZE": str(BATCH_SIZE),
        "LR": str(LR),
        "SEED": "1",
        "DEVICE": "cpu",
        "RUN_DIR": str(folder),
    }
    settings = config.read(environment)
    task = tasks.build(settings, WordPiece(settings.vocabulary))
    torch.manual_seed(1)
    run = train.build(settings, environment, World(settings.dist), task)
    run.model.train()
    # Hugging Face draws its new head from the global generator.
    torch.manual_seed(1)
    return Ours(run), HuggingFace(folder / "weights", task)


def speeds(pair: tuple[Ours, HuggingFace], repeats: int) -> dict[str, Any]:
    """Sequences per CPU second of training, and of prediction with untrained heads.

    Medians, and the median ratio of ours to each of the others.
    """
    ours, hugging_face = pair
    order = Order(len(ours.task.train.lengths), BATCH_SIZE, 1, 1)
    # As many as a turn of training takes.
    samples = some_of(ours.task.test, STEPS * BATCH_SIZE)

    def take_steps(loop: Ours | HuggingFace, numbers: Iterator[int]) -> None:
        # Goes on where the last turn stopped: no batch is seen twice in a row.
        for number in itertools.islice(numbers, STEPS):
            loop.step(order.step(number)[0])

    predictions = {
        "ours": partial(ours.predict, samples),
        "hugging_face": partial(hugging_face.predict, samples),
        "hugging_face_by_length": partial(
            hugging_face.predict, samples, by_length=True
        ),
    }
    trainings = {
        name: partial(take_steps, loop, itertools.count(1))
        for name, loop in zip(NAMES, pair, strict=True)
    }
    figures: dict[str, Any] = {}
    for prefix, functions in (("inference_", predictions), ("", trainings)):
        in_turns(functions, 1)  # warms up
        times = in_turns(functions, repeats)
        figures[f"{prefix}sequences_per_cpu_second"] = {
            name: round(STEPS * BATCH_SIZE / span, 2)
            for name, span in medians(times).items()
        }
        for name in list(functions)[1:]:
            ratio = ratios(times[name], times["ours"])
            figures[f"{prefix}ratio{name.removeprefix('hugging_face')}"] = ratio
    return figures


def main() -> None:
    parser = Parser(__doc__)
    folder = folder_with("weights", "data", advice=": make finetune-demo makes one")
    parser.add_argument("folder", type=folder, help="created by make finetune-demo")
    parser.add_argument(
        "--repeats", type=integer, default=5, help="turns (default %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = speeds(build(options.folder), options.repeats)
    emit("finetuning", figures, data="film reviews, batches of 32")


if __name__ == "__main__":
    main()
