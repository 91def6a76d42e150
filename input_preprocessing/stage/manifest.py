"""prepared-*.json: what a preparation made from what, with the digests that `verify` checks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from bert.data.format import VERSION, atomic_file, open_records
from bert.data.records import DataError
from input_preprocessing.stage.cli import UNRECORDED
from input_preprocessing.stage.published import NUM_PARTS, TEXT_MD5
from input_preprocessing.stage.reading import readable


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished data set."""

    text: str  # summary for display
    sequences: int
    rows: int
    tokens: int
    eval_samples: int
    multiset_digest: str  # of the training instances, in any order
    texts: dict[str, str]  # md5 of each text file
    recipe: dict[str, object]  # all options that determine the result
    files: dict[str, str]  # digest_of each file, by path in the folder
    license: str = ""  # of the texts, as given by the user
    versions: dict[str, str] = field(default_factory=dict)  # of the software used

    @property
    def records(self) -> list[str]:  # training files
        return [name for name in self.files if name.endswith(".hdf5") and not name.startswith("eval/")]

    @property
    def evaluation(self) -> list[str]:
        return [name for name in self.files if name.startswith("eval/")]

    @property
    def benchmark_text(self) -> tuple[bool | None, str]:
        """Whether the text is the benchmark's (False: partly, None: not at all), and the same in words."""
        count, wrong = len(self.texts) - 1, [name for name, md5 in TEXT_MD5.items() if self.texts.get(name) != md5]
        if not wrong and count == NUM_PARTS:
            return True, f"the benchmark's: {NUM_PARTS} parts, {len(TEXT_MD5)} of {len(TEXT_MD5)} known md5"
        if len(wrong) < len(TEXT_MD5):
            return False, f"partly the benchmark's: {[*wrong, 'a part'][0]} is missing or has another md5"
        return None, f"not the benchmark's: {count} training files of another corpus"

    def option(self, name: str) -> Any:
        """An option of the recipe, or its value before it existed."""
        return {**UNRECORDED, **self.recipe}.get(name)


def digest_of(path: Path) -> str:
    """Content digest of a record file, md5 of any other."""
    return open_records(path)[1].content_digest if path.suffix == ".hdf5" else md5_of(path)


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def md5_of(path: Path) -> str:
    return hash_of(path, "md5")


def hash_of(path: Path, kind: str) -> str:
    """Digest of a file by one of hashlib's algorithms. Raises DataError if it cannot be read."""
    digest = hashlib.new(kind)
    with readable(path, "check that it is there and readable"), open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions that the result of a preparation could depend on."""
    return {
        "records": str(VERSION), "Python": platform.python_version(), "NumPy": np.__version__,
        "h5py": h5py.__version__, "HDF5": h5py.version.hdf5_version,
    }  # fmt: skip


def write(path: Path, manifest: Manifest) -> None:
    write_text(path, json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")


def read(path: Path) -> Manifest:
    """Raises DataError if the file is unreadable, damaged, or of another version."""
    try:
        manifest = Manifest(**json.loads(path.read_text()))
        if not isinstance(manifest.files, dict) or not isinstance(manifest.recipe, dict):
            raise TypeError("files and recipe are not tables")
        return manifest
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged or of another version ({error}); prepare the data again") from error
