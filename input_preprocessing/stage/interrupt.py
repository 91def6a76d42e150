"""Ends the process and its workers at once on Ctrl-C and SIGTERM, with one line and no traceback.

Python handles a signal when the main thread next runs Python code, which a compiled loop or an
import can delay. So a thread waits on the wake-up descriptor, tells the user, removes unfinished
files and ends the process. That is safe at any moment, like kill -9: stages write files atomically.
Imports only the standard library, so that a command can install this before it imports anything
else.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# Seconds to wait for workers to start, and to end.
_LONGEST_HOLD, _LONGEST_END = 20.0, 2.0
_received, _held = threading.Event(), threading.Event()
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def install(program: str | None) -> None:
    """Makes SIGINT and SIGTERM end this process with a line on how to continue; call it in the main
    thread.

    Exit status: 128 + signal, as in the shell. program: named in the line; None (for workers): no
    line.
    """
    reader, writer = os.pipe()
    # set_wakeup_fd() demands it.
    os.set_blocking(writer, False)
    for number in SIGNALS:
        # Ignored under nohup and in background jobs.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _park)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(
        target=_end, args=(reader, program), name="interrupt", daemon=True
    ).start()


def _park(number: int, frame: FrameType | None) -> None:
    """Stops the main thread, so that it reports no consequential errors, unless it is starting
    workers.
    """
    _received.set()
    while not _held.is_set():
        time.sleep(1)


@contextmanager
def held() -> Iterator[None]:
    """Delays the end of the process: a worker that is just starting would print errors, or
    survive.
    """
    _held.set()
    try:
        yield
    finally:
        _held.clear()
        # A signal came meanwhile: wait for the thread to end the process, and start no work.
        while _received.is_set():
            time.sleep(1)


def end(workers: Iterable[Any]) -> None:
    """Terminates worker processes, which first remove their unfinished files."""
    until = time.monotonic() + _LONGEST_END
    for worker in (workers := list(workers)):
        worker.terminate()
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
        worker.kill()


def _end(reader: int, program: str | None) -> None:
    """Waits for a signal, reports it, and ends the workers and the process."""
    # Python writes the numbers of all signals that it handles to the pipe.
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
    # Looked up, not imported: where nobody has imported it there are no workers to end.
    if multiprocessing := sys.modules.get("multiprocessing"):
        end(multiprocessing.active_children())
    if files := sys.modules.get("common.files"):
        for path in list(files.unfinished):
            with suppress(OSError):
                path.unlink(missing_ok=True)
    # sys.exit() would end this thread alone.
    os._exit(128 + number)
