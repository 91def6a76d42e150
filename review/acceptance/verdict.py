"""`python -m review certify`: the verdict on the records of an acceptance test."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from common.durations import duration
from review.acceptance import coverage, figures, schema
from review.acceptance.comparisons import SHARES, Comparison, all_comparisons
from review.acceptance.coverage import Gap
from review.acceptance.faults import (
    OWN,
    Corruption,
    corrupt,
    device_history,
    devices,
    family,
    gpu_faults,
    odd_parts,
    throttled,
    tool_faults,
    unseen_data,
)
from review.acceptance.figures import Measured, Reached
from review.acceptance.journal import EXIT, BurnIn, Reason, listed, read_burn_in
from review.acceptance.outliers import MIN_PEERS, Outlier, members
from review.acceptance.records import Records, known, read
from review.acceptance.schema import (
    BURN_IN,
    LABELS,
    NODE,
    PARTS,
    TOOLS,
    Facts,
)
from review.league.estimate import Estimate, estimate
from review.logs.tree import read_json
from review.rulebook.rules import table

JSON_VERSION = 1  # of certify.schema.json
GROSS_ON_CPUS = 1.0
WORDS = schema.TABLES["slowness"]


@dataclass(frozen=True)
class Finding:
    """A node, rank or link that stands out. also: later stages that show it."""

    what: str
    stage: str
    kind: str
    outlier: Outlier
    evidence: str = ""
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.outlier.name

    def reason(self) -> Reason:
        chance = self.outlier.chance  # per whole test of healthy machines
        tests = (
            "over 1,000,000" if chance < 1e-6 else f"{float(f'{1 / chance:.1g}'):,.0f}"
        )
        also = (
            f"also: {', '.join(LABELS[stage] for stage in self.also)}"
            if self.also
            else ""
        )
        # Of few ranks, the fastest is the measure; of a group, those outside it.
        alone = self.outlier.state == "fail" or self.stage == "pairs"
        # Nodes and ranks are all listed, as they are drained by name.
        who = listed(self.name.split(", ")) if self.kind == "link" else self.name
        shown = WORDS[self.what] if alone else "slower than the fastest"
        return Reason(
            who,
            f"{self.outlier.excess:.1%} {shown}",
            self.outlier.state,
            stage=LABELS[self.stage],
            sure=f"{self.outlier.measure}, by chance in one of {tests} tests",
            evidence="; ".join(filter(None, (self.evidence, also))),
        )


@dataclass(frozen=True)
class Certificate:
    """The result of a test.

    seconds: median per step by stage [ranks], without the wait for others; figures: every measured
    number; gaps: what was not tested.
    """

    records: Records
    seconds: dict[str, np.ndarray]
    findings: list[Finding]
    corrupt: list[Corruption]
    faults: list[Reason]
    notes: list[str]
    burn_in: BurnIn | None
    reached: list[Reached]
    figures: list[Measured]
    gaps: list[Gap]

    @cached_property
    def standing(self) -> Estimate | str:
        """Time to train and its place among published results; a str says why there is none."""
        return standing(self.records)

    @cached_property
    def versions(self) -> str:
        """Of packages, and of other programs, which may differ between nodes."""
        environment = self._environment
        versions = environment.get("packages", {}) | {
            name: environment.get(name) for name in ("cuda", "cudnn", "nccl", "python")
        }
        programs: dict[str, set[str]] = {}
        for tool in self.records.reports:
            programs.setdefault(coverage.program(tool["name"]), set()).add(
                tool["version"]
            )
        versions |= {
            name: " and ".join(sorted(different - {""}))
            for name, different in programs.items()
        }
        return ", ".join(
            f"{name} {version}" for name, version in versions.items() if version
        )

    @cached_property
    def _environment(self) -> dict[str, Any]:
        return read_json(self.records.folder / "environment.json")

    @cached_property
    def tested(self) -> dict[str, str]:
        """What was tested, with which versions and when, and what was not."""
        records = self.records
        done = {*records.stages, *records.probed}
        done |= {name for name in schema.REDUCTIONS if records.reductions(name)}
        done |= {BURN_IN} if self.burn_in else set()
        unjudged = {gap.what for gap in self.gaps if gap.why == coverage.UNJUDGED}
        tested = [
            label
            for name, label in LABELS.items()
            if name in done and label not in unjudged
        ]
        tested += coverage.tested_areas(records, self.gaps)
        programs = {coverage.program(tool["name"]) for tool in records.reports}
        left = [
            label
            for name, label in LABELS.items()
            # Tests of a missing program are not listed one by one.
            if name not in done
            and (name not in TOOLS or coverage.program(name) in programs)
        ]
        gaps = coverage.merged(records, self.gaps)
        left += [f"{what} ({why})" for what, why in gaps]
        ended = datetime.fromtimestamp(records.ended, timezone.utc).strftime(
            "%Y-%m-%d %H:%M UTC"
        )
        return {
            "tested": "; ".join(dict.fromkeys(tested)),
            "not tested": "; ".join(dict.fromkeys(left)) or "nothing",
            "versions": self.versions or "unknown",
            "commit": self._environment.get("git_commit") or "unknown",
            "ended": ended if records.ended else "unknown",
            "duration": duration(records.ended - records.began)
            if records.began
            else "unknown",
            "operator": read_json(records.folder / "config.json").get("operator")
            or "not named",
        }

    @cached_property
    def inventory(self) -> list[tuple[str, str]]:
        """(device, facts in words) of the hardware, once for all devices that are alike, and their
        serial numbers.
        """
        alike: dict[tuple[str, str], list[str]] = {}
        single: dict[str, list[str]] = {}
        for node in self.records.nodes:
            for device, facts in self.records.parts(node).items():
                given = {
                    name: value for name, value in facts.items() if value is not None
                }
                for fact in given.keys() & OWN:
                    who = f"{device.removeprefix('GPU ')} {given.pop(fact)}"
                    single.setdefault(f"{OWN[fact]} of {node}", []).append(who)
                shown = ", ".join(f"{name} {value}" for name, value in given.items())
                if shown:
                    owner = f"{device} of {node}"
                    alike.setdefault((family(device), shown), []).append(owner)
        lines = [
            (owners[0] if len(owners) == 1 else f"{len(owners)} x {kind}", shown)
            for (kind, shown), owners in alike.items()
        ]
        return lines + [(what, ", ".join(own)) for what, own in sorted(single.items())]

    @cached_property
    def highest(self) -> dict[str, dict[str, float]]:
        """Largest clock, power and temperature of each GPU, by its rank."""
        return {
            name: {
                f"{title}, {unit}": float(known(samples[field]).max())
                for field, (_, title, unit) in schema.TABLES["timelines"].items()
                if len(known(samples[field]))
            }
            for name, samples in devices(self.records)
        }

    @property
    def state(self) -> str:
        """pass, warn or fail: the worst of all reasons."""
        # EXIT begins with the best.
        return max(
            (reason.state for reason in self.why()), key=[*EXIT].index, default="pass"
        )

    @property
    def headline(self) -> str:
        """The state in words: on CPUs nothing but the software was tested."""
        software = " (software only: the test ran on CPUs)"
        return self.state + software * self.records.on_cpus

    @cached_property
    def machines(self) -> dict[str, dict[str, Any]]:
        """Each node by itself, for what keeps machines over time: kind, state and median rates."""
        records = self.records
        states = dict.fromkeys(records.nodes, "pass")
        for reason in self.why():
            named = {*reason.name.replace(",", " ").split()} & {*states}
            for node in named or states:
                # EXIT begins with the best.
                states[node] = max(states[node], reason.state, key=[*EXIT].index)
        machines = {}
        for node in records.nodes:
            own = [info for info in records.ranks.values() if info.node == node]
            names = {info.name for info in own} | {f"node {node}"}
            system = records.parts(node).get(NODE, {}).get("system") or "unknown system"
            rates = {
                figure.name: [
                    value for who, value in figure.values.items() if who in names
                ]
                for figure in self.figures
                if figure.unit == schema.UNITS.get(figure.name)
            }
            machines[node] = {
                "kind": f"{system}, {len(own)} x {own[0].device or 'CPU'}",
                "state": states[node],
                "figures": {
                    name: float(np.median(own)) for name, own in rates.items() if own
                },
            }
        return machines

    def why(self) -> list[Reason]:
        """Why the test does not pass: corruption, slowness, missed figures, device faults, an
        incomplete burn-in.
        """
        # Wrong results first: a node is drained with the first reason that names it.
        burnt = (
            self.burn_in.reasons(self.records.folder.resolve().name)
            if self.burn_in
            else []
        )
        return [
            *(corruption.reason() for corruption in self.corrupt),
            *(reason for reason in burnt if reason.state == "fail"),
            *(finding.reason() for finding in self.findings),
            *(reached.reason() for reached in self.reached if reached.state != "pass"),
            *self.faults,
            *(reason for reason in burnt if reason.state == "warn"),
        ]

    def reasons(self) -> list[str]:
        return [reason.text() for reason in self.why()]

    def as_dict(self) -> dict[str, Any]:
        names = self.records.names
        return {
            "version": JSON_VERSION,
            "ended": self.records.ended,
            "machines": self.machines,
            "state": self.state,
            "ranks": len(names),
            "nodes": len(self.records.nodes),
            "compared": len(names) >= MIN_PEERS,
            "reasons": self.reasons(),
            "findings": self.findings,
            "corrupt": self.corrupt,
            "faults": self.faults,
            "expected": self.reached,
            "burn_in": self.burn_in,
            "standing": self.standing,
            "on_cpus": self.records.on_cpus,
            "tested": self.tested,
            "hardware": self.inventory,
            "highest": self.highest,
            "notes": self.notes,
            "figures": self.figures,
            "seconds_per_step": {
                stage: dict(zip(names, of_ranks.tolist(), strict=True))
                for stage, of_ranks in self.seconds.items()
            },
        }


def certify(folder: Path) -> Certificate:
    """Judges the records in a test's folder. Raises ReviewError for missing or invalid files."""
    records = read(folder)
    expected, seconds, parts, required = figures.settings(folder)
    # A burn-in that was asked for and never began is reported as 0 seconds of it.
    burnt = read_burn_in(folder, records.ranks) or (
        BurnIn(0, 0.0, seconds, []) if seconds else None
    )
    return judge(records, burnt, expected, parts, required)


