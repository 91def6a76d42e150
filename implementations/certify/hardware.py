"""Parts of a node and the fault history of its devices: from NVML, /proc, /sys and the kernel log.

What a driver or a system does not report is left out. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from certify.telemetry import Gpus
from common.files import text_of
from review.acceptance.schema import NODE, TABLES, Facts

_MIB = 1 << 20

_GPU: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu),
    "memory MiB": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total // _MIB,
    "VBIOS": lambda nvml, gpu: nvml.nvmlDeviceGetVbiosVersion(gpu),
    "PCIe generation": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    "PCIe lanes": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
    "NVLinks": lambda nvml, gpu: _count_nvlinks(nvml, gpu),
    "NVLink version": lambda nvml, gpu: nvml.nvmlDeviceGetNvLinkVersion(gpu, 0),
    "ECC": lambda nvml, gpu: nvml.nvmlDeviceGetEccMode(gpu)[0],
    "MIG": lambda nvml, gpu: nvml.nvmlDeviceGetMigMode(gpu)[0],
    "power limit W": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) // 1000,
}
FAULTS: dict[str, Callable[[Any, Any], int]] = {
    "uncorrected memory errors before the test": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
        gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
    ),
    "rows remapped after uncorrected errors": lambda nvml, gpu: nvml.nvmlDeviceGetRemappedRows(gpu)[
        1
    ],
    "row remappings that wait for a reset": lambda nvml, gpu: nvml.nvmlDeviceGetRemappedRows(gpu)[
        2
    ],
    "row remappings that failed": lambda nvml, gpu: nvml.nvmlDeviceGetRemappedRows(gpu)[3],
    "pages retired after uncorrected errors": lambda nvml, gpu: len(
        nvml.nvmlDeviceGetRetiredPages(gpu, nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    ),
    "page retirements that wait for a reset": lambda nvml, gpu: (
        nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)
    ),
}
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")


def inventory(gpus: Gpus, root: Path = Path("/")) -> Facts:
    """Parts of this node; the same on all nodes of one kind."""
    cpuinfo = text_of(root / "proc/cpuinfo").splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    memory = re.search(r"MemTotal: +(\d+) kB", text_of(root / "proc/meminfo"))
    facts: dict[str, Any] = {"kernel": platform.release(), "CPUs": len(models) or os.cpu_count()}
    facts |= {
        "CPU": (models or [""])[0],
        "memory GiB": round(int(memory[1]) / 2**20, 1) if memory else None,
    }
    found: Facts = {NODE: _reported(facts)}
    if gpus.nvml:
        devices = _gpu_facts(gpus, _GPU)
        driver = gpus.ask(lambda nvml: nvml.nvmlSystemGetDriverVersion())
        found[NODE] |= _reported({"driver": driver, "GPUs": len(devices)})
        found |= devices
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        words = {
            name: text_of(port / name).rpartition(": ")[2]
            for name in ("state", "rate", "link_layer")
        }
        found[f"{port.parents[1].name}/{port.name}"] = _reported(words)
    for card in sorted((root / "sys/class/net").glob("*/device")):
        words = {
            "state": text_of(card.parent / "operstate"),
            "Mbit/s": text_of(card.parent / "speed"),
        }
        found[card.parent.name] = _reported(words)
    return found


def health(gpus: Gpus, root: Path = Path("/")) -> Facts:
    """Fault counts by device: of GPUs and in the kernel log, those of the past; of network ports, running counters."""
    found = _gpu_facts(gpus, FAULTS)
    for port in (root / "sys/class/infiniband").glob("*/ports/*"):
        counts = {name: _count(port / "counters" / name) for name in TABLES["port_counters"]}
        found[f"{port.parents[1].name}/{port.name}"] = _reported(counts)
    for card in (root / "sys/class/net").glob("*/device"):
        found[card.parent.name] = _reported(
            {"carrier_changes": _count(card.parent / "carrier_changes")}
        )
    xids = Counter(number for _, number in _XID.findall(_kernel_log()))
    found[NODE] = {f"Xid {number} in the kernel's log": count for number, count in xids.items()}
    return found


def _kernel_log() -> str:
    """Empty if this user may not read it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["dmesg"], capture_output=True, timeout=20, check=True).stdout.decode(
            errors="replace"
        )
    return ""


def _gpu_facts(gpus: Gpus, questions: dict[str, Callable[[Any, Any], Any]]) -> Facts:
    count = gpus.ask(lambda nvml: nvml.nvmlDeviceGetCount()) if gpus.nvml else 0
    found: Facts = {}
    for number in range(count or 0):
        gpu = gpus.ask(lambda nvml, number: nvml.nvmlDeviceGetHandleByIndex(number), number)
        asked = {} if gpu is None else questions
        found[f"GPU {number}"] = _reported(
            {name: gpus.ask(question, gpu) for name, question in asked.items()}
        )
    return found


def _count_nvlinks(nvml: Any, gpu: Any) -> int:
    up = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(nvml.NVMLError):
            up += nvml.nvmlDeviceGetNvLinkState(gpu, link)
    return up


def _count(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdigit() else None


def _reported(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts without the missing ones; bytes decoded."""
    kept = {
        name: value.decode() if isinstance(value, bytes) else value for name, value in facts.items()
    }
    return {name: value for name, value in kept.items() if value not in (None, "")}
