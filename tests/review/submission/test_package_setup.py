"""setup.sh, the script that a submission's reviewer runs first."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def setup(repository, tmp_path):
    """Runs a copy of setup.sh among fake tools; returns (exit code, stderr, commands that ran)."""
    shutil.copy(repository / "setup.sh", tmp_path)
    tools, calls = tmp_path / "bin", tmp_path / "calls"

    def tool(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "${{0##*/}} $*" >> {calls}\n')
        path.chmod(0o755)

    tool(tmp_path / "launch" / "tools" / "setup_venv.sh")

    def run(words="", have=""):
        for name in have.split():
            tool(tools / name)
        paths = filter(None, map(shutil.which, ("bash", "dirname")))
        needed = ":".join({str(Path(path).parent) for path in paths})
        hidden = {"docker", "enroot"} - {*have.split()}
        if any(shutil.which(name, path=needed) for name in hidden):
            pytest.skip(f"one of {hidden} lies beside bash and cannot be hidden")
        environment = {**os.environ, "PATH": f"{tools}:{needed}"}
        command = ["bash", str(tmp_path / "setup.sh"), *words.split()]
        options = {"capture_output": True, "text": True, "cwd": "/"}
        ran = subprocess.run(command, env=environment, **options)
        noted = calls.read_text().splitlines() if calls.exists() else []
        return ran.returncode, ran.stderr, noted

    return run


BUILD = "docker build -t {} ."
IMPORT = "enroot import -o mlperf-bert.sqsh dockerd://mlperf-bert"


@pytest.mark.parametrize(("words", "have", "calls"), [
    ("", "", ["setup_venv.sh .venv run"]),
    ("docker", "docker", [BUILD.format("mlperf-bert")]),
    ("docker mine:1", "docker", [BUILD.format("mine:1")]),
    ("enroot", "docker enroot", [BUILD.format("mlperf-bert"), IMPORT]),
])  # fmt: skip
def test_it_makes_the_environment_or_the_image_of_that_name(setup, words, have, calls):
    assert setup(words, have) == (0, "", calls)


@pytest.mark.parametrize(("words", "have", "says"), [
    ("apt", "", "apt"),
    ("docker", "", "docker is not"),
    ("enroot", "", "enroot is not"),
    ("enroot", "docker enroot", "mlperf-bert.sqsh exists"),  # it never overwrites
])  # fmt: skip
def test_what_cannot_work_is_a_one_line_error(setup, tmp_path, words, have, says):
    (tmp_path / "mlperf-bert.sqsh").touch()
    code, error, calls = setup(words, have)
    assert (code, error.count("\n"), calls) == (2, 1, [])
    assert error.startswith("setup: error: ")
    assert says in error
