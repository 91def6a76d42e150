"""Every number that a test has measured, in its unit and with its limits: by the others, and by a config."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from certify.comparison import LEAST, LEAST_EXCESS, OF_MEDIAN
from certify.records import Records
from certify.schema import LABELS, PROBES, REDUCTIONS, Expected
from review.logs.output import ReviewError

WARN, FAIL = 0.03, 0.05  # slower by so much, and by more than the rounds of a test differ
DEVIATIONS = 3.0
EVERYONE = "all ranks"


@dataclass(frozen=True)
class Figure:
    """variable: in a config; unit: of its values; of_whole: one value for all ranks together."""

    variable: str
    label: str
    unit: str
    of_whole: bool = False


_UNIT_OF = {"parallel": "sequences/s", "together": "sequences/s", "matmul": "Tflop/s", "matmul_fp8": "Tflop/s"}
FIGURES = {
    field.name: Figure(
        field.metadata["env"].name,
        LABELS[field.name],
        _UNIT_OF.get(field.name, "GB/s"),
        of_whole=field.name in ("together", "reduce_together"),
    )
    for field in fields(Expected)
}
_UNITS = {"Tflop/s": 1e12, "GB/s": 1e9}


@dataclass(frozen=True)
class Reached:
    """What of an expected figure was reached. short: the share that is missing, below 0 where there is more."""

    name: str
    figure: str
    expected: float
    measured: float
    short: float
    error: float
    state: str

    def text(self) -> str:
        """In one line."""
        figure = FIGURES[self.figure]
        of = f"{digits(self.measured)} of {digits(self.expected)} {figure.unit} expected"
        missing = "" if self.state == "pass" else f", {self.short:.1%} ± {self.error:.1%} too few"
        return f"{self.name}: {of}{missing} ({figure.label})"


def digits(value: float) -> str:
    """To four significant digits, without an exponent."""
    return f"{float(f'{value:.4g}'):,.10g}"


def settings(folder: Path) -> tuple[dict[str, float], float]:
    """What was expected of the test in this folder, by figure, and the seconds of its burn-in, 0 without one.

    Raises ReviewError for a file that is none.
    """
    path = folder / "config.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        figures = known.get("expected", {})
        found = {name: float(figures[name]) for name in FIGURES if figures.get(name)}
        return found, float(known.get("burn_in_seconds", 0))
    except (OSError, ValueError, TypeError, AttributeError):
        raise ReviewError(f"{path}: no settings of a test; run certify.sh again") from None


def check(records: Records, expected: Mapping[str, float]) -> tuple[list[Reached], list[str]]:
    """Every expected figure, and notes on what was expected and not measured.

    A line for each rank that falls short, or one for all where most of them do or none does.
    """
    found, notes = [], []
    for name, value in expected.items():
        measured = measure(records, name)
        if not measured:
            notes.append(f"{FIGURES[name].variable}={value:g}: was not measured here ({FIGURES[name].label})")
            continue
        judged = [_judge(who, name, value, rounds) for who, rounds in measured.items()]
        short = [one for one in judged if one.state != "pass"]
        if short and 2 * len(short) <= len(judged):
            found += short
        else:
            everyone = [float(np.median(rounds)) for rounds in zip(*measured.values(), strict=True)]
            found.append(_judge(EVERYONE, name, value, everyone))
    return found, notes


def measure(records: Records, name: str) -> dict[str, list[float]]:
    """A figure in its unit by rank, or of all ranks, and round; empty where it was not measured."""
    if name in ("parallel", "together"):
        rates = {records.places[rank].name: rounds for rank, rounds in records.rates(name).items()}
        if name == "together" and rates:
            return {EVERYONE: [sum(rounds) for rounds in zip(*rates.values(), strict=True)]}
        return rates
    amounts = records.probes["amount"][records.probes["probe"] == name.encode()]
    if not len(amounts):
        return {}
    scale = _UNITS[FIGURES[name].unit]
    if FIGURES[name].of_whole:  # the quickest of each round shows the network, the others what disturbed it
        work = bus_bandwidth(records, name, len(records.places))
        return {EVERYONE: [work / min(times) for times in records.reductions(name).values()]}
    return {
        records.places[rank].name: [float(amounts[0]) / seconds / scale for seconds in rounds]
        for rank, rounds in records.probe(name).items()
    }


def bus_bandwidth(records: Records, name: str, size: int) -> float:
    """GB that count for an all-reduce of ``size`` ranks: by its seconds, the bus bandwidth as nccl-tests define it."""
    amount = float(records.probes["amount"][records.probes["probe"] == name.encode()][0])
    return 2 * (size - 1) / size * amount / _UNITS["GB/s"]


def _judge(who: str, name: str, expected: float, rounds: list[float]) -> Reached:
    measured = statistics.median(rounds)
    spread = statistics.stdev(rounds) if len(rounds) > 1 else 0.0
    error = OF_MEDIAN * spread / len(rounds) ** 0.5 / expected  # of a median
    short = 1 - measured / expected
    return Reached(who, name, expected, measured, short, error, state_of(short, error))


def state_of(share: float, error: float) -> str:
    """pass, warn or fail: of a share that is missing or too much, and its standard error."""
    sure = share > DEVIATIONS * error
    return "fail" if sure and share > FAIL else "warn" if sure and share > WARN else "pass"


def exports(records: Records) -> dict[str, float]:
    """The figures of this test by the variables of a config: the median of its ranks and rounds, to four digits."""
    found = {}
    for name, figure in FIGURES.items():
        measured = measure(records, name)
        if measured:
            value = statistics.median([one for rounds in measured.values() for one in rounds])
            found[figure.variable] = float(f"{value:.4g}")
    return found


STEP = "ms a step"
NONE = "no limit"


@dataclass(frozen=True)
class Measured:
    """A number by rank, or of all. name: a stage, or a part of the load; limits: in words, none where it has none."""

    name: str
    unit: str
    values: dict[str, float]
    limits: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What was measured."""
        return LABELS[self.name]

    @property
    def limit(self) -> str:
        """All limits, in words."""
        return " and ".join(self.limits) or NONE

    @property
    def median(self) -> float:
        """Of all ranks."""
        return statistics.median(self.values.values())

    @property
    def shown(self) -> tuple[str, str]:
        """The lowest and the highest, to four digits or hundredths of a millisecond; the first empty where alike."""
        ends = min(self.values.values()), max(self.values.values())
        low, high = (f"{end:,.2f}" if self.unit == STEP else digits(end) for end in ends)
        return (low if low != high else ""), high

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"name": self.name, "unit": self.unit, "values": self.values, "limits": list(self.limits)}


