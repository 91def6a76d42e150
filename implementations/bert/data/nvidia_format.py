"""Reader of shards made by NVIDIA's scripts (fixed-length, variable-length, packed), and by
Habana's packing script.

A sequence's length and segment B come from packed_input_len, input_mask or the length of the
variable-length entry, and from segment_ids. Fixed and variable-length files have no count of masked
tokens: it is the number of nonzero positions, since position 0 is [CLS]. Rows without a sequence,
which NVIDIA's packer sometimes leaves, are kept.

Habana's rows (Model-References, pack_pretraining_data_pytorch.py) are tables: input_mask has at
each token the number of its sequence, from 1, and 0 at padding, next_sentence_weights a 1 for each
sequence.
"""

from typing import Any, NamedTuple

import numpy as np

from bert.data.hdf5 import Hdf5File
from bert.data.records import (
    IDS,
    Array,
    DataError,
    Metadata,
    Records,
    id_dtype,
    offsets_of,
)

_COLUMNS: dict[str, Any] = {
    "input_ids": np.int32,
    "segment_ids": np.int8,
    "masked_lm_positions": np.int16,
    "masked_lm_ids": np.int32,
    "next_sentence_labels": np.int8,
}
_PACKED = {  # positions count from the beginning of the row, and need more than int16
    "packed_input_len": np.int64,
    "packed_masked_lm_len": np.int64,
    "masked_lm_positions": np.int64,
}
# Habana's tables, by those that are as large.
_OF_ROWS = {
    "input_mask": "input_ids",
    "segment_ids": "input_ids",
    "next_sentence_weights": "next_sentence_labels",
    "masked_lm_positions": "masked_lm_ids",
}
Columns = dict[str, Array]


class _Sequences(NamedTuple):
    """flat: _COLUMNS without padding, one sequence after the other, masked positions within their
    sequence.

    lengths, masked: tokens and masked tokens of each sequence (N,); rows: offsets of packed rows;
    width: of a row.
    """

    flat: Columns
    lengths: Array
    masked: Array
    rows: Array | None = None
    width: int = 512


def read(file: Hdf5File) -> tuple[Records, Metadata]:
    """Records of a file of one of the four schemas, read into memory.

    Raises:
        DataError: another schema, or lengths that do not add up.
    """
    try:
        return _read(file)
    except DataError:
        raise
    # Ours, or of shapes that do not fit.
    except (ValueError, IndexError, TypeError) as error:
        raise DataError(
            f"{file.path} is inconsistent ({error}); copy or prepare it again"
        ) from error


def _read(file: Hdf5File) -> tuple[Records, Metadata]:
    names = file.datasets.keys()
    if not names >= _COLUMNS.keys():
        present = ", ".join(sorted(names)[:8]) or "nothing"
        raise DataError(
            f"{file.path} holds no training records (found {present}); prepare the data or check the path"
        )
    is_packed = names >= _PACKED.keys()
    flat, entries = {}, {}
    for name, dtype in (_COLUMNS | (_PACKED if is_packed else {})).items():
        flat[name], entries[name] = _numbers(file, name, dtype)
    is_table = flat["input_ids"].ndim == 2
    if is_packed:
        sequences = _packed(flat, entries)
    elif not is_table:
        sequences = _variable_length(flat, entries)
    elif "input_mask" not in names:
        raise ValueError("fixed-length input_ids but no input_mask")
    elif "next_sentence_weights" in names:
        for name in _OF_ROWS.keys() - flat.keys():
            flat[name], _ = _numbers(file, name, np.int16)
        sequences = _tables_of_rows(flat)
    else:
        sequences = _tables(flat, file.read("input_mask")[0])
    max_seq_length = sequences.width
    if not is_table:  # only shards of export_records record the length limit
        max_seq_length = int(file.attributes.get("max_seq_length", sequences.width))
    # These files do not say what they were made of: -1 and 0 stand for unknown.
    metadata = Metadata(
        max_seq_length=max_seq_length, vocab_md5="", random_seed=-1, dupe_factor=0
    )
    return _records(sequences), metadata


