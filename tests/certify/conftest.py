"""What befell this machine earlier, such as processes killed for want of memory, decides no test."""

import os

import pytest


@pytest.fixture(autouse=True)
def own_kernel_log(tmp_path_factory, monkeypatch):
    """Programs find a dmesg whose log has no faults."""
    program = tmp_path_factory.getbasetemp() / "quiet/dmesg"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\necho '[    1.000000] Linux'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
