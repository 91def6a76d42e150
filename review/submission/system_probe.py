"""What a machine says of itself, in the words of a system description. A probe that finds nothing yields no field."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_TIMEOUT = 60  # seconds for one command; nvidia-smi takes some on a node whose driver is not resident
_GPU_QUERY = ("name", "memory.total", "clocks.max.sm", "pcie.link.gen.max", "pcie.link.width.max", "driver_version")
# Memory of an accelerator, by what its name contains: nvidia-smi does not tell. The first that matches counts.
_MEMORY_TYPES = (
    ("GB300", "HBM3e"),
    ("GB200", "HBM3e"),
    ("GH200 480GB", "HBM3"),
    ("GH200", "HBM3e"),
    ("B300", "HBM3e"),
    ("B200", "HBM3e"),
    ("H200", "HBM3e"),
    ("H100 PCIe", "HBM2e"),
    ("H100 NVL", "HBM3"),
    ("H100", "HBM3"),
    ("A100", "HBM2e"),
    ("A30", "HBM2"),
    ("V100", "HBM2"),
    ("RTX 5090", "GDDR7"),
    ("RTX 4090", "GDDR6X"),
    ("RTX 3090", "GDDR6X"),
    ("L40", "GDDR6"),
    ("A6000", "GDDR6"),
    ("A5000", "GDDR6"),
)
# Versions that NGC images keep in the environment, and the packages that pip brings the same libraries in.
_ENVIRONMENT = {
    "cuda_version": "CUDA_VERSION",
    "cudnn_version": "CUDNN_VERSION",
    "nccl_version": "NCCL_VERSION",
    "cublas_version": "CUBLAS_VERSION",
    "trt_version": "TRT_VERSION",
    "openmpi_version": "OPENMPI_VERSION",
    "ofed_version": "MOFED_VERSION",
}
_PACKAGES = {
    "cudnn_version": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "nccl_version": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "cublas_version": ("nvidia-cublas", "nvidia-cublas-cu12"),
    "cuda_version": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "triton_version": ("triton", "pytorch-triton"),
    "transformer_engine_version": ("transformer-engine",),
    "flash_attn_version": ("flash-attn",),
}


class Machine:
    """This machine's commands, files, environment and packages; tests put others in their place."""

    environment: Mapping[str, str] = os.environ

    def run(self, *command: str) -> str:
        """What a command prints; empty where it is not there, fails or hangs."""
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            ran = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return ran.stdout

    def read(self, path: str) -> str:
        """A file's text; empty where it cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def paths(self, folder: str, pattern: str) -> list[str]:
        """Paths in a folder, sorted."""
        return sorted(str(path) for path in Path(folder).glob(pattern))

    def version(self, package: str) -> str:
        """A Python package's version; empty where it is not installed."""
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""


def probe(machine: Machine) -> dict[str, Any]:
    """Every field that the machine tells, by its name in the description; without blanks."""
    found: dict[str, Any] = {}
    for part in (_name, _processor, _memory, _storage, _network, _accelerators, _software):
        found |= part(machine)
    stack = {**found["other_software_stack"], "nvidia_kernel_driver": found.pop("nvidia_kernel_driver", "")}
    found["other_software_stack"] = {name: value for name, value in stack.items() if value}
    return {name: value for name, value in found.items() if value not in ("", {}, None)}


