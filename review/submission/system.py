"""`system`: writes systems/NAME.json, the system description that every result needs.

A field is taken from the first of: --set FIELD=VALUE, the answers file, the file being updated, the
files of a run (--run), this machine's commands and files. Unknown fields stay blank if the rules
allow it, and are listed; counts may not, since the official tools crash on blank ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import ERROR, ReviewError, write_whole
from review.logs.tree import read_json, run
from review.rulebook import official
from review.rulebook.compliance import DEFAULT_RULESET
from review.rulebook.description import (
    ASKED,
    BLANK,
    COUNTS,
    FIELDS,
    TABLE,
    check_description,
)

_STACK = "other_software_stack"
# What the official checkers cannot do without, and what is allowed in it.
_ASKED_FOR = {
    **{name: ", ".join(TABLE[name]["values"]) for name in ("division", "status")},
    **dict.fromkeys(COUNTS, "a number"),
}
# Seconds per command; nvidia-smi is slow on a node whose driver is not resident.
_TIMEOUT = 60
_GIGABYTES = {"MB": 1 / 1024, "GB": 1, "TB": 1024}
_GPU_QUERY = (
    "name",
    "memory.total",
    "clocks.max.sm",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "driver_version",
)
# Memory type by part of the accelerator's name, since nvidia-smi does not report it. The first
# match counts.
_MEMORY = TABLE["accelerator_memory_configuration"]["by_name"]
# Libraries: environment variable with the version in NGC images, and pip packages that contain
# them.
_VERSIONS = TABLE[_STACK]["versions"]
_EVERY = (*FIELDS, *ASKED)
_OF_RUN = "cuda", "cudnn", "nccl", "python"  # versions in environment.json


@dataclass(frozen=True)
class Description:
    """Fields of a system, and the source of each value."""

    fields: dict[str, Any]
    sources: dict[str, str]

    @property
    def blanks(self) -> list[str]:
        """Blank fields for which the submission rules require a value."""
        wanted = [name for name, required in FIELDS.items() if required]
        return [name for name in wanted if self.fields[name] in BLANK]


def describe(
    given: Sequence[tuple[str, Mapping[str, Any]]], machine: Machine
) -> Description:
    """Fills in the description. ``given``: (source, fields), by priority; ``machine`` is probed for
    the rest.
    """
    layers = [*given, ("this machine", probe(machine))]
    fields: dict[str, Any] = {}
    sources: dict[str, str] = {}
    stack: dict[str, str] = {}
    others: dict[str, Any] = {}
    # Reversed, so that the first source of a value wins; a blank hides nothing.
    for source, values in reversed(layers):
        for name in values:
            value = _value(name, values[name])
            if name not in _EVERY:
                # Fields of other tools in the file that is updated are kept.
                others[name] = values[name]
            elif value not in BLANK:
                fields[name], sources[name] = value, source
                stack |= value if isinstance(value, dict) else {}
    if isinstance(fields.get(_STACK), dict):
        fields[_STACK] = stack
    if fields.get("accelerators_per_node") == "0":
        # The official checker requires these fields of systems without accelerators as well.
        for name in FIELDS:
            if name.startswith("accelerator_") and name not in fields:
                fields[name], sources[name] = "N/A", "no accelerator"
    whole = {name: fields.get(name, "") for name in FIELDS} | others
    whole |= {name: fields[name] for name in ASKED if name in fields}
    return Description(
        whole, {name: sources[name] for name in _EVERY if name in fields}
    )


def _value(name: str, value: Any) -> Any:
    """A value as a string, or the same if it is blank; the software stack may be an object of
    strings.
    """
    if name == _STACK and isinstance(value, Mapping):
        return {text(key): text(value[key]) for key in value if value[key] not in BLANK}
    return value if value in BLANK else text(value)


def from_run(folder: Path) -> dict[str, Any]:
    """Fields from environment.json and config.json of a run. Raises ReviewError."""
    record = folder / "environment.json"
    environment, packages = read_json(record), read_json(record, "packages")
    mlperf = read_json(folder / "config.json", "mlperf")
    if not environment:
        why = "no such file, or not JSON; give a folder of results/"
        raise ReviewError(f"{record}: {why}")
    # PyTorch is the framework, not part of the stack.
    torch = packages.pop("torch", None)
    versions = {name: environment.get(name) for name in _OF_RUN} | packages
    facts: dict[str, Any] = {
        "submitter": mlperf.get("organization"),
        "division": mlperf.get("division"),
        "number_of_nodes": mlperf.get("num_nodes"),
        "framework": torch and f"PyTorch {torch}",
        _STACK: {f"{name}_version": versions[name] for name in versions},
    }
    facts[_STACK]["kernel_version"] = environment.get("platform")
    # The trainer's default, which is no answer.
    if facts["submitter"] == "unknown":
        del facts["submitter"]
    gpus = environment.get("gpus")
    if isinstance(gpus, list) and gpus:
        facts["accelerators_per_node"] = len(gpus)
        facts["accelerator_model_name"] = gpus[0]
    return facts


def known(fields: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Copy of the fields. Raises ReviewError if one is unknown."""
    for name in fields:
        if name not in _EVERY:
            every = f"the fields are {', '.join(_EVERY)}"
            raise ReviewError(f"{where}: unknown field {text(name)!r}; {every}")
    return dict(fields)


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Parses FIELD=VALUE arguments. Raises ReviewError."""
    pairs = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            form = "expected FIELD=VALUE, such as --set cooling=air"
            raise ReviewError(f"--set {setting}: {form}")
        pairs[name.strip()] = value.strip()
    return known(pairs, "--set")


def write(description: Description, path: Path) -> None:
    """Writes the file if our rules and the official checker accept it. Raises ReviewError."""
    if path.suffix != ".json":
        form = "the name must end in .json, such as systems/DGXH100.json"
        raise ReviewError(f"{path}: {form}")
    if re.search(r"\s|^\.", path.name):
        form = (
            "the official checkers allow neither spaces nor a leading dot in the name"
        )
        raise ReviewError(f"{path}: {form}")
    fields = description.fields
    asked = [
        f"{name} ({allowed})"
        for name, allowed in _ASKED_FOR.items()
        if fields[name] in BLANK
    ]
    if asked:
        how = "give each with --set FIELD=VALUE, or a file with --answers"
        raise ReviewError(f"{path}: not known: {', '.join(asked)}: {how}")
    content = json.dumps(fields, indent=2) + "\n"
    # On a draft: a mistake must not replace a description that was right.
    with tempfile.TemporaryDirectory(prefix="review-system-") as folder:
        draft = Path(folder) / path.name
        draft.write_text(content, encoding="utf-8")
        for finding in check_description(draft, DEFAULT_RULESET):
            if finding.severity == ERROR:
                raise ReviewError(f"{finding.key} {finding.message}: {finding.hint}")
        outcome = official.check_system(draft, DEFAULT_RULESET)
        if not outcome.passed:
            why = outcome.crash or "; ".join(outcome.messages)
            raise ReviewError(f"the official checker rejects it: {why}")
    write_whole(path, content)


class Machine:
    """This machine's commands, files, environment and packages, which tests replace."""

    environment: Mapping[str, str] = os.environ

    def run(self, *command: str) -> str:
        """Output of a command; empty if it is missing, fails or hangs."""
        # lscpu and others translate their labels otherwise.
        arguments = ["env", "LC_ALL=C", *command]
        with contextlib.suppress(ReviewError):
            return run(arguments, "", _TIMEOUT).decode("utf-8", "replace")
        return ""

    def read(self, path: str | Path) -> str:
        """A file's text; empty if it cannot be read."""
        with contextlib.suppress(OSError):
            return Path(path).read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def paths(self, folder: str, pattern: str) -> list[str]:
        """Paths in a folder, sorted."""
        return sorted(map(str, Path(folder).glob(pattern)))

    def version(self, package: str) -> str:
        """Version of a Python package; empty if it is not installed."""
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
        return ""


