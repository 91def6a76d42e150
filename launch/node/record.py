"""Prints the hardware of this node: GPUs and their topology, network cards, CPUs, limits. Each line begins with the
node's name, since many nodes print at once. Missing tools are skipped. Of the machine's own Python, from 3.6 on.
"""

import os
import shutil
import subprocess

NODE = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
TOOLS = """
nvidia-smi --query-gpu=index,name,uuid,pci.bus_id,vbios_version,driver_version,power.limit,clocks.max.sm --format=csv
nvidia-smi topo -m
ibv_devinfo
numactl --hardware
lscpu
uname -a
"""


def show(*words: str) -> None:
    # Tools may hang with a broken driver.
    done = subprocess.run(
        ("timeout", "30", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        text += f"exit status {done.returncode}"
    for line in (f"== {' '.join(words)}", *text.splitlines()):
        print(f"{NODE}: {line}", flush=True)


if __name__ == "__main__":
    for tool in TOOLS.strip().splitlines():
        if shutil.which(tool.split()[0]):
            show(*tool.split())
    show("bash", "-c", "ulimit -Hn -Hl")
