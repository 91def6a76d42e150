"""What a run is computed with: the machine, its libraries and our own code."""

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from common.files import sources_of

# Not torch, whose metadata lacks the build (+cu130).
_PACKAGES = "triton", "numpy", "h5py", "mlperf-logging"
# All of this repository's; a process imports some of them.
OURS = "bert", "certify", "common", "finetune", "input_preprocessing", "review"


def code() -> str:
    """Digest of the Python files and tables of those of our packages that this process has imported.

    By content, not by commit: a checkout may be edited, and an image has no repository. Where they
    were imported from, as a node may find a stale copy of one of them first.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in OURS:
        if name not in sys.modules:
            continue
        for folder in map(Path, sys.modules[name].__path__):
            for path in sources_of(folder):
                digest.update(f"{name}/{path.relative_to(folder)} ".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def libraries(device: torch.device) -> dict[str, Any]:
    """Versions of PyTorch and, on GPUs, of what it has loaded: containers of one run may differ."""
    cuda = device.type == "cuda"  # a run on CPUs leaves GPUs alone
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Host, GPUs if the run is on them, versions and the commit of the code."""
    loaded = libraries(device)
    packages: dict[str, str | None] = {"torch": loaded.pop("torch")}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    git = [
        "git",
        "-C",
        str(Path(__file__).resolve().parent),
        "describe",
        "--always",
        "--dirty",
        # The whole hash, and -dirty for a tree that is not what the hash says.
        "--abbrev=40",
    ]
    try:
        commit: str | None = subprocess.run(
            git, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        ]
        if device.type == "cuda"
        else [],
        **loaded,
        "python": platform.python_version(),
        "packages": packages,
        "git_commit": commit,
    }
