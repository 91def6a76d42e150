"""The varlen batch: what reaches the model, whatever it came from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert.data.format import Records
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


def _flatten(offsets: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Source index of every element of the chosen ragged pieces, and the pieces' offsets in the result."""
    begins = offsets[indices]
    lengths = offsets[indices + 1] - begins
    starts = np.zeros(len(indices) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    source = np.arange(starts[-1], dtype=np.int64)
    source += np.repeat(begins - starts[:-1], lengths)
    return source, starts


def make_batch(records: Records, sequences: np.ndarray, max_seqlen: int) -> Batch:
    """The batch of the given sequences (indices into ``records``), in that order. max_seqlen bounds their lengths."""
    source, starts = _flatten(records.sequence_offsets, sequences)
    lengths = np.diff(starts)
    positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths).astype(np.int32)
    segment_b = np.repeat(records.segment_b_start[sequences], lengths)
    masked_source, masked_starts = _flatten(records.masked_lm_offsets, sequences)
    shift = np.repeat(starts[:-1], np.diff(masked_starts)).astype(np.int32)
    return Batch(
        input_ids=torch.from_numpy(records.input_ids[source].astype(np.int32)),
        segment_ids=torch.from_numpy((positions >= segment_b).astype(np.int32)),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        masked_positions=torch.from_numpy(records.masked_lm_positions[masked_source].astype(np.int32) + shift),
        masked_labels=torch.from_numpy(records.masked_lm_ids[masked_source].astype(np.int64)),
        next_sentence_labels=torch.from_numpy(records.next_sentence_labels[sequences].astype(np.int64)),
        max_seqlen=max_seqlen,
        num_tokens=int(starts[-1]),
        num_sequences=len(sequences),
        num_masked=int(masked_starts[-1]),
    )
