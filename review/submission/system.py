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
    fields: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def add(source: str, values: Mapping[str, Any]) -> None:
        for name in (*FIELDS, *ASKED):
            # A blank in one source does not hide what a later one knows.
            if name not in fields and values.get(name) not in BLANK:
                fields[name], sources[name] = _value(name, values[name]), source

    layers = [*given, ("this machine", probe(machine))]
    for source, values in layers:
        add(source, values)
    # The official checker requires these fields of systems without accelerators as well.
    if fields.get("accelerators_per_node") == "0":
        add(
            "no accelerator",
            {name: "N/A" for name in FIELDS if name.startswith("accelerator_")},
        )
    if isinstance(fields.get(_STACK), dict):
        # Merged over all sources; reversed, so that the first source of an entry wins.
        stacks = [values.get(_STACK) for _, values in reversed(layers)]
        merged = [stack for stack in stacks if isinstance(stack, Mapping)]
        stack: dict[str, Any] = {}
        for entries in merged:
            stack |= entries
        fields[_STACK] = _value(_STACK, stack)
    # Fields of other tools in the file that is updated are kept.
    described: dict[str, Any] = {}
    for _, values in reversed(given):
        described |= {name: values[name] for name in values if name not in FIELDS}
    described |= {name: fields[name] for name in ASKED if name in fields}
    known = {name: sources[name] for name in (*FIELDS, *ASKED) if name in sources}
    return Description(
        {name: fields.get(name, "") for name in FIELDS} | described, known
    )


def _value(name: str, value: Any) -> Any:
    """A value as a string; the software stack may also be an object of strings."""
    if name == _STACK and isinstance(value, Mapping):
        known = {key: entry for key, entry in value.items() if entry not in (None, "")}
        return {text(key): text(entry) for key, entry in known.items()}
    return value if isinstance(value, str) else text(value)


def from_run(folder: Path) -> dict[str, Any]:
    """Fields from environment.json and config.json of a run. Raises ReviewError."""
    environment = read_json(folder / "environment.json")
    mlperf = read_json(folder / "config.json", "mlperf")
    if not environment:
        raise ReviewError(
            f"{folder / 'environment.json'}: no such file, or not JSON; give a folder of results/"
        )
    packages = read_json(folder / "environment.json", "packages")
    gpus = environment.get("gpus")
    stack = {
        f"{name}_version": environment.get(name)
        for name in ("cuda", "cudnn", "nccl", "python")
    }
    # PyTorch is the framework, not part of the stack.
    stack |= {f"{name}_version": packages[name] for name in packages if name != "torch"}
    stack["kernel_version"] = environment.get("platform")
    facts: dict[str, Any] = {
        # The trainer's default, which is no answer.
        "submitter": None
        if mlperf.get("organization") == "unknown"
        else mlperf.get("organization"),
        "division": mlperf.get("division"),
        "number_of_nodes": mlperf.get("num_nodes"),
        "framework": f"PyTorch {packages['torch']}" if packages.get("torch") else None,
        "other_software_stack": {name: value for name, value in stack.items() if value},
    }
    if isinstance(gpus, list) and gpus:
        facts |= {
            "accelerators_per_node": str(len(gpus)),
            "accelerator_model_name": text(gpus[0]),
        }
    return facts


