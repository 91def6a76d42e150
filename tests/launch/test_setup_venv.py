"""launch/tools/setup_venv.sh in a virtual environment whose Python only writes down what it is asked."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON = """#!/usr/bin/env bash
case $* in
  *sysconfig*) echo {headers} ;;
  *requirements/dev.txt*) echo "WITH_EXTENSION=${{WITH_EXTENSION:-}} $PIP_USE_PEP517" >{log} ;;
esac
"""


@pytest.mark.parametrize(("headers", "wanted"), [(True, ""), (False, "0")])
def test_a_package_without_a_wheel_is_compiled_only_where_python_has_its_headers(
    headers: bool, wanted: str, tmp_path: Path
) -> None:
    python, log = tmp_path / "bin" / "python", tmp_path / "log"
    python.parent.mkdir()
    python.write_text(PYTHON.format(headers=tmp_path, log=log))
    python.chmod(0o755)
    python.with_name("cc").symlink_to(
        python
    )  # a compiler is there, whatever this machine has
    if headers:
        (tmp_path / "Python.h").touch()
    environment = {k: v for k, v in os.environ.items() if k != "WITH_EXTENSION"}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    command = [REPOSITORY / "launch/tools/setup_venv.sh", tmp_path, "dev"]
    subprocess.run(command, env=environment, check=True)
    assert log.read_text() == f"WITH_EXTENSION={wanted} 1\n"
