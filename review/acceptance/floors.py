"""What a GPU of its model must have and reach, by floors.yaml: so one machine without peers is
judged too.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from common.accelerators import bf16_tflops, model_of
from common.tables import read_table
from review.acceptance.journal import Reason
from review.acceptance.schema import NODE, Facts

TABLE = read_table(__file__, "floors.yaml")
SHARES = TABLE["shares"]
PAIRS = "device_to_device_memcpy_read_ce"
WHOLE_BOARD = 8  # GPUs
DIRECT = 4  # GPUs of a board that are connected without a switch
# Facts of a GPU and their floor's name; below a setting's floor (True) a site may have meant it: a
# warning.
_FACTS = {
    "memory MiB": ("memory", False),
    "NVLinks": ("links", False),
    "PCIe generation": ("generation", False),
    "PCIe lanes": ("lanes", False),
    "power limit W": ("watts", True),
    "SM MHz": ("mhz", True),
}


def floor_of(name: str | None) -> Mapping[str, Any]:
    """The row of a GPU by the driver's name; empty for a model without one."""
    row: Mapping[str, Any] = TABLE["gpus"].get(model_of(name), {})
    return row


def all_reduce_floor(gpus: list[str], size: float) -> float:
    """Lowest healthy bus bandwidth (GB/s) of an all-reduce in a node with these GPUs; 0 without a
    row.
    """
    # Fewer GPUs may lie on any of a board's connections.
    if len(gpus) != WHOLE_BOARD or len({*gpus}) != 1:
        return 0.0
    row = TABLE["all_reduce"].get(model_of(gpus[0]), {})
    return float(max((row[least] for least in row if least <= size), default=0.0))


def _of_system(node: str, parts: Facts) -> Iterator[Reason]:
    """What a known system or board lacks: GPUs that neither driver nor bus know, and ports."""
    gpus = [facts.get("name") for who, facts in parts.items() if who.startswith("GPU ")]
    of_node = parts.get(NODE, {})
    name = of_node.get("system") or ""
    systems = TABLE["systems"].items()
    system: Mapping[str, Any] = next(
        (row for known, row in systems if re.search(known, name)), {}
    )
    row = system or (TABLE["boards"].get(model_of(gpus[0]), {}) if gpus else {})
    count = of_node.get("GPUs")
    # One that the bus knows has a reason of its own.
    hidden = (of_node.get("GPUs on the PCI bus") or 0) > (count or 0)
    if row and count is not None and count not in row["gpus"] and not hidden:
        has = " or ".join(map(str, row["gpus"]))
        yield Reason(f"node {node}", f"{count} GPUs, {has} expected ({row['source']})")
    fast = [
        who
        for who, facts in parts.items()
        if "rate" in facts and (_rate(facts) or 0) >= system.get("gbits", 0)
    ]
    # A site may have bought fewer, or run them at less.
    if system and len(fast) < system["ports"]:
        message = (
            f"{len(fast)} ports of {system['gbits']} Gbit/s, {system['ports']} expected"
        )
        yield Reason(f"node {node}", f"{message} ({system['source']})", "warn")


def _rate(port: Mapping[str, Any]) -> float | None:
    """Gbit/s at which a port runs."""
    rate = re.match(r"[\d.]+", str(port.get("rate")))
    return float(rate[0]) if rate else None


def below_floors(node: str, parts: Facts, on_cpus: bool) -> Iterator[Reason]:
    """GPUs that lack what their model has, GPUs that no driver runs, and network ports that are not
    up.

    on_cpus: the user asked for a test of the CPUs.
    """
    of_node = parts.get(NODE, {})
    # The PCI bus knows GPUs that a dead driver does not.
    on_bus, seen = of_node.get("GPUs on the PCI bus") or 0, of_node.get("GPUs")
    # None is unknown, which coverage says.
    if not on_cpus and seen is not None and on_bus > seen:
        message = f"the driver runs {seen} of the {on_bus} GPUs on the PCI bus"
        yield Reason(f"node {node}", message)
    if not on_cpus:
        yield from _of_system(node, parts)
    for device, facts in parts.items():
        if device.startswith("GPU "):
            yield from _of_gpu(f"{device} of {node}", facts)
        # Only InfiniBand and RoCE ports have a rate.
        elif "rate" in facts:
            yield from _of_port(f"{device} of {node}", facts, parts)


def _of_gpu(name: str, facts: Mapping[str, Any]) -> Iterator[Reason]:
    floor = floor_of(facts.get("name"))
    for fact, (column, may_be_meant) in _FACTS.items() if floor else ():
        value = facts.get(fact)
        # A fact that the driver does not tell is not judged; coverage says so.
        if value is not None and not value >= floor[column]:
            message = (
                f"{fact} {value}, at least {floor[column]} expected ({floor['source']})"
            )
            yield Reason(name, message, "warn" if may_be_meant else "fail")
    # None is unknown, which coverage says.
    if floor and facts.get("ECC") not in (1, None):
        yield Reason(name, f"ECC is off, on expected ({floor['source']})")


def _of_port(name: str, facts: Mapping[str, Any], parts: Facts) -> Iterator[Reason]:
    """A port without a cable may be meant if no port of its type is up; one that is up half-way
    never is.
    """
    state = facts.get("state")
    # Only ports have a type.
    alike = [part for part in parts.values() if part.get("type") == facts.get("type")]
    if state == "DOWN" and not any(part.get("state") == "ACTIVE" for part in alike):
        yield Reason(name, "is down, as is every port of its type", "warn")
    # DOWN beside ports of its type that work, or up half-way (INIT, ARMED).
    elif state not in ("ACTIVE", None):
        yield Reason(name, f"state {state}, ACTIVE expected")
    rate = _rate(facts)
    if rate is None and facts.get("rate") is not None:
        yield Reason(name, f"rate {facts['rate']}: not a number")
    if state == "ACTIVE" and rate is not None and rate < rated(facts):
        message = f"runs at {rate:g} of the {rated(facts)} Gbit/s that its type has"
        yield Reason(name, message, "warn")


def rated(port: Mapping[str, Any]) -> int:
    """Gbit/s of a port by its type; 0 for an unknown one."""
    return int(TABLE["ports"].get(port.get("type"), 0))


def least(probe: str, gpu: str, peers: int) -> float:
    """Lowest healthy rate of a probe of SHARES (Tflop/s, GB/s) on a GPU, by its name; 0 for an
    unknown model.

    peers: GPUs of its node and model. More than four are connected by switches, through which one
    of them has all links of another; of up to four, each pair may have its own share of the links.
    """
    floor = floor_of(gpu)
    links = floor.get("links", 0) // (1 if peers > DIRECT else DIRECT - 1)
    peaks = {
        PAIRS: links * floor.get("link_gbps", 0.0),
        "copy": floor.get("memory_gbps", 0.0),
    }
    if probe.startswith("matmul"):
        # Without a row nothing is judged, even where the peak is known.
        return float(SHARES[probe] * bf16_tflops(model_of(gpu))) if floor else 0.0
    lane = TABLE["pcie_gbps"].get(floor.get("generation"), 0.0)
    # The other probes copy from or to the host.
    host = floor.get("host_gbps", lane * floor.get("lanes", 0))
    return float(SHARES[probe] * peaks.get(probe, host))
