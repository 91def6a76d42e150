"""The varlen batch: token fields of every task, and label fields that a task adds; the batch of
pretraining.

``make_batch`` and ``gather_batch`` build one from records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bert.data.compiled import array, compiled_for, scalar
from bert.data.records import DataError, Records
from bert.kernels.operations.cross_entropy import IGNORE

AnyBatch = TypeVar("AnyBatch", bound="Batch")
AnyCapacity = TypeVar("AnyCapacity", bound="Capacity")
MASKED_SHARE = 0.15  # share of masked tokens in the benchmark's data


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Fixed sizes of a batch (for a CUDA graph): tokens T, sequences S. A task may add sizes of its
    labels.
    """

    tokens: int
    sequences: int


def padded(fills: str, padding: float) -> Any:
    """A tensor field of a batch: the size in Capacity to which its first dimension is padded, and
    the padding value.
    """
    return dataclasses.field(metadata={"fills": fills, "padding": padding})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences end to end. Positions restart in each; attention never crosses ``cu_seqlens``.

    input_ids, segment_ids, position_ids: int32 [T]; cu_seqlens: int32 [S+1]. ``max_seqlen`` bounds
    the length of a sequence. The num_ fields do not count padding. A task's batch is a subclass
    with label fields, each declared by ``padded``; padding must not change losses and gradients.
    """

    input_ids: Tensor = padded("tokens", 0)
    segment_ids: Tensor = padded("tokens", 0)
    position_ids: Tensor = padded("tokens", 0)
    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int
    num_sequences: int

    def to(self: AnyBatch, device: torch.device) -> AnyBatch:
        """The batch on another device; from pinned memory the copies do not block."""
        return self._with(
            {
                name: value.to(device, non_blocking=True)
                for name, value in self.tensors().items()
            }
        )

    def pin_memory(self: AnyBatch) -> AnyBatch:
        """The batch in page-locked memory."""
        return self._with(
            {name: value.pin_memory() for name, value in self.tensors().items()}
        )

    def _with(self: AnyBatch, tensors: dict[str, Any]) -> AnyBatch:
        return dataclasses.replace(self, **tensors)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }

    def pad_to(self: AnyBatch, capacity: Capacity) -> AnyBatch:
        """The batch padded to fixed sizes; losses and gradients do not change.

        Raises ValueError if the batch exceeds the capacity.
        """
        # cu_seqlens has S + 1 entries.
        missing = {"sequences": capacity.sequences + 1 - len(self.cu_seqlens)}
        paddings: dict[str, tuple[str, float]] = {}
        for field in dataclasses.fields(self):
            if size := field.metadata.get("fills"):
                missing[size] = getattr(capacity, size) - len(getattr(self, field.name))
                paddings[field.name] = size, field.metadata["padding"]
        if min(missing.values()) < 0:
            sizes = ", ".join(
                f"{getattr(capacity, size) - count} {size}"
                for size, count in missing.items()
            )
            raise ValueError(f"batch of {sizes} exceeds {capacity}")
        # Padding continues with sequences of no tokens.
        paddings["cu_seqlens"] = "sequences", self.num_tokens
        tensors = {}
        for name, (size, padding) in paddings.items():
            values = getattr(self, name)
            more = values.new_full((missing[size], *values.shape[1:]), padding)
            tensors[name] = torch.cat([values, more])
        return self._with(tensors)


@dataclass(frozen=True, kw_only=True)
class PretrainingCapacity(Capacity):
    """Sizes of a pretraining batch: T, S and masked positions M."""

    masked: int

    @classmethod
    def of(cls, tokens: int, sequences: int) -> PretrainingCapacity:
        """Capacity for the benchmark's data, where 15% of the tokens of each sequence are masked,
        rounded.
        """
        # Rounding adds at most half a token to each sequence.
        masked = int(MASKED_SHARE * tokens + 0.5 * sequences)
        return cls(tokens=tokens, sequences=sequences, masked=masked)


@dataclass(frozen=True, kw_only=True)
class PretrainingBatch(Batch):
    """masked_positions: int32 [M], absolute in [0, T); masked_labels: int64 [M];
    next_sentence_labels: int64 [S].

    Labels of -100 are padding.
    """

    masked_positions: Tensor = padded("masked", 0)
    masked_labels: Tensor = padded("masked", IGNORE)
    next_sentence_labels: Tensor = padded("sequences", IGNORE)
    num_masked: int
    # Of tokens of one sequence: attention's work, known without asking the device.
    num_pairs: int = 0


def make_batch(
    records: Records, sequences: np.ndarray, max_seqlen: int
) -> PretrainingBatch:
    """The batch of the given sequences (indices into ``records``), in that order. max_seqlen bounds
    their lengths.
    """
    return gather_batch([records], [np.arange(len(sequences))], sequences, max_seqlen)


def gather_batch(
    sources: Sequence[Records],
    indices: Sequence[np.ndarray],
    sequences: np.ndarray,
    max_seqlen: int,
    vocab_size: int | None = None,
) -> PretrainingBatch:
    """The batch of sequences from several sources.

    indices: where in the batch each source's sequences go; sequences: index of each in its source,
    int64 [S]. max_seqlen bounds their lengths, vocab_size token ids (None: not checked). Raises
    DataError for offsets outside of the records, and for token ids of another vocabulary.
    """
    # Two passes over the sources: the heads give the sizes of the batch, so that tokens are copied
    # once, to their place.
    heads = _heads_of(sources, indices, sequences, max_seqlen)
    num_tokens, num_masked = int(heads[_START, -1]), int(heads[_MASKED_START, -1])
    tokens = np.empty((3, num_tokens), np.int32)  # ids, segments, positions
    masked_positions = np.empty(num_masked, np.int32)
    # 64 bits, as PyTorch's cross-entropy takes no narrower labels.
    masked_labels = np.empty(num_masked, np.int64)
    for records, where in zip(sources, indices, strict=True):
        smallest, largest = _copy_sequences(
            records.input_ids,
            records.masked_lm_positions,
            records.masked_lm_ids,
            where,
            heads,
            tokens,
            masked_positions,
            masked_labels,
        )
        # Checked here, as an id beyond the embeddings is an unreadable assertion on the device.
        if vocab_size is not None and not 0 <= smallest <= largest < vocab_size:
            raise DataError(
                f"token ids {smallest} to {largest} in the data, but bert_config.json has vocab_size {vocab_size}: "
                "the data and BERT_CONFIG are of different vocabularies"
            )
    return PretrainingBatch(
        input_ids=torch.from_numpy(tokens[0]),
        segment_ids=torch.from_numpy(tokens[1]),
        position_ids=torch.from_numpy(tokens[2]),
        cu_seqlens=torch.from_numpy(heads[_START].astype(np.int32)),
        masked_positions=torch.from_numpy(masked_positions),
        masked_labels=torch.from_numpy(masked_labels),
        next_sentence_labels=torch.from_numpy(heads[_NEXT_SENTENCE, :-1]),
        max_seqlen=max_seqlen,
        num_tokens=num_tokens,
        num_sequences=len(sequences),
        num_pairs=int((np.diff(heads[_START]) ** 2).sum()),
        num_masked=num_masked,
    )


# Rows of the heads of a batch, int64 [6, S + 1], a column a sequence. In its records: first token,
# first masked one, tokens before segment B, label.
_BEGIN, _MASKED_BEGIN, _SEGMENT_B, _NEXT_SENTENCE = range(4)
# In the batch: its first token and first masked one; the last column has the totals.
_START, _MASKED_START = 4, 5


def _heads_of(
    sources: Sequence[Records],
    indices: Sequence[np.ndarray],
    sequences: np.ndarray,
    max_seqlen: int,
) -> np.ndarray:
    """The heads of a batch. Raises DataError for offsets outside of the records."""
    sequences = np.ascontiguousarray(sequences, dtype=np.int64)
    heads = np.zeros((6, len(sequences) + 1), np.int64)
    for records, where in zip(sources, indices, strict=True):
        is_sound = _read_heads(
            records.sequence_offsets,
            records.masked_lm_offsets,
            records.segment_b_start,
            records.next_sentence_labels,
            len(records.input_ids),
            len(records.masked_lm_ids),
            max_seqlen,
            where,
            sequences,
            heads,
        )
        if not is_sound:
            raise DataError(
                f"training data: offsets beyond their file, or over {max_seqlen} tokens; "
                "find the damaged file with python -m input_preprocessing verify"
            )
    # Lengths, each in the column after its own, become offsets in place.
    for row in (_START, _MASKED_START):
        np.cumsum(heads[row], out=heads[row])
    return heads


# Types of the compiled functions' arguments. Read-only, as the arrays of mapped files are.
_NARROW, _WIDE = array("int16", readonly=True), array("int32", readonly=True)
_LABELS, _OFFSETS = array("int8", readonly=True), array("int64", readonly=True)
_NUMBER = scalar("int64")
_INT64, _HEADS = array("int64"), array("int64", ndim=2)


@compiled_for(
    *(_OFFSETS, _OFFSETS, _NARROW, _LABELS),
    *(_NUMBER, _NUMBER, _NUMBER),
    *(_INT64, _INT64, _HEADS),
)
def _read_heads(  # type: ignore[no-untyped-def]
    sequence_offsets,
    masked_offsets,
    segment_b_start,
    next_sentence_labels,
    num_tokens,
    num_masked,
    max_seqlen,
    where,
    sequences,
    heads,
):
    """Fills columns ``where`` of the heads, with lengths for starts; returns whether all are in the
    records.

    Compiled code does not check bounds; offsets of a damaged file must not reach it.
    """
    for i in where:
        sequence = sequences[i]
        begin, end = sequence_offsets[sequence], sequence_offsets[sequence + 1]
        masked_begin = masked_offsets[sequence]
        masked_end = masked_offsets[sequence + 1]
        segment_b = segment_b_start[sequence]
        length = end - begin
        if not (0 <= begin <= end <= num_tokens and length <= max_seqlen):
            return False
        if not 0 <= masked_begin <= masked_end <= num_masked:
            return False
        if not 0 <= segment_b <= length:
            return False
        heads[_BEGIN, i], heads[_MASKED_BEGIN, i] = begin, masked_begin
        heads[_SEGMENT_B, i] = segment_b
        has_pair = segment_b < length
        heads[_NEXT_SENTENCE, i] = (
            next_sentence_labels[sequence] if has_pair else IGNORE
        )
        heads[_START, i + 1] = length
        heads[_MASKED_START, i + 1] = masked_end - masked_begin
    return True


_INTO_BATCH = _INT64, _HEADS, array("int32", ndim=2), array("int32"), _INT64


# Ids of 16 bits, or of 32 for vocabularies above 32,768: machine code for each.
@compiled_for(
    (_NARROW, _NARROW, _NARROW, *_INTO_BATCH), (_WIDE, _NARROW, _WIDE, *_INTO_BATCH)
)
def _copy_sequences(  # type: ignore[no-untyped-def]
    input_ids, positions, labels, where, heads, tokens, masked_positions, masked_labels
):
    """Copies one source's sequences to columns ``where`` of the batch; returns the smallest and
    largest token id.
    """
    smallest = largest = 0
    for i in where:  # by slices, which are fast without the compiler too
        start, end = heads[_START, i], heads[_START, i + 1]
        if start == end:
            continue
        begin, segment_b = heads[_BEGIN, i], start + heads[_SEGMENT_B, i]
        ids = input_ids[begin : begin + end - start]
        smallest, largest = min(smallest, ids.min()), max(largest, ids.max())
        tokens[0, start:end] = ids
        tokens[1, start:segment_b] = 0
        tokens[1, segment_b:end] = 1
        tokens[2, start:end] = np.arange(end - start)
        first, last = heads[_MASKED_START, i], heads[_MASKED_START, i + 1]
        if first == last:
            continue
        begin = heads[_MASKED_BEGIN, i]
        stop = begin + last - first
        # Relative to the sequence in records, absolute in the batch.
        masked_positions[first:last] = positions[begin:stop] + start
        originals = labels[begin:stop]
        smallest = min(smallest, originals.min())
        largest = max(largest, originals.max())
        masked_labels[first:last] = originals
    return smallest, largest
