"""`python -m review certify A B`: two tests beside each other: their figures, and what differs in load and machine."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from certify.baseline import LOAD, measure
from certify.faults import usual_parts
from certify.figures import STEP, digits
from certify.verdict import Certificate
from review.logs.output import Column, Heading, Line, Part, Table

INTERVAL = 2.0  # standard errors to either side: 95%
_SAME_LOAD_ONLY = (STEP, "sequences/s")


@dataclass(frozen=True)
class Pair:
    """A figure of both: medians over ranks, of B over A, and how far that may be off; None: one round tells nothing."""

    name: str
    label: str
    unit: str
    a: float
    b: float
    ratio: float
    error: float | None


@dataclass(frozen=True)
class Comparison:
    """names, states, ended: of both; differences: (what, of A, of B); left_out: what cannot be compared, and why."""

    names: tuple[str, str]
    states: tuple[str, str]
    ended: tuple[str, str]
    figures: list[Pair]
    differences: list[tuple[str, Any, Any]]
    left_out: str

    def parts(self, width: int | None) -> list[Part]:
        """For a terminal or Markdown, whatever its width."""
        columns = [Column("figure", wraps=True), *(Column(name, right=True) for name in "AB"), Column("unit", drop=1)]
        rows = []
        for one in self.figures:
            off = "" if one.error is None else f" ± {INTERVAL * one.error:.3f}"
            rows.append((one.label, digits(one.a), digits(one.b), one.unit, f"{one.ratio:.3f}{off}"))
        found: list[Part] = [
            Heading("Two acceptance tests", f"A: {self.names[0]}, B: {self.names[1]}"),
            Table([*columns, Column("B / A, 95%", right=True)], rows),
        ]
        found += [Line("left out", self.left_out)] if self.left_out else []
        told = [("verdict", *self.states), ("ended", *self.ended), *self.differences]
        found += [Heading("What differs"), Table([Column("what"), Column("A", wraps=True), Column("B", wraps=True)], [
            tuple("unknown" if one is None else str(one) for one in row) for row in told if row[1] != row[2]
        ])]  # fmt: skip
        return found


def compare(a: Certificate, b: Certificate) -> Comparison:
    """Figures that both have; those of a training step only where both trained the same. Raises ReviewError."""
    both = [measure(one.records, one.records.folder.resolve().name) for one in (a, b)]
    machines = [one.machine for one in both]
    other_load = [name for name in LOAD if machines[0][name] != machines[1][name]]
    others = {(one.name, one.unit): one for one in b.figures}
    found = []
    for one in a.figures:
        other = others.get((one.name, one.unit))
        if other is not None and not (other_load and one.unit in _SAME_LOAD_ONLY):
            before, now = (statistics.median(figure.values.values()) for figure in (one, other))
            times = [of.metrics.get(one.name) for of in both]
            error = None
            if all(times):
                error = now / before * sum((off / seconds) ** 2 for seconds, off in filter(None, times)) ** 0.5
            found.append(Pair(one.name, one.label, one.unit, before, now, now / before, error))
    parts = [usual_parts(one.records.hardware) for one in (a, b)]
    facts = []
    for test, machine, of in zip((a, b), machines, parts, strict=True):
        model = {f"model's {name}": value for name, value in machine.pop("model").items()}
        pieces = {f"{device}: {name}": value for device, told in of.items() for name, value in told.items()}
        facts.append(machine | model | test.versions | {"commit": test.tested["commit"]} | pieces)
    names = dict.fromkeys([*facts[0], *facts[1]])
    return Comparison(
        names=(both[0].name, both[1].name),
        states=(a.state, b.state),
        ended=(a.tested["ended"], b.tested["ended"]),
        figures=found,
        differences=[(name, x, y) for name in names if (x := facts[0].get(name)) != (y := facts[1].get(name))],
        left_out=f"the training step: of another {', '.join(other_load)}" if other_load else "",
    )