def _tables_of_rows(flat: Columns) -> _Sequences:
    """Habana's tables [rows, width], by way of NVIDIA's packed columns.

    Raises:
        ValueError: sequences of a row that do not follow one another, or counts that disagree.
    """
    mask, weights = flat["input_mask"], flat["next_sentence_weights"]
    for name, like in _OF_ROWS.items():
        shape = flat[name].shape
        if shape != flat[like].shape or len(shape) != 2 or shape[0] != len(mask):
            raise ValueError(f"{name} and {like} are not tables of one size")
    real, per_row = mask > 0, mask.max(axis=1, initial=0).astype(np.int64)
    # The number to the left of each token [R, width], 0 before the first: numbers may stay or rise
    # by one.
    first = np.concatenate([np.zeros((len(mask), 1), mask.dtype), mask[:, :-1]], axis=1)
    steps = (mask.astype(np.int64) - first)[real]
    padded_inside = (real[:, 1:] & ~real[:, :-1]).any()
    has_sequence = np.arange(weights.shape[1]) < per_row[:, None]
    if (
        padded_inside
        or not np.isin(steps, (0, 1)).all()
        or not np.array_equal(weights, has_sequence)
    ):
        raise ValueError("input_mask does not number the sequences of a row")
    # Of each token's sequence in the file.
    number = offsets_of(per_row)[:-1, None] - 1 + mask
    masked = flat["masked_lm_ids"] != 0
    # Habana pads ids with 0, which is [PAD] and never a label.
    row, _ = np.nonzero(masked)
    positions = flat["masked_lm_positions"][masked].astype(np.int64)
    outside = (positions < 0) | (positions >= mask.shape[1])
    if outside.any() or not real[row, positions].all():
        raise ValueError("a masked position is outside of its row")
    count = int(per_row.sum())
    columns = {name: flat[name][real] for name in ("input_ids", "segment_ids")}
    columns |= {
        "masked_lm_positions": positions,
        "masked_lm_ids": flat["masked_lm_ids"][masked],
    }
    columns["next_sentence_labels"] = flat["next_sentence_labels"][weights > 0]
    columns["packed_input_len"] = np.bincount(number[real], minlength=count)
    columns["packed_masked_lm_len"] = np.bincount(
        number[row, positions], minlength=count
    )
    sequences = _packed(
        columns, {"input_ids": real.sum(axis=1), "packed_input_len": per_row}
    )
    return sequences._replace(width=mask.shape[1])


def _packed(flat: Columns, entries: Columns) -> _Sequences:
    lengths, masked = flat["packed_input_len"], flat["packed_masked_lm_len"]
    sequences_of_row = entries["packed_input_len"]
    rows, starts = offsets_of(sequences_of_row), offsets_of(lengths)
    tokens_of_row = np.diff(starts[rows])
    if len(masked) != len(lengths) or not np.array_equal(
        tokens_of_row, entries["input_ids"]
    ):
        raise ValueError("packed_input_len does not add up to input_ids")
    if masked.sum() != len(flat["masked_lm_positions"]):
        raise ValueError("packed_masked_lm_len does not add up")
    # First token of each sequence within its row.
    in_row = starts[:-1] - np.repeat(starts[rows[:-1]], sequences_of_row)
    positions = flat["masked_lm_positions"] - np.repeat(in_row, masked)
    flat["masked_lm_positions"] = positions.astype(np.int16)
    if not np.array_equal(flat["masked_lm_positions"], positions):
        raise ValueError("a masked position is outside of its row")
    return _Sequences(flat, lengths, masked, rows)


def _variable_length(flat: Columns, entries: Columns) -> _Sequences:
    flat, masked = _without_padding(flat, entries["masked_lm_positions"])
    return _Sequences(flat, entries["input_ids"], masked)


