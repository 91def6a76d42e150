"""The batch of masked-LM and next-sentence pretraining, made of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bert.data.batch import Batch, Capacity, padded
from bert.data.compiled import array, compiled_for, compiled_for_each, scalar
from bert.data.records import DataError, Records
from bert.kernels.cross_entropy import IGNORE

MASKED_SHARE = 0.15  # of the tokens, in the benchmark's data
_BEGIN, _MASKED_BEGIN, _SEGMENT_B, _NEXT_SENTENCE = range(4)  # rows of heads: one column a sequence


@dataclass(frozen=True, kw_only=True)
class PretrainingCapacity(Capacity):
    """And masked positions M."""

    masked: int

    @classmethod
    def of(cls, tokens: int, sequences: int) -> PretrainingCapacity:
        """Room for what the benchmark's data mask in so many tokens: 15%, rounded by up to a half a sequence."""
        return cls(tokens=tokens, sequences=sequences, masked=int(MASKED_SHARE * tokens + 0.5 * sequences))


@dataclass(frozen=True, kw_only=True)
class PretrainingBatch(Batch):
    """masked_positions: int32 [M], absolute in [0, T); masked_labels: int64 [M]; next_sentence_labels: int64 [S].

    Labels of -100 are padding.
    """

    masked_positions: Tensor = padded("masked", 0)
    masked_labels: Tensor = padded("masked", IGNORE)
    next_sentence_labels: Tensor = padded("sequences", IGNORE)
    num_masked: int


def make_batch(records: Records, sequences: np.ndarray, max_seqlen: int) -> PretrainingBatch:
    """The batch of the given sequences (indices into ``records``), in that order. max_seqlen bounds their lengths."""
    return gather_batch([records], [np.arange(len(sequences))], sequences, max_seqlen)


def gather_batch(
    sources: Sequence[Records],
    places: Sequence[np.ndarray],
    sequences: np.ndarray,
    max_seqlen: int,
    vocab_size: int | None = None,
) -> PretrainingBatch:
    """The batch of sequences from several sources.

    places: places in the batch of each source's sequences; sequences: number of each in its source, int64 [S].
    max_seqlen bounds their lengths, vocab_size token ids (None: not checked). Raises DataError for offsets that lead
    out of the records, and for token ids of another vocabulary.
    """
    sequences = np.ascontiguousarray(sequences, dtype=np.int64)
    heads = np.empty((4, len(sequences)), np.int64)
    starts, masked_starts = np.zeros(len(sequences) + 1, np.int64), np.zeros(len(sequences) + 1, np.int64)
    for records, where in zip(sources, places, strict=True):
        sound = _read_heads(
            records.sequence_offsets, records.masked_lm_offsets, records.segment_b_start, records.next_sentence_labels,
            len(records.input_ids), len(records.masked_lm_ids), max_seqlen, where, sequences,
            heads, starts, masked_starts,
        )  # fmt: skip
        if not sound:
            raise DataError(
                f"training data: offsets of sequences lead out of their file, or over {max_seqlen} tokens; find the "
                "damaged file with python -m input_preprocessing verify"
            )
    np.cumsum(starts, out=starts)
    np.cumsum(masked_starts, out=masked_starts)
    tokens = np.empty((3, int(starts[-1])), np.int32)  # ids, segments, positions
    masked_positions = np.empty(int(masked_starts[-1]), np.int32)
    masked_labels = np.empty(int(masked_starts[-1]), np.int64)
    for records, where in zip(sources, places, strict=True):
        smallest, largest = _copy_sequences(
            records.input_ids, records.masked_lm_positions, records.masked_lm_ids,
            where, heads, starts, masked_starts, tokens, masked_positions, masked_labels,
        )  # fmt: skip
        if vocab_size is not None and not 0 <= smallest <= largest < vocab_size:
            raise DataError(
                f"token ids {smallest} to {largest} in the training data, and bert_config.json has vocab_size "
                f"{vocab_size}: the data and BERT_CONFIG are of different vocabularies"
            )
    return PretrainingBatch(
        input_ids=torch.from_numpy(tokens[0]),
        segment_ids=torch.from_numpy(tokens[1]),
        position_ids=torch.from_numpy(tokens[2]),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        masked_positions=torch.from_numpy(masked_positions),
        masked_labels=torch.from_numpy(masked_labels),
        next_sentence_labels=torch.from_numpy(heads[_NEXT_SENTENCE]),
        max_seqlen=max_seqlen,
        num_tokens=int(starts[-1]),
        num_sequences=len(sequences),
        num_masked=int(masked_starts[-1]),
    )


