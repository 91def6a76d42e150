"""A folder of record files as one long list of rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert.data.format import DataError, Metadata, Records, open_records

_SUFFIXES = {"", ".hdf5", ".hdf", ".h5"}  # NVIDIA's packed parts have no suffix, its shuffled ones .hdf
_MAX_OPEN = 32


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
        if path.suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
    if not shards:
        raise DataError(f"{variable}={folder}: no record files (*.hdf5) in it; prepare the data first")
    return shards


class Shards:
    """Record files opened when first needed, a few kept open."""

    def __init__(self, paths: Sequence[Path], max_seq_length: int) -> None:
        self.paths = list(paths)
        self.max_seq_length = max_seq_length
        self._open: OrderedDict[int, Records] = OrderedDict()
        self.vocab_md5 = ""

    def __len__(self) -> int:
        return len(self.paths)

    def row_counts(self) -> np.ndarray:
        """Rows of every file, int64."""
        return np.array([self[number].num_rows for number in range(len(self.paths))], dtype=np.int64)

    def __getitem__(self, number: int) -> Records:
        """The records of one file. Raises DataError for a file that cannot be used in this run."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        path = self.paths[number]
        records, metadata = open_records(path)
        self._check(path, metadata)
        self._open[number] = records
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return records

    def _check(self, path: Path, metadata: Metadata) -> None:
        if metadata.max_seq_length > self.max_seq_length:
            raise DataError(
                f"{path}: made for sequences of up to {metadata.max_seq_length} tokens, and MAX_SEQ_LENGTH is "
                f"{self.max_seq_length}: set MAX_SEQ_LENGTH={metadata.max_seq_length} or prepare the data anew"
            )
        if self.vocab_md5 and metadata.vocab_md5 and metadata.vocab_md5 != self.vocab_md5:
            raise DataError(
                f"{path}: made with another vocabulary (md5 {metadata.vocab_md5}) than {self.vocab_md5}: "
                "do not mix data sets"
            )
        self.vocab_md5 = self.vocab_md5 or metadata.vocab_md5
