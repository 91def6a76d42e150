"""Evaluation: masked-LM accuracy over the whole evaluation set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bert.data.batch import Batch, make_batch
from bert.data.format import DataError, concatenate
from bert.data.shards import Shards, list_shards
from bert.dist import World
from bert.env import env
from bert.kernels.cross_entropy import IGNORE
from bert.model.bert import BertForPreTraining


@dataclass(frozen=True, kw_only=True)
class Config:
    """When and on what to evaluate. The samples are training samples (sequences)."""

    evaldir: Path | None = env("EVALDIR", None, doc="folder (or file) of evaluation records")
    num_examples: int = env("NUM_EVAL_EXAMPLES", 10000, at_least=1, doc="sequences of the evaluation set")
    batch_size: int = env("EVAL_BATCHSIZE", 16, at_least=1, doc="sequences of a GPU in one evaluation batch")
    start_samples: int = env("EVAL_ITER_START_SAMPLES", at_least=1, doc="training samples before the first evaluation")
    every_samples: int = env("EVAL_ITER_SAMPLES", at_least=1, doc="training samples between evaluations")
    target: float = env("TARGET_MLM_ACCURACY", 0.720, above=0, at_most=1, doc="masked-LM accuracy that ends the run")
    initial: bool = env("EVAL_INITIAL", False, doc="1 evaluates once before the first step as well")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one evaluation found."""

    accuracy: float
    mlm_loss: float
    num_masked: int


def evaluation_steps(config: Config, global_batch_size: int, max_samples: int) -> set[int]:
    """Steps after which to evaluate: the first with at least start, start + every, ... nominal samples trained."""
    points = range(config.start_samples, max_samples + 1, config.every_samples)
    return {-(-samples // global_batch_size) for samples in points}


class Evaluator:
    """Holds this rank's part of the evaluation set and measures a model on it."""

    def __init__(self, config: Config, max_seq_length: int, vocab_size: int, vocab_md5: str, world: World) -> None:
        """Raises DataError where the set is absent, too small, or of another vocabulary than ``vocab_md5``."""
        if config.evaldir is None:
            raise DataError("EVALDIR is not set: give the folder of the evaluation records")
        self.world = world
        shards = Shards(list_shards(config.evaldir, "EVALDIR"), max_seq_length)
        shards.vocab_md5 = vocab_md5
        records = concatenate([shards[number] for number in range(len(shards))])
        if records.num_sequences < config.num_examples:
            raise DataError(
                f"EVALDIR={config.evaldir}: {records.num_sequences} sequences, and NUM_EVAL_EXAMPLES is "
                f"{config.num_examples}: prepare the evaluation set anew, or lower NUM_EVAL_EXAMPLES"
            )
        if records.input_ids.max() >= vocab_size or records.masked_lm_ids.max() >= vocab_size:
            raise DataError(f"EVALDIR={config.evaldir}: token ids past vocab_size {vocab_size} of bert_config.json")
        mine = np.array_split(np.arange(config.num_examples), world.size)[world.rank]
        # Sequences of like length together: the sums do not depend on the order, the padding and balance do.
        mine = mine[np.argsort(records.sequence_lengths[mine], kind="stable")]
        self.batches: list[Batch] = [
            make_batch(records, mine[begin : begin + config.batch_size], max_seq_length).to(world.device)
            for begin in range(0, len(mine), config.batch_size)
        ]

    @torch.no_grad()
    def __call__(self, model: BertForPreTraining) -> Result:
        """Accuracy = correct / masked tokens over all ranks; the loss is the mean over masked tokens."""
        was_training = model.training
        model.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        for batch in self.batches:
            totals += _count(model, batch)
        model.train(was_training)
        correct, loss, masked = self.world.sum(totals).tolist()
        return Result(accuracy=correct / masked, mlm_loss=loss / masked, num_masked=int(masked))


def _count(model: BertForPreTraining, batch: Batch) -> Tensor:
    """(correct, summed loss, masked tokens) of a batch, fp64 (3,)."""
    logits = model.logits(batch).mlm
    valid = batch.masked_labels != IGNORE
    correct = ((logits.argmax(dim=1) == batch.masked_labels) & valid).sum()
    losses = model.cross_entropy(logits, batch.masked_labels, model.config.vocab_size)
    return torch.stack([correct.double(), losses.double().sum(), valid.sum().double()])
