"""Data are what they hold, not what they say of themselves."""

import os
import shutil

import h5py
import pytest

from bert.data import integrity, kept_digests
from bert.data.format import open_records
from bert.data.records import DataError
from bert.data.shards import Shards

from ..plain import alone
from ..ranks import run_ranks
from .samples import make_records, write_nvidia

ALONE = alone()


def alter(path):
    """Changes one label in place, and puts size and modification time back."""
    before = os.stat(path)
    with h5py.File(path, "r+") as file:
        file["masked_lm_ids"][3] ^= 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size


@pytest.fixture
def paths(prepared, tmp_path):
    return sorted((tmp_path / "packed").glob("*.hdf5"))


def test_a_file_altered_under_a_kept_digest_is_named(paths):
    integrity.check(Shards(paths, 64).recorded_digests(), ALONE)
    alter(paths[1])
    with pytest.raises(DataError, match=r"part_00001_of_00003.hdf5 was changed after"):
        integrity.check(Shards(paths, 64).recorded_digests(), ALONE)
    with pytest.raises(DataError, match="part_00000"):
        integrity.check({paths[0]: "0" * 32}, ALONE)


def test_a_second_proof_reads_nothing_and_half_an_entry_is_none(paths, monkeypatch):
    digest = kept_digests.digest_of(paths[0])
    (entry,) = (paths[0].parent / kept_digests.FOLDER).iterdir()
    whole = entry.read_text()
    refused = lambda records: pytest.fail("read again")  # noqa: E731
    monkeypatch.setattr(kept_digests, "content_digest", refused)
    assert kept_digests.digest_of(paths[0]) == digest
    monkeypatch.setattr(kept_digests, "content_digest", lambda records: "read")
    cut, longer = whole.strip()[:-1] + "\n", whole.replace(" ", " 1", 1)
    for text in (whole[:-9], cut, "", longer):
        entry.write_text(text)
        assert kept_digests.digest_of(paths[0]) == "read"


def test_digests_of_read_only_data_are_kept_elsewhere(paths, tmp_path, monkeypatch):
    spare = tmp_path / "logs"
    (paths[0].parent / kept_digests.FOLDER).write_text("")  # root may write anywhere
    known = open_records(paths[0])[1].content_digest
    assert kept_digests.digest_of(paths[0]) == known
    assert kept_digests.digest_of(paths[0], spare) == known
    monkeypatch.setattr(kept_digests, "content_digest", lambda _: "read")
    assert kept_digests.digest_of(paths[0]) == "read"
    assert kept_digests.digest_of(paths[0], spare) == known
    assert kept_digests.digest_of(paths[1], spare) == "read"


def _check(world, folder):
    """Ranks 0 and 1 see one folder, rank 2 a copy that was altered; then each a file of its own
    without a digest, of which that of rank 2 differs.
    """
    mine = folder / ("copy" if world.rank == 2 else "packed")
    digests = Shards(sorted(mine.glob("*.hdf5")), 64).recorded_digests()
    foreign = {folder / str(world.rank) / "part": ""}
    altered = "copy/part_00002_of_00003.hdf5 was changed"
    other = "part has other contents than that of rank 0"
    for given, reason in ((digests, altered), (foreign, other)):
        with pytest.raises(DataError, match=rf"^rank 2 on \S+: .*/{reason}"):
            integrity.check(given, world)


def test_a_rank_with_other_content_is_named_on_every_rank(paths, tmp_path):
    shutil.copytree(paths[0].parent, tmp_path / "copy")
    alter(tmp_path / "copy" / paths[2].name)
    for rank, seed in enumerate((1, 1, 2)):
        (tmp_path / str(rank)).mkdir()
        write_nvidia(tmp_path / str(rank) / "part", make_records(9, seed), "variable")
    integrity.check({tmp_path / "0" / "part": ""}, ALONE)
    run_ranks(_check, 3, arguments=(tmp_path,))
