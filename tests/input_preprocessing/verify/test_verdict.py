"""Verification passes on prepared data, and every kind of damage fails its own check."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from bert.data import kept_digests, prepared
from bert.data.format import open_records, write_records
from bert.data.records import Records
from input_preprocessing.dataset import prepare
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.verify import audit
from input_preprocessing.verify import verdict as verify

from ... import forked
from ...refused import refused
from ..conftest import all_records, flip, prepare_options

SHARD = "packed_data/part_00001_of_00004.hdf5"
OTHER = "packed_data/part_00002_of_00004.hdf5"
EVALUATION = "eval/part_eval_10k.hdf5"


def rewrite(folder: Path, name: str, change: Callable[[Records], Records]) -> None:
    """Changes the records of a file and has its digests, and the manifest's of it, say so."""
    records, metadata = open_records(folder / name)
    copy = dataclasses.replace(records, **{f.name: np.array(getattr(records, f.name))
                                           for f in dataclasses.fields(Records)})  # fmt: skip
    written = write_records(folder / name, change(copy), metadata)
    path = folder / "prepared-packed.json"
    made = prepared.read(path)
    files = {**made.files, name: written.content_digest}
    prepared.write(path, dataclasses.replace(made, files=files))


def one_sequence_twice(records: Records) -> Records:
    """Replaces one of two sequences of the same length by the other."""
    lengths = records.sequence_lengths.tolist()
    lost = next(i for i, length in enumerate(lengths) if length in lengths[:i])
    chosen = list(range(len(lengths)))
    chosen[lost] = lengths.index(lengths[lost])
    return records.select(chosen).with_rows(records.row_offsets)


def edit(**values: Callable[[Records], np.ndarray]) -> Callable[[Records], Records]:
    return lambda records: dataclasses.replace(
        records, **{name: f(records) for name, f in values.items()}
    )


def set_at(array: np.ndarray, index: int | np.ndarray, value: int) -> np.ndarray:
    array[index] = value
    return array


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "prepared-packed.json"
    prepared.write(path, dataclasses.replace(prepared.read(path), **changes))


def swap(folder: Path) -> None:
    (folder / SHARD).rename(folder / "x")
    (folder / OTHER).rename(folder / SHARD)
    (folder / "x").rename(folder / OTHER)


def evaluate_on_training_data(folder: Path) -> None:
    training, _ = open_records(folder / SHARD)
    long = np.flatnonzero(np.diff(training.masked_lm_offsets) >= 9)
    count = json.loads((folder / "prepared-packed.json").read_text())["eval_samples"]
    rewrite(folder, EVALUATION, lambda _: training.select(np.resize(long, count)))


MASK = 4  # ids of the trained vocabulary: [PAD] [UNK] [CLS] [SEP] [MASK]

DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a shard is missing": (lambda d: (d / SHARD).unlink(), "files", "1 of 7 are missing"),
    "a shard too many": (lambda d: shutil.copy(d / SHARD, d / "packed_data" / "part_9.hdf5"), "files", "1 more"),
    "two shards swapped": (swap, "contents", "2 of 7 files are not the ones prepared"),
    "a shard there twice": (lambda d: shutil.copy(d / SHARD, d / OTHER), "contents", "not the ones prepared"),
    "a bit flipped": (lambda d: flip(d / SHARD), "contents", "damaged"),
    "a shard cut short": (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:5000]), "contents", "damaged"),
    "another vocabulary": (lambda d: (d / "phase1/vocab.txt").open("a").write("x\n"), "contents", "phase1/vocab.txt"),
    "a sequence lost, one doubled": (lambda d: rewrite(d, SHARD, one_sequence_twice), "coverage", "permutation"),
    "other counts": (lambda d: edit_manifest(d, tokens=5), "counts", "5 were prepared"),
    "rows of more sequences": (
        lambda d: edit_manifest(d, recipe={**prepared.read(d / "prepared-packed.json").recipe,
                                           "max_sequences_per_row": 1}),
        "rows", "at most 1",
    ),
    "no [CLS]": (
        lambda d: rewrite(d, SHARD, edit(input_ids=lambda r: set_at(r.input_ids, 0, 7))),
        "labels", "sequence 0 does not start with [CLS]",
    ),
    "no last [SEP]": (
        lambda d: rewrite(d, SHARD, edit(input_ids=lambda r: set_at(r.input_ids, r.sequence_offsets[6] - 1, 7))),
        "labels", "sequence 5 does not end with [SEP]",
    ),
    "segment B starts elsewhere": (
        lambda d: rewrite(d, SHARD, edit(segment_b_start=lambda r: set_at(r.segment_b_start, 3, 1))),
        "labels", "no [SEP] before segment B",
    ),
    "a special label": (
        lambda d: rewrite(d, SHARD, edit(masked_lm_ids=lambda r: set_at(r.masked_lm_ids, 0, MASK))),
        "labels", "special token as a label",
    ),
    "a mask without a label": (
        lambda d: rewrite(d, SHARD, edit(input_ids=lambda r: set_at(
            r.input_ids, next(i for i in range(2, 60) if i not in r.masked_lm_positions[: r.masked_lm_offsets[1]]
                              and r.input_ids[i] > MASK), MASK))),
        "labels", "[MASK] where nothing is masked",
    ),
    "a token beyond the vocabulary": (
        lambda d: rewrite(d, SHARD, edit(masked_lm_ids=lambda r: set_at(r.masked_lm_ids, 0, 30000))),
        "labels", "outside the vocabulary",
    ),
    "nothing but masks": (
        lambda d: rewrite(d, SHARD, edit(input_ids=lambda r: set_at(
            r.input_ids, np.repeat(r.sequence_offsets[:-1], np.diff(r.masked_lm_offsets)) + r.masked_lm_positions,
            MASK))),
        "masks", "expected 80%",
    ),
    "an evaluation sample lost": (
        lambda d: rewrite(d, EVALUATION, lambda r: r.select(np.arange(1, r.num_sequences))),
        "evaluation", "were prepared",
    ),
    "evaluation on training data": (evaluate_on_training_data, "held out", "have the text"),
}  # fmt: skip


@pytest.fixture
def telling(monkeypatch):
    """Takes sequences of 60 tokens, the longest of these tests, as long enough to be known
    again.
    """
    monkeypatch.setattr(audit, "TELLING_MASKS", 9)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_fails_the_check_that_is_there_for_it(packed, tmp_path, telling, damage):
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    change, name, message = DAMAGE[damage]
    change(folder)
    (checks,) = verify.verify(folder, jobs=1).values()
    failed = {check.name: check.detail for check in checks if check.holds is False}
    assert message in failed[name], failed


def test_what_was_prepared_is_valid_for_every_kind(packed, tmp_path, telling, two_bins):
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    prepare.main(prepare_options(folder, "--binned-data", "--shards", "1"))
    prepare.main(prepare_options(folder, "--shards", "2"))
    found = verify.verify(folder, jobs=1)
    assert set(found) == {"packed", "binned", "unpacked"}
    assert not verify.failures(found)
    checks = (check for checks in found.values() for check in checks)
    once = {check.detail for check in checks if check.name == "coverage"}
    assert len(once) == 1, "the same instances, however they are arranged"


def test_one_token_is_a_sequence_without_next_sentence_prediction(fresh):
    text = fresh / "download" / "results4" / "part-00000-of-00003"
    text.write_text(text.read_text() + "\nba\n\nko\n")
    prepare.main(prepare_options(fresh, "--packed-data", "--nsp", "0", "--shards", "2"))
    lengths = all_records(fresh / "packed_data").sequence_lengths
    assert lengths.min() == 3, "[CLS], the token and [SEP]"
    assert not verify.failures(verify.verify(fresh, jobs=1))


def test_the_published_digest_is_that_of_lists_as_text():
    ids = np.array([101, 7, 102, 101, 9, 9, 102], dtype=np.int16)
    empty = np.zeros(0, dtype=np.int16)
    records = Records(
        input_ids=ids, sequence_offsets=np.array([0, 3, 7]), segment_b_start=empty, masked_lm_positions=empty,
        masked_lm_ids=empty, masked_lm_offsets=np.zeros(3, np.int64), next_sentence_labels=np.zeros(2, np.int8),
    )  # fmt: skip
    # echo -n '[101, 7, 102]' | md5sum, and so on; then of "['...', '...']"
    assert prepared.published_digest(records) == "e4812af44a7458295207d5d48a5aad58"


