"""What is wrong with the files of a finished data set: each is read whole and compared with the manifest."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert.data.format import verify_records
from bert.data.records import SUFFIXES, DataError, Metadata
from bert.data.shards import INDEX, is_index_of
from input_preprocessing.stage.manifest import Manifest, md5_of
from input_preprocessing.stage.parallel import run_tasks


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file of a prepared folder."""

    file: str  # its path in the folder
    problem: str  # in a few words, for people
    stray: bool = False  # of no data set here; else it is to be made again


def examine(folder: Path, made: Manifest, others: Iterable[Manifest] = (), *, jobs: int) -> list[Fault]:
    """Every fault of a data set's files, by the files' names.

    Args:
        folder: of the data set.
        made: its manifest.
        others: manifests of data sets in the same folder, whose files are no strays.
        jobs: worker processes.
    """
    faults = examine_files(folder, made, list(made.files), jobs=jobs)
    known = {folder / name for each in (made, *others) for name in each.files}
    faults += [Fault(str(path.relative_to(folder)), "was not prepared", stray=True) for path in _strays(known)]
    wrong = {fault.file for fault in faults if not fault.stray}
    for parent, names in _by_folder(made.records).items():
        shards = sorted(folder / name for name in names)
        if not wrong.intersection(names) and not is_index_of(folder / parent, shards):
            faults.append(Fault(str(parent / INDEX), "is missing or does not tell what the shards hold"))
    return sorted(faults, key=lambda fault: fault.file)


def examine_files(folder: Path, made: Manifest, names: Sequence[str], *, jobs: int) -> list[Fault]:
    """The faults of some of a data set's files."""
    tasks = [(folder / name, made.files[name]) for name in names]
    weights = [path.stat().st_size if path.is_file() else 0 for path, _ in tasks]
    found = dict(zip(names, run_tasks("read files", _examine, tasks, jobs=jobs, weights=weights), strict=True))
    problems = {name: text for name, text in found.items() if isinstance(text, str)}
    read = {name: metadata for name, metadata in found.items() if isinstance(metadata, Metadata)}
    for group in (*_by_folder(name for name in made.records if name in read).values(), made.evaluation):
        problems |= _unlike(made, {name: read[name] for name in group if name in read})
    return [Fault(name, problems[name]) for name in names if name in problems]


def _examine(task: tuple[Path, str]) -> str | Metadata | None:
    """What is wrong with a file; else the metadata of a record file, None of any other."""
    path, digest = task
    if not path.is_file():
        return "is missing"
    try:
        if path.suffix != ".hdf5":
            return None if md5_of(path) == digest else "has other contents than were prepared"
        metadata = verify_records(path)[1]
    except DataError as error:
        return str(error).removeprefix(str(path)).partition(";")[0].lstrip(" :")
    return metadata if metadata.content_digest == digest else "holds other sequences than were prepared"


def _unlike(made: Manifest, found: dict[str, Metadata]) -> dict[str, str]:
    """Files whose attributes, which no digest covers, are not the manifest's or not those of most files beside them."""
    sources = Counter(metadata.source for metadata in found.values()).most_common(1)
    problems = {}
    for name, metadata in found.items():
        wanted = {key: value for key, value in made.recipe.items() if hasattr(metadata, key)}
        wrong = [key for key, value in wanted.items() if getattr(metadata, key) != value]
        if metadata.source != sources[0][0]:
            wrong.append("source")
        if wrong:
            problems[name] = f"says another {wrong[0]} than was prepared"
    return problems


def _by_folder(names: Iterable[str]) -> dict[Path, list[str]]:
    """Files by the folder that they are in."""
    folders: dict[Path, list[str]] = {}
    for name in names:
        folders.setdefault(Path(name).parent, []).append(name)
    return folders


def _strays(known: set[Path]) -> list[Path]:
    """Files that a trainer would read beside the record files known, and what a run that was killed left there."""
    parents = {path.parent for path in known if path.suffix == ".hdf5"}
    present = [path for parent in parents if parent.is_dir() for path in parent.iterdir() if path.is_file()]
    return sorted(
        path
        for path in present
        if path not in known and (path.suffix == ".partial" if path.name.startswith(".") else path.suffix in SUFFIXES)
    )


def to_dicts(faults: Iterable[Fault]) -> list[dict[str, object]]:
    """Faults for JSON."""
    return [dataclasses.asdict(fault) for fault in faults]
