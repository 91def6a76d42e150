"""Accuracy of one epoch here and in transformers' Trainer, seed by seed; needs accelerate.

usage: python tests/finetune/against_trainer.py DATA WEIGHTS SEEDS [--exact]
       DATA has train and dev as for TASK=table, WEIGHTS is a folder of Hugging Face's; --exact: the same head, order,
       schedule, decay and epsilon, without dropout: prints the largest difference of a probability, too
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from scipy.special import softmax
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from bert.data.tokens import WordPiece
from bert.kernels import KernelsConfig, bind_kernels
from bert.training.schedule import learning_rate
from finetune import config as settings
from finetune import models, tasks
from finetune.batches import Order
from finetune.train import run

BATCH, RATE = 16, 1e-4


def collated(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [
        row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows
    ]
    ids = torch.tensor(padded)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def theirs(environment, seed, exact):
    config = settings.read(environment)
    task = tasks.build(config, WordPiece(config.vocabulary, config.lower_case))
    transformers.set_seed(seed)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    other = AutoModelForSequenceClassification.from_pretrained(
        config.weights_folder, num_labels=len(task.layout.labels), **(none if exact else {})
    )  # fmt: skip
    parts = []
    for samples in (task.train, task.test):
        pairs = zip(samples.sequences, samples.labels["labels"].tolist(), strict=True)
        parts.append(
            [{"input_ids": ids.tolist(), "labels": n} for (ids, _), n in pairs]
        )
    steps = -(-len(parts[0]) // BATCH)
    own = {"weight_decay": 0.01, "adam_epsilon": 1e-6} if exact else {}
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=RATE,
        seed=seed, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, **own,
    )  # fmt: skip
    trainer = Trainer(other, arguments, collated, train_dataset=parts[0])
    if exact:
        kernels = bind_kernels(KernelsConfig(fused="none"), torch.device("cpu"))
        mine = task.model(config.model, kernels)
        models.initialize(mine, seed)
        other.classifier.load_state_dict(mine.classifier.state_dict())
        order = Order(len(parts[0]), BATCH, 1, seed)
        chosen = np.concatenate([order.step(n + 1)[0] for n in range(steps)])
        trainer._get_train_sampler = lambda *_: chosen.tolist()
        rate = partial(
            learning_rate, config=settings.learning_rates(environment, steps)
        )
        trainer.create_optimizer()
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            trainer.optimizer, lambda n: rate(n + 1) / RATE
        )
    trainer.train()
    return softmax(trainer.predict(parts[1]).predictions, axis=1), task.test.labels[
        "labels"
    ]


def ours(environment, folder):
    assert run(environment | {"RUN_DIR": folder}) == 0
    lines = Path(folder, "model_0", "predictions.tsv").read_text().splitlines()
    return np.array([line.split("\t")[2:] for line in lines[1:]], dtype=float)


def main(data, weights, seeds, exact=""):
    folder = Path(tempfile.mkdtemp())
    for path in Path(weights).iterdir():
        os.symlink(path.resolve(), folder / path.name)
    if exact:
        shape = json.loads((folder / "config.json").read_text())
        shape |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(shape))
    found = []
    for seed in range(1, int(seeds) + 1):
        environment = {
            "TASK": "table", "DATA": data, "INIT_CHECKPOINT": str(folder), "DEVICE": "cpu", "BATCHSIZE": str(BATCH),
            "LR": str(RATE), "EPOCHS": "1", "SEED": str(seed), "MAX_SEQ_LENGTH": "64",
        }  # fmt: skip
        mine = ours(environment, tempfile.mkdtemp())
        other, labels = theirs(environment, seed, exact)
        found.append([(each.argmax(axis=1) == labels).mean() for each in (mine, other)])
        print(f"seed {seed}: here {found[-1][0]:.4f}, Trainer {found[-1][1]:.4f}")
        if exact:
            print(f"largest difference of a probability {abs(mine - other).max():.4f}")
    spread = np.std(found, axis=0, ddof=1) if len(found) > 1 else 0.0
    print(f"mean {np.mean(found, axis=0)}, deviation {spread}")


if __name__ == "__main__":
    main(*sys.argv[1:])
