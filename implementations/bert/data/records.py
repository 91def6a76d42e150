"""Sequences in memory: tokens, masks and rows as flat arrays, and what they were made of.

Sequence i is tokens [sequence_offsets[i], sequence_offsets[i + 1]); row r holds the sequences
[row_offsets[r], row_offsets[r + 1]). No padding anywhere. N sequences, R rows, M masked tokens.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class DataError(ValueError):
    """Data that cannot be used; one line: what, where, what to do."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Records:
    """Tokenised and masked sequences, with rows when they are packed.

    Offsets of tokens and masked tokens are absolute in their flat arrays; masked_lm_positions and
    segment_b_start are relative to the first token of their sequence. next_sentence_labels: 1 =
    segment B is a random text. If segment B begins at the end there is none, and the label is
    meaningless.
    """

    # int16 (tokens,); int32 of a vocabulary above 32,768, as masked_lm_ids
    input_ids: Array
    sequence_offsets: Array  # int64 (N + 1,)
    segment_b_start: Array  # int16 (N,)
    masked_lm_positions: Array  # int16 (M,)
    masked_lm_ids: Array  # int16 or int32 (M,)
    masked_lm_offsets: Array  # int64 (N + 1,)
    next_sentence_labels: Array  # int8 (N,)
    row_offsets: Array | None = None  # int64 (R + 1,)

    @property
    def num_sequences(self) -> int:
        return len(self.next_sentence_labels)

    @property
    def num_rows(self) -> int:
        """R; unpacked, every sequence is a row."""
        return (
            self.num_sequences
            if self.row_offsets is None
            else len(self.row_offsets) - 1
        )

    @property
    def num_empty_rows(self) -> int:
        """Rows without a sequence, which NVIDIA's packer sometimes leaves."""
        if self.row_offsets is None:
            return 0
        return int(np.count_nonzero(np.diff(self.row_offsets) == 0))

    @property
    def sequence_lengths(self) -> Array:
        """Tokens of each sequence, int64 (N,)."""
        return np.diff(self.sequence_offsets)

    def select(self, indices: npt.ArrayLike) -> Records:
        """A copy of the sequences `indices` in that order, unpacked."""
        chosen = np.asarray(indices, dtype=np.int64)
        tokens, sequence_offsets = _elements(self.sequence_offsets, chosen)
        masked, masked_lm_offsets = _elements(self.masked_lm_offsets, chosen)
        return Records(
            input_ids=np.take(self.input_ids, tokens),
            sequence_offsets=sequence_offsets,
            segment_b_start=np.take(self.segment_b_start, chosen),
            masked_lm_positions=np.take(self.masked_lm_positions, masked),
            masked_lm_ids=np.take(self.masked_lm_ids, masked),
            masked_lm_offsets=masked_lm_offsets,
            next_sentence_labels=np.take(self.next_sentence_labels, chosen),
        )

    def with_rows(self, row_offsets: npt.ArrayLike | None) -> Records:
        """The same sequences in the given rows (None: unpacked)."""
        rows = None if row_offsets is None else np.asarray(row_offsets, dtype=np.int64)
        return dataclasses.replace(self, row_offsets=rows)

    def release(self) -> None:
        """Drops the pages of mapped files from memory; later reads load them again."""
        for field in dataclasses.fields(self):
            memory = getattr(self, field.name)
            # Down the views to the mapping itself.
            while isinstance(memory, np.ndarray):
                memory = memory.base
            if isinstance(memory, mmap.mmap):
                memory.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Provenance of the records, and their digests, which are filled in on writing."""

    max_seq_length: int
    vocab_md5: str
    random_seed: int
    dupe_factor: int
    source: tuple[
        tuple[str, str], ...
    ] = ()  # (name, md5) of what the records were made from
    content_digest: str = ""
    multiset_digest: str = ""


IDS = ("input_ids", "masked_lm_ids")
# NVIDIA's packed parts have no suffix, its shuffled ones .hdf.
SUFFIXES = {"", ".hdf5", ".hdf", ".h5"}

# Datasets of a file, in the order they are written and digested; IDS may be int32.
DTYPES: dict[str, Any] = {
    "input_ids": np.int16,
    "sequence_offsets": np.int64,
    "segment_b_start": np.int16,
    "masked_lm_positions": np.int16,
    "masked_lm_ids": np.int16,
    "masked_lm_offsets": np.int64,
    "next_sentence_labels": np.int8,
    "row_offsets": np.int64,
}


def id_dtype(vocab_size: int) -> Any:
    """Type of the ids of a vocabulary: int16, or int32 for more than 32,768 tokens."""
    return np.int16 if vocab_size <= 1 << 15 else np.int32


def dtypes_of(parts: Sequence[Records]) -> dict[str, Any]:
    """Types of the datasets of these records together."""
    wide = any(getattr(part, name).dtype == np.int32 for part in parts for name in IDS)
    return {**DTYPES, **dict.fromkeys(IDS, np.int32)} if wide else DTYPES


def offsets_of(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Begin of each ragged row of these lengths, and end of the last: int64 (rows + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def ragged_indices(starts: Array, lengths: Array) -> Array:
    """Indices [start, start + length) of every ragged row, one row after the other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    # Without a loop: a counter over all elements, moved in each row to where that begins.
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(
        starts - ends + lengths, lengths
    )


def _elements(offsets: Array, indices: Array) -> tuple[Array, Array]:
    """Indices of the elements of the ragged rows `indices`, and the offsets of these rows alone."""
    starts = offsets[indices]
    lengths = offsets[indices + 1] - starts
    return ragged_indices(starts, lengths), offsets_of(lengths)


def concatenate(
    parts: Sequence[Records], copied: Callable[[int], None] = lambda part: None
) -> Records:
    """All sequences (and rows, if every part is packed) one after the other. Calls ``copied(i)``
    after part i.
    """
    # Rows of some parts alone would leave the sequences of others without one.
    packed = bool(parts) and all(part.row_offsets is not None for part in parts)
    names = [name for name in DTYPES if name != "row_offsets" or packed]
    flat = [name for name in names if not name.endswith("_offsets")]
    dtypes = dtypes_of(parts)
    joined = {}
    for name in names:
        if name in flat:
            size = sum(len(getattr(part, name)) for part in parts)
            joined[name] = np.empty(size, dtypes[name])
        else:
            lengths = [np.diff(getattr(part, name)) for part in parts]
            joined[name] = offsets_of(np.concatenate(lengths) if lengths else [])
    # One part at a time, so that the caller can release its pages before the next.
    ends = dict.fromkeys(flat, 0)
    for number, part in enumerate(parts):
        for name in flat:
            values = getattr(part, name)
            joined[name][ends[name] : ends[name] + len(values)] = values
            ends[name] += len(values)
        copied(number)
    return Records(**joined)
