"""Exports are what other trainers read, and importing them restores the records, including digest
and rows.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from bert.data.format import multiset_digest, open_records, write_records
from bert.data.records import IDS, Records
from input_preprocessing.records import tfrecord_nvidia
from input_preprocessing.records.tfrecord_nvidia import (
    export_folder,
    folders_of,
    import_file,
)
from input_preprocessing.stage.cli import run_stage
from input_preprocessing.text.vocabulary import Vocabulary

from ...bert.data import samples
from ...bert.data.samples import assert_equal, make_records, source_of, write_nvidia
from ...refused import refused

METADATA = dataclasses.replace(samples.METADATA, max_seq_length=192)
ROWS = [0, 2, 3, 6, 9, 10, 13]


def export(source: Path, target: Path, kind: str, masks: int = 12, unpack=False) -> str:
    most = {"unpack": unpack, "max_predictions_per_seq": masks}
    return export_folder(source, target, format=kind, jobs=1, **most)


def write_source(folder: Path, rows: list[int] | None = None) -> Records:
    records = make_records(13).with_rows(rows)
    source_of(folder, records, metadata=METADATA)
    return records


def entries(path: Path) -> dict[str, tuple[str, list[list[int]]]]:
    """Type and rows of every dataset."""
    with h5py.File(path, "r") as file:
        return {
            name: (
                str(h5py.check_vlen_dtype(data.dtype) or data.dtype),
                [np.ravel(row).tolist() for row in data[:]],
            )
            for name, data in file.items()
        }


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
def test_shards_for_nvidias_trainer_have_its_datasets_types_and_entries(
    tmp_path, schema
):
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
    data = bytearray((tmp_path / "source" / "part_0.hdf5").read_bytes())
    where = data.index(records.masked_lm_ids.tobytes())
    data[where] ^= 1
    (tmp_path / "source" / "part_0.hdf5").write_bytes(data)
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


def test_the_commands_tell_the_same_digest_on_the_way_out_and_back(
    tmp_path, monkeypatch, capsys
):
    def run(stage: str, source: str, target: str, *more: str) -> str:
        given = ["--source", tmp_path / source, "--target", tmp_path / target, *more]
        monkeypatch.setattr(sys, "argv", [stage, "--jobs", "1", *map(str, given)])
        run_stage(stage)
        return capsys.readouterr().err

    digest = multiset_digest(write_source(tmp_path / "source", ROWS))
    told = run("export_records", "source", "out", "--format", "nvidia")
    assert told.startswith(f"{tmp_path / 'out'}: 13 sequences, 1 files")
    assert told.endswith(f"multiset digest {digest}\n")
    told = run("import_records", "out", "again")
    assert told.startswith(f"{tmp_path / 'again'}: 13 sequences in 6 rows, 1 files")
    assert told.endswith(f"multiset digest {digest}\n")
    shutil.rmtree(tmp_path / "source")
    with pytest.raises(SystemExit, match="no data file"):
        run("export_records", "source", "x", "--format", "nvidia")
