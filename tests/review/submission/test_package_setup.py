"""setup.sh, the script that a submission's reviewer runs first."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def setup(repository, tmp_path):
    """Runs a copy of setup.sh among fake tools; returns (exit code, stderr, commands that ran)."""
    shutil.copy(repository / "setup.sh", tmp_path)
    (tmp_path / "launch" / "tools").mkdir(parents=True)
    tools = tmp_path / "bin"
    tools.mkdir()
    calls = tmp_path / "calls"

    def tool(path: Path) -> None:
        path.write_text(f'#!/bin/bash\necho "${{0##*/}} $*" >> {calls}\n')
        path.chmod(0o755)

    tool(tmp_path / "launch" / "tools" / "setup_venv.sh")

    def run(*arguments, have=()):
        for name in have:
            tool(tools / name)
        paths = filter(None, map(shutil.which, ("bash", "dirname")))
        needed = ":".join({str(Path(path).parent) for path in paths})
        hidden = {"docker", "enroot"} - set(have)
        if any(shutil.which(name, path=needed) for name in hidden):
            pytest.skip(f"one of {hidden} lies beside bash and cannot be hidden")
        environment = {**os.environ, "PATH": f"{tools}:{needed}"}
        command = ["bash", str(tmp_path / "setup.sh"), *arguments]
        options = {"capture_output": True, "text": True, "cwd": "/"}
        ran = subprocess.run(command, env=environment, **options)
        noted = calls.read_text().splitlines() if calls.exists() else []
        return ran.returncode, ran.stderr, noted

    return run


def test_without_arguments_it_makes_the_environment_beside_itself(setup):
    assert setup() == (0, "", ["setup_venv.sh .venv run"])


def test_docker_builds_the_image_of_that_name(setup):
    assert setup("docker", have=["docker"])[2] == ["docker build -t mlperf-bert ."]
    *_, last = setup("docker", "mine:1", have=["docker"])[2]
    assert last == "docker build -t mine:1 ."


def test_enroot_imports_what_docker_built_and_never_overwrites(setup, tmp_path):
    code, _, calls = setup("enroot", have=["docker", "enroot"])
    assert code == 0
    assert calls == [
        "docker build -t mlperf-bert .",
        "enroot import -o mlperf-bert.sqsh dockerd://mlperf-bert",
    ]
    (tmp_path / "mlperf-bert.sqsh").touch()
    code, error, after = setup("enroot", have=["docker", "enroot"])
    assert code == 2
    assert "mlperf-bert.sqsh exists" in error
    assert after == calls


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["apt"], "apt"), (["docker"], "docker is not"), (["enroot"], "enroot is not")],
)
def test_what_cannot_work_is_a_one_line_error(setup, arguments, says):
    code, error, calls = setup(*arguments)
    assert code == 2
    assert error.startswith("setup: error: ")
    assert says in error
    assert error.count("\n") == 1
    assert calls == []
