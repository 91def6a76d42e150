"""Does an evaluation in fp8 find what one in bf16 finds? The same weights measured both ways while a model is trained.

The small BERT of bench/convergence.py trains in fp8 on a CPU (or a GPU); every so many steps it is evaluated on
held-out sequences in fp8, in bf16 and, of the same weights, in fp32. Sums of fp8 products are cut off as fast ones are
(bench/fast_sums.py). Prints one JSON line: accuracy and masked-LM loss of every evaluation, and the largest differences
of fp8 from bf16 and, as a measure, of bf16 from fp32. Those of accuracy also in standard errors: by chance each word
that one of two precisions got right and the other did not is as likely to be gained as lost, which makes the standard
error of d such words sqrt(d).

usage: python bench/fp8_evaluation.py [--steps 300] [--every 25] [--sequences 4000] [--seed 0]
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import torch
from command_line import Parser, integer, natural
from common import device, emit, machine
from convergence import LENGTH, MODEL, ROWS, batches, first_model, rate, records
from fast_sums import emulated
from torch import Tensor

from bert import kernels, optim
from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.data.batch import PretrainingBatch, make_batch
from bert.kernels.cross_entropy import IGNORE
from bert.kernels.precision import Config as PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.training.step import Step, build_step

AT_ONCE = 500  # sequences of an evaluation batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Which masked words were right (bool), and the mean loss of all."""

    right: Tensor
    loss: float

    @property
    def accuracy(self) -> float:
        """The share of them."""
        return float(self.right.double().mean())


@torch.no_grad()
def measure(model: BertForPreTraining, held_out: list[PretrainingBatch]) -> Found:
    """The model as it stands, in the mode that it is in."""
    right, losses = [], []
    for batch in held_out:
        scored = model.scored(batch)
        real = batch.masked_labels != IGNORE
        right.append((scored.mlm.argmax(dim=1) == batch.masked_labels)[real])
        losses.append(scored.mlm_losses[real])
    return Found(right=torch.cat(right), loss=float(torch.cat(losses).double().mean()))


def measures(model: BertForPreTraining, held_out: list[PretrainingBatch]) -> dict[str, Found]:
    """The same weights in each precision. The model has taken a step in fp8."""
    found = {}
    with model.evaluating():
        assert model.evaluates_in_fp8
        found["fp8"] = measure(model, held_out)
    model.eval()
    found["bf16"] = measure(model, held_out)
    found["fp32"] = measure(copy.deepcopy(model).float(), held_out)
    model.train()
    return found


def trained(seed: int) -> tuple[BertForPreTraining, Step]:
    """A model to train in fp8, and its step."""
    choice = kernels.Config(fused="none", attention="sdpa_loop")
    model, world = first_model(MODEL, choice, seed).to(device()), World(DistConfig(device=device().type))
    precision, settings = PrecisionConfig(precision="fp8").resolve(world.device), optim.Config(sharded=True)
    return model, build_step(model, precision, settings, world, accumulate=False, fused_update=False)


def compare(steps: int, every: int, sequences: int, seed: int = 0) -> dict[str, Any]:
    """Accuracies, losses and differences after every so many steps."""
    held = records(sequences, seed=2)
    order = np.array_split(np.arange(sequences), -(-sequences // AT_ONCE))
    held_out = [make_batch(held, chosen, LENGTH).to(device()) for chosen in order]
    model, step = trained(seed)
    points = []
    with emulated():
        for number, batch in enumerate(batches(steps, records(2 * ROWS * steps, seed=3 + seed)), start=1):
            torch.manual_seed(number)
            step([batch], rate(number - 1, steps))
            if number % every == 0 or number == 1:
                points.append({"step": number} | point(measures(model, held_out)))
    largest = {
        pair: {name: max((p[pair][name] for p in points), key=abs) for name in points[0][pair]} for pair in PAIRS
    }
    return {"words": int(held.masked_lm_offsets[-1]), "points": points, "largest": largest}


PAIRS = {"fp8 against bf16": ("fp8", "bf16"), "bf16 against fp32": ("bf16", "fp32")}


def point(found: dict[str, Found]) -> dict[str, Any]:
    """Accuracy and loss in each precision, and the differences of each pair."""
    figures: dict[str, Any] = {
        "accuracy": {name: round(each.accuracy, 5) for name, each in found.items()},
        "loss": {name: round(each.loss, 5) for name, each in found.items()},
    }
    for pair, (one, other) in PAIRS.items():
        ours, theirs = found[one], found[other]
        gained, lost = (ours.right & ~theirs.right).sum().item(), (theirs.right & ~ours.right).sum().item()
        figures[pair] = {
            "accuracy": round((gained - lost) / len(ours.right), 6),
            "standard_errors": round((gained - lost) / math.sqrt(max(gained + lost, 1)), 2),
            "relative_loss": round(ours.loss / theirs.loss - 1, 6),
        }
    return figures


def main() -> None:
    """Trains, measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=integer, default=300, help="of the training (default 300)")
    parser.add_argument("--every", type=integer, default=25, help="steps between evaluations (default 25)")
    parser.add_argument("--sequences", type=integer, default=4000, help="held out (default 4000)")
    parser.add_argument("--seed", type=natural, default=0, help="of first weights and data (default 0)")
    options = parser.parse_args()
    found = compare(options.steps, options.every, options.sequences, options.seed)
    emit({"benchmark": "fp8_evaluation"} | vars(options) | found | {"machine": machine()})


if __name__ == "__main__":
    main()
