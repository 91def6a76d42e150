"""Ends what a failed test started and left running: ranks that wait for each other, commands, what
those started in sessions of their own.

A process is this one's if it is a descendant, or holds in its environment the mark that every
process of the tests inherits (daemons, whose parents have ended).
"""

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from bert.data import hdf5

from .waiting import processes_with, running

MARK = "TESTS_OF_PROCESS"
_TICKS = os.sysconf("SC_CLK_TCK")


def mark() -> None:
    """Marks this process's environment, before it starts others."""
    os.environ[MARK] = str(os.getpid())


def now() -> float:
    """Seconds since the machine's start, the clock of processes' starts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _fields(pid: int) -> list[str]:
    """Those of /proc/PID/stat after the name: state, parent, ...; none if there is no process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return []


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        if fields := _fields(int(process.name)):
            children.setdefault(int(fields[1]), []).append(int(process.name))
    found, unseen = [], [os.getpid()]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def _servers() -> set[int | None]:
    """What is started once, for all tests of this process: multiprocessing's, and what reads HDF5."""
    reader = hdf5._helper.process
    forkserver = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    tracker = multiprocessing.resource_tracker._resource_tracker
    servers = {forkserver._forkserver_pid, tracker._pid}  # type: ignore[attr-defined]
    return servers | {reader and reader.pid}


def processes_since(start: float) -> list[int]:
    """Living processes of the tests that began after ``start`` (``now()``)."""
    marked = processes_with(f"{MARK}={os.getpid()}")
    found = {*_descendants(), *marked} - _servers() - {os.getpid()}
    # Starts are counted in ticks: one of the same tick counts as later.
    later = lambda pid: int(_fields(pid)[19]) >= int(start * _TICKS)  # noqa: E731
    return [pid for pid in found if running(pid) and later(pid)]


def end(start: float) -> list[int]:
    """Kills the processes since ``start`` and those that they start meanwhile; returns their numbers."""
    ended: list[int] = []
    for _ in range(100):
        found = processes_since(start)
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended += found
        time.sleep(0.02)
    return ended
