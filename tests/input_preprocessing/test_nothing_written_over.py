"""No stage overwrites its source or removes files that it did not make."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from bert.data.format import write_records
from input_preprocessing.dataset import prepare
from input_preprocessing.records.tfrecord_nvidia import import_file
from input_preprocessing.stage.cli import run_stage

from ..bert.data.samples import METADATA, make_records, source_of, write_nvidia
from ..refused import refused
from .conftest import prepare_options
from .test_crash_points import contents

SHARDS = {"pack": "2", "bins": "1", "shuffle": "2"}


def stage_run(*line: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(map(str, line)))
        run_stage(str(line[0]))


def make(stage: str, source: Path, target: Path) -> None:
    more = ["--random-seed", 1, "--jobs", 1, "--shards", SHARDS[stage]]
    stage_run(stage, "--source", source, "--target", target, *more)


@pytest.mark.parametrize("stage", ["pack", "shuffle", "bins"])
def test_the_source_is_no_target(tmp_path, stage):
    source = tmp_path / ("64" if stage == "bins" else "source")
    source.mkdir()
    write_records(source / "part_00000_of_00002.hdf5", make_records(100), METADATA)
    (tmp_path / "link").symlink_to(source)
    before = contents(source)
    for target in (tmp_path,) if stage == "bins" else (source, tmp_path / "link"):
        with pytest.raises(SystemExit, match="holds the source"):
            make(stage, source, target)
        assert contents(source) == before


@pytest.mark.parametrize("maker", ["NVIDIA", "import_records"])
@pytest.mark.parametrize("stage", ["pack", "shuffle", "bins"])
def test_shards_of_others_are_neither_replaced_nor_removed(tmp_path, stage, maker):
    source, target = (
        source_of(tmp_path / "source", make_records(100)),
        tmp_path / "target",
    )
    folder = target / "64" if stage == "bins" else target
    folder.mkdir(parents=True)
    other = folder / "part_00001_of_04320.hdf5"
    if maker == "NVIDIA":
        write_nvidia(other, make_records(20), "variable")
    else:
        write_records(other, make_records(20), METADATA)
    before = contents(folder)
    with pytest.raises(
        SystemExit, match=r"part_00001_of_04320\.hdf5 was not made by this preparation"
    ):
        make(stage, source, target)
    assert contents(folder) == before


@pytest.mark.parametrize("stage", ["pack", "shuffle", "bins"])
def test_shards_of_another_source_are_neither_replaced_nor_removed(tmp_path, stage):
    source = source_of(tmp_path / "source", make_records(100))
    other = source_of(tmp_path / "other", make_records(100, seed=1))
    target = tmp_path / "target"
    make(stage, source, target)
    before = contents(target)
    make(stage, source, target)
    said = "was made from another source; move it away, or give another folder"
    with pytest.raises(SystemExit, match=said):
        make(stage, other, target)
    assert contents(target) == before


def test_shards_are_not_written_over_by_an_import(tmp_path):
    source = source_of(tmp_path / "source", make_records(100))
    make("pack", source, tmp_path / "target")
    shard = tmp_path / "target" / "part_00000_of_00002.hdf5"
    write_nvidia(tmp_path / shard.name, make_records(20), "variable")
    before = contents(tmp_path / "target")
    with refused(rf"{shard.name} was not made by import_records"):
        import_file(None, (tmp_path / shard.name, shard))
    assert contents(tmp_path / "target") == before


FOLDERS = {"--packed-data": "packed_data", "--binned-data": "hdf5/bins/64", "--shards=2": "hdf5/training-2"}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_preparation_sees_shards_of_others_before_it_begins(fresh, kind):
    folder = fresh / FOLDERS[kind]
    folder.mkdir(parents=True)
    write_nvidia(folder / "part_00000_of_00002.hdf5", make_records(20), "variable")
    before = contents(folder)
    with refused("was not made by this preparation"):
        prepare.main(prepare_options(fresh, kind))
    assert contents(folder) == before
    assert not list(fresh.glob("work/*"))


def test_the_evaluation_set_is_not_written_over_its_instances(tmp_path, capsys):
    write_records(tmp_path / "a.hdf5", make_records(30), METADATA)
    shutil.copy(tmp_path / "a.hdf5", tmp_path / "b.hdf5")
    line = "evalset", "--source", tmp_path / "a.hdf5", "--num-samples", 5, "--target"
    with pytest.raises(SystemExit, match="is the source"):
        stage_run(*line, f"{tmp_path}/./a.hdf5")
    assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes()
    stage_run(*line, tmp_path / "c.hdf5")
    assert "5 evaluation samples" in capsys.readouterr().err
