"""Scores of many sequences, without padding, over all ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as distributed

from bert.core.dist import World
from bert.data.batch import Batch
from finetune.batches import LabelledBatch, Samples
from finetune.models import FineTuned


@torch.no_grad()
def batch_scores(model: FineTuned, batch: Batch) -> list[np.ndarray]:
    """Scores of each sequence of a batch on the model's device: (tokens, 2), or (classes,)."""
    scores = model.scores(batch).cpu().numpy()
    if isinstance(batch, LabelledBatch):
        return list(scores)
    offsets = batch.cu_seqlens.cpu().numpy()
    return np.split(scores, offsets[1:-1])


def predict(model: FineTuned, samples: Samples, world: World, batch_size: int) -> list[np.ndarray]:
    """Scores of every sample, in their order, on rank 0; elsewhere nothing. A collective.

    Each sample is computed by exactly one rank. Neighbours in length share a batch, the longest come first.
    """
    order = np.argsort(-samples.lengths, kind="stable")
    mine = order[world.rank :: world.size]
    was_training = model.training
    model.eval()
    found: list[tuple[int, np.ndarray]] = []
    for begin in range(0, len(mine), batch_size):
        chosen = mine[begin : begin + batch_size]
        batch = samples.batch(chosen).to(world.device)
        found += zip(chosen.tolist(), batch_scores(model, batch), strict=True)
    model.train(was_training)
    gathered: list[list[tuple[int, np.ndarray]] | None] = [None] * world.size
    if world.size == 1:
        gathered = [found]
    else:
        distributed.all_gather_object(gathered, found)
    if not world.is_main:
        return []
    scores = dict(pair for part in gathered if part is not None for pair in part)
    assert len(scores) == len(order)
    return [scores[number] for number in range(len(order))]
