"""Energy of a result: joules of each run from its power files, averaged over the runs that make the
score.

A node's energy is efficiency x (sum of watts x milliseconds since the previous reading) x time to
train / measured time (MLPerf Training power measurement rules, "Scoring"; formula of the official
summarizer). A switch's is its estimated power x time to train. The mean covers the same runs as the
time, with the same scaling factor.

``python -m review.results.energy SAMPLES RESULT OUTPUT`` writes power files. SAMPLES holds NODE.csv
with lines ``time_ms,watts``; RESULT is the run's log. OUTPUT gets node_0.txt, node_1.txt, ... with
the readings from run_start to run_stop, or to the end of the training that SUSTAINED_TRAINING_TIME
adds: the official summarizer multiplies the mean power of this span by the time to train.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from review.logs.mllog import TOKEN, Event, Log, number, read_log
from review.logs.output import ReviewError, write_whole
from review.logs.tree import POWER

if TYPE_CHECKING:  # the launcher runs this module with the standard library alone
    from review.results.run import Run


class EnergyError(ValueError):
    """Unusable power files or power samples. The message says why."""


@dataclass(frozen=True)
class PowerFile:
    """The measurement of one node or switch in one run."""

    path: Path
    log: Log

    @property
    def is_node(self) -> bool:
        return self.path.name.startswith("node_")

    @functools.cached_property
    def start(self) -> Event | None:
        return self._last("power_measurement_start")

    @functools.cached_property
    def stop(self) -> Event | None:
        return self._last("power_measurement_stop")

    @functools.cached_property
    def readings(self) -> list[Event]:
        """Readings, sorted by time."""
        return sorted(self.log.all("power_reading"), key=lambda event: event.time_ms)

    @functools.cached_property
    def efficiency(self) -> float:
        """Factor of the readings, 1 if not logged. Raises EnergyError."""
        event = self._last("conversion_eff")
        return 1.0 if event is None else self.value_of(event)

    def _last(self, key: str) -> Event | None:
        # The last of several by time, as the summarizer overwrites what it read before.
        return max(self.log.all(key), key=lambda event: event.time_ms, default=None)

    def joules(self, milliseconds: float) -> float:
        """Energy of a run of this length, as the official summarizer computes it. Raises
        EnergyError.
        """
        if not self.is_node:
            estimate = self.log.first("interconnect_power_est")
            if estimate is None:
                return 0.0
            factors = self.log.all("conversion_eff")
            # For a switch the factor counts only if it was logged before the estimate.
            known = [event for event in factors if event.line < estimate.line]
            efficiency = self.value_of(known[-1]) if known else 1.0
            return efficiency * self.value_of(estimate) * milliseconds / 1000
        if self.start is None:
            raise EnergyError(f"{self.path.name} lacks power_measurement_start")
        end = math.inf if self.stop is None else self.stop.time_ms
        # Readings outside the measured span belong to no run.
        taken = [
            event
            for event in self.readings
            if self.start.time_ms <= event.time_ms <= end
        ]
        # Each reading stands for the time since the one before it, the first since the start.
        times = [self.start.time_ms, *(event.time_ms for event in taken)]
        measured = (times[-1] if self.stop is None else end) - times[0]
        if measured == 0:
            raise EnergyError(
                f"{self.path.name} measures from power_measurement_start to the same millisecond"
            )
        spans = zip(taken, itertools.pairwise(times), strict=True)
        summed = sum(
            self.value_of(event) * (now - before) for event, (before, now) in spans
        )
        # Mean power of the measured span x time to train: the span may be longer than the run.
        return self.efficiency * summed * milliseconds / measured / 1000

    def value_of(self, event: Event) -> float:
        """Raises EnergyError if the event's value is not a number."""
        value = number(event.value)
        if value is None:
            raise EnergyError(
                f"{self.path.name}:{event.line}: {event.key} is not a number"
            )
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """Energy of a run (``files``) or a result (``runs``); ``joules`` is None if there is a
    ``reason``.
    """

    files: tuple[PowerFile, ...] = ()
    runs: dict[Path, Energy] = field(default_factory=dict)
    joules: float | None = None
    watts: float | None = None
    reason: str | None = None


def run_energy(folder: Path, run: Run) -> Energy:
    """Energy of a run from its power files, all nodes and switches together."""
    name, files, reason = f"{POWER}/{run.path.stem}", [], None
    try:
        for path in (
            path
            for kind in ("node", "sw")
            for path in sorted((folder / name).glob(f"{kind}_*.txt"))
        ):
            if path.is_file():
                files.append(PowerFile(path, read_log(path)))
        if not any(file.is_node for file in files):
            # Switches alone are no measurement: the summarizer asserts that there is a node.
            reason = f"{name} has no node_*.txt"
        elif not run.minutes or run.minutes <= 0:
            reason = "the run has no time"
        else:
            joules = sum(file.joules(run.minutes * 60_000) for file in files)
            return Energy(
                files=tuple(files),
                joules=joules,
                watts=joules / (run.minutes * 60_000) * 1000,
            )
    except OSError as error:
        # Files that changed while they were read are no measurement.
        files, reason = [], f"{error.filename}: {error.strerror}"
    except EnergyError as error:
        reason = f"{name}/{error}"
    return Energy(files=tuple(files), reason=reason)


Sample = tuple[float, float]  # time in ms since 1970, watts