def known(fields: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Copy of the fields. Raises ReviewError if one is unknown."""
    every = (*FIELDS, *ASKED)
    if unknown := [name for name in fields if name not in every]:
        raise ReviewError(
            f"{where}: unknown field {text(unknown[0])!r}; the fields are {', '.join(every)}"
        )
    return dict(fields)


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Parses FIELD=VALUE arguments. Raises ReviewError."""
    pairs = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ReviewError(
                f"--set {setting}: expected FIELD=VALUE, such as --set cooling=air"
            )
        pairs[name.strip()] = value.strip()
    return known(pairs, "--set")


def write(description: Description, path: Path) -> None:
    """Writes the file if our rules and the official checker accept it. Raises ReviewError."""
    if path.suffix != ".json":
        raise ReviewError(
            f"{path}: the name must end in .json, such as systems/DGXH100.json"
        )
    if any(character.isspace() for character in path.name) or path.name.startswith("."):
        raise ReviewError(
            f"{path}: the official checkers allow neither spaces nor a leading dot in the name"
        )
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
        findings = check_description(draft, DEFAULT_RULESET)
        if error := next(
            (finding for finding in findings if finding.severity == ERROR), None
        ):
            raise ReviewError(f"{error.key} {error.message}: {error.hint}")
        outcome = official.check_system(draft, DEFAULT_RULESET)
        if not outcome.passed:
            raise ReviewError(
                f"the official checker rejects it: {outcome.crash or '; '.join(outcome.messages)}"
            )
    write_whole(path, content)


class Machine:
    """This machine's commands, files, environment and packages, which tests replace."""

    environment: Mapping[str, str] = os.environ

    def run(self, *command: str) -> str:
        """Output of a command; empty if it is missing, fails or hangs."""
        with contextlib.suppress(ReviewError):
            # lscpu and others translate their labels otherwise.
            return run(["env", "LC_ALL=C", *command], "", _TIMEOUT).decode(
                "utf-8", "replace"
            )
        return ""

    def read(self, path: str) -> str:
        """A file's text; empty if it cannot be read."""
        with contextlib.suppress(OSError):
            return Path(path).read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def paths(self, folder: str, pattern: str) -> list[str]:
        """Paths in a folder, sorted."""
        return sorted(str(path) for path in Path(folder).glob(pattern))

    def version(self, package: str) -> str:
        """Version of a Python package; empty if it is not installed."""
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
        return ""


def probe(machine: Machine) -> dict[str, Any]:
    """All fields that can be probed, without blank ones."""
    accelerators, software = _accelerators(machine), _software(machine)
    # Found along with the GPUs, but part of the software.
    if driver := accelerators.pop("nvidia_kernel_driver", ""):
        software["other_software_stack"]["nvidia_kernel_driver"] = driver
    facts = {
        **_host(machine),
        **_memory(machine),
        **_storage(machine),
        **_network(machine),
        **accelerators,
        **software,
    }
    return {name: value for name, value in facts.items() if value not in BLANK}


def _search(pattern: str, content: str) -> str:
    """The first group of the first line that matches; empty if none does."""
    match = re.search(pattern, content, re.MULTILINE)
    return match[1].strip() if match else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"{number}x {name}" for name, number in Counter(names).items())


def _host(machine: Machine) -> dict[str, str]:
    words = [
        machine.read(f"/sys/class/dmi/id/{name}")
        for name in ("sys_vendor", "product_name")
    ]
    listed = {}
    for line in machine.run("lscpu").splitlines():
        key, _, value = line.partition(":")
        listed[key.strip()] = value.strip()
    sockets, cores, threads = (
        int(count) if (count := listed.get(key, "")).isdigit() else 0
        for key in ("Socket(s)", "Core(s) per socket", "Thread(s) per core")
    )
    links = {"GenuineIntel": "UPI", "AuthenticAMD": "Infinity Fabric"}
    link = (
        "N/A (one processor)"
        if sockets == 1
        else links.get(listed.get("Vendor ID", ""), "")
    )
    caches = [
        f"{name} {size}"
        for name in ("L1d", "L1i", "L2", "L3")
        if (size := listed.get(f"{name} cache"))
    ]
    frequency = ""
    with contextlib.suppress(ValueError):
        frequency = f"{float(listed.get('CPU max MHz', '').replace(',', '.')) / 1000:.2f} GHz max"
    return {
        # Boards without a name call themselves "To Be Filled By O.E.M.".
        "system_name": " ".join(
            word for word in words if word and "To Be Filled" not in word
        ),
        "host_processor_model_name": listed.get("Model name", ""),
        "host_processors_per_node": str(sockets or ""),
        "host_processor_interconnect": link if sockets else "",
        "host_processor_core_count": str(cores or ""),
        "host_processor_vcpu_count": str(cores * (threads or 1) or ""),
        "host_processor_caches": ", ".join(caches),
        "host_processor_frequency": frequency,
    }


