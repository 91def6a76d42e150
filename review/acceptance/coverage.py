"""What a test did and did not cover, by area and node: a verdict holds only for what was tested."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from review.acceptance.faults import family, log_began
from review.acceptance.floors import floor_of, rated
from review.acceptance.journal import Reason
from review.acceptance.records import Records, known
from review.acceptance.schema import (
    ALL_NODES,
    COPIES,
    DIAGNOSTIC,
    FIELDS,
    LABELS,
    NCCL_TESTS,
    NODE,
    NVBANDWIDTH,
    TABLES,
    TOOLS,
)

# Label of each area that REQUIRED_TESTS may name.
AREAS = TABLES["areas"]
# Program of an area, and figures that judge one.
PROGRAMS = {"nccl": NCCL_TESTS, "nvbandwidth": NVBANDWIDTH, "dcgmi": DIAGNOSTIC}
FIGURES = TABLES["judged_by"] | {"nccl": {*TOOLS} - {*COPIES}}
OPTIONAL = {*TABLES["optional"], *TABLES["port_counters"]}
# Areas that need a rank on every GPU.
OF_EVERY_GPU = ("telemetry", "datasheet", "nvbandwidth", "nccl")
# Areas that the telemetry of a burn-in and the counts after it belong to.
OF_BURN_IN = ("health", "kernel_log", "telemetry")
UNJUDGED = "measured, nothing to judge it by"
NO_GPU = "the test ran on CPUs"
NO_NVML = "no driver, or nvidia-ml-py is not installed"


class Gap(NamedTuple):
    """What was not tested on a node, and why. areas: those that are not fully tested without it."""

    node: str
    what: str
    why: str
    areas: tuple[str, ...] = ()


def program(tool: str) -> str:
    """The program that a test of another tool belongs to."""
    if tool in COPIES:
        return NVBANDWIDTH
    return tool if tool in (DIAGNOSTIC, NVBANDWIDTH) else NCCL_TESTS


def _untested(records: Records, node: str) -> dict[str, str]:
    """Why areas were not tested on a node."""
    hardware, parts = records.hardware.get(node, {}), records.parts(node)
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
    if "disk" not in records.probed or records.lacks(node, "disk"):
        reasons["disk"] = "no data set is configured, or CERTIFY_DISK=0"
        if data := hardware.get("data_set"):
            reasons["disk"] = (
                "{name} has {blocks} blocks of 4 MiB, {needed} are needed on every node"
            ).format(**data)
    for area, name in PROGRAMS.items():
        # A program counts as run if it left any record, of whatever test. A single node runs those
        # over all nodes.
        ran = [
            one
            for at, reports in records.tools.items()
            for one in reports
            if program(one["name"]) == name
            and (at == node or one["name"].endswith(ALL_NODES))
        ]
        if not ran:
            reasons[area] = "not installed, or excluded"
        elif all({*COPIES} <= {*one["skipped"]} for one in ran):
            reasons[area] = "it skipped every test"
    return reasons


def _untested_gpus(records: Records, node: str) -> dict[str, str]:
    models = {
        str(facts.get("name"))
        for gpu, facts in records.parts(node).items()
        if gpu.startswith("GPU ")
    }
    unknown = sorted(name for name in models if not floor_of(name))
    reasons = {}
    if not models or unknown:
        reasons["datasheet"] = (
            f"no figures of {', '.join(unknown)}" if models else NO_NVML
        )
    # The counts before alone cannot show what the test itself did.
    after = records.hardware.get(node, {}).get("after", {})
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


def gaps(
    records: Records, judged: Mapping[str, bool], repeats: bool, burnt: bool = False
) -> list[Gap]:
    """All that was not tested, by node. judged: whether each measured figure has a limit; repeats:
    whether weights could be compared; burnt: whether a burn-in is over.
    """
    found: list[Gap] = []
    for node in records.nodes:
        reasons = _untested(records, node)
        found += _left_out(records, node, reasons)
        if burnt and not (records.folder / f"burn_in_{node}.npz").exists():
            what = "telemetry of the burn-in"
            found.append(Gap(node, what, "not recorded", OF_BURN_IN))
        if not repeats:
            reasons["corruption"] = "steps do not repeat bit for bit on this system"
        for area, names in FIGURES.items():
            if not any(judged.get(name) for name in names):
                reasons.setdefault(area, UNJUDGED)
        found += [Gap(node, AREAS[area], why, (area,)) for area, why in reasons.items()]
        found += [
            Gap(node, LABELS[name], UNJUDGED)
            for name, limited in judged.items()
            if not limited
        ]
        found += _unknown_facts(records, node)
        for tool in records.tools.get(node, []):
            name = program(tool["name"])
            areas = tuple(area for area, own in PROGRAMS.items() if own == name)
            found += [
                Gap(node, LABELS.get(test, test), f"skipped by {name}", areas)
                for test in tool["skipped"]
            ]
    return list(dict.fromkeys(found))


def _left_out(records: Records, node: str, areas: Iterable[str]) -> Iterator[Gap]:
    """What only other nodes measured, and GPUs without a rank. areas: not tested at all."""
    for name in records.probed:
        own = {area for area, names in FIGURES.items() if name in names}
        if records.lacks(node, name) and not own & {*areas}:
            yield Gap(node, LABELS[name], "measured on other nodes only", tuple(own))
    gpus = records.parts(node).get(NODE, {}).get("GPUs") or 0
    without = gpus - sum(info.node == node for info in records.ranks.values())
    if without > 0 and not records.on_cpus:
        what = f"{without} of its {gpus} GPUs"
        yield Gap(node, what, "no rank ran on them", OF_EVERY_GPU)


def tested_areas(records: Records, found: Sequence[Gap]) -> list[str]:
    """Labels of areas that were tested on some node."""
    left = [gap.what for gap in found]
    count = len(records.nodes)
    return [label for label in AREAS.values() if left.count(label) < count]


def short(records: Records, found: Sequence[Gap]) -> str:
    """Gaps by reason; on CPUs without those of GPUs."""
    # Grouped by reason, as this is for one line.
    labels: dict[str, list[str]] = {}
    for what, why in merged(records, found):
        if why != NO_GPU:
            labels.setdefault(why, []).append(what)
    return ", ".join(f"{', '.join(whats)} ({why})" for why, whats in labels.items())


def merged(records: Records, found: Sequence[Gap]) -> Iterator[tuple[str, str]]:
    """Each gap once, with its nodes if others have none, and why."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for gap in found:
        nodes.setdefault((gap.what, gap.why), []).append(gap.node)
    for (what, why), own in nodes.items():
        on = "" if len(own) == len(records.nodes) else f" on {', '.join(own)}"
        yield f"{what}{on}", why


