"""Reading record files where a damaged one does no harm: HDF5 runs in a process of its own.

A flipped bit in a header of HDF5 can crash its library, keep it busy for ever or make it raise any error. So a child
process opens each file, within a limit of CPU time, and passes on where its datasets lie; this process only maps them.
If the child dies, the file is named, and the next one gets a new child.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import warnings
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bert.data import format as record_format
from bert.data.records import DataError, Metadata, Records
from input_preprocessing.stage.parallel import end_with_parent
from input_preprocessing.stage.reading import changed, stamp_of

_MOST_FILES = 1 << 16  # descriptors; a limit that is infinite cannot be walked
LIMIT = 300  # CPU seconds to open a file; NVIDIA's largest shards, which are parsed, take about ten

_children: dict[
    int, tuple[Any, Connection]
] = {}  # by process: a fork must not talk to its parent's


def open_records(path: Path) -> tuple[Records, Metadata]:
    """``bert.data.format.open_records``, for files that may be damaged in any way.

    Raises:
        DataError: missing, damaged, foreign or inconsistent file.
    """
    reply = _ask(path)
    if isinstance(reply, str):
        raise DataError(reply)
    stamp, arrays, metadata = reply
    if stamp != stamp_of(os.stat(path)):
        raise changed(path)
    mapped = np.memmap(path, np.uint8, "r")
    for name, array in arrays.items():
        if isinstance(array, tuple):
            dtype, begin, end = array
            arrays[name] = mapped[begin:end].view(dtype)
    return Records(**arrays), metadata


def verify_records(path: Path) -> tuple[Records, Metadata]:
    """``bert.data.format.verify_records``, for files that may be damaged in any way.

    Raises:
        DataError: unreadable, out of range, or a digest does not match.
    """
    records, metadata = open_records(path)
    try:
        return record_format.verify_opened(path, records, metadata)
    except DataError:
        raise
    except (ValueError, IndexError, OverflowError) as error:
        raise DataError(f"{path} is damaged ({error}); copy or prepare it again") from error


def fault_of(path: Path) -> str:
    """What is wrong with a file, in words that begin with its name; empty if it is as it was written."""
    try:
        verify_records(path)
    except DataError as error:
        return str(error).partition(";")[0]
    return ""


def _ask(path: Path) -> Any:
    """The child's reply about a file: an error in words, or (stamp, arrays or their places, metadata)."""
    child, pipe = _children.get(os.getpid()) or _start()
    try:
        pipe.send(path)
        return pipe.recv()
    except (EOFError, OSError):
        del _children[os.getpid()]
        pipe.close()
        status = os.waitpid(child, 0)[1]
        in_time = not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGXCPU
        how = "it crashes" if in_time else f"{LIMIT} s are not enough"
        raise DataError(
            f"{path} is damaged: HDF5 cannot read it ({how}); copy or prepare it again"
        ) from None


def _start() -> tuple[int, Connection]:
    """Starts the child of this process; of a worker, which multiprocessing allows no children."""
    ours, theirs = Pipe()
    parent = os.getpid()
    with warnings.catch_warnings():  # the child runs no code of this process's other threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            ours.close()
            _serve(theirs, parent)
        finally:
            os._exit(0)
    theirs.close()
    _children[parent] = child, ours
    return child, ours


def _serve(pipe: Connection, parent: int) -> None:
    """The child: opens files until its parent ends."""
    # It must not keep the parent's files open: the lock of a folder lasts until the last of them is closed.
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_FILES)
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, limit)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    with suppress(EOFError, OSError):
        while True:
            path = pipe.recv()
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(used.ru_utime + used.ru_stime) + LIMIT
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            pipe.send(_reply(path))


def _reply(path: Path) -> Any:
    try:
        stamp = stamp_of(os.stat(path)) if path.is_file() else None
        records, metadata = record_format.open_records(path)
    except DataError as error:
        return str(error)
    except Exception as error:  # HDF5 and h5py raise whatever a damaged header leads them to
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        return f"{path} cannot be read as HDF5 ({reason}); copy or prepare it again"
    arrays = {field.name: getattr(records, field.name) for field in dataclasses.fields(records)}
    return stamp, {name: _place(array) for name, array in arrays.items()}, metadata


def _place(array: Any) -> Any:
    """(dtype, begin, end) in bytes of an array that maps its file; any other array as it is."""
    base = array
    while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
        base = base.base
    if not isinstance(base, np.memmap):
        return array
    begin = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return array.dtype, begin, begin + array.nbytes
