"""The varlen batch: what reaches the model, whatever it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert.data.compiled import array, compiled_for
from bert.data.format import DataError, Records
from bert.kernels.cross_entropy import IGNORE


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Fixed sizes of a batch (for a CUDA graph): tokens T, sequences S, masked positions M."""

    tokens: int
    sequences: int
    masked: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences end to end. Positions restart in each; attention never crosses ``cu_seqlens``.

    input_ids, segment_ids, position_ids: int32 [T]; cu_seqlens: int32 [S+1]; masked_positions: int32 [M], absolute in
    [0, T); masked_labels: int64 [M]; next_sentence_labels: int64 [S]. Labels of -100 are padding. ``max_seqlen``
    bounds the length of a sequence. The num_ fields count what is real.
    """

    input_ids: Tensor
    segment_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    masked_positions: Tensor
    masked_labels: Tensor
    next_sentence_labels: Tensor
    max_seqlen: int
    num_tokens: int
    num_sequences: int
    num_masked: int

    def to(self, device: torch.device) -> Batch:
        """The batch on another device; from pinned memory the copies do not block."""
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        pinned: dict[str, Any] = {name: value.pin_memory() for name, value in self.tensors().items()}
        return dataclasses.replace(self, **pinned)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def pad_to(self, capacity: Capacity) -> Batch:
        """The batch filled up to fixed sizes; losses and gradients stay what they were.

        Raises ValueError where the batch holds more than the capacity.
        """
        tokens = capacity.tokens - self.input_ids.numel()
        sequences = capacity.sequences - self.next_sentence_labels.numel()
        masked = capacity.masked - self.masked_labels.numel()
        if min(tokens, sequences, masked) < 0:
            raise ValueError(f"batch of {self.num_tokens} tokens, {self.num_sequences} sequences, {self.num_masked} "
                             f"masked positions exceeds {capacity}")  # fmt: skip
        return dataclasses.replace(
            self,
            input_ids=_extend(self.input_ids, tokens, 0),
            segment_ids=_extend(self.segment_ids, tokens, 0),
            position_ids=_extend(self.position_ids, tokens, 0),
            cu_seqlens=_extend(self.cu_seqlens, sequences, self.num_tokens),
            masked_positions=_extend(self.masked_positions, masked, 0),
            masked_labels=_extend(self.masked_labels, masked, IGNORE),
            next_sentence_labels=_extend(self.next_sentence_labels, sequences, IGNORE),
        )


def _extend(values: Tensor, count: int, fill: int) -> Tensor:
    return torch.cat([values, values.new_full((count,), fill)])


def make_batch(records: Records, sequences: np.ndarray, max_seqlen: int) -> Batch:
    """The batch of the given sequences (indices into ``records``), in that order. max_seqlen bounds their lengths."""
    return gather_batch([records], np.zeros(len(sequences), dtype=np.int64), sequences, max_seqlen)


def gather_batch(sources: Sequence[Records], source_of: np.ndarray, sequences: np.ndarray, max_seqlen: int) -> Batch:
    """The batch whose i-th sequence is number ``sequences[i]`` of ``sources[source_of[i]]``; both arrays int64 [S].

    Raises DataError for offsets that lead out of the records.
    """
    count = len(sequences)
    begins, masked_begins = np.empty(count, np.int64), np.empty(count, np.int64)
    starts, masked_starts = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    segment_b, next_sentence = np.empty(count, np.int64), np.empty(count, np.int64)
    places = [np.flatnonzero(source_of == number) for number in range(len(sources))]
    for records, where in zip(sources, places, strict=True):
        chosen = sequences[where]
        begins[where], masked_begins[where] = records.sequence_offsets[chosen], records.masked_lm_offsets[chosen]
        starts[where + 1] = records.sequence_offsets[chosen + 1] - begins[where]
        masked_starts[where + 1] = records.masked_lm_offsets[chosen + 1] - masked_begins[where]
        _check_ends(
            records, begins[where], starts[where + 1], masked_begins[where], masked_starts[where + 1], max_seqlen
        )
        segment_b[where], next_sentence[where] = records.segment_b_start[chosen], records.next_sentence_labels[chosen]
    np.cumsum(starts, out=starts)
    np.cumsum(masked_starts, out=masked_starts)
    num_tokens, num_masked = int(starts[-1]), int(masked_starts[-1])
    tokens = np.empty((3, num_tokens), np.int32)  # ids, segments, positions
    masked_positions, masked_labels = np.empty(num_masked, np.int32), np.empty(num_masked, np.int64)
    for records, where in zip(sources, places, strict=True):
        _copy_sequences(
            records.input_ids, records.masked_lm_positions, records.masked_lm_ids,
            where, begins, starts, masked_begins, masked_starts, segment_b,
            tokens, masked_positions, masked_labels,
        )  # fmt: skip
    input_ids, segment_ids, position_ids = torch.from_numpy(tokens)
    return Batch(
        input_ids=input_ids,
        segment_ids=segment_ids,
        position_ids=position_ids,
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        masked_positions=torch.from_numpy(masked_positions),
        masked_labels=torch.from_numpy(masked_labels),
        next_sentence_labels=torch.from_numpy(next_sentence),
        max_seqlen=max_seqlen,
        num_tokens=num_tokens,
        num_sequences=count,
        num_masked=num_masked,
    )


def _check_ends(
    records: Records, begins: np.ndarray, lengths: np.ndarray, masked_begins: np.ndarray, counts: np.ndarray, most: int
) -> None:
    """The compiled copy trusts offsets; those of a damaged file must not reach it."""
    if not len(begins):
        return
    sound = begins.min() >= 0 and 0 <= lengths.min() <= lengths.max() <= most
    sound = sound and masked_begins.min() >= 0 and counts.min() >= 0
    sound = sound and (begins + lengths).max() <= len(records.input_ids)
    if not sound or (masked_begins + counts).max() > len(records.masked_lm_ids):
        raise DataError(
            f"training data: offsets of sequences lead out of their file, or over {most} tokens; find the damaged file "
            "with python -m input_preprocessing.verify"
        )


@compiled_for(
    *[array("int16", readonly=True)] * 3, *[array("int64")] * 6, array("int32", ndim=2), array("int32"), array("int64")
)
def _copy_sequences(  # type: ignore[no-untyped-def]
    input_ids, positions, labels, where, begins, starts, masked_begins, masked_starts, segment_b,
    tokens, masked_positions, masked_labels,
):  # fmt: skip
    """Copies one source's sequences to their places ``where`` in the batch."""
    for i in where:
        start, begin = starts[i], begins[i]
        end = starts[i + 1]
        tokens[0, start:end] = input_ids[begin : begin + end - start]
        tokens[1, start : start + segment_b[i]] = 0
        tokens[1, start + segment_b[i] : end] = 1
        tokens[2, start:end] = np.arange(end - start)
        first, last, begin = masked_starts[i], masked_starts[i + 1], masked_begins[i]
        masked_positions[first:last] = positions[begin : begin + last - first] + start
        masked_labels[first:last] = labels[begin : begin + last - first]
