"""Ranks of a node that start together compile each Triton kernel once.

Triton keeps what it has compiled in a folder, but ranks that meet a kernel at the same moment all compile it, on the
same cores. Here the first one does, and the others wait for what it leaves. The locks lie on this node, in a folder of
this user: those of shared storage cannot be relied on everywhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bert.kernels import triton_support

LONGEST_WAIT = 60.0  # seconds; a rank that holds the lock for longer is stuck: the others compile for themselves
POLL_SECONDS = 0.02


class Compilations:
    """Count and time of the kernels that this process compiled or read from the cache."""

    def __init__(self, folder: Path | None) -> None:
        """folder: of the locks; None: no locking."""
        self.folder, self.count, self.seconds = folder, 0, 0.0

    def __str__(self) -> str:
        return f"{self.count} kernels compiled, or read from the cache, in {self.seconds:.1f} s"

    def guarded(self, compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
        """triton.compile, once a node at a time for each kernel."""

        @functools.wraps(compile_kernel)
        def compile_once(source: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            try:
                with self.turn(source):
                    return compile_kernel(source, *args, **kwargs)
            finally:
                self.count += 1
                self.seconds += time.monotonic() - begin

        return compile_once

    @contextlib.contextmanager
    def turn(self, source: Any) -> Iterator[None]:
        """Holds the lock of a kernel; ranks that had to wait for it then go on together, without it."""
        lock = None
        if self.folder is not None and hasattr(source, "hash"):
            name = hashlib.sha256(str(source.hash()).encode()).hexdigest()[:32]
            with contextlib.suppress(OSError):
                lock = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if lock is None:
            yield
            return
        try:
            if not _locked(lock):
                _wait(lock)
            yield
        finally:
            os.close(lock)


def _locked(lock: int) -> bool:
    """Whether this process holds the lock now; also where there are no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _wait(lock: int) -> None:
    deadline = time.monotonic() + LONGEST_WAIT
    while not _locked(lock):
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)
    fcntl.flock(lock, fcntl.LOCK_UN)


def lock_folder() -> Path | None:
    """A folder on this node that only this user can write to; None where there can be none."""
    folder = Path(tempfile.gettempdir()) / f"bert-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    return folder if folder.is_dir() and not folder.is_symlink() and found.st_uid == os.getuid() else None


@functools.cache
def compilations() -> Compilations:
    """Those of this process. From the first call on each kernel is compiled once a node; without Triton none is."""
    found = Compilations(lock_folder())
    if triton_support.triton is not None:
        compiler = importlib.import_module("triton.compiler")
        compiler.compile = found.guarded(compiler.compile)  # type: ignore[attr-defined]
    return found
