"""Preparation: the same bytes for any number of jobs and after any interruption, and nothing lost
on the way.
"""

from __future__ import annotations

import functools
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

import bert.data.format
from bert.data.format import multiset_digest, open_records
from bert.data.shards import Entry, read_index
from input_preprocessing.dataset import prepare
from input_preprocessing.records import evalset, pack, sharding, shuffle

from ...bert.data.samples import source_of
from ...refused import refused
from ..conftest import all_records, prepare_options, prepared_digests

REPOSITORY = Path(__file__).resolve().parents[3]


def copy_of(downloaded: Path, tmp_path: Path, name: str = "data") -> Path:
    shutil.copytree(downloaded, tmp_path / name)
    return tmp_path / name


def test_packed_and_shuffled_data_are_permutations_of_the_instances(
    packed, downloaded, tmp_path
):
    folder = copy_of(downloaded, tmp_path)
    prepare.main(prepare_options(folder, "--shards", "5"))
    unpacked = all_records(folder / "hdf5" / "training-5")
    rows = all_records(packed / "packed_data")
    assert multiset_digest(unpacked) == multiset_digest(rows)
    assert rows.num_rows < unpacked.num_sequences == rows.num_sequences
    assert rows.row_offsets is not None
    assert np.diff(rows.row_offsets).max() <= 3
    assert not (folder / "work").exists()
    sizes = [
        open_records(path)[0].num_sequences
        for path in sorted((folder / "hdf5" / "training-5").glob("part_*"))
    ]
    assert max(sizes) - min(sizes) <= 1


LINE = "--skip-download --packed-data --shards 4 --dupe-factor 2 --max-seq-length 64".split()  # noqa: SIM905