def _unknown_facts(records: Records, node: str) -> Iterator[Gap]:
    """What a driver or the system was asked for and did not say."""
    tables = dict(records.hardware.get(node, {}))
    # A node without any is an area that was not tested; one without an Xid has no last one.
    if heard := _heard(records, node):
        heard |= {"xid_last"}
        fields = {field: True if field in heard else None for field in FIELDS}
        tables["telemetry"] = {"telemetry": fields}
    for table, areas in TABLES["areas_of_facts"].items():
        for device, facts in tables.get(table, {}).items():
            for name, value in facts.items():
                if value is None:
                    lacking = () if name in OPTIONAL else tuple(areas)
                    yield Gap(
                        node, f"{name} of {family(device)}", "not reported", lacking
                    )
            # Only InfiniBand and RoCE ports have a rate.
            if "rate" in facts and not rated(facts):
                rating = f"rated speed of {family(device)} ({facts.get('type')})"
                yield Gap(node, rating, "not reported")


def _heard(records: Records, node: str) -> set[str]:
    """Fields that some GPU of the node reported."""
    columns = records.telemetry.get(node, {}).items()
    return {
        field for field, column in columns if field in FIELDS and len(known(column))
    }


def missing(found: Sequence[Gap], required: Sequence[str]) -> list[Reason]:
    """Failures for what a config or site demands and the test did not cover."""
    return [
        Reason(f"node {gap.node}", f"{gap.what}: required, not tested: {gap.why}")
        for gap in found
        if {*gap.areas} & {*required}
    ]
