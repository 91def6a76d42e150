"""Ctrl-C and SIGTERM at any moment: one line, workers and all within a second, no traceback.

Python handles a signal when the main thread is next in Python code, which a compiled loop or an import can put off for
long. A thread therefore waits for the byte that Python's own handler writes at once: it tells the user, gives the main
thread half a second to stop in good order, and ends the process if it has not. Ending at any moment is safe: every
stage writes its files whole or not at all. Imports nothing but the standard library, so that a command has this before
it imports the rest.
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

_GRACE_SECONDS = 0.5
_LONGEST_HOLD = 20.0  # seconds
_received: list[int] = []
_held = threading.Event()
_told = threading.Lock()
_line = "{}"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def install(program: str) -> None:
    """Makes SIGINT and SIGTERM end this process with a line that says how to continue; for the main thread only.

    Exit status: 128 and the signal's number, as the shell has it.
    """
    global _line
    _line = f"{program}: {{}}; to continue, run the same command again\n"
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and background jobs have it
            signal.signal(number, _raise)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="interrupt", daemon=True).start()


def _raise(number: int, frame: FrameType | None) -> None:
    """Stops the main thread, once: what it does then is not to be stopped in turn."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    sys.unraisablehook = lambda _: None  # it may hit Python in a place that can only report it
    _received.append(number)
    _tell(number)
    if not _held.is_set():
        raise KeyboardInterrupt


def received() -> bool:
    """Whether a signal is ending this process: its line is the last one."""
    return bool(_received)


@contextmanager
def held() -> Iterator[None]:
    """What a signal stops it stops at the end of this: a worker that is half started would complain, or stay."""
    _held.set()
    try:
        yield
    finally:
        _held.clear()
    if _received:
        raise KeyboardInterrupt


@contextmanager
def reported() -> Iterator[None]:
    """Leaves the process in good order where a signal ended the code within; its line has been printed."""
    try:
        yield
    except BaseException:  # an interrupted import or worker comes as errors of all kinds
        if _received:
            sys.exit(128 + _received[0])
        raise


def _tell(number: int) -> None:
    """Prints the line, once."""
    if _told.acquire(blocking=False):
        word = "interrupted" if number == signal.SIGINT else "terminated"
        with suppress(OSError):
            os.write(2, (("\n" if os.isatty(2) else "") + _line.format(word)).encode())


def _watch(reader: int) -> None:
    while (number := os.read(reader, 1)[0]) not in SIGNALS:
        pass
    _tell(number)
    end = time.monotonic() + _LONGEST_HOLD
    while _held.is_set() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(_GRACE_SECONDS)
    kill_workers()
    # Else Python's resource tracker complains of semaphores once this process is gone.
    util, synchronize = (sys.modules.get(f"multiprocessing.{name}") for name in ("util", "synchronize"))
    if util and synchronize:
        for finalizer in list(util._finalizer_registry.values()):
            if getattr(finalizer, "_callback", None) is synchronize.SemLock._cleanup:
                finalizer()
    os._exit(128 + number)


def kill_workers() -> None:
    """Ends the processes that this one started, whatever they do."""
    if multiprocessing := sys.modules.get("multiprocessing"):
        for worker in multiprocessing.active_children():
            worker.kill()
