"""What befell this machine earlier, such as processes killed for want of memory, decides no test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def quiet_dmesg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dmesg whose log has no faults."""
    program = tmp_path_factory.mktemp("quiet") / "dmesg"
    program.write_text("#!/bin/sh\necho '[    1.000000] Linux'\n")
    program.chmod(0o755)
    return program.parent


@pytest.fixture(autouse=True)
def own_kernel_log(quiet_dmesg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{quiet_dmesg}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
