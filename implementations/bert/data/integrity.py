"""Record files by their content: digests of what is read, not of what a file says of itself.

A digest that was computed is kept in a hidden folder beside the data, for as long as the file is
the same one: a write changes ctime, which no program can set back. The second run therefore reads
nothing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from bert.core.dist import World
from bert.data.format import content_digest, open_records
from bert.data.records import DataError
from common.files import text_of, write_shared

FOLDER = ".digests"
_THREADS = 4  # BLAKE2b runs beside Python


def check(expected: Mapping[Path, str], world: World) -> None:
    """Compares the content of files with the digests expected; "" stands for what the file records
    of itself.

    A file without a digest, as of other makers, proves nothing and is left out.

    Ranks that see the same files share the work. Raises DataError, on every rank, naming the rank
    and the first file that differs. A collective.
    """
    # Ranks that see the same inodes see the same files: each reads its share of them.
    group = world.peers([_identity(path) for path in expected])
    mine = list(expected.items())[group.index(world.rank) :: len(group)]
    with ThreadPoolExecutor(_THREADS) as executor:
        problem = next(
            filter(None, executor.map(lambda item: _problem(*item), mine)), ""
        )
    if problem and world.size > 1:
        problem = f"rank {world.rank} on {platform.node()}: {problem}"
    if problem := world.first_text(problem):
        raise DataError(problem)


def _problem(path: Path, expected: str) -> str:
    """Why a file is not what is expected; empty if it is, or nothing is."""
    try:
        recorded = expected or open_records(path)[1].content_digest
        found = digest_of(path) if recorded else recorded
    except DataError as error:
        return str(error)
    if found == recorded:
        return ""
    changed = (
        f"{path} was changed after it was written (digest {found}, recorded {recorded})"
    )
    return f"{changed}: copy or prepare it again"


def digest_of(path: Path) -> str:
    """The content digest of what a file holds, computed or kept from the last time. Raises
    DataError.
    """
    kept, identity = path.parent / FOLDER / f"{path.name}.digest", _identity(path)
    known, _, digest = text_of(kept).rpartition(" ")
    if known and known == identity and len(digest) == 32:
        return digest
    digest = content_digest(open_records(path)[0])
    if _identity(path) == identity:  # nobody wrote to it meanwhile
        with suppress(OSError):  # data may be read-only
            kept.parent.mkdir(exist_ok=True)
            write_shared(kept, f"{identity} {digest}\n")
    return digest


def _identity(path: Path) -> str:
    """Size, times, number and device of a file; empty if there is none."""
    with suppress(OSError):
        found = os.stat(path)
        numbers = (
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
            found.st_ino,
            found.st_dev,
        )
        return " ".join(map(str, numbers))
    return ""
