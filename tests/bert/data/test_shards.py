"""Thousands of files start immediately from their index, and changed files are detected."""

from __future__ import annotations

import json
import os

import h5py
import numpy as np
import pytest

from bert.data import shards
from bert.data.format import write_records
from bert.data.records import DataError, Metadata
from bert.data.shards import Shards, list_bins, list_shards, write_index

from .samples import make_records as made_up
from .samples import write_nvidia

METADATA = Metadata(max_seq_length=48, vocab_md5="0" * 32, random_seed=0, dupe_factor=1)


@pytest.fixture
def folder(tmp_path, make_records):
    for number in range(4):
        records = make_records(5 + number, number % 2 == 0)
        write_records(tmp_path / f"part_{number}.hdf5", records, METADATA)
    return tmp_path


def opened(folder):
    return Shards(list_shards(folder, "DATADIR"), 48)


def test_index_and_files_agree(folder):
    without = opened(folder).row_counts()
    write_index(folder, list_shards(folder, "DATADIR"))
    assert np.array_equal(opened(folder).row_counts(), without)
    paths = list_shards(folder, "DATADIR")
    counts = [shards.open_records(path)[0].num_rows for path in paths]
    assert opened(folder).row_counts().tolist() == counts


def test_with_an_index_only_the_first_file_is_opened(folder, monkeypatch):
    write_index(folder, list_shards(folder, "DATADIR"))
    calls = []
    monkeypatch.setattr(shards, "open_records", lambda path, open_records=shards.open_records: (
        calls.append(path.name), open_records(path))[1])  # fmt: skip
    monkeypatch.setattr(shards, "open_hdf5", None)
    source = opened(folder)
    source.row_counts()
    assert calls == ["part_0.hdf5"]
    assert source.vocab_md5 == "0" * 32


def test_a_file_the_index_does_not_know_is_counted(folder, make_records):
    write_index(folder, list_shards(folder, "DATADIR")[:3])
    assert len(opened(folder).row_counts()) == 4
    assert opened(folder).row_counts()[3] == make_records(8, False).num_rows


@pytest.mark.parametrize("same_rows", [True, False])
def test_a_file_that_is_not_the_one_of_the_index_is_an_error(
    folder, make_records, same_rows
):
    write_index(folder, list_shards(folder, "DATADIR"))
    records = make_records(6 if same_rows else 7, False, seed=9)
    write_records(folder / "part_1.hdf5", records, METADATA)
    source = opened(folder)
    source.row_counts()
    with pytest.raises(DataError, match=r"part_1\.hdf5 is not the file"):
        _ = source[1]


HEAD = '{"format": "bert-records-index", "version": 1, "files": '
UNREADABLE = ["", "{}", "[1]", "[" * 100_000, HEAD + '{"a": 1}}']
UNREADABLE += [HEAD + '{"a": [1e400, "x"]}}', HEAD.replace("1", "99") + "{}}"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_an_index_that_cannot_be_read_is_left_aside(folder, text):
    expected = opened(folder).row_counts()
    (folder / "index.json").write_text(text)
    assert np.array_equal(opened(folder).row_counts(), expected)


def test_data_have_one_identity_with_an_index_and_without(folder, make_records):
    known = opened(folder).identity()
    write_index(folder, list_shards(folder, "DATADIR"))
    assert opened(folder).identity() == known
    index = json.loads((folder / "index.json").read_text())
    index["files"] = {name: [rows, ""] for name, (rows, _) in index["files"].items()}
    (folder / "index.json").write_text(json.dumps(index))
    assert opened(folder).identity() == known, "an index without digests"
    (folder / "index.json").unlink()
    path = folder / "part_1.hdf5"
    size = path.stat().st_size
    write_records(path, make_records(6, False, seed=9), METADATA)
    assert path.stat().st_size == size
    assert opened(folder).identity() != known, "other contents"


def test_an_index_that_is_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "index.json")
    assert len(opened(folder).row_counts()) == 4
    assert not shards.is_index_of(folder, list_shards(folder, "DATADIR"))


def test_counting_rows_of_a_broken_or_foreign_file_says_so(folder):
    (folder / "part_2.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(DataError, match=r"part_2\.hdf5 cannot be read"):
        opened(folder).row_counts()
    with h5py.File(folder / "part_2.hdf5", "w") as file:
        file["something"] = [1]
    with pytest.raises(DataError, match=r"part_2\.hdf5"):
        opened(folder).row_counts()


def test_few_files_stay_open_and_all_can_be_read(folder, monkeypatch):
    monkeypatch.setattr(shards, "_MAX_OPEN", 2)
    source = opened(folder)
    for number in (0, 1, 2, 3, 0, 3):
        assert source[number].num_rows == source.row_counts()[number]
    assert source._opened.cache_info().currsize == 2


def test_bins_are_the_folders_named_by_length(folder, make_records):
    for length in ("128", "48", "256"):
        (folder / length).mkdir()
        write_records(folder / length / "part_0.hdf5", make_records(3, False), METADATA)
    found = [[path.parent.name for path in files] for files in list_bins(folder, "D")]
    assert found == [["48"], ["128"], ["256"]]
    with pytest.raises(DataError, match="no bins"):
        list_bins(folder / "128", "DATADIR_PHASE2")


@pytest.mark.parametrize(
    ("name", "place", "chosen"),
    [("sequence_offsets", 3, [2, 3]), ("masked_lm_offsets", 2, [1])],
)
def test_offsets_of_a_damaged_file_are_an_error_not_a_crash(
    name, place, chosen, make_records, batch_of
):
    records = make_records(5, False)
    getattr(records, name)[place] += 10**6
    with pytest.raises(DataError, match="offsets"):
        batch_of(records, chosen)


def test_test_shards_beside_training_shards_are_skipped_with_a_message(
    tmp_path, make_records, capsys
):
    for name in ("wiki_training_0", "wiki_training_1", "wiki_test_0"):
        write_records(tmp_path / f"{name}.hdf5", make_records(3, False), METADATA)
    found = list_shards(tmp_path, "DATADIR_PHASE2")
    assert [path.stem for path in found] == ["wiki_training_0", "wiki_training_1"]
    told, used = capsys.readouterr().err, "2 *_training_* files are used"
    assert told.startswith(f"bert: DATADIR_PHASE2={tmp_path}: {used}, 1 *_test_* ")
    assert [path.stem for path in list_shards(tmp_path, "EVALDIR")] == ["wiki_test_0"]
    for path in found:
        path.unlink()
    capsys.readouterr()
    (left,) = list_shards(tmp_path, "DATADIR_PHASE2")
    assert left.stem == "wiki_test_0"
    assert not capsys.readouterr().err


def test_rows_of_no_sequence_are_counted_once_a_file(tmp_path, capsys):
    write_nvidia(tmp_path / "part_0", made_up(6).with_rows([0, 0, 3, 3, 6]), "packed")
    source = Shards([tmp_path / "part_0"], 512)
    assert source.row_counts().tolist() == [4]
    assert source[0].num_rows == 4
    source._opened.cache_clear()
    assert source[0].num_rows == 4
    (told,) = capsys.readouterr().err.splitlines()
    warning = f"bert: warning: {tmp_path / 'part_0'}: 2 of 4 rows hold no sequence"
    assert told.startswith(warning)
    write_nvidia(tmp_path / "part_1", made_up(0).with_rows([0, 0]), "packed")
    with pytest.raises(DataError, match="1 rows and no sequence"):
        Shards([tmp_path / "part_1"], 512)[0]
