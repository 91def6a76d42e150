"""Shards hold exactly the sequences of their source, or are not considered finished."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from bert.data.records import Records
from input_preprocessing.records import bins, sharding, shuffle

from ...bert.data.samples import make_records, source_of
from ...refused import refused


@pytest.mark.parametrize(
    "make", [shuffle.shuffle_records, bins.bin_records], ids=["shuffle", "bins"]
)
def test_a_sequence_lost_and_one_doubled_are_found(tmp_path, monkeypatch, make):
    def careless(seed: int, records: Records, group: int) -> tuple[np.ndarray, None]:
        order = np.arange(records.num_sequences)
        order[0] = order[-1]
        return order, None

    source = source_of(tmp_path / "source", make_records(300))
    given = {"shards": 1, "seed": 1, "jobs": 1}
    make(source, tmp_path / "right", **given)
    monkeypatch.setattr(sharding, "in_random_order", careless)
    with refused("hold exactly the sequences of"):
        make(source, tmp_path / "wrong", **given)


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_shard_under_the_name_of_another_is_made_again(
    tmp_path, monkeypatch, is_finished, is_copied
):
    source = source_of(tmp_path / "source", make_records(300))
    given = {"shards": 3, "seed": 1, "jobs": 1}
    shuffle.shuffle_records(source, tmp_path / "right", **given)
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "right").iterdir()}

    target = tmp_path / "target"
    with monkeypatch.context() as patched:
        if not is_finished:
            patched.setattr(sharding, "write_index", _is_killed)
        with pytest.raises(KeyboardInterrupt) if not is_finished else nullcontext():
            shuffle.shuffle_records(source, target, **given)
    one, other, kept = sorted(target.glob("part_*.hdf5"))
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    if not is_copied:
        other.write_bytes(contents[0])
    time = kept.stat().st_mtime_ns

    shuffle.shuffle_records(source, target, **given)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == wanted
    assert kept.stat().st_mtime_ns == time


def _is_killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_file_of_others_that_a_trainer_would_read_is_named(
    tmp_path, monkeypatch, moment
):
    source = source_of(tmp_path / "source", make_records(30))
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
        shuffle.shuffle_records(source, other.parent, shards=1, seed=1, jobs=1)
    assert not (other.parent / "index.json").exists()
