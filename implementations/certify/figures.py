"""Every number that an acceptance test has measured, in its unit, with the limit that it is held to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from certify.baseline import FAIL
from certify.expected import EVERYONE, FIGURES, bus_bandwidth, digits, measure
from certify.outliers import LEAST
from certify.questions import LEAST_EXCESS
from certify.records import LABELS, PROBES, REDUCTIONS, Records

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
    per_node = max(place.local_rank for place in records.places.values()) + 1
    size = {"reduce_node": per_node, "reduce_pairs": 2 * per_node}.get(name, 0)
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
