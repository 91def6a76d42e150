"""Preparation: the same bytes for any number of jobs and after any interruption, and nothing lost on
the way; both phases of pretraining are prepared from one text by one command.
"""

import argparse
import gzip
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bert.data.format import multiset_digest, open_records
from bert.data.shards import Entry, read_index
from bert.pretraining import check
from bert.pretraining.config import PretrainingConfig
from common import env
from input_preprocessing.dataset import prepare
from input_preprocessing.dataset.steps import check_disk
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.stage.cli import parse_phases, parser_of
from input_preprocessing.text import corpus
from input_preprocessing.verify.verdict import failures, verify

from ...bert.data.samples import make_records, write_nvidia
from ...refused import refused
from ..conftest import (
    all_records,
    contents,
    made_up_documents,
    make,
    prepare_options,
    prepared_digests,
    times,
    write_documents,
)

REPOSITORY = Path(__file__).resolve().parents[3]


def test_packed_and_shuffled_data_are_permutations_of_the_instances(packed, fresh):
    prepare.main(prepare_options(fresh, "--shards", "5"))
    unpacked = all_records(fresh / "hdf5" / "training-5")
    rows = all_records(packed / "packed_data")
    assert multiset_digest(unpacked) == multiset_digest(rows)
    assert rows.num_rows < unpacked.num_sequences == rows.num_sequences
    assert rows.row_offsets is not None
    assert np.diff(rows.row_offsets).max() <= 3
    assert not (fresh / "work").exists()
    sizes = [entry.rows for entry in read_index(fresh / "hdf5/training-5").values()]
    assert max(sizes) - min(sizes) <= 1


def test_shards_come_with_an_index_of_what_they_hold(packed):
    folder = packed / "packed_data"
    wanted = {}
    for path in sorted(folder.glob("part_*")):
        records, metadata = open_records(path)
        wanted[path.name] = Entry(records.num_rows, metadata.content_digest)
    assert read_index(folder) == wanted


LINE = "--skip-download --packed-data --shards 4 --dupe-factor 2 --max-seq-length 64".split()  # noqa: SIM905


