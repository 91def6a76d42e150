"""Ctrl-C and SIGTERM at any moment: one line, workers and all at once, no traceback.

Python handles a signal when the main thread is next in Python code, which a compiled loop or an import can put off for
long. A thread therefore waits for the byte that Python writes at once, tells the user, removes the files that are not
finished and ends the process. Ending at any moment is safe, as kill -9 is: every stage writes its files whole or not at
all. Imports nothing but the standard library, so that a command has this before it imports the rest.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_LONGEST_HOLD, _LONGEST_END = 20.0, 2.0  # seconds, of starting workers and of their end
_received, _held = threading.Event(), threading.Event()
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def install(program: str | None) -> None:
    """Makes SIGINT and SIGTERM end this process with a line that says how to continue; for the main thread only.

    Exit status: 128 and the signal's number, as the shell has it. Without a program, as of a worker, there is no line.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and background jobs have it
            signal.signal(number, _park)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end, args=(reader, program), name="interrupt", daemon=True).start()


def _park(number: int, frame: FrameType | None) -> None:
    """The main thread does nothing more, nor reports what else fails now, unless it has to finish starting workers."""
    _received.set()
    while not _held.is_set():
        time.sleep(1)


@contextmanager
def held() -> Iterator[None]:
    """The process does not end within: a worker that is half started would complain, or stay."""
    _held.set()
    try:
        yield
    finally:
        _held.clear()
        while _received.is_set():
            time.sleep(1)


def end(workers: Iterable[Any]) -> None:
    """Ends worker processes, which remove first what they have not finished."""
    until = time.monotonic() + _LONGEST_END
    for worker in (workers := list(workers)):
        worker.terminate()
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
        worker.kill()


def _end(reader: int, program: str | None) -> None:
    """Waits for a signal, says so, and ends the workers and the process."""
    while (number := os.read(reader, 1)[0]) not in SIGNALS:
        pass
    word = "interrupted" if number == signal.SIGINT else "terminated"
    if program:
        with suppress(OSError):
            line = f"{program}: {word}; to continue, run the same command again\n"
            os.write(2, (("\n" if os.isatty(2) else "") + line).encode())
    until = time.monotonic() + _LONGEST_HOLD
    while _held.is_set() and time.monotonic() < until:
        time.sleep(0.02)
    if multiprocessing := sys.modules.get("multiprocessing"):
        end(multiprocessing.active_children())
    if files := sys.modules.get("bert.core.files"):
        for path in list(files.unfinished):
            with suppress(OSError):
                path.unlink(missing_ok=True)
    os._exit(128 + number)
