"""The figures that a config says its system reaches, and what a test measured of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from certify.baseline import DEVIATIONS, FAIL, WARN
from certify.records import LABELS, Records
from review.logs.output import ReviewError

EVERYONE = "all ranks"


@dataclass(frozen=True)
class Figure:
    """variable: in a config; unit: of its values; of_whole: one value for all ranks together."""

    variable: str
    label: str
    unit: str
    of_whole: bool = False


# The names are those of certify.expected_settings.
FIGURES = {
    "parallel": Figure("EXPECTED_SEQUENCES_PER_SECOND", LABELS["parallel"], "sequences/s"),
    "together": Figure("EXPECTED_TOGETHER_SEQUENCES_PER_SECOND", LABELS["together"], "sequences/s", of_whole=True),
    "matmul": Figure("EXPECTED_TFLOPS", LABELS["matmul"], "Tflop/s"),
    "matmul_fp8": Figure("EXPECTED_FP8_TFLOPS", LABELS["matmul_fp8"], "Tflop/s"),
    "copy": Figure("EXPECTED_MEMORY_GBPS", LABELS["copy"], "GB/s"),
    "host_copy": Figure("EXPECTED_HOST_GBPS", LABELS["host_copy"], "GB/s"),
    "disk": Figure("EXPECTED_DISK_GBPS", LABELS["disk"], "GB/s"),
    "reduce_together": Figure("EXPECTED_ALLREDUCE_GBPS", LABELS["reduce_together"], "GB/s", of_whole=True),
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
    error = 1.2533 * spread / len(rounds) ** 0.5 / expected  # of a median
    short = 1 - measured / expected
    sure = short > DEVIATIONS * error
    state = "fail" if sure and short > FAIL else "warn" if sure and short > WARN else "pass"
    return Reached(who, name, expected, measured, short, error, state)


def exports(records: Records) -> dict[str, float]:
    """The figures of this test by the variables of a config: the median of its ranks and rounds, to four digits."""
    found = {}
    for name, figure in FIGURES.items():
        measured = measure(records, name)
        if measured:
            value = statistics.median([one for rounds in measured.values() for one in rounds])
            found[figure.variable] = float(f"{value:.4g}")
    return found