def _name(machine: Machine) -> dict[str, str]:
    words = [machine.read(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return {"system_name": " ".join(word for word in words if word and "To Be Filled" not in word)}


def _processor(machine: Machine) -> dict[str, str]:
    pairs = [line.split(":", 1) for line in machine.run("lscpu").splitlines() if ":" in line]
    listed = {key.strip(): value.strip() for key, value in pairs}
    sockets, cores = _count(listed.get("Socket(s)")), _count(listed.get("Core(s) per socket"))
    threads = _count(listed.get("Thread(s) per core"))
    found = {"host_processor_model_name": listed.get("Model name", "")}
    if sockets:
        found["host_processors_per_node"] = str(sockets)
        found["host_processor_interconnect"] = _processor_link(sockets, listed.get("Vendor ID", ""))
    if cores:
        found["host_processor_core_count"] = str(cores)
        found["host_processor_vcpu_count"] = str(cores * (threads or 1))
    levels = [(name, listed.get(f"{name} cache", "")) for name in ("L1d", "L1i", "L2", "L3")]
    found["host_processor_caches"] = ", ".join(f"{name} {size}" for name, size in levels if size)
    found["host_processor_frequency"] = _frequency(listed, machine)
    return found


def _count(value: str | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0


def _processor_link(sockets: int, vendor: str) -> str:
    if sockets == 1:
        return "N/A (one processor)"
    return {"GenuineIntel": "UPI", "AuthenticAMD": "Infinity Fabric"}.get(vendor, "")


def _frequency(listed: Mapping[str, str], machine: Machine) -> str:
    try:
        highest = float(listed.get("CPU max MHz", "").replace(",", "."))
        return f"{highest / 1000:.2f} GHz max"
    except ValueError:
        pass
    running = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", machine.read("/proc/cpuinfo"), re.MULTILINE)
    return f"{max(map(float, running)) / 1000:.2f} GHz" if running else ""


def _memory(machine: Machine) -> dict[str, str]:
    """Capacity from the modules where dmidecode may read them (it needs root), else from /proc/meminfo."""
    modules = []
    for block in machine.run("dmidecode", "-t", "memory").split("\n\n"):
        size = re.search(r"^\s*Size: (\d+) (MB|GB|TB)$", block, re.MULTILINE)
        if size and "Memory Device" in block:
            kind = re.search(r"^\s*Type: (.*)$", block, re.MULTILINE)
            speed = re.search(r"^\s*(?:Configured Memory|Configured Clock) Speed: (\d+)", block, re.MULTILINE)
            gigabytes = int(size[1]) * {"MB": 1 / 1024, "GB": 1, "TB": 1024}[size[2]]
            name = (kind[1] if kind else "memory") + (f"-{speed[1]}" if speed else "")
            modules.append((gigabytes, name))
    if modules:
        total = sum(gigabytes for gigabytes, _ in modules)
        counted = Counter(f"{gigabytes:g} GB {name}" for gigabytes, name in modules)
        return {"host_memory_capacity": _gigabytes(total), "host_memory_configuration": _listed(counted)}
    kilobytes = re.search(r"^MemTotal:\s*(\d+) kB", machine.read("/proc/meminfo"), re.MULTILINE)
    return {"host_memory_capacity": _gigabytes(int(kilobytes[1]) / 2**20)} if kilobytes else {}


def _gigabytes(value: float) -> str:
    return f"{value / 1024:.3g} TB" if value >= 1000 else f"{value:.0f} GB" if value >= 10 else f"{value:.1f} GB"


def _listed(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{number}x {name}" for name, number in counted.items())


def _storage(machine: Machine) -> dict[str, str]:
    try:
        listed = json.loads(machine.run("lsblk", "-d", "-b", "-J", "-o", "NAME,TYPE,SIZE,ROTA,TRAN"))
        disks = [disk for disk in listed["blockdevices"] if _is_disk(disk)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    counted = Counter((_capacity(int(disk["size"])), _disk_type(disk)) for disk in disks)
    return {
        "host_storage_type": ", ".join(dict.fromkeys(kind for _, kind in counted)),
        "host_storage_capacity": _listed({f"{size} {kind}": number for (size, kind), number in counted.items()}),
    }


def _is_disk(disk: Mapping[str, Any]) -> bool:
    ignored = str(disk["name"]).startswith(("zram", "ram", "loop", "nbd", "fd", "sr"))
    return disk["type"] == "disk" and int(disk["size"]) > 0 and not ignored


def _disk_type(disk: Mapping[str, Any]) -> str:
    name, link = str(disk["name"]), disk.get("tran") or ""
    if name.startswith("nvme") or link == "nvme":
        return "NVMe SSD"
    if name.startswith(("vd", "xvd")):  # the host hides what lies beneath, and reports any disk as rotating
        return "virtual disk"
    rotating = str(disk.get("rota")).lower() in ("1", "true")
    return (
        ("HDD" if rotating else "SSD")
        if link in ("", "sata")
        else f"{str(link).upper()} {'HDD' if rotating else 'SSD'}"
    )


def _capacity(size: int) -> str:
    """Decimal units, as disks are sold."""
    return f"{size / 1e12:.3g} TB" if size >= 1e12 else f"{size / 1e9:.0f} GB"


def _network(machine: Machine) -> dict[str, str]:
    """InfiniBand and RoCE ports with their rates from sysfs, which is what ibstat prints; else Ethernet ports."""
    ports = []
    for path in machine.paths("/sys/class/infiniband", "*/ports/*/rate"):
        rate, layer = machine.read(path), machine.read(str(Path(path).with_name("link_layer")))
        speed = re.match(r"(\d+) Gb/sec", rate)
        if speed and "ACTIVE" in machine.read(str(Path(path).with_name("state"))):
            ports.append(f"{'RoCE' if layer == 'Ethernet' else layer or 'InfiniBand'} {speed[1]} Gb/s")
    if not ports:
        ports = _ethernet(machine)
    return {"host_networking": _listed(Counter(ports)), "host_network_card_count": str(len(ports)) if ports else ""}


def _ethernet(machine: Machine) -> list[str]:
    ports = []
    for path in machine.paths("/sys/class/net", "*/device"):  # only hardware has one
        folder = str(Path(path).parent)
        speed = machine.read(f"{folder}/speed")
        if machine.read(f"{folder}/operstate") not in ("up", "unknown"):
            continue
        ports.append(f"Ethernet {int(speed) / 1000:g} Gb/s" if speed.isdigit() and int(speed) > 0 else "Ethernet")
    return ports


def _accelerators(machine: Machine) -> dict[str, str]:
    query = ("nvidia-smi", f"--query-gpu={','.join(_GPU_QUERY)}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in machine.run(*query).splitlines()]
    rows = [row for row in rows if len(row) == len(_GPU_QUERY)]
    if not rows:
        return {"accelerators_per_node": "0"}
    name, memory, clock, generation, lanes, driver = rows[0]
    found = {"accelerators_per_node": str(len(rows)), "accelerator_model_name": _models(rows)}
    if memory.isdigit():
        found["accelerator_memory_capacity"] = f"{memory} MiB"
    if clock.isdigit():
        found["accelerator_frequency"] = f"{clock} MHz max"
    if generation.isdigit() and lanes.isdigit():
        found["accelerator_host_interconnect"] = f"PCIe Gen{generation} x{lanes}"
    found["accelerator_memory_configuration"] = next((kind for part, kind in _MEMORY_TYPES if part in name), "")
    return found | _accelerator_links(machine, len(rows)) | {"nvidia_kernel_driver": driver}


def _models(rows: Sequence[Sequence[str]]) -> str:
    counted = Counter(row[0] for row in rows)
    return rows[0][0] if len(counted) == 1 else _listed(counted)


def _accelerator_links(machine: Machine, number: int) -> dict[str, str]:
    if number == 1:
        return {"accelerator_interconnect": "N/A (one accelerator)", "accelerator_interconnect_topology": "N/A"}
    first = machine.run("nvidia-smi", "nvlink", "-s").split("GPU 1:")[0]
    rates = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", first)]
    if not rates:
        return {"accelerator_interconnect": "PCIe"}
    found = {"accelerator_interconnect": f"NVLink, {len(rates)} links, {2 * sum(rates):.0f} GB/s"}  # both directions
    rows = [line.split() for line in machine.run("nvidia-smi", "topo", "-m").splitlines()]
    links = [cell for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) for cell in row[1 : number + 1]]
    if len(links) == number * number and all(re.fullmatch(r"X|NV\d+", link) for link in links):
        found["accelerator_interconnect_topology"] = "NVLink between all pairs"
    return found


def _software(machine: Machine) -> dict[str, Any]:
    stack = {name: machine.environment.get(variable, "") for name, variable in _ENVIRONMENT.items()}
    for name, packages in _PACKAGES.items():
        stack[name] = stack.get(name) or _first(machine.version(package) for package in packages)
    stack["python_version"] = machine.run("python3", "--version").removeprefix("Python").strip()
    stack["kernel_version"] = machine.run("uname", "-sr").strip()
    release = machine.environment.get("NVIDIA_PYTORCH_VERSION")
    torch = machine.version("torch")
    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', machine.read("/etc/os-release"), re.MULTILINE)
    return {
        "framework": f"NVIDIA PyTorch Release {release}" if release else f"PyTorch {torch}" if torch else "",
        "other_software_stack": stack,
        "operating_system": system[1].strip() if system else "",
    }


def _first(values: Iterable[str]) -> str:
    return next((value for value in values if value), "")