def read_samples(path: Path) -> tuple[str, list[Sample]]:
    """Source (ipmi or nvml) and samples of one node, sorted by time. Raises EnergyError."""
    lines = path.read_text(encoding="utf-8").splitlines()
    # The first line names the source, which decides what the watts cover.
    if not lines or not lines[0].startswith("time_ms,watts_"):
        raise EnergyError(f"{path}: does not begin with time_ms,watts_SOURCE")
    samples = []
    for row, line in enumerate(lines[1:], 2):
        time_ms, _, watts = line.partition(",")
        try:
            samples.append((float(time_ms), float(watts)))
        except ValueError:
            # Any other damaged line is an error; energy with a hole would be too low.
            if row == len(lines):
                break  # the sampler was stopped within its last line
            raise EnergyError(f"{path}:{row}: {line!r} is not time_ms,watts") from None
    return lines[0].removeprefix("time_ms,watts_"), sorted(samples)


def readings(
    path: Path, samples: list[Sample], start_ms: float, stop_ms: float
) -> list[Sample]:
    """Readings that cover [start_ms, stop_ms]; each holds from the previous one on, the last one is
    put at stop_ms.

    Raises EnergyError if the samples do not cover the span. ``path``: of the samples, for the
    message.
    """
    times = [time for time, _ in samples]
    first = bisect.bisect_right(times, start_ms)
    last = bisect.bisect_left(times, stop_ms)
    if first == 0 or last == len(samples):
        covered = f"{times[0]:.0f} to {times[-1]:.0f}" if times else "nothing"
        run = f"the run from {start_ms:.0f} to {stop_ms:.0f} (ms)"
        raise EnergyError(f"{path}: the samples cover {covered}, not {run}")
    return [*samples[first:last], (stop_ms, samples[last][1])]


def lines(
    node: str, source: str, samples: list[Sample], start_ms: float, efficiency: float
) -> Iterator[str]:
    """MLLOG lines of one node."""

    def event(
        key: str, value: Any, time_ms: float, kind: str, metadata: dict[str, str]
    ) -> str:
        fields = {
            "namespace": "",
            "time_ms": int(time_ms),
            "event_type": kind,
            "key": key,
            "value": value,
        }
        return TOKEN + json.dumps({**fields, "metadata": metadata})

    # BMCs measure at the wall (AC), the whole node; NVML the
    # GPUs alone, which the rules do not accept.
    kind, scope = ("AC", "node") if source == "ipmi" else ("DC", "accelerators only")
    about = {"measurement_type": kind, "source": source, "scope": scope}
    yield event(
        "power_measurement_start", None, start_ms, "INTERVAL_START", {"host": node}
    )
    yield event("conversion_eff", efficiency, start_ms, "POINT_IN_TIME", about)
    for time_ms, watts in samples:
        yield event("power_reading", watts, time_ms, "POINT_IN_TIME", {"host": node})
    yield event(
        "power_measurement_stop", None, samples[-1][0], "INTERVAL_END", {"host": node}
    )


def write(samples: Path, result: Path, output: Path, efficiency: float) -> list[str]:
    """Writes the power files of a run; returns a report line per node. Raises EnergyError,
    ReviewError, OSError.
    """
    log = read_log(result)
    start, stop = (
        log.first("run_start"),
        # The rules want 60 readings, one a second: a run that is faster trains on after its target.
        log.first("sustained_training_stop") or log.first("run_stop"),
    )
    if start is None or stop is None:
        raise EnergyError(f"{result}: has no run_start and run_stop")
    texts, report = [], []
    # Sorted by host, so that node_0.txt is the same machine in all runs.
    for path in sorted(samples.glob("*.csv")):
        source, raw = read_samples(path)
        raw = readings(path, raw, start.time_ms, stop.time_ms)
        written = lines(path.stem, source, raw, start.time_ms, efficiency)
        texts.append("\n".join(written) + "\n")
        times = [start.time_ms, *(time for time, _ in raw)]
        energy = sum(
            watts * (time - before)
            for before, (time, watts) in zip(times, raw, strict=False)
        )
        # Start and stop may fall in the same millisecond.
        mean = energy / max(times[-1] - times[0], 1e-9)
        report.append(f"{path.stem}: {mean:.0f} W ({source}, {len(raw)} readings)")
    if not texts:
        raise EnergyError(f"{samples}: holds no samples (*.csv)")
    # Only when all nodes are known to be sound: a partial set would pass for a smaller system.
    for index, content in enumerate(texts):
        write_whole(output / f"node_{index}.txt", content)
    return report


def main() -> int:
    """The command; returns its exit status."""
    about = (
        "Writes the power files of the MLPerf rules from the power samples of a run."
    )
    parser = argparse.ArgumentParser(
        prog="python -m review.results.energy", description=about
    )
    parser.add_argument("samples", type=Path, help="folder of NODE.csv")
    parser.add_argument("result", type=Path, help="the run's log, result_N.txt")
    parser.add_argument("output", type=Path, help="folder to write, power/result_N")
    parser.add_argument(
        "--efficiency",
        type=float,
        default=1.0,
        help="of the power supplies (1: measured at the wall)",
    )
    options = parser.parse_args()
    try:
        report = write(
            options.samples, options.result, options.output, options.efficiency
        )
    except (EnergyError, ReviewError, OSError) as error:
        print(f"power: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
