"""Faults other than slowness: differing weights (silent data corruption), device errors, odd
parts.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.durations import duration
from review.acceptance.floors import below_floors
from review.acceptance.journal import Reason, listed
from review.acceptance.records import Records, known, median
from review.acceptance.schema import (
    ALL_NODES,
    ALONE,
    FIELDS,
    NODE,
    STAGES,
    TABLES,
    XID,
    Columns,
    Facts,
)

MIN_SAMPLES = 5
MIN_SHARE = 0.05  # of the time
# Fail if they grow; other port counters: warn.
LINK_CHANGES = "link_downed", "carrier_changes"
# Warn if they differ; others: fail.
VERSIONS = TABLES["versions"]
OWN = TABLES["own"]  # of each part another
# Anew for each sample.
ASKED = [field for field in FIELDS if not field.startswith("xid_")]
GONE_SECONDS = 5.0  # without a sample at the end of the telemetry
DAY = 86400.0  # seconds


@dataclass(frozen=True)
class Corruption:
    """A rank whose weights differ from the majority's, from a step on."""

    name: str
    stage: str
    round: int
    step: int

    def reason(self) -> Reason:
        where = f"first in step {self.step + 1} of round {self.round + 1}"
        message = f"its weights differ from those of other ranks or rounds, {where}"
        return Reason(self.name, message, stage=STAGES[self.stage])


def corrupt(records: Records) -> tuple[list[Corruption], bool]:
    """Ranks that computed something else, each once, and whether anything could be compared.

    All took the same steps from the same weights. More than half of those that should agree must do
    so; otherwise the load is not reproducible on this system and proves nothing.
    """
    differing: dict[int, Corruption] = {}
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
            if checks != common and rank not in differing:
                same = [a == b for a, b in zip(checks, common, strict=True)]
                differing[rank] = Corruption(
                    records.ranks[rank].name, stage, number, same.index(False)
                )
    return [differing[rank] for rank in sorted(differing)], comparable


def _groups(records: Records) -> list[list[tuple[str, int, int, list[int]]]]:
    """Groups of rounds that should agree: (stage, rank, round, checksum after each step)."""
    groups: list[list[tuple[str, int, int, list[int]]]] = [[]]
    for stage in records.stages:
        checksums = records.by_step(stage, "checksum", missing=0)
        # nan marks the steps that a rank did not take.
        steps = np.sum(~np.isnan(records.by_step(stage, "data")), axis=2)
        by_rank: list[list[tuple[str, int, int, list[int]]]] = [
            [] for _ in records.ranks
        ]
        for rank, number in np.argwhere(steps).tolist():
            checks = checksums[rank, number, : steps[rank, number]].tolist()
            by_rank[rank].append((stage, rank, number, checks))
        everyone = [checks_of_round for rounds in by_rank for checks_of_round in rounds]
        # Alone, ranks take the same steps from the same weights
        # in all rounds: one group over both stages.
        if stage in ALONE:
            groups[0] += everyone
        else:
            groups += by_rank
        if stage == "together":  # every rank has all weights
            groups.append(everyone)
    return [group for group in groups if group]


def gpu_faults(records: Records) -> Iterator[Reason]:
    """Throttling, errors and narrow buses of all GPUs; none where a driver reports nothing."""
    gpus = list(devices(records))
    read = {
        field for _, samples in gpus for field in ASKED if len(known(samples[field]))
    }
    for name, samples in gpus:
        yield from _silent(name, samples, read)
        if reasons := throttled(samples):
            yield Reason(name, reasons, "warn")
        for field, (events, state) in TABLES["counters"].items():
            counts = known(samples[field])
            # A counter restarts with its process or driver; ours of Xid errors starts at 0.
            before = np.concatenate(
                [[0.0] if field == "xid_count" else counts[:1], counts[:-1]]
            )
            more = float(np.sum(np.where(counts < before, counts, counts - before)))
            if more > 0:
                which = ""
                if field == "xid_count":
                    for xid in known(samples["xid_last"])[-1:]:
                        which = f", the last Xid {xid:.0f}"
                    state = "warn" if _only_mild(samples) else state
                yield Reason(name, f"{more:.0f} {events} during the test{which}", state)
        for field, what in TABLES["buses"].items():
            # An idle bus is slower to save power, so that the highest value seen counts.
            now = max(known(samples[field]), default=np.nan)
            most = max(known(samples[f"{field}_most"]), default=np.nan)
            if now < most:  # False for nan
                message = (
                    f"{what}: {now:.0f} of the {most:.0f} that GPU and slot support"
                )
                yield Reason(name, message, "warn")


