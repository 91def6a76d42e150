"""The output folder of a stage that makes many files: what was made of what, so that a second run goes on.

``stage.json`` holds the recipe (all that decides the content) and, once the stage has ended, its files with their
sizes. Files made to another recipe are removed before any new one is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert.data.records import DataError
from input_preprocessing.stage.manifest import md5_of, write_text
from input_preprocessing.stage.parallel import run_tasks

NAME = "stage.json"
_WORTH_WORKERS = 1e9  # bytes to read in about the time that workers take to start


class StageFolder:
    """A folder to which one stage writes files of some name patterns."""

    def __init__(
        self, folder: Path, stage: str, patterns: Sequence[str], recipe: dict[str, Any], *, source: str = ""
    ) -> None:
        """Prepares the folder: keeps finished files of the same recipe, removes this stage's others and says so.

        source: the entry of the recipe that tells what the files are made of, where those of another one have to stay.

        Raises:
            DataError: there are files of these names that this stage did not make, or made of another source.
        """
        self.folder, self.stage = folder, stage
        self.patterns, self.recipe = patterns, json.loads(json.dumps(recipe))
        folder.mkdir(parents=True, exist_ok=True)
        made = _read(folder)
        present = [path for pattern in patterns for path in folder.glob(pattern)]
        if made.get("stage") != stage and present:
            raise DataError(f"{present[0]} was not made by {stage}; move it away, or give another --target")
        if source and made.get("recipe") and made["recipe"].get(source) != self.recipe[source]:
            raise DataError(f"{folder} holds what {stage} made of another source; remove it, or give another --target")
        changed = _changed(folder, made) if made.get("recipe") == self.recipe else None
        self.finished = changed == []
        if made.get("recipe") != self.recipe:
            self._write(None, None)  # what is half removed belongs to no recipe
            changed = [path.name for path in present]
            if changed:
                print(f"{folder}: {len(changed)} files of another source or options are made again", file=sys.stderr)
        for name in changed or []:
            (folder / name).unlink(missing_ok=True)
        if not self.finished:
            self._write(self.recipe, None)

    def finish(self, names: list[str]) -> None:
        """Removes files that are none of these, and notes the stage as ended."""
        for pattern in self.patterns:
            for path in [*self.folder.glob(pattern), *self.folder.glob(f".{pattern}.partial")]:
                if path.name not in names:
                    path.unlink()
        self._write(self.recipe, {name: (self.folder / name).stat().st_size for name in names})
        self.finished = True

    def _write(self, recipe: dict[str, Any] | None, files: dict[str, int] | None) -> None:
        text = json.dumps({"stage": self.stage, "recipe": recipe, "files": files}, indent=1)
        write_text(self.folder / NAME, text + "\n")


def finished_recipe(folder: Path) -> dict[str, Any] | None:
    """The recipe of a stage that has ended here, all its files as it left them; None: there is none."""
    made = _read(folder)
    return made["recipe"] if _changed(folder, made) == [] else None


def contents_of(paths: Sequence[Path], label: str, jobs: int, base: Path | None = None) -> dict[str, str]:
    """md5 of source files for a recipe, by name or by path relative to `base`; shows progress.

    Raises:
        DataError: one cannot be read.
    """
    weights = [path.stat().st_size for path in paths]
    workers = jobs if sum(weights) > _WORTH_WORKERS else 1
    found = run_tasks(label, md5_of, paths, jobs=workers, weights=weights)
    names = [str(path.relative_to(base)) if base else path.name for path in paths]
    return dict(zip(names, found, strict=True))


def finished_files(folder: Path, stage: str) -> list[Path]:
    """The files of a stage that has ended, by name.

    Raises:
        DataError: it has not, or a file was lost or changed in size.
    """
    made, command = _read(folder), f"python -m input_preprocessing {stage}"
    changed = _changed(folder, made)
    if made.get("stage") != stage or changed is None:
        raise DataError(f"{folder} holds no finished output of {stage}; run {command} first")
    if changed:
        raise DataError(f"{folder / changed[0]} is lost or was changed; run {command} again")
    return [folder / name for name in made["files"]]


def _read(folder: Path) -> dict[str, Any]:
    try:
        made = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return made if isinstance(made, dict) else {}
    except (OSError, ValueError):
        return {}


def _changed(folder: Path, made: dict[str, Any]) -> list[str] | None:
    """Names of files that are not there with the size noted; None where the stage has not ended."""
    if made.get("files") is None:
        return None
    present = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return [name for name, size in made["files"].items() if present.get(name) != size]
