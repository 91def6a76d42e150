"""Exports are what other trainers read; third-party files become records of the same sequences, with digest and rows."""

import dataclasses
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from bert.data.format import (
    multiset_digest,
    open_records,
    verify_records,
    write_records,
)
from bert.data.records import IDS, Records
from input_preprocessing.records import tfrecord_nvidia
from input_preprocessing.records.tfrecord_nvidia import (
    export_folder,
    folders_of,
    import_file,
    plan_files,
)
from input_preprocessing.tensorflow_files.tfrecord import Widths, write_tfrecord
from input_preprocessing.text.vocabulary import Vocabulary

from ...bert.data import samples
from ...bert.data.samples import assert_equal, make_records, source_of, write_nvidia
from ...refused import refused
from ..conftest import alter_first_id, run

METADATA = dataclasses.replace(samples.METADATA, max_seq_length=192)
ROWS = [0, 2, 3, 6, 9, 10, 13]
WORDS = Vocabulary(tuple(map(str, range(30522))), "ef" * 16)


def export(source: Path, target: Path, kind: str, masks: int = 12, unpack=False) -> str:
    most = {"unpack": unpack, "max_predictions_per_seq": masks}
    return export_folder(source, target, format=kind, jobs=1, **most)


def write_source(folder: Path, rows: list[int] | None = None) -> Records:
    records = make_records(13).with_rows(rows)
    source_of(folder, records, metadata=METADATA)
    return records


def entries(path: Path) -> dict[str, tuple[str, list[list[int]]]]:
    """Type and rows of every dataset."""
    found = {}
    with h5py.File(path, "r") as file:
        for name, data in file.items():
            kind = str(h5py.check_vlen_dtype(data.dtype) or data.dtype)
            found[name] = kind, [np.ravel(row).tolist() for row in data[:]]
    return found


@pytest.mark.parametrize("rows", [None, ROWS], ids=["unpacked", "packed"])
@pytest.mark.parametrize("kind", ["tfrecord", "nvidia"])
def test_exported_and_imported_again_the_records_are_the_same(tmp_path, kind, rows):
    records = write_source(tmp_path / "source", rows)
    told = export(tmp_path / "source", tmp_path / "out", kind)
    made = tmp_path / "out" / f"part_0{tfrecord_nvidia.SUFFIXES[kind]}"
    import_file(None, (made, tmp_path / "again.hdf5"))
    found, metadata = open_records(tmp_path / "again.hdf5")
    before = open_records(tmp_path / "source" / "part_0.hdf5")[1]
    assert_equal(found, records if kind == "nvidia" else records.with_rows(None))
    if kind == "nvidia" or not rows:
        assert metadata.content_digest == before.content_digest
    assert metadata.multiset_digest == before.multiset_digest
    assert metadata.max_seq_length == before.max_seq_length
    assert told.startswith("13 sequences, 1 files, ")
    assert told.endswith(before.multiset_digest)


@pytest.mark.parametrize("schema", ["packed", "variable"])
def test_shards_for_nvidias_trainer_have_its_types_and_entries(tmp_path, schema):
    records = write_source(tmp_path / "source", ROWS if schema == "packed" else None)
    export(tmp_path / "source", tmp_path / "out", "nvidia")
    write_nvidia(tmp_path / "theirs", records, schema)
    assert entries(tmp_path / "out" / "part_0.hdf5") == entries(tmp_path / "theirs")


def test_unpacked_rows_are_the_same_sequences_one_by_one(tmp_path):
    records = write_source(tmp_path / "source", ROWS)
    export(tmp_path / "source", tmp_path / "out", "nvidia", unpack=True)
    made = tmp_path / "out" / "part_0.hdf5"
    assert_equal(tfrecord_nvidia.read_third_party(made)[0], records.with_rows(None))


def test_ids_of_a_large_vocabulary_keep_their_type_though_all_are_small(tmp_path):
    records = make_records(13).with_rows(ROWS)
    ids = {name: getattr(records, name).astype(np.int32) for name in IDS}
    (tmp_path / "source").mkdir()
    wide, path = dataclasses.replace(records, **ids), tmp_path / "source" / "a.hdf5"
    digest = write_records(path, wide, METADATA).content_digest
    export(tmp_path / "source", tmp_path / "out", "nvidia")
    words = Vocabulary(tuple(map(str, range(40_000))), "ef" * 16)
    import_file(words, (tmp_path / "out" / "a.hdf5", tmp_path / "again.hdf5"))
    assert open_records(tmp_path / "again.hdf5")[1].content_digest == digest


def test_a_prepared_folder_is_exported_folder_by_folder(packed, tmp_path):
    assert folders_of(packed, tmp_path) == [
        (packed / name, tmp_path / name) for name in ("eval", "packed_data")
    ]  # fmt: skip
    for source, target in folders_of(packed, tmp_path):
        export(source, target, "nvidia")
        for path in source.glob("*.hdf5"):
            assert_equal(open_records(target / path.name)[0], open_records(path)[0])


