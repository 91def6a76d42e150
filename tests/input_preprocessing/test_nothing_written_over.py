"""No stage overwrites its source or removes files that it did not make."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from bert.data.format import write_records
from input_preprocessing.dataset import prepare
from input_preprocessing.records.tfrecord_nvidia import import_file
from input_preprocessing.stage.cli import run_stage

from ..bert.data.samples import METADATA, make_records, write_nvidia
from ..refused import refused
from .conftest import prepare_options, prepared_digests


def contents_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def make(stage: str, source: Path, target: Path) -> None:
    options = {
        "pack": ["--shards", "2"],
        "bins": ["--shards", "1"],
        "shuffle": ["--shards", "2"],
    }
    line = [
        stage,
        "--source",
        str(source),
        "--target",
        str(target),
        "--random-seed",
        "1",
        "--jobs",
        "1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*line, *options[stage]])
        run_stage(stage)


@pytest.mark.parametrize("stage", ["pack", "shuffle", "bins"])
def test_the_source_is_no_target(tmp_path, stage):
    source = tmp_path / ("64" if stage == "bins" else "source")
    source.mkdir()
    write_records(source / "part_00000_of_00002.hdf5", make_records(100), METADATA)
    (tmp_path / "link").symlink_to(source)
    before = contents_of(source)
    for target in (tmp_path,) if stage == "bins" else (source, tmp_path / "link"):
        with pytest.raises(SystemExit, match="holds the source"):
            make(stage, source, target)
        assert contents_of(source) == before


@pytest.mark.parametrize("maker", ["NVIDIA", "import_records"])
@pytest.mark.parametrize("stage", ["pack", "shuffle", "bins"])
def test_shards_of_others_are_neither_replaced_nor_removed(tmp_path, stage, maker):
    source, target = tmp_path / "source", tmp_path / "target"
    folder = target / "64" if stage == "bins" else target
    source.mkdir()
    folder.mkdir(parents=True)
    write_records(source / "part-0.hdf5", make_records(100), METADATA)
    other = folder / "part_00001_of_04320.hdf5"
    if maker == "NVIDIA":
        write_nvidia(other, make_records(20), "variable")
    else:
        write_records(other, make_records(20), METADATA)
    before = contents_of(folder)
    with pytest.raises(
        SystemExit, match=r"part_00001_of_04320\.hdf5 was not made by this preparation"
    ):
        make(stage, source, target)
    assert contents_of(folder) == before


@pytest.mark.parametrize("stage", ["pack", "shuffle", "bins"])
def test_shards_of_another_source_are_neither_replaced_nor_removed(tmp_path, stage):
    for number, name in enumerate(("source", "other")):
        (tmp_path / name).mkdir()
        write_records(
            tmp_path / name / "part-0.hdf5", make_records(100, seed=number), METADATA
        )
    target = tmp_path / "target"
    make(stage, tmp_path / "source", target)
    before = contents_of(target)
    make(stage, tmp_path / "source", target)
    with pytest.raises(
        SystemExit,
        match="was made from another source; move it away, or give another folder",
    ):
        make(stage, tmp_path / "other", target)
    assert contents_of(target) == before


def test_shards_are_not_written_over_by_an_import(tmp_path):
    (tmp_path / "source").mkdir()
    write_records(tmp_path / "source" / "part-0.hdf5", make_records(100), METADATA)
    make("pack", tmp_path / "source", tmp_path / "target")
    shard = tmp_path / "target" / "part_00000_of_00002.hdf5"
    write_nvidia(tmp_path / shard.name, make_records(20), "variable")
    before = contents_of(tmp_path / "target")
    with refused(rf"{shard.name} was not made by import_records"):
        import_file(None, (tmp_path / shard.name, shard))
    assert contents_of(tmp_path / "target") == before


@pytest.mark.parametrize("kind", ["--packed-data", "--binned-data", "--shards=2"])
def test_a_preparation_sees_shards_of_others_before_it_begins(fresh, kind):
    folder = {
        "--packed-data": "packed_data",
        "--binned-data": "hdf5/bins/64",
        "--shards=2": "hdf5/training-2",
    }[kind]
    (fresh / folder).mkdir(parents=True)
    write_nvidia(
        fresh / folder / "part_00000_of_00002.hdf5", make_records(20), "variable"
    )
    before = contents_of(fresh / folder)
    with refused("was not made by this preparation"):
        prepare.main(prepare_options(fresh, kind))
    assert contents_of(fresh / folder) == before
    assert not list(fresh.glob("work/*"))


def test_a_finished_folder_with_a_shard_cut_short_is_mended(packed, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    shard = sorted(folder.glob("packed_data/part_*"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    prepare.main(prepare_options(folder, "--packed-data", "--shards", "4"))
    assert prepared_digests(folder) == prepared_digests(packed)


def test_the_evaluation_set_is_not_written_over_its_instances(
    tmp_path, monkeypatch, capsys
):
    write_records(tmp_path / "a.hdf5", make_records(30), METADATA)
    shutil.copy(tmp_path / "a.hdf5", tmp_path / "b.hdf5")
    line = [
        "evalset",
        "--source",
        str(tmp_path / "a.hdf5"),
        "--num-samples",
        "5",
        "--target",
    ]
    monkeypatch.setattr(sys, "argv", [*line, str(tmp_path / "." / "a.hdf5")])
    with pytest.raises(SystemExit, match="is the source"):
        run_stage("evalset")
    assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes()
    monkeypatch.setattr(sys, "argv", [*line, str(tmp_path / "c.hdf5")])
    run_stage("evalset")
    assert "5 evaluation samples" in capsys.readouterr().err