def judge(
    records: Records,
    burnt: BurnIn | None = None,
    expected: Mapping[str, float] = MappingProxyType({}),
    parts: Facts | None = None,
    required: Sequence[str] = (),
) -> Certificate:
    """Finds slow, corrupt and faulty parts, with notes on what cannot be judged."""
    compared = [*all_comparisons(records, burnt.rounds if burnt else {})]
    broken, repeats = corrupt(records)
    notes = []
    if len(records.ranks) < MIN_PEERS:
        few = f"fewer than {MIN_PEERS} ranks: too few to single out a slow one"
        # On shared CPUs slower_than_fastest() accuses nobody, see _findings().
        alone = records.on_cpus or len(records.ranks) == 1
        notes.append(few if alone else f"{few}; compared with the fastest")
    if 1 < len(records.nodes) < MIN_PEERS:
        notes.append(f"fewer than {MIN_PEERS} nodes: too few to single out a slow one")
    history = [*device_history(records)]
    notes += [fact.text() for fact in history if fact.state == "pass"]
    reached = figures.check(records, expected)
    notes += [rate.reason().text() for rate in reached if rate.state == "pass"]
    notes += [burnt.text()] if burnt else []
    floors = figures.floors(records)
    seconds = {
        stage: np.nanmedian(records.seconds(stage), axis=(1, 2))
        for stage in records.stages
    }
    measured = figures.figures(records, seconds, expected, floors)
    judged = {one.name: bool(one.limits) for one in measured if one.name not in seconds}
    # Its telemetry is written every few minutes, and at the end.
    over = burnt is not None and 0 < burnt.duration <= burnt.elapsed
    gaps = coverage.gaps(records, judged, repeats, over)
    gaps += [
        Gap(node, f"{name}={value:g}", "expected, not measured")
        for name, value in expected.items()
        for node in records.nodes
        if name not in {rate.figure for rate in reached} or records.lacks(node, name)
    ]
    return Certificate(
        records=records,
        seconds=seconds,
        findings=_findings(records, compared),
        corrupt=broken,
        faults=[
            *gpu_faults(records),
            *odd_parts(records, parts),
            *(fault for fault in history if fault.state != "pass"),
            *unseen_data(records),
            *tool_faults(records),
            *figures.below(records, floors),
            *figures.slow_all_reduces(records),
            *coverage.missing(gaps, required),
        ],
        notes=notes,
        burn_in=burnt,
        reached=reached,
        figures=measured,
        gaps=gaps,
    )


