"""Records of files: published ones (published.yaml), those of a stage (stage.json) and a data set (prepared-*.json).

``stage.json`` in an output folder holds the stage's recipe (everything that determines the content) and, once the stage
is finished, its files with their md5, so that a second run can resume, makes only a damaged file again, and the next
stage reads what this one wrote. Files of another recipe are removed before any new one is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from bert.data.format import VERSION, atomic_file
from bert.data.records import DataError
from common.tables import read_table
from input_preprocessing.stage.cli import UNRECORDED
from input_preprocessing.stage.guarded import open_records
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.stage.reading import readable

PUBLISHED = read_table(__file__, "published.yaml")  # files of the benchmark and for fine-tuning
NUM_PARTS: int = PUBLISHED["text_parts"]
TEXT_MD5: dict[str, str] = PUBLISHED["text_md5"]
VOCAB_MD5: str = next(
    file["digest"].removeprefix("md5 ")
    for file in PUBLISHED["benchmark"]
    if file["name"] == "vocab.txt"
)
STAGE_FILE = "stage.json"
_WORTH_WORKERS = 1e9  # bytes; reading fewer is faster than starting workers


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # of the software used

    @property
    def records(self) -> list[str]:  # training files
        return [
            name for name in self.files if name.endswith(".hdf5") and not name.startswith("eval/")
        ]

    @property
    def evaluation(self) -> list[str]:
        return [name for name in self.files if name.startswith("eval/")]

    @property
    def benchmark_text(self) -> tuple[bool | None, str]:
        """Whether the text is the benchmark's (False: partly, None: not at all), and the same in words."""
        count, wrong = (
            len(self.texts) - 1,
            [name for name, md5 in TEXT_MD5.items() if self.texts.get(name) != md5],
        )
        if not wrong and count == NUM_PARTS:
            return (
                True,
                f"the benchmark's: {NUM_PARTS} parts, {len(TEXT_MD5)} of {len(TEXT_MD5)} known md5",
            )
        if len(wrong) < len(TEXT_MD5):
            return (
                False,
                f"partly the benchmark's: {[*wrong, 'a part'][0]} is missing or has another md5",
            )
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
    entries = dataclasses.asdict(manifest)
    write_text(path, json.dumps({**entries, "md5": _md5_of_entries(entries)}, indent=1) + "\n")


def read(path: Path) -> Manifest:
    """A manifest that holds what was written; those of earlier versions have no md5, and only their form is checked.

    Raises DataError if the file is unreadable, damaged, of another version or lacks a shard.
    """
    again = "restore it, or prepare the data again"
    with readable(path, again):
        content = path.read_bytes()
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); {again}") from error
    fields = {field.name: field for field in dataclasses.fields(Manifest)}
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    needed -= {"versions"}
    if not isinstance(entries, dict) or (missing := sorted(needed - entries.keys())):
        lacks = f"has no entry {missing[0]}" if isinstance(entries, dict) else "is no table"
        raise DataError(f"{path} {lacks}; {again}")
    recorded = entries.pop("md5", None)
    if unknown := sorted(entries.keys() - fields):
        raise DataError(f"{path} has an entry {unknown[0]}, of a later version or none; {again}")
    problem = "" if recorded in (None, _md5_of_entries(entries)) else "its md5 is another"
    if not (problem := problem or _malformed(entries)):
        manifest = Manifest(**entries)
        problem = _missing_shard(manifest)
    if problem:
        raise DataError(f"{path} was changed after it was written ({problem}); {again}")
    return manifest


def _md5_of_entries(entries: dict[str, Any]) -> str:
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _malformed(entries: dict[str, Any]) -> str:
    """The first entry of another type or range than written, in words."""
    for name in ("recipe", "files", "texts", "versions"):
        if not isinstance(entries.get(name, {}), dict):
            return f"{name} is no table"
    for name in ("sequences", "rows", "tokens", "eval_samples"):
        if type(entries[name]) is not int or entries[name] < 0:
            return f"{name} is no count"
    names = (*entries["files"], *entries["files"].values(), *entries["texts"].values())
    if not all(isinstance(one, str) for one in names):
        return "files and texts are not digests by name"
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in entries["files"]):
        return "a file is outside of the folder"
    return ""


def _missing_shard(manifest: Manifest) -> str:
    """The shard that a manifest should list and does not, in words; shards are numbered part_I_of_N."""
    names = set(manifest.records)
    for name in sorted(names):
        stem, _, total = name.removesuffix(".hdf5").rpartition("_of_")
        if total.isdecimal():
            prefix = stem.rpartition("_")[0]
            wanted = {f"{prefix}_{i:05d}_of_{total}.hdf5" for i in range(int(total))}
            if missing := sorted(wanted - names):
                return f"it does not list {missing[0]}"
    return "" if names else "it lists no records"


