"""What a test did and did not cover, by area and node: a verdict holds only for what was tested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from review.acceptance.faults import log_began
from review.acceptance.floors import floor_of, rated
from review.acceptance.journal import Reason
from review.acceptance.records import Records, known
from review.acceptance.schema import (
    ALL_NODES,
    COPIES,
    DIAGNOSTIC,
    FIELDS,
    NCCL_TESTS,
    NODE,
    NVBANDWIDTH,
)

# Area, as REQUIRED_TESTS names it, and its label.
AREAS = {
    "inventory": "inventory",
    "datasheet": "the GPU model's figures",
    "health": "health of GPUs",
    "kernel_log": "kernel log",
    "telemetry": "telemetry of GPUs",
    "network": "network between nodes",
    "disk": "read of the data set",
    "nccl": NCCL_TESTS,
    "nvbandwidth": NVBANDWIDTH,
    "dcgmi": f"{DIAGNOSTIC} diag",
}
NO_GPU = "the test ran on CPUs"
NO_NVML = "no driver, or nvidia-ml-py is not installed"


def program(tool: str) -> str:
    """The program that a test of another tool belongs to."""
    if tool in COPIES:
        return NVBANDWIDTH
    return tool if tool in (DIAGNOSTIC, NVBANDWIDTH) else NCCL_TESTS


def _untested(records: Records, node: str) -> dict[str, str]:
    """Why areas were not tested on a node."""
    hardware = records.hardware.get(node, {})
    parts = hardware.get("parts", {})
    reasons = {}
    if not (records.on_cpus or parts.get(NODE, {}).get("GPUs")):
        reasons["inventory"] = NO_NVML
    if not parts:
        reasons["inventory"] = "not recorded"
    if records.on_cpus:
        reasons |= dict.fromkeys(("datasheet", "health", "telemetry"), NO_GPU)
    else:
        reasons |= _untested_gpus(records, node)
    log = hardware.get("kernel_log", {})
    if log.get("lines") is None:
        reasons["kernel_log"] = "this user may not read it"
    # The first line left is later than the last one before the test: the kernel's buffer has gone
    # round, or the node has started again.
    elif log_began(hardware) < log["first"]:
        reasons["kernel_log"] = "its lines of the test are overwritten"
    if len(records.nodes) < 2 or "together" not in records.stages:
        reasons["network"] = "one node"
    ranks = [rank for rank, info in records.ranks.items() if info.node == node]
    if not np.isin(records.measured("disk")["rank"], ranks).any():
        reasons["disk"] = "no data set is configured, it is small, or CERTIFY_DISK=0"
    programs = {"nccl": NCCL_TESTS, "nvbandwidth": NVBANDWIDTH, "dcgmi": DIAGNOSTIC}
    for area, name in programs.items():
        # A program counts as run if it left any record, of whatever test.
        ran = [
            one for one in records.tools.get(node, []) if program(one["name"]) == name
        ]
        if not ran:
            reasons[area] = "not installed, or excluded"
        elif all({*COPIES} <= {*one["skipped"]} for one in ran):
            reasons[area] = "it skipped every test"
    return reasons


def _untested_gpus(records: Records, node: str) -> dict[str, str]:
    hardware = records.hardware.get(node, {})
    parts = hardware.get("parts", {})
    models = {
        str(facts.get("name")) for gpu, facts in parts.items() if gpu.startswith("GPU ")
    }
    unknown = sorted(name for name in models if not floor_of(name))
    reasons = {}
    if not models or unknown:
        reasons["datasheet"] = (
            f"no figures of {', '.join(unknown)}" if models else NO_NVML
        )
    # The counts before alone cannot show what the test itself did.
    after = hardware.get("after", {})
    counts = [
        own.values() for device, own in after.items() if device.startswith("GPU ")
    ]
    if not counts:
        reasons["health"] = NO_NVML
    elif any(all(count is None for count in own) for own in counts):
        reasons["health"] = "not reported"
    if not _heard(records, node):
        reasons["telemetry"] = NO_NVML
    return reasons


def untested(records: Records) -> dict[str, dict[str, str]]:
    """Why each area was not tested, by node; empty for one that was tested on every node."""
    reasons = {node: _untested(records, node) for node in records.nodes}
    found = {
        area: {
            node: by_area[area] for node, by_area in reasons.items() if area in by_area
        }
        for area in AREAS
    }
    # A single node runs such a test for all.
    if any(tool["name"].endswith(ALL_NODES) for tool in records.reports):
        found["nccl"] = {}
    return found


def tested_areas(records: Records) -> list[str]:
    """Labels of areas that were tested on some node."""
    left = untested(records)
    return [
        AREAS[area] for area, nodes in left.items() if len(nodes) < len(records.nodes)
    ]


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
    return ", ".join(f"{', '.join(areas)} ({why})" for why, areas in labels.items())


def _areas(records: Records) -> Iterator[tuple[str, str]]:
    """(label, with the nodes if it was tested on others; why) of each area that was not tested."""
    for area, nodes in untested(records).items():
        for why in dict.fromkeys(nodes.values()):
            of_nodes = [node for node, reason in nodes.items() if reason == why]
            yield f"{AREAS[area]}{_on(records, of_nodes)}", why


def _unknown_facts(records: Records) -> list[str]:
    """What a driver or the system was asked for and did not say, of all devices of a kind
    together, with the nodes if others told it.
    """
    silent: dict[str, list[str]] = {}
    for node in records.nodes:
        for name in dict.fromkeys(_unknown_of(records, node)):
            silent.setdefault(name, []).append(node)
    return [
        f"{name}{_on(records, nodes)} (not reported)" for name, nodes in silent.items()
    ]


def _unknown_of(records: Records, node: str) -> Iterator[str]:
    hardware = records.hardware.get(node, {})
    for table in ("parts", "before", "after"):
        for device, facts in hardware.get(table, {}).items():
            for name, value in facts.items():
                if value is None:
                    yield f"{name} of {device.partition(' ')[0]}"
    for device, facts in hardware.get("parts", {}).items():
        # Only InfiniBand and RoCE ports have a rate.
        if "rate" in facts and not rated(facts):
            yield f"rated speed of {device} ({facts.get('type')})"
    # A node without any is an area that was not tested; one without an Xid has no last one.
    if heard := _heard(records, node):
        silent = [field for field in FIELDS if field not in heard | {"xid_last"}]
        yield from (f"{field} of telemetry" for field in silent)


def _heard(records: Records, node: str) -> set[str]:
    """Fields that some GPU of the node reported."""
    columns = records.telemetry.get(node, {}).items()
    return {
        field for field, column in columns if field in FIELDS and len(known(column))
    }


def _on(records: Records, nodes: Sequence[str]) -> str:
    """Names the nodes if others differ."""
    return "" if len(nodes) == len(records.nodes) else f" on {', '.join(nodes)}"


def missing(records: Records, required: Sequence[str]) -> list[Reason]:
    """Failures for what a config or site demands and the test did not cover."""
    left = untested(records)
    return [
        Reason(f"node {node}", f"{AREAS[area]}: required, not tested: {why}")
        for area in required
        for node, why in left[area].items()
    ]