def figures(
    records: Records, seconds: Mapping[str, Mapping[int, float]], expected: Mapping[str, float]
) -> list[Measured]:
    """The seconds of each stage, then rates and the parts of the load. seconds: by stage and rank."""
    compared = (
        (f"at most {LEAST_EXCESS['slow']:.0%} slower than the median, or by chance",)
        if len(records.places) >= LEAST
        else ()
    )
    found = []
    for stage, of_ranks in seconds.items():
        times = {records.places[rank].name: 1e3 * value for rank, value in of_ranks.items()}
        found.append(Measured(stage, STEP, times, compared if stage != "pairs" else ()))
    for name, figure in FIGURES.items():
        by_round = measure(records, name)
        values = {who: statistics.median(rounds) for who, rounds in by_round.items()}
        limits = compared if name in PROBES else ()
        if name in expected:
            limits = (f"at least {digits((1 - FAIL) * expected[name])} ({digits(expected[name])} expected)", *limits)
        if values:
            found.append(Measured(name, figure.unit, values, limits))
    return found + [one for name in REDUCTIONS if (one := _reduction(records, name)) is not None]


def _reduction(records: Records, name: str) -> Measured | None:
    """Bus bandwidth of the all-reduces of parts of the ranks; that of all is one of FIGURES."""
    size = {"reduce_node": records.ranks_per_node, "reduce_pairs": 2 * records.ranks_per_node}.get(name, 0)
    seconds = [one for groups in records.reductions(name).values() for one in groups]
    if not size or not seconds:
        return None
    rate = bus_bandwidth(records, name, size)
    least = LEAST_EXCESS["network"]
    limits = (f"at most {least:.0%} more time than the median, or by chance",) if len(records.nodes) >= LEAST else ()
    values = {
        "slowest": rate / max(seconds),
        EVERYONE: rate / statistics.median(seconds),
        "quickest": rate / min(seconds),
    }
    return Measured(name, FIGURES["reduce_together"].unit, values, limits if name == "reduce_pairs" else ())
