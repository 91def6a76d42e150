"""Checks of power files: power/result_N/node_0.txt, ... hold the readings of the run that
result_N.txt logs.

Rules (MLPerf Training, power measurement, "Requirements"): all nodes, all runs, whole nodes, a
reading per second spread over the timed part, at least 60 readings.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from review.logs import tree
from review.logs.mllog import number
from review.logs.output import Finding, counted
from review.results.energy import EnergyError, PowerFile
from review.results.run import Run
from review.results.score import Result
from review.rulebook.rules import broken

_broken = partial(broken, key="power")
_SLACK_MS = 10_000  # for clock differences between machines and the sampling interval
# Mean seconds between readings: error, warning; sampling itself takes a moment.
_SLOWEST, _SLOW = 1.5, 1.1
_GAP = 5.0  # seconds without a reading
_LEAST_READINGS = 60
_LEAST_WATTS = 25  # per accelerator of a node: less than an idle one draws with its share of the host


def check_power(result: Result) -> Iterator[Finding]:
    """Reasons why the power files are not of these runs, are unusable, or break the power rules."""
    folder = result.folder / tree.POWER
    if result.energy is None:
        return
    measured = [(run, result.energy.runs[run.path].files) for run in result.runs]
    seen: dict[str, Path] = {}
    for run, files in measured:
        yield from _check_names(folder / run.path.stem, files)
        for file in files:
            # By content: a copied measurement has the same lines under any name.
            content = "\n".join(event.text for event in file.log.events)
            other = seen.setdefault(content, file.path)
            # Not for switches: equal ones have equal estimates.
            if other is not file.path and file.log.events and file.is_node:
                message = f"is a copy of {other.relative_to(folder)}"
                yield _broken("power_copy", message, file.path)
            if file.is_node:
                accelerators = max(_described(result, "accelerators_per_node"), 1)
                for rule, message in _of_node(file, run, accelerators):
                    least, watts = _LEAST_READINGS, _LEAST_WATTS
                    yield _broken(rule, message, file.path, least=least, watts=watts)
            else:
                yield from _check_switch(file)
    # Runs without files are named above; they must not count as runs of 0 nodes.
    with_files = {run.path.stem: files for run, files in measured if files}
    if with_files:
        yield from _check_system(result, folder, with_files)


def _check_names(folder: Path, files: Sequence[PowerFile]) -> Iterator[Finding]:
    """A run's files are numbered from 0, and there are some."""
    if not files:
        yield _broken("power_of_all_runs", "has no power files", folder)
    for kind in ("node", "sw"):
        names = {file.path.name for file in files if file.path.name.startswith(kind)}
        wanted = {f"{kind}_{number}.txt" for number in range(len(names))}
        if names != wanted:
            held = ", ".join(sorted(names - wanted))
            missing = ", ".join(sorted(wanted - names))
            yield _broken("power_names", f"holds {held}, not {missing}", folder)


def _check_switch(file: PowerFile) -> Iterator[Finding]:
    """A switch has an estimate instead of readings."""
    estimates = file.log.all("interconnect_power_est")
    if not any(number(event.value) for event in estimates):
        message = "estimates 0 W" if estimates else "lacks interconnect_power_est"
        yield _broken("power_of_switches", message, file.path)


def _check_system(
    result: Result, folder: Path, with_files: Mapping[str, Sequence[PowerFile]]
) -> Iterator[Finding]:
    """All runs measured the same nodes and switches, as many as the description says."""
    for label in ("nodes", "switches"):
        counts = {
            name: sum(file.is_node is (label == "nodes") for file in files)
            for name, files in with_files.items()
        }
        # What most runs have is taken for the system; the odd ones are named.
        common = Counter(counts.values()).most_common(1)[0][0]
        for name, count in counts.items():
            if count != common:
                message = f"has {count} {label}, most runs {common}"
                yield _broken("power_same_system", message, folder / name)
        nodes = _described(result, "number_of_nodes")
        if label == "nodes" and nodes not in (-1, common):
            message = f"holds readings of {common} of the {nodes} nodes"
            yield _broken("power_of_all_nodes", message, folder)