def test_any_number_of_jobs_gives_the_same_bytes(packed, fresh):
    script = REPOSITORY / "input_preprocessing" / "prepare_data.sh"
    command = [str(script), "--outputdir", str(fresh), "--jobs", "2", *LINE]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert prepared_digests(fresh) == prepared_digests(packed)
    assert "packed_data" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kill_9_at_a_random_moment_changes_nothing(packed, fresh, seed):
    line = [sys.executable, "-m", "input_preprocessing", "prepare"]
    line += ["--outputdir", str(fresh), "--jobs", "2", *LINE]
    quiet = subprocess.DEVNULL
    for _ in range(3):
        process = subprocess.Popen(line, stderr=quiet, start_new_session=True)
        time.sleep(random.Random(seed).uniform(0.3, 3.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert prepared_digests(fresh) == prepared_digests(packed)


def test_a_second_run_repeats_nothing_and_a_changed_option_redoes_all(folder, capsys):
    before = times(folder)
    make(folder)
    assert "nothing to do" in capsys.readouterr().err
    assert before == times(folder)
    make(folder, "--shards", "3")
    assert len(list((folder / "packed_data").glob("part_*"))) == 3
    with refused("too few for 4000 shards"):
        make(folder, "--shards", "4000")


def test_a_lost_shard_and_one_cut_short_are_made_again(folder, packed):
    shard = folder / "packed_data" / "part_00001_of_00004.hdf5"
    for damage in (
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
    ):
        damage(shard)
        make(folder)
        assert prepared_digests(folder) == prepared_digests(packed)


def test_blank_crlf_and_blankless_parts_are_prepared_with_the_others(fresh):
    texts = sorted((fresh / "download" / "results4").glob("part-*"))
    texts[0].write_bytes(b"\n")
    texts[1].write_bytes(texts[1].read_bytes().replace(b"\n", b"\r\n"))
    lines = texts[2].read_bytes().split(b"\n")
    texts[2].write_bytes(b"\n".join(line for line in lines if line))
    make(fresh)
    assert not failures(verify(fresh, jobs=1))


PART = "download/results4/part-00001-of-00003"
EVAL = "download/results4/eval.txt"
CONFIG = "download/bert_config.json"
# A file, what it becomes (None: gone), and what is said
BAD: dict[str, tuple[str, bytes | None, str]] = {
    "a part missing": (PART, None, "no whole set: of 2 parts part-00001-of-00003 is missing"),
    "two sets mixed": ("download/results4/part-00000-of-00009", b"", "of 4 parts part-00000-of-00009 is missing or does not belong"),
    "a part too many": ("download/results4/part-00003-of-00003", b"", "00003-of-00003 is missing or does not belong"),
    "a part still packed": (PART, gzip.compress(b"A text."), "part-00001-of-00003 is not text but gzip"),
    "records for text": (EVAL, b"\x89HDF\r\n\x1a\n" + bytes(90), "eval.txt is not text but HDF5"),
    "a part of no bytes": (PART, b"", "part-00001-of-00003 is empty; copy it again"),
    "a part in Latin-1": (PART, "Köln liegt am Rhein.\n".encode("l1"), "part-00001-of-00003: 1 of 21 bytes are not UTF-8; too few to tell"),
    "evaluation text of no bytes": (EVAL, b"", "eval.txt is empty"),
    "empty evaluation text": (EVAL, b"\n", "evaluation text"),
    "no evaluation text": (EVAL, None, "evaluation text"),
    "no vocabulary": ("download/vocab.txt", None, "vocab.txt"),
    "wrong vocabulary": ("download/vocab.txt", b"a\nb\n", "not a BERT vocabulary"),
    "no configuration": (CONFIG, b"{}", "not a BERT configuration"),
    "small model": (CONFIG, b'{"vocab_size":9,"max_position_embeddings":64}', "vocab_size 9"),
    "no text": ("part", None, "no text"),
    "blank text": ("part", b"\n \n", "no words"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_stops_with_one_line_and_makes_no_data(fresh, case):
    name, content, message = BAD[case]
    parts = (fresh / "download/results4").glob("part*")
    for path in parts if name == "part" else [fresh / name]:
        path.unlink() if content is None else path.write_bytes(content)
    with refused(message) as caught:
        prepare.main(prepare_options(fresh, "--packed-data"))
    assert "\n" not in str(caught.value)
    assert not (fresh / "packed_data").exists()
    assert not (fresh / "prepared-packed.json").exists()


FOLDERS = {"--packed-data": "packed_data", "--binned-data": "hdf5/bins/64", "--shards=2": "hdf5/training-2"}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_shards_of_others_are_seen_before_it_begins(fresh, kind):
    other = fresh / FOLDERS[kind] / "part_00000_of_00002.hdf5"
    other.parent.mkdir(parents=True)
    write_nvidia(other, make_records(20), "variable")
    before = other.read_bytes()
    with refused("was not made by this preparation"):
        prepare.main(prepare_options(fresh, kind))
    assert other.read_bytes() == before
    assert not list(fresh.glob("work/*"))


def free(monkeypatch: pytest.MonkeyPatch, disk: float) -> None:
    usage = shutil._ntuple_diskusage(int(disk), 0, int(disk))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_files_made_earlier_count_as_room(tmp_path, monkeypatch):
    # 0.9 bytes of records for each of ten passes over a byte, twice; and 10 MB.
    free(monkeypatch, 28_000_000 - 5_000)
    with refused("make room"):
        check_disk(tmp_path, 1_000_000, SamplingConfig())
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "instances").write_bytes(bytes(5_000))
    check_disk(tmp_path, 1_000_000, SamplingConfig())


def test_the_need_is_told_and_checked_before_a_download(tmp_path, monkeypatch, capsys):
    free(monkeypatch, 200e9)
    unwanted = lambda *_: pytest.fail("it downloads")  # noqa: E731
    monkeypatch.setattr(prepare.download, "download", unwanted)
    options = prepare_options(tmp_path / "data", "--packed-data", "--dupe-factor", "10")
    options.skip_download = False
    with refused(r"200\.0 GB free"):
        prepare.main(options)
    told = capsys.readouterr().err
    assert "13.2 GB of text: about 261.7 GB of disk (200.0 GB free)" in told


def phases(folder: Path, *more: str) -> argparse.Namespace:
    line = ["--outputdir", str(folder), "--phases", "--dupe-factor", "1", "--jobs", "1"]
    return parser_of("prepare").parse_args([*line, *more])


SIZE = ["--vocab-size", "500", "--layers", "1", "--hidden-size", "64"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    write_documents(path, made_up_documents(60))
    return path


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    """Both phases, undisturbed; not to be written to."""
    folder = tmp_path_factory.mktemp("phases") / "data"
    prepare.main(phases(folder, "--input", str(text), *SIZE))
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
    given = exported(repository, phase, prepared) | site
    config = env.from_env(PretrainingConfig, given)
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


def test_interrupted_in_phase_2_it_repeats_nothing_of_phase_1(
    prepared, text, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "data"
    again = phases(folder, "--input", str(text), *SIZE)
    work = prepare.steps.make_training_files

    def broken(job: prepare.steps.Job) -> tuple[Path, str]:
        if job.config.max_seq_length == 512:
            raise KeyboardInterrupt
        return work(job)

    monkeypatch.setattr(prepare.steps, "make_training_files", broken)
    with pytest.raises(KeyboardInterrupt):
        prepare.main(again)
    monkeypatch.undo()
    assert not (folder / "128" / "work").exists(), "its room is the second phase's"
    first = times(folder / "128")
    assert list((folder / "512" / "work" / "instances").iterdir())
    prepare.main(again)
    assert "128 is already prepared" in capsys.readouterr().err
    assert times(folder / "128") == first
    assert prepared_digests(folder) == prepared_digests(prepared)
    assert not list(folder.rglob("work"))


def test_both_phases_may_be_packed(downloaded, tmp_path):
    line = ["--downloaddir", str(downloaded / "download"), "--skip-download"]
    prepare.main(phases(tmp_path, *line, "--packed-data", "--phases", "32:5,64:10"))
    for length in (32, 64):
        records = all_records(tmp_path / str(length) / "packed_data")
        assert records.row_offsets is not None
        assert records.num_rows < records.num_sequences
        assert records.sequence_lengths.max() == length


def test_what_the_second_phase_lacks_stops_the_first_from_beginning(fresh):
    small = '{"vocab_size":9999,"max_position_embeddings":64}'
    (fresh / "download" / "bert_config.json").write_text(small)
    with refused("fewer than --max-seq-length 512"):
        prepare.main(phases(fresh, "--skip-download", "--phases", "64:10,512:80"))
    assert not (fresh / "64" / "work").exists()


def test_the_disk_must_hold_phase_1_beside_phase_2(downloaded, tmp_path, monkeypatch):
    folder = downloaded / "download"
    line = ["--downloaddir", str(folder), "--skip-download", "--dupe-factor", "100"]
    size = sum(path.stat().st_size for path in (folder / "results4").iterdir())
    free(monkeypatch, 100 * 0.9 * size * 2 + 20_000_000)  # enough for one of them
    with refused("are needed"):
        prepare.main(phases(tmp_path, *line))
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
