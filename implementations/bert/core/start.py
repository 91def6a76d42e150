"""Startup time by part: from process creation to run_start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def process_started() -> float:
    """time.monotonic() at the creation of this process; now, if the system does not tell."""
    now = time.monotonic()
    try:
        # proc(5), field 22: clock ticks from boot to the start of the process. Counted behind the
        # last parenthesis, as the name in field 2 may have spaces.
        ticks = int(
            Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
        )
        up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return now
    # uptime is cut to hundredths of a second: a fresh process may seem to start in the future.
    return now - max(up - ticks / os.sysconf("SC_CLK_TCK"), 0.0)


PROCESS_STARTED = process_started()


class StartClock:
    """Seconds of each part of the startup, in order.

    By the host's clock: pending GPU work counts for the part that waits for it.
    """

    def __init__(
        self, began: float = PROCESS_STARTED, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.began, self._now, self._last = began, now, began
        self.parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Ends a part, which began where the last one ended; repeated parts are added up."""
        now = self._now()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds to the end of the last part."""
        return self._last - self.began

    def line(self) -> str:
        """Summary such as "start 7.3 s: imports 3.1, process group 0.8, ..."."""
        parts = ", ".join(
            f"{part} {seconds:.1f}" for part, seconds in self.parts.items() if seconds >= 0.05
        )
        return f"start {self.total:.1f} s: {parts}"
