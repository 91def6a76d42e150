"""Trains a small BERT here and with an independent implementation, Hugging Face's BERT with a LAMB
of a few lines: same initial weights, same batches, fp64, no dropout. Prints both loss curves and
their largest relative difference.

usage: python tests/bench/against_huggingface.py [STEPS, a multiple of 25, default 500]
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from convergence import LONGEST, MODEL, batches, rates_of, train, windows
from torch_lib import new_model, new_step
from train_step import inputs_of

from bert import optim
from bert.checkpoint import huggingface
from bert.kernels.precision import PrecisionConfig

PEAK_LR = 0.005  # at the higher one of convergence.py rounding errors grow


def initial_model():
    """Where both sides begin, in fp64: a gap then shows other mathematics, not rounding."""
    plain = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return new_model(dataclasses.replace(MODEL, **plain)).double()


def ours(steps):
    """The run with this repository."""
    precision = PrecisionConfig(precision="fp32")
    step = new_step(initial_model(), precision, sharded=False)
    return windows(train(step, batches(steps), rates_of(steps, PEAK_LR)))


class PlainLamb:
    """Algorithm 2 of You et al. 2020 (arXiv 1904.00962), with gradients clipped to norm 1.

    No decay and no trust ratio for biases and LayerNorms, as in the benchmark's submissions.
    """

    def __init__(self, named):
        self.settings, self.steps = optim.OptimizerConfig().lamb, 0
        self.state = []
        for name, p in named:
            adapted = not (name.endswith("bias") or "LayerNorm" in name)
            self.state.append((p, adapted, torch.zeros_like(p), torch.zeros_like(p)))

    @torch.no_grad()
    def step(self, lr):
        self.steps += 1
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        norm = torch.stack([p.grad.norm() for p, *_ in self.state]).norm()
        for p, adapted, m, v in self.state:
            # All gradients by one norm, before the moments, as CLIP=after.
            g = p.grad / norm.clamp(min=1.0)
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(beta2 * v + (1 - beta2) * g**2)
            corrected = v / (1 - beta2**self.steps)
            update = m / (1 - beta1**self.steps) / (torch.sqrt(corrected) + 1e-6)
            ratio = 1.0
            if adapted:
                update = update + self.settings.weight_decay * p
                weight_norm, update_norm = float(p.norm()), float(update.norm())
                # A tensor of zeros has no direction, and moves at the plain rate.
                if weight_norm and update_norm:
                    ratio = weight_norm / update_norm
            p.sub_(lr * ratio * update)


def peer_of(model):
    """Hugging Face's model with the same weights, including initialized heads."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder, "vocab.txt")
        vocabulary.touch()
        values = huggingface.config_values(model.config, "BertForPreTraining")
        weights = dict(model.named_parameters())
        huggingface.write(
            Path(folder), weights, model.config, values, vocabulary, lower_case=True
        )
        # eager: attention is written out in their code, so it shares no function with ours.
        peer = transformers.BertForPreTraining
        return peer.from_pretrained(folder, attn_implementation="eager")


def hugging_faces(steps):
    """The run with independent code; records, rates and initial weights are this repository's."""
    model = peer_of(initial_model()).double().train()
    lamb = PlainLamb(model.named_parameters())
    losses = []
    for batch, lr in zip(batches(steps), rates_of(steps, PEAK_LR), strict=True):
        loss = model(**inputs_of(batch, LONGEST)).loss
        model.zero_grad()
        loss.backward()
        lamb.step(lr)
        losses.append(loss.detach())
    return windows(losses)


def agreement(steps):
    """Mean loss of each window, and the largest relative difference."""
    mine, theirs = ours(steps), hugging_faces(steps)
    return {
        "ours": mine.round(5).tolist(),
        "huggingface": theirs.round(5).tolist(),
        "largest_relative_gap": float(np.abs(mine / theirs - 1).max()),
    }


if __name__ == "__main__":
    print(json.dumps(agreement(int(*sys.argv[1:] or ["500"]))))
