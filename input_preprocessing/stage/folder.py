"""Output folder of a stage with many files, which records what was made from what, so that a second run can resume.

``stage.json`` holds the recipe (everything that determines the content) and, once the stage is finished, its files with
their sizes. Files of another recipe are removed before any new one is written.
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
_WORTH_WORKERS = 1e9  # bytes; reading fewer is faster than starting workers


class StageFolder:
    """A folder to which a stage writes files with certain name patterns."""

    def __init__(
        self, folder: Path, stage: str, patterns: Sequence[str], recipe: dict[str, Any], *, source: str = ""
    ) -> None:
        """Prepares the folder: keeps finished files of the same recipe, removes (and reports) others of this stage.

        source: entry of the recipe that names the source, if files made from another source must be kept.

        Raises:
            DataError: there are files of these names not made by this stage, or made from another source.
        """
        self.folder, self.stage = folder, stage
        self.patterns, self.recipe = patterns, json.loads(json.dumps(recipe))
        folder.mkdir(parents=True, exist_ok=True)
        made = _read(folder)
        present = [path for pattern in patterns for path in folder.glob(pattern)]
        if made.get("stage") != stage and present:
            raise DataError(f"{present[0]} was not made by {stage}; move it away, or give another --target")
        if source and made.get("recipe") and made["recipe"].get(source) != self.recipe[source]:
            raise DataError(f"{folder} holds {stage} files of another source; remove it, or give another --target")
        changed = _changed(folder, made) if made.get("recipe") == self.recipe else None
        self.finished = changed == []
        if made.get("recipe") != self.recipe:
            self._write(None, None)  # a partly removed set has no recipe
            changed = [path.name for path in present]
            if changed:
                print(f"{folder}: remaking {len(changed)} files made from another source or options", file=sys.stderr)
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
        self._write(self.recipe, {name: (self.folder / name).stat().st_size for name in names})
        self.finished = True

    def _write(self, recipe: dict[str, Any] | None, files: dict[str, int] | None) -> None:
        text = json.dumps({"stage": self.stage, "recipe": recipe, "files": files}, indent=1)
        write_text(self.folder / NAME, text + "\n")


def finished_recipe(folder: Path) -> dict[str, Any] | None:
    """Recipe of a finished stage whose files are all unchanged; None if there is none."""
    made = _read(folder)
    return made["recipe"] if _changed(folder, made) == [] else None


def contents_of(paths: Sequence[Path], label: str, jobs: int, base: Path | None = None) -> dict[str, str]:
    """md5 of source files for a recipe, by name or path relative to `base`; shows progress.

    Raises:
        DataError: one cannot be read.
    """
    weights = [path.stat().st_size for path in paths]
    workers = jobs if sum(weights) > _WORTH_WORKERS else 1
    found = run_tasks(label, md5_of, paths, jobs=workers, weights=weights)
    names = [str(path.relative_to(base)) if base else path.name for path in paths]
    return dict(zip(names, found, strict=True))


def finished_files(folder: Path, stage: str) -> list[Path]:
    """Files of a finished stage, by name.

    Raises:
        DataError: it is not finished, or a file is missing or changed in size.
    """
    made, command = _read(folder), f"python -m input_preprocessing {stage}"
    changed = _changed(folder, made)
    if made.get("stage") != stage or changed is None:
        raise DataError(f"{folder} holds no finished output of {stage}; run {command} first")
    if changed:
        raise DataError(f"{folder / changed[0]} is missing or was changed; run {command} again")
    return [folder / name for name in made["files"]]


def _read(folder: Path) -> dict[str, Any]:
    try:
        made = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return made if isinstance(made, dict) else {}
    except (OSError, ValueError):
        return {}


def _changed(folder: Path, made: dict[str, Any]) -> list[str] | None:
    """Names of files that are missing or of another size than recorded; None if the stage is not finished."""
    if made.get("files") is None:
        return None
    present = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return [name for name, size in made["files"].items() if present.get(name) != size]
