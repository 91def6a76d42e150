"""Faults besides slowness: weights that differ (silent data corruption), errors of devices, odd parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from certify.journal import Reason
from certify.records import Records, known, median
from certify.schema import ALL_NODES, ALONE, NODE, STAGES, TABLES, Columns, Facts

LEAST_SAMPLES = 5
LEAST_SHARE = 0.05  # of the seconds
LINK_CHANGES = ("link_downed", "carrier_changes")  # a fail if they grow; other counters of ports: a warning
VERSIONS = ("kernel", "driver", "VBIOS")  # a warning where they differ; other parts: a fail


@dataclass(frozen=True)
class Corruption:
    """A rank whose weights differ from those of most, from a step on."""

    name: str
    stage: str
    round: int
    step: int

    def reason(self) -> Reason:
        where = f"first in step {self.step + 1} of round {self.round + 1}"
        words = f"its weights differ from the same steps' elsewhere, {where}"
        return Reason(self.name, words, stage=STAGES[self.stage])


def corrupt(records: Records) -> tuple[list[Corruption], bool]:
    """The ranks that computed something else, each once, and whether anything could be compared.

    All took the same steps from the same weights. Of those that should agree more than half must, or the load does not
    repeat on this system and proves nothing.
    """
    found: dict[int, Corruption] = {}
    comparable = False
    for group in _groups(records):
        # Pairs of nodes take as many steps as their time allows: compared are those that all have taken.
        shortest = min(len(checks) for _, _, _, checks in group)
        checksums = [tuple(checks[:shortest]) for _, _, _, checks in group]
        common, count = Counter(checksums).most_common(1)[0]
        if len(group) < 2 or 2 * count <= len(group):
            continue
        comparable = True
        for (stage, rank, number, _), checks in zip(group, checksums, strict=True):
            if checks != common and rank not in found:
                step = next(i for i, (own, other) in enumerate(zip(checks, common, strict=True)) if own != other)
                found[rank] = Corruption(records.places[rank].name, stage, number, step)
    return [found[rank] for rank in sorted(found)], comparable


def _groups(records: Records) -> list[list[tuple[str, int, int, list[int]]]]:
    """(stage, rank, round, checksum after each step) of the rounds that should agree."""
    groups: list[list[tuple[str, int, int, list[int]]]] = [[]]
    for stage in records.stages:
        checksums = records.by_step(stage, "checksum", missing=0)
        steps = np.sum(~np.isnan(records.by_step(stage, "data")), axis=2)
        by_rank: list[list[tuple[str, int, int, list[int]]]] = [[] for _ in records.places]
        for rank, number in np.argwhere(steps).tolist():
            checks = checksums[rank, number, : steps[rank, number]].tolist()
            by_rank[rank].append((stage, rank, number, checks))
        everyone = [one for rounds in by_rank for one in rounds]
        if stage in ALONE:
            groups[0] += everyone
        else:
            groups += by_rank
        if stage == "together":  # where every rank has all weights, they are the same on all
            groups.append(everyone)
    return [group for group in groups if group]


def faults(records: Records) -> list[Reason]:
    """Faults of all GPUs; none where a driver reports nothing."""
    gpus = list(devices(records))
    typical = median(np.array([median(samples["sm_mhz"]) for _, samples in gpus]))
    return [Reason(name, words, state) for name, samples in gpus for state, words in _of_one(samples, typical)]


def devices(records: Records) -> Iterator[tuple[str, Columns]]:
    """The samples of each GPU, with the name of its rank."""
    for place in records.places.values():
        table = records.telemetry.get(place.node)
        if table is not None:
            chosen = table["device"] == place.local_rank
            if chosen.any():
                yield place.name, {field: column[chosen] for field, column in table.items()}


def throttled(samples: Columns, typical: float = np.nan) -> str:
    """The reasons for which a GPU throttles and how often; empty if it does not. typical: clock of the median GPU."""
    masks = known(samples["throttle"]).astype(np.int64)
    if len(masks) < LEAST_SAMPLES:
        return ""
    shares = {reason: float(np.mean((masks & bit) != 0)) for bit, reason in TABLES["throttling"].items()}
    said = [f"{reason} in {share:.0%} of the seconds" for reason, share in shares.items() if share >= LEAST_SHARE]
    beside = f" (the median GPU {typical:,.0f})" if not np.isnan(typical) else ""
    return f"throttles: {', '.join(said)}, at {median(samples['sm_mhz']):,.0f} MHz{beside}" if said else ""


def _of_one(samples: Columns, typical: float) -> Iterator[tuple[str, str]]:
    if said := throttled(samples, typical):
        yield "warn", said
    for field, (words, state) in TABLES["counters"].items():
        counts = known(samples[field])
        # A counter begins again where a process or a driver does; that of Xid errors is ours, and begins at 0.
        before = np.concatenate([[0.0] if field == "xid_count" else counts[:1], counts[:-1]])
        more = float(np.sum(np.where(counts < before, counts, counts - before)))
        if more > 0:
            last = samples["xid_last"][-1] if field == "xid_count" else np.nan
            which = "" if np.isnan(last) else f", the last one Xid {last:.0f}"
            yield state, f"{more:.0f} {words} during the test{which}"
    for field, words in (("pcie_generation", "PCIe generation"), ("pcie_width", "PCIe lanes")):
        now, most = (max(known(samples[name]), default=np.nan) for name in (field, f"{field}_most"))
        if now < most:  # False for nan
            yield "warn", f"{words}: {now:.0f}, of {most:.0f} that GPU and slot have"


def remembered(records: Records) -> Iterator[Reason]:
    """Faults of the past that GPUs and the kernel's log tell, and errors of network ports during the test."""
    for node, told in records.hardware.items():
        for device, counts in told.get("after", {}).items():
            before = told.get("before", {}).get(device, {})
            for name, count in counts.items():
                where = device if device == NODE else f"{device} of"
                if device == NODE or device.startswith("GPU "):
                    if count:
                        yield Reason(f"{where} {node}", f"{count} {name}", TABLES["remembered"].get(name, "warn"))
                    continue
                more = count - before.get(name, count)
                more = count if more < 0 else more  # a counter begins again where a driver does
                if more:
                    state = "fail" if name in LINK_CHANGES else "warn"
                    yield Reason(f"{where} {node}", f"{name} grew by {more} during the test", state)


