"""Shards and bins hold exactly the sequences of their source, or are not considered finished; no file
of others is overwritten or removed.
"""

import functools
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from bert.data.digests import add_multiset_digests
from bert.data.format import multiset_digest, write_records
from bert.data.records import Records
from input_preprocessing.records import bins, pack, sharding, shuffle

from ...bert.data.samples import METADATA, make_records, source_of, write_nvidia
from ...refused import refused
from ..conftest import all_records, alter_first_id, contents, interrupted, run

EDGES = (16, 32, 48, 64)
GIVEN = {"seed": 1, "jobs": 1}
PARTS = [make_records(300, number) for number in range(4)]
TOTAL = add_multiset_digests([multiset_digest(part) for part in PARTS])


@pytest.fixture
def source(tmp_path):
    """Four files of sequences of 5 to 64 tokens."""
    return source_of(tmp_path / "source", *PARTS)


@pytest.fixture
def groups(monkeypatch):
    """Many groups, as of much text."""
    small = functools.partial(sharding.plan_shards, group_size=100)
    monkeypatch.setattr(sharding, "plan_shards", small)


@pytest.mark.usefixtures("groups")
def test_many_groups_shuffle_and_pack_all_sequences(source, tmp_path):
    given = {"shards": 7, "jobs": 1}
    shuffle.shuffle_records(source, tmp_path / "a", seed=1, **given)
    pack.pack_records(source, tmp_path / "b", seed=1, max_sequences_per_row=2, **given)
    shuffle.shuffle_records(source, tmp_path / "c", seed=2, **given)
    orders = [all_records(tmp_path / name) for name in "abc"]
    assert {multiset_digest(records) for records in orders} == {TOTAL}
    assert not np.array_equal(orders[0].input_ids, orders[2].input_ids)
    assert orders[1].row_offsets is not None
    assert np.diff(orders[1].row_offsets).max() == 2


@pytest.mark.parametrize("make", [shuffle.shuffle_records, bins.bin_records])
def test_a_sequence_lost_and_one_doubled_are_found(source, tmp_path, monkeypatch, make):
    def careless(seed: int, records: Records, group: int) -> tuple[np.ndarray, None]:
        order = np.arange(records.num_sequences)
        order[0] = order[-1]
        return order, None

    make(source, tmp_path / "right", shards=1, **GIVEN)
    monkeypatch.setattr(sharding, "in_random_order", careless)
    with refused("hold exactly the sequences of"):
        make(source, tmp_path / "wrong", shards=1, **GIVEN)


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("how", ["swapped", "copied", "changed"])
def test_a_shard_that_is_another_or_was_changed_is_made_again(
    source, tmp_path, monkeypatch, is_finished, how
):
    shuffle.shuffle_records(source, tmp_path / "right", shards=3, **GIVEN)
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "right").iterdir()}
    target = tmp_path / "target"
    with monkeypatch.context() as patched:
        if not is_finished:
            patched.setattr(sharding, "write_index", interrupted)
        with nullcontext() if is_finished else pytest.raises(KeyboardInterrupt):
            shuffle.shuffle_records(source, target, shards=3, **GIVEN)
    one, other, kept = sorted(target.glob("part_*.hdf5"))
    if how == "changed":
        alter_first_id(one)
    else:
        one.write_bytes(wanted[other.name])
    if how == "swapped":
        other.write_bytes(wanted[one.name])
    time = kept.stat().st_mtime_ns
    shuffle.shuffle_records(source, target, shards=3, **GIVEN)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == wanted
    assert kept.stat().st_mtime_ns == time


def test_shards_of_damaged_instances_name_them_and_are_not_kept(source, tmp_path):
    alter_first_id(source / "part_2.hdf5")
    given = {"shards": 1, "max_sequences_per_row": 3, **GIVEN}
    with refused(r"source/part_2\.hdf5 was changed after it was written"):
        pack.pack_records(source, tmp_path / "out", **given)
    assert not list((tmp_path / "out").glob("part_*"))


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_file_of_others_that_a_trainer_would_read_is_named(
    source, tmp_path, monkeypatch, moment
):
    other = tmp_path / "target" / "mine.hdf5"
    other.parent.mkdir()
    run_tasks = sharding.run_tasks

    def brings(*arguments, **named):  # type: ignore[no-untyped-def]
        other.write_bytes(b"")
        return run_tasks(*arguments, **named)

    if moment == "before":
        other.write_bytes(b"")
    monkeypatch.setattr(sharding, "run_tasks", brings)
    with refused(r"mine\.hdf5 was not made by this"):
        shuffle.shuffle_records(source, other.parent, shards=1, **GIVEN)
    assert not (other.parent / "index.json").exists()


