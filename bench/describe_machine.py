"""The machine of the figures: GPU, its memory, clocks and driver, the versions, and what is missing for the kernels.

Prints one JSON line. "no_gpu" says why nothing can be measured; "missing", what Triton's kernels would fail for.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import torch
from command_line import Parser
from common import emit, gpu_state, machine

from bert.core.dist import why_no_gpu


def driver() -> str:
    """GPU and driver as nvidia-smi has them, whatever PyTorch says; empty without it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def missing_for_triton() -> list[str]:
    """What Triton needs to start a kernel and this machine lacks: it compiles a little C for each."""
    found = []
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "clang", "gcc", "cc") if name):
        found.append("a C compiler (gcc)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        found.append("Python.h (python3-dev)")
    try:
        importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        found.append("triton")
    return found


def describe() -> dict[str, Any]:
    """All of it."""
    described: dict[str, Any] = {"benchmark": "machine", "machine": machine(), "driver": driver()}
    described |= {"cpus": os.cpu_count(), "missing": missing_for_triton(), "no_gpu": why_no_gpu()}
    if not described["no_gpu"]:
        free, total = torch.cuda.mem_get_info()
        described |= {"memory_gib": round(total / 2**30, 1), "free_gib": round(free / 2**30, 1)}
    return described | {"clocks": gpu_state()}


def main() -> None:
    """Prints it."""
    Parser(__doc__).parse_args()
    emit(describe())


if __name__ == "__main__":
    main()
