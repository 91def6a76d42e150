"""Inputs of a preparation are compared by content: only what depends on a changed input is remade."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from bert.checkpoint import weights
from bert.data.format import multiset_digest
from input_preprocessing.dataset import steps
from input_preprocessing.stage import reading
from input_preprocessing.verify.verdict import failures, verify

from ...refused import refused
from ..checkpoints.bundle_writer import write_bert
from ..conftest import (
    all_records,
    alter_first_id,
    interrupted,
    made_up_documents,
    make,
    prepared_digests,
    run,
    times,
    write_documents,
)


def made_afresh(folder: Path, other: Path) -> dict[str, str]:
    """Digests of a preparation of the same inputs in another folder."""
    shutil.copytree(folder / "download", other / "download")
    make(other)
    return prepared_digests(other)


def layers_of(folder: Path) -> int:
    config = json.loads((folder / "phase1" / "bert_config.json").read_text())
    return config["num_hidden_layers"]  # type: ignore[no-any-return]


def test_a_replaced_vocabulary_makes_all_records_again(folder, packed, tmp_path):
    vocab = folder / "download" / "vocab.txt"
    words = vocab.read_text().splitlines()
    vocab.write_text("\n".join([*words[:5], *reversed(words[5:])]) + "\n")
    make(folder)
    assert (folder / "phase1" / "vocab.txt").read_text() == vocab.read_text()
    assert prepared_digests(folder) == made_afresh(folder, tmp_path / "afresh")
    assert prepared_digests(folder) != prepared_digests(packed)


def test_a_replaced_configuration_is_copied_and_the_records_stay(folder, capsys):
    before = times(folder)
    config = folder / "download" / "bert_config.json"
    other = json.loads(config.read_text()) | {"num_hidden_layers": 2}
    config.write_text(json.dumps(other))
    make(folder)
    assert "bert_config.json is replaced by" in capsys.readouterr().err
    assert layers_of(folder) == 2
    assert times(folder) == before
    assert not failures(verify(folder, jobs=1))


def test_a_text_of_the_same_size_and_time_is_told_by_its_content(folder, tmp_path):
    text = folder / "download" / "results4" / "part-00001-of-00003"
    status = text.stat()
    text.write_bytes(text.read_bytes().replace(b"a", b"e", 50))
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert text.stat().st_size == status.st_size
    make(folder)
    assert prepared_digests(folder) == made_afresh(folder, tmp_path / "afresh")


def interrupt(folder: Path) -> None:
    """Prepares as far as the instances."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(steps, "make_evaluation_set", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(folder)


def test_text_files_that_were_swapped_are_made_again(fresh, packed, tmp_path):
    """The names decide the order, so that finished instances of a swapped file are not taken for its own."""
    interrupt(fresh)
    texts = sorted((fresh / "download" / "results4").glob("part-*"))
    for source, target in ((texts[0], "x"), (texts[1], texts[0]), ("x", texts[1])):
        (tmp_path / source).rename(tmp_path / target)
    make(fresh)
    assert prepared_digests(fresh) == made_afresh(fresh, tmp_path / "afresh")
    found, straight = (all_records(each / "packed_data") for each in (fresh, packed))
    assert multiset_digest(found) == multiset_digest(straight)


@pytest.mark.parametrize("damaged", ["eval/eval_all.hdf5", "instances/part*2*.hdf5"])
def test_instances_damaged_between_two_runs_are_made_again_alone(
    damaged, packed, fresh, capsys, monkeypatch
):
    interrupt(fresh)
    (victim,) = fresh.glob(f"work/{damaged}")
    kept = times(fresh / "work")
    del kept[victim]
    alter_first_id(victim)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # to look at the work
    make(fresh)
    assert f"{victim} was changed after it was written" in capsys.readouterr().err
    assert kept.items() <= times(fresh / "work").items()
    made, wanted = prepared_digests(fresh), prepared_digests(packed)
    assert wanted.items() <= made.items()


def test_a_touched_text_is_the_same_text(folder, packed, capsys):
    before = times(folder)
    for path in (folder / "download").rglob("*"):
        os.utime(path, ns=(1, 1))
    make(folder)
    assert "nothing to do" in capsys.readouterr().err
    assert times(folder) == before
    (folder / "prepared-packed.json").unlink()
    make(folder)
    name = "prepared-packed.json"
    assert (folder / name).read_bytes() == (packed / name).read_bytes()


