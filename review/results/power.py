"""``python -m review.results.power SAMPLES RESULT OUTPUT``: samples of power become files of the MLPerf power rules.

SAMPLES holds NODE.csv of lines ``time_ms,watts``; RESULT is the run's log. OUTPUT gets node_0.txt, node_1.txt, ... with
the readings between run_start and run_stop, or the end of the training that SUSTAINED_TRAINING_TIME lets go on after
it. From them the official summarizer takes the energy: the mean power of this time multiplied by the time to train.
"""

from __future__ import annotations

import argparse
import bisect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from review.logs.mllog import TOKEN, read_log
from review.logs.output import ReviewError, write_whole

Sample = tuple[float, float]  # time in ms since 1970, watts


class PowerError(ValueError):
    """Samples that give no result. The message is for the user."""


def read_samples(path: Path) -> tuple[str, list[Sample]]:
    """Source (ipmi or nvml) and samples of one node, in the order of time. Raises PowerError."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].startswith("time_ms,watts_"):
        raise PowerError(f"{path}: it does not begin with time_ms,watts_SOURCE")
    samples = []
    for number, line in enumerate(lines[1:], 2):
        time_ms, _, watts = line.partition(",")
        try:
            samples.append((float(time_ms), float(watts)))
        except ValueError:
            if number == len(lines):
                break  # the sampler was ended within its last line
            raise PowerError(f"{path}:{number}: {line!r} is not time_ms,watts") from None
    return lines[0].removeprefix("time_ms,watts_"), sorted(samples)


def readings(samples: list[Sample], start_ms: float, stop_ms: float) -> list[Sample]:
    """Readings that cover [start_ms, stop_ms]: each holds from the one before it; the last one stands at stop_ms.

    Raises PowerError where there is no sample before or at the start, or none at or after the stop.
    """
    times = [time for time, _ in samples]
    first, last = bisect.bisect_right(times, start_ms), bisect.bisect_left(times, stop_ms)
    if first == 0 or last == len(samples):
        covered = f"{times[0]:.0f} to {times[-1]:.0f}" if times else "nothing"
        raise PowerError(f"the samples cover {covered}, not the run from {start_ms:.0f} to {stop_ms:.0f} (ms)")
    return [*samples[first:last], (stop_ms, samples[last][1])]


def lines(node: str, source: str, found: list[Sample], start_ms: float, efficiency: float) -> Iterator[str]:
    """The MLLOG lines of one node."""
    kind = "AC" if source == "ipmi" else "DC"
    about = {"measurement_type": kind, "source": source, "scope": "node" if source == "ipmi" else "accelerators only"}
    yield _event("power_measurement_start", None, start_ms, "INTERVAL_START", {"host": node})
    yield _event("conversion_eff", efficiency, start_ms, "POINT_IN_TIME", about)
    for time_ms, watts in found:
        yield _event("power_reading", watts, time_ms, "POINT_IN_TIME", {"host": node})
    yield _event("power_measurement_stop", None, found[-1][0], "INTERVAL_END", {"host": node})


def _event(key: str, value: Any, time_ms: float, kind: str, metadata: dict[str, str]) -> str:
    fields = {"namespace": "", "time_ms": int(time_ms), "event_type": kind, "key": key, "value": value}
    return TOKEN + json.dumps({**fields, "metadata": metadata})


def write(samples: Path, result: Path, output: Path, efficiency: float) -> list[str]:
    """Writes the files of one run; returns a line for each node. Raises PowerError, ReviewError, OSError."""
    log = read_log(result)
    start, stop = log.first("run_start"), log.first("sustained_training_stop") or log.first("run_stop")
    if start is None or stop is None:
        raise PowerError(f"{result}: it has no run_start and run_stop")
    nodes = sorted(samples.glob("*.csv"))
    if not nodes:
        raise PowerError(f"{samples}: it holds no samples (*.csv)")
    texts, told = [], []
    for path in nodes:
        source, found = read_samples(path)
        try:
            found = readings(found, start.time_ms, stop.time_ms)
        except PowerError as error:
            raise PowerError(f"{path}: {error}") from None
        texts.append("".join(f"{line}\n" for line in lines(path.stem, source, found, start.time_ms, efficiency)))
        told.append(f"{path.stem}: {_mean(found, start.time_ms):.0f} W ({source}, {len(found)} readings)")
    for number, text in enumerate(texts):
        write_whole(output / f"node_{number}.txt", text.encode("utf-8"))
    return told


def _mean(found: list[Sample], start_ms: float) -> float:
    energy, before = 0.0, start_ms
    for time_ms, watts in found:
        energy += watts * (time_ms - before)
        before = time_ms
    return energy / max(before - start_ms, 1e-9)


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m review.results.power", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("samples", type=Path, help="folder of NODE.csv")
    parser.add_argument("result", type=Path, help="the run's log, result_N.txt")
    parser.add_argument("output", type=Path, help="folder to write, power/result_N")
    parser.add_argument(
        "--efficiency", type=float, default=1.0, help="conversion efficiency of the reading (1 at the wall)"
    )
    options = parser.parse_args()
    try:
        told = write(options.samples, options.result, options.output, options.efficiency)
    except (PowerError, ReviewError, OSError) as error:
        print(f"power: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
