"""The index of a folder of record files: how many rows each has, so that thousands need not be opened to begin.

``index.json`` lies beside the files. It is a short cut and never trusted: what it says of a file is compared when that
file is opened, and a file it does not know is opened at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py

from bert.data.format import atomic_file, open_records

NAME = "index.json"
_KIND, _VERSION = "bert-records-index", 1


@dataclass(frozen=True)
class Entry:
    """What is known of a file before it is opened; without a digest, only its rows are."""

    rows: int
    content_digest: str = ""


def write_index(folder: Path, paths: Sequence[Path]) -> None:
    """Writes the index of the files in the folder. Raises DataError where one cannot be read, or the index written."""
    text = _text_of(paths)
    with atomic_file(folder / NAME) as partial:
        partial.write_text(text)


def is_index_of(folder: Path, paths: Sequence[Path]) -> bool:
    """Whether the folder's index is the one of these files. Raises DataError where one cannot be read."""
    try:
        return (folder / NAME).read_bytes() == _text_of(paths).encode()
    except OSError:
        return False


def _text_of(paths: Sequence[Path]) -> str:
    files = {}
    for path in paths:
        records, metadata = open_records(path)
        files[path.name] = [records.num_rows, metadata.content_digest]
    return json.dumps({"format": _KIND, "version": _VERSION, "files": files}, indent=0) + "\n"


def read_index(folder: Path) -> dict[str, Entry]:
    """Entries by file name; none where there is no index that can be read."""
    try:
        index = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if (index["format"], index["version"]) != (_KIND, _VERSION):
            return {}
        return {str(name): Entry(int(rows), str(digest)) for name, (rows, digest) in index["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def count_rows(path: Path) -> int:
    """Rows of a file, without reading more of it than that takes. Raises DataError for what is not a record file."""
    try:
        file = h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY)
        try:
            if file.links.exists(b"input_ids"):  # else no records; of this format, or of NVIDIA's three
                packed = file.links.exists(b"row_offsets")
                dataset = h5py.h5d.open(file, b"row_offsets" if packed else b"next_sentence_labels")
                return int(dataset.shape[0]) - packed
        finally:
            file.close()
    except (OSError, KeyError):
        pass
    return open_records(path)[0].num_rows  # an error in one line
