"""The power files of a result: power/result_N/node_0.txt, ... hold the readings of the run that result_N.txt logs.

Rules: MLPerf Training, power measurement, "Requirements": all nodes, all runs, a reading a second spread over the timed
part, 60 readings at least, the whole of a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from review.logs import tree
from review.logs.mllog import number
from review.logs.output import ERROR, WARNING, Finding
from review.results.energy import EnergyError, PowerFile
from review.results.run import Run
from review.results.score import Result

KEY = "power"  # of these findings: they take the energy from a result, and leave it its time
_SLACK_MS = 10_000  # of clocks of two machines, and of a reading every few seconds
_SLOWEST, _SLOW = 1.5, 1.1  # mean seconds between readings: error, warning; a sampler needs a moment of its own
_GAP = 5.0  # seconds without a reading
_LEAST_READINGS = 60
_LEAST_WATTS = 25  # of a node, for each accelerator: less than an idle one draws with its share of the host
_AGAIN = "measure again with POWER=1, or leave out power/"
_DRAWS = "a running system draws power"
_ONCE_A_SECOND = "power is read at least once a second, evenly over the timed part of a run"


def check_power(result: Result) -> Iterator[Finding]:
    """What makes the energy of these files another run's, or none, or one that the power rules do not take."""
    folder = result.folder / tree.POWER
    if result.energy is None:
        return
    known: dict[str, Path] = {}
    for run in result.runs:
        place, files = folder / run.path.stem, result.energy.runs[run.path].files
        if not files:
            yield _finding(place, "has no power files", "a result with power has readings of each of its runs")
        for kind in ("node", "sw"):
            names = {file.path.name for file in files if file.path.name.startswith(kind)}
            wanted = {f"{kind}_{number}.txt" for number in range(len(names))}
            if names != wanted:
                message = f"holds {', '.join(sorted(names - wanted))}, not {', '.join(sorted(wanted - names))}"
                yield _finding(place, message, "files are numbered from 0 without a gap", hint="rename them")
        for file in files:
            other = known.setdefault("\n".join(event.text for event in file.log.events), file.path)
            if other is not file.path and file.log.events and file.is_node:
                message = f"is a copy of {other.relative_to(folder)}"
                yield _finding(file.path, message, "readings are of one node in one run")
            estimates = [number(event.value) for event in file.log.all("interconnect_power_est")]
            if file.is_node:
                yield from _check_node(file, run, _accelerators_per_node(result))
            elif not any(estimates):
                message = "estimates 0 W" if estimates else "lacks interconnect_power_est"
                yield _finding(file.path, message, "the power of an interconnect is measured or estimated")
    measured = {path: found.files for path, found in result.energy.runs.items() if found.files}
    for label in ("nodes", "switches") if measured else ():
        counts = {path: sum(file.is_node is (label == "nodes") for file in files) for path, files in measured.items()}
        common = Counter(counts.values()).most_common(1)[0][0]
        for path, count in counts.items():
            if count != common:
                message = f"has {count} {label}, most runs {common}"
                yield _finding(folder / path.stem, message, "all runs measure the same system")
        system = tree.system_file(result.folder)
        description = (tree.read_json(system) if system else None) or {}
        nodes = str(description.get("number_of_nodes", "")).strip()
        if label == "nodes" and nodes.isdecimal() and common != int(nodes):
            message = f"holds readings of {common} of the {int(nodes)} nodes"
            yield _finding(folder, message, "all nodes that take part in a run are measured")


def _accelerators_per_node(result: Result) -> int:
    path = tree.system_file(result.folder)
    count = str(((tree.read_json(path) if path else None) or {}).get("accelerators_per_node", "")).strip()
    return max(int(count) if count.isdecimal() else 1, 1)


