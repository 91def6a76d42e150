"""Record files are read as written, damage is reported in one line, digests, which are those of
hashlib, catch lost or doubled sequences.
"""

# The fields of a program of version 2 have texts as types, as in records.py.
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bert.data import format as record_format
from bert.data.digests import add_multiset_digests, sum_of_hashes
from bert.data.format import (
    content_digest,
    multiset_digest,
    open_records,
    verify_records,
    write_records,
)
from bert.data.records import DataError, Metadata, Records, concatenate, offsets_of
from bert.data.shards import entry_of, is_index_of, write_index
from input_preprocessing.records.upgrade import main

from .samples import (
    METADATA,
    assert_equal,
    make_records,
    ragged,
    sequences_of,
    write_nvidia,
)

PACKED = [0, 2, 3, 6, 9, 10, 13]  # rows of 13 sequences


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.hdf5"


@pytest.mark.parametrize("num_sequences", [0, 1, 17])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_comes_back_as_written_and_is_mapped(path, num_sequences, packed):
    records = make_records(num_sequences)
    if packed:
        records = records.with_rows(np.arange(num_sequences + 1))
    written = write_records(path, records, METADATA)
    found, metadata = verify_records(path)
    assert_equal(found, records)
    assert metadata == written
    digests = {"content_digest": "", "multiset_digest": ""}
    assert dataclasses.replace(metadata, **digests) == METADATA
    if num_sequences:
        assert isinstance(found.input_ids, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            found.input_ids[0] = 1


def resident_file_bytes():
    """Bytes of mapped files that this process holds in memory, also of files on a tmpfs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    of_files = (line for line in lines if line.startswith(("RssFile", "RssShmem")))
    return sum(int(line.split()[1]) * 1024 for line in of_files)


def test_a_released_file_takes_no_memory_and_reads_as_before(path):
    written = make_records(40).select(np.arange(200_000) % 40)
    write_records(path, written, METADATA)
    records, _ = open_records(path)
    before = resident_file_bytes()
    assert_equal(records, written)
    size = path.stat().st_size
    assert resident_file_bytes() - before > size / 2
    records.release()
    assert resident_file_bytes() - before < size / 10
    assert_equal(records, written)
    written.release()  # nothing is mapped


def test_selection_and_concatenation_keep_each_sequence():
    records = make_records(9)
    whole, chosen = sequences_of(records), sequences_of(records.select([8, 0, 8]))
    for found, number in zip(chosen, (8, 0, 8), strict=True):
        assert all(map(np.array_equal, found, whole[number]))
    parts = [records.select(range(4)), records.select(range(4, 9))]
    assert_equal(concatenate(parts), records)
    rows = concatenate([records.with_rows([0, 2, 9]), records.with_rows([0, 9])])
    assert rows.row_offsets.tolist() == [0, 2, 9, 18]


def random_records(lengths, counts, seed):
    """Random numbers of all 16 bits, in sequences of these lengths; of an odd seed, some ids of 17 bits."""
    rng = np.random.default_rng(seed)

    def numbers(size):
        return rng.integers(-(2**15), 2**15, size).astype(np.int16)

    def ids(size):
        if not seed % 2:
            return numbers(size)
        return numbers(size).astype(np.int32) + ((rng.random(size) < 0.003) << 16)

    return Records(
        input_ids=ids(sum(lengths)).astype(np.int32 if seed % 2 else np.int16),
        sequence_offsets=offsets_of(lengths),
        segment_b_start=numbers(len(lengths)),
        masked_lm_positions=numbers(sum(counts)),
        masked_lm_ids=ids(sum(counts)).astype(np.int32 if seed % 2 else np.int16),
        masked_lm_offsets=offsets_of(counts),
        next_sentence_labels=numbers(len(lengths)),
    )


def hashed_apart(records):
    total = 0
    for i in range(records.num_sequences):
        begin, end = records.sequence_offsets[i : i + 2]
        first, last = records.masked_lm_offsets[i : i + 2]
        ids, to = records.input_ids[begin:end], records.masked_lm_ids[first:last]
        both = np.concatenate([[0], ids, to])
        dtype = np.int16 if -(2**15) <= both.min() <= both.max() < 2**15 else np.int32
        head = end - begin, last - first, records.segment_b_start[i]
        h = hashlib.blake2b(digest_size=16)
        h.update(np.array([*head, records.next_sentence_labels[i]], np.int16).tobytes())
        h.update(ids.astype(dtype).tobytes())
        h.update(records.masked_lm_positions[first:last].tobytes())
        h.update(to.astype(dtype).tobytes())
        total += int.from_bytes(h.digest(), "little")
    return total % (1 << 128)


SIZES = st.tuples(st.integers(0, 300), st.integers(0, 80))


@settings(max_examples=50, deadline=None)  # the first call compiles
@given(st.lists(SIZES, min_size=1, max_size=8), st.integers(0, 99))
# With a head of four numbers they end where a block does, or nearly.
@example([(60, 0)] * 50, 60)
@example([(61, 0)] * 50, 61)
@example([(123, 0)] * 50, 123)
@example([(124, 0)] * 50, 124)
@example([(125, 0)] * 50, 125)
def test_the_sum_is_that_of_hashlib(sizes, seed):
    records = random_records(*zip(*sizes, strict=True), seed)
    assert sum_of_hashes(records) == hashed_apart(records)


@pytest.mark.parametrize("offsets", [[0, 12, 9], [-1, 3, 10], [0, 5, 11]])
def test_offsets_that_leave_the_arrays_are_refused(offsets):
    records = random_records([5, 5], [2, 2], 0)
    wrong = dataclasses.replace(records, sequence_offsets=np.array(offsets))
    with pytest.raises(ValueError, match="offsets"):
        sum_of_hashes(wrong)


def test_multiset_digest_adds_up_in_any_order_and_sees_every_field_and_every_loss():
    records = make_records(20)
    order = np.random.default_rng(1).permutation(20)
    assert multiset_digest(records.select(order)) == multiset_digest(records)
    parts = [multiset_digest(records.select(half)) for half in (order[:7], order[7:])]
    assert add_multiset_digests(parts) == multiset_digest(records)
    changed = [records.select(range(19)), records.select([*range(19), 18])]
    for name in ("input_ids", "segment_b_start", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels"):  # fmt: skip
        values = getattr(records, name).copy()
        values[3] ^= 1
        changed.append(dataclasses.replace(records, **{name: values}))
    moved = records.masked_lm_offsets.copy()
    moved[5] += 1
    changed.append(dataclasses.replace(records, masked_lm_offsets=moved))
    assert multiset_digest(records) not in map(multiset_digest, changed)


def rewrite(path, **changes):
    """Replaces datasets of a file (None removes one)."""
    with h5py.File(path, "r+") as file:
        for name, value in changes.items():
            del file[name]
            if value is not None:
                file[name] = value


BAD_CONTENT = {
    "segment B outside": ("segment_b_start", lambda of: of + np.int16(100)),
    "neither 0 nor 1": ("next_sentence_labels", lambda of: of + np.int8(2)),
    "position outside": ("masked_lm_positions", lambda of: of + np.int16(64)),
    "not ascending": ("masked_lm_positions", lambda of: of * np.int16(0)),
    "negative token": ("input_ids", lambda of: -of),
    "changed after": ("input_ids", lambda of: of + np.int16(1)),
    "length out of range": ("sequence_offsets", lambda of: of[[0, *range(2, 10), 9]]),
    "row 0": ("row_offsets", lambda of: of[[0, 9]]),  # longer than may be
}


@pytest.mark.parametrize("message", BAD_CONTENT)
def test_verification_finds_bad_content(path, message):
    records = make_records(9).with_rows(np.arange(10))
    write_records(path, records, METADATA)
    name, change = BAD_CONTENT[message]
    rewrite(path, **{name: change(getattr(records, name))})
    with pytest.raises(DataError, match=message):
        verify_records(path)


def attributes(path, **values):
    """Replaces attributes of a file (None removes one)."""
    with h5py.File(path, "r+") as file:
        for name, value in values.items():
            del file.attrs[name]
            if value is not None:
                file.attrs[name] = value


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "no HDF5": lambda path: path.write_bytes(b"\x00" * 1000),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "dataset gone": lambda path: rewrite(path, input_ids=None),
    "wrong type": lambda path: rewrite(path, input_ids=np.zeros(5, np.float32)),
    "offsets too long": lambda path: rewrite(path, sequence_offsets=np.arange(30)),
    "newer version": lambda path: attributes(path, version=99),
    "attribute gone": lambda path: attributes(path, vocab_md5=None),
    "foreign": lambda path: (attributes(path, format="other"), rewrite(path, segment_b_start=None)),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_or_foreign_file_is_refused_on_opening_in_one_line(path, how):
    write_records(path, make_records(9), METADATA)
    DAMAGES[how](path)
    with pytest.raises(DataError, match=r"a\.hdf5") as caught:
        open_records(path)
    assert "\n" not in str(caught.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Metadata2(Metadata):
    """Of a made-up version 2."""

    language: str = "de"


@pytest.fixture
def version_2(monkeypatch):
    monkeypatch.setattr(record_format, "VERSION", 2)
    monkeypatch.setattr(record_format, "Metadata", _Metadata2)
    monkeypatch.setattr(record_format, "MEANT_BEFORE", {"language": "any"})


def test_what_a_field_means_in_older_files_is_written_down():
    of_version_1 = {"max_seq_length", "vocab_md5", "random_seed", "dupe_factor"}
    of_version_1 |= {"source", "content_digest", "multiset_digest"}
    fields = {field.name for field in dataclasses.fields(Metadata)}
    assert fields - of_version_1 == set(record_format.MEANT_BEFORE)


def test_a_program_of_version_2_reads_both_and_upgrades_in_place(tmp_path, request):
    old, new, others = (tmp_path / name for name in ("old.hdf5", "b.hdf5", "c.hdf5"))
    written = write_records(old, make_records(9), METADATA)
    write_nvidia(others, make_records(4), "fixed")
    request.getfixturevalue("version_2")
    write_records(new, make_records(5), _Metadata2(**dataclasses.asdict(METADATA)))
    assert verify_records(new)[1].language == "de"
    records, metadata = verify_records(old)
    assert metadata.language == "any"
    assert metadata.content_digest == written.content_digest
    kept = {path: path.read_bytes() for path in (new, others)}
    write_index(tmp_path, [old, new])
    main(argparse.Namespace(folder=tmp_path, jobs=1))
    with h5py.File(old) as file:
        assert file.attrs["version"] == 2
    assert verify_records(old)[1] == metadata
    assert_equal(verify_records(old)[0], records)
    assert {path: path.read_bytes() for path in kept} == kept
    assert is_index_of(tmp_path, [old, new])
    main(argparse.Namespace(folder=tmp_path, jobs=1))  # nothing left to do


def test_a_damaged_old_file_is_not_upgraded(path, request):
    write_records(path, make_records(9), METADATA)
    with h5py.File(path, "r+") as file:
        file["input_ids"][0] += 1
    before = path.read_bytes()
    request.getfixturevalue("version_2")
    with pytest.raises(DataError, match="was changed after it was written"):
        main(argparse.Namespace(folder=path.parent, jobs=1))
    assert path.read_bytes() == before


def test_a_failed_write_leaves_nothing(path, monkeypatch):
    with pytest.raises(DataError, match="cannot write"):
        write_records(path.parent / "none" / "a.hdf5", make_records(3), METADATA)
    write_records(path, make_records(3), METADATA)
    before = path.read_bytes()
    starts = np.zeros(2, np.int16)
    inconsistent = dataclasses.replace(make_records(3), segment_b_start=starts)
    with pytest.raises(DataError, match="segment_b_start"):
        write_records(path, inconsistent, METADATA)
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        write_records(path, make_records(4), METADATA)
    assert [file.name for file in path.parent.iterdir()] == ["a.hdf5"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("schema", ["fixed", "variable", "packed", "habana"])
def test_shards_of_others_read_alike_and_are_counted(tmp_path, schema, monkeypatch):
    records = make_records(13)
    if schema in ("packed", "habana"):
        records = records.with_rows(PACKED)
    path = tmp_path / "part_00000_of_00001"
    write_nvidia(path, records, schema)
    found, metadata = verify_records(path)
    assert_equal(found, records)
    assert metadata.max_seq_length == (64 if schema == "fixed" else 512)
    assert metadata.multiset_digest == multiset_digest(records)
    monkeypatch.delattr("bert.data.shards.open_records")
    assert entry_of(path).rows == records.num_rows


def at(*place_and_value):
    """A change of a table at one place."""
    *place, value = place_and_value

    def change(table):
        table[tuple(place)] = value
        return table

    return change


SIZE, TYPE, WRONG = "tables of one size", "no whole numbers", "is inconsistent"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("input_mask", at(0, 3, 0), WRONG),
        ("input_mask", at(1, 0, 2), WRONG),
        ("next_sentence_weights", at(0, 0, 0), WRONG),
        ("masked_lm_positions", at(0, 0, 511), WRONG),
        ("masked_lm_positions", at(0, 0, 600), WRONG),
        ("masked_lm_positions", at(1, 0, 511), WRONG),
        ("next_sentence_weights", at(..., [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]), WRONG),
        ("next_sentence_weights", at(0, [0, 1, 1, 0, 0]), WRONG),
        ("next_sentence_weights", at(0, [2, 0, 0, 0, 0]), WRONG),
        ("input_mask", lambda table: table.astype(np.float32), TYPE),
        ("next_sentence_weights", lambda table: table / 1.0, TYPE),
        ("next_sentence_weights", lambda table: table[:, 0], SIZE),
        ("next_sentence_weights", lambda table: table[:, :-1], SIZE),
        ("input_mask", lambda table: table[:-1], SIZE),
        ("segment_ids", lambda table: table[:, :-1], SIZE),
        ("masked_lm_positions", lambda table: table[:, :-1], SIZE),
    ],
)
def test_a_packed_table_that_contradicts_itself_is_refused(path, name, change, says):
    write_nvidia(path, make_records(5).with_rows([0, 2, 5]), "habana")
    with h5py.File(path) as file:
        table = change(file[name][:])
    rewrite(path, **{name: table})
    with pytest.raises(DataError, match=says):
        verify_records(path)


def altered(path, schema, name, place, value):
    """Writes four sequences in a layout, and another number in the second; False if it has none."""
    records = make_records(4)
    packed = records.with_rows([0, 2, 4]) if schema == "packed" else records
    write_nvidia(path, packed, schema)
    with h5py.File(path, "r+") as file:
        if name not in file:
            return False
        rows = [np.array(row, np.int64) for row in file[name][:]]
        rows[1][place if rows[1].ndim else ...] = value  # a sequence has one label
        del file[name]
        if schema == "fixed" or rows[1].ndim == 0:
            file[name] = np.stack(rows)
        else:
            ragged(file, name, rows, np.int64)
    return True


SCHEMAS = pytest.mark.parametrize("schema", ["fixed", "variable", "packed"])


@SCHEMAS
@pytest.mark.parametrize(
    ("name", "place", "value", "says"),
    [
        ("masked_lm_positions", 0, 64, "masked position outside"),
        ("masked_lm_positions", 0, -3, "masked position outside"),
        ("masked_lm_positions", 0, 65_537, "outside of its row|records hold"),
        ("input_mask", 3, 0, "not ones, then zeros"),
        ("input_mask", 3, 2, "not ones, then zeros"),
        ("next_sentence_labels", 0, 77, "neither 0 nor 1"),
        ("segment_ids", 0, 1, "not zeros, then ones"),
        ("segment_ids", 0, -1, "not zeros, then ones"),
        ("input_ids", 0, 2**31, r"hdf5: input_ids has 2147483648, .* hold -2147483648 to 2147483647"),
        ("masked_lm_ids", 0, -(2**31) - 7, "hdf5: masked_lm_ids has -2147483655"),
    ],
)  # fmt: skip
def test_contradictory_shards_are_refused(path, schema, name, place, value, says):
    """A position of another sequence, a mask with a hole: training would go on with other words."""
    if altered(path, schema, name, place, value):
        with pytest.raises(DataError, match=says):
            open_records(path)


@pytest.mark.parametrize("name", ["sequence_offsets", "masked_lm_offsets", "row_offsets"])  # fmt: skip
@pytest.mark.parametrize("value", [-1, 1 << 40, -(1 << 62)])
def test_offsets_that_point_outside_are_not_followed(path, name, value):
    write_records(path, make_records(13).with_rows(PACKED), METADATA)
    with h5py.File(path, "r+") as file:
        file[name][3] = value
    with pytest.raises(DataError, match=r"a\.hdf5"):
        verify_records(path)


def test_rows_of_no_sequence_in_others_files_come_as_they_are_and_are_counted(path):
    records = make_records(5).with_rows([0, 0, 2, 2, 2, 5, 5])
    write_nvidia(path, records, "packed")
    found, _ = verify_records(path)
    assert_equal(found, records)
    assert (found.num_rows, found.num_empty_rows) == (6, 4)
    write_records(path, records, METADATA)
    with pytest.raises(DataError, match="row 0 is empty"):
        verify_records(path)


@pytest.mark.parametrize("name", ["packed_input_len", "packed_masked_lm_len", "segment_ids"])  # fmt: skip
def test_nvidia_made_shards_whose_lengths_disagree_are_refused(path, name):
    write_nvidia(path, make_records(4).with_rows([0, 2, 4]), "packed")
    with h5py.File(path, "r+") as file:
        rows = [row[:-1] for row in file[name][:]]
        del file[name]
        ragged(file, name, rows, rows[0].dtype.type)
    with pytest.raises(DataError, match="inconsistent"):
        open_records(path)


def test_wide_ids_are_kept_as_they_are_and_hashed_as_if_narrow_where_they_fit(path):
    records = make_records(50, seed=3)
    # Of files made before there were wide ids.
    assert content_digest(records) == "cf6be7b466d9dfabe77ea2e821171435"
    assert multiset_digest(records) == "d9cbd738871cfd8933a6e5df50069e62"
    names = "input_ids", "masked_lm_ids"
    ids = {name: getattr(records, name).astype(np.int32) for name in names}
    stored = dataclasses.replace(records, **ids)
    assert multiset_digest(stored) == multiset_digest(records)
    moved = zip(ids.items(), (40_000, 90_000), strict=True)
    further = {name: values + by for (name, values), by in moved}
    wide = dataclasses.replace(stored, **further)
    write_records(path, wide, METADATA)
    found, _ = verify_records(path)
    assert_equal(found, wide)
    assert found.input_ids.dtype == found.masked_lm_ids.dtype == np.int32
    mixed = concatenate([records, wide])
    assert mixed.input_ids.dtype == np.int32
    added = add_multiset_digests([multiset_digest(records), multiset_digest(wide)])
    assert multiset_digest(mixed) == added
    assert multiset_digest(mixed.select(np.arange(100)[::-1])) == added
    beyond = dataclasses.replace(wide, input_ids=wide.input_ids + (1 << 16))
    assert multiset_digest(beyond) != multiset_digest(wide), "the high halves count"
    rewrite(path, masked_lm_ids=records.masked_lm_ids)
    with pytest.raises(DataError, match="two types"):
        open_records(path)


@SCHEMAS
@pytest.mark.parametrize("name", ["input_ids", "masked_lm_ids"])
def test_nvidia_made_shards_of_a_large_vocabulary_are_read(path, schema, name):
    assert altered(path, schema, name, 0, 119_000)
    found, _ = open_records(path)
    assert found.input_ids.dtype == found.masked_lm_ids.dtype == np.int32
    assert getattr(found, name).max() == 119_000
    other = "masked_lm_ids" if name == "input_ids" else "input_ids"
    assert np.array_equal(getattr(found, other), getattr(make_records(4), other))
