"""The power files of a result: power/result_N/node_0.txt, ... hold the readings of the run that result_N.txt logs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from review.logs.findings import ERROR, Finding
from review.logs.mllog import Log, number, read_log
from review.results.run import Run
from review.results.score import Result

_SLACK_MS = 10_000  # of clocks of two machines, and of a reading every few seconds
_AGAIN = "measure again with POWER=1, or leave out power/"


def check_power(result: Result) -> Iterator[Finding]:
    """What makes the energy that the official summarizer takes from these files another run's, or none."""
    folder = result.folder / "power"
    if not folder.is_dir():
        return
    known: dict[str, Path] = {}
    for run in result.runs:
        files = [path for kind in ("node", "sw") for path in sorted((folder / run.path.stem).glob(f"{kind}_*.txt"))]
        if not files:
            rule = "a result with power has readings of each of its runs"
            yield _finding(folder / run.path.stem, "has no power files", rule)
        for path in files:
            content = path.read_bytes()
            other = known.setdefault(hashlib.sha256(content).hexdigest(), path)
            if other is not path and content:
                message = f"is a copy of {other.relative_to(folder)}"
                yield _finding(path, message, "readings are of one node in one run")
            yield from _check_file(path, read_log(path), run)


def _check_file(path: Path, log: Log, run: Run) -> Iterator[Finding]:
    watts = [number(event.value) for event in log.all("power_reading")] + [
        number(event.value) for event in log.all("interconnect_power_est")
    ]
    start, stop = log.first("power_measurement_start"), log.first("power_measurement_stop")
    if not watts or start is None or stop is None:
        lacks = "readings" if not watts else "power_measurement_start" if start is None else "power_measurement_stop"
        yield _finding(path, f"is cut off: it lacks {lacks}", "a measurement is logged from start to stop")
    elif not any(watts):
        yield _finding(path, f"has nothing but 0 W in {len(watts)} readings", "a running system draws power")
    elif run.run_start is not None and run.run_stop is not None:
        late = start.time_ms - run.run_start.time_ms
        early = run.run_stop.time_ms - stop.time_ms
        if max(late, early) > _SLACK_MS:
            side, far = ("starts", late) if late >= early else ("stops", early)
            what = "after run_start" if late >= early else "before run_stop"
            message = f"{side} {far / 1000:,.0f} s {what} of {run.path.name}"
            yield _finding(path, message, "the measurement covers the timed part of its run")


def _finding(path: Path, message: str, rule: str) -> Finding:
    return Finding(severity=ERROR, message=message, source="rules", file=path, key="power", rule=rule, hint=_AGAIN)