def probe(machine: Machine) -> dict[str, Any]:
    """All fields that can be probed, without blank ones."""
    accelerators, driver = _accelerators(machine)
    facts = {
        **_host(machine),
        **_memory(machine),
        **_storage(machine),
        **_network(machine),
        **accelerators,
        **_software(machine, driver),
    }
    return {name: value for name, value in facts.items() if value not in BLANK}


def _search(pattern: str, content: str) -> str:
    """The first group of the first line that matches; empty if none does."""
    match = re.search(pattern, content, re.MULTILINE)
    return match[1].strip() if match else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"{number}x {name}" for name, number in Counter(names).items())


def _host(machine: Machine) -> dict[str, str]:
    labels = machine.run("lscpu")

    def listed(label: str) -> str:
        return _search(rf"^\s*{re.escape(label)}:(.*)", labels)

    def number(label: str) -> int:
        return int(listed(label)) if listed(label).isdigit() else 0

    names = (
        machine.read(f"/sys/class/dmi/id/{name}")
        for name in ("sys_vendor", "product_name")
    )
    sockets, cores = number("Socket(s)"), number("Core(s) per socket")
    threads = number("Thread(s) per core") or 1
    return {
        # Boards without a name call themselves "To Be Filled By O.E.M.".
        "system_name": " ".join(
            name for name in names if name and "To Be Filled" not in name
        ),
        "host_processor_model_name": listed("Model name"),
        "host_processors_per_node": str(sockets or ""),
        "host_processor_core_count": str(cores or ""),
        "host_processor_vcpu_count": str(cores * threads or ""),
    }


