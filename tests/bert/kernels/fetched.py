"""Packages that slow tests fetch from the package index, kept under .cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def fetched(target: Path, module: str, *packages: str) -> Path:
    """The folder of the packages, of which ``module`` is one's; skips where there is no index."""
    if not (target / module / "__init__.py").is_file():
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target"]
        command += [str(target), *packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.returncode:
            pytest.skip(
                f"{packages} cannot be had here: {done.stderr.splitlines()[-1]}"
            )
    return target
