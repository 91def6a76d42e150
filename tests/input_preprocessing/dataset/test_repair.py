"""`prepare --repair` finds every kind of damage and remakes only what is damaged, byte for byte."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.data import prepared
from bert.data.format import open_records, write_records
from input_preprocessing.dataset import prepare, repair
from input_preprocessing.stage.cli import parser_of, run_stage
from input_preprocessing.verify.verdict import failures, verify

from ...refused import refused
from ..conftest import flip, prepare_options
from ..test_crash_points import ENDED, contents, run_and_kill

SHARD = "packed_data/part_00001_of_00004.hdf5"
OTHER = "packed_data/part_00002_of_00004.hdf5"
EVALUATION = "eval/part_eval_10k.hdf5"


def options_of(folder: Path, *more: str):
    line = ["--outputdir", str(folder), "--jobs", "1", "--repair", *more]
    return parser_of("prepare").parse_args(line)


def mend(folder: Path) -> tuple[list[str], list[str]]:
    """Repairs without the options of the preparation; the files made again, and those set aside."""
    faults = repair.repair(options_of(folder))
    return [f.file for f in faults if not f.stray], [f.file for f in faults if f.stray]


@pytest.fixture
def folder(packed, tmp_path):
    """A finished data set to damage."""
    shutil.copytree(packed, tmp_path / "data")
    return tmp_path / "data"


def files_of(folder: Path) -> dict[str, str]:
    """md5 of every file, including manifest and index, except those set aside."""
    found = contents(folder) | {
        path.name: path.read_text() for path in folder.glob("prepared-*")
    }
    return {
        name: md5 for name, md5 in found.items() if not name.startswith("set_aside")
    }


def times(folder: Path) -> dict[Path, int]:
    return {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def edit_manifest(folder: Path, **tables: dict[str, Any]) -> None:
    """Changes entries of tables of the manifest, with its own digest."""
    path = folder / "prepared-packed.json"
    made = prepared.read(path)
    changed = {name: {**getattr(made, name), **table} for name, table in tables.items()}
    prepared.write(path, dataclasses.replace(made, **changed))


def swap_for_a_whole_file(folder: Path, name: str = SHARD) -> None:
    """Replaces a shard by a valid one with the same source that lacks a row."""
    records, metadata = open_records(folder / name)
    keep = np.arange(records.num_sequences - 1)
    write_records(folder / name, records.with_rows(None).select(keep), metadata)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


def in_place_of(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def relabel(folder: Path) -> None:
    """Changes the source recorded in a shard, with the right sequences."""
    records, metadata = open_records(folder / SHARD)
    given = {name: np.array(of) for name, of in vars(records).items() if of is not None}
    source = dataclasses.replace(metadata, source=(("x", "y"),))
    write_records(folder / SHARD, type(records)(**given), source)


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "a whole file of other contents": (swap_for_a_whole_file, [SHARD], "has other sequences than prepared"),
    "a shard that is not there": (lambda d: (d / SHARD).unlink(), [SHARD], "is missing"),
    "a shard cut short": (lambda d: cut(d / SHARD), [SHARD], "is truncated|cannot be read"),
    "a flipped bit": (lambda d: flip(d / SHARD), [SHARD], "."),
    "another shard's copy": (lambda d: shutil.copy(d / OTHER, d / SHARD), [SHARD], "has other sequences"),
    "attributes of another source": (relabel, [SHARD], "has another source than prepared"),
    "the evaluation set": (lambda d: swap_for_a_whole_file(d, EVALUATION), [EVALUATION], "has other sequences"),
    "the vocabulary": (lambda d: flip(d / "phase1/vocab.txt"), ["phase1/vocab.txt"], "has other contents"),
    "the index": (lambda d: flip(d / "packed_data/index.json"), ["packed_data/index.json"], "does not match"),
    "a pipe as the index": (
        lambda d: in_place_of(d / "packed_data/index.json", os.mkfifo),
        ["packed_data/index.json"],
        "does not match",
    ),
    "a folder as the index": (
        lambda d: in_place_of(d / "packed_data/index.json", os.mkdir),
        ["packed_data/index.json"],
        "does not match",
    ),
    "a folder as a shard": (lambda d: in_place_of(d / SHARD, os.mkdir), [SHARD], "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_only_the_file_is_made_again(folder, packed, name, capsys):
    damage, wrong, problem = DAMAGE[name]
    damage(folder)
    before = times(folder)
    assert mend(folder) == (wrong, [])
    assert files_of(folder) == files_of(packed)
    after = times(folder)
    index = "packed_data/index.json"
    allowed = {folder / path for path in wrong} | (
        {folder / index} if wrong == [SHARD] else set()
    )
    assert {path for path in after if after[path] != before.get(path)} <= allowed
    told = capsys.readouterr().err
    assert re.search(rf"{folder / wrong[0]} .*({problem})", told)
    assert f"{folder / wrong[0]} was made again" in told
    assert not (folder / "work").exists()


def test_a_sound_folder_is_left_as_it_is_without_its_text(folder, capsys):
    shutil.rmtree(folder / "download")
    before = times(folder)
    assert mend(folder) == ([], [])
    assert times(folder) == before
    assert "nothing to repair, every file is as prepared" in capsys.readouterr().err


def test_a_stray_file_is_moved_aside_and_none_is_lost(folder, packed):
    strays = [
        "packed_data/part_00000_of_00009.hdf5",
        "packed_data/mine",
        "eval/.part_eval_10k.hdf5.partial",
    ]
    for round_ in range(2):
        for name in strays:
            (folder / name).write_text(f"{name} {round_}")
        assert mend(folder) == ([], sorted(strays))
        assert files_of(folder) == files_of(packed)
        for name in strays:
            aside = folder / "set_aside" / str(round_ + 1) / name
            assert aside.read_text() == f"{name} {round_}"
    assert len(
        [path for path in (folder / "set_aside").rglob("*") if path.is_file()]
    ) == 2 * len(strays)


def test_files_of_another_data_set_in_the_folder_are_no_strays(folder):
    prepare.main(prepare_options(folder, "--shards", "4"))
    (folder / "hdf5/training-4/part_00000_of_00004.hdf5").unlink()
    assert mend(folder) == (["hdf5/training-4/part_00000_of_00004.hdf5"], [])
    assert not failures(verify(folder, jobs=1))


@pytest.mark.parametrize("kind", ["--packed-data", "--binned-data", "--phases"])
def test_every_kind_and_both_phases_are_repaired(fresh, kind, two_bins):
    more = ["32:5,64:9", "--max-seq-length", "512"] if kind == "--phases" else []
    shards = "1" if kind == "--binned-data" else "2"
    more += ["--shards", shards, "--num-eval-samples", "20"]
    prepare.main(prepare_options(fresh, kind, *more))
    whole = contents(fresh)
    for path in [*fresh.rglob("part_00000_of*"), *fresh.rglob("part_eval_10k.hdf5")]:
        cut(path)
    wrong = {"--packed-data": 2, "--binned-data": 3, "--phases": 4}[kind]
    assert len(mend(fresh)[0]) == wrong
    assert contents(fresh) == whole


def test_killed_in_the_middle_it_is_started_again(folder, packed, tmp_path):
    (folder / "packed_data/stray.hdf5").write_text("mine")
    for name in (SHARD, EVALUATION):
        swap_for_a_whole_file(folder, name)
    kills = 0
    for at in (1, 6, 20, 33):
        damaged = tmp_path / f"killed{at}"
        shutil.copytree(folder, damaged)
        kills += run_and_kill(mend, damaged, at) != ENDED
        mend(damaged)
        assert files_of(damaged) == files_of(packed), f"killed at change {at}"
    assert kills == 4


def edit_text(folder: Path) -> None:
    text = folder / "download/results4/part-00001-of-00003"
    text.write_text(text.read_text().replace("e", "a", 1))


REFUSED: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "another text": (edit_text, [], "part-00001-of-00003 in .* is another text .md5 .*prepare again without --repair"),
    "no text": (lambda d: shutil.rmtree(d / "download"), [], "no text"),
    "another vocabulary": (
        lambda d: (d / "download/vocab.txt").write_text(
            (d / "download/vocab.txt").read_text() + "x\n"
        ),
        [],
        "vocab.txt is another vocabulary",
    ),
    "no manifest": (lambda d: (d / "prepared-packed.json").unlink(), [], "has no prepared-.*prepare it without"),
    "a damaged manifest": (lambda d: cut(d / "prepared-packed.json"), [], "prepared-packed.json is unreadable"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repaired_is_a_one_line_error_and_nothing_is_changed(
    folder, name, capsys, monkeypatch
):
    change, more, message = REFUSED[name]
    swap_for_a_whole_file(folder)
    change(folder)
    before = contents(folder)
    monkeypatch.setattr(
        "sys.argv",
        ["prepare", "--outputdir", str(folder), "--repair", "--jobs", "1", *more],
    )
    with pytest.raises(SystemExit) as ended:
        run_stage("prepare")
    assert ended.value.code not in (None, 0)
    assert "\n" not in str(ended.value.code)
    assert re.search(message, str(ended.value.code))
    assert contents(folder) == before


def test_what_comes_out_otherwise_than_prepared_is_an_error(folder):
    edit_manifest(folder, files={SHARD: "0" * 32})
    with refused("and cannot be remade as it was"):
        mend(folder)


def test_a_lost_checkpoint_without_its_source_is_an_error(folder):
    edit_manifest(folder, files={"phase1/model.ckpt-28252.pt": "0" * 32})
    with refused(r"model\.ckpt-28252\.pt is missing and cannot be remade as it was"):
        mend(folder)


def test_two_runs_do_not_write_one_folder_at_once(folder):
    for options in (options_of(folder), prepare_options(folder, "--packed-data")):
        with prepare.cli.lock_folder(folder), refused("another run is writing"):
            prepare.main(options)
    assert not (folder / "work").exists()