def _tables(flat: Columns, mask: Array) -> _Sequences:
    """Tables (N, width), padded at the end."""
    width = flat["input_ids"].shape[1]
    lengths = (mask != 0).sum(axis=1)
    is_token = np.arange(width) < lengths[:, None]
    if not np.array_equal(mask, is_token):
        raise ValueError("a row of input_mask is not ones, then zeros")
    flat |= {name: flat[name][is_token] for name in ("input_ids", "segment_ids")}
    num_rows, num_positions = flat["masked_lm_positions"].shape
    flat, masked = _without_padding(flat, np.full(num_rows, num_positions))
    return _Sequences(flat, lengths, masked, width=width)


def _without_padding(flat: Columns, positions_of: Array) -> tuple[Columns, Array]:
    """Masked positions that are not padding (0 is [CLS]), and their number in each sequence, which
    has so many.
    """
    # NVIDIA's own loader counts them so; position 0 is [CLS], which is never masked.
    is_masked = flat["masked_lm_positions"] != 0
    count = len(positions_of)
    owner = np.repeat(np.arange(count), positions_of)
    masked = np.bincount(owner[is_masked.reshape(-1)], minlength=count)
    flat |= {
        name: flat[name][is_masked] for name in ("masked_lm_positions", "masked_lm_ids")
    }
    flat["next_sentence_labels"] = flat["next_sentence_labels"].reshape(-1)
    return flat, masked


def _records(sequences: _Sequences) -> Records:
    flat, lengths = sequences.flat, sequences.lengths
    # All other sizes are compared for every file (format.py).
    if not len(flat["segment_ids"]) == lengths.sum() or not (lengths > 0).all():
        raise ValueError("segment_ids and lengths do not add up")
    sequence_offsets = offsets_of(sequences.lengths)
    dtype = id_dtype(1 + max(int(flat[name].max(initial=0)) for name in IDS))
    segment_b_start = np.zeros(len(sequences.lengths), np.int16)
    # Not without a sequence: reduceat needs a first index.
    if len(sequences.lengths):  # the number of tokens of segment A
        segments = flat["segment_ids"]
        np.add.reduceat(segments == 0, sequence_offsets[:-1], out=segment_b_start)
        falls = 1 + np.flatnonzero(segments[1:] < segments[:-1])
        if (segments & ~1).any() or not np.isin(falls, sequence_offsets).all():
            raise ValueError("segment_ids of a sequence are not zeros, then ones")
    records = Records(
        input_ids=flat["input_ids"].astype(dtype),
        sequence_offsets=sequence_offsets,
        segment_b_start=segment_b_start,
        masked_lm_positions=flat["masked_lm_positions"],
        masked_lm_ids=flat["masked_lm_ids"].astype(dtype),
        masked_lm_offsets=offsets_of(sequences.masked),
        next_sentence_labels=flat["next_sentence_labels"],
    )
    return records.with_rows(sequences.rows)


def _numbers(file: Hdf5File, name: str, dtype: Any) -> tuple[Array, Array]:
    """A dataset as `dtype`: a table unchanged; variable-length entries flattened, with their
    lengths.

    Raises:
        DataError: a number does not fit.
    """
    values, lengths = file.read(name)
    limits = np.iinfo(dtype)
    if values.dtype.kind not in "biu":
        raise DataError(
            f"{file.path}: {name} holds no whole numbers; copy or prepare it again"
        )
    if values.size and values.dtype != dtype:
        # astype would wrap silently: an id beyond the type would become another word.
        low, high = values.min(), values.max()
        if not limits.min <= low <= high <= limits.max:
            odd = high if high > limits.max else low
            raise DataError(
                f"{file.path}: {name} has {odd}, and records hold {limits.min} to {limits.max}; prepare it again"
            )
    return values.astype(dtype), lengths
