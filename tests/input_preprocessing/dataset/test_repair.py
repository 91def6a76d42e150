"""`prepare --repair` finds every kind of damage and remakes only what is damaged, byte for byte."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.data import hdf5, prepared
from bert.data.format import open_records, write_records
from input_preprocessing.dataset import prepare, repair
from input_preprocessing.stage.cli import parser_of
from input_preprocessing.verify.verdict import failures, verify

from ...refused import refused
from ..conftest import contents, flip, prepare_options, run, times
from ..test_crash_points import ENDED, run_and_kill

SHARD = "packed_data/part_00001_of_00004.hdf5"
OTHER = "packed_data/part_00002_of_00004.hdf5"
EVALUATION = "eval/part_eval_10k.hdf5"
INDEX = "packed_data/index.json"


def options_of(folder: Path):
    line = ["--outputdir", str(folder), "--jobs", "1", "--repair"]
    return parser_of("prepare").parse_args(line)


def mend(folder: Path) -> tuple[list[str], list[str]]:
    """Repairs without the options of the preparation; the files made again, and those set aside."""
    faults = repair.repair(options_of(folder))
    return [f.file for f in faults if not f.stray], [f.file for f in faults if f.stray]


def files_of(folder: Path) -> dict[str, str]:
    """md5 of every file, including manifest and index, except those set aside."""
    texts = {path.name: path.read_text() for path in folder.glob("prepared-*")}
    found = (contents(folder) | texts).items()
    return {name: md5 for name, md5 in found if not name.startswith("set_aside")}


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
    "the index": (lambda d: flip(d / INDEX), [INDEX], "does not match"),
    "a pipe as the index": (lambda d: in_place_of(d / INDEX, os.mkfifo), [INDEX], "does not match"),
    "a folder as the index": (lambda d: in_place_of(d / INDEX, os.mkdir), [INDEX], "does not match"),
    "a folder as a shard": (lambda d: in_place_of(d / SHARD, os.mkdir), [SHARD], "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_only_the_file_is_made_again(folder, packed, name, capsys):
    damage, wrong, problem = DAMAGE[name]
    damage(folder)
    before = times(folder, "*")
    assert mend(folder) == (wrong, [])
    assert files_of(folder) == files_of(packed)
    allowed = {
        folder / name for name in [*wrong, *([INDEX] if wrong == [SHARD] else [])]
    }
    after = times(folder, "*")
    assert {path for path in after if after[path] != before.get(path)} <= allowed
    told = capsys.readouterr().err
    assert re.search(rf"{folder / wrong[0]} .*({problem})", told)
    assert f"{folder / wrong[0]} was made again" in told
    assert not (folder / "work").exists()


def test_a_sound_folder_is_left_as_it_is_without_its_text(folder, capsys):
    shutil.rmtree(folder / "download")
    before = times(folder, "*")
    assert mend(folder) == ([], [])
    assert times(folder, "*") == before
    assert "nothing to repair, every file is as prepared" in capsys.readouterr().err


def test_a_stray_file_is_moved_aside_and_none_is_lost(folder, packed):
    strays = [
        "eval/.part_eval_10k.hdf5.partial",
        "packed_data/mine",
        "packed_data/part_00000_of_00009.hdf5",
    ]
    for round_ in ("1", "2"):
        for name in strays:
            (folder / name).write_text(f"{name} {round_}")
        assert mend(folder) == ([], strays)
        assert files_of(folder) == files_of(packed)
        for name in strays:
            aside = folder / "set_aside" / round_ / name
            assert aside.read_text() == f"{name} {round_}"
    aside = (folder / "set_aside").rglob("*")
    assert sum(path.is_file() for path in aside) == 2 * len(strays)


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


def add_word(folder: Path) -> None:
    with open(folder / "download/vocab.txt", "a") as vocabulary:
        vocabulary.write("x\n")


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        made = json.loads(path.read_text())
        change(made)
        path.write_text(json.dumps(made))

    return edit


MANIFEST = "prepared-packed.json"
MANIFESTS: dict[str, Callable[[Path], object]] = {
    "a damaged manifest": cut,
    "a bit": lambda path: path.write_text(path.read_text().replace("4", "5", 1)),
    "a lost shard": edited(lambda made: made["files"].pop(SHARD)),
    "another number": edited(lambda made: made.update(tokens=7)),
    "no md5": edited(lambda made: made.pop("md5")),
    "an unknown entry": edited(lambda made: made.update(speed=1)),
    "a list": lambda path: path.write_text("[]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another text": (edit_text, "part-00001-of-00003 in .* is another text .md5 .*prepare again without --repair"),
    "no text": (lambda d: shutil.rmtree(d / "download"), "no text"),
    "another vocabulary": (add_word, "vocab.txt is another vocabulary"),
    "no manifest": (lambda d: (d / MANIFEST).unlink(), "has no prepared-.*prepare it without"),
    **{f"manifest: {name}": (lambda d, damage=damage: damage(d / MANIFEST), rf"{MANIFEST} .*was changed after it was written")
       for name, damage in MANIFESTS.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repaired_is_one_line_and_changes_nothing(folder, name):
    change, message = REFUSED[name]
    swap_for_a_whole_file(folder)
    change(folder)
    before = contents(folder)
    with pytest.raises(SystemExit, match=message) as ended:
        run("prepare", "--outputdir", folder, "--repair", "--jobs", 1)
    assert "\n" not in str(ended.value.code)
    assert contents(folder) == before


@pytest.mark.parametrize("name", [SHARD, "phase1/model.ckpt-28252.pt"])
def test_what_cannot_be_remade_as_prepared_is_an_error(folder, name):
    path = folder / MANIFEST
    made = prepared.read(path)
    files = {**made.files, name: "0" * 32}
    prepared.write(path, dataclasses.replace(made, files=files))
    with refused(rf"{name} .* cannot be remade as it was"):
        mend(folder)


def test_two_runs_do_not_write_one_folder_at_once(folder):
    for options in (options_of(folder), prepare_options(folder, "--packed-data")):
        with prepare.cli.lock_folder(folder), refused("another run is writing"):
            prepare.main(options)
    assert not (folder / "work").exists()


def test_the_reader_of_files_keeps_no_folder_locked(packed, tmp_path, monkeypatch):
    for _ in range(2):
        with prepare.cli.lock_folder(tmp_path):
            # Started while it is locked.
            monkeypatch.setattr(hdf5, "_helper", hdf5._Helper())
            open_records(packed / SHARD)