def _check_node(file: PowerFile, run: Run, accelerators: int) -> Iterator[Finding]:
    watts = [number(event.value) for event in file.readings]
    if not watts or file.start is None or file.stop is None:
        lacks = "readings" if not watts else f"power_measurement_{'start' if file.start is None else 'stop'}"
        yield _finding(file.path, f"is cut off: it lacks {lacks}", "a measurement is logged from start to stop")
    elif None in watts:
        message = f"has {watts.count(None)} of {len(watts)} readings that are no number"
        yield _finding(file.path, message, "a reading is a number of watts")
    elif not any(watts):
        yield _finding(file.path, f"has nothing but 0 W in {len(watts)} readings", _DRAWS)
    else:
        try:
            file.joules(60_000.0)
        except EnergyError as error:
            hint = "correct power_measurement_stop, or measure again"
            yield _finding(file.path, f"gives no energy: {error}", "the summarizer takes the energy from it", hint=hint)
            return
        if 0 < (mean := sum(filter(None, watts)) / len(watts)) < _LEAST_WATTS * accelerators:
            rule = f"a node draws at least {_LEAST_WATTS} W for each of its accelerators; readings are in watts"
            hint = "these seem to be kilowatts, or a part of the node: measure the whole node in watts"
            yield _finding(
                file.path, f"reads {mean:.3g} W on average, with {accelerators} accelerators", rule, hint=hint
            )
        yield from _check_readings(file, watts)
        yield from _check_cover(file, run, file.start.time_ms, file.stop.time_ms)


def _check_readings(file: PowerFile, watts: list[float | None]) -> Iterator[Finding]:
    """Whether the readings are of a running node, and as many as the rules want."""
    count, zeros, odd = len(watts), watts.count(0), sum(value is None or value < 0 for value in watts)
    if odd:
        yield _finding(file.path, f"has {odd} of {count} readings below 0 W", _DRAWS)
    if zeros:
        yield _finding(file.path, f"has 0 W in {zeros} of {count} readings", _DRAWS, WARNING)
    if count < _LEAST_READINGS:
        hint = "keep training after run_stop: SUSTAINED_TRAINING_TIME"
        rule = f"a measurement has at least {_LEAST_READINGS} readings; a run that is shorter keeps training for it"
        yield _finding(file.path, f"has {count} readings", rule, hint=hint)
    elif len(set(watts)) == 1:
        rule = "a meter that works does not read the same all the time"
        yield _finding(file.path, f"reads {watts[0]:,.6g} W in all {count} readings", rule, WARNING)
    interval = file.interval_seconds
    if interval is not None and interval > _SLOW:
        severity = ERROR if interval > _SLOWEST else WARNING
        yield _finding(file.path, f"is read every {interval:.2f} s", _ONCE_A_SECOND, severity, "sample more often")
    for event in file.log.all("conversion_eff"):
        value = number(event.value)
        if value is None or not 0 < value <= 1:
            message, hint = f"has a conversion_eff of {event.value}", "document the PSU's efficiency"
            yield _finding(file.path, message, "the efficiency of an AC to DC conversion is a share", hint=hint)
        if isinstance(event.metadata, dict) and event.metadata.get("scope") == "accelerators only":
            rule = "the measurement is of the whole node, at its power supplies"
            hint = "measure with POWER_SOURCE=ipmi, or leave out power/"
            yield _finding(file.path, "is of the accelerators alone", rule, hint=hint)


def _check_cover(file: PowerFile, run: Run, start_ms: float, stop_ms: float) -> Iterator[Finding]:
    if run.run_start is None or run.run_stop is None:
        return
    late, early = start_ms - run.run_start.time_ms, run.run_stop.time_ms - stop_ms
    gap = file.longest_gap(max(start_ms, run.run_start.time_ms), min(stop_ms, run.run_stop.time_ms))
    if max(late, early) > _SLACK_MS:
        side, what = ("starts", "after run_start") if late >= early else ("stops", "before run_stop")
        message = f"{side} {max(late, early) / 1000:,.0f} s {what} of {run.path.name}"
        yield _finding(file.path, message, "the measurement covers the timed part of its run")
    elif gap > _GAP:
        yield _finding(file.path, f"has no reading for {gap:,.1f} s of the timed part", _ONCE_A_SECOND, WARNING)


def _finding(path: Path, message: str, rule: str, severity: str = ERROR, hint: str = _AGAIN) -> Finding:
    return Finding(severity, message, file=path, key=KEY, rule=rule, hint=hint)
