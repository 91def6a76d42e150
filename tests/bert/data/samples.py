"""Made-up records, and files of them in the layouts of NVIDIA's scripts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import h5py
import numpy as np

from bert.data.format import write_records
from bert.data.records import Metadata, Records

FACTS = {"max_seq_length": 64, "vocab_md5": "ab" * 16, "random_seed": 12345}
METADATA = Metadata(**FACTS, dupe_factor=2, source=(("part-0", "cd" * 16),))


def make_records(num_sequences: int, seed: int = 0) -> Records:
    """Random sequences of 5 to 64 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 65, num_sequences)
    masked = []
    for n in lengths:
        count = max(1, n * 15 // 100)
        masked.append(np.sort(rng.choice(np.arange(1, n), size=count, replace=False)))
    counts = [len(positions) for positions in masked]
    return Records(
        input_ids=rng.integers(1000, 30522, lengths.sum()).astype(np.int16),
        sequence_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        segment_b_start=np.array([rng.integers(2, n - 1) for n in lengths], np.int16),
        masked_lm_positions=np.concatenate([np.zeros(0), *masked]).astype(np.int16),
        masked_lm_ids=rng.integers(1000, 30522, sum(counts)).astype(np.int16),
        masked_lm_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        next_sentence_labels=rng.integers(0, 2, num_sequences).astype(np.int8),
    )


def assert_equal(left: Records, right: Records) -> None:
    for field in dataclasses.fields(Records):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        assert (ours is None) == (theirs is None), field.name
        if ours is not None:
            assert np.array_equal(ours, theirs), field.name
            assert ours.dtype == theirs.dtype, field.name


def ragged(file: h5py.File, name: str, rows: list[np.ndarray], dtype: type) -> None:
    data = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        data[i] = row.astype(dtype)
    file.create_dataset(name, data=data, dtype=h5py.vlen_dtype(np.dtype(dtype)))


def sequences_of(
    records: Records,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(ids, segment ids, masked positions, masked ids) of each sequence."""
    found = []
    for i in range(records.num_sequences):
        ids = records.input_ids[slice(*records.sequence_offsets[i : i + 2])]
        segments = (np.arange(len(ids)) >= records.segment_b_start[i]).astype(np.int8)
        masked = slice(*records.masked_lm_offsets[i : i + 2])
        positions, labels = records.masked_lm_positions, records.masked_lm_ids
        found.append((ids, segments, positions[masked], labels[masked]))
    return found


def write_habana(file: h5py.File, records: Records) -> None:
    """Packed rows as the tables of Habana's packing script: up to 5 sequences of together 512
    tokens a row.
    """
    assert records.row_offsets is not None
    sequences, rows = sequences_of(records), records.num_rows
    widths = {"input_ids": 512, "input_mask": 512, "segment_ids": 512, "positions": 512,
              "masked_lm_positions": 100, "masked_lm_ids": 100, "next_sentence_labels": 5,
              "next_sentence_positions": 5, "next_sentence_weights": 5}  # fmt: skip
    tables = {name: np.zeros((rows, width), np.int32) for name, width in widths.items()}
    for row in range(rows):
        at = masked_at = 0
        for place, i in enumerate(range(*records.row_offsets[row : row + 2])):
            ids, segments, positions, labels = sequences[i]
            span = slice(at, at + len(ids))
            masked = slice(masked_at, masked_at + len(labels))
            tables["input_ids"][row, span] = ids
            tables["input_mask"][row, span] = place + 1
            tables["segment_ids"][row, span] = segments
            tables["positions"][row, span] = np.arange(len(ids))
            tables["masked_lm_positions"][row, masked] = at + positions
            tables["masked_lm_ids"][row, masked] = labels
            tables["next_sentence_positions"][row, place] = at
            tables["next_sentence_labels"][row, place] = records.next_sentence_labels[i]
            tables["next_sentence_weights"][row, place] = 1
            at, masked_at = span.stop, masked.stop
    for name, table in tables.items():
        file[name] = table


def write_nvidia(path: Path, records: Records, schema: str) -> None:
    """Writes the records in one of the layouts of NVIDIA's scripts."""
    sequences = sequences_of(records)
    with h5py.File(path, "w") as file:
        if schema == "fixed":
            widths = {"input_ids": 64, "segment_ids": 64, "masked_lm_positions": 20, "masked_lm_ids": 20}  # fmt: skip
            for column, (name, width) in enumerate(widths.items()):
                table = np.zeros((len(sequences), width), np.int16)
                for row, sequence in zip(table, sequences, strict=True):
                    row[: len(sequence[column])] = sequence[column]
                file[name] = table
            mask = np.arange(64)[None] < records.sequence_lengths[:, None]
            file["input_mask"] = mask.astype(np.int8)
            file["next_sentence_labels"] = records.next_sentence_labels
            return
        if schema == "habana":
            write_habana(file, records)
            return
        types = {"input_ids": np.int16, "segment_ids": np.int8, "masked_lm_positions": np.int16,
                 "masked_lm_ids": np.int16}  # fmt: skip
        if schema == "variable":
            for column, (name, dtype) in enumerate(types.items()):
                ragged(file, name, [sequence[column] for sequence in sequences], dtype)
            file["next_sentence_labels"] = records.next_sentence_labels
            return
        assert records.row_offsets is not None
        rows = [range(*records.row_offsets[i : i + 2]) for i in range(records.num_rows)]
        lengths, counts = records.sequence_lengths, np.diff(records.masked_lm_offsets)
        for column, (name, dtype) in enumerate(types.items()):
            shift = name == "masked_lm_positions"
            packed = []
            for row in rows:
                parts = [np.zeros(0, dtype)]
                for i in row:
                    before = lengths[row.start : i].sum() if shift else 0
                    parts.append(sequences[i][column] + before)
                packed.append(np.concatenate(parts))
            ragged(file, name, packed, dtype)
        of_rows = {"packed_input_len": lengths, "packed_masked_lm_len": counts}
        of_rows["next_sentence_labels"] = records.next_sentence_labels
        for name, values in of_rows.items():
            dtype = np.int8 if name == "next_sentence_labels" else np.int16
            ragged(file, name, [values[row.start : row.stop] for row in rows], dtype)


def source_of(folder: Path, *parts: Records, metadata: Metadata = METADATA) -> Path:
    """A folder of record files, part_0.hdf5 and on."""
    folder.mkdir()
    for number, records in enumerate(parts):
        write_records(folder / f"part_{number}.hdf5", records, metadata)
    return folder
