"""Accuracy of one epoch here and in transformers' Trainer, seed by seed; needs accelerate.

usage: python tests/finetune/against_trainer.py DATA WEIGHTS SEEDS [--exact]
       DATA has train and dev as for TASK=table, WEIGHTS is a folder of Hugging Face's; --exact: the same head, order,
       schedule, decay and epsilon, without dropout: prints the largest difference of a probability, too
"""

import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from scipy.special import softmax
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from bert.data.tokens import WordPiece
from bert.kernels import KernelsConfig, bind_kernels
from bert.training.schedule import learning_rate
from finetune import config as settings
from finetune import models, tasks
from finetune.batches import Order
from finetune.train import run

BATCH, RATE = 16, 1e-4
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def rows_of(samples):
    pairs = zip(samples.sequences, samples.labels["labels"].tolist(), strict=True)
    return [
        {"input_ids": torch.tensor(ids).long(), "labels": n} for (ids, _), n in pairs
    ]


def collated(rows):
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def theirs(environment, seed, exact):
    config = settings.read(environment)
    task = tasks.build(config, WordPiece(config.vocabulary, config.lower_case))
    transformers.set_seed(seed)
    other = AutoModelForSequenceClassification.from_pretrained(
        config.weights_folder, num_labels=len(task.layout.labels), **(NO_DROPOUT if exact else {})
    )  # fmt: skip
    training, test = map(rows_of, (task.train, task.test))
    steps = -(-len(training) // BATCH)
    own = {"weight_decay": 0.01, "adam_epsilon": 1e-6} if exact else {}
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=RATE,
        seed=seed, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, **own,
    )  # fmt: skip
    trainer = Trainer(other, arguments, collated, train_dataset=training)
    if exact:
        kernels = bind_kernels(KernelsConfig(fused="none"), torch.device("cpu"))
        mine = task.model(config.model, kernels)
        models.initialize(mine, seed)
        other.classifier.load_state_dict(mine.classifier.state_dict())
        order = Order(len(training), BATCH, 1, seed)
        chosen = np.concatenate([order.step(n + 1)[0] for n in range(steps)])
        trainer._get_train_sampler = lambda *_: chosen.tolist()
        rates = settings.learning_rates(environment, steps)
        rate = partial(learning_rate, config=rates)
        trainer.create_optimizer()
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            trainer.optimizer, lambda n: rate(n + 1) / RATE
        )
    trainer.train()
    found = softmax(trainer.predict(test).predictions, axis=1)
    return found, task.test.labels["labels"]


def ours(environment, folder):
    assert run(environment | {"RUN_DIR": folder}) == 0
    lines = Path(folder, "model_0", "predictions.tsv").read_text().splitlines()
    return np.array([line.split("\t")[2:] for line in lines[1:]], dtype=float)


def main(data, weights, seeds, exact=""):
    folder = Path(shutil.copytree(weights, Path(tempfile.mkdtemp(), "weights")))
    if exact:
        shape = json.loads((folder / "config.json").read_text()) | NO_DROPOUT
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