def _memory(machine: Machine) -> dict[str, str]:
    """Capacity from the modules if dmidecode can read them (as root), else from /proc/meminfo."""
    total, modules = 0.0, []
    for block in machine.run("dmidecode", "-t", "memory").split("\n\n"):
        size = re.search(r"^\s*Size: (\d+) (MB|GB|TB)$", block, re.MULTILINE)
        if size and "Memory Device" in block:
            speed = _search(r"^\s*Configured (?:Memory|Clock) Speed: (\d+)", block)
            gigabytes = int(size[1]) * _GIGABYTES[size[2]]
            kind = _search(r"^\s*Type: (.*)$", block) or "memory"
            modules.append(f"{gigabytes:g} GB {kind}{speed and '-'}{speed}")
            total += gigabytes
    kilobytes = _search(r"^MemTotal:\s*(\d+) kB", machine.read("/proc/meminfo"))
    # Somewhat less than is installed, as the kernel keeps a part.
    total = total or int(kilobytes or 0) / 2**20
    capacity = f"{total / 1024:.3g} TB" if total >= 1000 else f"{total:.4g} GB"
    return {
        "host_memory_capacity": capacity if total else "",
        "host_memory_configuration": _listed(modules),
    }


def _storage(machine: Machine) -> dict[str, str]:
    kinds, disks = [], []
    listed = machine.run("lsblk", "-d", "-b", "-J", "-o", "NAME,TYPE,SIZE,ROTA")
    # An older lsblk has no -J, or lacks a field: then the fields stay blank.
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        for disk in json.loads(listed)["blockdevices"]:
            name, size = str(disk["name"]), int(disk["size"])
            # Disks in memory and drives without a medium store no data set.
            other = name.startswith(("zram", "ram", "loop", "nbd", "fd", "sr"))
            if disk["type"] != "disk" or size <= 0 or other:
                continue
            kind = "HDD" if str(disk.get("rota")).lower() in ("1", "true") else "SSD"
            kinds.append("NVMe SSD" if name.startswith("nvme") else kind)
            # Decimal, as disks are sold.
            large = f"{size / 1e12:.3g} TB" if size >= 1e12 else f"{size / 1e9:.0f} GB"
            disks.append(f"{large} {kinds[-1]}")
    return {
        "host_storage_type": ", ".join(dict.fromkeys(kinds)),
        "host_storage_capacity": _listed(disks),
    }


