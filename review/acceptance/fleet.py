"""`python -m review certify --fleet`: tests of many machines over time, from their certify.json.

Machines of one kind (system, GPUs) make a baseline of each rate: the median machine and the spread
around it, both robust against bad ones. Each machine has its place in it and its history, with the
test from which on it was slower.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from review.acceptance.journal import EXIT
from review.acceptance.outliers import MIN_PEERS, TO_DEVIATION
from review.acceptance.schema import LABELS, UNITS
from review.acceptance.verdict import JSON_VERSION, certify
from review.logs.output import ReviewError, write_whole
from review.logs.tree import read_json

SLOWER = 0.03  # than the median machine, or than before: smaller ones do not matter
SURE = 5.0  # deviations, for one in a million of healthy figures
MIN_SPREAD = 0.005  # machines that seem to be more equal were rounded
RECENT = 3  # tests that tell how a machine is now
MIN_TESTS = 3  # before and after a step in its history


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

    @property
    def urgency(self) -> float:
        return max((weight for weight, _ in self.reasons), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.tests[-1][1],
            "tests": len(self.tests),
            "reasons": [words for _, words in self.look],
            "figures": {name: now(rates) for name, rates in self.rates.items()},
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


def now(rates: np.ndarray) -> float:
    """Median of the last few tests that measured it."""
    known = rates[~np.isnan(rates)][-RECENT:]
    return float(np.median(known)) if len(known) else math.nan


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
        found = {path.parent for path in folder.rglob("certify.json")}
        found |= {path.parent for path in folder.rglob("certify_*.npz")}
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
        levels = {
            machine.name: now(machine.rates[figure])
            for machine in machines
            if figure in machine.rates
        }
        known = np.array([level for level in levels.values() if level > 0])
        if not len(known):
            continue
        center = float(np.median(known))
        spread = TO_DEVIATION * float(np.median(np.abs(known / center - 1)))
        figures[figure] = center, max(spread, MIN_SPREAD)
        # Too few to say which is odd.
        for machine in machines if len(known) >= MIN_PEERS else ():
            missing = 1 - levels.get(machine.name, center) / center
            if missing > max(SLOWER, SURE * figures[figure][1]):
                words = f"{LABELS[figure]}: {missing:.1%} below the median machine"
                machine.reasons.append((missing, words))
    for machine in machines:
        for figure, rates in machine.rates.items():
            machine.reasons += _step(machine, figure, rates)
        if machine.tests[-1][1] == "fail":
            machine.reasons.append((1.0, "its last test failed"))
    ordered = sorted(machines, key=lambda machine: (-machine.urgency, machine.name))
    return Baseline(kind, ordered, figures)


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
        when = np.datetime64(int(machine.tests[number][0]), "s")
        words = f"{LABELS[figure]}: {lost:.1%} lower since {when} (test {number + 1} of {len(rates)})"
        yield float(lost), words


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
            reasons = "; ".join(words for _, words in machine.look)
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
    words = " ".join(f"{name}={center:.4g}" for name, (center, _) in figures)
    write_whole(
        path.with_suffix(".sh"), f"export EXPECTED_FIGURES={shlex.quote(words)}\n"
    )


def prometheus(machines: Mapping[str, Mapping[str, Any]], ended: float) -> str:
    """Prometheus' text format, for node_exporter's textfile collector."""
    lines = [
        "# HELP certify_state Verdict of the last acceptance test: 0 pass, 3 warn, 1 fail.",
        "# TYPE certify_state gauge",
        *(
            f'certify_state{{machine="{_label(name)}"}} {EXIT[own["state"]]}'
            for name, own in machines.items()
        ),
        "# HELP certify_ended_seconds Unix time of its end.",
        "# TYPE certify_ended_seconds gauge",
        *(
            f'certify_ended_seconds{{machine="{_label(name)}"}} {ended:.0f}'
            for name in machines
        ),
        "# HELP certify_rate Measured rate, in its unit.",
        "# TYPE certify_rate gauge",
    ]
    for name, own in machines.items():
        for figure, value in own["figures"].items():
            labels = (
                f'machine="{_label(name)}",figure="{figure}",unit="{UNITS[figure]}"'
            )
            lines.append(f"certify_rate{{{labels}}} {value:.6g}")
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
