"""Thousands of files start immediately from their index, and changed files are detected."""

import json
import os
from unittest import mock

import h5py
import numpy as np
import pytest

from bert.data import shards
from bert.data.format import write_records
from bert.data.records import DataError
from bert.data.shards import Shards, list_bins, list_shards, write_index

from ..conftest import METADATA
from .samples import make_records as made_up
from .samples import write_nvidia


@pytest.fixture
def folder(tmp_path, make_records):
    for number in range(4):
        records = make_records(5 + number, number % 2 == 0)
        write_records(tmp_path / f"part_{number}.hdf5", records, METADATA)
    return tmp_path


def opened(folder):
    return Shards(list_shards(folder, "DATADIR"), 48)


def index(folder, files=4):
    write_index(folder, list_shards(folder, "DATADIR")[:files])


@pytest.mark.parametrize("known", [0, 3, 4])
def test_rows_are_counted_by_the_index_or_in_files_that_it_does_not_know(folder, known):
    paths = list_shards(folder, "DATADIR")
    counts = [shards.open_records(path)[0].num_rows for path in paths]
    index(folder, known)
    assert opened(folder).row_counts().tolist() == counts


def test_with_an_index_only_the_first_file_is_opened(folder, monkeypatch):
    index(folder)
    opening = mock.Mock(wraps=shards.open_records)
    monkeypatch.setattr(shards, "open_records", opening)
    monkeypatch.setattr(shards, "open_hdf5", None)
    source = opened(folder)
    source.row_counts()
    assert [path.name for (path,), _ in opening.call_args_list] == ["part_0.hdf5"]
    assert source.vocab_md5 == "0" * 32


@pytest.mark.parametrize("rows", [6, 7])
def test_a_file_other_than_the_indexs_is_an_error(rows, folder, make_records):
    index(folder)
    write_records(folder / "part_1.hdf5", make_records(rows, False, seed=9), METADATA)
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
    index(folder)
    assert opened(folder).identity() == known
    held = json.loads((folder / "index.json").read_text())
    held["files"] = {name: [rows, ""] for name, (rows, _) in held["files"].items()}
    (folder / "index.json").write_text(json.dumps(held))
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
    path = folder / "part_2.hdf5"
    path.write_bytes(b"no HDF5")
    with pytest.raises(DataError, match=r"part_2\.hdf5 cannot be read"):
        opened(folder).row_counts()
    with h5py.File(path, "w") as file:
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


def test_test_shards_among_others_are_skipped(tmp_path, make_records, capsys):
    for name in ("wiki_training_0", "wiki_training_1", "wiki_test_0"):
        write_records(tmp_path / f"{name}.hdf5", make_records(3, False), METADATA)
    found = list_shards(tmp_path, "DATADIR_PHASE2")
    assert [path.stem for path in found] == ["wiki_training_0", "wiki_training_1"]
    told, used = capsys.readouterr().err, "2 *_training_* files are used"
    assert told.startswith(f"bert: DATADIR_PHASE2={tmp_path}: {used}, 1 *_test_* ")
    for path in found:
        path.unlink()
    for name in ("EVALDIR", "DATADIR_PHASE2"):
        assert [path.stem for path in list_shards(tmp_path, name)] == ["wiki_test_0"]
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
