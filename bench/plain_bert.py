"""BERT's pretraining by others' code: Hugging Face's BertForPreTraining, padded batches, LAMB as its paper has it.

Nothing here is of the trainer but the records and the learning rates it is given: it is what bench/convergence.py
--against huggingface holds the trainer to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from bert.data.records import Records

IGNORE = -100


class Lamb:
    """Algorithm 2 of You et al. 2020 (arXiv 1904.00962) with the gradient clipped to a norm of 1.

    Biases and LayerNorms have neither decay nor trust ratio, as in the benchmark's submissions.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], betas: tuple[float, float], decay: float) -> None:
        self.parameters = [(p, not (name.endswith("bias") or "LayerNorm" in name)) for name, p in named]
        self.betas, self.decay, self.steps = betas, decay, 0
        self.m = [torch.zeros_like(p) for p, _ in self.parameters]
        self.v = [torch.zeros_like(p) for p, _ in self.parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with the gradients that are there."""
        self.steps += 1
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p, _ in self.parameters]
        norm = float(torch.sqrt(sum((g**2).sum() for g in gradients)))
        beta1, beta2 = self.betas
        for (p, adapted), g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
            g = g / max(norm, 1.0)
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(beta2 * v + (1 - beta2) * g**2)
            update = (m / (1 - beta1**self.steps)) / (torch.sqrt(v / (1 - beta2**self.steps)) + 1e-6)
            ratio = 1.0
            if adapted:
                update = update + self.decay * p
                weight_norm, update_norm = float(p.norm()), float(update.norm())
                ratio = weight_norm / update_norm if weight_norm and update_norm else 1.0
            p.sub_(lr * ratio * update)


def padded(records: Records, sequences: np.ndarray) -> dict[str, Tensor]:
    """The arguments of BertForPreTraining for these sequences, padded to the longest (S, L)."""
    offsets = records.sequence_offsets
    longest = int(max(offsets[i + 1] - offsets[i] for i in sequences))
    shape = len(sequences), longest
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    labels = torch.full(shape, IGNORE)
    for row, i in enumerate(sequences):
        ids = torch.from_numpy(records.input_ids[offsets[i] : offsets[i + 1]].astype(np.int64))
        batch["input_ids"][row, : len(ids)] = ids
        batch["attention_mask"][row, : len(ids)] = 1
        batch["token_type_ids"][row, int(records.segment_b_start[i]) : len(ids)] = 1
        masked = slice(int(records.masked_lm_offsets[i]), int(records.masked_lm_offsets[i + 1]))
        places = torch.from_numpy(records.masked_lm_positions[masked].astype(np.int64))
        labels[row, places] = torch.from_numpy(records.masked_lm_ids[masked].astype(np.int64))
    next_sentence = torch.from_numpy(records.next_sentence_labels[sequences].astype(np.int64))
    return batch | {"labels": labels, "next_sentence_label": next_sentence}


def model(config: dict[str, object], weights: dict[str, Tensor]) -> nn.Module:
    """Hugging Face's model with these weights under its own names; raises where one is missing or left over."""
    made = transformers.BertForPreTraining(transformers.BertConfig(**config, attn_implementation="eager"))
    missing, unexpected = made.load_state_dict(weights, strict=False)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "bert.embeddings.position_ids"}
    assert not set(missing) - tied, missing
    assert not unexpected, unexpected
    made.tie_weights()
    return made


def train(made: nn.Module, batches: Iterable[dict[str, Tensor]], rates: Iterable[float], lamb: Lamb) -> Iterator[float]:
    """The loss of each step, before its update."""
    made.train()
    for batch, lr in zip(batches, rates, strict=True):
        loss = made(**batch).loss
        made.zero_grad()
        loss.backward()
        lamb.step(lr)
        yield float(loss.detach())


@torch.no_grad()
def accuracy(made: nn.Module, batch: dict[str, Tensor]) -> float:
    """The share of masked words that the model finds."""
    made.eval()
    guesses = made(**batch).prediction_logits.argmax(dim=-1)
    known = batch["labels"] != IGNORE
    return float((guesses == batch["labels"])[known].double().mean())
