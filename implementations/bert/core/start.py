"""When this process began."""

from __future__ import annotations

import os
import time
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
