"""Record files are read as written, damage is reported in one line, digests catch lost or doubled
sequences.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from bert.data import format as record_format
from bert.data.digests import add_multiset_digests
from bert.data.format import (
    content_digest,
    multiset_digest,
    open_records,
    verify_records,
    write_records,
)
from bert.data.records import DataError, Metadata, concatenate
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


@pytest.mark.parametrize("num_sequences", [0, 1, 17])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_comes_back_as_written(
    tmp_path: Path, num_sequences: int, packed: bool
) -> None:
    records = make_records(num_sequences)
    if packed:
        records = records.with_rows(np.arange(num_sequences + 1))
    written = write_records(tmp_path / "a.hdf5", records, METADATA)
    found, metadata = verify_records(tmp_path / "a.hdf5")
    assert_equal(found, records)
    assert metadata == written
    digests = {"content_digest": "", "multiset_digest": ""}
    assert dataclasses.replace(metadata, **digests) == METADATA


def test_readers_map_the_file_and_copy_nothing(tmp_path: Path) -> None:
    write_records(tmp_path / "a.hdf5", make_records(5), METADATA)
    records, _ = open_records(tmp_path / "a.hdf5")
    assert isinstance(records.input_ids, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        records.input_ids[0] = 1


def resident_file_bytes() -> int:
    """Bytes of mapped files that this process holds in memory, also of files on a tmpfs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    of_files = (line for line in lines if line.startswith(("RssFile", "RssShmem")))
    return sum(int(line.split()[1]) * 1024 for line in of_files)


def test_a_released_file_takes_no_memory_and_reads_as_before(tmp_path: Path) -> None:
    written = make_records(40).select(np.arange(200_000) % 40)
    write_records(tmp_path / "a.hdf5", written, METADATA)
    records, _ = open_records(tmp_path / "a.hdf5")
    before = resident_file_bytes()
    assert_equal(records, written)
    size = (tmp_path / "a.hdf5").stat().st_size
    assert resident_file_bytes() - before > size / 2
    records.release()
    assert resident_file_bytes() - before < size / 10
    assert_equal(records, written)
    written.release()  # nothing is mapped


def test_selection_and_concatenation_keep_each_sequence() -> None:
    records = make_records(9)
    whole, chosen = sequences_of(records), sequences_of(records.select([8, 0, 8]))
    for found, number in zip(chosen, (8, 0, 8), strict=True):
        assert all(map(np.array_equal, found, whole[number]))
    parts = [records.select(range(4)), records.select(range(4, 9))]
    assert_equal(concatenate(parts), records)
    rows = concatenate([records.with_rows([0, 2, 9]), records.with_rows([0, 9])])
    assert rows.row_offsets.tolist() == [0, 2, 9, 18]


def test_multiset_digest_ignores_order_and_adds_up() -> None:
    records = make_records(20)
    order = np.random.default_rng(1).permutation(20)
    assert multiset_digest(records.select(order)) == multiset_digest(records)
    halves = order[:7], order[7:]
    parts = [multiset_digest(records.select(half)) for half in halves]
    assert add_multiset_digests(parts) == multiset_digest(records)


def test_multiset_digest_sees_every_field_and_every_loss() -> None:
    records = make_records(20)
    changed = []
    for name in ("input_ids", "segment_b_start", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels"):  # fmt: skip
        values = getattr(records, name).copy()
        values[3] ^= 1
        changed.append(dataclasses.replace(records, **{name: values}))
    changed += [records.select(range(19)), records.select([*range(19), 18])]
    moved = records.masked_lm_offsets.copy()
    moved[5] += 1
    changed.append(dataclasses.replace(records, masked_lm_offsets=moved))
    assert multiset_digest(records) not in map(multiset_digest, changed)


def rewrite(path: Path, **changes: object) -> None:
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
}


@pytest.mark.parametrize("message", BAD_CONTENT)
def test_verification_finds_bad_content(tmp_path: Path, message: str) -> None:
    path, records = tmp_path / "a.hdf5", make_records(9)
    write_records(path, records, METADATA)
    name, change = BAD_CONTENT[message]
    rewrite(path, **{name: change(getattr(records, name))})
    with pytest.raises(DataError, match=message):
        verify_records(path)


def test_verification_finds_rows_that_are_too_long(tmp_path: Path) -> None:
    write_records(tmp_path / "a.hdf5", make_records(9).with_rows([0, 9]), METADATA)
    with pytest.raises(DataError, match="row 0"):
        verify_records(tmp_path / "a.hdf5")


def attributes(path: Path, **values: object) -> None:
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
def test_a_damaged_or_foreign_file_is_refused_on_opening_in_one_line(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "a.hdf5"
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
def version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_format, "VERSION", 2)
    monkeypatch.setattr(record_format, "Metadata", _Metadata2)
    monkeypatch.setattr(record_format, "MEANT_BEFORE", {"language": "any"})


