"""Prints why a GPU belongs to this machine; nothing if none does. Usage: gpus.py ROOT, of /sys and /proc. Of
the machine's own Python, from 3.6 on.
"""

import os
import re
import sys
from pathlib import Path

ENV = os.environ
# 3D controllers and accelerators of all makers, displays of NVIDIA; AMD's MI100 and MI200 are "other displays".
CLASSES = r"\w*:0x(0302|12)|0x10de:0x0300|0x1002:0x0380"


def text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def why(root: Path) -> str:
    for device in root.glob("sys/bus/pci/devices/*"):
        words = text_of(device / "vendor"), text_of(device / "class")
        if re.match(CLASSES, ":".join(words)):
            return f"one is on the PCI bus ({device.name})"
    # In a virtual machine or a container the bus may not be visible.
    if (root / "proc/driver/nvidia").exists():
        return "the NVIDIA driver is loaded"
    # The next two: a broken driver or a lost card must fail the test, not turn it into one of CPUs.
    if any(ENV.get(f"SLURM_{name}") for name in ("JOB_GPUS", "GPUS_ON_NODE", "GPUS")):
        return "Slurm allocated some"
    if ENV.get("DGXSYSTEM") and ENV.get("DEVICE") != "auto":
        return f"the config of {ENV['DGXSYSTEM']} is for GPUs"
    return ""


if __name__ == "__main__":
    print(why(Path(sys.argv[1])))
