"""Faults other than slowness: differing weights (silent data corruption), device errors, odd parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from review.acceptance.journal import Reason
from review.acceptance.records import Records, known, median
from review.acceptance.schema import ALL_NODES, ALONE, NODE, STAGES, TABLES, Columns, Facts

MIN_SAMPLES = 5
MIN_SHARE = 0.05  # of the time
LINK_CHANGES = ("link_downed", "carrier_changes")  # fail if they grow; other port counters: warn
VERSIONS = ("kernel", "driver", "VBIOS")  # warn if they differ; other parts: fail


@dataclass(frozen=True)
class Corruption:
    """A rank whose weights differ from the majority's, from a step on."""

    name: str
    stage: str
    round: int
    step: int

    def reason(self) -> Reason:
        where = f"first in step {self.step + 1} of round {self.round + 1}"
        words = f"its weights differ from those of other ranks or rounds, {where}"
        return Reason(self.name, words, stage=STAGES[self.stage])


def corrupt(records: Records) -> tuple[list[Corruption], bool]:
    """Ranks that computed something else, each once, and whether anything could be compared.

    All took the same steps from the same weights. More than half of those that should agree must do so; otherwise the
    load is not reproducible on this system and proves nothing.
    """
    found: dict[int, Corruption] = {}
    comparable = False
    for group in _groups(records):
        # Pairs of nodes take as many steps as their time allows: compare those that all have taken.
        shortest = min(len(checks) for _, _, _, checks in group)
        checksums = [tuple(checks[:shortest]) for _, _, _, checks in group]
        common, count = Counter(checksums).most_common(1)[0]
        if len(group) < 2 or 2 * count <= len(group):
            continue
        comparable = True
        for (stage, rank, number, _), checks in zip(group, checksums, strict=True):
            if checks != common and rank not in found:
                step = next(
                    i
                    for i, (own, other) in enumerate(zip(checks, common, strict=True))
                    if own != other
                )
                found[rank] = Corruption(records.places[rank].name, stage, number, step)
    return [found[rank] for rank in sorted(found)], comparable


def _groups(records: Records) -> list[list[tuple[str, int, int, list[int]]]]:
    """Groups of rounds that should agree: (stage, rank, round, checksum after each step)."""
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
        if stage == "together":  # every rank has all weights
            groups.append(everyone)
    return [group for group in groups if group]


def faults(records: Records) -> Iterator[Reason]:
    """Throttling, errors and narrow buses of all GPUs; none where a driver reports nothing."""
    gpus = list(devices(records))
    typical = median(np.array([median(samples["sm_mhz"]) for _, samples in gpus]))
    for name, samples in gpus:
        if reasons := throttled(samples, typical):
            yield Reason(name, reasons, "warn")
        for field, (words, state) in TABLES["counters"].items():
            counts = known(samples[field])
            # A counter restarts with its process or driver; ours of Xid errors starts at 0.
            before = np.concatenate([[0.0] if field == "xid_count" else counts[:1], counts[:-1]])
            more = float(np.sum(np.where(counts < before, counts, counts - before)))
            if more > 0:
                last = samples["xid_last"][-1] if field == "xid_count" else np.nan
                which = "" if np.isnan(last) else f", the last Xid {last:.0f}"
                yield Reason(name, f"{more:.0f} {words} during the test{which}", state)
        for field, words in (("pcie_generation", "PCIe generation"), ("pcie_width", "PCIe lanes")):
            now, most = (
                max(known(samples[column]), default=np.nan) for column in (field, f"{field}_most")
            )
            if now < most:  # False for nan
                yield Reason(
                    name, f"{words}: {now:.0f} of the {most:.0f} that GPU and slot support", "warn"
                )


def devices(records: Records) -> Iterator[tuple[str, Columns]]:
    """Name of each GPU's rank, and its samples."""
    for place in records.places.values():
        table = records.telemetry.get(place.node)
        if table is not None:
            chosen = table["device"] == place.local_rank
            if chosen.any():
                yield place.name, {field: column[chosen] for field, column in table.items()}


