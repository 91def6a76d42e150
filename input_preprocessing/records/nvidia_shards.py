"""Writer of the shards that NVIDIA's trainer reads, as bert.data.nvidia_format reads them.

Every dataset has one entry a row, of variable length: input_ids, segment_ids, masked_lm_positions (from the row's first
token), masked_lm_ids, next_sentence_labels, and for packed rows packed_input_len and packed_masked_lm_len, the tokens
and masked tokens of each sequence. Sequences that are not packed have next_sentence_labels as plain numbers.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from bert.data.format import atomic_file
from bert.data.records import Array, DataError, Records


def write_nvidia_shard(path: Path, records: Records, max_seq_length: int) -> None:
    """Writes the records, whole or not at all: packed rows, or sequences of variable length.

    The ids are int16, as NVIDIA's, but int32 of a vocabulary above 32,768. Holds the file in memory.

    Raises:
        DataError: a masked token that the layout cannot tell from padding, or the file cannot be written.
    """
    packed = records.row_offsets is not None
    if not packed and len(zeros := np.flatnonzero(records.masked_lm_positions == 0)):
        sequence = int(np.searchsorted(records.masked_lm_offsets, zeros[0], "right")) - 1
        raise DataError(f"{path}: sequence {sequence} has its first token masked, which NVIDIA's layout takes for none")
    # In memory, not on the disk: HDF5 ends badly on a full one.
    with h5py.File(path.name, "w", driver="core", backing_store=False) as file:
        file.attrs["max_seq_length"] = max_seq_length
        for name, (values, offsets) in _columns(records).items():
            _write_ragged(file, name, values, offsets)
        if not packed:
            file["next_sentence_labels"] = records.next_sentence_labels
        file.flush()
        image = file.id.get_file_image()
    with atomic_file(path) as partial:
        partial.write_bytes(image)


def _columns(records: Records) -> dict[str, tuple[Array, Array]]:
    """Values and offsets of the entries of every dataset of variable length."""
    sequences = np.arange(records.num_sequences + 1) if records.row_offsets is None else records.row_offsets
    lengths, counts = records.sequence_lengths, np.diff(records.masked_lm_offsets)
    tokens, masked = records.sequence_offsets[sequences], records.masked_lm_offsets[sequences]
    in_sequence = np.arange(len(records.input_ids)) - np.repeat(records.sequence_offsets[:-1], lengths)
    segments = (in_sequence >= np.repeat(records.segment_b_start, lengths)).astype(np.int8)
    in_row = records.sequence_offsets[:-1] - np.repeat(tokens[:-1], np.diff(sequences))  # first token of a sequence
    positions = (records.masked_lm_positions + np.repeat(in_row, counts)).astype(np.int16)
    columns = {
        "input_ids": (records.input_ids, tokens),
        "segment_ids": (segments, tokens),
        "masked_lm_positions": (positions, masked),
        "masked_lm_ids": (records.masked_lm_ids, masked),
    }
    if records.row_offsets is not None:
        columns |= {
            "packed_input_len": (lengths.astype(np.int16), sequences),
            "packed_masked_lm_len": (counts.astype(np.int16), sequences),
            "next_sentence_labels": (records.next_sentence_labels, sequences),
        }
    return columns


def _write_ragged(file: h5py.File, name: str, values: Array, offsets: Array) -> None:
    """A dataset whose entry i is values[offsets[i]:offsets[i + 1]]."""
    values = np.asarray(values)
    entries = np.empty(len(offsets) - 1, dtype=object)
    ends = offsets.tolist()
    for i in range(len(entries)):
        entries[i] = values[ends[i] : ends[i + 1]]
    file.create_dataset(name, data=entries, dtype=h5py.vlen_dtype(values.dtype))