class StageFolder:
    """A folder to which a stage writes files with certain name patterns."""

    def __init__(
        self,
        folder: Path,
        stage: str,
        patterns: Sequence[str],
        recipe: dict[str, Any],
        *,
        source: str = "",
        jobs: int = 1,
    ) -> None:
        """Prepares the folder: keeps finished files of the same recipe, removes (and reports) others of this stage.

        source: entry of the recipe that names the source, if files made from another source must be kept.

        Raises:
            DataError: there are files of these names not made by this stage, or made from another source.
        """
        self.folder, self.stage = folder, stage
        self.patterns, self.recipe = patterns, json.loads(json.dumps(recipe))
        folder.mkdir(parents=True, exist_ok=True)
        made = _read_stage(folder)
        present = [path for pattern in patterns for path in folder.glob(pattern)]
        if made.get("stage") != stage and present:
            raise DataError(
                f"{present[0]} was not made by {stage}; move it away, or give another --target"
            )
        if source and made.get("recipe") and made["recipe"].get(source) != self.recipe[source]:
            raise DataError(
                f"{folder} holds {stage} files of another source; remove it, or give another --target"
            )
        self.jobs = jobs
        changed = _changed(folder, made, jobs) if made.get("recipe") == self.recipe else None
        self.finished = changed == []
        if made.get("recipe") != self.recipe:
            self._write(None, None)  # a partly removed set has no recipe
            changed = [path.name for path in present]
            if changed:
                print(
                    f"{folder}: remaking {len(changed)} files made from another source or options",
                    file=sys.stderr,
                )
        elif changed:
            print(f"{folder / changed[0]} is missing or was changed: made again", file=sys.stderr)
        for name in changed or []:
            (folder / name).unlink(missing_ok=True)
        if not self.finished:
            self._write(self.recipe, None)

    def finish(self, names: list[str]) -> None:
        """Removes other files of the stage, and records it as finished."""
        for pattern in self.patterns:
            for path in [*self.folder.glob(pattern), *self.folder.glob(f".{pattern}.partial")]:
                if path.name not in names:
                    path.unlink()
        paths = [self.folder / name for name in names]
        self._write(self.recipe, contents_of(paths, f"digests of {self.stage}", self.jobs))
        self.finished = True

    def _write(self, recipe: dict[str, Any] | None, files: dict[str, str] | None) -> None:
        text = json.dumps({"stage": self.stage, "recipe": recipe, "files": files}, indent=1)
        write_text(self.folder / STAGE_FILE, text + "\n")


def finished_recipe(folder: Path, jobs: int) -> dict[str, Any] | None:
    """Recipe of a finished stage whose files are all unchanged; None if there is none."""
    made = _read_stage(folder)
    return made["recipe"] if _changed(folder, made, jobs) == [] else None


def contents_of(
    paths: Sequence[Path], label: str, jobs: int, base: Path | None = None
) -> dict[str, str]:
    """md5 of source files for a recipe, by name or path relative to `base`; shows progress.

    Raises:
        DataError: one cannot be read.
    """
    weights = [path.stat().st_size for path in paths]
    workers = jobs if sum(weights) > _WORTH_WORKERS else 1
    found = run_tasks(label, md5_of, paths, jobs=workers, weights=weights)
    names = [str(path.relative_to(base)) if base else path.name for path in paths]
    return dict(zip(names, found, strict=True))


def finished_files(folder: Path, stage: str, jobs: int) -> list[Path]:
    """Files of a finished stage, by name, compared with what it wrote.

    Raises:
        DataError: it is not finished, or a file is missing or was changed.
    """
    made, command = _read_stage(folder), f"python -m input_preprocessing {stage}"
    changed = _changed(folder, made, jobs)
    if made.get("stage") != stage or changed is None:
        raise DataError(f"{folder} holds no finished output of {stage}; run {command} first")
    if changed:
        raise DataError(f"{folder / changed[0]} is missing or was changed; run {command} again")
    return [folder / name for name in made["files"]]


def _read_stage(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        made = json.loads((folder / STAGE_FILE).read_text(encoding="utf-8"))
        return made if isinstance(made, dict) else {}
    return {}


def _changed(folder: Path, made: dict[str, Any], jobs: int) -> list[str] | None:
    """Names of files that are missing or have another md5 than recorded; None if the stage is not finished."""
    recorded = made.get("files")
    if not isinstance(recorded, dict):
        return None
    present = [folder / name for name in recorded if (folder / name).is_file()]
    found = contents_of(present, f"read {folder.name}", jobs)
    return [name for name, md5 in recorded.items() if found.get(name) != md5]
