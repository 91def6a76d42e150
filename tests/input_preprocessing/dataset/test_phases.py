"""Both phases of pretraining are prepared from one text by one command, despite interruptions."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from bert.data.format import open_records
from bert.pretraining import check
from bert.pretraining.config import PretrainingConfig
from common import env
from input_preprocessing.dataset import prepare
from input_preprocessing.stage.cli import parse_phases, parser_of
from input_preprocessing.text import corpus

from ...refused import refused
from ..conftest import (
    all_records,
    made_up_documents,
    prepare_options,
    prepared_digests,
    write_documents,
)
from ..test_crash_points import contents


def options(folder: Path, *more: str) -> argparse.Namespace:
    line = ["--outputdir", str(folder), "--phases", "--dupe-factor", "1", "--jobs", "1"]
    return parser_of("prepare").parse_args([*line, *more])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    write_documents(path, made_up_documents(60))
    return path


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    """Both phases, undisturbed; not to be written to."""
    folder = tmp_path_factory.mktemp("phases") / "data"
    size = ["--vocab-size", "500", "--layers", "1", "--hidden-size", "64"]
    prepare.main(options(folder, "--input", str(text), *size))
    return folder


def exported(repository: Path, phase: int, datadir: Path) -> dict[str, str]:
    """What env.sh and the pretraining config export for a phase."""
    script = "source ./env.sh; source configs/pretrain_large_H100.sh; env -0"
    environment = {"PATH": "/usr/bin:/bin", "PHASE": str(phase), "PACKED": "0"}
    environment["DATADIR"] = str(datadir)
    line = ["bash", "-euc", script]
    printed = subprocess.check_output(line, cwd=repository, env=environment, text=True)
    return dict(item.split("=", 1) for item in printed.split("\0") if item)


@pytest.mark.parametrize(("phase", "length", "masked"), [(1, 128, 20), (2, 512, 80)])
def test_the_pretraining_config_finds_the_data_of_each_phase(
    prepared, repository, phase, length, masked
):
    site = {"DEVICE": "cpu", "WORLD_SIZE": "1", "BATCHSIZE": "4", "GRADIENT_STEPS": "1"}
    site["CHECKPOINT_DIR"] = str(prepared / "checkpoints")
    config = env.from_env(
        PretrainingConfig, exported(repository, phase, prepared) | site
    )
    config.check()
    report = check.report(config)
    assert f"files in {prepared}/{length}/hdf5/training" in report
    records = all_records(prepared / str(length) / "hdf5" / "training")
    assert records.sequence_lengths.max() == length == config.data.max_seq_length
    counts = records.masked_lm_offsets[1:] - records.masked_lm_offsets[:-1]
    assert counts.max() == min(masked, round(0.15 * length))
    path = prepared / str(length) / "eval" / "part_eval_10k.hdf5"
    assert open_records(path)[1].max_seq_length == length


def test_each_phase_is_what_a_preparation_of_its_length_makes(prepared, tmp_path):
    line = ["--outputdir", str(tmp_path), "--downloaddir", str(prepared / "download")]
    line += ["--skip-download", "--dupe-factor", "1", "--max-seq-length", "128"]
    line += ["--max-predictions-per-seq", "20", "--jobs", "1"]
    prepare.main(parser_of("prepare").parse_args(line))
    (folder,) = (tmp_path / "hdf5").iterdir()
    folder.rename(tmp_path / "hdf5" / "training")
    assert prepared_digests(tmp_path) == prepared_digests(prepared / "128")


def test_interrupted_in_the_second_phase_it_repeats_nothing_of_the_first(
    prepared, text, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "data"
    size = ["--vocab-size", "500", "--layers", "1", "--hidden-size", "64"]
    again = options(folder, "--input", str(text), *size)
    make = prepare.steps.make_training_files

    def broken(job: prepare.steps.Job) -> tuple[Path, str]:
        if job.config.max_seq_length == 512:
            raise KeyboardInterrupt
        return make(job)

    monkeypatch.setattr(prepare.steps, "make_training_files", broken)
    with pytest.raises(KeyboardInterrupt):
        prepare.main(again)
    monkeypatch.undo()
    assert not (folder / "128" / "work").exists(), "its room is the second phase's"
    first = {path: path.stat().st_mtime_ns for path in (folder / "128").rglob("*.hdf5")}
    kept = list((folder / "512" / "work" / "instances").iterdir())
    assert kept
    prepare.main(again)
    assert "128 is already prepared" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert prepared_digests(folder) == prepared_digests(prepared)
    assert not list(folder.rglob("work"))


def test_both_phases_may_be_packed(downloaded, tmp_path):
    line = [
        "--downloaddir",
        str(downloaded / "download"),
        "--packed-data",
        "--phases",
        "32:5,64:10",
    ]
    prepare.main(options(tmp_path, "--skip-download", *line))
    for length in (32, 64):
        records = all_records(tmp_path / str(length) / "packed_data")
        assert records.row_offsets is not None
        assert records.num_rows < records.num_sequences
        assert records.sequence_lengths.max() == length


def test_what_the_second_phase_lacks_stops_the_first_from_beginning(
    downloaded, tmp_path
):
    shutil.copytree(downloaded, tmp_path / "data")
    small = '{"vocab_size":9999,"max_position_embeddings":64}'
    (tmp_path / "data" / "download" / "bert_config.json").write_text(small)
    line = ["--skip-download", "--phases", "64:10,512:80"]
    with refused("fewer than --max-seq-length 512"):
        prepare.main(options(tmp_path / "data", *line))
    assert not (tmp_path / "data" / "64" / "work").exists()


def test_the_disk_must_hold_the_shards_of_the_first_phase_while_the_second_works(
    downloaded, tmp_path, monkeypatch
):
    folder = downloaded / "download"
    line = ["--downloaddir", str(folder), "--skip-download", "--dupe-factor", "100"]
    size = sum(path.stat().st_size for path in (folder / "results4").iterdir())
    enough_for_one = int(100 * 0.9 * size * 2 + 20_000_000)
    usage = shutil._ntuple_diskusage(1, 1, enough_for_one)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with refused("are needed"):
        prepare.main(options(tmp_path, *line))
    assert not list(tmp_path.rglob("work"))


@pytest.mark.parametrize(("more", "message"), [
    (["--phases", "--max-seq-length", "128"], "omit --max-seq-length"),
    (["--phases", "--max-predictions-per-seq", "20"], "omit --max-predictions-per-seq"),
    (["--vocab-size", "500"], "--vocab-size requires --input"),
])  # fmt: skip
def test_options_that_would_do_nothing_are_refused(downloaded, more, message):
    line = ["--outputdir", str(downloaded), "--skip-download", *more]
    with refused(message):
        prepare.main(parser_of("prepare").parse_args(line))
    assert not list(downloaded.rglob("work"))


@pytest.mark.parametrize(
    "wrong", ["128", "128:20,64:10", "128:20,128:20", "a:b", "128:20,"]
)
def test_phases_are_growing_lengths_with_their_masked_tokens(wrong):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_phases(wrong)


def test_a_text_that_was_downloaded_is_not_written_over(text, fresh):
    (fresh / "download" / corpus.NOTE).unlink()
    before = contents(fresh / "download")
    with refused("has text not made by this command"):
        prepare.main(prepare_options(fresh, "--input", str(text)))
    assert contents(fresh / "download") == before