@compiled_for(
    *[array("int64", readonly=True)] * 2, array("int16", readonly=True), array("int8", readonly=True),
    *[scalar("int64")] * 3, array("int64"), array("int64"), array("int64", ndim=2), array("int64"), array("int64"),
)  # fmt: skip
def _read_heads(  # type: ignore[no-untyped-def]
    sequence_offsets, masked_offsets, segment_b_start, next_sentence_labels, num_tokens, num_masked, max_seqlen,
    where, sequences, heads, lengths, counts,
):  # fmt: skip
    """Fills `heads` and, one place on, lengths and counts of masked tokens; whether all lie within the records.

    The compiled copy trusts offsets; those of a damaged file must not reach it.
    """
    for i in where:
        sequence = sequences[i]
        begin, end = sequence_offsets[sequence], sequence_offsets[sequence + 1]
        masked_begin, masked_end = masked_offsets[sequence], masked_offsets[sequence + 1]
        if not (0 <= begin <= end <= num_tokens and end - begin <= max_seqlen):
            return False
        if not (0 <= masked_begin <= masked_end <= num_masked and 0 <= segment_b_start[sequence] <= end - begin):
            return False
        heads[_BEGIN, i], heads[_MASKED_BEGIN, i] = begin, masked_begin
        heads[_SEGMENT_B, i], heads[_NEXT_SENTENCE, i] = segment_b_start[sequence], next_sentence_labels[sequence]
        lengths[i + 1], counts[i + 1] = end - begin, masked_end - masked_begin
    return True


_PLACES = array("int64"), array("int64", ndim=2), array("int64"), array("int64")
_INTO = array("int32", ndim=2), array("int32"), array("int64")
_NARROW, _WIDE = array("int16", readonly=True), array("int32", readonly=True)


@compiled_for_each((_NARROW, _NARROW, _NARROW, *_PLACES, *_INTO), (_WIDE, _NARROW, _WIDE, *_PLACES, *_INTO))
def _copy_sequences(  # type: ignore[no-untyped-def]
    input_ids, positions, labels, where, heads, starts, masked_starts, tokens, masked_positions, masked_labels
):
    """Copies one source's sequences to their places ``where`` in the batch; the smallest and largest token id."""
    smallest = largest = 0
    for i in where:  # by slices, which are quick without the compiler too
        start, end = starts[i], starts[i + 1]
        if start == end:
            continue
        begin, segment_b = heads[_BEGIN, i], start + heads[_SEGMENT_B, i]
        source = input_ids[begin : begin + end - start]
        smallest, largest = min(smallest, source.min()), max(largest, source.max())
        tokens[0, start:end] = source
        tokens[1, start:segment_b] = 0
        tokens[1, segment_b:end] = 1
        tokens[2, start:end] = np.arange(end - start)
        first, last, begin = masked_starts[i], masked_starts[i + 1], heads[_MASKED_BEGIN, i]
        if first < last:
            masked_positions[first:last] = positions[begin : begin + last - first] + start
            answers = labels[begin : begin + last - first]
            smallest, largest = min(smallest, answers.min()), max(largest, answers.max())
            masked_labels[first:last] = answers
    return smallest, largest
