"""`python -m review certify`: the records of an acceptance test to a verdict."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from certify import figures
from certify.comparison import LEAST, Outlier, Question, questions
from certify.corruption import Corruption, corrupt
from certify.figures import STEP, Measured, Reached
from certify.hardware import Fault, devices, faults, throttled
from certify.journal import BurnIn, Journal
from certify.records import Records, read
from certify.schema import ALONE, BURN_IN, LABELS
from review.logs.output import duration, write_whole

SHOWN = 4  # of a ranking; --json has all, --csv the ranks of every stage
WORDS = {
    "slow": "slower than the median",
    "starved": "more time for each second on its CPUs than the median: others have them, or a limit",
    "hesitates": "more lost in single steps than the median",
    "network": "slower all-reduce than the median",
}


@dataclass(frozen=True)
class Finding:
    """A node, rank or link that stands out. also: stages after the first in which it does."""

    what: str
    stage: str
    kind: str
    outlier: Outlier
    evidence: str = ""
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Who."""
        return self.outlier.name

    def text(self) -> str:
        """In one line: who, by how much, in which stage, how sure that is."""
        sure = f"{self.outlier.measure}, {chance_words(self.outlier.chance)}"
        also = f"; also: {', '.join(self.also)}" if self.also else ""
        evidence = f"; {self.evidence}" if self.evidence else ""
        excess = f"{self.outlier.excess:.1%}"
        return f"{self.name}: {excess} {WORDS[self.what]} ({LABELS[self.stage]}; {sure}){evidence}{also}"


def chance_words(chance: float) -> str:
    """How often a whole test of healthy machines names somebody so."""
    tests = "over 1,000,000" if chance < 1e-6 else f"{float(f'{1 / chance:.1g}'):,.0f}"
    return f"by chance in one of {tests} tests"