def _only_mild(samples: Columns) -> bool:
    """Whether every Xid is known, since at most one came with a sample, and is an application's."""
    more = np.diff(known(samples["xid_count"]), prepend=0.0)
    seen = {*known(samples["xid_last"]).astype(int).tolist()}
    return bool((more <= 1).all()) and bool(seen) and seen <= {*TABLES["mild_xids"]}


def _silent(name: str, samples: Columns, read: set[str]) -> Iterator[Reason]:
    """A GPU that stopped reporting, or does not report what others do. read: fields that some GPU
    reports.
    """
    # No GPU tells anything: then the library is missing, which coverage says.
    if not read:
        return
    heard = np.any([~np.isnan(samples[field]) for field in ASKED], axis=0)
    if not heard.any():
        yield Reason(name, "reports nothing, other GPUs do")
        return
    last = float(samples["time"][heard][-1])
    if float(samples["time"][-1]) - last >= GONE_SECONDS:
        after = duration(last - float(samples["time"][0]))
        yield Reason(name, f"reported nothing any more {after} after the start")
    if missing := [
        field for field in ASKED if field in read and not len(known(samples[field]))
    ]:
        yield Reason(name, f"{', '.join(missing)} cannot be read, of other GPUs it can")


def devices(records: Records) -> Iterator[tuple[str, Columns]]:
    """Name of each GPU's rank, and its samples."""
    for info in records.ranks.values():
        table = records.telemetry.get(info.node)
        if table is not None:
            chosen = table["device"] == info.local_rank
            if chosen.any():
                yield (
                    info.name,
                    {field: column[chosen] for field, column in table.items()},
                )


def throttled(samples: Columns) -> str:
    """Why and how often a GPU throttles; empty if it does not."""
    masks = known(samples["throttle"]).astype(np.int64)
    if len(masks) < MIN_SAMPLES:
        return ""
    shares = {
        reason: float(np.mean((masks & bit) != 0))
        for bit, reason in TABLES["throttling"].items()
    }
    reasons = [
        f"{reason} {share:.0%} of the time"
        for reason, share in shares.items()
        if share >= MIN_SHARE
    ]
    if not reasons:
        return ""
    return f"throttles: {', '.join(reasons)}, at {median(samples['sm_mhz']):,.0f} MHz"


def device_history(records: Records) -> Iterator[Reason]:
    """Faults that devices count, by whether they grew during the test, and devices that are gone at
    its end.
    """
    for node, hardware in records.hardware.items():
        before, after = hardware.get("before", {}), hardware.get("after", {})
        for device in dict.fromkeys((*before, *after)):
            where = _where(device, node)
            if device not in after:
                yield Reason(where, "gone at the end of the test")
                continue
            for name, count in after[device].items():
                yield from _counted(
                    where, device, name, before.get(device, {}).get(name), count
                )
        yield from _kernel_log(node, hardware)


def unseen_data(records: Records) -> Iterator[Reason]:
    """Nodes that do not see the data set that others see."""
    sets = {node: own.get("data_set") for node, own in records.hardware.items()}
    seen = any(data and data["blocks"] for data in sets.values())
    for node, data in sets.items():
        if seen and data and not data["blocks"]:
            message = f"{data['name']} is not there, on other nodes it is"
            yield Reason(f"node {node}", message)


