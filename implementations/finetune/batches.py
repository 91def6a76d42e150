"""Batches of whole sequences, concatenated without padding, and the order in which a run takes them."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from bert.data.batch import Batch, Capacity, padded
from bert.data.tokens import Integers
from bert.training.graph import graph_capacity, static_batch

# The default ignore_index of F.cross_entropy.
IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class SpanBatch(Batch):
    """starts, ends: int64 [S], first and last token of the answer in its sequence; IGNORE: padding or unknown."""

    starts: Tensor = padded("sequences", IGNORE)
    ends: Tensor = padded("sequences", IGNORE)


@dataclass(frozen=True, kw_only=True)
class LabelledBatch(Batch):
    """labels: int64 [S], class of each sequence; IGNORE: padding or unknown."""

    labels: Tensor = padded("sequences", IGNORE)


@dataclass(frozen=True, kw_only=True)
class NumberBatch(Batch):
    """numbers: float32 [S], regression target of each sequence; NaN: padding or unknown."""

    numbers: Tensor = padded("sequences", math.nan)


@dataclass(frozen=True)
class Samples:
    """Training or test data of a task: N token sequences, and labels by field of the batch.

    labels: "starts" and "ends" of answers; "labels", the classes; or "numbers" of a regression; each (N,).
    """

    sequences: Sequence[tuple[Integers, int]]  # token ids, where the second segment starts
    labels: dict[str, np.ndarray]

    @cached_property
    def lengths(self) -> Integers:
        return np.array([len(ids) for ids, _ in self.sequences], dtype=np.int32)

    def digest(self) -> str:
        """CRC-32 of the sequences and labels, compared between ranks."""
        segments = np.array([begin for _, begin in self.sequences], dtype=np.int32)
        arrays = [
            self.lengths,
            segments,
            *(ids for ids, _ in self.sequences),
            *self.labels.values(),
        ]
        return f"{functools.reduce(lambda value, array: zlib.crc32(np.asarray(array).tobytes(), value), arrays, 0):08x}"

    def batch(self, chosen: np.ndarray) -> SpanBatch | LabelledBatch | NumberBatch:
        """Batch of the sequences with these indices."""
        sequences, lengths = (
            [self.sequences[i] for i in chosen],
            self.lengths[chosen].astype(np.int64),
        )
        # Sequences end to end: S+1 offsets, and T positions that restart in each sequence.
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        second = np.repeat([begin for _, begin in sequences], lengths)
        # The name of its first label field tells the kind of task.
        kind = {"starts": SpanBatch, "labels": LabelledBatch, "numbers": NumberBatch}[
            next(iter(self.labels))
        ]
        dtype = np.float32 if kind is NumberBatch else np.int64
        return kind(
            input_ids=torch.from_numpy(
                np.concatenate([ids for ids, _ in sequences]).astype(np.int32)
            ),
            segment_ids=torch.from_numpy((positions >= second).astype(np.int32)),
            position_ids=torch.from_numpy(positions.astype(np.int32)),
            cu_seqlens=torch.from_numpy(offsets.astype(np.int32)),
            max_seqlen=int(lengths.max()),
            num_tokens=int(offsets[-1]),
            num_sequences=len(sequences),
            **{
                name: torch.from_numpy(values[chosen].astype(dtype))
                for name, values in self.labels.items()
            },
        )


@dataclass(frozen=True)
class Order:
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
        places = np.arange((step - 1) * count + self.rank, step * count, self.world_size)
        epochs, within = np.divmod(places, self.num_samples)
        chosen = np.empty(len(places), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen[epochs == epoch] = _permutation(self.seed, epoch, self.num_samples)[
                within[epochs == epoch]
            ]
        return np.split(chosen, self.num_micro_batches)


# Two: a step may lie across the end of an epoch.
@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


@dataclass(frozen=True)
class Room:
    """Fixed size of micro-batches in a CUDA graph: that of the largest, which the order determines."""

    capacity: Capacity
    longest: int  # maximum tokens per sequence
    mean: float  # mean tokens per micro-batch

    @classmethod
    def of(cls, lengths: Integers, order: Order, num_steps: int) -> Room:
        """Size for the first ``num_steps`` steps; tokens are rounded up to a multiple of 16 for the tensor cores."""
        # The order is known in advance, so every micro-batch of
        # the run can be weighed before the capture.
        steps = range(1, num_steps + 1)
        sums = np.array(
            [lengths[chosen].sum(dtype=np.int64) for step in steps for chosen in order.step(step)]
        )
        tokens, longest = -(-int(sums.max()) // 16) * 16, int(lengths.max())
        capacity = Capacity(tokens=tokens, sequences=order.batch_size)
        # Padding tokens form sequences too, each at most the maximum length.
        return cls(
            graph_capacity(capacity, -(-(tokens - int(sums.min())) // longest)),
            longest,
            float(sums.mean()),
        )

    def fill(self, batch: Batch) -> Batch:
        """Pads the batch to this size; losses and gradients do not change."""
        # A graph keeps the max_seqlen of its capture, so it must hold for every batch.
        return static_batch(dataclasses.replace(batch, max_seqlen=self.longest), self.capacity)

    def __str__(self) -> str:
        tokens = self.capacity.tokens
        return f"{tokens:,} tokens per micro-batch, {100 * (1 - self.mean / tokens):.0f}% of them padding"


class Source:
    """Batches of a run from a step on."""

    def __init__(
        self, samples: Samples, order: Order, next_step: int, room: Room | None, pin: bool
    ) -> None:
        """room: size to pad to; pin: use page-locked memory, for asynchronous copies to a GPU."""
        self.samples, self.order, self.number, self.room, self.pin = (
            samples,
            order,
            next_step,
            room,
            pin,
        )

    def next_step(self) -> list[Batch]:
        batches: list[Batch] = [
            self.samples.batch(chosen) for chosen in self.order.step(self.number)
        ]
        # Counted on even if a step of fp16 overflows: it is retried on the next batch.
        self.number += 1
        if self.room is not None:
            batches = [self.room.fill(batch) for batch in batches]
        return [batch.pin_memory() for batch in batches] if self.pin else batches