@dataclass(frozen=True)
class Certificate:
    """What came of a test.

    seconds: median of a step by stage and rank, waiting for others left out; ranking: of nodes and of ranks, how much
    slower than their median they are by themselves while all work, the slowest first.
    """

    records: Records
    seconds: dict[str, dict[int, float]]
    findings: list[Finding]
    corrupt: list[Corruption]
    repeats: bool
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    burn_in: BurnIn | None = None
    ranking: dict[str, dict[str, float]] = field(default_factory=dict)
    reached: list[Reached] = field(default_factory=list)
    expected: dict[str, float] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """pass: nobody is slow and all have computed the same; warn: so it is, but a device complains; or fail.

        Of the figures that a config expects the worst counts as well, and a burn-in that ended early is a warning.
        """
        burnt = self.burn_in is not None and bool(self.burn_in.different)
        states = {one.state for one in self.faults} | {one.state for one in self.reached}
        if self.corrupt or self.findings or burnt or "fail" in states:
            return "fail"
        return "warn" if self.faults or "warn" in states or self.unfinished else "pass"

    @property
    def unfinished(self) -> str:
        """That the burn-in ended before its time, in a line; empty where it did not."""
        burnt = self.burn_in
        if burnt is None or not burnt.unfinished:
            return ""
        share = math.floor(100 * burnt.elapsed / burnt.duration)
        again = f"RUN_NAME={self.records.folder.resolve().name} DURATION={burnt.duration:g}s"
        return (
            f"burn-in: ended after {share}% of {duration(burnt.duration)}: run it again with {again}, "
            "unless it still runs"
        )

    def figures(self) -> list[Measured]:
        """Every number with its limit."""
        return figures.figures(self.records, self.seconds, self.expected)

    def reasons(self) -> list[str]:
        """What is wrong, a line each."""
        return [
            *(one.text() for one in self.corrupt),
            *(self.burn_in.different if self.burn_in else []),
            *(one.text() for one in self.findings),
            *(one.text() for one in self.reached if one.state != "pass"),
            *(one.text() for one in self.faults),
            *([self.unfinished] if self.unfinished else []),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        places = self.records.places
        return {
            "state": self.state,
            "ranks": len(places),
            "nodes": len(self.records.nodes),
            "compared": len(places) >= LEAST,
            "reasons": self.reasons(),
            "findings": [asdict(one) for one in self.findings],
            "corrupt": [asdict(one) for one in self.corrupt],
            "faults": [asdict(one) for one in self.faults],
            "expected": [asdict(one) for one in self.reached],
            "burn_in": self.burn_in.as_dict() if self.burn_in else None,
            "notes": self.notes,
            "ranking": self.ranking,
            "figures": [one.as_dict() for one in self.figures()],
            "seconds_per_step": {
                stage: {places[rank].name: value for rank, value in values.items()}
                for stage, values in self.seconds.items()
            },
        }


def certify(folder: Path) -> Certificate:
    """Judges the records in the folder of a test. Raises ReviewError where they are missing or are no records."""
    records = read(folder)
    wanted, seconds = figures.settings(folder)
    burnt = Journal(folder).read(records.places) or (BurnIn(0, 0.0, seconds, []) if seconds else None)
    found = judge(records, burnt)
    reached, notes = figures.check(found.records, wanted)
    notes += [one.text() for one in reached if one.state == "pass"]
    notes += [burnt.text()] if burnt else []
    return replace(found, reached=reached, expected=wanted, notes=[*found.notes, *notes])


def judge(records: Records, burnt: BurnIn | None = None) -> Certificate:
    """Who is slow, who computed something else, and what cannot be said."""
    asked = [*questions(records, burnt.rounds if burnt else {})]
    seconds = {
        stage: {rank: float(np.median(np.concatenate(rounds))) for rank, rounds in records.seconds(stage).items()}
        for stage in records.stages
    }
    broken, repeats = corrupt(records)
    notes = []
    if len(records.places) < LEAST:
        notes.append(f"too few ranks to tell a slow one from the others: {LEAST} or more")
    if 1 < len(records.nodes) < LEAST:
        notes.append(f"too few nodes to tell a slow one from the others: {LEAST} or more")
    if not repeats:
        notes.append("the same steps do not repeat bit for bit here, so that nothing is said of silent corruption")
    findings = _findings(records, asked)
    ranking = {one.kind: one.ranking() for one in asked if one.what == "slow" and set(one.stages) == {"parallel"}}
    return Certificate(records, seconds, findings, broken, repeats, faults(records), notes, burnt, ranking)


def _findings(records: Records, asked: list[Question]) -> list[Finding]:
    """Each culprit once, in the stage that shows it first: not the ranks and links of a node that is named itself."""
    comparisons = sum(len(question.values) for question in asked)
    found: dict[str, Finding] = {}
    for question in asked:
        for one in question.outliers(comparisons):
            stage, *others = question.shown_in(one.name)
            if one.name in found:
                first = found[one.name]
                also = {other: None for other in (*first.also, stage, *others) if other != first.stage}
                found[one.name] = replace(first, also=tuple(also), evidence=_joined(first, question.what, one))
            elif not _explained(one.name, question.kind, found):
                evidence = _evidence(records, stage, one.name)
                found[one.name] = Finding(question.what, stage, question.kind, one, evidence, tuple(others))
    return list(found.values())


def _joined(first: Finding, what: str, outlier: Outlier) -> str:
    """The evidence of a finding, where another question has the same answer."""
    words = f"{outlier.excess:.1%} {WORDS[what]}"
    if what == first.what or WORDS[what] in first.evidence:
        return first.evidence
    return "; ".join(said for said in (first.evidence, words) if said)


def _explained(name: str, kind: str, found: dict[str, Finding]) -> bool:
    """Whether a node that is already named is the reason."""
    nodes = {one.removeprefix("node ") for one, finding in found.items() if finding.kind == "node"}
    if kind == "rank":
        return name.partition(" on ")[2] in nodes
    return kind == "link" and bool(nodes & set(name.removeprefix("link ").split(" - ")))


def _evidence(records: Records, stage: str, name: str) -> str:
    """What the others wait for it, and why it may be slow, where something says so."""
    own = [rank for rank, place in records.places.items() if name in (place.name, f"node {place.node}")]
    said = [
        throttled(samples) for who, samples in devices(records) if who in {records.places[rank].name for rank in own}
    ]
    said = [reason for reason in dict.fromkeys(said) if reason][:1]
    if own and len(own) < len(records.places) and "together" in records.stages and stage in (*ALONE, "node", BURN_IN):
        waits = records.waits("together")
        mine = statistics.median(waits[rank] for rank in own)
        gap = statistics.median(wait for rank, wait in waits.items() if rank not in own) - mine
        if gap > 0:
            said.append(f"the others wait {gap * 1e3:.1f} ms a step longer than it does")
    return "; ".join(said)


def write_csv(found: Certificate, path: Path) -> None:
    """A row a stage and rank, the slowest of each stage first, then one a figure and rank. Raises ReviewError."""
    lines = ["stage,node,rank,local_rank,device,seconds_per_step,slower_than_median,figure,unit"]
    for stage, values in found.seconds.items():
        center = statistics.median(values.values())
        for rank, seconds in sorted(values.items(), key=lambda item: -item[1]):
            place = found.records.places[rank]
            device = place.device.replace('"', "'")
            lines.append(
                f'{stage},{place.node},{rank},{place.local_rank},"{device}",{seconds:.6f},{seconds / center - 1:.4f},,'
            )
    ranks = {place.name: place for place in found.records.places.values()}
    for one in found.figures():
        if one.unit == STEP:
            continue
        for who, value in sorted(one.values.items(), key=lambda item: item[1]):
            where = f"{who},,"
            if who in ranks:
                where = f"{ranks[who].node},{ranks[who].rank},{ranks[who].local_rank}"
            lines.append(f"{one.name},{where},,,,{value:.6g},{one.unit}")
    write_whole(path, ("\n".join(lines) + "\n").encode())


def print_certificate(found: Certificate) -> None:
    """The stages, what is wrong, and the verdict on the last line."""
    print(f"{len(found.records.places)} ranks on {len(found.records.nodes)} nodes")
    for one in found.figures():
        low, high = one.shown
        print(f"  {one.label:<40} {low:>10} {'to' if low else '':2} {high:>10} {one.unit:<11}  {one.limit}")
    for kind, ranks in found.ranking.items():
        if len(ranks) >= LEAST:
            shown = ", ".join(f"{name} {excess:+.1%}" for name, excess in list(ranks.items())[:SHOWN])
            print(f"  {f'{kind}s from the slowest':<40} {shown}{', ...' if len(ranks) > SHOWN else ''}")
    for line in (*found.notes, *found.reasons()):
        print(f"  {line}")
    print(found.state)