def _counted(
    where: str, device: str, name: str, old: Any, now: Any
) -> Iterator[Reason]:
    """What a counter says. old, now: None if it could not be read before or after the test."""
    if now is None:
        if old is not None:
            yield Reason(where, f"{name} can no longer be read")
        return
    # Nothing is known to be new in a counter that could not be read before.
    more = 0 if old is None else now - old
    more = now if more < 0 else more  # a counter restarts with its driver
    if now == TABLES["saturated"].get(name):
        # What it does not count any more is unknown.
        message = f"{name} stands at {now}, its largest value: look at the link, and set it to 0"
        yield Reason(where, message, "warn")
    if not device.startswith("GPU "):
        if more:
            state = "fail" if name in LINK_CHANGES else "warn"
            yield Reason(where, f"{name} grew by {more} during the test", state)
    elif more:
        yield Reason(where, f"{now} {name}, {more} of them during the test")
    elif now:
        yield Reason(
            where,
            f"{now} {name}, before the test",
            TABLES["remembered"].get(name, "warn"),
        )


def _kernel_log(node: str, hardware: Mapping[str, Any]) -> Iterator[Reason]:
    """Faults of the kernel log, one line for each kind: those of the test, and older ones with
    their age, and what to do. State pass: over for more than a day.
    """
    log = hardware.get("kernel_log") or {}
    began = log_began(hardware)
    times_of: dict[tuple[str, str, str, bool], list[float]] = {}
    for at, line in _events(log.get("lines") or ()):
        times_of.setdefault(_meaning(line), []).append(at)
    for (fault, state, action, passes), times in times_of.items():
        during = [at for at in times if at > began]
        when = " during the test"
        if not during:
            age = log["read"] - max(times)
            when = f", the last {duration(age)} ago"
            # What needs a reset, a repair or another part counts until the node's next start.
            state = "pass" if passes and age > DAY else "warn"
        said = f"{len(during or times)} {fault} in the kernel log{when}"
        yield Reason(f"node {node}", said, state, evidence=action)