def test_any_number_of_jobs_gives_the_same_bytes(packed, downloaded, tmp_path):
    folder = copy_of(downloaded, tmp_path)
    script = REPOSITORY / "input_preprocessing" / "prepare_data.sh"
    command = [str(script), "--outputdir", str(folder), "--jobs", "3", *LINE]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert prepared_digests(folder) == prepared_digests(packed)
    assert "packed_data" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kill_9_at_a_random_moment_changes_nothing(packed, downloaded, tmp_path, seed):
    folder = copy_of(downloaded, tmp_path)
    line = [sys.executable, "-m", "input_preprocessing", "prepare"]
    line += ["--outputdir", str(folder), "--jobs", "2", *LINE]
    for _ in range(3):
        process = subprocess.Popen(
            line, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(random.Random(seed).uniform(0.3, 3.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert prepared_digests(folder) == prepared_digests(packed)


def test_a_second_run_repeats_nothing_and_a_changed_option_redoes_all(
    packed, capsys, tmp_path
):
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.hdf5")}
    prepare.main(prepare_options(folder, "--packed-data", "--shards", "4"))
    assert "nothing to do" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.hdf5")}
    prepare.main(prepare_options(folder, "--packed-data", "--shards", "3"))
    assert len(list((folder / "packed_data").glob("part_*"))) == 3
    text = folder / "download" / "results4" / "part-00000-of-00003"
    text.write_text(text.read_text() + "\nOne more document.\n\n")
    prepare.main(prepare_options(folder, "--packed-data", "--shards", "3"))
    assert multiset_digest(all_records(folder / "packed_data")) != multiset_digest(
        all_records(packed / "packed_data")
    )


def test_a_lost_shard_and_one_cut_short_are_made_again(packed, tmp_path):
    folder = copy_of(packed, tmp_path)
    for damage in (
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
    ):
        damage(folder / "packed_data" / "part_00001_of_00004.hdf5")
        prepare.main(prepare_options(folder, "--packed-data", "--shards", "4"))
        assert prepared_digests(folder) == prepared_digests(packed)


def test_the_evaluation_set_is_picked_as_the_benchmark_does(tmp_path, packed):
    source = packed / "packed_data" / "part_00000_of_00004.hdf5"
    records, metadata = open_records(source)
    bert.data.format.write_records(
        tmp_path / "all.hdf5", records.with_rows(None), metadata
    )
    count = records.num_sequences
    assert evalset.pick_samples(tmp_path / "all.hdf5", tmp_path / "some.hdf5", 30) == 30
    chosen = open_records(tmp_path / "some.hdf5")[0]
    expected = records.select([int(i * (count / 30)) for i in range(30)])
    assert np.array_equal(chosen.input_ids, expected.input_ids)
    assert evalset.pick_samples(tmp_path / "all.hdf5", tmp_path / "some.hdf5") == count


def test_many_groups_shuffle_and_pack_all_sequences(packed, tmp_path, monkeypatch):
    parts = [open_records(path) for path in (packed / "packed_data").glob("part_*")]
    unpacked = (records.with_rows(None) for records, _ in parts)
    source = source_of(tmp_path / "source", *unpacked, metadata=parts[0][1])
    total = multiset_digest(all_records(packed / "packed_data"))
    small = functools.partial(sharding.plan_shards, group_size=100)
    monkeypatch.setattr(sharding, "plan_shards", small)
    shuffle.shuffle_records(source, tmp_path / "a", shards=7, seed=1, jobs=1)
    most = {"shards": 7, "max_sequences_per_row": 2}
    pack.pack_records(source, tmp_path / "b", seed=1, jobs=1, **most)
    shuffle.shuffle_records(source, tmp_path / "c", shards=7, seed=2, jobs=1)
    orders = [all_records(tmp_path / name) for name in "abc"]
    assert {multiset_digest(records) for records in orders} == {total}
    assert not np.array_equal(orders[0].input_ids, orders[2].input_ids)
    assert orders[1].row_offsets is not None
    assert np.diff(orders[1].row_offsets).max() == 2


BAD = {
    "no text": (lambda d: shutil.rmtree(d / "download" / "results4"), "no text"),
    "a part missing": (lambda d: (d / "download/results4/part-00001-of-00003").unlink(),
                       "no whole set: of 2 parts part-00001-of-00003 is missing"),
    "two sets mixed": (lambda d: (d / "download/results4/part-00000-of-00009").touch(),
                       "of 4 parts part-00000-of-00009 is missing or does not belong"),
    "a part too many": (lambda d: (d / "download/results4/part-00003-of-00003").touch(), "00003-of-00003 is missing or does not belong"),
    "a part still packed": (
        lambda d: (d / "download/results4/part-00001-of-00003").write_bytes(gzip.compress(b"A text.")),
        "part-00001-of-00003 is not text but gzip",
    ),
    "records for text": (
        lambda d: (d / "download/results4/eval.txt").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90)),
        "eval.txt is not text but HDF5",
    ),
    "a part of no bytes": (lambda d: (d / "download/results4/part-00001-of-00003").write_bytes(b""),
                           "part-00001-of-00003 is empty; copy it again"),
    "a part in Latin-1": (
        lambda d: (d / "download/results4/part-00001-of-00003").write_bytes("Köln liegt am Rhein.\n".encode("l1")),
        "part-00001-of-00003: 1 of 21 bytes are not UTF-8; too few to tell",
    ),
    "evaluation text of no bytes": (lambda d: (d / "download/results4/eval.txt").write_text(""), "eval.txt is empty"),
    "no evaluation text": (lambda d: (d / "download/results4/eval.txt").unlink(), "evaluation text"),
    "no vocabulary": (lambda d: (d / "download/vocab.txt").unlink(), "vocab.txt"),
    "wrong vocabulary": (lambda d: (d / "download/vocab.txt").write_text("a\nb\n"), "not a BERT vocabulary"),
    "no configuration": (lambda d: (d / "download/bert_config.json").write_text("{}"), "not a BERT configuration"),
    "small model": (
        lambda d: (d / "download/bert_config.json").write_text('{"vocab_size":9,"max_position_embeddings":64}'),
        "vocab_size 9",
    ),
    "empty evaluation text": (lambda d: (d / "download/results4/eval.txt").write_text("\n"), "evaluation text"),
    "blank text": (lambda d: [p.write_text("\n \n") for p in (d / "download/results4").glob("part*")], "no words"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_stops_with_one_line_and_makes_no_data(downloaded, tmp_path, case):
    folder = copy_of(downloaded, tmp_path)
    damage, message = BAD[case]
    damage(folder)
    with refused(message) as caught:
        prepare.main(prepare_options(folder, "--packed-data"))
    assert "\n" not in str(caught.value)
    assert not (folder / "packed_data").exists()
    assert not (folder / "prepared-packed.json").exists()


def test_too_many_shards_are_refused(downloaded, tmp_path):
    folder = copy_of(downloaded, tmp_path)
    with refused("too few for 4000 shards"):
        prepare.main(prepare_options(folder, "--packed-data", "--shards", "4000"))


def test_shards_come_with_an_index_of_what_they_hold(packed):
    folder = packed / "packed_data"
    files = sorted(folder.glob("part_*"))
    entries = read_index(folder)
    assert sorted(entries) == [path.name for path in files]
    for path in files:
        records, metadata = open_records(path)
        assert entries[path.name] == Entry(records.num_rows, metadata.content_digest)
