"""Records of files: published ones (published.yaml) and those of a stage (stage.json).

``stage.json`` in an output folder holds the stage's recipe (everything that determines the content)
and, once the stage is finished, the md5 of each of its files; until then each finished file has its
md5 beside it. A second run keeps files that still have their md5, and so does the stage that reads
them. Files of another recipe are removed before any new one is written.
"""

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from bert.data import prepared
from bert.data.format import VERSION, atomic_file
from bert.data.records import SUFFIXES, DataError
from bert.data.shards import is_index_of
from common.files import object_of, text_of
from common.tables import read_table
from input_preprocessing.stage.cli import say
from input_preprocessing.stage.parallel import WORTH_WORKERS, run_tasks
from input_preprocessing.stage.reading import CHUNK, readable

# Files of the benchmark and for fine-tuning.
PUBLISHED = read_table(__file__, "published.yaml")
STAGE_FILE = "stage.json"


def strays(folder: Path) -> list[Path]:
    """Files beside the listed records of a folder that a trainer would read, or a killed run
    left.
    """
    manifests = map(prepared.read, folder.glob("prepared-*.json"))
    known = {folder / name for each in manifests for name in each.files}
    parents = {
        path.parent for path in known if path.suffix == ".hdf5" and path.parent.is_dir()
    }
    paths = []
    for path in sorted(path for parent in parents for path in parent.iterdir()):
        hidden = path.name.startswith(".")
        if path.suffix in ({".partial"} if hidden else SUFFIXES):
            paths += [path] if path.is_file() and path not in known else []
    return paths


def odd_indices(
    folder: Path, made: prepared.Manifest, wrong: Iterable[str]
) -> list[Path]:
    """Folders of records whose index is missing or is of others; not those with wrong records."""
    paths = []
    for parent in sorted({Path(name).parent for name in made.records}):
        names = [name for name in made.records if Path(name).parent == parent]
        shards = sorted(folder / name for name in names)
        if not set(names) & set(wrong) and not is_index_of(folder / parent, shards):
            paths.append(parent)
    return paths


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def md5_of(path: Path) -> str:
    return hash_of(path, "md5")


def hash_of(path: Path, kind: str) -> str:
    """Digest of a file by one of hashlib's algorithms. Raises DataError if it cannot be read."""
    digest = hashlib.new(kind)
    with (
        readable(path, "check that it is there and readable"),
        open(path, "rb") as file,
    ):
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions that the result of a preparation could depend on."""
    return {
        "records": str(VERSION),
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "h5py": h5py.__version__,
        "HDF5": h5py.version.hdf5_version,
    }


class StageFolder:
    """A folder to which a stage writes files with certain name patterns."""

    def __init__(
        self,
        folder: Path,
        stage: str,
        patterns: Sequence[str],
        recipe: dict[str, Any],
        *,
        jobs: int = 1,
    ) -> None:
        """Prepares the folder: keeps finished files of the same recipe, removes (and reports)
        others of this stage.

        Raises:
            DataError: there are files of these names not made by this stage.
        """
        self.folder, self.stage = folder, stage
        # As it will be read back, to be comparable: tuples become lists.
        self.patterns, self.recipe = patterns, json.loads(json.dumps(recipe))
        folder.mkdir(parents=True, exist_ok=True)
        made = _read_stage(folder)
        present = [path for pattern in patterns for path in folder.glob(pattern)]
        if made.get("stage") != stage and present:
            raise DataError(
                f"{present[0]} was not made by {stage}; move it away, or give another --target"
            )
        is_same = made.get("recipe") == self.recipe
        changed = (
            _changed(folder, made, jobs) if is_same else [path.name for path in present]
        )
        self.finished = is_same and changed == []
        if not is_same:
            self._write(None, None)  # a partly removed set has no recipe
        if changed:
            message = f"{folder / changed[0]} is missing or was changed: made again"
            if not is_same:
                message = f"{folder}: remaking {len(changed)} files made from another source or options"
            say(message)
        for name in changed or []:
            (folder / name).unlink(missing_ok=True)
        if self.finished:
            self._remove_hidden()
        else:
            # The sound files of a finished set become finished files of an unfinished one.
            for name, md5 in (made.get("files") or {}).items():
                if (folder / name).is_file():  # and not changed
                    write_text(_md5_file(folder / name), md5)
            self._write(self.recipe, None)

    def finish(self, names: list[str]) -> None:
        """Removes other files of the stage, and records it as finished.

        Raises:
            DataError: one of the files is missing, or was not recorded.
        """
        files = {}
        for name in names:
            with readable(self.folder / name, "run the same command again"):
                files[name] = _md5_file(self.folder / name).read_text()
        self._write(self.recipe, files)
        self.finished = True
        for pattern in self.patterns:
            for path in self.folder.glob(pattern):
                if path.name not in names:
                    path.unlink()
        self._remove_hidden()

    def _remove_hidden(self) -> None:
        """Removes what only an unfinished stage needs."""
        for pattern in self.patterns:
            for suffix in ("md5", "partial", "md5.partial"):
                for path in self.folder.glob(f".{pattern}.{suffix}"):
                    path.unlink()

    def _write(
        self, recipe: dict[str, Any] | None, files: dict[str, str] | None
    ) -> None:
        text = json.dumps(
            {"stage": self.stage, "recipe": recipe, "files": files}, indent=1
        )
        write_text(self.folder / STAGE_FILE, text + "\n")


def _md5_file(path: Path) -> Path:
    """Where the md5 of a stage's file is until the stage is finished."""
    return path.with_name(f".{path.name}.md5")