def _events(lines: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """A line for each event: those of one SXid, or of one machine check, come within a second, and
    one of them tells its severity.
    """
    groups: list[list[tuple[float, str]]] = []
    latest: dict[object, list[tuple[float, str]]] = {}
    for at, line in lines:
        sxid = re.search(r"SXid \((.*?)\): (\d+)", line)
        is_check = "Hardware Error]: " in line and "severity: " not in line
        key = sxid.groups() if sxid else "machine check"
        group = latest.get(key, [])
        # False for times that could not be read: infinity less infinity.
        if not group or at - group[0][0] > 1 or not (sxid or is_check):
            group = []
            groups.append(group)
        group.append((at, line))
        if sxid or is_check:
            latest[key] = group
    for group in groups:
        worst = [one for one in group if re.search(r"\bFatal|Uncorrected", one[1])]
        mild = [one for one in group if re.search("Non-fatal|Corrected", one[1])]
        # An event whose lines do not tell is as bad as it may be.
        yield (worst or mild or group)[0]


def log_began(hardware: Mapping[str, Any]) -> float:
    """Time of the kernel log's last line before the test, by its own clock, which drifts from the
    uptime's; -inf if the node has started again since, or may have.
    """
    before, log = hardware.get("log_before") or {}, hardware.get("kernel_log") or {}
    if not log.get("boot") or before.get("boot") != log["boot"]:
        return -math.inf
    # An empty log or one that could not be read has no last line.
    return float(before.get("last") or before.get("read") or -math.inf)


def _meaning(line: str) -> tuple[str, str, str, bool]:
    """(what, state during the test, what to do, whether it passes) of a line of the kernel log."""
    if xid := re.search(XID, line):
        number = int(xid[2])
        actions = TABLES["xid_actions"].items()
        action = next((do for do, xids in actions if number in xids), "report it")
        state = "warn" if number in TABLES["mild_xids"] else "fail"
        return f"Xid {number} of {xid[1]}", state, action, "application" in action
    for pattern, (fault, state, action, *passes) in TABLES["kernel_log"].items():
        if re.search(pattern, line):
            return fault, state, action, bool(passes)
    # Only lines of known faults are recorded: this one is from another version.
    return line, "fail", "", False


def tool_faults(records: Records) -> Iterator[Reason]:
    """Faults found by other programs, and programs that measured nothing."""
    for node, tools in records.tools.items():
        for tool in tools:
            name = tool["name"]
            for device, state, fault in tool["faults"]:
                where = (
                    name if name.endswith(ALL_NODES) else f"{device or name} of {node}"
                )
                yield Reason(where, fault, state, stage=name if device else "")


def usual_parts(hardware: Mapping[str, Mapping[str, Facts]]) -> Facts:
    """Parts of more than half of the nodes; of GPUs, of more than half of all GPUs, under the name
    GPU.
    """
    usual: Facts = {}
    for (kind, name), values in _told(hardware).items():
        given = [value for value in values.values() if value is not None]
        sides = _sides(dict(enumerate(given)))
        common = max(sides, key=lambda value: len(sides[value]), default=None)
        # What most nodes lack is not usual.
        if given and 2 * len(sides[common]) > max(len(given), len(hardware)):
            usual.setdefault(kind, {})[name] = common
    return usual


def _told(
    hardware: Mapping[str, Mapping[str, Facts]],
) -> dict[tuple[str, str], dict[str, Any]]:
    """What each device says of a fact, by kind of device and the fact's name."""
    by_fact: dict[tuple[str, str], dict[str, Any]] = {}
    for node, facts_of in hardware.items():
        for device, facts in facts_of.get("parts", {}).items():
            for name, value in facts.items():
                if name not in OWN:
                    of_fact = by_fact.setdefault((kind_of(device), name), {})
                    of_fact[_where(device, node)] = value
    return by_fact


def _sides(values: Mapping[Any, Any]) -> dict[Any, list[Any]]:
    """Who says each value; floats within 1% are one."""
    sides: dict[Any, list[Any]] = {}
    for who, value in values.items():
        side = next((known for known in sides if _same(known, value)), value)
        sides.setdefault(side, []).append(who)
    return sides


def odd_parts(records: Records, expected: Facts | None = None) -> Iterator[Reason]:
    """Parts that differ from the majority's, from ``expected``, or from what the GPU's model has.

    Without a majority, nobody is the odd one.
    """
    usual = usual_parts(records.hardware)
    yield from _differences(records, usual, "elsewhere")
    if expected:
        yield from _differences(records, expected, "expected")
    for node, hardware in records.hardware.items():
        yield from below_floors(node, hardware.get("parts", {}), records.on_cpus)
    for (kind, name), values in _told(records.hardware).items():
        # Each GPU that is missing is so by a fact of its node.
        nodes = () if kind == "GPU" else records.hardware
        every = dict.fromkeys([_where(kind, node) for node in nodes], "missing")
        sides = _sides(every | values)
        most = max(map(len, sides.values()))
        if name not in usual.get(kind, {}) and 2 * most <= len(every | values):
            message = " and ".join(
                f"{'unknown' if value is None else value} ({listed(who)})"
                for value, who in sides.items()
            )
            where = f"{kind} of {', '.join(records.hardware)}"
            yield Reason(where, f"{name} {message}", _part_state(name))


def _differences(records: Records, usual: Facts, origin: str) -> Iterator[Reason]:
    """origin: where the facts of ``usual`` are from."""
    for node, hardware in records.hardware.items():
        parts = hardware.get("parts", {})
        missing: Facts = {
            kind: {} for kind in usual if kind not in {*parts, *map(kind_of, parts)}
        }
        for device, facts in (parts | missing).items():
            # An expected inventory may name a single GPU.
            of_device = usual.get(kind_of(device), {}) | usual.get(device, {})
            for name, wanted in of_device.items():
                has = facts.get(name)
                if not _same(has, wanted):
                    known_of = device in parts or device.startswith("GPU")
                    none = "unknown" if known_of else "missing"
                    shown = none if has is None else has
                    message = f"{name} {shown}, {origin} {wanted}"
                    yield Reason(_where(device, node), message, _part_state(name))


def _part_state(name: str) -> str:
    return "warn" if name in VERSIONS else "fail"


def _where(device: str, node: str) -> str:
    return f"{device} {node}" if device == NODE else f"{device} of {node}"


def kind_of(device: str) -> str:
    """GPU for every GPU of a node, since they are the same; other devices by name."""
    return "GPU" if device.startswith("GPU ") else device


def family(device: str) -> str:
    """GPU, DIMM, mlx5, eth: what devices that only differ by their number have in common."""
    return re.split(r"[ _/]|\d+$", device)[0]


def _same(one: Any, other: Any) -> bool:
    """Equality; floats within 1%, since firmware reserves different amounts of memory."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0.01)
    return bool(one == other)
