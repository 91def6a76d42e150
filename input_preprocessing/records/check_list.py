"""Lists of what shards must be: published digests by file name, compared before anything is made of the files.

A line is `md5  name`, as md5sum writes it: of the file's bytes; or `name  md5`, as in the lists that NVIDIA publishes
(4320_shards_varlength.chk and others): of input_ids alone, whatever else the file holds. Blank lines and lines that
begin with # are skipped; of a name with folders the last part counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py

from bert.data.records import DataError
from input_preprocessing.stage.manifest import md5_of
from input_preprocessing.stage.parallel import run_tasks

_MD5SUM = re.compile(r"([0-9a-fA-F]{32})\s+\*?(\S.*)")
_PUBLISHED = re.compile(r"(\S.*?)\s+([0-9a-fA-F]{32})")


@dataclass(frozen=True)
class Wanted:
    """What a list says of one file: md5, lower case, of its bytes or of its input_ids."""

    md5: str
    of_input_ids: bool


def read_list(path: Path) -> dict[str, Wanted]:
    """The lines of a list, by file name.

    Raises:
        DataError: unreadable, empty, or a line that names no file or none md5, or a file twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise DataError(f"cannot read {path}: {reason}; check the list") from error
    found: dict[str, Wanted] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if parts := _MD5SUM.fullmatch(line.strip()):
            md5, name = parts.groups()
        elif published := _PUBLISHED.fullmatch(line.strip()):
            name, md5 = published.groups()
        else:
            raise DataError(f"{path}: line {number} is neither 'md5  name' nor 'name  md5'; check the list")
        name, wanted = name.rpartition("/")[2], Wanted(md5.lower(), of_input_ids=parts is None)
        if found.setdefault(name, wanted) != wanted:
            raise DataError(f"{path}: line {number} gives {name} another md5 than a line before; check the list")
    if not found:
        raise DataError(f"{path} lists no files; check the list")
    return found


def input_ids_digest(rows: Iterable[Sequence[int]]) -> str:
    """Digest of input_ids as NVIDIA's lists have it: md5 of the list of the md5 of each row, all as Python's text."""
    digests = [hashlib.md5(str(list(row)).encode()).hexdigest() for row in rows]
    return hashlib.md5(str(digests).encode()).hexdigest()


def _compare(task: tuple[Path, Wanted]) -> str:
    """What is wrong with a file, in a line; '' where it is the one listed."""
    path, wanted = task
    try:
        if wanted.of_input_ids:
            with h5py.File(path, "r") as file:
                md5 = input_ids_digest(row.tolist() for row in file["input_ids"][:])
        else:
            md5 = md5_of(path)
    except DataError as error:
        return str(error)
    except (OSError, KeyError):
        return f"{path} has no input_ids to compare (not HDF5, or damaged); copy it again"
    what = "md5 of input_ids" if wanted.of_input_ids else "md5"
    return "" if md5 == wanted.md5 else f"{path} has {what} {md5}, the list {wanted.md5}; copy it again"


def differences(files: Sequence[Path], listed: dict[str, Wanted], *, whole: bool, jobs: int) -> list[str]:
    """Every file that is not as listed, one line each; with `whole` those listed that are not there too."""
    here = [path for path in files if path.name in listed]
    weights = [path.stat().st_size for path in here]
    told = run_tasks("check", _compare, [(path, listed[path.name]) for path in here], jobs=jobs, weights=weights)
    told += [f"{path} is not on the list; move it away" for path in files if path.name not in listed]
    names = {path.name for path in files}
    missing = [f"{name} is missing; copy it" for name in listed if name not in names] if whole else []
    return [*filter(None, told), *missing]