def _findings(records: Records, compared: list[Comparison]) -> list[Finding]:
    """Each culprit once, in the stage that shows it first, without the ranks and links of a node
    that is named.
    """
    # Each kind of comparison has its share of the false alarms that a test may have (Bonferroni).
    comparisons = {
        name: sum(len(one.values) for one in compared if one.share == name) / share
        for name, share in SHARES.items()
    }
    findings: dict[str, Finding] = {}
    for comparison in compared:
        for outlier in comparison.outliers(comparisons[comparison.share]):
            # Of two processes on shared CPUs, one is often slower, or for a while much slower.
            few = len(comparison.values) < MIN_PEERS and comparison.what != "network"
            often = comparison.share == "stretch" or outlier.excess < GROSS_ON_CPUS
            if records.on_cpus and few and often:
                continue
            stage = comparison.shown_in(outlier.name)
            if first := findings.get(outlier.name):
                if stage not in (first.stage, *first.also):
                    findings[outlier.name] = replace(first, also=(*first.also, stage))
            elif not _explained(records, outlier.name, comparison.kind, findings):
                evidence = _throttling(records, outlier.name)
                findings[outlier.name] = Finding(
                    comparison.what, stage, comparison.kind, outlier, evidence
                )
    return list(findings.values())


def _explained(
    records: Records, name: str, kind: str, findings: Mapping[str, Finding]
) -> bool:
    """Whether a node or GPU that is already named explains it."""
    named: dict[str, set[str]] = {"node": set(), "rank": set()}
    for finding in findings.values():
        named.setdefault(finding.kind, set()).update(members(finding.name))
    nodes = {node.removeprefix("node ") for node in named["node"]}
    if kind == "rank":
        return all(member.partition(" on ")[2] in nodes for member in members(name))
    # A slow GPU makes all its pairs slow, and a slow node all its links.
    if kind == "pair":
        gpus = {
            (info.node, f"GPU {info.local_rank}")
            for info in records.ranks.values()
            if info.name in named["rank"]
        }
        pair, _, node = name.partition(" of ")
        return node in nodes or any((node, gpu) in gpus for gpu in pair.split(" from "))
    # So does a rank that stops at times: others wait for it.
    pausing = [one.name for one in findings.values() if one.what == "hesitates"]
    nodes |= {name.rpartition(" on ")[2] for name in pausing}
    return kind == "link" and all(
        nodes & {*one.removeprefix("link ").split(" - ")} for one in members(name)
    )