def binned(source: Path, name: str, **given: int) -> Path:
    target = source.parent / name
    bins.bin_records(source, target, **{"shards": 3, **GIVEN, **given})
    return target


@pytest.mark.usefixtures("groups")
def test_each_bin_holds_the_sequences_of_its_lengths(source):
    target = binned(source, "bins")
    assert sorted(path.name for path in target.iterdir()) == [*map(str, EDGES)]
    found = [all_records(target / str(edge)) for edge in EDGES]
    for low, high, records in zip((0, *EDGES), EDGES, found, strict=False):
        lengths = records.sequence_lengths
        assert low < lengths.min() <= lengths.max() <= high
    assert (
        add_multiset_digests([multiset_digest(records) for records in found]) == TOTAL
    )
    assert bins.edges_of(512) == (128, 256, 384, 512)


def test_the_order_within_a_bin_depends_on_the_seed_alone(source):
    made = [
        binned(source, "a"),
        binned(source, "b", jobs=2),
        binned(source, "c", seed=2),
    ]
    for edge in EDGES:
        ids = [all_records(folder / str(edge)).input_ids for folder in made]
        assert np.array_equal(ids[0], ids[1])
        assert not np.array_equal(ids[0], ids[2])


def use_edges(patch: pytest.MonkeyPatch, *edges: int) -> None:
    patch.setattr(bins, "edges_of", lambda _: edges)


def test_a_bin_of_few_sequences_is_one_shard_and_of_none_an_error(source, monkeypatch):
    use_edges(monkeypatch, 6, 64)
    for wanted in (1, None):
        target = binned(source, "few", shards=wanted)
        assert len(list((target / "6").glob("*.hdf5"))) == 1
    use_edges(monkeypatch, 4, 64)
    with refused("no sequences of 1 to 4 tokens"):
        binned(source, "none")


def test_bins_of_earlier_edges_are_removed_but_no_file_of_others(source, monkeypatch):
    use_edges(monkeypatch, 32, 64)
    earlier = binned(source, "bins") / "32"
    (earlier / "notes.txt").touch()
    (earlier / ".digests").mkdir()
    (earlier / ".digests" / "part_00000.hdf5.1.digest").touch()
    use_edges(monkeypatch, 16, 64)
    names = [path.name for path in binned(source, "bins").rglob("*")]
    others = [name for name in names if not name.startswith("part_")]
    assert sorted(others) == ["16", "32", "64", "index.json", "index.json", "notes.txt"]
    assert [path.name for path in earlier.iterdir()] == ["notes.txt"]


STAGES = ["pack", "shuffle", "bins"]


def command(stage: str, source: Path, target: Path) -> None:
    more = ["--random-seed", 1, "--jobs", 1, "--shards", 1 if stage == "bins" else 2]
    run(stage, "--source", source, "--target", target, *more)


@pytest.mark.parametrize("stage", STAGES)
def test_the_source_is_no_target(tmp_path, stage):
    source = source_of(tmp_path / ("64" if stage == "bins" else "source"), PARTS[0])
    (tmp_path / "link").symlink_to(source)
    before = contents(source)
    for target in (tmp_path,) if stage == "bins" else (source, tmp_path / "link"):
        with pytest.raises(SystemExit, match="holds the source"):
            command(stage, source, target)
        assert contents(source) == before


@pytest.mark.parametrize("maker", ["NVIDIA", "import_records"])
@pytest.mark.parametrize("stage", STAGES)
def test_shards_of_others_are_not_touched(source, tmp_path, stage, maker):
    folder = tmp_path / "target" / ("64" if stage == "bins" else "")
    folder.mkdir(parents=True)
    other = folder / "part_00001_of_04320.hdf5"
    if maker == "NVIDIA":
        write_nvidia(other, PARTS[0], "variable")
    else:
        write_records(other, PARTS[0], METADATA)
    before = contents(folder)
    said = rf"{other.name} was not made by this preparation"
    with pytest.raises(SystemExit, match=said):
        command(stage, source, tmp_path / "target")
    assert contents(folder) == before


@pytest.mark.parametrize("stage", STAGES)
def test_shards_of_another_source_are_not_touched(source, tmp_path, stage):
    other, target = source_of(tmp_path / "other", PARTS[0]), tmp_path / "target"
    command(stage, source, target)
    before = contents(target)
    command(stage, source, target)
    said = "was made from another source; move it away, or give another folder"
    with pytest.raises(SystemExit, match=said):
        command(stage, other, target)
    assert contents(target) == before
