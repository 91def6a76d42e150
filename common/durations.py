"""Durations as people write them."""

import math


def duration(seconds: float | None) -> str:
    """1:02:03, 2:03 or 0:03; a dash for None, NaN and infinities."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