def record(path: Path) -> None:
    """Marks a file of a stage as finished."""
    write_text(_md5_file(path), md5_of(path))


def recorded_md5(path: Path) -> str:
    """md5 of a finished file as it was written; empty if it is none."""
    return text_of(_md5_file(path))


def forget(paths: Iterable[Path]) -> None:
    """Removes the records of files whose md5s are elsewhere by now."""
    for path in paths:
        _md5_file(path).unlink(missing_ok=True)


def is_recorded(path: Path) -> bool:
    """Whether a file of an unfinished stage was finished and is as it was written."""
    return path.is_file() and text_of(_md5_file(path)) == md5_of(path)


def contents_of(
    paths: Sequence[Path], label: str, jobs: int, base: Path | None = None
) -> dict[str, str]:
    """md5 of source files for a recipe, by name or path relative to `base`; shows progress.

    Raises:
        DataError: one cannot be read.
    """
    digests = run_tasks(label, md5_of, paths, jobs=jobs, worth=WORTH_WORKERS)
    names = [str(path.relative_to(base)) if base else path.name for path in paths]
    return dict(zip(names, digests, strict=True))


def finished_files(folder: Path, stage: str, jobs: int) -> dict[Path, str]:
    """md5 of each file of a finished stage, computed, by name.

    Raises:
        DataError: it is not finished, or a file is missing or changed.
    """
    made, command = _read_stage(folder), f"python -m input_preprocessing {stage}"
    changed = _changed(folder, made, jobs)
    if made.get("stage") != stage or changed is None:
        raise DataError(
            f"{folder} holds no finished output of {stage}; run {command} first"
        )
    if changed:
        raise DataError(
            f"{folder / changed[0]} is missing or was changed; run {command} again"
        )
    return {folder / name: md5 for name, md5 in made["files"].items()}


def _read_stage(folder: Path) -> dict[str, Any]:
    made = object_of(folder / STAGE_FILE)
    files = made.get("files")
    return made if files is None or isinstance(files, dict) else {}


def _changed(folder: Path, made: dict[str, Any], jobs: int) -> list[str] | None:
    """Names of files that are missing or not as recorded; None if the stage is not finished."""
    if made.get("files") is None:
        return None
    there = [path for name in made["files"] if (path := folder / name).is_file()]
    contents = contents_of(there, "check files", jobs)
    return [name for name, md5 in made["files"].items() if contents.get(name) != md5]
