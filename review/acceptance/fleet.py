"""`python -m review certify --fleet`: tests of many machines over time, from their certify.json.

Machines of one kind (system, GPUs) make a baseline of each rate: the median machine and the spread
around it, both robust against bad ones. Each machine has its place in it and its history, with the
test from which on it was slower.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from review.acceptance.figures import write_exports
from review.acceptance.journal import EXIT, STYLES
from review.acceptance.outliers import MIN_PEERS, TO_DEVIATION
from review.acceptance.schema import LABELS, TABLES, UNITS
from review.acceptance.verdict import JSON_VERSION, certify
from review.logs.output import ReviewError, write_whole
from review.logs.tree import read_json

SLOWER = 0.03  # than the median machine, or than before: smaller ones do not matter
SURE = 5.0  # deviations, for one in a million of healthy figures
MIN_SPREAD = 0.005  # machines that seem to be more equal were rounded
RECENT = 3  # tests that tell how a machine is now
MIN_TESTS = 3  # before and after a step in its history
MOST_SHOWN = 100  # machines of a kind on the page


@dataclass
class Machine:
    """name; kind: system and GPUs; tests: by time, (Unix time, state); rates: by figure, a value for
    each test, nan where it was not measured; reasons: to look at it, with how bad each is.
    """

    name: str
    kind: str
    tests: list[tuple[float, str]] = field(default_factory=list)
    rates: dict[str, np.ndarray] = field(default_factory=dict)
    reasons: list[tuple[float, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        ended, state = self.tests[-1]
        return {
            "name": self.name,
            "kind": self.kind,
            "state": state,
            "ended": ended,
            "tests": len(self.tests),
            "reasons": [message for _, message in self.look],
            "figures": self.levels,
        }

    @cached_property
    def levels(self) -> dict[str, float]:
        """Medians of the last few tests that measured a rate."""
        known = {name: rates[~np.isnan(rates)] for name, rates in self.rates.items()}
        return {
            name: float(np.median(rates[-RECENT:]))
            for name, rates in known.items()
            if len(rates)
        }

    @property
    def look(self) -> list[tuple[float, str]]:
        """Reasons, the worst first."""
        return sorted(self.reasons, reverse=True)


@dataclass(frozen=True)
class Baseline:
    """Of a kind of machines: by figure, the median machine and the relative deviation around it."""

    kind: str
    machines: list[Machine]
    figures: dict[str, tuple[float, float]]


def fleet(folders: Sequence[Path]) -> list[Baseline]:
    """Baselines by kind, with their machines. Raises ReviewError without any test."""
    rows: dict[tuple[str, str], list[tuple[float, str, dict[str, float]]]] = {}
    for verdict in _verdicts(folders):
        for name, machine in verdict["machines"].items():
            # A node with other GPUs than before is another machine.
            row = (float(verdict["ended"]), machine["state"], machine["figures"])
            rows.setdefault((name, machine["kind"]), []).append(row)
    by_kind: dict[str, list[Machine]] = {}
    for (name, kind), tests in rows.items():
        by_kind.setdefault(kind, []).append(_machine(name, kind, tests))
    if not by_kind:
        where = ", ".join(map(str, folders))
        raise ReviewError(
            f"{where}: no test: give folders that certify.sh printed, or one above"
        )
    return [_baseline(kind, own) for kind, own in sorted(by_kind.items())]


def _verdicts(folders: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    """Of each test below the folders; one without a JSON of this version is judged from its
    records.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ReviewError(f"{folder}: no such folder")
        found = {path.parent for path in folder.rglob("certify[._]*")}
        for test in sorted(found):
            verdict = read_json(test / "certify.json")
            if verdict.get("version") == JSON_VERSION:
                yield verdict
            elif any(test.glob("certify_*.npz")):
                yield certify(test).as_dict()


def _machine(
    name: str, kind: str, tests: list[tuple[float, str, dict[str, float]]]
) -> Machine:
    tests.sort(key=lambda test: test[0])
    figures = dict.fromkeys(figure for _, _, own in tests for figure in own)
    rates = {
        figure: np.array([own.get(figure) or np.nan for *_, own in tests], np.float64)
        for figure in figures
    }
    return Machine(name, kind, [test[:2] for test in tests], rates)


def _baseline(kind: str, machines: list[Machine]) -> Baseline:
    """Judges each machine by the others of its kind, and by its own history."""
    figures: dict[str, tuple[float, float]] = {}
    for figure in UNITS:
        levels = [machine.levels.get(figure, 0.0) for machine in machines]
        known = np.array([level for level in levels if level > 0])
        if not len(known):
            continue
        center = float(np.median(known))
        spread = TO_DEVIATION * float(np.median(np.abs(known / center - 1)))
        figures[figure] = center, max(spread, MIN_SPREAD)
        # Too few to say which is odd.
        if len(known) < MIN_PEERS:
            continue
        for machine, level in zip(machines, levels, strict=True):
            missing = 1 - (level or center) / center
            if missing > max(SLOWER, SURE * figures[figure][1]):
                message = f"{LABELS[figure]}: {missing:.1%} below the median machine"
                machine.reasons.append((missing, message))
    for machine in machines:
        for figure, rates in machine.rates.items():
            machine.reasons += _step(machine, figure, rates)
        if machine.tests[-1][1] == "fail":
            machine.reasons.append((1.0, "its last test failed"))
    # The worst first.
    machines.sort(key=lambda one: (-max(one.reasons, default=(0.0, ""))[0], one.name))
    return Baseline(kind, machines, figures)


