"""Parts of a node, fault counts of its devices and its kernel log: from NVML, /proc, /sys and
dmesg.

A fact that was asked for and not answered is None: unknown, which the verdict never takes for good.
Imports no torch.
"""

import contextlib
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from certify.telemetry import ECC_ERRORS, Gpus, Question
from common.files import text_of
from review.acceptance.schema import NODE, TABLES, XID, Facts

_MIB = 1 << 20
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # display and 3D controllers


def _count_nvlinks(nvml: Any, gpu: Any) -> int:
    up = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        # A link that the GPU does not have raises; one that is down counts 0.
        with contextlib.suppress(nvml.NVMLError):
            up += nvml.nvmlDeviceGetNvLinkState(gpu, link)
    return up


def _remapped(nvml: Any, gpu: Any, number: int) -> int:
    """number: 0 after corrected errors, 1 after uncorrected ones, 2 pending, 3 failed."""
    return int(nvml.nvmlDeviceGetRemappedRows(gpu)[number])


_GPU: dict[str, Question] = {
    "name": "nvmlDeviceGetName",
    "memory MiB": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total // _MIB,
    "VBIOS": "nvmlDeviceGetVbiosVersion",
    "PCIe generation": "nvmlDeviceGetMaxPcieLinkGeneration",
    "PCIe lanes": "nvmlDeviceGetMaxPcieLinkWidth",
    "NVLinks": _count_nvlinks,
    "NVLink version": lambda nvml, gpu: nvml.nvmlDeviceGetNvLinkVersion(gpu, 0),
    "ECC": lambda nvml, gpu: nvml.nvmlDeviceGetEccMode(gpu)[0],
    "MIG": lambda nvml, gpu: nvml.nvmlDeviceGetMigMode(gpu)[0],
    "power limit W": lambda nvml, gpu: (
        nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) // 1000
    ),
    "SM MHz": "nvmlDeviceGetMaxClockInfo NVML_CLOCK_SM",
    "serial": "nvmlDeviceGetSerial",
    "UUID": "nvmlDeviceGetUUID",
}
FAULTS: dict[str, Question] = {
    # Aggregate: of the GPU's lifetime. Telemetry counts since the driver was loaded.
    "uncorrected memory errors": f"{ECC_ERRORS}_UNCORRECTED NVML_AGGREGATE_ECC",
    "rows remapped after uncorrected errors": partial(_remapped, number=1),
    "row remappings that wait for a reset": partial(_remapped, number=2),
    "row remappings that failed": partial(_remapped, number=3),
}


def inventory(gpus: Gpus, root: Path = Path("/")) -> Facts:
    """Parts of this node, the same on all nodes of one kind but for versions and serial numbers."""
    cpuinfo = text_of(root / "proc/cpuinfo").splitlines()
    models = [
        line.partition(":")[2].strip()
        for line in cpuinfo
        # ARM names no models, but numbers its parts.
        if line.startswith(("model name", "CPU part"))
    ]
    memory = re.search(r"MemTotal: +(\d+) kB", text_of(root / "proc/meminfo"))
    on_bus = count_on_bus(root)
    board = root / "sys/class/dmi/id"
    facts: dict[str, Any] = {
        "system": f"{text_of(board / 'sys_vendor')} {text_of(board / 'product_name')}".strip(),
        "serial": text_of(board / "product_serial"),
        "BIOS": text_of(board / "bios_version"),
        "BMC firmware": "".join(
            text_of(path / "firmware_revision")
            for path in (root / "sys/devices/platform").glob("ipmi_bmc*")
        ),
        "kernel": platform.release(),
        "CPUs": len(models) or os.cpu_count(),
        "CPU": (models or [""])[0],
        "memory GiB": round(int(memory[1]) / 2**20, 1) if memory else None,
        # Firmware reserves memory, and not the same on equal machines; the modules tell more.
        "memory modules": _modules(root),
        "GPUs on the PCI bus": on_bus,
    }
    parts: Facts = {NODE: facts}
    if gpus.nvml:
        devices = _gpu_facts(gpus, _GPU)
        facts["driver"] = gpus.ask("nvmlSystemGetDriverVersion")
        facts["GPUs"] = len(devices)
        parts |= devices
    # Without NVML, what a loaded driver runs is unknown; an absent one runs no GPU.
    elif on_bus:
        loaded = (root / "proc/driver/nvidia").exists()
        facts |= {"driver": None, "GPUs": None if loaded else 0}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        card = port.parents[1]
        parts[f"{card.name}/{port.name}"] = {
            # Reads "4: ACTIVE".
            "state": text_of(port / "state").rpartition(": ")[2],
            "rate": text_of(port / "rate"),
            "link_layer": text_of(port / "link_layer"),
            "type": text_of(card / "hca_type"),
            "firmware": text_of(card / "fw_ver"),
            "serial": _card_serial(card),
            "GUID": text_of(card / "node_guid"),
        }
    # Only physical interfaces have a device: no loopback, bridge or tunnel.
    for card in sorted((root / "sys/class/net").glob("*/device")):
        parts[card.parent.name] = {
            "state": text_of(card.parent / "operstate"),
            "Mbit/s": text_of(card.parent / "speed"),
        }
    parts |= _module_serials(root) or {"DIMM": {"serial": None}}
    # Says "BIOS Version: 96.10.6d.00.01".
    for path in (root / "proc/driver/nvidia-nvswitch/devices").glob("*/information"):
        firmware = text_of(path).rpartition(": ")[2]
        parts[f"NVSwitch {path.parent.name}"] = {"firmware": firmware}
    return {
        device: {name: _answer(value) for name, value in facts.items()}
        for device, facts in parts.items()
    }


