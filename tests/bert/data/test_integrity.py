"""Data are what they hold, not what they say of themselves."""

from __future__ import annotations

import os

import h5py
import pytest

from bert.core.dist import DistConfig, World
from bert.data import integrity
from bert.data.format import open_records
from bert.data.records import DataError

from ..ranks import run_ranks

ALONE = World(DistConfig(device="cpu"))


def alter(path):
    """Changes one label in place, and puts size, modification time and attributes back."""
    before = os.stat(path)
    with h5py.File(path, "r+") as file:
        file["masked_lm_ids"][3] ^= 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size


@pytest.fixture
def paths(prepared, tmp_path):
    return sorted((tmp_path / "packed").glob("*.hdf5"))


def test_a_file_altered_under_a_kept_digest_is_named_before_and_after_it_was_proved(
    paths,
):
    integrity.check(dict.fromkeys(paths, ""), ALONE)
    alter(paths[1])
    with pytest.raises(
        DataError, match=r"part_00001_of_00003.hdf5 was changed after it was written"
    ):
        integrity.check(dict.fromkeys(paths, ""), ALONE)
    with pytest.raises(DataError, match="part_00000"):
        integrity.check({paths[0]: "0" * 32}, ALONE)


def test_a_second_proof_reads_nothing_and_half_an_entry_is_none(paths, monkeypatch):
    digest = integrity.digest_of(paths[0])
    (entry,) = (paths[0].parent / integrity.FOLDER).iterdir()
    whole = entry.read_text()
    monkeypatch.setattr(
        integrity, "content_digest", lambda records: pytest.fail("read again")
    )
    assert integrity.digest_of(paths[0]) == digest
    monkeypatch.setattr(integrity, "content_digest", lambda records: "read")
    for text in (
        whole[:-9],
        whole.strip()[:-1] + "\n",
        "",
        whole.replace(" ", " 1", 1),
    ):
        entry.write_text(text)
        assert integrity.digest_of(paths[0]) == "read"


def test_data_that_are_read_only_are_proved_without_a_cache(paths, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(integrity.Path, "mkdir", refuse)
    assert integrity.digest_of(paths[0]) == open_records(paths[0])[1].content_digest


def _check(world, folder):
    """Ranks 0 and 1 see one folder, rank 2 a copy that was altered."""
    mine = folder / ("copy" if world.rank == 2 else "packed")
    with pytest.raises(
        DataError, match=r"rank 2 on \S+: .*/copy/part_00002_of_00003.hdf5 was changed"
    ):
        integrity.check(dict.fromkeys(sorted(mine.glob("*.hdf5")), ""), world)


def test_a_rank_with_other_content_is_named_on_every_rank(paths, tmp_path):
    (tmp_path / "copy").mkdir()
    for path in paths:
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    alter(tmp_path / "copy" / paths[2].name)
    run_ranks(_check, 3, arguments=(tmp_path,))
