"""Binds a rank to allowed CPUs near its GPU, and prints the network cards near it for NCCL.

    binding.py PROCESS RANK RANKS      binds PROCESS, local rank RANK of RANKS of this node

BINDING=numa takes all allowed CPUs of the GPU's NUMA node, which its ranks share; exclusive,
separate whole cores of these for each rank; none leaves the launcher's. NIC_BINDING=nearest prints
a value for NCCL_IB_HCA. What cannot be done is a warning. Local rank 0 of the first node (RANK)
shows the whole table. Distances come from sysfs; SYSFS and PROC_STATUS name other trees, for tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

SYSFS = Path(os.environ.get("SYSFS", "/sys"))
MODE = os.environ.get("BINDING") or "numa"


def text_of(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def expand(text: str) -> list[int]:
    """The numbers of a list such as 0-3,8."""
    ends = [part.split("-") for part in text.split(",") if part.strip()]
    return [cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)]


def compress(cpus: Iterable[int]) -> str:
    """The same, the other way."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(
        f"{first}-{last}" if last > first else f"{first}" for first, last in runs
    )


def natural(path: Path) -> list[int | str]:
    """Sorts mlx5_2 before mlx5_10."""
    return [
        int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)
    ]


def allowed() -> set[int]:
    """CPUs without those reserved by Slurm, a container or RESERVED_CPUS."""
    status = text_of(Path(os.environ.get("PROC_STATUS", "/proc/self/status")))
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    reserved = expand(os.environ.get("RESERVED_CPUS", ""))
    return set(expand(found[1] if found else "")).difference(reserved)


def driver_gpus() -> list[list[str]]:
    """Index, UUID and PCI address of each GPU, as the driver numbers them."""
    listed = os.environ.get("TOPOLOGY_GPUS")
    if listed is None:
        query = [
            "nvidia-smi",
            "--query-gpu=index,uuid,pci.bus_id",
            "--format=csv,noheader",
        ]
        try:
            listed = subprocess.run(
                query, capture_output=True, text=True, check=False
            ).stdout
        except OSError:
            listed = ""
    return [line.split(", ") for line in listed.splitlines() if line.count(", ") == 2]


def gpu_of(rank: int, gpus: list[list[str]]) -> str:
    """PCI address (as in sysfs) of a local rank's GPU; empty if there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device = visible[rank] if rank < len(visible) and visible[rank] else str(rank)
    for index, uuid, address in gpus:
        if device in (index, uuid):
            # The driver's PCI domain has 8 digits, that of sysfs 4.
            return address.lower()[-12:]
    # Without the driver's help: in the order of their addresses.
    found = [
        path.name
        for path in sorted((SYSFS / "bus/pci/devices").glob("*"))
        if text_of(path / "vendor") == "0x10de"
        and text_of(path / "class").startswith("0x03")
    ]
    return found[int(device)] if device.isdigit() and int(device) < len(found) else ""


def near(rank: int, ranks: int, gpu: str) -> str:
    """CPUs near a rank's GPU; without one, those of the rank's share of the NUMA nodes."""
    if gpu and (local := text_of(SYSFS / f"bus/pci/devices/{gpu}/local_cpulist")):
        return local
    nodes = sorted((SYSFS / "devices/system/node").glob("node[0-9]*"), key=natural)
    # Others are memory only.
    lists = [cpus for node in nodes if (cpus := text_of(node / "cpulist"))]
    return lists[rank * len(lists) // ranks] if lists else ""


def share(cpus: set[int], index: int, peers: int) -> set[int]:
    """Whole cores: share ``index`` of ``peers``; all if there are fewer cores than that."""
    siblings = "devices/system/cpu/cpu{}/topology/thread_siblings_list"
    # A core is named by its first hardware thread.
    core_of = {
        cpu: min(expand(text_of(SYSFS / siblings.format(cpu))), default=-1)
        for cpu in cpus
    }
    cores = sorted({*core_of.values()} - {-1})
    if len(cores) < peers:
        return cpus
    mine = {
        core
        for number, core in enumerate(cores)
        if number * peers // len(cores) == index
    }
    return {cpu for cpu in cpus if core_of[cpu] in mine}


def cpus_of(rank: int, lists: list[str]) -> set[int]:
    """CPUs of a local rank, of the list of those near each rank; empty if unknown."""
    mine = lists[rank]
    cpus = allowed().intersection(expand(mine))
    if MODE == "exclusive":
        return share(cpus, lists[:rank].count(mine), lists.count(mine))
    return cpus


def nearest_cards(gpu: str) -> list[str]:
    """The active InfiniBand or RoCE cards that share the longest PCI path with a GPU; ties go to
    those of its NUMA node.
    """
    place = SYSFS / "bus/pci/devices" / (gpu or "none")
    mine, distances = place.resolve().parts, {}
    for card in sorted((SYSFS / "class/infiniband").glob("*"), key=natural):
        if not any("ACTIVE" in text_of(state) for state in card.glob("ports/*/state")):
            continue
        path = (card / "device").resolve()
        pairs = zip(mine, path.parts, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        same_node = text_of(path / "numa_node") == text_of(place / "numa_node")
        distances[card.name] = (common, same_node)
    best = max(distances.values(), default=None)
    return [name for name, distance in distances.items() if distance == best]


def show(near_cpus: list[str], gpus: list[list[str]]) -> None:
    """The binding of all ranks of this node, for the log."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    lines = [f"binding {MODE} on {node}"]
    row = "{:>4}  {:<12}  {:>4}  {:<10}  {}"
    lines.append(row.format("rank", "GPU", "NUMA", "NIC", "CPUs"))
    for rank in range(len(near_cpus)):
        gpu = gpu_of(rank, gpus)
        numa = text_of(SYSFS / f"bus/pci/devices/{gpu or 'none'}/numa_node")
        cards = ",".join(nearest_cards(gpu)) or "-"
        cpus = compress(cpus_of(rank, near_cpus)) if MODE != "none" else ""
        lines.append(row.format(rank, gpu or "-", numa, cards, cpus or "as given"))
    say(*lines)


def say(*lines: str) -> None:
    print(*(f"run: {line}" for line in lines), sep="\n", file=sys.stderr)


def main(process: int, rank: int, ranks: int) -> None:
    """Binds the process. Prints NCCL_IB_HCA, if it is to be set."""
    gpus = driver_gpus()
    near_cpus = [near(peer, ranks, gpu_of(peer, gpus)) for peer in range(ranks)]
    if os.environ.get("RANK", "0") == "0":
        show(near_cpus, gpus)
    cpus = cpus_of(rank, near_cpus) if MODE != "none" else set()
    problem = "" if cpus or MODE == "none" else "no CPU near its GPU is allowed here"
    try:
        if cpus:
            os.sched_setaffinity(process, cpus)
    except OSError:
        problem = f"the kernel rejects the CPUs {compress(cpus)}"
    if problem:
        say(f"warning: local rank {rank} is not bound: {problem}")
    wanted = os.environ.get("NIC_BINDING", "none") != "none"
    if not wanted or os.environ.get("NCCL_IB_HCA"):
        return
    gpu = gpu_of(rank, gpus)
    if gpu and (cards := nearest_cards(gpu)):
        print(f"={','.join(cards)}")  # "=": exact names, as mlx5_1 is not mlx5_10
    else:
        who = f"local rank {rank} has no GPU or no active card in sysfs"
        say(f"warning: NIC_BINDING=nearest: {who}: NCCL chooses")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