def _step(
    machine: Machine, figure: str, rates: np.ndarray
) -> Iterator[tuple[float, str]]:
    """The test from which on a machine was slower than before, if there is one."""
    measured = np.flatnonzero(~np.isnan(rates))
    values = rates[measured]
    count = len(values)
    if count < 2 * MIN_TESTS:
        return
    cuts = np.arange(MIN_TESTS, count - MIN_TESTS + 1)
    sums = np.cumsum(values)
    before = sums[cuts - 1] / cuts
    after = (sums[-1] - sums[cuts - 1]) / (count - cuts)
    # By neighbours, as the step itself is no noise.
    noise = TO_DEVIATION * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    noise = max(noise, MIN_SPREAD * float(np.median(values)))
    distances = (before - after) * np.sqrt(cuts * (count - cuts) / count) / noise
    best = int(np.argmax(distances))
    lost = 1 - after[best] / before[best]
    # The best of all cuts is chosen, as it is among figures and machines: well above SURE.
    if lost > SLOWER and distances[best] > SURE + math.log(count):
        number = int(measured[cuts[best]])
        when = np.datetime64(int(machine.tests[number][0]) // 60, "m")
        message = f"{LABELS[figure]}: {lost:.1%} lower since {when} (test {number + 1} of {len(rates)})"
        yield float(lost), message


def print_fleet(baselines: Sequence[Baseline], most: int = 20) -> None:
    """Baselines, and the machines to look at first."""
    for baseline in baselines:
        print(f"{len(baseline.machines)} x {baseline.kind}")
        for figure, (center, spread) in baseline.figures.items():
            print(
                f"  {LABELS[figure]:<40} {center:>12,.5g} {UNITS[figure]:<11} ± {spread:.1%}"
            )
        odd = [machine for machine in baseline.machines if machine.reasons]
        if len(baseline.machines) < MIN_PEERS:
            print(
                f"  fewer than {MIN_PEERS} machines: each is compared with its own past alone"
            )
        for machine in odd[:most]:
            reasons = "; ".join(message for _, message in machine.look)
            print(f"  {machine.name}: {reasons}")
        if len(odd) > most:
            print(f"  and {len(odd) - most} more")
    print(state(baselines))


def state(baselines: Sequence[Baseline]) -> str:
    """fail if the last test of a machine did, warn if there is one to look at."""
    machines = [machine for baseline in baselines for machine in baseline.machines]
    if any(machine.tests[-1][1] == "fail" for machine in machines):
        return "fail"
    return "warn" if any(machine.reasons for machine in machines) else "pass"


def as_dict(baselines: Sequence[Baseline]) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "state": state(baselines),
        "kinds": [
            {
                "kind": baseline.kind,
                "figures": {
                    name: {"unit": UNITS[name], "median": center, "spread": spread}
                    for name, (center, spread) in baseline.figures.items()
                },
                "machines": baseline.machines,
            }
            for baseline in baselines
        ],
    }


def write_expected(baselines: Sequence[Baseline], path: Path) -> None:
    """Writes FILE.sh, which makes a test expect the median machine. Raises ReviewError for several
    kinds.
    """
    if len(baselines) != 1:
        kinds = "; ".join(baseline.kind for baseline in baselines)
        raise ReviewError(
            f"--expect: machines of several kinds ({kinds}): give folders of one"
        )
    figures = baselines[0].figures.items()
    message = " ".join(f"{name}={center:.4g}" for name, (center, _) in figures)
    write_exports(path, EXPECTED_FIGURES=message)


def prometheus(tests: Iterable[Mapping[str, Any]]) -> str:
    """Prometheus' text format, for node_exporter's textfile collector. tests: name, state, Unix
    time ``ended`` and figures of each machine.
    """
    samples: dict[str, list[str]] = {name: [] for name in TABLES["prometheus"]}
    for test in tests:
        who = f'machine="{_label(test["name"])}"'
        samples["certify_state"].append(f"{{{who}}} {EXIT[test['state']]}")
        samples["certify_ended_seconds"].append(f"{{{who}}} {test['ended']:.0f}")
        samples["certify_rate"] += [
            f'{{{who},figure="{figure}",unit="{UNITS[figure]}"}} {rate:.6g}'
            for figure, rate in test["figures"].items()
        ]
    lines = []
    for name, text in TABLES["prometheus"].items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [name + sample for sample in samples[name]]
    return "\n".join(lines) + "\n"


def write_page(baselines: Sequence[Baseline], output: Path) -> None:
    """Writes the page of a fleet. Raises ReviewError."""
    from review.report.page import render

    page = render(
        "fleet.html",
        baselines=baselines,
        state=STYLES[state(baselines)],
        labels=LABELS,
        units=UNITS,
        few=MIN_PEERS,
        most=MOST_SHOWN,
    )
    write_whole(output, page)


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