def _throttling(records: Records, name: str) -> str:
    """Why the GPU of a rank, or the first such of a node, throttles; empty if none does."""
    names = {
        info.name
        for info in records.ranks.values()
        if name in (info.name, f"node {info.node}")
    }
    reasons = (
        throttled(samples) for rank, samples in devices(records) if rank in names
    )
    return next(filter(None, reasons), "")


def standing(records: Records) -> Estimate | str:
    """Estimate from the stage with all ranks; a str says why there is none."""
    model, data = (
        read_json(records.folder / "config.json", section)
        for section in ("model", "data")
    )
    if records.on_cpus:
        return "nothing to compare with: published results are of accelerators, this test was of CPUs"
    wanted = table("benchmark_settings")
    large = all(model.get(name) == value for name, value in wanted["model"].items())
    if not large or data.get("max_seq_length") != wanted["data"]["max_seq_length"]:
        return "nothing to compare with: published results are of BERT-large at 512 tokens, this was another model"
    # Seconds per step, with the wait, as a step of training has it.
    rounds = np.nanmedian(records.by_step("together", *PARTS), axis=(0, 2))
    ranks = len(records.ranks)
    # Sequences per step over all ranks.
    batch = data["batch_size"] * data["gradient_steps"] * data["packing_factor"] * ranks
    return estimate(batch / float(np.median(rounds)), batch, ranks)


def print_certificate(certificate: Certificate) -> None:
    """Prints numbers, notes and reasons, and the verdict on the last line."""
    print(certificate.records.extent)
    for figure in certificate.figures:
        low, high = figure.shown
        print(
            f"  {figure.label:<40} {low:>10} {'to' if low else '':2} {high:>10} {figure.unit:<11}  {figure.limit}"
        )
    for name in ("tested", "not tested"):
        print(f"  {name:<40} {certificate.tested[name]}")
    for line in (*certificate.notes, *certificate.reasons()):
        print(f"  {line}")
    print(f"  where this stands: {certificate.standing}")
    print(certificate.headline)


def line(certificate: Certificate) -> str:
    """The verdict, the first reason, what was not tested, and the commands that drain failed nodes
    in Slurm.
    """
    records = certificate.records
    reasons = [
        reason.text()
        for reason in sorted(
            certificate.why(), key=lambda reason: reason.state != "fail"
        )
    ]
    left = coverage.short(records, certificate.gaps)
    not_tested = f"; not tested: {left}" if left else ""
    if not reasons:
        who = f"{records.extent}: {', '.join(records.nodes)}"
        return f"{certificate.headline}: {who}{not_tested}"
    more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    drains = [
        f"scontrol update nodename={','.join(nodes)} state=drain "
        # Quoted: reasons have spaces, and the line is made to be pasted.
        + shlex.quote(f"reason=certify: {reason}")
        for reason, nodes in failed_nodes(certificate).items()
    ]
    first = f"{certificate.headline}: {reasons[0]}{more}{not_tested}"
    return "; ".join([first, *drains])


def failed_nodes(certificate: Certificate) -> dict[str, list[str]]:
    """The nodes that each reason that fails names; all nodes if none is named."""
    failing = [reason for reason in certificate.why() if reason.state == "fail"]
    of_nodes: dict[str, list[str]] = {}
    for node in certificate.records.nodes:
        # As a whole word: n1 must not drain n10.
        naming = [
            reason
            for reason in failing
            if node in reason.name.replace(",", " ").split()
        ]
        if naming:
            of_nodes.setdefault(naming[0].text(), []).append(node)
    if failing and not of_nodes:
        of_nodes[failing[0].text()] = certificate.records.nodes
    return of_nodes
