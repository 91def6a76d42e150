"""DATA_CARD.md matches the manifest and is equal for equal preparations."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from bert.data.records import DataError
from input_preprocessing.dataset import data_card, prepare
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import run_stage
from input_preprocessing.stage.manifest import TEXT_MD5

from ..conftest import prepare_options


@pytest.fixture
def folder(packed: Path, tmp_path: Path) -> Path:
    """A finished data set to write to."""
    shutil.copytree(packed, tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


def test_the_card_has_texts_counts_options_digests_and_versions(folder: Path) -> None:
    card = (folder / "DATA_CARD.md").read_text()
    made = manifest.read(folder / "prepared-packed.json")
    for name, md5 in made.texts.items():
        assert f"| {name} | {md5} |" in card
    for line in (
        f"| sequences | {made.sequences:,} |",
        f"| tokens | {made.tokens:,} |",
        f"| evaluation samples | {made.eval_samples:,} |",
        "| dupe_factor | 2 |",
        f"| eval/part_eval_10k.hdf5 | {made.files['eval/part_eval_10k.hdf5']} |",
        made.multiset_digest,
        f"| NumPy | {made.versions['NumPy']} |",
        "Text: not the benchmark's: 3 training files",
        "License, as given: not given",
    ):
        assert line in card
    assert made.versions["records"] == "1"


def test_no_path_or_date_makes_the_card_differ(folder: Path, packed: Path) -> None:
    card = (folder / "DATA_CARD.md").read_text()
    (folder / "DATA_CARD.md").unlink()
    data_card.write(folder)
    assert (folder / "DATA_CARD.md").read_text() == card == (packed / "DATA_CARD.md").read_text()
    assert str(packed) not in card


def test_a_license_given_later_changes_no_record(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.hdf5")}
    prepare.main(prepare_options(folder, "--packed-data", "--shards", "4", "--license", "MIT"))
    prepare.main(prepare_options(folder, "--packed-data", "--shards", "4"))
    assert "nothing to do" in capsys.readouterr().err
    assert "License, as given: MIT" in (folder / "DATA_CARD.md").read_text()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.hdf5")} == before


def test_the_benchmarks_text_is_called_so_and_long_lists_are_cut(folder: Path) -> None:
    path = folder / "prepared-packed.json"
    parts = {f"part-{i:05d}-of-00500": "0" * 32 for i in range(500)}
    manifest.write(path, dataclasses.replace(manifest.read(path), texts=parts | TEXT_MD5))
    data_card.write(folder)
    card = (folder / "DATA_CARD.md").read_text()
    assert "Text: the benchmark's: 500 parts, 7 of 7 known md5." in card
    assert "and 481 more" in card
    assert card.count("| part-") == 20 or card.count("| part-") == 19
    manifest.write(
        path,
        dataclasses.replace(manifest.read(path), texts=parts | TEXT_MD5 | {"eval.txt": "0" * 32}),
    )
    data_card.write(folder)
    card = (folder / "DATA_CARD.md").read_text()
    assert "Text: partly the benchmark's: eval.txt is missing or has another md5." in card


def test_a_folder_of_an_earlier_version_gets_a_card(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "prepared-packed.json"
    made = json.loads(path.read_text())
    del made["license"], made["versions"], made["md5"], made["sources"]
    path.write_text(json.dumps(made))
    (folder / "DATA_CARD.md").unlink()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["data_card", str(folder), "--license", "CC0 | a", "--json"])
        run_stage("data_card")
    printed = json.loads(capsys.readouterr().out)
    assert printed["sets"]["packed"]["license"] == "CC0 | a"
    card = Path(printed["card"]).read_text()
    assert "Not recorded." in card
    assert "License, as given: CC0 | a" in card


def test_a_folder_without_a_manifest_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["data_card", str(tmp_path)])
    with pytest.raises(
        SystemExit, match=r"has no prepared-\*\.json; give the --outputdir"
    ) as ended:
        run_stage("data_card")
    assert "\n" not in str(ended.value.code)
    with pytest.raises(DataError):
        data_card.read_sets(tmp_path)
