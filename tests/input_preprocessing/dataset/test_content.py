"""Inputs of a preparation are compared by content: only what depends on a changed input is
remade.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from input_preprocessing.dataset import prepare
from input_preprocessing.stage import reading
from input_preprocessing.stage.cli import run_stage
from input_preprocessing.verify.verdict import failures, verify

from ...refused import refused
from ..conftest import (
    made_up_documents,
    prepare_options,
    prepared_digests,
    write_documents,
)


def run(folder: Path) -> None:
    prepare.main(prepare_options(folder, "--packed-data", "--shards", "4"))


def made_afresh(folder: Path, tmp_path: Path) -> dict[str, str]:
    """Digests of a preparation of the same inputs in another folder."""
    other = tmp_path / "afresh"
    shutil.copytree(folder / "download", other / "download")
    run(other)
    return prepared_digests(other)


@pytest.fixture
def folder(packed, tmp_path):
    """A finished data set to prepare again."""
    shutil.copytree(packed, tmp_path / "data")
    return tmp_path / "data"


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.hdf5")}


def layers_of(folder: Path) -> int:
    config = json.loads((folder / "phase1" / "bert_config.json").read_text())
    return config["num_hidden_layers"]  # type: ignore[no-any-return]


def test_a_replaced_vocabulary_makes_all_records_again(folder, packed, tmp_path):
    vocab = folder / "download" / "vocab.txt"
    words = vocab.read_text().splitlines()
    vocab.write_text("\n".join([*words[:5], *reversed(words[5:])]) + "\n")
    run(folder)
    assert (folder / "phase1" / "vocab.txt").read_text() == vocab.read_text()
    assert prepared_digests(folder) == made_afresh(folder, tmp_path)
    assert prepared_digests(folder) != prepared_digests(packed)


def test_a_replaced_configuration_is_copied_and_the_records_stay(folder, capsys):
    before = times(folder)
    config = folder / "download" / "bert_config.json"
    other = json.loads(config.read_text()) | {"num_hidden_layers": 2}
    config.write_text(json.dumps(other))
    run(folder)
    assert "bert_config.json is replaced by" in capsys.readouterr().err
    assert layers_of(folder) == 2
    assert times(folder) == before
    assert not failures(verify(folder, jobs=1))


def test_a_text_of_the_same_size_and_time_but_other_content_is_prepared(
    folder, tmp_path
):
    text = folder / "download" / "results4" / "part-00001-of-00003"
    status = text.stat()
    text.write_bytes(text.read_bytes().replace(b"a", b"e", 50))
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert text.stat().st_size == status.st_size
    run(folder)
    assert prepared_digests(folder) == made_afresh(folder, tmp_path)


def test_a_touched_text_is_the_same_text(folder, packed, capsys):
    before = times(folder)
    for path in (folder / "download").rglob("*"):
        os.utime(path, ns=(1, 1))
    run(folder)
    assert "nothing to do" in capsys.readouterr().err
    assert times(folder) == before
    (folder / "prepared-packed.json").unlink()
    run(folder)
    name = "prepared-packed.json"
    assert (folder / name).read_bytes() == (packed / name).read_bytes()


def test_a_text_that_changes_during_a_run_stops_it(fresh, monkeypatch, capsys):
    text = fresh / "download" / "results4" / "part-00000-of-00003"
    make = prepare.steps.make_training_files

    def slowly(*arguments: object) -> object:
        with open(text, "a") as file:
            file.write("More of a copy that goes on.\n\n")
        return make(*arguments)

    monkeypatch.setattr(prepare.steps, "make_training_files", slowly)
    changed = "part-00000-of-00003 changed while it was read"
    with refused(f"{changed}; run the same command again"):
        run(fresh)
    assert not list(fresh.glob("prepared-*"))
    monkeypatch.undo()
    run(fresh)
    assert prepared_digests(fresh) == made_afresh(fresh, fresh.parent)


@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_a_file_that_changes_under_the_reader_is_not_taken(tmp_path, monkeypatch, how):
    path = tmp_path / "text"
    path.write_text("A text.\n")
    fstat = os.fstat

    def meanwhile(number: int) -> os.stat_result:
        found = fstat(number)
        if how == "replaced":
            (tmp_path / "new").write_text("B text.\n")
            (tmp_path / "new").rename(path)
        else:
            path.write_text("A text, and more.\n")
        return found

    monkeypatch.setattr(reading.os, "fstat", meanwhile)
    with refused("changed while it was read"):
        reading.read_text(path, "--input")


def options_of(folder: Path, text: Path, *more: str) -> list[str]:
    line = ["--input", str(text), "--outputdir", str(folder), "--vocab-size", "400"]
    return ["corpus", *line, *more]


@pytest.fixture
def texts(tmp_path):
    documents = made_up_documents(40)
    paths = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(paths):
        write_documents(path, documents[20 * number : 20 * number + 20])
    return paths


def test_another_corpus_in_the_same_folder_has_its_own_vocabulary_and_model(
    texts, tmp_path, monkeypatch
):
    again, afresh = tmp_path / "again", tmp_path / "afresh"
    for folder, text, *more in (
        (again, texts[0]),
        (again, texts[1], "--layers", "2"),
        (afresh, texts[1], "--layers", "2"),
    ):
        monkeypatch.setattr("sys.argv", options_of(folder, text, *more))
        run_stage("corpus")
        run(folder)
    assert prepared_digests(again) == prepared_digests(afresh)
    assert layers_of(again) == 2


def test_a_corpus_is_not_made_twice_of_one_text_and_again_where_a_file_was_changed(
    texts, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "data"
    monkeypatch.setattr("sys.argv", options_of(folder, texts[0]))
    run_stage("corpus")
    files = {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }
    texts[0].touch()
    capsys.readouterr()
    run_stage("corpus")
    assert "nothing to do" in capsys.readouterr().err
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files
    } == files
    part = next(folder.rglob("part-*"))
    part.write_text(part.read_text().replace("e", "E", 1))
    run_stage("corpus")
    assert {path: path.read_bytes() for path in files} == {
        path: data for path, (data, _) in files.items()
    }
