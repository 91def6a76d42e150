"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

unfinished: set[Path] = set()  # being written by this process, for who ends it in the middle


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A hidden path beside ``path`` to write to; on success it is synced and renamed to ``path``, on failure removed.

    Raises OSError where that cannot be done.
    """
    partial = path.with_name(f".{path.name}.partial")
    unfinished.add(partial)
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # on a full disk the next attempt needs its room
        raise
    finally:
        unfinished.discard(partial)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def name_folder(hidden: Path, path: Path) -> None:
    """Renames a complete folder, in the place of one of the same name, and syncs that."""
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # of a run that was killed here
        os.rename(path, replaced)
    os.rename(hidden, path)
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Returns when the file, or what the folder says of its files, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def damage(error: Exception) -> str:
    """Why PyTorch could not read a file, in a few words: each kind of damage has its own error.

    Of what cannot be unpickled PyTorch advises to trust the file all the same, which is no cure for a damaged one.
    """
    if isinstance(error, pickle.UnpicklingError):
        return "not what torch.save writes, or cut off"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