def test_a_text_that_changes_during_a_run_stops_it(fresh, monkeypatch, capsys):
    text = fresh / "download" / "results4" / "part-00000-of-00003"
    work = steps.make_training_files

    def slowly(*arguments: object) -> object:
        with open(text, "a") as file:
            file.write("More of a copy that goes on.\n\n")
        return work(*arguments)

    monkeypatch.setattr(steps, "make_training_files", slowly)
    changed = "part-00000-of-00003 changed while it was read"
    with refused(f"{changed}; run the same command again"):
        make(fresh)
    assert not list(fresh.glob("prepared-*"))
    monkeypatch.undo()
    make(fresh)
    assert prepared_digests(fresh) == made_afresh(fresh, fresh.parent / "afresh")


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


@pytest.fixture
def texts(tmp_path):
    documents = made_up_documents(40)
    paths = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(paths):
        write_documents(path, documents[20 * number : 20 * number + 20])
    return paths


def test_another_corpus_in_the_folder_has_its_own_vocabulary(texts, tmp_path):
    again, afresh = tmp_path / "again", tmp_path / "afresh"
    for folder, text, *more in (
        (again, texts[0]),
        (again, texts[1], "--layers", 2),
        (afresh, texts[1], "--layers", 2),
    ):
        line = "--input", text, "--outputdir", folder, "--vocab-size", 400
        run("corpus", *line, *more)
        make(folder)
    assert prepared_digests(again) == prepared_digests(afresh)
    assert layers_of(again) == 2


def test_a_corpus_is_made_once_and_again_where_a_file_changed(texts, tmp_path, capsys):
    folder = tmp_path / "data"
    line = "--input", texts[0], "--outputdir", folder, "--vocab-size", 400
    run("corpus", *line)
    before = times(folder, "*")
    files = {path: path.read_bytes() for path in before}
    texts[0].touch()
    capsys.readouterr()
    run("corpus", *line)
    assert "nothing to do" in capsys.readouterr().err
    assert times(folder, "*") == before
    part = next(folder.rglob("part-*"))
    part.write_text(part.read_text().replace("e", "E", 1))
    run("corpus", *line)
    assert {path: path.read_bytes() for path in files} == files


@pytest.fixture
def config(fresh):
    """The bert_config.json of `fresh`, made that of a tiny model."""
    path = fresh / "download" / "bert_config.json"
    tiny = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}  # fmt: skip
    merged: dict[str, int] = json.loads(path.read_text()) | tiny
    path.write_text(json.dumps(merged))
    return merged


def test_a_checkpoint_that_comes_late_or_is_replaced_is_converted(fresh, config):
    make(fresh)
    shards = times(fresh / "packed_data")
    converted = fresh / "phase1" / "model.ckpt-28252.pt"
    assert shards
    assert not converted.exists()
    seen = set()
    for number, place in enumerate(("tf1_ckpt", "tf1_ckpt", ".")):
        (fresh / "download" / place).mkdir(exist_ok=True)
        write_bert(fresh / "download" / place / "model.ckpt-28252", config, seed=number)
        make(fresh)
        model = torch.load(converted, weights_only=True)["model"]
        seen.add(model["bert.pooler.dense_act.weight"].sum().item())
        noted = json.loads(converted.with_suffix(".json").read_text())
        # As the closed division knows them.
        assert noted["tensors"] == weights.identity(converted)
    assert len(seen) == 3
    assert not failures(verify(fresh, jobs=1))
    stamp = converted.stat().st_mtime_ns
    make(fresh)
    assert converted.stat().st_mtime_ns == stamp
    assert shards == times(fresh / "packed_data")


def test_a_checkpoint_of_another_model_stops_before_hours_of_work(fresh, config):
    other = config | {"num_hidden_layers": 2}
    write_bert(fresh / "download" / "model.ckpt-28252", other, seed=0)
    with refused("num_hidden_layers 1, not 2"):
        make(fresh)
    assert not list(fresh.glob("work/instances/*"))
    assert not (fresh / "phase1" / "model.ckpt-28252.pt").exists()
