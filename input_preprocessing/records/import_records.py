"""Turns files of training instances that others made into record files, one for one, checked.

Takes the reference's TFRecord files (checksums verified) and NVIDIA's HDF5 shards: fixed-length, variable-length and
packed, whose rows are kept. The kind is known by the file's contents. Finished files are kept on a second run.

A list of what the files must be (--check-list) is compared before anything is made of them. A line is `md5  name`, as
md5sum writes it: of the file's bytes; or `name  md5`, as in the lists that NVIDIA publishes (4320_shards_varlength.chk
and others): of input_ids alone, whatever else the file holds. Blank lines and lines that begin with # are skipped; of a
name with folders the last part counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from bert.data.digests import add_multiset_digests
from bert.data.format import check_contents, open_records, write_records
from bert.data.records import IDS, DataError, Metadata, Records, id_dtype
from input_preprocessing.stage.cli import add_jobs, human_bytes
from input_preprocessing.stage.manifest import md5_of
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.tensorflow_files.tfrecord import read_tfrecord
from input_preprocessing.text import vocabulary
from input_preprocessing.text.vocabulary import Vocabulary

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SUFFIXES = (".hdf5", ".hdf", ".h5", ".tfrecord", ".tfrecords")
NOT_RECORDS = (".lst", ".json", ".txt", ".md5", ".chk")
_MD5SUM = re.compile(r"([0-9a-fA-F]{32})\s+\*?(\S.*)")
_PUBLISHED = re.compile(r"(\S.*?)\s+([0-9a-fA-F]{32})")


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


@dataclass(frozen=True)
class Wanted:
    """What a list says of one file: md5, lower case, of its bytes or of its input_ids."""

    md5: str
    of_input_ids: bool


def read_list(path: Path) -> dict[str, Wanted]:
    """The lines of a list, by file name.

    Raises:
        DataError: unreadable, empty, or a line that names no file or none md5, or a file twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise DataError(f"cannot read {path}: {reason}; check the list") from error
    found: dict[str, Wanted] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if parts := _MD5SUM.fullmatch(line.strip()):
            md5, name = parts.groups()
        elif published := _PUBLISHED.fullmatch(line.strip()):
            name, md5 = published.groups()
        else:
            raise DataError(f"{path}: line {number} is neither 'md5  name' nor 'name  md5'; check the list")
        name, wanted = name.rpartition("/")[2], Wanted(md5.lower(), of_input_ids=parts is None)
        if found.setdefault(name, wanted) != wanted:
            raise DataError(f"{path}: line {number} gives {name} another md5 than a line before; check the list")
    if not found:
        raise DataError(f"{path} lists no files; check the list")
    return found


def input_ids_digest(rows: Iterable[Sequence[int]]) -> str:
    """Digest of input_ids as NVIDIA's lists have it: md5 of the list of the md5 of each row, all as Python's text."""
    digests = [hashlib.md5(str(list(row)).encode()).hexdigest() for row in rows]
    return hashlib.md5(str(digests).encode()).hexdigest()


def _compare(task: tuple[Path, Wanted]) -> str:
    """What is wrong with a file, in a line; '' where it is the one listed."""
    path, wanted = task
    try:
        if wanted.of_input_ids:
            with h5py.File(path, "r") as file:
                md5 = input_ids_digest(row.tolist() for row in file["input_ids"][:])
        else:
            md5 = md5_of(path)
    except DataError as error:
        return str(error)
    except (OSError, KeyError):
        return f"{path} has no input_ids to compare (not HDF5, or damaged); copy it again"
    what = "md5 of input_ids" if wanted.of_input_ids else "md5"
    return "" if md5 == wanted.md5 else f"{path} has {what} {md5}, the list {wanted.md5}; copy it again"


def differences(files: Sequence[Path], listed: dict[str, Wanted], *, whole: bool, jobs: int) -> list[str]:
    """Every file that is not as listed, one line each; with `whole` those listed that are not there too."""
    here = [path for path in files if path.name in listed]
    weights = [path.stat().st_size for path in here]
    told = run_tasks("check", _compare, [(path, listed[path.name]) for path in here], jobs=jobs, weights=weights)
    told += [f"{path} is not on the list; move it away" for path in files if path.name not in listed]
    names = {path.name for path in files}
    missing = [f"{name} is missing; copy it" for name in listed if name not in names] if whole else []
    return [*filter(None, told), *missing]


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
