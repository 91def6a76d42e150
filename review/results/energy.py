"""The energy of a result: joules of each run by its power files, and their mean over the runs that make the score.

A node's energy is efficiency x (sum of watts x milliseconds since the reading before) x time to train / measured time
(MLPerf Training power measurement rules, "Scoring"; the formula is that of the official summarizer). A switch's is its
estimated power x time to train. The mean leaves out the runs that the time leaves out, and has its scaling factor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from review.logs.mllog import Event, Log, number, read_log
from review.results.run import Run

FOLDER = "power"


class EnergyError(ValueError):
    """Power files that give no energy. The message says why."""


@dataclass(frozen=True)
class PowerFile:
    """The measurement of one node or switch in one run."""

    path: Path
    log: Log

    @property
    def is_node(self) -> bool:
        """Whether it is a node's, not a switch's."""
        return self.path.name.startswith("node_")

    @functools.cached_property
    def start(self) -> Event | None:
        """The beginning of the measurement."""
        return self._last("power_measurement_start")

    @functools.cached_property
    def stop(self) -> Event | None:
        """The end of the measurement."""
        return self._last("power_measurement_stop")

    @functools.cached_property
    def readings(self) -> list[Event]:
        """The readings in the order of time."""
        return sorted(self.log.all("power_reading"), key=lambda event: event.time_ms)

    @functools.cached_property
    def efficiency(self) -> float:
        """What readings are multiplied by, 1 where it is not logged. Raises EnergyError."""
        event = self._last("conversion_eff")
        return 1.0 if event is None else self.value_of(event)

    def _last(self, key: str) -> Event | None:
        return max(self.log.all(key), key=lambda event: event.time_ms, default=None)

    def joules(self, milliseconds: float) -> float:
        """The energy of a run of this length, as the official summarizer computes it. Raises EnergyError."""
        return self._node_joules(milliseconds) if self.is_node else self._switch_joules(milliseconds)

    def _node_joules(self, milliseconds: float) -> float:
        if self.start is None:
            raise EnergyError(f"{self.path.name} lacks power_measurement_start")
        efficiency, summed, before, last, stop = 1.0, 0.0, 0.0, 0.0, None
        started = False
        for event in sorted(self.log.events, key=lambda event: event.time_ms):
            if event.key == "power_measurement_start":
                start = before = event.time_ms
                started = True
            elif event.key == "power_reading" and started and stop is None:
                summed += self.value_of(event) * (event.time_ms - before)
                before = last = event.time_ms
            elif event.key == "power_measurement_stop":
                stop = event.time_ms
            elif event.key == "conversion_eff":
                efficiency = self.value_of(event)
        measured = (last if stop is None else stop) - start
        if measured == 0:
            raise EnergyError(f"{self.path.name} measures from power_measurement_start to the same millisecond")
        return efficiency * summed * milliseconds / measured / 1000

    def _switch_joules(self, milliseconds: float) -> float:
        efficiency, watts = 1.0, 0.0
        for event in self.log.events:
            if event.key == "conversion_eff":
                efficiency = self.value_of(event)
            elif event.key == "interconnect_power_est":
                watts = self.value_of(event)
                break
        return efficiency * watts * milliseconds / 1000

    def value_of(self, event: Event) -> float:
        """The number that an event logs. Raises EnergyError."""
        value = number(event.value)
        if value is None:
            raise EnergyError(f"{self.path.name}:{event.line}: {event.key} is not a number")
        return value

    @functools.cached_property
    def interval_seconds(self) -> float | None:
        """Mean seconds between readings; None for fewer than two."""
        times = [event.time_ms for event in self.readings]
        return (times[-1] - times[0]) / (len(times) - 1) / 1000 if len(times) > 1 else None

    def longest_gap(self, start_ms: float, stop_ms: float) -> float:
        """The longest time without a reading between two times, seconds."""
        within = [event.time_ms for event in self.readings if start_ms < event.time_ms < stop_ms]
        return max(b - a for a, b in itertools.pairwise([start_ms, *within, stop_ms])) / 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnergy:
    """The energy of one run: ``joules``, or None and the ``reason``."""

    files: tuple[PowerFile, ...]
    joules: float | None = None
    watts: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """The energy of a result. ``joules`` is the score's counterpart; None where ``reason`` says why."""

    runs: dict[Path, RunEnergy]
    joules: float | None
    watts: float | None
    reason: str | None


def power_files(folder: Path, run: Run) -> tuple[PowerFile, ...]:
    """The power files of a run, nodes first. Raises OSError."""
    place = folder / FOLDER / run.path.stem
    paths = [path for kind in ("node", "sw") for path in sorted(place.glob(f"{kind}_*.txt"))]
    return tuple(PowerFile(path, read_log(path)) for path in paths if path.is_file())


def run_energy(folder: Path, run: Run) -> RunEnergy:
    """The energy of a run, all nodes and switches together."""
    try:
        files = power_files(folder, run)
    except OSError as error:
        return RunEnergy(files=(), reason=f"{error.filename}: {error.strerror}")
    if not any(file.is_node for file in files):
        return RunEnergy(files=files, reason=f"{FOLDER}/{run.path.stem} has no node_*.txt")
    if not run.minutes or run.minutes <= 0:
        return RunEnergy(files=files, reason="the run has no time")
    milliseconds = run.minutes * 60_000
    try:
        joules = sum(file.joules(milliseconds) for file in files)
    except EnergyError as error:
        return RunEnergy(files=files, reason=f"{FOLDER}/{run.path.stem}/{error}")
    return RunEnergy(files=files, joules=joules, watts=joules / milliseconds * 1000)


def measure(
    folder: Path, runs: Sequence[Run], counted: Sequence[Run], kept: Sequence[Run], factor: float
) -> Energy | None:
    """The energy of a result; None where it has no power folder.

    Args: counted: runs that comply, each of which the official summarizer measures, or stops. kept: those that make
        the score, best and worst left out. factor: the scaling factor of the score.
    """
    if not (folder / FOLDER).is_dir():
        return None
    found = {run.path: run_energy(folder, run) for run in runs}
    reason = next((found[run.path].reason for run in counted if found[run.path].joules is None), None)
    if reason is not None or not kept:
        return Energy(runs=found, joules=None, watts=None, reason=reason or "the runs give no score")
    joules = [found[run.path].joules or 0.0 for run in kept]
    watts = [found[run.path].watts or 0.0 for run in kept]
    return Energy(
        runs=found, joules=math.fsum(joules) / len(kept) * factor, watts=math.fsum(watts) / len(kept), reason=None
    )
