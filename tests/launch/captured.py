"""A command's exit status and what it prints; its success is not asked for."""

from __future__ import annotations

import subprocess
from typing import Any


def captured(command: Any, **how: Any) -> subprocess.CompletedProcess[str]:
    how = {"check": False, "timeout": 240} | how
    return subprocess.run(command, capture_output=True, text=True, **how)
