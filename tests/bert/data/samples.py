"""Made-up records, in files in the layouts of NVIDIA's scripts, and as a source of training data."""

import dataclasses
import itertools
from collections import defaultdict

import h5py
import numpy as np

from bert.data.format import write_records
from bert.data.loader import LoaderConfig, TrainingData
from bert.data.records import DataError, Metadata, Records, offsets_of
from bert.data.sampler import Sampler

FACTS = {"max_seq_length": 64, "vocab_md5": "ab" * 16, "random_seed": 12345}
METADATA = Metadata(**FACTS, dupe_factor=2, source=(("part-0", "cd" * 16),))


def make_records(num_sequences, seed=0):
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
        sequence_offsets=offsets_of(lengths),
        segment_b_start=np.array([rng.integers(2, n - 1) for n in lengths], np.int16),
        masked_lm_positions=np.concatenate([np.zeros(0), *masked]).astype(np.int16),
        masked_lm_ids=rng.integers(1000, 30522, sum(counts)).astype(np.int16),
        masked_lm_offsets=offsets_of(counts),
        next_sentence_labels=rng.integers(0, 2, num_sequences).astype(np.int8),
    )


def assert_equal(left, right):
    for field in dataclasses.fields(Records):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        assert (ours is None) == (theirs is None), field.name
        if ours is not None:
            assert np.array_equal(ours, theirs), field.name
            assert ours.dtype == theirs.dtype, field.name


def ragged(file, name, rows, dtype):
    data = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        data[i] = row.astype(dtype)
    file.create_dataset(name, data=data, dtype=h5py.vlen_dtype(np.dtype(dtype)))


def sequences_of(records):
    """(ids, segment ids, masked positions, masked ids) of each sequence."""
    found = []
    for i in range(records.num_sequences):
        ids = records.input_ids[slice(*records.sequence_offsets[i : i + 2])]
        segments = (np.arange(len(ids)) >= records.segment_b_start[i]).astype(np.int8)
        masked = slice(*records.masked_lm_offsets[i : i + 2])
        positions, labels = records.masked_lm_positions, records.masked_lm_ids
        found.append((ids, segments, positions[masked], labels[masked]))
    return found


def columns(records, row):
    """The numbers of a row's sequences, one after the other, by the names of all tables."""
    begin, found, sequences = 0, defaultdict(list), sequences_of(records)
    for place, i in enumerate(row):
        ids, segments, positions, labels = sequences[i]
        each = {
            "input_ids": ids, "input_mask": np.full(len(ids), place + 1), "segment_ids": segments,
            "positions": np.arange(len(ids)), "masked_lm_positions": begin + positions, "masked_lm_ids": labels,
            "next_sentence_labels": records.next_sentence_labels[i : i + 1], "next_sentence_positions": [begin],
            "next_sentence_weights": [1], "packed_input_len": [len(ids)], "packed_masked_lm_len": [len(labels)],
        }  # fmt: skip
        for name, values in each.items():
            found[name].append(values)
        begin += len(ids)
    return {name: np.concatenate(parts) for name, parts in found.items()}


IDS = dict.fromkeys(("input_ids", "segment_ids"), 64)
MASKED = dict.fromkeys(("masked_lm_positions", "masked_lm_ids"), 20)
NEXT = ("next_sentence_labels", "next_sentence_positions", "next_sentence_weights")
# Widths of tables, 0 of values of variable length.
LAYOUTS = {
    "fixed": IDS | MASKED | {"input_mask": 64},
    "variable": dict.fromkeys(IDS | MASKED, 0),
    "packed": dict.fromkeys((*IDS, *MASKED, "packed_input_len", "packed_masked_lm_len", NEXT[0]), 0),
    "habana": dict.fromkeys((*IDS, "input_mask", "positions"), 512) | dict.fromkeys(MASKED, 100) | dict.fromkeys(NEXT, 5),
}  # fmt: skip


def write_nvidia(path, records, schema):
    """Writes the records in one of the layouts of NVIDIA's scripts, or of Habana's: up to 5 sequences
    of together 512 tokens a row.
    """
    packed = schema in ("packed", "habana")
    bounds = records.row_offsets if packed else np.arange(records.num_sequences + 1)
    rows = [columns(records, range(*pair)) for pair in itertools.pairwise(bounds)]
    with h5py.File(path, "w") as file:
        for name, width in LAYOUTS[schema].items():
            values = [row.get(name, np.zeros(0)) for row in rows]
            if not width:
                narrow = name in ("segment_ids", "next_sentence_labels")
                ragged(file, name, values, np.int8 if narrow else np.int16)
                continue
            table = [np.pad(each, (0, width - len(each))) for each in values]
            dtype = np.int32 if schema == "habana" else np.int16
            file[name] = np.array(table, dtype).reshape(-1, width)
        if not packed:
            file["next_sentence_labels"] = records.next_sentence_labels


def source_of(folder, *parts, metadata=METADATA):
    """A folder of record files, part_0.hdf5 and on."""
    folder.mkdir()
    for number, records in enumerate(parts):
        write_records(folder / f"part_{number}.hdf5", records, metadata)
    return folder


class Files(list):
    """Records in a list, as ``Shards``, with a bin per file."""

    vocab_md5 = ""

    @property
    def bins(self):
        return [np.array([number]) for number in range(len(self))]

    def row_counts(self):
        return np.array([records.num_rows for records in self])


def sampler_of(source, config, seed=3, rank=0, world=1):
    return Sampler(source.row_counts(), config.rows_per_step, seed, rank, world)


def loader_of(source, finish=None, sampler=None, first_step=1, masks=None, **config):
    """Training data of the tiny vocabulary, by a LoaderConfig of 48 tokens."""
    settings = LoaderConfig(**{"max_seq_length": 48, "gradient_steps": 1} | config)
    sampler = sampler or sampler_of(source, settings)
    finish = finish or (lambda batch: batch)
    return TrainingData(source, sampler, settings, 211, first_step, finish, masks)


def fails_at(number, made):
    """A last step of the loader that keeps its batches, and fails at that one."""

    def finish(batch):
        made.append(batch)
        if len(made) == number:
            raise DataError("a damaged file")
        return batch

    return finish
