"""Files and folders that appear whole or not at all."""

import errno
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Files this process is writing, to be removed if it is ended meanwhile.
unfinished: set[Path] = set()


class NoSpaceError(OSError):
    """The disk or quota is full. The message is for the user."""


def is_full(error: BaseException) -> bool:
    """Whether the error is that of a full disk or quota."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or isinstance(error, NoSpaceError)


def no_space(folder: Path, file: str = "") -> NoSpaceError:
    """The error for a full disk; file: the one that was being written."""
    free = shutil.disk_usage(folder).free / 1e6 if folder.is_dir() else 0.0
    return NoSpaceError(
        f"No space left in {folder}: {file or 'a file'}, {free:,.1f} MB are free: make room there"
    )


def sources_of(folder: Path) -> list[Path]:
    """Python files and tables of a package, in an order that does not depend on the file system."""
    found = (path for path in folder.rglob("*") if path.suffix in (".py", ".yaml"))
    return sorted(found)


@contextmanager
def whole_file(path: Path, num_bytes: int = 0) -> Iterator[Path]:
    """A hidden path beside ``path`` to write to; on success it is synced and renamed to ``path``,
    on failure removed.

    Raises OSError if it cannot be written: NoSpaceError on a full disk, whatever error a library
    raises for it. num_bytes: expected size, if known.
    """
    # Beside the target, as a rename is atomic within one file system only; hidden, so that nobody
    # who lists the folder takes it for a result.
    partial = path.with_name(f".{path.name}.partial")
    unfinished.add(partial)
    try:
        yield partial
        # Content before name: after a power cut a name without content would look complete.
        sync(partial)
        os.replace(partial, path)
    except BaseException as error:
        # Of any exception: Ctrl-C and the end by a signal must not leave a partial file either.
        written = partial.stat().st_size if partial.is_file() else 0
        # Libraries report a full disk as errors of their own, so the disk is asked.
        full = is_full(error) or (isinstance(error, Exception) and has_no_room(partial))
        with suppress(OSError):
            # On a full disk the next attempt needs its room.
            partial.unlink(missing_ok=True)
        if full:
            needs = (
                f"needs {num_bytes / 1e6:,.1f} MB"
                if num_bytes
                else f"is larger than {written / 1e6:,.1f} MB"
            )
            raise no_space(path.parent, f"{path.name} {needs}") from error
        raise
    finally:
        unfinished.discard(partial)
    sync(path.parent)


def has_no_room(partial: Path) -> bool:
    """Whether nothing can be appended to a file, which is created if missing."""
    try:
        with partial.open("ab", buffering=0) as file:
            # 64 KiB, as a disk that is nearly full may still have room for a few bytes.
            return file.write(bytes(1 << 16)) < 1 << 16
    except OSError as error:
        return is_full(error)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all; what JSON lacks, such as a path, as text."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def text_of(path: Path) -> str:
    """Content of a text file, stripped; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def object_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it cannot be read, or is none."""
    # Nesting too deep is a RecursionError.
    with suppress(OSError, ValueError, RecursionError):
        # A pipe would be waited for.
        parsed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return parsed if isinstance(parsed, dict) else {}
    return {}


def name_folder(hidden: Path, path: Path) -> None:
    """Renames a complete folder, replacing one of the same name, and syncs the change."""
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        # Left by a run that was killed here.
        shutil.rmtree(replaced, ignore_errors=True)
        # A folder that is not empty cannot be replaced by a rename: the old one steps aside first.
        os.rename(path, replaced)
    os.rename(hidden, path)
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    # Reading is the only way to open a folder, and enough for fsync. A rename is durable only when
    # its folder is synced.
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def damage(error: Exception) -> str:
    """Why PyTorch could not read a file, in a few words.

    For a file that cannot be unpickled PyTorch suggests weights_only=False, which does not help
    with a damaged one.
    """
    if isinstance(error, pickle.UnpicklingError):
        return "not what torch.save writes, or cut off"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