def of_tools(records: Records) -> Iterator[Reason]:
    """What other programs found, and that one of them did not measure."""
    for node, told in records.tools.items():
        for tool in told:
            name = tool["name"]
            for who, state, what in tool["faults"]:
                where = name if name.endswith(ALL_NODES) else f"{who or name} of {node}"
                yield Reason(where, what, state, stage=name if who else "")


def usual_parts(hardware: Mapping[str, Mapping[str, Facts]]) -> Facts:
    """What more than half of the nodes have, and of GPUs more than half of all, under the name GPU."""
    values: dict[tuple[str, str], list[Any]] = {}
    for told in hardware.values():
        for device, facts in told.get("parts", {}).items():
            for name, value in facts.items():
                values.setdefault((_kind(device), name), []).append(value)
    found: Facts = {}
    for (kind, name), given in values.items():
        common, count = Counter(given).most_common(1)[0]
        near = sum(_same(common, one) for one in given)
        if 2 * max(count, near) > max(len(given), len(hardware)):
            found.setdefault(kind, {})[name] = common
    return found


def odd_parts(records: Records, expected: Facts | None = None) -> Iterator[Reason]:
    """What differs from ``expected``, or from the parts of most; of two nodes that differ neither is the odd one."""
    usual = usual_parts(records.hardware) if expected is None else expected
    words = "elsewhere" if expected is None else "expected"
    for node, told in records.hardware.items():
        parts = told.get("parts", {})
        missing: Facts = {kind: {} for kind in usual if kind != "GPU" and kind not in parts}
        for device, facts in (parts | missing).items():
            for name, wanted in usual.get(_kind(device), {}).items():
                if not _same(facts.get(name), wanted):
                    has = facts.get(name, "unknown" if device in parts else "missing")
                    where = device if device == NODE else f"{device} of"
                    state = "warn" if name in VERSIONS else "fail"
                    yield Reason(f"{where} {node}", f"{name} {has}, {words} {wanted}", state)
    if expected is None and len(records.hardware) == 2:
        one, other = (usual_parts({node: told}) for node, told in records.hardware.items())
        for kind, facts in one.items():
            for name, value in facts.items():
                if not _same(value, has := other.get(kind, {}).get(name, "unknown")):
                    state = "warn" if name in VERSIONS else "fail"
                    yield Reason(f"{kind} of {' and '.join(records.hardware)}", f"{name} {value} and {has}", state)


def _kind(device: str) -> str:
    """GPUs of a node are alike; other devices are compared by their name."""
    return "GPU" if device.startswith("GPU ") else device


def _same(one: Any, other: Any) -> bool:
    """Sizes of memory differ by what firmware keeps."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0.01)
    return bool(one == other)
