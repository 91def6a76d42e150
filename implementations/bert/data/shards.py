"""A folder of record files as one long list of rows."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert.data.format import open_records
from bert.data.index import NAME as INDEX
from bert.data.index import Entry, count_rows, read_index
from bert.data.records import SUFFIXES, DataError, Metadata, Records

_MOST_OPEN = 128  # bins and exchange read from many files in turn
_DESCRIPTORS_PER_FILE = 8  # one a dataset
_OTHER_DESCRIPTORS = 256


def _most_open() -> int:
    """Files to keep open: _MOST_OPEN, or what the system's limit on open files allows."""
    wanted = _MOST_OPEN * _DESCRIPTORS_PER_FILE + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, min(_MOST_OPEN, (soft - _OTHER_DESCRIPTORS) // _DESCRIPTORS_PER_FILE))
    return _MOST_OPEN


def list_shards(folder: Path, variable: str) -> list[Path]:
    """The record files of a folder (or the one file named), sorted by name.

    ``variable`` is the environment variable that named it, for the message. Raises DataError where there are none.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise DataError(f"{variable}={folder}: no such folder; prepare the data first, or correct the path")
    shards = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
    if not shards:
        raise DataError(f"{variable}={folder}: no record files (*.hdf5) in it; prepare the data first")
    return _of_one_use(shards, folder, variable)


def _of_one_use(shards: list[Path], folder: Path, variable: str) -> list[Path]:
    """Of a folder that holds training and test shards side by side, as DeepLearningExamples' and Habana's scripts leave
    them, those of the variable's use; it is said that the others are left."""
    training, test = ([path for path in shards if f"_{use}_" in path.name] for use in ("training", "test"))
    if not training or not test:
        return shards
    wanted, kept, other, left = ("test", test, "training", training)
    if variable != "EVALDIR":
        wanted, kept, other, left = other, left, wanted, kept
    print(
        f"bert: {variable}={folder}: {len(kept)} *_{wanted}_* files are used, {len(left)} *_{other}_* files are not",
        file=sys.stderr,
    )
    return kept


def list_bins(folder: Path, variable: str) -> list[list[Path]]:
    """The record files of each bin: of the subfolders named by the bins' greatest lengths, the shortest bin first.

    Raises DataError where there are none.
    """
    found = [path for path in folder.iterdir() if path.name.isdigit() and path.is_dir()] if folder.is_dir() else []
    if not found:
        raise DataError(
            f"{variable}={folder}: no bins (folders 128, 256, ...) in it; make them with "
            "python -m input_preprocessing bins, or set BATCHING=rows"
        )
    return [list_shards(path, variable) for path in sorted(found, key=lambda path: int(path.name))]


def _plain(records: Records) -> Records:
    """The records as plain arrays on the same memory: each use of a memmap costs microseconds more."""
    fields = {field.name: getattr(records, field.name) for field in dataclasses.fields(records)}
    plain: dict[str, Any] = {name: None if value is None else np.asarray(value) for name, value in fields.items()}
    return Records(**plain)


class Shards:
    """Record files opened when first needed, some kept open."""

    def __init__(self, paths: Sequence[Path], max_seq_length: int, files_of_bins: Sequence[int] = ()) -> None:
        """files_of_bins: how many of the paths belong to each bin, where there are bins."""
        self.paths = list(paths)
        self.max_seq_length = max_seq_length
        self.bins = np.split(np.arange(len(self.paths)), np.cumsum(files_of_bins)[:-1].astype(np.int64))
        self._open: OrderedDict[int, Records] = OrderedDict()
        self._most_open = _most_open()
        self._entries: dict[Path, Entry] = {}
        self._told: set[Path] = set()
        self.vocab_md5 = ""

    def __len__(self) -> int:
        return len(self.paths)

    def row_counts(self) -> np.ndarray:
        """Rows of every file, int64, from the folders' indices where they have one; opens the first file."""
        if not self._entries:
            indices = {folder: read_index(folder) for folder in {path.parent for path in self.paths}}
            for path in self.paths:
                self._entries[path] = indices[path.parent].get(path.name) or Entry(count_rows(path))
            _ = self[0]
        return np.array([self._entries[path].rows for path in self.paths], dtype=np.int64)

    def __getitem__(self, number: int) -> Records:
        """The records of one file. Raises DataError for a file that cannot be used in this run."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        path = self.paths[number]
        records, metadata = open_records(path)
        self._check(path, metadata)
        expected = self._entries.get(path, Entry(records.num_rows))
        if expected.rows != records.num_rows or expected.content_digest not in ("", metadata.content_digest):
            raise DataError(f"{path} is not the file that {path.parent / INDEX} tells of; prepare the data again")
        self._tell_empty_rows(path, records, metadata)
        records = _plain(records)
        self._open[number] = records
        if len(self._open) > self._most_open:
            self._open.popitem(last=False)
        return records

    def _tell_empty_rows(self, path: Path, records: Records, metadata: Metadata) -> None:
        """Says once of a file that others packed how many of its rows hold nothing."""
        if metadata.content_digest or path in self._told:
            return
        self._told.add(path)
        empty, total = records.num_empty_rows, records.num_rows
        if empty and not records.num_sequences:
            raise DataError(f"{path} has {total} rows and no sequence; remove it")
        if empty:
            skipped = f"{path}: {empty} of {total} rows hold no sequence and are skipped"
            print(f"bert: warning: {skipped}; the next row takes the place of each", file=sys.stderr)

    def _check(self, path: Path, metadata: Metadata) -> None:
        if metadata.max_seq_length > self.max_seq_length:
            raise DataError(
                f"{path}: made for sequences of up to {metadata.max_seq_length} tokens, and MAX_SEQ_LENGTH is "
                f"{self.max_seq_length}: set MAX_SEQ_LENGTH={metadata.max_seq_length} or prepare the data again"
            )
        if self.vocab_md5 and metadata.vocab_md5 and metadata.vocab_md5 != self.vocab_md5:
            raise DataError(
                f"{path}: made with another vocabulary (md5 {metadata.vocab_md5}) than {self.vocab_md5}: "
                "do not mix data sets"
            )
        self.vocab_md5 = self.vocab_md5 or metadata.vocab_md5
