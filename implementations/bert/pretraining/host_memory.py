"""How much memory this machine, or the control group that the process is in, has."""

from __future__ import annotations

import os
from pathlib import Path


def capacity(root: Path = Path("/")) -> int:
    """Bytes that the processes of this node may have together: what the machine has, or a limit of a group (v1, v2).

    root: where /proc and /sys are.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(root)])


def _limits(root: Path) -> list[int]:
    """Of the process's group and those around it; in a container these are named from its own root."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:
            top, name = top / "memory", "memory.limit_in_bytes"
        below = Path(group.lstrip("/"))
        for folder in (below, *below.parents):
            try:
                text = (top / folder / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if text.isdigit():  # else "max"
                found.append(int(text))
    return found