def test_what_a_field_means_in_older_files_is_written_down() -> None:
    of_version_1 = {"max_seq_length", "vocab_md5", "random_seed", "dupe_factor"}
    of_version_1 |= {"source", "content_digest", "multiset_digest"}
    fields = {field.name for field in dataclasses.fields(Metadata)}
    assert fields - of_version_1 == set(record_format.MEANT_BEFORE)


def version_in(path: Path) -> int:
    with h5py.File(path) as file:
        return int(file.attrs["version"])


def test_a_program_of_version_2_reads_both_and_upgrades_in_place(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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
    assert version_in(old) == 2
    assert verify_records(old)[1] == metadata
    assert_equal(verify_records(old)[0], records)
    assert {path: path.read_bytes() for path in kept} == kept
    assert is_index_of(tmp_path, [old, new])
    main(argparse.Namespace(folder=tmp_path, jobs=1))  # nothing left to do


def test_a_damaged_old_file_is_not_upgraded(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    write_records(tmp_path / "a.hdf5", make_records(9), METADATA)
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        file["input_ids"][0] += 1
    before = (tmp_path / "a.hdf5").read_bytes()
    request.getfixturevalue("version_2")
    with pytest.raises(DataError, match="was changed after it was written"):
        main(argparse.Namespace(folder=tmp_path, jobs=1))
    assert (tmp_path / "a.hdf5").read_bytes() == before


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="cannot write"):
        write_records(tmp_path / "none" / "a.hdf5", make_records(3), METADATA)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_records(tmp_path / "a.hdf5", make_records(3), METADATA)
    before = (tmp_path / "a.hdf5").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        write_records(tmp_path / "a.hdf5", make_records(4), METADATA)
    assert [path.name for path in tmp_path.iterdir()] == ["a.hdf5"]
    assert (tmp_path / "a.hdf5").read_bytes() == before


def test_inconsistent_records_are_not_written(tmp_path: Path) -> None:
    starts = np.zeros(2, np.int16)
    records = dataclasses.replace(make_records(3), segment_b_start=starts)
    with pytest.raises(DataError, match="segment_b_start"):
        write_records(tmp_path / "a.hdf5", records, METADATA)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("schema", ["fixed", "variable", "packed", "habana"])
def test_shards_of_others_read_as_the_same_sequences_and_are_counted_unread(
    tmp_path, schema, monkeypatch
):
    records = make_records(13)
    if schema in ("packed", "habana"):
        records = records.with_rows([0, 2, 3, 6, 9, 10, 13])
    path = tmp_path / "part_00000_of_00001"
    write_nvidia(path, records, schema)
    found, metadata = verify_records(path)
    assert_equal(found, records)
    assert metadata.max_seq_length == (64 if schema == "fixed" else 512)
    assert metadata.multiset_digest == multiset_digest(records)
    monkeypatch.delattr("bert.data.shards.open_records")
    assert entry_of(path).rows == records.num_rows


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("input_mask", (0, 3), 0),
        ("input_mask", (1, 0), 2),
        ("next_sentence_weights", (0, 0), 0),
        ("masked_lm_positions", (0, 0), 511),
        ("masked_lm_positions", (0, 0), 600),
        ("masked_lm_positions", (1, 0), 511),
        ("next_sentence_weights", (...,), [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]),
        ("next_sentence_weights", (0,), [0, 1, 1, 0, 0]),
        ("next_sentence_weights", (0,), [2, 0, 0, 0, 0]),
    ],
)
def test_a_packed_table_that_contradicts_itself_is_refused(
    tmp_path: Path, name: str, place: tuple[Any, ...], value: Any
) -> None:
    write_nvidia(tmp_path / "part", make_records(5).with_rows([0, 2, 5]), "habana")
    with h5py.File(tmp_path / "part", "r+") as file:
        file[name][place] = value
    with pytest.raises(DataError, match="is inconsistent"):
        verify_records(tmp_path / "part")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("input_mask", lambda table: table.astype(np.float32), "no whole numbers"),
        ("next_sentence_weights", lambda table: table / 1.0, "no whole numbers"),
        ("next_sentence_weights", lambda table: table[:, 0], "tables of one size"),
        ("next_sentence_weights", lambda table: table[:, :-1], "tables of one size"),
        ("input_mask", lambda table: table[:-1], "tables of one size"),
        ("segment_ids", lambda table: table[:, :-1], "tables of one size"),
        ("masked_lm_positions", lambda table: table[:, :-1], "tables of one size"),
    ],
)
def test_a_packed_table_of_another_shape_or_type_is_refused_in_words(tmp_path, name, change, says):  # fmt: skip
    write_nvidia(tmp_path / "part", make_records(5).with_rows([0, 2, 5]), "habana")
    with h5py.File(tmp_path / "part") as file:
        table = change(file[name][:])
    rewrite(tmp_path / "part", **{name: table})
    with pytest.raises(DataError, match=says):
        verify_records(tmp_path / "part")


