"""A damaged file is named, taken for nothing else and made again alone; none takes the program
along.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bert.data import hdf5
from bert.data.format import open_records, write_records
from input_preprocessing.dataset import prepare, repair, steps
from input_preprocessing.records import evalset, pack, shuffle
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import parser_of

from ..bert.data.samples import METADATA, make_records
from ..refused import refused
from .conftest import prepare_options

SHARD = "packed_data/part_00001_of_00004.hdf5"


@pytest.fixture
def folder(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def path(tmp_path):
    write_records(tmp_path / "part.hdf5", make_records(20), METADATA)
    return tmp_path / "part.hdf5"


def mend(folder: Path) -> None:
    line = ["--outputdir", str(folder), "--jobs", "1", "--repair"]
    repair.repair(parser_of("prepare").parse_args(line))


def alter(path: Path, at: int = -3) -> None:
    """Changes a byte of the last dataset, which neither size nor attributes tell."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def alter_first_id(path: Path) -> None:
    """Changes the first token of a record file, at the place that HDF5 gives for it."""
    records, _ = open_records(path)
    found = path.read_bytes().index(records.input_ids[:8].tobytes())
    alter(path, found)


def test_the_reader_of_files_does_not_keep_a_folder_locked(path, tmp_path, monkeypatch):
    for _ in range(2):
        with prepare.cli.lock_folder(tmp_path):
            monkeypatch.setattr(
                hdf5, "_helper", hdf5._Helper()
            )  # started while it is locked
            open_records(path)


def test_the_evaluation_set_is_not_picked_from_damaged_instances(path, tmp_path):
    alter_first_id(path)
    with refused(r"part\.hdf5 was changed after it was written"):
        evalset.pick_samples(path, tmp_path / "eval.hdf5", 5)
    assert not (tmp_path / "eval.hdf5").exists()


def test_shards_of_damaged_instances_name_them_and_are_not_kept(path, tmp_path):
    (tmp_path / "source").mkdir()
    source = Path(shutil.move(path, tmp_path / "source" / "a.hdf5"))
    write_records(source.with_name("b.hdf5"), make_records(9, seed=2), METADATA)
    write_records(source, make_records(20), METADATA)
    alter_first_id(source)
    given = {"shards": 1, "seed": 1, "jobs": 1, "max_sequences_per_row": 3}
    with refused(r"source/a\.hdf5 was changed after it was written"):
        pack.pack_records(tmp_path / "source", tmp_path / "out", **given)
    assert not list((tmp_path / "out").glob("part_*"))


@pytest.mark.parametrize("damaged", ["work/eval/eval_all.hdf5", "work/instances"])
def test_instances_that_were_damaged_between_two_runs_are_made_again_alone(
    damaged, packed, fresh, capsys, monkeypatch
):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    options = prepare_options(fresh, "--packed-data", "--shards", "4")
    with monkeypatch.context() as patched:
        patched.setattr(steps, "make_evaluation_set", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare.main(options)
    files = sorted((fresh / "work").rglob("*.hdf5"))
    victim = fresh / damaged if damaged.endswith(".hdf5") else files[-1]
    kept = {path: path.stat().st_mtime_ns for path in files if path != victim}
    alter_first_id(victim)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # to look at the work
    prepare.main(options)
    assert f"{victim} was changed after it was written" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for name in ("eval/part_eval_10k.hdf5", SHARD):
        assert (fresh / name).read_bytes() == (packed / name).read_bytes()


def test_a_damaged_shard_of_an_interrupted_run_is_made_again(path, tmp_path):
    (tmp_path / "source").mkdir()
    shutil.move(path, tmp_path / "source" / "a.hdf5")
    given = {"shards": None, "seed": 1, "jobs": 1}
    shuffle.shuffle_records(tmp_path / "source", tmp_path / "out", **given)
    shard = next((tmp_path / "out").glob("part_*"))
    before = shard.read_bytes()
    alter_first_id(shard)
    shuffle.shuffle_records(tmp_path / "source", tmp_path / "out", **given)
    assert shard.read_bytes() == before


def test_a_stage_reads_what_the_one_before_wrote_and_makes_only_a_damaged_file_again(
    tmp_path, capsys
):
    def stage() -> manifest.StageFolder:
        return manifest.StageFolder(tmp_path, "clean", ["text-*"], {"a": 1})

    names = ["text-0", "text-1"]
    folder = stage()
    for name in names:
        (tmp_path / name).write_text(name)
        manifest.record(tmp_path / name)
    folder.finish(names)
    assert len(manifest.finished_files(tmp_path, "clean", 1)) == 2
    alter(tmp_path / "text-1", 0)
    with refused(r"text-1 is missing or was changed; run .* clean again"):
        manifest.finished_files(tmp_path, "clean", 1)
    assert not stage().finished
    assert sorted(path.name for path in tmp_path.glob("text-*")) == ["text-0"]
    assert "text-1 is missing or was changed: made again" in capsys.readouterr().err


def edited(change: Callable[[dict], object]) -> Callable[[Path], None]:  # type: ignore[type-arg]
    def edit(path: Path) -> None:
        made = json.loads(path.read_text())
        change(made)
        path.write_text(json.dumps(made))

    return edit


MANIFESTS: dict[str, Callable[[Path], object]] = {
    "a bit": lambda path: path.write_text(path.read_text().replace("4", "5", 1)),
    "a lost shard": edited(lambda made: made["files"].pop(SHARD)),
    "another number": edited(lambda made: made.update(tokens=7)),
    "no md5": edited(lambda made: made.pop("md5")),
    "an unknown entry": edited(lambda made: made.update(speed=1)),
    "a list": lambda path: path.write_text("[]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_manifest_is_believed_only_as_it_was_written(damage, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*.hdf5")}
    MANIFESTS[damage](folder / "prepared-packed.json")
    with refused(r"prepared-packed\.json .* was changed after it was written"):
        mend(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*.hdf5")} == before
