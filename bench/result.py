"""What every benchmark shares: timing in turns, and one JSON line that says where, when and with what it was run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = (
    "torch", "numpy", "numba", "scipy", "h5py", "tokenizers", "triton", "transformers", "mlperf-logging",
    "nvidia-dali-cuda130",
)  # fmt: skip


def emit(benchmark: str, figures: Mapping[str, Any], *, data: str, targets: Mapping[str, tuple[float, bool]]) -> None:
    """Prints the result as one JSON line.

    Args:
        benchmark: name of the script.
        figures: name -> value; lists of raw measurements are welcome.
        data: what it was measured on, such as "Wikipedia mix (synthetic)".
        targets: name of a figure -> (value to reach, whether more is better).
    """
    reached = {
        name: {"target": target, "measured": figures[name], "reached": (figures[name] >= target) == more_is_better
               or figures[name] == target}
        for name, (target, more_is_better) in targets.items()
    }  # fmt: skip
    line = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", *(os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:])]),
        "commit": _commit(),
        "data": data,
        "figures": figures,
        "targets": reached,
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(line))


def machine() -> dict[str, Any]:
    """Processor, CPUs this process may use, memory, load when asked, GPUs where torch is loaded and sees some."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        found["cuda"] = torch.version.cuda
    return found


def versions() -> dict[str, str]:
    """Python and the packages that figures depend on, those installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_seconds(function: Callable[[], object]) -> float:
    """User and system CPU seconds of a call, those of its child processes included; a shared machine's wall lies."""
    before = _cpu_time()
    function()
    return _cpu_time() - before


def wall_seconds(function: Callable[[], object]) -> float:
    """Wall time of a call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def in_turns(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    measure: Callable[[Callable[[], object]], float] = cpu_seconds,
) -> dict[str, list[float]]:
    """Seconds of each function, called in turns, so that what else the machine does falls on all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(measure(function))
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(spans) for name, spans in times.items()}


def _cpu_time() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:  # no git here
        return "unknown"
