"""Fetches SQuAD or GLUE tasks for run_finetuning.sh, resuming partial downloads, and checks them.

Each task becomes a folder OUTPUTDIR/NAME for DATA. SQuAD's files are verified by md5, GLUE's
archives, which stay beside the tables made of them, by sha256. Files that are already there are
verified without a network. MRPC is made like GLUE's, from Microsoft's pairs and GLUE's list of
development pairs.
"""

import argparse
import zipfile
from pathlib import Path

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.dataset.download import PublicFile, fetch_file
from input_preprocessing.stage.cli import say
from input_preprocessing.stage.manifest import PUBLISHED

SOURCES = {
    task: tuple(PublicFile(**file) for file in files)
    for task, files in {"squad": PUBLISHED["squad"], **PUBLISHED["glue"]}.items()
}


def fetch(task: str, folder: Path, mirror: str | None) -> None:
    """Downloads the missing files of a task to ``folder``, checks them, and makes GLUE's tables.
    Raises DataError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = [fetch_file(file, folder, mirror) for file in SOURCES[task]]
    if task == "squad":
        return
    tables = _mrpc(*sources) if task == "MRPC" else _unzipped(task, *sources)
    for name, content in tables.items():
        with atomic_file(folder / name) as partial:
            partial.write_bytes(content)


def _mrpc(pairs: Path, listed: Path) -> dict[str, bytes]:
    header, *lines = (line.rstrip("\r") for line in _lines(pairs))
    ids = {tuple(line.split()) for line in _lines(listed)}
    tables = {"train.tsv": [header], "dev.tsv": [header]}
    for line in lines:
        tables[
            "dev.tsv" if tuple(line.split("\t")[1:3]) in ids else "train.tsv"
        ].append(line)
    return {name: ("\n".join(table) + "\n").encode() for name, table in tables.items()}


def _unzipped(task: str, archive: Path) -> dict[str, bytes]:
    """The tables in the top folder of an archive."""
    try:
        with zipfile.ZipFile(archive) as zipped:
            paths = [
                name for name in zipped.namelist() if Path(name).match(f"{task}/*.tsv")
            ]
            return {
                Path(name).name: zipped.read(name)
                for name in paths
                if name.count("/") == 1
            }
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"cannot unpack {archive}: {error}; remove it and run again"
        ) from error


def _lines(path: Path) -> list[str]:
    """Non-blank lines of a table, ended by line feeds only."""
    text = path.read_bytes().decode("utf-8-sig", "replace")
    return [line for line in text.split("\n") if line.strip()]


def main(options: argparse.Namespace) -> None:
    for task in options.task:
        fetch(task, options.outputdir / task, options.mirror)
        say(f"{options.outputdir / task}: complete and checked")
