"""Fetches SQuAD or GLUE tasks for run_finetuning.sh, resuming partial downloads, and checks them.

Each task becomes a folder OUTPUTDIR/NAME for DATA. SQuAD's four files are verified by md5, GLUE's archives by sha256;
the tables in them only by the number of examples per label, which does not detect a changed sentence. --skip-download
checks files put there by hand. MRPC is made like GLUE's, from Microsoft's pairs and GLUE's list of development pairs.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.dataset.download import PublicFile, fetch_file
from input_preprocessing.stage.manifest import PUBLISHED

SQUAD = tuple(PublicFile(**file) for file in PUBLISHED["squad"])
SOURCES = {
    task: tuple(PublicFile(**file) for file in files) for task, files in PUBLISHED["glue"].items()
}
# Number of examples per label in each table ("": all labels).
TABLES: dict[str, dict[str, dict[str, int]]] = PUBLISHED["glue_examples"]
_UNLABELLED = (
    "test.tsv",
    "test_matched.tsv",
    "test_mismatched.tsv",
)  # only needed for GLUE's server
# MNLI's is the last: its tables have different numbers of columns.
_LABEL = {"MRPC": 0, "SST-2": 1, "CoLA": 1, "MNLI": -1}  # column of the label


def fetch(task: str, folder: Path, mirror: str | None) -> None:
    """Downloads the missing files of a task to ``folder`` and checks them. Raises DataError."""
    folder.mkdir(parents=True, exist_ok=True)
    if task == "squad":
        for file in SQUAD:
            fetch_file(file, folder, mirror)
        return
    if not all((folder / name).is_file() for name in TABLES[task] if name not in _UNLABELLED):
        sources = [fetch_file(file, folder, mirror) for file in SOURCES[task]]
        for name, content in (
            _mrpc(*sources) if task == "MRPC" else _unzipped(task, *sources)
        ).items():
            with atomic_file(folder / name) as partial:
                partial.write_bytes(content)
    check(task, folder)
    for file in SOURCES[task]:
        (folder / file.name).unlink(missing_ok=True)


def _mrpc(pairs: Path, listed: Path) -> dict[str, bytes]:
    header, *lines = (line.rstrip("\r") for line in _lines(pairs))
    ids = {tuple(line.split()) for line in _lines(listed)}
    tables = {"train.tsv": [header], "dev.tsv": [header]}
    for line in lines:
        tables["dev.tsv" if tuple(line.split("\t")[1:3]) in ids else "train.tsv"].append(line)
    return {name: ("\n".join(table) + "\n").encode() for name, table in tables.items()}


def _unzipped(task: str, archive: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(archive) as zipped:
            here = [
                name
                for name in TABLES[task]
                if name not in _UNLABELLED or f"{task}/{name}" in zipped.namelist()
            ]
            return {name: zipped.read(f"{task}/{name}") for name in here}  # checks the CRC
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot unpack {archive}: {error}; remove it and run again") from error


def check(task: str, folder: Path) -> None:
    """Raises DataError if a file of the task is missing or is not the published one."""
    published = {file.name: file for file in SQUAD} if task == "squad" else {}
    for name in published or TABLES[task]:
        if not (folder / name).is_file() and name not in _UNLABELLED:
            raise DataError(
                f"{folder / name} is missing; put it there, or run without --skip-download"
            )
    for name, file in published.items():
        if file.digest_of(folder / name) != file.digest:
            raise DataError(f"{folder / name} is not the published file ({file.digest}); remove it")
    for name, wanted in TABLES.get(task, {}).items():
        if not (folder / name).is_file():
            continue
        # CoLA's labelled tables begin with an example.
        headers = 1 if task != "CoLA" or name in _UNLABELLED else 0
        rows = [line.split("\t") for line in _lines(folder / name)[headers:]]
        counts_all = "" in wanted
        found = Counter(
            row[_LABEL[task]].strip() if len(row) > 1 and not counts_all else "" for row in rows
        )
        if found != wanted:
            difference = f"has {_summary(found, wanted)}, GLUE's has {_summary(wanted, wanted)}"
            raise DataError(f"{folder / name} {difference}: remove it and run again")


def _summary(counts: Mapping[str, int], labels: Iterable[str]) -> str:
    each = ", ".join(f"{counts.get(label, 0):,} with label {label}" for label in labels if label)
    return f"{sum(counts.values()):,} examples{f' ({each})' if each else ''}"


def _lines(path: Path) -> list[str]:
    """Non-blank lines of a table, ended by line feeds only."""
    return [
        line
        for line in path.read_bytes().decode("utf-8-sig", "replace").split("\n")
        if line.strip()
    ]


def main(options: argparse.Namespace) -> None:
    for task in options.task:
        folder = options.outputdir / task
        if options.skip_download:
            check(task, folder)
        else:
            fetch(task, folder, options.mirror)
        print(f"{folder}: complete and checked", file=sys.stderr)