def _network(machine: Machine) -> dict[str, str]:
    """InfiniBand and RoCE ports with their rates from sysfs, as ibstat prints them; else Ethernet
    ports.
    """
    ports = []
    for path in map(Path, machine.paths("/sys/class/infiniband", "*/ports/*/rate")):
        speed = re.match(r"(\d+) Gb/sec", machine.read(str(path)))
        # A port without a cable is no network of the run.
        if speed and "ACTIVE" in machine.read(str(path.with_name("state"))):
            layer = machine.read(str(path.with_name("link_layer"))) or "InfiniBand"
            kind = "RoCE" if layer == "Ethernet" else layer
            ports.append(f"{kind} {speed[1]} Gb/s")
    # Only hardware has a device.
    for path in map(Path, () if ports else machine.paths("/sys/class/net", "*/device")):
        # Some drivers do not know the state of a port that works.
        if machine.read(str(path.with_name("operstate"))) in ("up", "unknown"):
            speed = re.match(r"[1-9]\d*", machine.read(str(path.with_name("speed"))))
            rate = f" {int(speed[0]) / 1000:g} Gb/s" if speed else ""
            ports.append(f"Ethernet{rate}")
    return {
        "host_networking": _listed(ports),
        "host_network_card_count": str(len(ports) or ""),
    }


def _accelerators(machine: Machine) -> tuple[dict[str, str], str]:
    """Fields of the accelerators, and the version of their driver."""
    query = f"--query-gpu={','.join(_GPU_QUERY)}"
    answer = machine.run("nvidia-smi", query, "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    # Anything else is a message of nvidia-smi.
    rows = [row for row in rows if len(row) == len(_GPU_QUERY)]
    # No answer is no proof that there is no accelerator: others have no nvidia-smi.
    if not rows:
        return {}, ""
    name, memory, clock, generation, lanes, driver = rows[0]
    names = [row[0] for row in rows]
    numbers = generation.isdigit() and lanes.isdigit()
    link = "PCIe" if len(rows) > 1 else "N/A (one accelerator)"
    listed = machine.run("nvidia-smi", "nvlink", "-s") if len(rows) > 1 else ""
    first = listed.split("GPU 1:")[0]
    if rates := [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", first)]:
        # Both directions.
        link = f"NVLink, {len(rates)} links, {2 * sum(rates):.0f} GB/s"
    kinds = (kind for part, kind in _MEMORY.items() if part in name)
    return {
        "accelerators_per_node": str(len(rows)),
        "accelerator_model_name": name if len(set(names)) == 1 else _listed(names),
        "accelerator_memory_capacity": f"{memory} MiB" if memory.isdigit() else "",
        "accelerator_frequency": f"{clock} MHz max" if clock.isdigit() else "",
        "accelerator_host_interconnect": f"PCIe Gen{generation} x{lanes}" * numbers,
        "accelerator_memory_configuration": next(kinds, ""),
        "accelerator_interconnect": link,
    }, driver


def _software(machine: Machine, driver: str) -> dict[str, Any]:
    stack = {}
    for name, (variable, *packages) in _VERSIONS.items():
        installed = filter(None, map(machine.version, packages))
        stack[name] = machine.environment.get(variable) or next(installed, "")
    python = machine.run("python3", "--version")
    stack["python_version"] = python.removeprefix("Python").strip()
    stack["kernel_version"] = machine.run("uname", "-sr").strip()
    stack["nvidia_kernel_driver"] = driver
    release = machine.environment.get("NVIDIA_PYTORCH_VERSION")
    torch = machine.version("torch")
    framework = f"NVIDIA PyTorch Release {release}" if release else f"PyTorch {torch}"
    os_release = machine.read("/etc/os-release")
    return {
        "framework": framework if release or torch else "",
        _STACK: {name: version for name, version in stack.items() if version},
        "operating_system": _search(r'^PRETTY_NAME="?([^"\n]*)', os_release),
    }
