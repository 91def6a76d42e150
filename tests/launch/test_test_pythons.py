"""make test-pythons: every supported Python once, each in its own environment; one failure fails
all.
"""

from __future__ import annotations

import os
import platform
import sys

import pytest

from .captured import captured

VERSION = platform.python_version()


def program(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def run(repository, tmp_path):
    """Runs the script with a make that records its arguments and fails if they contain the given
    word.
    """

    def run(*arguments, fails="nothing"):
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        record = f'echo "PYTHON=${{PYTHON:-}} $*" >>{tmp_path}/calls; [[ "$*" != *{fails}* ]]'
        program(tools / "make", record)
        environment = {
            **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": "python-of-the-launcher",
        }  # fmt: skip
        script = repository / "tests" / "pythons.py"
        done = captured([script, *map(str, arguments)], env=environment)
        calls = tmp_path / "calls"
        return (
            done.returncode, done.stdout.splitlines(), done.stderr, calls.read_text() if calls.exists() else "",
        )  # fmt: skip

    return run


@pytest.fixture
def other(tmp_path):
    """A Python that claims to be 3.10.0."""
    return program(tmp_path / "python3.10", f"echo 3.10.0 {tmp_path}/python3.10")


def test_every_supported_version_is_listed_once(run, other, tmp_path):
    old = program(tmp_path / "python3.9", "exit 0")  # prints nothing: not supported
    shim = program(
        tmp_path / "python3.12",
        "echo 'pyenv: python3.12: command not found' >&2; exit 127",
    )
    status, lines, _, calls = run(
        "--list", sys.executable, old, shim, sys.executable, tmp_path / "none", other
    )
    assert status == 0
    assert [line.split()[0] for line in lines] == ["3.10.0", VERSION]
    assert lines[1].split()[1] == os.path.realpath(sys._base_executable)
    assert calls == ""


def test_each_python_is_tested_in_its_own_environment(run, other):
    status, lines, _, calls = run(sys.executable, other)
    assert status == 0
    folder = ".cache/pythons/3.10.0"
    first, second, *rest = calls.splitlines()
    assert first == f"PYTHON={other} VENV={folder} {folder}/.dev-ready"
    assert (
        second == f"PYTHON= VENV={folder} test"
    )  # the launch scripts under test read PYTHON
    assert [f"VENV=.cache/pythons/{VERSION}" in line for line in rest] == [True, True]
    assert [line.split()[:3] for line in lines[-2:]] == [["test_pythons:", "3.10.0", "passed"],
                                                         ["test_pythons:", VERSION, "passed"]]  # fmt: skip


@pytest.mark.parametrize("fails", ["3.10.0/.dev-ready", "3.10.0*test"])
def test_one_failure_fails_all_but_the_others_are_tested(run, other, fails):
    status, lines, _, calls = run(sys.executable, other, fails=fails)
    assert status == 1
    assert [line.split()[2] for line in lines[-2:]] == ["FAILED", "passed"]
    assert f"VENV=.cache/pythons/{VERSION} test" in calls


def test_no_supported_python_is_an_error(run, tmp_path):
    status, _, error, _ = run(tmp_path / "none")
    assert status == 2
    assert "no Python 3.10 to 3.14 found" in error