def altered(path: Path, schema: str, name: str, place: int, value: int) -> bool:
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
        ("input_ids", 0, 2**31, "part: input_ids has 2147483648, and records hold -2147483648 to 2147483647"),
        ("masked_lm_ids", 0, -(2**31) - 7, "part: masked_lm_ids has -2147483655, and records hold"),
    ],
)  # fmt: skip
def test_shards_of_others_that_contradict_themselves_are_refused_on_opening(
    tmp_path: Path, schema: str, name: str, place: int, value: int, says: str
) -> None:
    """A position of another sequence, a mask with a hole: training would go on with other words."""
    if altered(tmp_path / "part", schema, name, place, value):
        with pytest.raises(DataError, match=says):
            open_records(tmp_path / "part")


@pytest.mark.parametrize(
    "name", ["sequence_offsets", "masked_lm_offsets", "row_offsets"]
)
@pytest.mark.parametrize("value", [-1, 1 << 40, -(1 << 62)])
def test_offsets_that_point_outside_are_found_before_they_are_followed(
    tmp_path: Path, name: str, value: int
) -> None:
    path = tmp_path / "a.hdf5"
    write_records(path, make_records(13).with_rows([0, 2, 3, 6, 9, 10, 13]), METADATA)
    with h5py.File(path, "r+") as file:
        file[name][3] = value
    with pytest.raises(DataError, match=r"a\.hdf5"):
        verify_records(path)


def test_rows_of_no_sequence_in_others_files_come_as_they_are_and_are_counted(
    tmp_path: Path,
) -> None:
    records = make_records(5).with_rows([0, 0, 2, 2, 2, 5, 5])
    write_nvidia(tmp_path / "part", records, "packed")
    found, _ = verify_records(tmp_path / "part")
    assert_equal(found, records)
    assert (found.num_rows, found.num_empty_rows) == (6, 4)
    write_records(tmp_path / "ours.hdf5", records, METADATA)
    with pytest.raises(DataError, match="row 0 is empty"):
        verify_records(tmp_path / "ours.hdf5")


@pytest.mark.parametrize(
    "name", ["packed_input_len", "packed_masked_lm_len", "segment_ids"]
)
def test_nvidia_made_shards_whose_lengths_disagree_are_refused(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "part"
    write_nvidia(path, make_records(4).with_rows([0, 2, 4]), "packed")
    with h5py.File(path, "r+") as file:
        rows = [row[:-1] for row in file[name][:]]
        dtype = rows[0].dtype.type
        del file[name]
        ragged(file, name, rows, dtype)
    with pytest.raises(DataError, match="inconsistent"):
        open_records(path)


def test_wide_ids_are_kept_as_they_are_and_hashed_as_if_narrow_where_they_fit(
    tmp_path: Path,
) -> None:
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
    write_records(tmp_path / "a.hdf5", wide, METADATA)
    found, _ = verify_records(tmp_path / "a.hdf5")
    assert_equal(found, wide)
    assert found.input_ids.dtype == found.masked_lm_ids.dtype == np.int32
    mixed = concatenate([records, wide])
    assert mixed.input_ids.dtype == np.int32
    added = add_multiset_digests([multiset_digest(records), multiset_digest(wide)])
    assert multiset_digest(mixed) == added
    assert multiset_digest(mixed.select(np.arange(100)[::-1])) == added
    beyond = dataclasses.replace(wide, input_ids=wide.input_ids + (1 << 16))
    assert multiset_digest(beyond) != multiset_digest(wide), "the high halves count"
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        narrow = file["masked_lm_ids"][:].astype(np.int16)
        del file["masked_lm_ids"]
        file["masked_lm_ids"] = narrow
    with pytest.raises(DataError, match="two types"):
        open_records(tmp_path / "a.hdf5")


@SCHEMAS
@pytest.mark.parametrize("name", ["input_ids", "masked_lm_ids"])
def test_nvidia_made_shards_of_a_large_vocabulary_are_read(tmp_path, schema, name):
    assert altered(tmp_path / "part", schema, name, 0, 119_000)
    found, _ = open_records(tmp_path / "part")
    assert found.input_ids.dtype == found.masked_lm_ids.dtype == np.int32
    assert getattr(found, name).max() == 119_000
    other = "masked_lm_ids" if name == "input_ids" else "input_ids"
    assert np.array_equal(getattr(found, other), getattr(make_records(4), other))