def throttled(samples: Columns, typical: float = np.nan) -> str:
    """Why and how often a GPU throttles; empty if it does not. typical: clock of the median GPU."""
    masks = known(samples["throttle"]).astype(np.int64)
    if len(masks) < MIN_SAMPLES:
        return ""
    shares = {
        reason: float(np.mean((masks & bit) != 0)) for bit, reason in TABLES["throttling"].items()
    }
    reasons = [
        f"{reason} {share:.0%} of the time"
        for reason, share in shares.items()
        if share >= MIN_SHARE
    ]
    usual = f" (median GPU {typical:,.0f})" if not np.isnan(typical) else ""
    return (
        f"throttles: {', '.join(reasons)}, at {median(samples['sm_mhz']):,.0f} MHz{usual}"
        if reasons
        else ""
    )


def device_history(records: Records) -> Iterator[Reason]:
    """Past faults reported by GPUs and the kernel log, and errors of network ports during the test."""
    for node, hardware in records.hardware.items():
        for device, counts in hardware.get("after", {}).items():
            before = hardware.get("before", {}).get(device, {})
            for name, count in counts.items():
                if device == NODE or device.startswith("GPU "):
                    if count:
                        yield Reason(
                            _where(device, node),
                            f"{count} {name}",
                            TABLES["remembered"].get(name, "warn"),
                        )
                    continue
                more = count - before.get(name, count)
                more = count if more < 0 else more  # a counter restarts with its driver
                if more:
                    state = "fail" if name in LINK_CHANGES else "warn"
                    yield Reason(
                        _where(device, node), f"{name} grew by {more} during the test", state
                    )


def tool_faults(records: Records) -> Iterator[Reason]:
    """Faults found by other programs, and programs that measured nothing."""
    for node, tools in records.tools.items():
        for tool in tools:
            name = tool["name"]
            for device, state, what in tool["faults"]:
                where = name if name.endswith(ALL_NODES) else f"{device or name} of {node}"
                yield Reason(where, what, state, stage=name if device else "")


def usual_parts(hardware: Mapping[str, Mapping[str, Facts]]) -> Facts:
    """Parts of more than half of the nodes; of GPUs, of more than half of all GPUs, under the name GPU."""
    values: dict[tuple[str, str], list[Any]] = {}
    for node in hardware.values():
        for device, facts in node.get("parts", {}).items():
            for name, value in facts.items():
                values.setdefault((_kind(device), name), []).append(value)
    found: Facts = {}
    for (kind, name), given in values.items():
        common, count = Counter(given).most_common(1)[0]
        if 2 * max(count, sum(_same(common, one) for one in given)) > max(
            len(given), len(hardware)
        ):
            found.setdefault(kind, {})[name] = common
    return found


def odd_parts(records: Records, expected: Facts | None = None) -> Iterator[Reason]:
    """Parts that differ from ``expected``, or from the majority's; of two nodes that differ, neither is the odd one."""
    usual = usual_parts(records.hardware) if expected is None else expected
    words = "elsewhere" if expected is None else "expected"
    for node, hardware in records.hardware.items():
        parts = hardware.get("parts", {})
        missing: Facts = {kind: {} for kind in usual if kind != "GPU" and kind not in parts}
        for device, facts in (parts | missing).items():
            for name, wanted in usual.get(_kind(device), {}).items():
                if not _same(facts.get(name), wanted):
                    has = facts.get(name, "unknown" if device in parts else "missing")
                    yield Reason(
                        _where(device, node), f"{name} {has}, {words} {wanted}", _part_state(name)
                    )
    if expected is None and len(records.hardware) == 2:
        one, other = (usual_parts({node: hardware}) for node, hardware in records.hardware.items())
        where = " and ".join(records.hardware)
        for kind, facts in one.items():
            for name, value in facts.items():
                if not _same(value, has := other.get(kind, {}).get(name, "unknown")):
                    yield Reason(
                        f"{kind} of {where}", f"{name} {value} and {has}", _part_state(name)
                    )


def _part_state(name: str) -> str:
    return "warn" if name in VERSIONS else "fail"


def _where(device: str, node: str) -> str:
    return f"{device} {node}" if device == NODE else f"{device} of {node}"


def _kind(device: str) -> str:
    """GPU for every GPU of a node, since they are the same; other devices by name."""
    return "GPU" if device.startswith("GPU ") else device


def _same(one: Any, other: Any) -> bool:
    """Equality; floats within 1%, since firmware reserves different amounts of memory."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0.01)
    return bool(one == other)