def _memory(machine: Machine) -> dict[str, str]:
    """Capacity from the modules if dmidecode can read them (as root), else from /proc/meminfo."""
    total, modules = 0.0, []
    for block in machine.run("dmidecode", "-t", "memory").split("\n\n"):
        size = re.search(r"^\s*Size: (\d+) (MB|GB|TB)$", block, re.MULTILINE)
        if size and "Memory Device" in block:
            speed = _search(
                r"^\s*(?:Configured Memory|Configured Clock) Speed: (\d+)", block
            )
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
    try:
        listed = json.loads(
            machine.run("lsblk", "-d", "-b", "-J", "-o", "NAME,TYPE,SIZE,ROTA")
        )
        for disk in listed["blockdevices"]:
            name = str(disk["name"])
            size = int(disk["size"])
            # Disks in memory and drives without a medium store no data set.
            other = name.startswith(("zram", "ram", "loop", "nbd", "fd", "sr"))
            if disk["type"] != "disk" or size <= 0 or other:
                continue
            kind = "HDD" if str(disk.get("rota")).lower() in ("1", "true") else "SSD"
            kind = "NVMe SSD" if name.startswith("nvme") else kind
            # Decimal, as disks are sold.
            capacity = (
                f"{size / 1e12:.3g} TB" if size >= 1e12 else f"{size / 1e9:.0f} GB"
            )
            kinds.append(kind)
            disks.append(f"{capacity} {kind}")
    except (ValueError, KeyError, TypeError, AttributeError):
        # An older lsblk has no -J, or lacks a field: then the fields stay blank.
        return {}
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
        layer, state = (
            machine.read(str(path.with_name(name))) for name in ("link_layer", "state")
        )
        speed = re.match(r"(\d+) Gb/sec", machine.read(str(path)))
        # A port without a cable is no network of the run.
        if speed and "ACTIVE" in state:
            kind = "RoCE" if layer == "Ethernet" else layer or "InfiniBand"
            ports.append(f"{kind} {speed[1]} Gb/s")
    # Only hardware has a device.
    for path in map(Path, () if ports else machine.paths("/sys/class/net", "*/device")):
        megabits, state = (
            machine.read(str(path.with_name(name))) for name in ("speed", "operstate")
        )
        # Some drivers do not know the state of a port that works.
        if state in ("up", "unknown"):
            known = megabits.isdigit() and int(megabits) > 0
            ports.append(
                f"Ethernet {int(megabits) / 1000:g} Gb/s" if known else "Ethernet"
            )
    return {
        "host_networking": _listed(ports),
        "host_network_card_count": str(len(ports) or ""),
    }


def _accelerators(machine: Machine) -> dict[str, str]:
    query = (
        "nvidia-smi",
        f"--query-gpu={','.join(_GPU_QUERY)}",
        "--format=csv,noheader,nounits",
    )
    rows = []
    for line in machine.run(*query).splitlines():
        row = [cell.strip() for cell in line.split(",")]
        # Anything else is a message of nvidia-smi.
        if len(row) == len(_GPU_QUERY):
            rows.append(row)
    # No answer is no proof that there is no accelerator: others have no nvidia-smi.
    if not rows:
        return {}
    name, memory, clock, generation, lanes, driver = rows[0]
    names = [row[0] for row in rows]
    bus = (
        f"PCIe Gen{generation} x{lanes}"
        if generation.isdigit() and lanes.isdigit()
        else ""
    )
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
        "accelerator_host_interconnect": bus,
        "accelerator_memory_configuration": next(kinds, ""),
        "accelerator_interconnect": link,
        "nvidia_kernel_driver": driver,
    }


def _software(machine: Machine) -> dict[str, Any]:
    stack = {}
    for name, (variable, *packages) in _VERSIONS.items():
        stack[name] = machine.environment.get(variable) or next(
            filter(None, map(machine.version, packages)), ""
        )
    stack["python_version"] = (
        machine.run("python3", "--version").removeprefix("Python").strip()
    )
    stack["kernel_version"] = machine.run("uname", "-sr").strip()
    release = machine.environment.get("NVIDIA_PYTORCH_VERSION")
    torch = machine.version("torch")
    return {
        "framework": f"NVIDIA PyTorch Release {release}"
        if release
        else torch and f"PyTorch {torch}",
        "other_software_stack": {
            name: version for name, version in stack.items() if version
        },
        "operating_system": _search(
            r'^PRETTY_NAME="?([^"\n]*)', machine.read("/etc/os-release")
        ),
    }
