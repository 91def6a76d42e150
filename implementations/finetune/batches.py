"""Batches of whole sequences, concatenated without padding, and the order in which a run takes
them.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bert.data.batch import Batch
from bert.data.tokens import Integers


@dataclass(frozen=True, kw_only=True)
class SpanBatch(Batch):
    """starts, ends: int64 [S], first and last token of the answer in its sequence."""

    starts: Tensor
    ends: Tensor


@dataclass(frozen=True, kw_only=True)
class LabelledBatch(Batch):
    """labels: [S], class of each sequence, int64, or target of a regression, float32; of several
    labels [S, labels], 0 or 1, float32; [T], class of each token, int64, or -100: none.
    """

    labels: Tensor


@dataclass(frozen=True)
class Samples:
    """Training or test data of a task: N token sequences, and labels by field of the batch.

    labels: "starts" and "ends" of answers, or "labels" as of LabelledBatch; each of N, those of
    tokens an array each.
    """

    # Token ids, where the second segment starts.
    sequences: Sequence[tuple[Integers, int]]
    labels: dict[str, np.ndarray]

    @cached_property
    def lengths(self) -> Integers:
        return np.array([len(ids) for ids, _ in self.sequences], dtype=np.int32)

    def batch(self, chosen: np.ndarray) -> SpanBatch | LabelledBatch:
        """Batch of the sequences with these indices."""
        sequences = [self.sequences[i] for i in chosen]
        lengths = self.lengths[chosen].astype(np.int64)
        # Sequences end to end: S+1 offsets, and T positions that restart in each sequence.
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        second = np.repeat([begin for _, begin in sequences], lengths)
        ids = np.concatenate([ids for ids, _ in sequences])
        labels = {}
        for name, values in self.labels.items():
            own = values[chosen]
            flat = np.concatenate(own) if own.dtype == object else own
            labels[name] = torch.from_numpy(flat)
        kind = SpanBatch if "starts" in labels else LabelledBatch
        return kind(
            input_ids=_int32(ids),
            segment_ids=_int32(positions >= second),
            position_ids=_int32(positions),
            cu_seqlens=_int32(offsets),
            max_seqlen=int(lengths.max()),
            num_tokens=int(offsets[-1]),
            num_sequences=len(sequences),
            **labels,
        )


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


class Order(NamedTuple):
    """Sample order of a rank: one permutation per epoch.

    Ranks take the samples of a step round-robin; an epoch may end within a step.
    """

    num_samples: int
    batch_size: int  # sequences per micro-batch
    num_micro_batches: int  # per step
    seed: int
    rank: int = 0
    world_size: int = 1

    def step(self, step: int) -> list[np.ndarray]:
        """Sample indices of each micro-batch of a step (counted from 1) on this rank."""
        count = self.batch_size * self.num_micro_batches * self.world_size
        # Places in an endless row of epochs. Ranks take turns: a global batch holds the same
        # samples on any number of ranks.
        positions = np.arange(
            (step - 1) * count + self.rank, step * count, self.world_size
        )
        epochs, within = np.divmod(positions, self.num_samples)
        chosen = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen[epochs == epoch] = _permutation(self.seed, epoch, self.num_samples)[
                within[epochs == epoch]
            ]
        return np.split(chosen, self.num_micro_batches)


# Two: a step may lie across the end of an epoch.
@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def micro_batches(
    samples: Samples, order: Order, first_step: int, pin: bool
) -> Iterator[list[Batch]]:
    """Micro-batches of each step. pin: in page-locked memory, for asynchronous copies to a GPU.

    A step of fp16 that overflows is retried on the next batch.
    """
    for step in itertools.count(first_step):
        batches = [samples.batch(chosen) for chosen in order.step(step)]
        yield [batch.pin_memory() if pin else batch for batch in batches]
