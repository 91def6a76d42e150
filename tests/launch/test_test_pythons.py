"""make test-pythons: every supported Python once, in its own environment; one failure fails all."""

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
    """Runs the script with a make that records its arguments and fails if they have that word."""

    def run(*arguments, status, fails="nothing"):
        tools, calls = tmp_path / "tools", tmp_path / "calls"
        tools.mkdir()
        calls.touch()
        record = f'echo "PYTHON=${{PYTHON:-}} $*" >>{calls}; [[ "$*" != *{fails}* ]]'
        program(tools / "make", record)
        own = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": "of-the-launcher"}
        line = [repository / "tests" / "pythons.py", *map(str, arguments)]
        done = captured(line, status, env=os.environ | own)
        return [line.split() for line in done.stdout.splitlines()], calls.read_text()

    return run


@pytest.fixture
def other(tmp_path):
    """A Python that claims to be 3.10.0."""
    return program(tmp_path / "python3.10", f"echo 3.10.0 {tmp_path}/python3.10")


def test_every_supported_version_is_listed_once(run, other, tmp_path):
    old = program(tmp_path / "python3.9", "exit 0")  # prints nothing: not supported
    shim = program(tmp_path / "python3.12", "echo not found >&2; exit 127")
    given = (sys.executable, old, shim, sys.executable, tmp_path / "none", other)
    lines, calls = run("--list", *given, status=0)
    assert [line[0] for line in lines] == ["3.10.0", VERSION]
    assert lines[1][1] == os.path.realpath(sys._base_executable)
    assert calls == ""


def test_each_python_is_tested_in_its_own_environment(run, other):
    lines, calls = run(sys.executable, other, status=0)
    folder = ".cache/pythons/3.10.0"
    first, second, *rest = calls.splitlines()
    assert first == f"PYTHON={other} VENV={folder} {folder}/.dev-ready"
    # The launch scripts under test read PYTHON.
    assert second == f"PYTHON= VENV={folder} test"
    assert [f"VENV=.cache/pythons/{VERSION}" in line for line in rest] == [True, True]
    passed = [["test_pythons:", version, "passed"] for version in ("3.10.0", VERSION)]
    assert [line[:3] for line in lines[-2:]] == passed


@pytest.mark.parametrize("fails", ["3.10.0/.dev-ready", "3.10.0*test"])
def test_one_failure_fails_all_but_the_others_are_tested(run, other, fails):
    lines, calls = run(sys.executable, other, status=1, fails=fails)
    assert [line[2] for line in lines[-2:]] == ["FAILED", "passed"]
    assert f"VENV=.cache/pythons/{VERSION} test" in calls


def test_no_supported_python_is_an_error(run, tmp_path):
    assert run(tmp_path / "none", status=2) == ([], "")