def _described(result: Result, field: str) -> int:
    """A count of the system description; -1 if missing."""
    count = tree.count(tree.description(result.folder).get(field))
    return -1 if count is None else count


def _of_node(file: PowerFile, run: Run, accelerators: int) -> Iterator[tuple[str, str]]:
    """Broken rules of a node's file, in words."""
    watts = [number(event.value) for event in file.readings]
    # From coarse to fine: of a file that is cut off, a mean or a gap would say nothing.
    if not watts or file.start is None or file.stop is None:
        edge = "start" if file.start is None else "stop"
        lacks = f"power_measurement_{edge}" if watts else "readings"
        yield "power_whole", f"is cut off: it lacks {lacks}"
    elif None in watts:
        odd = f"{watts.count(None)} of {len(watts)} readings"
        yield "power_number", f"has {odd} that are no number"
    elif not any(watts):
        yield "power_drawn", f"has nothing but 0 W in {len(watts)} readings"
    else:
        try:
            # For any length of run: the question is only whether the formula can be evaluated.
            file.joules(60_000.0)
        except EnergyError as error:
            yield "power_energy", f"gives no energy: {error}"
            return
        mean = sum(filter(None, watts)) / len(watts)
        if 0 < mean < _LEAST_WATTS * accelerators:
            whose = f"with {counted(accelerators, 'accelerator')}"
            yield "power_watts", f"reads {mean:.3g} W on average, {whose}"
        yield from _of_readings(file, watts)
        yield from _of_cover(file, run, file.start.time_ms, file.stop.time_ms)


def _of_readings(
    file: PowerFile, watts: list[float | None]
) -> Iterator[tuple[str, str]]:
    """Whether the readings are of a running node, and enough for the rules."""
    count, zeros = len(watts), watts.count(0)
    if odd := sum(value is None or value < 0 for value in watts):
        yield "power_drawn", f"has {odd} of {count} readings below 0 W"
    if zeros:
        yield "power_zeros", f"has 0 W in {zeros} of {count} readings"
    if count < _LEAST_READINGS:
        yield "power_sixty", f"has {count} readings"
    elif len(set(watts)) == 1:
        # The power of a real node varies; a constant is a stuck sensor, or made up.
        yield "power_constant", f"reads {watts[0]:,.6g} W in all {count} readings"
    # Over the whole file: one late sample is no slow sampling, and gaps are found below.
    span = (file.readings[-1].time_ms - file.readings[0].time_ms) / 1000
    interval = span / max(count - 1, 1)
    if interval > _SLOW:
        rule = "power_each_second" if interval > _SLOWEST else "power_slow"
        yield rule, f"is read every {interval:.2f} s"
    for event in file.log.all("conversion_eff"):
        value = number(event.value)
        if value is None or not 0 < value <= 1:
            yield "power_share", f"has a conversion_eff of {event.value}"
        about = event.metadata if isinstance(event.metadata, dict) else {}
        if about.get("scope") == "accelerators only":
            yield "power_whole_node", "is of the accelerators alone"


def _of_cover(
    file: PowerFile, run: Run, start_ms: float, stop_ms: float
) -> Iterator[tuple[str, str]]:
    if run.run_start is None or run.run_stop is None:
        return
    late = start_ms - run.run_start.time_ms
    early = run.run_stop.time_ms - stop_ms
    first = max(start_ms, run.run_start.time_ms)
    last = min(stop_ms, run.run_stop.time_ms)
    within = (event.time_ms for event in file.readings if first < event.time_ms < last)
    # Both ends count, so that silence after the start or before the end is a gap, too.
    gap = max(b - a for a, b in pairwise([first, *within, last])) / 1000
    seconds = f"{max(late, early) / 1000:,.0f} s"
    if max(late, early) > _SLACK_MS:
        starts, stops = (
            f"starts {seconds} after run_start",
            f"stops {seconds} before run_stop",
        )
        yield "power_covers", f"{starts if late >= early else stops} of {run.path.name}"
    elif gap > _GAP:
        yield "power_gap", f"has no reading for {gap:,.1f} s of the timed part"
