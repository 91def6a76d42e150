"""How long the start of a run takes, by part: from the process's first moment to run_start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def process_started() -> float:
    """When this process was made, by time.monotonic(); where the system does not say, this moment."""
    now = time.monotonic()
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return now
    return now - max(up - ticks / os.sysconf("SC_CLK_TCK"), 0.0)


PROCESS_STARTED = process_started()


class StartClock:
    """Seconds of each part of the start, in their order.

    By the host's clock: what a GPU is still doing counts for the part that waits for it.
    """

    def __init__(self, began: float = PROCESS_STARTED, now: Callable[[], float] = time.monotonic) -> None:
        self.began, self._now, self._last = began, now, began
        self.parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """What ran since the part before was ``part``; one that comes again is added up."""
        now = self._now()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds to the end of the last part."""
        return self._last - self.began

    def line(self) -> str:
        """All of it in one line, such as "start 7.3 s: imports 3.1, process group 0.8, ..."."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items() if seconds >= 0.05)
        return f"start {self.total:.1f} s: {parts}"
