"""Fine-tuning on real weights and real sentences: sequences a second and accuracy, ours beside Hugging Face's.

Both start from the same weights and take the same batches of the demo's film reviews in the same order, with AdamW, the
same rates and dropout. Hugging Face's loop is plain: transformers, padded to the longest of the batch, on the
attention it chooses itself. Speed is of CPU seconds, in turns in one process, so that it holds on a busy machine.

usage: python bench/finetuning.py FOLDER [--batch-size 32] [--steps 8] [--repeats 5] [--seeds 0] [--sentences 0]
       FOLDER is that of `make finetune-demo`, made where it is missing; --seeds 3 trains three times with each
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
import result
import torch
from torch import Tensor

from bert.dist import World
from bert.schedule import learning_rate
from bert.tokens import WordPiece
from finetune import config, demo, tasks, train
from finetune.batches import Order
from finetune.glue.metrics import accuracy
from finetune.inference import predict

_LR, _EPOCHS = 5e-5, 2


class Ours:
    """The package's own step."""

    def __init__(self, run: train.Run) -> None:
        self.run = run

    def step(self, chosen: list[int], lr: float) -> None:
        """Trains on one batch."""
        self.run.step([self.run.task.train.batch(chosen)], lr)

    def accuracy(self) -> float:
        """Of the test."""
        scores = predict(self.run.model, self.run.task.test, self.run.world, 32)
        predicted = np.array([row.argmax() for row in scores])
        return accuracy(predicted, self.run.task.test.labels)


class HuggingFace:
    """A plain loop around AutoModelForSequenceClassification."""

    def __init__(self, folder: Path, task: tasks.Task) -> None:
        from transformers import AutoModelForSequenceClassification

        self.model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(task.labels)).train()
        self.task = task
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=_LR, eps=1e-8)

    @staticmethod
    def padded(samples: tasks.Labelled, chosen: list[int]) -> dict[str, Tensor]:
        """Token ids and mask of a batch, padded to its longest."""
        rows = [torch.from_numpy(samples.sequences[i][0]).long() for i in chosen]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}

    def step(self, chosen: list[int], lr: float) -> None:
        """Trains on one batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        labels = torch.from_numpy(self.task.train.labels[chosen])
        self.model(**self.padded(self.task.train, chosen), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Of the test."""
        self.model.eval()
        found = []
        for begin in range(0, len(self.task.test.labels), 32):
            chosen = list(range(begin, min(begin + 32, len(self.task.test.labels))))
            found += self.model(**self.padded(self.task.test, chosen)).logits.argmax(dim=1).tolist()
        return accuracy(np.array(found), self.task.test.labels)


def build(folder: Path, batch_size: int, seed: int, sentences: int) -> tuple[Ours, HuggingFace]:
    """Both, from the same weights."""
    environment = {
        "TASK": "TSV", "DATA": str(folder / "data"), "INIT_CHECKPOINT": str(folder / "weights" / "model.safetensors"),
        "BATCHSIZE": str(batch_size), "LR": str(_LR), "SEED": str(seed), "DEVICE": "cpu", "RUN_DIR": str(folder),
    }  # fmt: skip
    settings = config.read(environment)
    task = tasks.build(settings, WordPiece(settings.vocabulary))
    if sentences:
        for name in ("train", "test"):
            whole = getattr(task, name)
            # Spread over the table, in which one label comes first.
            chosen = np.linspace(0, len(whole.labels) - 1, min(sentences, len(whole.labels))).astype(int)
            sequences = [whole.sequences[i] for i in chosen]
            setattr(task, name, tasks.Labelled(sequences, whole.labels[chosen], whole.lengths[chosen]))
    torch.manual_seed(seed)
    run = train.build(settings, environment, World(settings.dist), task)
    run.model.train()
    torch.manual_seed(seed)
    return Ours(run), HuggingFace(folder / "weights", task)


def speeds(pair: tuple[Ours, HuggingFace], options: argparse.Namespace) -> dict[str, list[float]]:
    """Sequences per CPU second of each, a figure a round, in turns; the first round warms up."""
    samples = pair[0].run.task.train
    order = Order(len(samples.lengths), options.batch_size, 1, 1)
    found: dict[str, list[float]] = {"ours": [], "hugging_face": []}
    for turn in range(options.repeats + 1):
        steps = [order.step(1 + turn * options.steps + i)[0] for i in range(options.steps)]
        for name, loop in zip(found, pair, strict=True):
            seconds = result.cpu_seconds(lambda loop=loop, steps=steps: [loop.step(chosen, _LR) for chosen in steps])
            if turn:
                found[name].append(options.steps * options.batch_size / seconds)
    return found


def accuracies(options: argparse.Namespace) -> dict[str, list[float]]:
    """Accuracy of each after a whole training, a figure a seed."""
    found: dict[str, list[float]] = {"ours": [], "hugging_face": []}
    for seed in range(1, options.seeds + 1):
        pair = build(options.folder, options.batch_size, seed, options.sentences)
        samples = pair[0].run.task.train
        last = -(-len(samples.lengths) * _EPOCHS // options.batch_size)
        rates = config.learning_rates({"LR": str(_LR)}, last)
        order = Order(len(samples.lengths), options.batch_size, 1, seed)
        for name, loop in zip(found, pair, strict=True):
            for step in range(1, last + 1):
                loop.step(order.step(step)[0], learning_rate(step, rates))
            found[name].append(round(loop.accuracy(), 4))
            print(f"seed {seed}: {name} {found[name][-1]:.4f}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of make finetune-demo")
    parser.add_argument("--batch-size", type=int, default=32, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of a round (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=0, help="whole trainings of each (default %(default)s)")
    parser.add_argument("--sentences", type=int, default=0, help="to train and to test on; 0: all")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    demo.prepare(options.folder)
    found = speeds(build(options.folder, options.batch_size, 1, 0), options)
    middle = {name: statistics.median(values) for name, values in found.items()}
    ratios = [mine / theirs for mine, theirs in zip(*found.values(), strict=True)]
    figures = {
        "sequences_per_cpu_second": {name: round(value, 2) for name, value in middle.items()},
        "rounds": {name: [round(value, 2) for value in values] for name, values in found.items()},
        "ratio": round(statistics.median(ratios), 3),
        "accuracy": accuracies(options) if options.seeds else None,
    }
    data = f"film reviews, batches of {options.batch_size}, {options.threads} threads"
    result.emit("finetuning", figures, data=data, targets={"ratio": (2.0, True)})


if __name__ == "__main__":
    main()
