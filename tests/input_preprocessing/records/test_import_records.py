"""Third-party files become records of the same sequences; errors are one line."""

from __future__ import annotations

import subprocess

import pytest

from bert.data.format import multiset_digest, open_records, verify_records
from input_preprocessing.records.tfrecord_nvidia import import_file, plan_files
from input_preprocessing.tensorflow_files.tfrecord import Widths, write_tfrecord
from input_preprocessing.text.vocabulary import Vocabulary

from ... import forked
from ...bert.data.samples import assert_equal, make_records, write_nvidia
from ...refused import refused

WORDS = Vocabulary(tuple(map(str, range(30522))), "ef" * 16)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return forked.run("input_preprocessing", "import_records", *arguments)


@pytest.mark.parametrize("kind", ["tfrecord", "fixed", "variable", "packed"])
def test_a_foreign_file_becomes_records_of_the_same_sequences(tmp_path, kind):
    records = make_records(13)
    if kind == "packed":
        records = records.with_rows([0, 2, 3, 6, 9, 10, 13])
    if kind == "tfrecord":
        write_tfrecord(tmp_path / "a", records, Widths(64, 20))
    else:
        write_nvidia(tmp_path / "a", records, kind)
    counts = import_file(WORDS, (tmp_path / "a", tmp_path / "b.hdf5"))
    assert counts == (13, 6 if kind == "packed" else 13, 0)
    found, metadata = verify_records(tmp_path / "b.hdf5")
    assert_equal(found, records)
    assert metadata.vocab_md5 == WORDS.md5
    before = (tmp_path / "b.hdf5").stat().st_mtime_ns
    import_file(WORDS, (tmp_path / "a", tmp_path / "b.hdf5"))
    assert (tmp_path / "b.hdf5").stat().st_mtime_ns == before, "finished work is kept"


def test_a_changed_source_or_vocabulary_is_imported_again_and_reported(
    tmp_path, capsys
):
    write_tfrecord(tmp_path / "a", make_records(3), Widths(64, 20))
    import_file(None, (tmp_path / "a", tmp_path / "b.hdf5"))
    other = make_records(4, seed=1)
    write_tfrecord(tmp_path / "a", other, Widths(64, 20))
    assert import_file(None, (tmp_path / "a", tmp_path / "b.hdf5")) == (4, 4, 0)
    made = f"{tmp_path / 'b.hdf5'}: made again, since its source or vocabulary has changed\n"
    assert capsys.readouterr().err == made
    imported = open_records(tmp_path / "b.hdf5")[1]
    assert imported.multiset_digest == multiset_digest(other)
    import_file(WORDS, (tmp_path / "a", tmp_path / "b.hdf5"))
    assert capsys.readouterr().err == made
    assert open_records(tmp_path / "b.hdf5")[1].vocab_md5 == WORDS.md5


def test_the_command_imports_a_folder_of_shards_under_their_names(tmp_path):
    source = tmp_path / "packed_data"
    source.mkdir()
    parts = [make_records(9, seed=i).with_rows([0, 3, 5, 6, 9]) for i in range(3)]
    for i, records in enumerate(parts):
        write_nvidia(source / f"part_{i:05d}", records, "packed")
        (source / f"shard_list_{i:05d}.lst").write_text("[]")
    done = command("--source", source, "--target", tmp_path / "out", "--jobs", 1)
    assert done.returncode == 0, done.stderr
    assert "27 sequences in 12 rows, 3 files" in done.stderr
    made = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in made] == [f"part_{i:05d}.hdf5" for i in range(3)]
    for path, records in zip(made, parts, strict=True):
        assert_equal(open_records(path)[0], records)


def test_rows_of_no_sequence_are_left_out_and_counted(tmp_path):
    source = tmp_path / "packed_data"
    source.mkdir()
    rows = make_records(9).with_rows([0, 0, 3, 5, 5, 9, 9])
    write_nvidia(source / "part_0", rows, "packed")
    done = command("--source", source, "--target", tmp_path / "out", "--jobs", 1)
    assert done.returncode == 0, done.stderr
    assert "9 sequences in 3 rows, 1 files" in done.stderr
    assert done.stderr.endswith("; 3 empty rows dropped\n")
    found, _ = verify_records(tmp_path / "out" / "part_0.hdf5")
    assert_equal(found, make_records(9).with_rows([0, 3, 5, 9]))


def test_bad_sources_are_reported_in_one_line_and_leave_nothing(tmp_path):
    (tmp_path / "text").write_text("no records at all, but long enough for a header")
    (tmp_path / "empty").touch()
    write_tfrecord(tmp_path / "good", make_records(3), Widths(64, 20))
    few = Vocabulary(("a", "b"), "00")
    for source, words, message in (
        ("text", None, "not a TFRecord file"),
        ("empty", None, "is empty"),
        ("good", few, "the vocabulary has 2"),
        ("nothing", None, "cannot read"),
    ):
        with refused(message):
            import_file(words, (tmp_path / source, tmp_path / "out.hdf5"))
    assert not list(tmp_path.glob("*out*"))
    made = "--target", tmp_path / "made", "--jobs", 1
    done = command("--source", tmp_path / "text", *made)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_files_that_would_collide_are_refused(tmp_path):
    (tmp_path / "a.hdf").touch()
    (tmp_path / "a.tfrecord").touch()
    with refused("would both become"):
        plan_files(tmp_path, tmp_path / "out")
    (tmp_path / "a.hdf").unlink()
    (tmp_path / "a.tfrecord").rename(tmp_path / "a.hdf5")
    with refused("overwritten"):
        plan_files(tmp_path, tmp_path)
    (tmp_path / "none").mkdir()
    with refused("no files"):
        plan_files(tmp_path / "none", tmp_path)
