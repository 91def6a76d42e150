"""Ctrl-C and SIGTERM at any moment: one line, workers and all at once, no traceback.

Python handles a signal when the main thread is next in Python code, which a compiled loop or an import can put off for
long. A thread therefore waits for the byte that Python writes at once, tells the user and ends the process. Ending at
any moment is safe, as kill -9 is: every stage writes its files whole or not at all. Imports nothing but the standard
library, so that a command has this before it imports the rest.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_LONGEST_HOLD = 20.0  # seconds
_received, _held = threading.Event(), threading.Event()
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def install(program: str) -> None:
    """Makes SIGINT and SIGTERM end this process with a line that says how to continue; for the main thread only.

    Exit status: 128 and the signal's number, as the shell has it.
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


def _end(reader: int, program: str) -> None:
    """Waits for a signal, says so, and ends the workers and the process."""
    while (number := os.read(reader, 1)[0]) not in SIGNALS:
        pass
    word = "interrupted" if number == signal.SIGINT else "terminated"
    with suppress(OSError):
        line = f"{program}: {word}; to continue, run the same command again\n"
        os.write(2, (("\n" if os.isatty(2) else "") + line).encode())
    end = time.monotonic() + _LONGEST_HOLD
    while _held.is_set() and time.monotonic() < end:
        time.sleep(0.02)
    if multiprocessing := sys.modules.get("multiprocessing"):
        for worker in multiprocessing.active_children():
            worker.kill()
    # Else Python's resource tracker complains of semaphores once this process is gone.
    util, synchronize = (sys.modules.get(f"multiprocessing.{name}") for name in ("util", "synchronize"))
    if util and synchronize:
        for finalizer in list(util._finalizer_registry.values()):
            if getattr(finalizer, "_callback", None) is synchronize.SemLock._cleanup:
                finalizer()
    os._exit(128 + number)
