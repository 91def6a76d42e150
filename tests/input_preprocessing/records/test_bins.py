"""Bins hold all sequences of their lengths exactly once, each bin shuffled separately."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from bert.data.digests import add_multiset_digests
from bert.data.format import multiset_digest
from input_preprocessing.records import bins, sharding

from ...bert.data.samples import make_records, source_of
from ...refused import refused
from ..conftest import all_records

EDGES = (16, 32, 48, 64)


@pytest.fixture
def source(tmp_path):
    """Four files of sequences of 5 to 64 tokens."""
    return source_of(tmp_path / "source", *(make_records(300, n) for n in range(4)))


def make(source: Path, name: str, *, seed: int = 1, jobs: int = 1) -> Path:
    target = source.parent / name
    bins.bin_records(source, target, shards=3, seed=seed, jobs=jobs)
    return target


def test_each_bin_holds_the_sequences_of_its_lengths(source, monkeypatch):
    plan = sharding.plan_shards
    small = functools.partial(plan, group_size=100)
    monkeypatch.setattr(sharding, "plan_shards", small)
    target = make(source, "bins")
    assert sorted(path.name for path in target.iterdir()) == ["16", "32", "48", "64"]
    for low, high in zip((0, *EDGES), EDGES, strict=False):
        lengths = all_records(target / str(high)).sequence_lengths
        assert low < lengths.min() <= lengths.max() <= high
    found = [multiset_digest(all_records(target / str(edge))) for edge in EDGES]
    wanted = [multiset_digest(make_records(300, seed=i)) for i in range(4)]
    assert add_multiset_digests(found) == add_multiset_digests(wanted)


def test_the_order_within_a_bin_depends_on_the_seed_alone(source):
    made = make(source, "a"), make(source, "b", jobs=2), make(source, "c", seed=2)
    for edge in EDGES:
        ids = [all_records(folder / str(edge)).input_ids for folder in made]
        assert np.array_equal(ids[0], ids[1])
        assert not np.array_equal(ids[0], ids[2])


def use_edges(patch: pytest.MonkeyPatch, *edges: int) -> None:
    patch.setattr(bins, "edges_of", lambda _: edges)


def test_a_bin_of_few_sequences_makes_one_shard(source, monkeypatch):
    use_edges(monkeypatch, 6, 64)
    target = source.parent / "few"
    for wanted in (1, None):
        bins.bin_records(source, target, shards=wanted, seed=1, jobs=1)
        assert len(list((target / "6").glob("*.hdf5"))) == 1


def test_an_empty_bin_is_an_error(source, monkeypatch):
    use_edges(monkeypatch, 4, 64)
    with refused("no sequences of 1 to 4 tokens"):
        make(source, "b")


def test_bins_are_quarters_of_the_longest_sequence():
    assert bins.edges_of(512) == (128, 256, 384, 512)


def test_bins_of_earlier_edges_are_removed_but_no_file_of_others(source, monkeypatch):
    use_edges(monkeypatch, 32, 64)
    target = make(source, "bins")
    (target / "32" / "notes.txt").touch()
    (target / "32" / ".digests").mkdir()
    (target / "32" / ".digests" / "part_00000.hdf5.1.digest").touch()
    use_edges(monkeypatch, 16, 64)
    make(source, "bins")
    assert sorted(path.name for path in target.rglob("*") if not path.name.startswith("part_")) == [
        "16", "32", "64", "index.json", "index.json", "notes.txt",
    ]  # fmt: skip
    assert [path.name for path in (target / "32").iterdir()] == ["notes.txt"]