def _modules(root: Path) -> str | None:
    """Memory modules as the memory controllers' driver counts them, such as "24 x 65536 MB"."""
    sizes = [
        text_of(path)
        for path in (root / "sys/devices/system/edac/mc").glob("mc*/dimm*/size")
    ]
    kinds = (f"{sizes.count(size)} x {size} MB" for size in sorted({*sizes}))
    return ", ".join(kinds) or None


def _module_serials(root: Path) -> Facts:
    """By the slot's name; empty where this user may not read the tables of the firmware (SMBIOS)."""
    modules: Facts = {}
    for path in sorted((root / "sys/firmware/dmi/entries").glob("17-*/raw")):
        with contextlib.suppress(OSError, IndexError):
            raw = path.read_bytes()
            # Strings follow the fixed part, and are named there by their numbers.
            texts = raw[raw[1] :].decode("latin-1").split("\0")
            slot, serial = (texts[raw[at] - 1].strip() for at in (0x10, 0x18))
            if any(raw[0x0C:0x0E]):  # its size; 0: an empty slot
                modules[f"DIMM {slot}"] = {"serial": serial}
    return modules


def _card_serial(card: Path) -> str | None:
    """In a PCI card's vital product data, which root alone may read."""
    found = re.search("SN(.)([ -~]+)", text_of(card / "device/vpd"), re.S)
    return found[2][: ord(found[1])].strip() if found else None


def bytes_sent(root: Path = Path("/")) -> dict[str, int]:
    """By network port, since it came up."""
    sent = {}
    for path in (root / "sys/class/infiniband").glob(
        "*/ports/*/counters/port_xmit_data"
    ):
        port = path.parents[1]
        sent[f"{port.parents[1].name}/{port.name}"] = 4 * (_count(path) or 0)  # words
    for card in (root / "sys/class/net").glob("*/device"):
        path = card.parent / "statistics/tx_bytes"
        sent[card.parent.name] = _count(path) or 0
    return sent


def count_on_bus(root: Path = Path("/")) -> int:
    """NVIDIA GPUs on the PCI bus, whether or not a driver runs them."""
    devices = (root / "sys/bus/pci/devices").glob("*")
    return sum(
        text_of(device / "vendor") == _NVIDIA
        and text_of(device / "class")[:6] in _GPU_CLASSES
        for device in devices
    )


def health(gpus: Gpus, root: Path = Path("/")) -> Facts:
    """Fault counts by device: of GPUs, those of their lifetime; of network ports, running
    counters.
    """
    counters = _gpu_facts(gpus, FAULTS)
    for port in (root / "sys/class/infiniband").glob("*/ports/*"):
        counts = {
            name: _count(port / "counters" / name) for name in TABLES["port_counters"]
        }
        counters[f"{port.parents[1].name}/{port.name}"] = counts
    for card in (root / "sys/class/net").glob("*/device"):
        counters[card.parent.name] = {
            "carrier_changes": _count(card.parent / "carrier_changes")
        }
    return counters


def kernel_log(root: Path = Path("/")) -> dict[str, Any]:
    """The log's faults as [seconds since boot, line], the times of its first and last line, which
    boot it is of, and the uptime as it was read.

    ``lines`` is None where the log cannot be read: this user may not, or the ring is empty, or no
    line has a time and none is a fault.
    """
    known = re.compile("|".join((XID, *TABLES["kernel_log"])))
    times, lines = [], []
    for line in _dmesg().splitlines():
        stamp = re.match(r"\[ *(\d+)[.,](\d+)\]", line)
        # A fault whose time cannot be read counts as one of the test.
        at = float(f"{stamp[1]}.{stamp[2]}") if stamp else math.inf
        if stamp:
            times.append(at)
        if known.search(line):
            lines.append([at, line.partition("] ")[2] or line])
    # The log is a ring: what came before its first line is lost, and the verdict must know.
    first, last = (times[0], times[-1]) if times else (0.0, 0.0)
    return {
        "boot": text_of(root / "proc/sys/kernel/random/boot_id"),
        # Seconds since boot; 0 if unknown.
        "read": float(text_of(root / "proc/uptime").partition(" ")[0] or 0),
        "first": first,
        "last": last,
        "lines": lines if times or lines else None,
    }


def _dmesg() -> str:
    """Empty if this user may not read it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["dmesg"], capture_output=True, timeout=20, check=True
        ).stdout.decode(errors="replace")
    return ""


def _gpu_facts(gpus: Gpus, questions: Mapping[str, Question]) -> Facts:
    count = gpus.ask("nvmlDeviceGetCount") if gpus.nvml else 0
    devices: Facts = {}
    for number in range(count or 0):
        # A GPU that fell off the bus has no handle: all of its facts are unknown.
        gpu = gpus.ask("nvmlDeviceGetHandleByIndex", number)
        devices[f"GPU {number}"] = {
            name: None if gpu is None else _answer(gpus.ask(question, gpu))
            for name, question in questions.items()
        }
    return devices


def _count(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdigit() else None


def _answer(value: Any) -> Any:
    """None if it says nothing; bytes decoded."""
    # Older versions of nvidia-ml-py return bytes.
    text = value.decode() if isinstance(value, bytes) else value
    # The kernel's speed of a port that is down is -1; the last condition is true of nan alone.
    return None if text in ("", "N/A", "-1") or text != text else text
