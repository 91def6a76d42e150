"""What a test did and did not cover, by area and node: a verdict holds only for what was tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from review.acceptance.floors import floor_of
from review.acceptance.journal import Reason
from review.acceptance.records import Records
from review.acceptance.schema import (
    ALL_NODES,
    COPIES,
    DIAGNOSTIC,
    FIELDS,
    NCCL_TESTS,
    NODE,
    NVBANDWIDTH,
)

NO_GPU = "the test ran on CPUs"
NO_NVML = "no driver, or nvidia-ml-py is not installed"
NOT_RUN = "not installed, or excluded"


def program(tool: str) -> str:
    """The program that a test of another tool belongs to."""
    if tool in COPIES:
        return NVBANDWIDTH
    return tool if tool in (DIAGNOSTIC, NVBANDWIDTH) else NCCL_TESTS


def _has_gpus(records: Records, node: str, table: str) -> bool:
    return any(name.startswith("GPU ") for name in records.hardware.get(node, {}).get(table, {}))


def _inventory(records: Records, node: str) -> str:
    parts = records.hardware.get(node, {}).get("parts", {})
    # Older records have no parts.
    if not parts:
        return "not recorded"
    return "" if records.on_cpus or parts.get(NODE, {}).get("GPUs") else NO_NVML


def _health(records: Records, node: str) -> str:
    if records.on_cpus:
        return NO_GPU
    # The counts before alone cannot show what the test itself did.
    return "" if _has_gpus(records, node, "after") else NO_NVML


def _kernel_log(records: Records, node: str) -> str:
    hardware = records.hardware.get(node, {})
    log = hardware.get("kernel_log", {})
    if log.get("lines") is None:
        return "this user may not read it"
    # Seconds since boot. The log was read after the test began, in the same boot, and its first
    # line is later still: the kernel's buffer has gone round.
    cut_off = log["read"] >= hardware.get("uptime", 0.0) < log["first"]
    return "its lines of the test are overwritten" if cut_off else ""


def _telemetry(records: Records, node: str) -> str:
    if records.on_cpus:
        return NO_GPU
    table = records.telemetry.get(node, {})
    heard = any((~np.isnan(table[field])).any() for field in FIELDS if field in table)
    return "" if heard else NO_NVML


def _datasheet(records: Records, node: str) -> str:
    if records.on_cpus:
        return NO_GPU
    parts = records.hardware.get(node, {}).get("parts", {})
    names = {str(facts.get("name")) for gpu, facts in parts.items() if gpu.startswith("GPU ")}
    unknown = sorted(name for name in names if not floor_of(name))
    return f"no figures of {', '.join(unknown)}" if unknown else "" if names else NO_NVML


def _network(records: Records, _: str) -> str:
    return "" if len(records.nodes) > 1 and "together" in records.stages else "one node"


def _disk(records: Records, node: str) -> str:
    ranks = [rank for rank, place in records.places.items() if place.node == node]
    read = np.isin(records.measured("disk")["rank"], ranks).any()
    return "" if read else "no data set is configured"


def _tool(name: str) -> Callable[[Records, str], str]:
    def untested(records: Records, node: str) -> str:
        ran = [one["name"] for one in records.tools.get(node, [])]
        # A program counts as run if it left any record, of whatever test.
        return "" if any(program(one) == name for one in ran) else NOT_RUN

    return untested


# Area, as REQUIRED_TESTS names it: its label and why it was not tested on a node ("": it was).
AREAS: dict[str, tuple[str, Callable[[Records, str], str]]] = {
    "inventory": ("inventory", _inventory),
    "datasheet": ("the GPU model's figures", _datasheet),
    "health": ("health of GPUs", _health),
    "kernel_log": ("kernel log", _kernel_log),
    "telemetry": ("telemetry of GPUs", _telemetry),
    "network": ("network between nodes", _network),
    "disk": ("read of the data set", _disk),
    "nccl": (NCCL_TESTS, _tool(NCCL_TESTS)),
    "nvbandwidth": (NVBANDWIDTH, _tool(NVBANDWIDTH)),
    "dcgmi": (f"{DIAGNOSTIC} diag", _tool(DIAGNOSTIC)),
}


def untested(records: Records) -> dict[str, dict[str, str]]:
    """Why each area was not tested, by node; empty for one that was tested on every node."""
    found = {}
    for area, (_, why) in AREAS.items():
        reasons = {node: why(records, node) for node in records.nodes}
        found[area] = {node: reason for node, reason in reasons.items() if reason}
    # A single node runs such a test for all.
    if any(tool["name"].endswith(ALL_NODES) for tool in records.reports):
        found["nccl"] = {}
    return found


def tested_areas(records: Records) -> list[str]:
    """Labels of areas that were tested on some node."""
    left = untested(records)
    return [AREAS[area][0] for area, nodes in left.items() if len(nodes) < len(records.nodes)]


def lines(records: Records) -> list[str]:
    """Each area that was not tested, with the nodes if others were, and why; then unknown facts."""
    areas = [f"{label} ({why})" for label, why in _areas(records)]
    return areas + _unknown_facts(records)


def short(records: Records) -> str:
    """Areas that were not tested, by reason; on CPUs without those of GPUs."""
    # Grouped by reason, as this is for one line.
    labels: dict[str, list[str]] = {}
    for label, why in _areas(records):
        if why != NO_GPU:
            labels.setdefault(why, []).append(label)
    return ", ".join(f"{', '.join(own)} ({why})" for why, own in labels.items())


def _areas(records: Records) -> Iterator[tuple[str, str]]:
    """(label, with the nodes if it was tested on others; why) of each area that was not tested."""
    for area, nodes in untested(records).items():
        for why in dict.fromkeys(nodes.values()):
            of_nodes = [node for node, reason in nodes.items() if reason == why]
            where = "" if len(of_nodes) == len(records.nodes) else f" on {', '.join(of_nodes)}"
            yield f"{AREAS[area][0]}{where}", why


def _unknown_facts(records: Records) -> list[str]:
    """What a driver or the system was asked for and did not say, of all devices of a kind together."""
    found = [
        f"{name} of {device.partition(' ')[0]} (not reported)"
        for hardware in records.hardware.values()
        for table in ("parts", "after")
        for device, facts in hardware.get(table, {}).items()
        for name, value in facts.items()
        if value is None
    ]
    return [*dict.fromkeys(found)]


def missing(records: Records, required: Sequence[str]) -> list[Reason]:
    """Failures for what a config or site demands and the test did not cover."""
    left = untested(records)
    return [
        Reason(f"node {node}", f"{AREAS[area][0]}: required, not tested: {why}")
        for area in required
        for node, why in left[area].items()
    ]
