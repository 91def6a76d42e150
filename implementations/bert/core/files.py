"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

unfinished: set[Path] = set()  # being written by this process, for who ends it in the middle


class NoSpaceError(OSError):
    """A disk is full, or a quota. The message is for the user."""


def is_full(error: BaseException) -> bool:
    """Whether it says that a disk is full, or a quota."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or isinstance(error, NoSpaceError)


def no_space(folder: Path, what: str = "") -> NoSpaceError:
    """The error that says so; what: that was to be written."""
    free = shutil.disk_usage(folder).free / 1e6 if folder.is_dir() else 0.0
    return NoSpaceError(f"No space left in {folder}: {what or 'a file'}, {free:,.1f} MB are free: make room there")


@contextmanager
def whole_file(path: Path, num_bytes: int = 0) -> Iterator[Path]:
    """A hidden path beside ``path`` to write to; on success it is synced and renamed to ``path``, on failure removed.

    Raises OSError where that cannot be done: NoSpaceError on a full disk, whatever error a library makes of it.
    num_bytes: how large it will be, where that is known before.
    """
    partial = path.with_name(f".{path.name}.partial")
    unfinished.add(partial)
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException as error:
        written = partial.stat().st_size if partial.is_file() else 0
        full = is_full(error) or (isinstance(error, Exception) and has_no_room(partial))
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # on a full disk the next attempt needs its room
        if full:
            needs = f"needs {num_bytes / 1e6:,.1f} MB" if num_bytes else f"is larger than {written / 1e6:,.1f} MB"
            raise no_space(path.parent, f"{path.name} {needs}") from error
        raise
    finally:
        unfinished.discard(partial)
    sync(path.parent)


def has_no_room(partial: Path) -> bool:
    """Whether a file, which is made where there is none, cannot become longer."""
    try:
        with partial.open("ab", buffering=0) as file:
            return file.write(bytes(1 << 16)) < 1 << 16
    except OSError as error:
        return is_full(error)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def text_of(path: Path) -> str:
    """What a text file holds, stripped; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


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
