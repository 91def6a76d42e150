"""The mean that the rules score: of a result's runs without the fastest and the slowest.

MLPerf Training rules, "Benchmark results": the fastest and the slowest run are dropped, the times of
the remaining ones averaged. One failed run may stand for the slowest; with two there is no result.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from review.results.run import Run


@dataclass(frozen=True, kw_only=True)
class OlympicMean:
    """Each run is valid or failed; the fastest and the slowest are dropped, the others remain.

    ``valid``: as ``is_valid`` says, with a time, fastest first. ``failed``: the number of others. ``remaining``: the
    runs averaged, none if there are fewer than three runs or two failed. ``dropped``: those left
    out, each with why: fastest, slowest or failed. ``minutes``: the mean; ``median``: of all valid.
    """

    valid: tuple[Run, ...] = ()
    failed: int = 0
    remaining: tuple[Run, ...] = ()
    dropped: dict[Path, str] = field(default_factory=dict)
    minutes: float | None = None
    median: float | None = None


def olympic_of(runs: Sequence[Run], is_valid: Callable[[Run], bool]) -> OlympicMean:
    minutes = {r.path: r.minutes for r in runs if is_valid(r) and r.minutes}
    valid = [run for run in runs if run.path in minutes]
    valid.sort(key=lambda run: minutes[run.path])
    dropped = {run.path: "failed" for run in runs if run.path not in minutes}
    failed = len(dropped)
    # A failed run is the slowest: with one, only the fastest valid run is dropped.
    slowest = [] if failed else valid[-1:]
    remaining = valid[1 : len(valid) - len(slowest)] if failed < 2 else []
    if remaining:
        dropped[valid[0].path] = "fastest"
        dropped |= {run.path: "slowest" for run in slowest}
    times = [minutes[run.path] for run in remaining]
    return OlympicMean(
        valid=tuple(valid),
        failed=failed,
        remaining=tuple(remaining),
        dropped=dropped,
        minutes=math.fsum(times) / len(times) if times else None,
        median=statistics.median(minutes.values()) if minutes else None,
    )