@pytest.mark.parametrize("how", ["index", "attribute", "stray"])
def test_what_a_trainer_would_read_beside_the_digests_is_checked_too(
    packed, tmp_path, how
):
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    if how == "index":
        flip(folder / "packed_data/index.json")
    elif how == "stray":
        shutil.copy(folder / SHARD, folder / "packed_data/part_9.h5")
    else:
        with h5py.File(folder / EVALUATION, "r+") as file:
            file.attrs["source"] = file.attrs["source"].replace("evalset", "Evalset")
    (failed,) = verify.failures(verify.verify(folder, jobs=1))
    named = {"index": "index.json", "stray": "part_9.h5", "attribute": "part_eval_10k"}
    assert named[how] in failed


def test_the_command_prints_a_table_and_one_verdict(packed, tmp_path, repository):
    line = [str(repository / "verify_dataset.sh"), str(packed), "--jobs", "1"]
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(line, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "coverage" in done.stdout
    verdict = f"{packed}: valid: packed, all 11 checks hold"
    assert done.stdout.splitlines()[-1] == verdict
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    (folder / SHARD).unlink()
    done = forked.run("input_preprocessing", "verify", folder, "--json", "--jobs", 1)
    assert done.returncode == 1
    assert json.loads(done.stdout)["valid"] is False
    last = done.stderr.splitlines()[-1]
    assert "NOT VALID: 3 of 11 checks failed; packed: files: 1 of 7 are missing" in last
    assert "Traceback" not in done.stderr


def test_a_folder_that_was_not_prepared_is_an_error(tmp_path):
    with refused(r"has no prepared-\*\.json; .* import its records first"):
        verify.verify(tmp_path, jobs=1)


@pytest.mark.parametrize(("seen", "known", "holds"), [
    (10, 118, None),
    (11, 118, False),
    (1, 118, True),
    (99, 10_000, True),
    (101, 10_000, False),
])  # fmt: skip
def test_a_few_shared_texts_of_a_tiny_set_are_a_note_not_a_failure(
    packed, seen, known, holds
):
    (path, *_) = sorted((packed / "packed_data").glob("part_*"))
    recipe = prepared.read(packed / "prepared-packed.json").recipe
    words = verify.vocabulary.load(packed / "phase1" / "vocab.txt")
    found = audit.audit(path, audit.rules_of(words, recipe))
    texts = np.arange(known, dtype=np.uint64)
    assert verify.check_held_out([found._replace(seen=seen)], texts).holds is holds


def test_a_run_need_not_read_again_what_was_verified(packed, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    shutil.copytree(packed, folder, ignore=shutil.ignore_patterns("download"))
    verify.verify(folder, jobs=1)
    monkeypatch.setattr(
        kept_digests, "content_digest", lambda _: pytest.fail("read again")
    )
    for name, digest in prepared.read(folder / "prepared-packed.json").files.items():
        if name.endswith(".hdf5"):
            assert kept_digests.digest_of(folder / name) == digest


def test_other_evaluation_samples_of_the_benchmarks_text_and_options_are_a_failure(
    packed, monkeypatch
):
    made = prepared.read(packed / "prepared-packed.json")
    recipe = {**made.recipe, **dataclasses.asdict(SamplingConfig())}
    recipe |= {"num_eval_samples": 10_000, "vocab_md5": prepared.VOCAB_MD5}
    benchmark = dataclasses.replace(made, recipe=recipe, texts=prepared.TEXT_MD5)
    assert verify._is_benchmarks(benchmark)
    assert not verify._is_benchmarks(dataclasses.replace(benchmark, texts={}))
    assert not verify._is_benchmarks(dataclasses.replace(benchmark, recipe=made.recipe))
    monkeypatch.setattr(verify, "_is_benchmarks", lambda _: True)
    found = {check.name: check for check in verify.verify(packed, jobs=1)["packed"]}
    assert found["evaluation"].holds is False
    published = f"not the published {prepared.PUBLISHED_EVALUATION}"
    assert published in found["evaluation"].detail