def test_finished_files_are_kept_and_other_options_write_them_again(tmp_path):
    write_source(tmp_path / "source", ROWS)
    more = make_records(5, 1).with_rows([0, 2, 5])
    write_records(tmp_path / "source" / "part_1.hdf5", more, METADATA)
    out = tmp_path / "out"
    export(tmp_path / "source", out, "tfrecord")
    files = sorted(out.glob("*.tfrecord"))
    made = [path.read_bytes() for path in files]
    times = [path.stat().st_mtime_ns for path in files]
    export(tmp_path / "source", out, "tfrecord")
    assert [path.stat().st_mtime_ns for path in files] == times
    files[1].unlink()
    export(tmp_path / "source", out, "tfrecord")
    assert [path.read_bytes() for path in files] == made
    assert files[0].stat().st_mtime_ns == times[0]
    export(tmp_path / "source", out, "tfrecord", masks=13)
    assert files[0].read_bytes() != made[0]


def test_what_cannot_be_exported_is_reported_in_a_line_and_leaves_no_file(tmp_path):
    records = write_source(tmp_path / "source", ROWS)
    with refused("masked tokens, at most 3 were asked for"):
        export(tmp_path / "source", tmp_path / "out", "tfrecord", masks=3)
    (tmp_path / "others").mkdir()
    write_nvidia(tmp_path / "others" / "part_0", records, "packed")
    with refused("run import_records on it"):
        export(tmp_path / "others", tmp_path / "out", "tfrecord")
    with refused("overwritten"):
        export(tmp_path / "source", tmp_path / "source", "nvidia")
    alter_first_id(tmp_path / "source" / "part_0.hdf5")
    with refused("was changed after it was written"):
        export(tmp_path / "source", tmp_path / "out", "nvidia")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["stage.json"]


def test_a_masked_first_token_is_not_written_as_padding(tmp_path):
    records = make_records(3)
    records.masked_lm_positions[records.masked_lm_offsets[1]] = 0
    source_of(tmp_path / "source", records, metadata=METADATA)
    with refused("sequence 1 has its first token masked"):
        export(tmp_path / "source", tmp_path / "out", "nvidia")


def test_files_of_others_in_the_target_are_left(tmp_path):
    records = write_source(tmp_path / "source", ROWS)
    (tmp_path / "out").mkdir()
    write_nvidia(tmp_path / "out" / "part_0.hdf5", records, "packed")
    before = (tmp_path / "out" / "part_0.hdf5").read_bytes()
    with refused("was not made by export_records"):
        export(tmp_path / "source", tmp_path / "out", "nvidia")
    assert (tmp_path / "out" / "part_0.hdf5").read_bytes() == before


def test_the_commands_tell_the_same_digest_on_the_way_out_and_back(tmp_path, capsys):
    def told(stage: str, source: str, target: str, *more: object) -> str:
        given = "--source", tmp_path / source, "--target", tmp_path / target
        run(stage, "--jobs", 1, *given, *more)
        return capsys.readouterr().err

    digest = multiset_digest(write_source(tmp_path / "source", ROWS))
    out = told("export_records", "source", "out", "--format", "nvidia")
    assert out.startswith(f"{tmp_path / 'out'}: 13 sequences, 1 files")
    assert out.endswith(f"multiset digest {digest}\n")
    back = told("import_records", "out", "again")
    assert back.startswith(f"{tmp_path / 'again'}: 13 sequences in 6 rows, 1 files")
    assert back.endswith(f"multiset digest {digest}\n")
    shutil.rmtree(tmp_path / "source")
    with pytest.raises(SystemExit, match="no data file"):
        told("export_records", "source", "x", "--format", "nvidia")


@pytest.mark.parametrize("kind", ["tfrecord", "fixed", "variable", "packed"])
def test_a_foreign_file_becomes_records_of_the_same_sequences(tmp_path, kind):
    records = make_records(13)
    if kind == "packed":
        records = records.with_rows(ROWS)
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


def test_a_changed_source_or_vocabulary_is_imported_again(tmp_path, capsys):
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


def test_the_command_imports_a_folder_without_its_empty_rows(tmp_path, capsys):
    source = tmp_path / "packed_data"
    source.mkdir()
    parts = [make_records(9, seed=i) for i in range(3)]
    rows = [[0, 3, 5, 6, 9], [0, 3, 5, 6, 9], [0, 0, 3, 5, 5, 9, 9]]
    for i, records in enumerate(parts):
        write_nvidia(source / f"part_{i:05d}", records.with_rows(rows[i]), "packed")
        (source / f"shard_list_{i:05d}.lst").write_text("[]")
    run("import_records", "--source", source, "--target", tmp_path / "out", "--jobs", 1)
    told = capsys.readouterr().err
    assert "27 sequences in 11 rows, 3 files" in told
    assert told.endswith("; 3 empty rows dropped\n")
    made = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in made] == [f"part_{i:05d}.hdf5" for i in range(3)]
    rows[2] = [0, 3, 5, 9]
    for path, records, kept in zip(made, parts, rows, strict=True):
        assert_equal(verify_records(path)[0], records.with_rows(kept))


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
    with pytest.raises(SystemExit) as ended:
        run("import_records", "--source", tmp_path / "text", "--target", tmp_path / "x")
    assert "\n" not in str(ended.value.code)


def test_records_of_others_are_not_written_over_by_an_import(tmp_path):
    write_nvidia(tmp_path / "a", make_records(20), "variable")
    write_source(tmp_path / "target")
    shard = tmp_path / "target" / "part_0.hdf5"
    before = shard.read_bytes()
    with refused(rf"{shard.name} was not made by import_records"):
        import_file(None, (tmp_path / "a", shard))
    assert shard.read_bytes() == before


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
