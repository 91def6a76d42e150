"""Samples the power of this node. Usage: power_sampler.py FOLDER | check. Of the machine's own Python, from 3.6 on.

Writes lines TIME_MS,WATTS to FOLDER/NODE.csv until FOLDER/stop appears, its folder goes, or its parent ends:
    ipmi  the whole node, at the wall, from its power supplies (ipmitool dcmi; as root or by sudo)
    nvml  if that does not work, the GPUs only: not valid for a submission
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

NODE = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
INTERVAL = 1  # the power rules ask for a sample a second
IPMI = "ipmitool dcmi power reading"
NVML = "nvidia-smi --query-gpu=power.draw --format=csv,noheader,nounits"


def output(command: str) -> str:
    """Empty if the command fails."""
    quiet = subprocess.DEVNULL
    words = command.split()
    try:
        return subprocess.check_output(words, stdin=quiet, stderr=quiet).decode()
    except (OSError, subprocess.CalledProcessError):
        return ""


def ipmi() -> str:
    """Watts; empty if they are unknown."""
    text = output(IPMI) or output(f"sudo -n {IPMI}")
    found = re.search(r"Instantaneous power reading:\s*(\S+) Watts", text)
    return found.group(1) if found else ""


def nvml() -> str:
    watts = output(NVML).split()
    if not watts or not all(re.fullmatch(r"[0-9.]+", word) for word in watts):
        return ""
    return f"{sum(map(float, watts)):.1f}"


def sample(folder: Path, name: str) -> None:
    parent = os.getppid()
    with (folder / f"{NODE}.csv").open("w", buffering=1) as file:
        file.write(f"time_ms,watts_{name}\n")
        while folder.is_dir() and not (folder / "stop").exists():
            if os.getppid() != parent:
                return
            # Readings start at fixed intervals, however long each takes.
            begun = time.monotonic()
            watts = SOURCES[name]()
            if watts:
                file.write(f"{time.time() * 1000:.0f},{watts}\n")
            time.sleep(max(0, begun + INTERVAL - time.monotonic()))


SOURCES = {"ipmi": ipmi, "nvml": nvml}


def main(folder: str) -> None:
    works = [name for name, read in SOURCES.items() if read()]
    if not works:
        neither = f"{NODE}: neither {IPMI} (as root or by sudo -n)"
        sys.exit(f"{neither} nor nvidia-smi reports watts")
    if folder != "check":
        sample(Path(folder), works[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
