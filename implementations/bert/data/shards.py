"""A folder of record files as one list of rows, and its index, which has the rows of each file
without opening it.

``index.json`` lies beside the files. It is never trusted: an entry is compared with its file when
that is opened, and a file without an entry is opened immediately.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bert.data.format import atomic_file, open_records, recorded_digest
from bert.data.hdf5 import open_hdf5
from bert.data.records import SUFFIXES, DataError, Records
from common.files import object_of
from common.process import say

INDEX = "index.json"
_KIND, _VERSION = "bert-records-index", 1
# Files, with a descriptor each: bins and exchange alternate between many files.
_MAX_OPEN = 128


def list_shards(folder: Path, variable: str) -> list[Path]:
    """The record files of a folder (or the one file named), sorted by name.

    ``variable``: the environment variable that names it, for messages. Raises DataError if there
    are none.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise DataError(
            f"{variable}={folder}: no such folder; prepare the data first, or correct the path"
        )
    visible = (
        path
        for path in folder.iterdir()
        if path.suffix in SUFFIXES and not path.name.startswith(".")
    )
    shards = sorted(path for path in visible if path.is_file())
    if not shards:
        raise DataError(
            f"{variable}={folder}: no record files (*.hdf5) in it; prepare the data first"
        )
    # DeepLearningExamples' and Habana's scripts put training and test shards side by side.
    wanted, other = (
        ("test", "training") if variable == "EVALDIR" else ("training", "test")
    )
    kept, left = (
        [path for path in shards if f"_{use}_" in path.name] for use in (wanted, other)
    )
    if not kept or not left:
        return shards
    say(
        f"bert: {variable}={folder}: {len(kept)} *_{wanted}_* files are used, {len(left)} *_{other}_* files are not"
    )
    return kept


def list_bins(folder: Path, variable: str) -> list[list[Path]]:
    """The record files of each bin, a subfolder named by its greatest length, shortest first.

    Raises DataError if there are none.
    """
    bins = []
    if folder.is_dir():
        bins = [
            path for path in folder.iterdir() if path.name.isdigit() and path.is_dir()
        ]
    if not bins:
        raise DataError(
            f"{variable}={folder}: no bins (folders 128, 256, ...) in it; "
            "make them with python -m input_preprocessing bins, or set BATCHING=rows"
        )
    return [
        list_shards(path, variable)
        for path in sorted(bins, key=lambda path: int(path.name))
    ]


@dataclass(frozen=True)
class Entry:
    """Index entry of a file. content_digest: "" of one of other makers."""

    rows: int
    content_digest: str = ""


def write_index(folder: Path, paths: Sequence[Path]) -> None:
    """Writes the index of the files in the folder. Raises DataError if one cannot be read, or the
    index written.
    """
    text = _index_of(paths)
    with atomic_file(folder / INDEX) as partial:
        partial.write_text(text)


def is_index_of(folder: Path, paths: Sequence[Path]) -> bool:
    """Whether the folder's index matches these files. Raises DataError if one cannot be read."""
    index, text = folder / INDEX, _index_of(paths)
    try:
        # Compared as bytes: the same files give the same text. A pipe would be waited for.
        return index.is_file() and index.read_bytes() == text.encode()
    except OSError:
        return False


def _index_of(paths: Sequence[Path]) -> str:
    files = {}
    for path in paths:
        records, metadata = open_records(path)
        files[path.name] = [records.num_rows, metadata.content_digest]
    return (
        json.dumps({"format": _KIND, "version": _VERSION, "files": files}, indent=0)
        + "\n"
    )


