"""Verification passes on prepared data, and every kind of damage fails its own check."""

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

from ...refused import refused
from ..conftest import all_records, flip, prepare_options, run
from ..mutations import CHANGES, mutate

SHARD = "packed_data/part_00001_of_00004.hdf5"
OTHER = "packed_data/part_00002_of_00004.hdf5"
EVALUATION = "eval/part_eval_10k.hdf5"


MANIFEST = "prepared-packed.json"


def edit_manifest(folder: Path, **changes: object) -> None:
    made = prepared.read(folder / MANIFEST)
    prepared.write(folder / MANIFEST, dataclasses.replace(made, **changes))


def rewrite(folder: Path, name: str, change: Callable[[Records], Records]) -> None:
    """Changes the records of a file and has its digests, and the manifest's of it, say so."""
    records, metadata = open_records(folder / name)
    fields = {field: np.array(value) for field, value in vars(records).items()}
    written = write_records(folder / name, change(Records(**fields)), metadata)
    files = prepared.read(folder / MANIFEST).files
    edit_manifest(folder, files={**files, name: written.content_digest})


def one_sequence_twice(records: Records) -> Records:
    """Replaces one of two sequences of the same length by the other."""
    lengths = records.sequence_lengths.tolist()
    lost = next(i for i, length in enumerate(lengths) if length in lengths[:i])
    chosen = list(range(len(lengths)))
    chosen[lost] = lengths.index(lengths[lost])
    return records.select(chosen).with_rows(records.row_offsets)


def setting(
    field: str, value: int, at: Callable[[Records], int | np.ndarray] = lambda _: 0
) -> Callable[[Path], None]:
    """Sets values of a shard's records, at the first place if no other is given."""

    def change(records: Records) -> Records:
        getattr(records, field)[at(records)] = value
        return records

    return lambda folder: rewrite(folder, SHARD, change)


def unmasked(records: Records) -> int:
    """A token of the first sequence that is not masked."""
    masked = records.masked_lm_positions[: records.masked_lm_offsets[1]]
    ids = records.input_ids
    return next(i for i in range(2, 60) if i not in masked and ids[i] > MASK)


def all_masked(records: Records) -> np.ndarray:
    counts = np.diff(records.masked_lm_offsets)
    begins = np.repeat(records.sequence_offsets[:-1], counts)
    return begins + records.masked_lm_positions


def swap(folder: Path) -> None:
    for source, target in ((SHARD, "x"), (OTHER, SHARD), ("x", OTHER)):
        (folder / source).rename(folder / target)


def fewer_per_row(folder: Path) -> None:
    recipe = prepared.read(folder / MANIFEST).recipe
    edit_manifest(folder, recipe={**recipe, "max_sequences_per_row": 1})


def relabel(folder: Path) -> None:
    with h5py.File(folder / EVALUATION, "r+") as file:
        file.attrs["source"] = file.attrs["source"].replace("evalset", "Evalset")


def evaluate_on_training_data(folder: Path) -> None:
    training, _ = open_records(folder / SHARD)
    long = np.flatnonzero(np.diff(training.masked_lm_offsets) >= 9)
    count = prepared.read(folder / MANIFEST).eval_samples
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
    "rows of more sequences": (fewer_per_row, "rows", "at most 1"),
    "another index": (lambda d: flip(d / "packed_data/index.json"), "files", "index.json"),
    "a stray of another suffix": (lambda d: shutil.copy(d / SHARD, d / "packed_data/part_9.h5"), "files", "part_9.h5"),
    "another attribute": (relabel, "options", "part_eval_10k"),
    "no [CLS]": (setting("input_ids", 7), "labels", "sequence 0 does not start with [CLS]"),
    "no last [SEP]": (setting("input_ids", 7, lambda r: r.sequence_offsets[6] - 1), "labels", "sequence 5 does not end with [SEP]"),
    "segment B starts elsewhere": (setting("segment_b_start", 1, lambda _: 3), "labels", "no [SEP] before segment B"),
    "a special label": (setting("masked_lm_ids", MASK), "labels", "special token as a label"),
    "a mask without a label": (setting("input_ids", MASK, unmasked), "labels", "[MASK] where nothing is masked"),
    "a token beyond the vocabulary": (setting("masked_lm_ids", 30000), "labels", "outside the vocabulary"),
    "nothing but masks": (setting("input_ids", MASK, all_masked), "masks", "expected 80%"),
    "an evaluation sample lost": (
        lambda d: rewrite(d, EVALUATION, lambda r: r.select(np.arange(1, r.num_sequences))),
        "evaluation", "were prepared",
    ),
    "evaluation on training data": (evaluate_on_training_data, "held out", "have the text"),
}  # fmt: skip


@pytest.fixture
def telling(monkeypatch):
    """Takes sequences of 60 tokens, the longest of these tests, as long enough to be known again."""
    monkeypatch.setattr(audit, "TELLING_MASKS", 9)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_fails_the_check_that_is_there_for_it(folder, telling, damage):
    change, name, message = DAMAGE[damage]
    change(folder)
    (checks,) = verify.verify(folder, jobs=1).values()
    failed = {check.name: check.detail for check in checks if check.holds is False}
    assert message in failed[name], failed


def test_what_was_prepared_is_valid_for_every_kind(folder, telling, two_bins):
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


def test_the_command_prints_a_table_and_one_verdict(packed, folder, repository, capsys):
    line = [str(repository / "verify_dataset.sh"), str(packed), "--jobs", "1"]
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(line, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "coverage" in done.stdout
    verdict = f"{packed}: valid: packed, all 11 checks hold"
    assert done.stdout.splitlines()[-1] == verdict
    (folder / SHARD).unlink()
    with pytest.raises(SystemExit) as ended:
        run("verify", folder, "--json", "--jobs", 1)
    assert json.loads(capsys.readouterr().out)["valid"] is False
    told = "NOT VALID: 3 of 11 checks failed; packed: files: 1 of 7 are missing"
    assert told in str(ended.value.code)


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
def test_a_few_shared_texts_of_a_tiny_set_are_a_note(packed, seen, known, holds):
    (path, *_) = sorted((packed / "packed_data").glob("part_*"))
    recipe = prepared.read(packed / MANIFEST).recipe
    words = verify.vocabulary.load(packed / "phase1" / "vocab.txt")
    found = audit.audit(path, audit.rules_of(words, recipe))
    texts = np.arange(known, dtype=np.uint64)
    assert verify.check_held_out([found._replace(seen=seen)], texts).holds is holds


def test_a_run_need_not_read_again_what_was_verified(folder, monkeypatch):
    verify.verify(folder, jobs=1)
    again = lambda _: pytest.fail("read again")  # noqa: E731
    monkeypatch.setattr(kept_digests, "content_digest", again)
    for name, digest in prepared.read(folder / MANIFEST).files.items():
        if name.endswith(".hdf5"):
            assert kept_digests.digest_of(folder / name) == digest


def test_other_samples_of_the_benchmarks_own_text_are_a_failure(packed, monkeypatch):
    made = prepared.read(packed / MANIFEST)
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


def test_no_damage_of_any_kind_is_taken_for_prepared_data(folder):
    """A fast part of mutations.py."""
    found = mutate(folder, 8 * len(CHANGES), seed=2)
    assert found["ACCEPTED"] == found["not named"] == 0
    assert found["refused"] > 6 * len(CHANGES)
