"""Reads HDF5 files in a process that may die.

HDF5 trusts the headers of a file: one flipped bit there can crash the process that reads it
(SIGSEGV, SIGABRT) or keep it in an endless loop. So a helper process reads; it is started when
first needed, serves any number of files, and is replaced after a file that it did not survive,
which is then named. Contiguous datasets are only located by it, for the caller to map.
"""

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from bert.data.records import DataError
from common.process import limit_cpu

# CPU time for a request, far above what a sound file takes: milliseconds to open it, and a second
# for 50 MB of values.
_OPENING_SECONDS, _READING_SECONDS, _BYTES_PER_SECOND = 2, 10, 2_000_000

PYTHON = [sys.executable]  # what runs the helper

Values = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Dataset:
    """Type and place of a dataset. dtype: of the entries' elements if their length varies."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int | None  # of its bytes in the file; None: not contiguous
    is_ragged: bool  # entries of variable length


@dataclass(frozen=True)
class Hdf5File:
    """Attributes and datasets of the root group of a file."""

    path: Path
    attributes: dict[str, int | str]
    datasets: dict[str, Dataset]

    def read(self, name: str) -> Values:
        """Values of a dataset; ragged ones flattened, with the length of each entry.

        Raises:
            DataError: the dataset cannot be read.
        """
        values: Values = _helper.ask(self.path, name)
        return values


def open_hdf5(path: Path) -> Hdf5File:
    """What a file holds. Raises DataError if it cannot be read as HDF5."""
    return Hdf5File(path, *_helper.ask(path, None))


class _Helper:
    """This process's end of the helper. Threads take turns; a forked child starts its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, path: Path, name: str | None) -> Any:
        """Contents of a file (name: None), or values of a dataset of it."""
        with self.lock:
            # Kept only with a whole answer: after an interruption the next one would be the last.
            process, self.process = self.process or _start(), None
            assert process.stdin
            assert process.stdout
            try:
                pickle.dump((os.fspath(path), name), process.stdin)
                process.stdin.flush()
                problem, answer = pickle.load(process.stdout)
                self.process = process
            except (EOFError, OSError, pickle.UnpicklingError):
                problem, answer = f"the reader {_end_of(process)}", None
            finally:
                if not self.process:
                    process.kill()
        if problem:
            raise DataError(
                f"{path} cannot be read as HDF5 ({problem}); copy or prepare it again"
            )
        return answer

    def forget(self) -> None:
        """In a forked child: leaves the parent's helper to the parent."""
        if self.process:
            for pipe in (self.process.stdin, self.process.stdout):
                os.close(pipe.fileno())  # type: ignore[union-attr]
            self.process.returncode = 0  # not a child of this process
        self.__init__()  # type: ignore[misc]


def _start() -> subprocess.Popen[bytes]:
    # A new program, not a fork: threads of this process may hold locks, and its open files, such as
    # the lock of a folder, are its own. It finds modules where this process does, without `site`.
    paths = [str(Path(__file__).parents[2]), *sys.path]
    code = f"import sys; sys.path[:] = {paths!r}; from bert.data.hdf5 import serve; serve()"
    pipe = subprocess.PIPE
    return subprocess.Popen([*PYTHON, "-S", "-c", code], stdin=pipe, stdout=pipe)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    status = process.wait()
    if status == -signal.SIGXCPU:
        return "found no end of it"
    return f"ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"


def serve() -> None:
    """The helper: answers requests on stdin until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who ask
    # Crashes are expected here, and no core file is wanted for one.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    silent = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):  # what the C library says as it aborts is no answer
        os.dup2(silent, number)
    with suppress(EOFError, BrokenPipeError):
        while True:
            path, name = pickle.load(requests)
            try:
                size = os.path.getsize(path)
                reading = _READING_SECONDS + size // _BYTES_PER_SECOND
                limit_cpu(reading if name else _OPENING_SECONDS)
                with h5py.File(path, "r") as file:
                    answer: tuple[str, Any]
                    answer = "", (_values(file[name]) if name else _contents(file))
            except Exception as error:  # on a damaged file HDF5 and h5py raise any
                code = getattr(error, "errno", None)
                text = os.strerror(code) if code else str(error)
                answer = text.splitlines()[0] if text else type(error).__name__, None
            pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _contents(file: h5py.File) -> tuple[dict[str, int | str], dict[str, Dataset]]:
    attributes: dict[str, int | str] = {}
    for name in file.attrs:
        # Of another type, or damaged: as if it were not there.
        with suppress(Exception):
            value = file.attrs[name]
            if isinstance(value, (str, np.integer)):
                attributes[name] = value if isinstance(value, str) else int(value)
    datasets = {}
    for name in file:
        dataset = file[name]
        if isinstance(dataset, h5py.Dataset):
            entry = h5py.check_vlen_dtype(dataset.dtype)
            dtype, offset = entry or dataset.dtype, dataset.id.get_offset()
            datasets[name] = Dataset(
                np.dtype(dtype), dataset.shape, offset, bool(entry)
            )
    return attributes, datasets


def _values(dataset: h5py.Dataset) -> Values:
    values = dataset[:]
    entry = h5py.check_vlen_dtype(dataset.dtype)
    if not entry:
        return values, np.zeros(0, np.int64)
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    # The empty array gives the type where there is no entry.
    return np.concatenate([np.zeros(0, entry), *values]), lengths


_helper = _Helper()
os.register_at_fork(after_in_child=_helper.forget)
