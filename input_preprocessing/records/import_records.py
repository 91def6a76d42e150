"""Turns files of training instances that others made into record files, one for one, checked.

Takes the reference's TFRecord files (checksums verified) and NVIDIA's HDF5 shards: fixed-length, variable-length and
packed, whose rows are kept. The kind is known by the file's contents. Finished files are kept on a second run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

from bert.data.digests import add_multiset_digests
from bert.data.format import check_contents, open_records, write_records
from bert.data.records import IDS, DataError, Metadata, Records, id_dtype
from input_preprocessing.records.check_list import differences, read_list
from input_preprocessing.stage.cli import add_jobs, human_bytes
from input_preprocessing.stage.manifest import md5_of
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.tensorflow_files.tfrecord import read_tfrecord
from input_preprocessing.text import vocabulary
from input_preprocessing.text.vocabulary import Vocabulary

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SUFFIXES = (".hdf5", ".hdf", ".h5", ".tfrecord", ".tfrecords")
NOT_RECORDS = (".lst", ".json", ".txt", ".md5", ".chk")


def read_foreign(path: Path) -> tuple[Records, Metadata]:
    """Sequences (and rows, where they are packed) of a TFRecord or HDF5 file.

    Raises:
        DataError: unreadable, damaged or of another kind.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(_HDF5_SIGNATURE))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check --source") from error
    if not start:
        raise DataError(f"{path} is empty; copy it again")
    return open_records(path) if start == _HDF5_SIGNATURE else read_tfrecord(path)


def import_file(task: tuple[Path, Path, Vocabulary | None]) -> tuple[int, int, int]:
    """Writes the record file of a foreign one, unless it is there; its sequences, rows, and rows of none left out.

    Raises:
        DataError: unreadable source, tokens that the vocabulary lacks, or unwritable target.
    """
    source, target, words = task
    origin, vocab_md5 = ((source.name, md5_of(source)),), words.md5 if words else ""
    try:
        records, metadata = open_records(target)
        if metadata.source == origin and metadata.vocab_md5 == vocab_md5:
            return records.num_sequences, records.num_rows, 0
    except DataError:
        pass
    records, metadata = read_foreign(source)
    metadata = dataclasses.replace(metadata, source=origin, vocab_md5=vocab_md5)
    check_contents(source, records, metadata)
    largest = max(records.input_ids.max(initial=0), records.masked_lm_ids.max(initial=0))
    if words and largest >= len(words):
        raise DataError(f"{source} has token {largest}, the vocabulary has {len(words)}; give the one it was made with")
    if words:  # every shard of a data set has ids of one type, whatever ids it happens to hold
        ids = {name: getattr(records, name).astype(id_dtype(len(words))) for name in IDS}
        records = dataclasses.replace(records, **ids)
    empty = records.num_empty_rows
    if records.row_offsets is not None:
        records = records.with_rows(np.unique(records.row_offsets))
    write_records(target, records, metadata)
    return records.num_sequences, records.num_rows, empty


def plan_files(source: Path, target: Path, suffix: str = ".hdf5") -> list[tuple[Path, Path]]:
    """Each source file and the file to make of it in `target`, of the same name but for the suffix.

    Raises:
        DataError: there are none, or two would make the same.
    """
    files = [source]
    if source.is_dir():
        found = [path for path in source.iterdir() if path.is_file() and not path.name.startswith(".")]
        files = sorted(path for path in found if path.suffix not in NOT_RECORDS)
    if not files:
        raise DataError(f"no files in {source}; check --source")
    planned: dict[Path, Path] = {}
    for path in files:
        made = target / f"{path.stem if path.suffix in _SUFFIXES else path.name}{suffix}"
        if made in planned:
            raise DataError(f"{path} and {planned[made]} would both become {made}; move one of them")
        if made.resolve() == path.resolve():
            raise DataError(f"{made} would be written over; give another --target")
        planned[made] = path
    return [(path, made) for made, path in planned.items()]


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, help="file, or folder of files")
    parser.add_argument("--target", type=Path, required=True, help="folder for the record files")
    vocab = "vocab.txt they were made with: tokens are checked, and its md5 is recorded"
    parser.add_argument("--vocab-file", type=Path, help=vocab)
    listed = (
        "import nothing unless the files are those listed: lines 'md5  name' as md5sum writes them, or 'name  md5' "
    )
    parser.add_argument("--check-list", type=Path, help=listed + "of input_ids as NVIDIA publishes")
    parser.add_argument("--json", action="store_true", help="print counts and the digest of the sequences as JSON")
    add_jobs(parser)
    options = parser.parse_args()
    words = vocabulary.load(options.vocab_file) if options.vocab_file else None
    files = plan_files(options.source, options.target)
    if options.check_list:
        whole, paths = options.source.is_dir(), [path for path, _ in files]
        wrong = differences(paths, read_list(options.check_list), whole=whole, jobs=options.jobs)
        for line in wrong:
            print(f"import_records: {line}", file=sys.stderr)
        if wrong:
            told = f"{options.source} is not as {options.check_list} lists it: {len(wrong)} differences, told above"
            raise DataError(f"{told}; nothing was imported")
        print(f"{options.source}: {len(files)} files as {options.check_list} lists them", file=sys.stderr)
    options.target.mkdir(parents=True, exist_ok=True)
    weights = [path.stat().st_size if path.exists() else 0 for path, _ in files]
    tasks = [(path, made, words) for path, made in files]
    counts = run_tasks("import", import_file, tasks, jobs=options.jobs, weights=weights)
    sequences, rows, empty = (sum(count[i] for count in counts) for i in range(3))
    if options.json:
        digest = add_multiset_digests([open_records(made)[1].multiset_digest for _, made in files])
        total = {"files": len(files), "sequences": sequences, "rows": rows, "empty_rows": empty}
        print(json.dumps({**total, "multiset_digest": digest}))
    size = human_bytes(sum(made.stat().st_size for _, made in files))
    note = f"; {empty:,} rows of no sequence left out" if empty else ""
    told = f"{options.target}: {sequences:,} sequences in {rows:,} rows, {len(files)} files, {size}{note}"
    print(told, file=sys.stderr)
