"""Waiting for other processes on machines of any speed: until a condition holds, never for a fixed time."""

import itertools
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

# Below the ports of outgoing connections, any of which may be taken before a process under test
# listens on it, and below those of launch/run/port.sh. Each test process starts at another number
# and takes no port twice.
_PORTS, _LAST_PORT = 10_000, 20_000
_next_port = itertools.count(os.getpid() * 997)


def wait_until(
    what: Callable[[], object], seconds: float = 900, every: float = 0.02
) -> None:
    """Waits until what() is true, asked ``every`` so many seconds; fails after ``seconds``, less than a
    test's time limit.
    """
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(every)


def state(pid: int) -> str:
    """State of a process in /proc, such as R, S, T (stopped) and Z (zombie); empty if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


def running(pid: int) -> bool:
    """Whether a process is alive; zombies are not."""
    return state(pid) not in ("", "Z", "X")


def processes_with(folder: Path | str) -> list[int]:
    """Living processes with this folder in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_named = str(folder).encode() in (process / "environ").read_bytes()
            if is_named and running(int(process.name)):
                found.append(int(process.name))
    return found


def free_ports(count: int = 1) -> int:
    """First of ``count`` consecutive free ports."""
    for _ in range(1000):
        first = _PORTS + next(_next_port) * count % (_LAST_PORT - _PORTS - count)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("", port)))
            return first
    raise AssertionError("no free ports")