def read_index(folder: Path) -> dict[str, Entry]:
    """Entries by file name; none without a readable index."""
    index = object_of(folder / INDEX)
    try:
        if (index["format"], index["version"]) != (_KIND, _VERSION):
            return {}
        return {
            str(name): Entry(int(rows), str(digest))
            for name, (rows, digest) in index["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}


def entry_of(path: Path) -> Entry:
    """What an index would say of a file, reading as little as possible. Raises DataError for a
    file without records.
    """
    file = open_hdf5(path)
    datasets, digest = file.datasets, recorded_digest(file)
    if "input_ids" in datasets:  # else no records, of this format or of other makers'
        for name, ends in (("row_offsets", 1), ("next_sentence_labels", 0)):
            if name in datasets and datasets[name].shape:
                return Entry(datasets[name].shape[0] - ends, digest)
    return Entry(open_records(path)[0].num_rows, digest)  # or its DataError


class Shards:
    """Record files, opened when first needed; some are kept open."""

    def __init__(
        self,
        paths: Sequence[Path],
        max_seq_length: int,
        files_of_bins: Sequence[int] = (),
    ) -> None:
        """files_of_bins: number of paths in each bin, if there are bins."""
        self.paths = list(paths)
        self.max_seq_length = max_seq_length
        self.bins = np.split(
            np.arange(len(self.paths)), np.cumsum(files_of_bins)[:-1].astype(np.int64)
        )
        self._opened = lru_cache(_MAX_OPEN)(self._open)
        self._entries: dict[Path, Entry] = {}
        self._warned: set[Path] = set()
        self.vocab_md5 = ""

    def __len__(self) -> int:
        return len(self.paths)

    def row_counts(self) -> np.ndarray:
        """Rows of every file, int64, from the folders' indices if they have one; opens the first
        file.
        """
        if not self._entries:
            indices = {
                folder: read_index(folder)
                for folder in {path.parent for path in self.paths}
            }
            for path in self.paths:
                # An entry without a digest proves nothing.
                entry = indices[path.parent].get(path.name, Entry(0))
                self._entries[path] = entry if entry.content_digest else entry_of(path)
            # Opened for its vocab_md5, with which those of all others are compared.
            _ = self[0]
        return np.array(
            [self._entries[path].rows for path in self.paths], dtype=np.int64
        )

    def identity(self) -> dict[str, Any]:
        """For comparison between ranks, and with a run that is resumed: each file's rows and content
        digest, or else size, by name.
        """
        self.row_counts()
        facts: dict[str, Any] = {"vocabulary": self.vocab_md5}
        for path, entry in self._entries.items():
            # Files of two bins may have the same name.
            in_bin = path.parent.name.isdigit()
            name = f"{path.parent.name}/{path.name}" if in_bin else path.name
            # By name and not by path: nodes may have the data mounted at different places.
            facts[name] = (entry.rows, entry.content_digest or path.stat().st_size)
        return facts

    def recorded_digests(self) -> dict[Path, str]:
        """The content digest of each file by its folder's index, or else by the file itself; empty
        for one of other makers.
        """
        self.row_counts()
        return {path: entry.content_digest for path, entry in self._entries.items()}

    def __getitem__(self, number: int) -> Records:
        """The records of one file. Raises DataError for a file that cannot be used in this run."""
        return self._opened(number)

    def _open(self, number: int) -> Records:
        path = self.paths[number]
        records, metadata = open_records(path)
        if metadata.max_seq_length > self.max_seq_length:
            length = metadata.max_seq_length
            problem = f"made for sequences of up to {length} tokens, and MAX_SEQ_LENGTH is {self.max_seq_length}"
            raise DataError(
                f"{path}: {problem}: set MAX_SEQ_LENGTH={length} or prepare the data again"
            )
        if (
            self.vocab_md5
            and metadata.vocab_md5
            and metadata.vocab_md5 != self.vocab_md5
        ):
            problem = f"made with another vocabulary (md5 {metadata.vocab_md5}) than {self.vocab_md5}"
            raise DataError(
                f"{path}: {problem}: prepare all data with the model's vocab.txt"
            )
        # The first file that names a vocabulary sets it; others' files name none.
        self.vocab_md5 = self.vocab_md5 or metadata.vocab_md5
        expected = self._entries.get(path, Entry(records.num_rows))
        same_content = expected.content_digest in ("", metadata.content_digest)
        if expected.rows != records.num_rows or not same_content:
            raise DataError(
                f"{path} is not the file that {path.parent / INDEX} describes; prepare the data again"
            )
        if not metadata.content_digest and path not in self._warned:  # packed by others
            self._warned.add(path)
            empty, total = records.num_empty_rows, records.num_rows
            if empty and not records.num_sequences:
                raise DataError(f"{path} has {total} rows and no sequence; remove it")
            if empty:
                say(
                    f"bert: warning: {path}: {empty} of {total} rows hold no sequence and are skipped; "
                    "the next row takes the place of each"
                )
        # Plain arrays on the same memory, as each use of a memmap costs microseconds.
        arrays = {
            field.name: getattr(records, field.name)
            for field in dataclasses.fields(records)
        }
        return Records(
            **{
                name: np.asarray(array)
                for name, array in arrays.items()
                if array is not None
            }
        )
